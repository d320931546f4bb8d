import dataclasses
import json
import signal
from types import SimpleNamespace

import pytest
import torch

from distill import answers as module
from distill.answer_cache import AnswerCache, CacheError
from distill.answers import answer_lengths, answer_prompts, top_logprobs
from eval.decoding.target import load_target
from tests.distill.answering import answer_share
from tests.ranks import run_ranks

PROMPTS = [[3, 4, 5], [6], [7, 8], [9, 10, 11, 12], [13, 2]]


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder / "target"), torch.float32, "cpu", 60)


@pytest.fixture
def answered(job, target, tmp_path):
    """The answers to PROMPTS in tmp_path, by a target that never stops."""

    def answer(prompts=PROMPTS, stops=frozenset(), decoder=None, folder=tmp_path, **changes):
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


def test_with_train_on_prompts_all_tokens_but_the_first_are_taught(answered, target, tmp_path):
    plain = answered(folder=tmp_path / "plain")
    taught = answered(folder=tmp_path / "taught", train_on_prompts=True)
    for one, other, prompt in zip(plain, taught, PROMPTS, strict=True):
        assert other.prompt_ids.tolist() == prompt[:1]
        whole = torch.cat([one.prompt_ids, one.response_ids])
        assert torch.equal(torch.cat([other.prompt_ids, other.response_ids]), whole)
        assert torch.equal(other.top_logprobs[len(prompt) - 1 :], one.top_logprobs)
        with torch.no_grad():
            logp = target.model(whole[None]).logits[0, :-1].log_softmax(-1)
        top, _ = logp.topk(6, dim=-1)
        torch.testing.assert_close(other.top_logprobs.float(), top, atol=5e-3, rtol=2e-3)
    recipe = SimpleNamespace(train_on_prompts=True)
    assert answer_lengths(recipe, PROMPTS, taught) == plain.response_lengths


def same_answers(ours, theirs, tolerance=0.0):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.index == other.index
        assert torch.equal(one.prompt_ids, other.prompt_ids)
        assert torch.equal(one.response_ids, other.response_ids)
        torch.testing.assert_close(
            one.top_logprobs, other.top_logprobs, atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_an_answer_does_not_depend_on_those_beside_it(answered, tmp_path, batch):
    ours = answered(folder=tmp_path / "ours")
    # fp16 on disk, and the sums of other batches
    same_answers(ours, answered(folder=tmp_path / "other", answer_batch_size=batch), 2e-3)
    assert len({tuple(answer.response_ids.tolist()) for answer in ours}) == len(PROMPTS)


def test_each_draw_of_a_prompt_is_another(answered):
    answers = answered(prompts=PROMPTS[:2], answers_per_prompt=6)
    assert [answer.prompt_ids.tolist() for answer in answers] == PROMPTS[:2] * 6
    assert len({tuple(answer.response_ids.tolist()) for answer in answers}) == 12


def test_processes_make_the_cache_of_one_and_a_killed_run_goes_on(job, answered, tmp_path):
    """Two processes, of which one is killed; then three finish what one alone makes in a go."""
    prompts = [[3 + i, 4, 5 + i % 3] for i in range(20)]
    folder = tmp_path / "many"
    alone = answered(prompts, folder=tmp_path / "alone")
    keys = {"answer_temperature": 0.8, "answer_max_new_tokens": 12, "cache_top_k": 6, "seed": 1}
    values = job(folder, **keys, answer_batch_size=3).values()

    (first, told), (second, _) = run_ranks(tmp_path, 2, answer_share, values, prompts, 1)
    assert second == -signal.SIGKILL
    assert first not in (0, -signal.SIGKILL), told  # it does not wait for ever
    parts = json.loads((folder / "answers" / "key.json").read_text())
    some = AnswerCache(folder / "answers", parts, 300)
    assert 2 <= len(some) < len(prompts)
    before = {path: path.read_bytes() for path in some.shards()}

    resumed = run_ranks(tmp_path, 3, answer_share, values, prompts)
    for rank, (status, printed) in enumerate(resumed):
        assert status == 0, printed
        assert f"process {rank} of 3: 20 answers" in printed
    assert "".join(printed for _, printed in resumed).count("answers: 240 tokens") == 1
    assert all(path.read_bytes() == content for path, content in before.items())
    same_answers(alone, AnswerCache(folder / "answers", parts, 300))


def test_processes_that_do_not_share_a_folder_are_told(answered, monkeypatch):
    class First:
        is_main_process, process_index, num_processes = True, 0, 2

        def wait_for_everyone(self):
            pass

    monkeypatch.setattr(module, "PartialState", First)
    with pytest.raises(CacheError, match=r"holds 4 of 5 answers .* a disk that all of them share"):
        answered()


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
    resumed = answered()
    assert [answer.index for answer in resumed] == list(range(len(PROMPTS)))
    assert all(path.read_bytes() == content for path, content in first.items())
    same_answers(resumed, answered(folder=tmp_path / "straight"))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 2}, "seed"),
        ({"answer_temperature": 0.5}, "answer_temperature"),
        ({"answer_max_new_tokens": 13}, "answer_max_new_tokens"),
        ({"cache_top_k": 7}, "cache_top_k"),
        ({"train_on_prompts": True}, "train_on_prompts"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"prompts": PROMPTS[:4]}, "prompts"),
        ({"answers_per_prompt": 2}, "prompts"),
    ],
)
def test_a_cache_of_something_else_is_refused(answered, change, named):
    answered()
    with pytest.raises(CacheError, match=f"made with another {named}"):
        answered(**change)


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
    with pytest.raises(ValueError, match="All 5 answers of the target are empty: it stops at its"):
        answered(stops=frozenset(range(300)))


def test_what_the_top_tokens_lack_of_one_is_the_mass_of_the_rest():
    logits = torch.randn(3, 50)
    ids, logprobs = top_logprobs(logits, 7)
    p = logits.softmax(-1)
    torch.testing.assert_close(logprobs.exp(), p.gather(1, ids))
    torch.testing.assert_close(1 - logprobs.exp().sum(-1), p.sort().values[:, :-7].sum(-1))
