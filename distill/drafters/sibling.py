"""A sibling: a separate small model, trained over the target's ids."""

from distill.drafters.language_model import LanguageModel


class Sibling(LanguageModel):
    made_from = ("sibling",)


KIND = Sibling()
