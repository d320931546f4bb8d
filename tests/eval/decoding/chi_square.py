"""Sampled tokens against the target's own distribution, for kinds of drafters."""

import itertools

import torch
from scipy.stats import chi2


def assert_from_target(target, prompts, counts, runs, temperature):
    """The second and third token of `runs` answers to each prompt, as counted, are the target's.

    target: a decoder. counts: a prompt each [V, V]. A chi-square test at 1e-4.
    """

    def p(context):
        cache = target.new_cache(1, len(context))
        logits = target.forward(torch.tensor([context]), 0, cache, True)[0, -1]
        return (logits.double() / temperature).softmax(-1)

    for ids, seen in zip(prompts, counts, strict=True):
        expected = torch.zeros(seen.shape, dtype=torch.double)
        for a, b in itertools.product(range(len(seen)), repeat=2):
            expected[b] += runs * p(ids)[a] * p([*ids, a])[b] * p([*ids, a, b])
        common = expected >= 5
        statistic = float(((seen - expected)[common] ** 2 / expected[common]).sum())
        assert chi2.sf(statistic, int(common.sum()) - 1) > 1e-4
