import pytest
import torch

from distill.answers import answer_prompts, top_logprobs
from distill.logit_cache import CacheError
from eval.decoding.forward import build_decoder
from eval.decoding.verification import Sampling

VOCAB = 45
PROMPTS = [[3, 4, 5], [6], [7, 8], [9, 10, 11, 12], [13, 2]]


@pytest.fixture(scope="module")
def model(tiny_llama):
    return tiny_llama(spread=4, vocab_size=VOCAB)


def answered(
    model, folder, prompts=PROMPTS, stops=frozenset(), seed=1, tokenizer="t", decoder=None
):
    return answer_prompts(
        decoder or build_decoder(model, 60),
        prompts,
        folder,
        {"tokenizer": tokenizer},
        VOCAB,
        stops,
        Sampling(0.8),
        12,
        2,
        6,
        seed,
    )


def test_every_prompt_is_answered_with_the_distributions_the_tokens_came_from(model, tmp_path):
    cache = answered(model, tmp_path)
    answers = sorted(cache, key=lambda answer: answer.index)
    assert [answer.prompt_ids.tolist() for answer in answers] == PROMPTS
    for answer in answers:
        assert len(answer.response_ids) == 12
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[None]
        with torch.no_grad():
            logp = model(ids).logits[0, len(answer.prompt_ids) - 1 : -1].log_softmax(-1)
        top, ids = logp.topk(6, dim=-1)
        # fp16 on disk
        torch.testing.assert_close(answer.top_logprobs.float(), top, atol=5e-3, rtol=2e-3)
        assert (answer.top_ids == ids).float().mean() > 0.95  # the order of near-equals may differ


def test_what_is_there_is_not_answered_again(model, tmp_path):
    class Interrupted(Exception):
        pass

    class Failing:
        def __init__(self, decoder):
            self.decoder, self.calls = decoder, 0
            self.device, self.new_cache = decoder.device, decoder.new_cache

        def forward(self, *args, **kwargs):
            self.calls += 1
            if self.calls > 25:
                raise Interrupted
            return self.decoder.forward(*args, **kwargs)

    import distill.answers

    distill.answers.ANSWERS_PER_SHARD, before = 1, distill.answers.ANSWERS_PER_SHARD
    try:
        failing = Failing(build_decoder(model, 60))
        with pytest.raises(Interrupted):
            answered(model, tmp_path, decoder=failing)
    finally:
        distill.answers.ANSWERS_PER_SHARD = before
    first = {path: path.read_bytes() for path in tmp_path.glob("shard-*")}
    assert 0 < len(first) < len(PROMPTS)
    cache = answered(model, tmp_path)
    assert sorted(answer.index for answer in cache) == list(range(len(PROMPTS)))
    assert all(path.read_bytes() == content for path, content in first.items())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "seed"),
        ({"tokenizer": "u"}, "tokenizer"),
        ({"prompts": PROMPTS[:4]}, "prompts"),
    ],
)
def test_a_cache_of_something_else_is_refused(model, tmp_path, change, named):
    answered(model, tmp_path)
    with pytest.raises(CacheError, match=f"made with another {named}"):
        answered(model, tmp_path, **change)


def test_answers_that_are_all_empty_are_an_error(model, tmp_path):
    every = frozenset(range(VOCAB))
    with pytest.raises(ValueError, match="All 5 answers of the target are empty: it stops at its"):
        answered(model, tmp_path, stops=every)


def test_what_the_top_tokens_lack_of_one_is_the_mass_of_the_rest():
    logits = torch.randn(3, 50)
    ids, logprobs = top_logprobs(logits, 7)
    p = logits.softmax(-1)
    torch.testing.assert_close(logprobs.exp(), p.gather(1, ids))
    torch.testing.assert_close(1 - logprobs.exp().sum(-1), p.sort().values[:, :-7].sum(-1))
