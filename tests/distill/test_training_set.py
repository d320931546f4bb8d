import pytest
import torch

from distill import training_set as module
from distill.teacher.store import Answers, Store
from distill.training_set import DistillationCollator, answer_rows
from tests.distill.conftest import made_answers

VOCAB = 50


def test_a_row_tells_what_its_answer_takes_and_teaches():
    answers = made_answers()
    rows = answer_rows(answers)
    assert rows["index"][:] == [*range(24)]
    assert rows["length"][:] == [len(answer.text) for answer in answers]
    assert rows["tokens"][:] == [len(answer.response_ids) for answer in answers]
    assert len(answer_rows([])) == 0


@pytest.mark.parametrize("trimmed", [False, True])
def test_a_batch_has_the_cached_distributions_in_the_rows_of_the_head(tmp_path, trimmed):
    store = Store(tmp_path)
    packed = {str(i): answer.packed(VOCAB) for i, answer in enumerate(made_answers())}
    for some in (list(packed)[10:], list(packed)[:10]):
        store.append({name: packed[name] for name in some}, "local")
    answers = Answers(store, packed)
    head_entries = None
    if trimmed:
        head_entries = torch.full((VOCAB,), -1)
        head_entries[::2] = torch.arange(VOCAB // 2)
    collate = DistillationCollator(answers.__getitem__, head_entries)
    for some in ([3, 3, 20, 1], [5, 5]):  # of several lengths, and of one
        batch = collate([{"index": i} for i in some])
        expected = [made_answers()[i] for i in some]
        ids = torch.cat([answer.top_ids for answer in expected])
        assert torch.equal(batch["top_ids"], ids if head_entries is None else head_entries[ids])
        logprobs = torch.cat([answer.top_logprobs.half() for answer in expected])
        assert torch.equal(batch["top_logprobs"], logprobs.float())
        assert batch["index"].tolist() == some
        taught = (batch["labels"] != -100).sum(1).tolist()
        assert taught == [len(answer.response_ids) for answer in expected]


def test_a_batch_has_one_of_few_widths_and_nothing_is_at_its_end():
    answers = made_answers()
    read = {id(answer): torch.randn(len(answer.text) - 1, 2, 4) for answer in answers}
    collate = DistillationCollator(answers.__getitem__, None, lambda answer: read[id(answer)])
    for first in range(len(answers)):
        part = answers[first : first + 3]
        batch = collate([{"index": first + i} for i in range(len(part))])
        ids = batch["input_ids"]
        longest = max(len(answer.text) for answer in part)
        assert ids.shape[1] == -(-longest // module.WIDTH) * module.WIDTH
        assert batch["states"].shape == (*ids.shape, 2, 4)
        for row, answer in enumerate(part):
            end = len(answer.text)
            assert torch.equal(ids[row, :end], answer.text)
            assert (ids[row, end:] == 0).all()
            known = batch["states"][row]
            assert torch.equal(known[: end - 1], read[id(answer)])
            assert not known[end - 1 :].any()
        said = torch.cat([answer.response_ids for answer in part])
        assert torch.equal(ids.flatten()[batch["positions"] + 1], said)
