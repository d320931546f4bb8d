"""A kind of draft that the toolkit does not know, as it is trained: one Medusa head."""

import dataclasses

from distill.drafters.medusa import Medusa


class OneHead(Medusa):
    def initialise(self, origin):
        return super().initialise(dataclasses.replace(origin, max_gamma=1))


KIND = OneHead()
