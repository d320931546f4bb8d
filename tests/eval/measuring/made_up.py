"""Prompts of a made-up vocabulary, and how they are decoded."""

from eval.decoding.loop import Decoding, decode
from eval.decoding.verification import Sampling
from eval.prompts import Prompt, PromptSet

VOCAB = 40
NEVER = frozenset({VOCAB + 1})  # a stop token that never comes
PROMPTS = [
    Prompt(f"p{i}", prompt="unused", group=group) for i, group in enumerate(("a", "a", None))
]
IDS = [[3, 14, 15], [9, 2], [6, 5, 35, 8]]
SET = PromptSet("made up", PROMPTS, IDS)
GREEDY = Decoding(Sampling(), NEVER, 20)


def baselines(target):
    """The greedy runs of the target alone."""
    rows = zip(PROMPTS, IDS, strict=True)
    return [decode(target.decoder, None, prompt, ids, GREEDY) for prompt, ids in rows]
