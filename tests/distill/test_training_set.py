import errno
import gc
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from align.files import DiskFullError
from distill import training_set as module
from distill.teacher.store import Answers, CachedAnswer, Store
from distill.training_set import DistillationCollator, training_rows, training_set

VOCAB, TOP = 50, 6


def made_answers(count=24):
    generator = torch.Generator().manual_seed(5)
    answers = []
    for index in range(count):
        prompt, response = 3 + index % 4, 4 + index % 7
        logp = torch.randn(response, VOCAB, generator=generator).log_softmax(-1)
        top, ids = logp.topk(TOP, dim=-1)
        texts = torch.randint(2, VOCAB, (prompt + response,), generator=generator)
        answers.append(CachedAnswer(index, texts[:prompt], texts[prompt:], ids, top.half()))
    return answers


def same_batch(one, other):
    collate = DistillationCollator(7)
    one, other = collate(one), collate(other)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor.double(), other[name].double()), name
        assert other[name].dtype == (torch.float32 if name == "top_logprobs" else torch.int64)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("trimmed", [False, True])
def test_mapped_rows_are_the_rows_bit_for_bit(tmp_path, monkeypatch, temperature, trimmed):
    monkeypatch.setattr(module, "BLOCK", 20)  # the file has several blocks
    store = Store(tmp_path / "answers")
    for some in (made_answers()[10:], made_answers()[:10]):
        store.append({str(answer.index): answer.packed(VOCAB) for answer in some}, "local")
    answers = Answers(store, [str(answer.index) for answer in made_answers()])
    head_rows = None
    if trimmed:
        head_rows = torch.full((VOCAB,), -1)
        head_rows[::2] = torch.arange(VOCAB // 2)
    rows = list(training_rows(made_answers(), head_rows, temperature))
    mapped = training_set(tmp_path / "rows.arrow", answers, head_rows, temperature)
    assert len(mapped) == len(rows)
    assert mapped.data.column("index").num_chunks >= 7  # written a few rows at a time
    same_batch(rows, list(mapped))
    for some in ([3, 3, 20, 1], [5, 5]):  # of several lengths, and of one
        same_batch([rows[i] for i in some], mapped.__getitems__(some))
    assert mapped.cache_files[0]["filename"] == str(tmp_path / "rows.arrow")


def test_a_teacher_temperature_sharpens_the_cached_tokens_and_keeps_a_rest():
    answers = made_answers(3)
    for answer in answers:
        answer.top_logprobs = answer.top_logprobs.float()
    plain, sharp = (list(training_rows(answers, None, t)) for t in (1.0, 0.5))
    for row, sharpened in zip(plain, sharp, strict=True):
        p = torch.tensor(row["top_logprobs"]).exp().view(-1, TOP)
        got = torch.tensor(sharpened["top_logprobs"]).exp().view(-1, TOP)
        ratio = got / p**2
        torch.testing.assert_close(ratio, ratio[:, :1].expand(-1, TOP), rtol=1e-4, atol=0)
        assert (got.sum(-1) < 1 - 1e-4).all()
        assert np.array_equal(sharpened["top_ids"], row["top_ids"])


def test_a_batch_has_one_of_few_widths_and_nothing_is_at_its_end():
    answers = made_answers()
    texts = [torch.cat([one.prompt_ids, one.response_ids]) for one in answers]
    states = {
        one.index: torch.randn(len(t) - 1, 2, 4) for one, t in zip(answers, texts, strict=True)
    }
    collate = DistillationCollator(7, states)
    rows = list(training_rows(answers, None))
    for first in range(len(rows)):
        part = slice(first, first + 3)
        batch = collate(rows[part])
        ids = batch["input_ids"]
        longest = max(len(text) for text in texts[part])
        assert ids.shape[1] == -(-longest // module.WIDTH) * module.WIDTH
        assert batch["states"].shape == (*ids.shape, 2, 4)
        for row, text in enumerate(texts[part]):
            end = len(text)
            assert torch.equal(ids[row, :end], text)
            assert (ids[row, end:] == 7).all()
            known = batch["states"][row]
            assert torch.equal(known[: end - 1], states[answers[first + row].index])
            assert not known[end - 1 :].any()
        said = torch.cat([one.response_ids for one in answers[part]])
        assert torch.equal(ids.flatten()[batch["positions"] + 1], said)


def test_what_another_run_or_a_kill_left_is_never_read(tmp_path):
    path = tmp_path / "rows.arrow"
    old = training_set(path, made_answers(3), None)
    path.write_bytes(path.read_bytes()[:100])
    assert len(training_set(path, made_answers(5), None)) == 5

    def interrupted():
        yield from made_answers(4)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training_set(path, interrupted(), None)
    assert len(training_set(path, made_answers(6), None)) == 6
    del old
    gc.collect()
    assert [p.name for p in tmp_path.iterdir()] == ["rows.arrow"]


def test_a_full_disk_is_explained(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module.ArrowWriter, "finalize", fails)
    with pytest.raises(DiskFullError, match=r"disk is full: .*rows.arrow could not be written"):
        training_set(tmp_path / "rows.arrow", made_answers(), None)


def test_other_processes_map_what_the_first_wrote(tmp_path, monkeypatch):
    class Second:
        is_main_process = False

        def main_process_first(self):
            training_set(path, made_answers(4), None)  # the first goes through while it waits
            monkeypatch.setattr(module, "training_rows", None)  # and this one writes nothing
            return nullcontext()

    path, first = tmp_path / "rows.arrow", module.PartialState()
    states = iter([Second(), first])
    monkeypatch.setattr(module, "PartialState", lambda: next(states))
    assert len(training_set(path, made_answers(), None)) == 4
