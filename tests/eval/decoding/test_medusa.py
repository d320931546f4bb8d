"""Medusa: each token is drafted by the head of its depth."""

import torch
import torch.nn.functional as F

from eval.decoding.drafters.medusa import MedusaDrafter
from eval.decoding.forward import KVCache
from eval.decoding.loop import Decoding, decode
from eval.decoding.verification import Sampling
from eval.decoding.weights import Product
from eval.prompts import Prompt

VOCAB, DEPTH, SIZE = 61, 4, 32
NEVER = frozenset({VOCAB + 1})
GREEDY = Decoding(Sampling(), NEVER, 40)
PROMPT = Prompt("p", prompt="unused")


class Counter:
    """A target whose text counts on, and whose state says which token it has just read."""

    device, dtype = torch.device("cpu"), torch.float32
    embedding = torch.zeros(VOCAB, VOCAB)

    def new_cache(self, rows, slots):
        return KVCache([torch.zeros(rows, 1, slots, 1)], [torch.zeros(rows, 1, slots, 1)])

    def forward(self, tokens, start, cache, last_only=False, states=None):
        for layer in states or ():
            states[layer] = F.one_hot(tokens, VOCAB).float()
        logits = 9.0 * F.one_hot((tokens + 1) % VOCAB, VOCAB).float()
        return logits[:, -1:] if last_only else logits


def perfect_medusa():
    """Head d turns the state's token into the one d places on, the output head adds one."""
    turned = [9.0 * torch.eye(VOCAB).roll(depth, 0) for depth in range(1, DEPTH + 1)]
    return MedusaDrafter(
        vocab_size=VOCAB,
        vocabulary={},
        layers=(2,),
        blocks=[Product(weight, None) for weight in turned],
        head=Product(torch.eye(VOCAB).roll(1, 0), None),
        embedding=torch.zeros(VOCAB, VOCAB),
    )


def test_drafts_that_know_what_follows_are_accepted_whole():
    for length in (2, DEPTH):
        run = decode(Counter(), perfect_medusa(), PROMPT, [3, 14, 15, 9, 2], GREEDY, length)
        assert run.accepted == run.drafted
        assert set(run.drafted[:-1]) == {length}
