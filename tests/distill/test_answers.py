import dataclasses

import pytest
import torch

from distill.answer_cache import CacheError
from distill.answers import answer_prompts, top_logprobs
from eval.decoding.target import load_target

PROMPTS = [[3, 4, 5], [6], [7, 8], [9, 10, 11, 12], [13, 2]]


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder / "target"), torch.float32, torch.device("cpu"), 60)


@pytest.fixture
def answered(job, target, tmp_path):
    """The answers to PROMPTS in tmp_path, by a target that never stops."""

    def answer(prompts=PROMPTS, stops=frozenset(), decoder=None, **changes):
        recipe = job(
            tmp_path,
            **{
                "answer_temperature": 0.8,
                "answer_max_new_tokens": 12,
                "answer_batch_size": 2,
                "cache_top_k": 6,
                "seed": 1,
                **changes,
            },
        )
        made = dataclasses.replace(target, stops=stops, decoder=decoder or target.decoder)
        return answer_prompts(recipe, prompts, made)

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


def test_what_is_there_is_not_answered_again(answered, target, tmp_path, monkeypatch):
    class Interrupted(Exception):
        pass

    class Failing:
        def __init__(self, decoder):
            self.decoder, self.calls = decoder, 0
            self.device, self.new_cache = decoder.device, decoder.new_cache
            self.embedding = decoder.embedding

        def forward(self, *args, **kwargs):
            self.calls += 1
            if self.calls > 25:
                raise Interrupted
            return self.decoder.forward(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr("distill.answers.ANSWERS_PER_SHARD", 1)
        with pytest.raises(Interrupted):
            answered(decoder=Failing(target.decoder))
    first = {path: path.read_bytes() for path in tmp_path.glob("answers/shard-*")}
    assert 0 < len(first) < len(PROMPTS)
    assert [answer.index for answer in answered()] == list(range(len(PROMPTS)))
    assert all(path.read_bytes() == content for path, content in first.items())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "seed"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"prompts": PROMPTS[:4]}, "prompts"),
        ({"answers_per_prompt": 2}, "prompts"),
    ],
)
def test_a_cache_of_something_else_is_refused(answered, change, named):
    answered()
    with pytest.raises(CacheError, match=f"made with another {named}"):
        answered(**change)


def test_answers_that_are_all_empty_are_an_error(answered):
    with pytest.raises(ValueError, match="All 5 answers of the target are empty: it stops at its"):
        answered(stops=frozenset(range(300)))


def test_what_the_top_tokens_lack_of_one_is_the_mass_of_the_rest():
    logits = torch.randn(3, 50)
    ids, logprobs = top_logprobs(logits, 7)
    p = logits.softmax(-1)
    torch.testing.assert_close(logprobs.exp(), p.gather(1, ids))
    torch.testing.assert_close(1 - logprobs.exp().sum(-1), p.sort().values[:, :-7].sum(-1))
