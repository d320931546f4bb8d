"""What is sampled, as exact distributions: every random choice is played through.

No text is counted: each way through the real code has the probability of its choices, and the ways
that end in one text add up.
"""

from collections import defaultdict

import torch

from eval.decoding import verification
from eval.decoding.drafters import drafter
from eval.decoding.loop import decode
from eval.decoding.verification import warp
from eval.prompts import Prompt


class Branches:
    """Plays a random program through: each run takes one path and `weight` is its probability."""

    def __init__(self):
        self.path, self.at, self.weight = [], 0, 1.0

    def sample(self, probabilities, generator=None):
        """In place of `verification.sample`."""
        chosen = self.choose(probabilities.double().flatten().tolist())
        return torch.full(probabilities.shape[:-1], chosen)

    def choose(self, probabilities):
        options = [(i, p) for i, p in enumerate(probabilities) if p > 0]
        if self.at == len(self.path):
            self.path.append([0, len(options)])
        index, p = options[self.path[self.at][0]]
        self.at += 1
        self.weight *= p / sum(p for _, p in options)
        return index

    def paths(self):
        """Yields once a path, until all were taken."""
        while True:
            self.at, self.weight = 0, 1.0
            yield
            while self.path and self.path[-1][0] == self.path[-1][1] - 1:
                self.path.pop()
            if not self.path:
                return
            self.path[-1][0] += 1


def played(monkeypatch):
    """The branches of all that is sampled from now on."""
    branches = Branches()
    for module in (drafter, verification):
        monkeypatch.setattr(module, "sample", branches.sample)
    return branches


def emitted(branches, target, drafter, ids, how, draft_length):
    """The distribution of the output, and its expected accepted and rejected tokens."""
    prompt = Prompt("p", prompt="unused")
    outputs, accepted, rejected = defaultdict(float), 0.0, 0.0
    for _ in branches.paths():
        run = decode(target, drafter, prompt, ids, how, draft_length)
        outputs[tuple(run.tokens)] += branches.weight
        accepted += branches.weight * sum(run.accepted)
        rejected += branches.weight * (sum(run.drafted) - sum(run.accepted))
    return outputs, accepted, rejected


@torch.inference_mode()
def of_target(target, ids, how):
    """The distribution of the target's own outputs."""
    outputs = {(): 1.0}
    for _ in range(how.max_new_tokens):
        longer = {}
        for tokens, weight in outputs.items():
            context = torch.tensor([[*ids, *tokens]])
            cache = target.new_cache(1, context.shape[1])
            p = warp(target.forward(context, 0, cache, True)[0, -1], how.sampling).double()
            for i, value in enumerate((p / p.sum()).tolist()):
                if value > 0:
                    longer[*tokens, i] = weight * value
        outputs = longer
    return outputs


def total_variation(outputs, others):
    return 0.5 * sum(abs(outputs.get(k, 0) - others.get(k, 0)) for k in {*outputs, *others})
