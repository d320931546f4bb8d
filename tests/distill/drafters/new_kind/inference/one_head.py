"""A kind of draft that the toolkit does not know, as it drafts: one Medusa head."""

from eval.decoding.drafters.medusa import Medusa


class OneHead(Medusa):
    def head_size(self, config):
        return None  # nobody publishes it: its config.json is that of Medusa


FORMAT = OneHead()
