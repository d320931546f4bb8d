"""What is sampled, as exact distributions: every random choice is played through.

No text is counted: each way through the real code has the probability of its choices, and the ways
that end in one text add up.
"""

from collections import defaultdict

import torch

from eval.decoding import verification
from eval.decoding.drafters import bridged, drafter
from eval.decoding.loop import decode
from eval.decoding.verification import inverse_cdf, warp
from eval.prompts import Prompt


class Branches:
    """Plays a random program through: each run takes one path and `weight` is its probability.

    Of a batch the last row's choices are played through; the others' come from a fixed number.
    """

    def __init__(self):
        self.path, self.at, self.weight = [], 0, 1.0

    def sample(self, probabilities, generator=None):
        """In place of `verification.sample`."""
        fixed = torch.full((*probabilities.shape[:-1], 1), 0.4, dtype=torch.float64)
        chosen = inverse_cdf(probabilities, fixed)
        chosen.view(-1)[-1] = self.choose(probabilities.flatten(0, -2)[-1].double().tolist())
        return chosen

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
    for module in (drafter, bridged, verification):
        monkeypatch.setattr(module, "sample", branches.sample)
    return branches


def emitted(branches, target, drafter, texts, how, length):
    """The distribution of the answer to the last of `texts`, and its expected accepted and rejected
    tokens.
    """
    prompts = [Prompt(str(i), prompt="unused") for i in range(len(texts))]
    answers, accepted, rejected = defaultdict(float), 0.0, 0.0
    for _ in branches.paths():
        run = decode(target, drafter, prompts, texts, how, length)[-1]
        answers[tuple(run.tokens)] += branches.weight
        accepted += branches.weight * sum(run.accepted)
        rejected += branches.weight * (sum(run.drafted) - sum(run.accepted))
    return answers, accepted, rejected


@torch.inference_mode()
def of_target(target, ids, how):
    """The distribution of the target's own answers."""
    answers = {(): 1.0}
    for _ in range(how.max_new_tokens):
        longer = {}
        for tokens, weight in answers.items():
            context = torch.tensor([[*ids, *tokens]])
            cache = target.new_cache(1, context.shape[1])
            p = warp(target.forward(context, 0, cache, True)[0, -1], how.sampling).double()
            for i, value in enumerate((p / p.sum()).tolist()):
                if value > 0:
                    longer[*tokens, i] = weight * value
        answers = longer
    return answers


def total_variation(answers, others):
    return 0.5 * sum(abs(answers.get(k, 0) - others.get(k, 0)) for k in {*answers, *others})


def assert_exact(branches, target, drafter, texts, how, length):
    """The answer to the last text is distributed as the target's own; some drafts are rejected."""
    answers, accepted, rejected = emitted(branches, target, drafter, texts, how, length)
    assert abs(sum(answers.values()) - 1) < 1e-6
    assert total_variation(answers, of_target(target, texts[-1], how)) < 1e-5
    assert accepted > 0.1
    assert rejected > 0.1
