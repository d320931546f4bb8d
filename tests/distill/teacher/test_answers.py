import dataclasses

import pytest
import torch
from scipy.stats import chi2

from align.checkpoint import Checkpoint
from align.errors import UserError
from distill.teacher import answers as module
from distill.teacher.answers import LocalTarget, open_store, to_answer, top_logprobs
from distill.teacher.store import Store
from eval.decoding.target import load_target
from eval.decoding.verification import argmax

PROMPTS = [[3, 4, 5], [6], [7, 8], [9, 10, 11, 12], [13, 2]]


@pytest.fixture(scope="module")
def target(folder):
    return load_target(Checkpoint.open(folder / "target"), torch.float32, "cpu", 60)


@pytest.fixture
def answered(job, target, tmp_path):
    """The answers to PROMPTS in a store in tmp_path, by a target that never stops."""

    def answer(prompts=PROMPTS, stops=(), decoder=None, folder=tmp_path, **changes):
        recipe = job(
            folder,
            **{
                "answer_temperature": 0.8,
                "answer_max_new_tokens": 12,
                "answer_batch_size": 2,
                "cache_top_k": 6,
                "seed": 1,
                **changes,
            },
        )
        asked = to_answer(prompts, recipe.answers_per_prompt, recipe.max_answers)
        stood_in = dataclasses.replace(target, decoder=decoder or target.decoder)
        store, settings = Store(folder / "store"), recipe.answer_settings(stops)
        return LocalTarget(store, settings, lambda: stood_in).answers(
            asked, recipe.train_on_prompts
        )

    return answer


def test_every_prompt_is_answered_with_the_distributions_the_tokens_came_from(answered, target):
    answers = answered()
    assert [answer.prompt_ids.tolist() for answer in answers] == PROMPTS
    for answer in answers:
        assert len(answer.response_ids) == 12
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[None]
        with torch.no_grad():
            logp = target.model(ids).logits[0, len(answer.prompt_ids) - 1 : -1].log_softmax(-1)
        top, ids = logp.topk(6, dim=-1)
        # fp16 on disk
        torch.testing.assert_close(answer.top_logprobs.float(), top, atol=5e-3, rtol=2e-3)
        assert (answer.top_ids == ids).float().mean() > 0.95  # the order of near-equals may differ


def test_with_train_on_prompts_all_tokens_but_the_first_are_taught(answered, target):
    plain, taught = answered(), answered(train_on_prompts=True)
    for one, other, prompt in zip(plain, taught, PROMPTS, strict=True):
        assert other.prompt_ids.tolist() == prompt[:1]
        whole = torch.cat([one.prompt_ids, one.response_ids])
        assert torch.equal(torch.cat([other.prompt_ids, other.response_ids]), whole)
        assert torch.equal(other.top_logprobs[len(prompt) - 1 :], one.top_logprobs)
        with torch.no_grad():
            logp = target.model(whole[None]).logits[0, :-1].log_softmax(-1)
        top, _ = logp.topk(6, dim=-1)
        torch.testing.assert_close(other.top_logprobs.float(), top, atol=5e-3, rtol=2e-3)


def same_answers(ours, theirs, tolerance=0.0):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.prompt_ids, other.prompt_ids)
        assert torch.equal(one.response_ids, other.response_ids)
        torch.testing.assert_close(
            one.top_logprobs, other.top_logprobs, atol=tolerance, rtol=tolerance
        )


def test_each_draw_of_a_prompt_is_another(answered):
    answers = answered(prompts=PROMPTS[:2], answers_per_prompt=6, max_answers=11)
    assert [answer.prompt_ids.tolist() for answer in answers] == (PROMPTS[:2] * 6)[:11]
    assert len({tuple(answer.response_ids.tolist()) for answer in answers}) == 11


def test_first_tokens_are_drawn_from_the_distribution_at_the_temperature(answered, target):
    draws = 2000
    keys = {"answer_temperature": 0.8, "answer_max_new_tokens": 2, "cache_top_k": 1}
    answers = answered([[3, 4, 5]], answers_per_prompt=draws, answer_batch_size=200, **keys)
    seen = torch.bincount(torch.stack([a.response_ids[0] for a in answers]), minlength=300)
    with torch.no_grad():
        logits = target.model(torch.tensor([[3, 4, 5]])).logits[0, -1]

    def likely(temperature):
        """The p-value of a chi-square test against the target's distribution there."""
        p = (logits / temperature).softmax(-1).double()
        often = p * draws >= 5  # all others are one class
        classes = [torch.cat([part[often], part[~often].sum()[None]]) for part in (seen, p * draws)]
        statistic = ((classes[0] - classes[1]) ** 2 / classes[1]).sum()
        return chi2.sf(float(statistic), len(classes[1]) - 1)

    assert likely(0.8) > 1e-3
    assert likely(1.0) < 1e-6


class Interrupted(Exception):
    pass


class Failing:
    """A decoder that is interrupted in so many steps."""

    def __init__(self, decoder, steps):
        self.decoder, self.steps, self.calls = decoder, steps, 0
        self.device, self.new_cache = decoder.device, decoder.new_cache
        self.embedding = decoder.embedding

    def forward(self, *args, **kwargs):
        self.calls += 1
        if self.calls > self.steps:
            raise Interrupted
        return self.decoder.forward(*args, **kwargs)


def test_what_is_there_is_not_answered_again(answered, target, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("distill.teacher.store.ANSWERS_PER_SHARD", 1)
        with pytest.raises(Interrupted):
            answered(decoder=Failing(target.decoder, 25))
    first = {path: path.read_bytes() for path in tmp_path.glob("store/shard-*")}
    assert 0 < len(first) < len(PROMPTS)
    resumed = answered()
    assert [answer.prompt_ids.tolist() for answer in resumed] == PROMPTS
    assert all(path.read_bytes() == content for path, content in first.items())
    same_answers(resumed, answered(folder=tmp_path / "straight"), 2e-3)


def test_of_more_prompts_in_another_order_only_the_new_ones_are_answered(
    answered, target, tmp_path
):
    first = answered()
    counted = Failing(target.decoder, 1000)
    more = [[7, 7, 7], *PROMPTS[::-1], [3, 4]]
    answers = answered(prompts=more, decoder=counted)
    assert [answer.prompt_ids.tolist() for answer in answers] == more
    texts = [[answer.text.tolist() for answer in some] for some in (first, answers)]
    assert texts[1][1:-1] == texts[0][::-1]
    assert counted.calls == 1 + 12  # both prompts are read at once, then a token at a time
    assert len(list(tmp_path.glob("store/shard-*"))) == 2


@pytest.fixture
def key(job, folder, tmp_path):
    """The key of the store of a recipe."""

    def make(**changes):
        keys = {"answer_temperature": 0.8, "seed": 1, "target": "target"} | changes
        recipe = job(tmp_path, **keys | {"target": str(folder / keys["target"])})
        target = Checkpoint.open(recipe.target)
        settings = recipe.answer_settings(target.stops)
        return open_store(settings, target, recipe.dtype, tmp_path).folder.name

    return make


@pytest.mark.parametrize(
    "changes",
    [
        {"target": "draft"},
        {"dtype": "bfloat16"},
        {"answer_temperature": 0.5},
        {"answer_max_new_tokens": 13},
        {"cache_top_k": 7},
        {"seed": 2},
    ],
)
def test_what_changes_an_answer_has_another_store(key, changes):
    assert key(**changes) != key()


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": 1.0, "num_train_epochs": 2.0, "loss": "tv", "name": "other"},
        {"answers_per_prompt": 2, "max_train_prompts": 2, "train_on_prompts": True},
        {"answer_batch_size": 3},
        {"target": "moved"},  # the same weights: of the ids of other prompts
    ],
)
def test_what_does_not_has_the_same(key, changes):
    assert key(**changes) == key()


def test_a_machine_with_another_target_is_named(key, monkeypatch):
    monkeypatch.setattr(module, "from_first", lambda own: own | {"target weights": "others"})
    with pytest.raises(UserError, match=r"weights of .*target"):
        key()


def test_greedy_answers_are_drawn_with_no_seed(key):
    assert key(answer_temperature=0.0, seed=2) == key(answer_temperature=0.0)


def test_each_of_several_ends_of_text_ends_an_answer_and_is_taught(answered, tmp_path):
    whole = [answer.response_ids.tolist() for answer in answered(folder=tmp_path / "whole")]
    ends = {whole[0][4], whole[1][7]}
    answers = answered(folder=tmp_path / "ended", stops=frozenset(ends))
    cut = [[i for i, token in enumerate(row) if token in ends][:1] for row in whole]
    for answer, row, at in zip(answers, whole, cut, strict=True):
        wanted = row[: at[0] + 1] if at else row  # the end included
        assert answer.response_ids.tolist() == wanted
        assert len(answer.top_ids) == len(answer.top_logprobs) == len(wanted)
    assert {answer.response_ids[-1].item() for answer in answers} > ends


def test_answers_that_are_all_empty_are_an_error(answered):
    with pytest.raises(ValueError, match="All 5 outputs"):
        answered(stops=frozenset(range(300)))


def test_of_equally_likely_tokens_the_generated_one_stands_first():
    logits = torch.randn(200, 1000).to(torch.bfloat16)
    for column in torch.randint(1000, (3, 200, 1)):
        logits.scatter_(1, column, logits.amax(-1, keepdim=True))
    ids, logprobs = top_logprobs(logits, 5)
    assert torch.equal(ids[:, 0], argmax(logits))
    assert (logprobs.diff(dim=-1) <= 0).all()


def test_what_the_top_tokens_lack_of_one_is_the_mass_of_the_rest():
    logits = torch.randn(3, 50)
    ids, logprobs = top_logprobs(logits, 7)
    p = logits.softmax(-1)
    torch.testing.assert_close(logprobs.exp(), p.gather(1, ids))
    torch.testing.assert_close(1 - logprobs.exp().sum(-1), p.sort().values[:, :-7].sum(-1))
