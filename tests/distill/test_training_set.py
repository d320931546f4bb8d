from itertools import islice
from statistics import mean, stdev

import pytest
import torch

from distill import prefetch
from distill import training_set as module
from distill.prefetch import Prefetcher
from distill.teacher.store import name_of
from distill.training_set import TrainingSet, divided, packed_steps
from tests.distill.conftest import made_answers, stored

VOCAB = 50
CPU = torch.device("cpu")


def data_of(folder, answers, states=None, **changes):
    keys = {"packed": True, "tokens_per_step": 48, "seed": 1} | changes
    return TrainingSet(
        stored(folder, answers), keys.pop("head_entries", None), states, lambda batch: None, **keys
    )


def texts_of(data, processes):
    """The texts of each step of the first epoch and a half."""
    steps = []
    for rank in range(processes):
        data.processes, data.rank = processes, rank
        for part in islice(data.parts(), 9 * data.passes):
            steps += [set()] * (part.step == len(steps))
            steps[part.step] = steps[part.step] | set(part.texts)
    return steps


def test_the_steps_are_those_of_any_number_of_processes_and_passes(tmp_path):
    data = data_of(tmp_path, made_answers())
    expected = texts_of(data, 1)
    for processes, passes in ((2, 1), (1, 3), (3, 2)):
        data.passes = passes
        assert texts_of(data, processes) == expected


def test_a_training_goes_on_in_the_middle_of_an_epoch(tmp_path):
    data = data_of(tmp_path, made_answers(), passes=2)
    straight = list(islice(data.parts(), 40))
    part = straight[7]
    resumed = data.parts(part.step + 1, *part.after)
    assert list(islice(resumed, 32)) == straight[8:]
    last = [part for part in straight if part.epoch == 0][-1]
    assert last.after == (1, 0)
    assert next(part for part in straight if part.epoch == 1).step == last.step + 1


@pytest.mark.parametrize("tokens", [5, 48, 1000])
def test_an_epoch_has_each_text_once_in_an_order_of_its_own(tmp_path, tokens):
    data = data_of(tmp_path, made_answers(), tokens_per_step=tokens)
    epochs = [data.steps(number) for number in range(2)]
    for steps in epochs:
        assert sorted(text for step in steps for text in step) == list(range(24))
        for step in steps:
            assert len(step) == 1 or sum(data.sizes[text] for text in step) <= tokens
    assert epochs[0] != epochs[1]
    assert epochs[0] == data_of(tmp_path, made_answers(), tokens_per_step=tokens).steps(0)
    assert epochs[0] != data_of(tmp_path, made_answers(), tokens_per_step=tokens, seed=2).steps(0)


def test_steps_are_filled_and_not_from_long_to_short(tmp_path):
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(20, 400, (2000,), generator=generator).tolist()
    order = torch.randperm(2000, generator=generator).tolist()
    steps = packed_steps(sizes, 2048, order)
    filled = [sum(sizes[text] for text in step) for step in steps]
    assert mean(filled[:-1]) > 0.97 * 2048
    in_order = [sizes[text] for step in steps for text in step]
    tenths = [mean(in_order[start : start + 200]) for start in range(0, 2000, 200)]
    assert abs(tenths[0] - mean(tenths)) < 3 * stdev(tenths[1:])
    assert max(tenths) < 1.25 * min(tenths)


def test_padding_counts_where_each_text_has_a_row():
    sizes = [30, 5, 5, 5, 5, 5, 5, 31]
    assert packed_steps(sizes, 60, range(8)) == [[0, 1, 2, 3, 4, 5, 6], [7]]
    steps = packed_steps(sizes, 60, range(8), packed=False)
    assert steps == [[0, 1], [2, 3, 4, 5, 6], [7]]


def test_a_step_is_divided_into_parts_of_nearly_equal_tokens():
    assert divided([0, 1, 2, 3, 4], [5, 9, 3, 4, 2], 2) == [[1, 2], [0, 3, 4]]
    assert divided([0], [5], 3) == [[0], [], []]


def test_a_part_without_texts_repeats_one_that_does_not_count(tmp_path):
    data = data_of(tmp_path, made_answers(1), passes=3)
    parts = list(islice(data.parts(), 3))
    assert [part.texts for part in parts] == [[0]] * 3
    assert [part.weight for part in parts] == [1, 0, 0]
    assert {part.tokens for part in parts} == {4}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_batch_has_the_cached_distributions_in_the_rows_of_the_head(tmp_path, trimmed, packed):
    answers, head_entries = made_answers(), None
    if trimmed:
        head_entries = torch.full((VOCAB,), -1)
        head_entries[::2] = torch.arange(VOCAB // 2)
    data = data_of(tmp_path, answers, packed=packed, head_entries=head_entries, first=100)
    for part in islice(data.parts(), 8):
        batch = data.batch(part, [])
        expected = [answers[text] for text in part.texts]
        ids = torch.cat([answer.top_ids for answer in expected])
        assert torch.equal(batch.top_ids, ids if head_entries is None else head_entries[ids])
        logprobs = torch.cat([answer.top_logprobs.half() for answer in expected])
        assert torch.equal(batch.top_logprobs.view(torch.float32), logprobs.float())
        seeds = [100 + text + module.SEEDS_A_STEP * part.step for text in part.texts]
        assert batch.seeds.tolist() == seeds


def with_states(folder, answers):
    """The outputs in a store, and a store of states of two layers."""
    outputs = stored(folder, answers)
    states = outputs.store.of_states([1, 2])
    values = {
        name_of(answer.text): {"states": torch.randn(len(answer.text) - 1, 2, 4).bfloat16()}
        for answer in answers
    }
    states.append(values, "local")
    return states, values


@pytest.mark.parametrize("packed", [False, True])
def test_a_batch_has_one_of_few_widths_and_nothing_is_at_its_end(tmp_path, packed):
    answers = made_answers()
    states, values = with_states(tmp_path, answers)
    data = data_of(tmp_path, answers, states, packed=packed)
    buffer = []
    for part in islice(data.parts(), 14):
        batch, written = data.batch(part, buffer), [answers[text] for text in part.texts]
        rows = 1 if packed else len(part.texts)
        assert batch.input_ids.shape == (rows, module.MULTIPLE)  # 48 tokens are rounded up
        assert batch.states.shape == (rows, module.MULTIPLE, 2, 4)
        assert batch.packed == packed
        for text, answer in enumerate(written):
            here = batch.texts == text
            assert torch.equal(batch.input_ids[here], answer.text)
            assert torch.equal(batch.position_ids[here], torch.arange(len(answer.text)))
            expected = values[name_of(answer.text)]["states"]
            assert torch.equal(batch.states[here][:-1], expected)
            assert not batch.states[here][-1].any()
        padding = batch.texts == -1
        assert not batch.input_ids[padding].any()
        assert not batch.states[padding].any()
        said = torch.cat([answer.response_ids for answer in written])
        assert torch.equal(batch.input_ids.flatten()[batch.positions + 1], said)
        assert (batch.positions.diff() > 0).all()
    assert len(buffer) == 1


def test_a_batch_is_not_overwritten_while_it_is_used(tmp_path):
    answers = made_answers()
    states, _ = with_states(tmp_path, answers)
    data, numbers = data_of(tmp_path, answers, states), []
    with Prefetcher(data, data.parts(), CPU) as batches:
        for part, batch in islice(batches, 12):
            batches.thread.join(0.02)  # time to make others
            expected = data.batch(part, [])
            assert torch.equal(batch.states, expected.states)
            numbers.append(part.step)
    assert numbers == list(range(12))
    assert not batches.thread.is_alive()


def test_batches_are_made_ahead_and_no_further(tmp_path, monkeypatch):
    data, made = data_of(tmp_path, made_answers()), []
    batch = TrainingSet.batch
    monkeypatch.setattr(TrainingSet, "batch", lambda *given, **_: made.append(1) or batch(*given))
    with Prefetcher(data, data.parts(), CPU) as batches:
        next(batches)
        while len(made) < 1 + prefetch.AHEAD:
            assert batches.thread.is_alive()
        batches.thread.join(0.05)
        assert len(made) == 1 + prefetch.AHEAD


def test_an_error_of_the_thread_is_raised_where_its_batch_is_taken(tmp_path):
    data = data_of(tmp_path, made_answers())
    shard = next(tmp_path.glob("*.safetensors"))
    with Prefetcher(data, data.parts(), CPU) as batches:
        shard.unlink()
        with pytest.raises(ValueError, match=shard.name):
            list(islice(batches, 9))


def test_the_thread_ends_with_its_parts(tmp_path):
    data = data_of(tmp_path, made_answers())
    parts = list(islice(data.parts(), 5))
    with Prefetcher(data, parts, CPU) as batches:
        assert [part for part, _ in batches] == parts
