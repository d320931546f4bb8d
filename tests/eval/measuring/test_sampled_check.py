"""The check of sampled outputs: rare false alarms, and faults of verification that it finds."""

import numpy as np
import pytest
import torch

from eval.decoding import loop
from eval.decoding.loop import Decoding, decode
from eval.decoding.verification import Sampling, acceptance, choose, sample, verify, warp
from eval.measuring.losslessness import read_sampled
from eval.measuring.metrics import PromptSums, prompt_table
from eval.measuring.sampled_check import FALSE_ALARMS, sampled_check, sign_flip_p
from eval.prompts import Prompt, PromptSet
from tests.eval.measuring.made_up import IDS, NEVER, SET, baselines


def test_a_known_p_value():
    assert sign_flip_p(np.array([1.0, 2.0, -0.5])) == 4 / 8  # +++ and ++-, and their opposites
    assert sign_flip_p(np.zeros(20)) == 1
    assert sign_flip_p(np.full(13, 0.1)) == 2 / 2**13
    assert sign_flip_p(np.full(40, 0.1)) == 1e-4


@pytest.mark.parametrize(("prompts", "runs"), [(10, 2000), (40, 300)])
def test_honest_runs_fail_as_rarely_as_stated(prompts, runs):
    """Log-probabilities are skewed, and each prompt has its own mean."""
    rng = np.random.default_rng(1)
    drawn = -rng.gamma(rng.uniform(0.5, 3, (runs, prompts, 1)), 0.3, (runs, prompts, 2))
    p_values = np.array([sign_flip_p(run[:, 0] - run[:, 1]) for run in drawn])
    for level in (FALSE_ALARMS, 0.1):
        error = (level * (1 - level) / runs) ** 0.5
        assert abs((p_values < level).mean() - level) < 3 * error


def test_a_conversation_is_one_observation():
    """Four turns that differ alike are no four coincidences."""
    rows = [
        PromptSums(id=str(i), group="one", logprob=-1.0, baseline_logprob=-1.5) for i in range(4)
    ]
    assert sampled_check(rows).p_value == 1
    apart = [row.model_copy(update={"group": None}) for row in rows]
    assert sampled_check(apart).p_value == 2 / 2**4


def test_an_output_has_the_mean_of_its_tokens_log_probabilities(target, journal):
    """Outputs of other lengths are not compared by their lengths."""
    (run,) = runs = baselines(target)[:1]
    read_sampled(target.decoder, SET.first(1), {"target": runs}, journal)
    text = torch.tensor([IDS[0] + run.tokens])
    with torch.no_grad():
        logits = target.model(text[:, :-1]).logits[0, len(IDS[0]) - 1 :]
    chosen = logits.log_softmax(-1).gather(1, text[0, len(IDS[0]) :, None])
    assert run.logprob == pytest.approx(float(chosen.mean()), abs=1e-5)


def unverified(logits, tokens, q, sampling, generator, rule):
    return torch.tensor(len(tokens)), choose(logits[-1], sampling, generator)


def without_residual(logits, tokens, q, sampling, generator, rule):
    if len(tokens) == 0:
        return verify(logits, tokens, q, sampling, generator, rule)
    p = warp(logits, sampling)
    accepted = sample(acceptance(p, q, tokens, rule)[0], generator)
    return accepted, sample(p[accepted], generator)


def test_faults_of_verification_are_found(target, other, journal, monkeypatch):
    how, names = Decoding(Sampling(0.7), NEVER, 20, 1), [Prompt(str(i), "x") for i in range(40)]
    prompts = PromptSet("made up", names, [[i % 40, 7 * i % 40, 3] for i in range(40)])
    rows = list(zip(prompts.prompts, prompts.ids, strict=True))
    plain = [decode(target.decoder, None, *row, how) for row in rows]

    def check():
        runs = [decode(target.decoder, other, *row, how, 3) for row in rows]
        journal.results.clear()
        read_sampled(target.decoder, prompts, {"target": plain, "draft": runs}, journal)
        return sampled_check(prompt_table(runs, plain))

    assert check().p_value > FALSE_ALARMS
    for fault in (unverified, without_residual):
        monkeypatch.setattr(loop, "verify", fault)
        found = check()
        assert found.p_value < FALSE_ALARMS, fault
        assert found.prompts == 40
        assert found.difference.ci95[1] < 0
