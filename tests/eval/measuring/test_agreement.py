"""alpha, on tiny models whose answers are known."""

import dataclasses
from operator import eq

import pytest
import torch

from eval.decoding.drafters.lookup import looked_up, prompt_lookup
from eval.decoding.forward import PIECE
from eval.decoding.verification import Sampling
from eval.measuring.agreement import measure_agreement, target_texts
from eval.prompts import Prompt, PromptSet
from tests.eval.measuring.made_up import GREEDY, IDS, NEVER, SET, baselines

BY_ID = dict(zip(("p0", "p1", "p2"), IDS, strict=True))


def test_texts_are_the_targets_own_whatever_the_batch(target):
    assert target_texts(target, BY_ID, GREEDY) == [run.tokens for run in baselines(target)]


def test_sampled_texts_depend_on_the_prompts_id_alone(target):
    sampled = dataclasses.replace(GREEDY, sampling=Sampling(temperature=1.0))
    texts = target_texts(target, BY_ID, sampled)
    alone = [target_texts(target, {name: ids}, sampled)[0] for name, ids in BY_ID.items()]
    renamed = target_texts(target, {f"other {name}": ids for name, ids in BY_ID.items()}, sampled)
    assert texts == alone
    assert all(text != other for text, other in zip(texts, renamed, strict=True))


@pytest.mark.parametrize("piece", [PIECE, 7])
def test_alpha_is_one_for_the_target_itself_and_counts_agreeing_positions(
    target, own, other, journal, monkeypatch, piece
):
    monkeypatch.setattr("eval.measuring.agreement.PIECE", piece)
    texts = target_texts(target, BY_ID, GREEDY)
    drafters = {"own": own, "other": other}
    found = measure_agreement(target, drafters, SET, texts, GREEDY, journal)
    assert [row.alpha_sum for row in found["own"]] == [20.0] * 3
    assert [row.group for row in found["own"]] == ["a", "a", None]
    for row, ids, text in zip(found["other"], IDS, texts, strict=True):
        guesses = []
        for at in range(len(text)):
            context = torch.tensor([ids + text[:at]])
            logits = other.decoder.forward(context, 0, other.decoder.new_cache(1, 100))[0, -1]
            guesses.append(int(logits.argmax()))
        agreed = [guess == token for guess, token in zip(guesses, text, strict=True)]
        assert (row.alpha_sum, row.positions) == (sum(agreed), 20)


def test_logits_that_are_no_numbers_in_one_answer_are_refused(target, own, journal):
    texts = target_texts(target, BY_ID, GREEDY)
    rare = next(token for token in texts[1][:-1] if token not in [*IDS[0], *texts[0]])

    class Poisoned:
        device, new_cache = target.decoder.device, target.decoder.new_cache

        @staticmethod
        def forward(tokens, *args, **kwargs):
            logits = target.decoder.forward(tokens, *args, **kwargs)
            return logits.where(tokens[:, -logits.shape[1] :, None] != rare, float("nan"))

    poisoned = dataclasses.replace(target, decoder=Poisoned())
    with pytest.raises(ValueError, match="prompt p1"):
        measure_agreement(poisoned, {"own": own}, SET, texts, GREEDY, journal)
    assert len(journal.results["acceptance rate of own"]) == 1


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_sampled_alpha_is_the_overlap_of_the_distributions(target, other, journal, method):
    """A draft that is the argmax of q is accepted with the probability that p gives it."""
    texts = target_texts(target, BY_ID, GREEDY)
    how = dataclasses.replace(GREEDY, sampling=Sampling(0.7), draft_sample_method=method)
    found = measure_agreement(target, {"other": other}, SET, texts, how, journal)
    ids, text = IDS[0], texts[0]
    overlap = 0.0
    for at in range(len(text)):
        context = torch.tensor([ids + text[:at]])
        p, q = (
            (d.forward(context, 0, d.new_cache(1, 100))[0, -1].double() / 0.7).softmax(-1)
            for d in (target.decoder, other.decoder)
        )
        overlap += float(torch.minimum(p, q).sum() if method != "greedy" else p[q.argmax()])
    assert found["other"][0].alpha_sum == pytest.approx(overlap, abs=1e-4)


def test_where_nothing_is_drafted_nothing_is_accepted(target, journal):
    """An n-gram without a match has no likeliest token; id 0 is none."""
    names = [str(i) for i in range(40)]
    ids = [[i, 7 * i % 40] for i in range(40)]
    texts = target_texts(target, dict(zip(names, ids, strict=True)), GREEDY)
    prompts = PromptSet("made up", [Prompt(name, prompt="x") for name in names], ids)
    drafters = {"n-gram": prompt_lookup(target)}
    found = measure_agreement(target, drafters, prompts, texts, GREEDY, journal)
    undrafted = 0
    for row, before, text in zip(found["n-gram"], ids, texts, strict=True):
        positions, drafted = looked_up(before, text, NEVER)
        assert row.alpha_sum == sum(map(eq, (text[at] for at in positions), drafted))
        undrafted += sum(text[at] == 0 for at in {*range(len(text))} - {*positions})
    assert undrafted > 0
