"""A sibling: a separate small model, trained over the target's ids."""

from distill.drafters.kind import DraftKind


class Sibling(DraftKind):
    made_from = ("sibling",)
    language_model = True


KIND = Sibling()
