import json
from multiprocessing.pool import ThreadPool

import pytest
import torch

from align.errors import UserError
from distill.teacher import store as module
from distill.teacher.store import Answers, CachedAnswer, Store, name_of, names_of

KEY = {"target weights": "abc", "seed": 1}


def answer(index, prompt=5, response=7, count=4):
    generator = torch.Generator().manual_seed(index)

    def ids(*shape):
        return torch.randint(0, 60_000, shape, generator=generator)

    top = -torch.rand(response, count, generator=generator)
    return CachedAnswer(ids(prompt), ids(response), ids(response, count), top)


def put(store, *numbers, by="local", vocab_size=60_001, **sizes):
    """Store the answers of these numbers, named by them."""
    store.append({str(i): answer(i, **sizes).packed(vocab_size) for i in numbers}, by)


@pytest.mark.parametrize("vocab_size", [60_001, 200_000])
def test_round_trip_in_both_id_widths(tmp_path, vocab_size):
    given = {3: answer(3), 1: answer(1), 0: answer(0, 1, 1)}
    store = Store(tmp_path)
    put(store, 3, 1, vocab_size=vocab_size)
    put(store, 0, vocab_size=vocab_size, prompt=1, response=1)
    for opened in (store, Store(tmp_path)):
        for i, read in zip(given, Answers(opened, map(str, given)), strict=True):
            assert torch.equal(read.prompt_ids, given[i].prompt_ids)
            assert torch.equal(read.response_ids, given[i].response_ids)
            assert torch.equal(read.top_ids, given[i].top_ids)
            # fp16 keeps 11 bits of a number below one
            difference = read.top_logprobs.float() - given[i].top_logprobs
            assert difference.abs().max() < 5e-4


def test_at_most_64_bytes_of_distribution_a_token(tmp_path):
    store = Store(tmp_path)
    put(store, *range(3), vocab_size=49_152, prompt=20, response=2_000, count=15)
    # 15 entries of 4 bytes, the token's own id, the headers
    assert store.bytes_on_disk() < 66 * 3 * 2_000


def test_answers_stand_in_the_order_that_is_asked_for_whoever_wrote_them(tmp_path):
    ours, theirs = Store(tmp_path), Store(tmp_path)
    put(ours, 3, 0)
    assert "3" not in theirs  # until it looks again
    put(theirs, 3, response=1)  # what is there already is left out
    put(theirs, 5, response=1)
    ours.refresh()
    for store in (ours, theirs, Store(tmp_path)):
        assert sorted(store) == ["0", "3", "5"]
        answers = Answers(store, ["5", "0", "3"])
        assert answers.response_lengths == [1, 7, 7]
        assert torch.equal(answers[-1].response_ids, answer(3).response_ids)
        with pytest.raises(IndexError):
            answers[3]
    assert len(list(tmp_path.glob("shard-*"))) == 2


def test_a_machine_that_does_not_see_the_shard_of_another_does_not_replace_it(
    tmp_path, monkeypatch
):
    ours, theirs = Store(tmp_path), Store(tmp_path)
    monkeypatch.setattr(theirs, "refresh", lambda: None)
    put(ours, 1)
    put(theirs, 2)
    for store, numbers in ((ours, "1"), (theirs, "2"), (Store(tmp_path), "12")):
        for number in numbers:
            read = Answers(store, [number])[0]
            assert torch.equal(read.response_ids, answer(int(number)).response_ids)


def test_a_shard_of_long_texts_has_few_of_them(monkeypatch):
    monkeypatch.setattr(module, "TOKENS_PER_SHARD", 10)
    assert list(module.in_shards([4, 4, 4, 12, 1], int)) == [[4, 4, 4], [12], [1]]
    assert [len(shard) for shard in module.in_shards([0] * 130, int)] == [64, 64, 2]


def test_an_answer_is_known_by_its_prompt_and_how_often_that_was_asked():
    one, other, again = names_of([[1, 2], [1, 2, 0], [1, 2]])
    assert one == name_of([1, 2]) + "-0"
    assert again == name_of(torch.tensor([1, 2])) + "-1"
    assert other[:-2] not in one
    assert names_of([[1, 2]], taught=True) != [one]


def test_what_was_used_is_known_by_its_contents(tmp_path):
    hashes = set()
    for part, (count, names) in enumerate([(4, "01"), (4, "01"), (5, "01"), (4, "10")]):
        store = Store(tmp_path / str(part))
        put(store, 0, 1, count=count)
        hashes.add(store.sha256_of(names))
    assert len(hashes) == 3


def test_what_changes_an_answer_has_a_store_of_its_own(tmp_path):
    store = Store.of(KEY, tmp_path)
    assert not list(tmp_path.iterdir())  # before there is an answer
    put(store, 0)
    assert json.loads((store.folder / "key.json").read_text()) == KEY
    assert "0" in Store.of(dict(reversed(KEY.items())), tmp_path)
    for change in ({"target weights": "xyz"}, {"seed": 2}, {"more": None}):
        assert "0" not in Store.of(KEY | change, tmp_path)


def test_rows_are_read_into_a_slice_of_a_larger_buffer_by_several_threads(tmp_path):
    store, lengths = Store(tmp_path), [3, 0, 5, 1]
    states = [torch.randn(n, 2, 4).bfloat16() for n in lengths]
    store.append({str(i): {"x": torch.ones(1), "states": s} for i, s in enumerate(states)}, "local")
    buffer = torch.full((20, 2, 4), 7.0, dtype=torch.bfloat16)
    starts = [0, 3, 4, 10]

    def read(number):
        rows = buffer[starts[number] :][: store.length(str(number), "states")]
        store.read_into(str(number), "states", rows)

    with ThreadPool(4) as pool:
        pool.map(read, range(4))
    for start, expected in zip(starts, states, strict=True):
        assert torch.equal(buffer[start:][: len(expected)], expected)
    assert (buffer[[3, 9, *range(11, 20)]] == 7).all()
    assert torch.equal(store["2"]["states"], states[2])


@pytest.mark.parametrize(
    "out",
    [
        torch.zeros(7, dtype=torch.int64),
        torch.zeros(6, dtype=torch.int32),
        torch.zeros(7, 1, dtype=torch.int32),
        torch.zeros(14, dtype=torch.int32)[::2],
    ],
)
def test_rows_are_not_read_into_another_form(tmp_path, out):
    store = Store(tmp_path)
    put(store, 0)
    with pytest.raises(UserError):
        store.read_into("0", "response_ids", out)
    assert not out.any()


def test_a_shard_that_is_cut_or_gone_is_an_error(tmp_path):
    store = Store(tmp_path)
    put(store, 0, 1)
    (shard,) = tmp_path.glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(UserError, match=shard.name):
        Store(tmp_path)
    with pytest.raises(UserError, match=shard.name):
        store["1"]
    out = torch.zeros(7, dtype=torch.int32)
    store.read_into("1", "response_ids", out)  # before the cut
    assert torch.equal(out, answer(1).response_ids.int())
    with pytest.raises(UserError, match=shard.name):
        store.read_into("1", "top_ids", torch.zeros(7, 4, dtype=torch.uint16))
    shard.unlink()
    for read in (lambda: store["1"], lambda: store.read_into("1", "response_ids", out)):
        with pytest.raises(UserError, match=shard.name):
            read()


def test_a_record_that_the_disk_shows_late_is_waited_for(tmp_path, monkeypatch):
    store = Store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(module.time, "sleep", lambda _: put(Store(tmp_path), 0))
        store.wait_for(["0"])
    monkeypatch.setattr(module, "VISIBLE_SECONDS", 0)
    with pytest.raises(UserError, match="lacks 1 of 2"):
        store.wait_for(["0", "1"])


def test_who_made_an_answer_is_kept_with_it(tmp_path):
    store = Store(tmp_path)
    put(store, 0, 1)
    put(store, 1, 2, by="vllm")  # of these, one is there already
    for opened in (store, Store(tmp_path)):
        assert opened.made_by(["0", "1", "2"]) == {"local": 2, "vllm": 1}


def test_a_shard_cut_short_while_writing_is_never_seen(tmp_path, monkeypatch):
    store = Store(tmp_path)
    put(store, 0)

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(module, "save", full_disk)
        with pytest.raises(UserError, match="disk is full"):
            put(store, 1)
    for opened in (store, Store(tmp_path)):
        assert list(opened) == ["0"]
    put(store, 1)
    assert not list(tmp_path.glob(".*.partial"))


def test_only_the_answers_that_are_asked_for_are_read(tmp_path, monkeypatch):
    put(Store(tmp_path), *range(20))
    read, read_into = [], Store.read_into

    def counted(store, name, column, out):
        read.append((name, column))
        read_into(store, name, column, out)

    monkeypatch.setattr(Store, "read_into", counted)
    answers = Answers(Store(tmp_path), map(str, range(20)))
    assert len(answers) == len(answers.response_lengths) == 20
    assert [len(answers.until(tokens)) for tokens in (0, 1, 14, 15, 1000)] == [0, 1, 2, 3, 20]
    assert answers.tokens(3) == 12
    assert not read
    assert torch.equal(answers.text(3), answer(3).text)
    assert read == [("3", "prompt_ids"), ("3", "response_ids")]
    assert len(list(answers.until(15))) == 3
    assert len(read) == 2 + 3 * 4
