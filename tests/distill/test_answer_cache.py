import json

import pytest
import torch

from distill import answer_cache as module
from distill.answer_cache import AnswerCache, CachedAnswer, CacheError
from distill.prepare import until

PARTS = {"target weights": "abc", "tokenizer": "def"}


def answer(index, prompt=5, response=7, count=4, seed=0):
    generator = torch.Generator().manual_seed(seed + index)
    return CachedAnswer(
        index=index,
        prompt_ids=torch.randint(0, 60_000, (prompt,), generator=generator),
        response_ids=torch.randint(0, 60_000, (response,), generator=generator),
        top_ids=torch.randint(0, 60_000, (response, count), generator=generator),
        top_logprobs=-torch.rand(response, count, generator=generator),
    )


def test_round_trip_in_both_id_widths(tmp_path):
    for vocab_size in (60_001, 200_000):
        cache = AnswerCache(tmp_path / str(vocab_size), PARTS, vocab_size)
        cache.append([answer(3, 5, 7), answer(0, 1, 1)])
        cache.append([answer(1, 2, 9)])
        found = {a.index: a for a in cache}
        assert sorted(found) == [0, 1, 3]
        for index, sizes in ((3, (5, 7)), (0, (1, 1)), (1, (2, 9))):
            made = answer(index, *sizes)
            assert torch.equal(found[index].prompt_ids, made.prompt_ids)
            assert torch.equal(found[index].response_ids, made.response_ids)
            assert torch.equal(found[index].top_ids, made.top_ids)
            # fp16 keeps 11 bits of a number below one
            torch.testing.assert_close(
                found[index].top_logprobs.float(), made.top_logprobs, atol=5e-4, rtol=0
            )


def test_at_most_64_bytes_of_distribution_a_token(tmp_path):
    cache = AnswerCache(tmp_path, PARTS, 49_152)
    cache.append([answer(i, 20, 2_000, count=15) for i in range(3)])
    # 15 entries of 4 bytes, the token's own id, the headers
    assert cache.bytes_on_disk() < 66 * 3 * 2_000


def test_a_cache_of_another_target_is_refused_by_name(tmp_path):
    AnswerCache(tmp_path, PARTS, 100).append([answer(0)])
    with pytest.raises(
        CacheError, match=r"^TOK-014: .*another tokenizer \(tokenizer: def -> xyz\)"
    ):
        AnswerCache(tmp_path, PARTS | {"tokenizer": "xyz"}, 100)
    with pytest.raises(CacheError, match=r"^/.*another target weights"):
        AnswerCache(tmp_path, PARTS | {"target weights": "xyz"}, 100)


def test_a_damaged_key_is_an_error(tmp_path):
    AnswerCache(tmp_path, PARTS, 100)
    (tmp_path / "key.json").write_text(json.dumps(PARTS)[:-5])
    with pytest.raises(CacheError, match="not readable JSON"):
        AnswerCache(tmp_path, PARTS, 100)


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_shard_is_an_error(tmp_path, damage):
    cache = AnswerCache(tmp_path, PARTS, 100)
    cache.append([answer(0)])
    (shard,) = cache.shards()
    data = bytearray(shard.read_bytes())
    if damage == "flip":
        data[-3] ^= 4
    else:
        del data[-10:]
    shard.write_bytes(bytes(data))
    with pytest.raises(CacheError, match="run again"):
        AnswerCache(tmp_path, PARTS, 100)


def test_a_shard_cut_short_while_writing_is_never_seen(tmp_path, monkeypatch):
    cache = AnswerCache(tmp_path, PARTS, 100)
    cache.append([answer(0)])

    def full_disk(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("distill.answer_cache.save", full_disk)
    with pytest.raises(OSError, match="disk is full"):
        cache.append([answer(1)])
    assert [a.index for a in cache] == [0]


def test_answers_stand_in_order_of_index_whoever_wrote_them(tmp_path):
    ours, theirs = (AnswerCache(tmp_path, PARTS, 60_001) for _ in range(2))
    ours.append([answer(3), answer(0, 2, 1)])
    theirs.append([answer(1), answer(5)])
    assert [a.index for a in ours] == [0, 3]  # until it looks again
    ours.refresh()
    for cache in (ours, theirs, AnswerCache(tmp_path, PARTS, 60_001)):
        assert len(cache) == 4
        assert [a.index for a in cache] == cache.indices == [0, 1, 3, 5]
        assert cache.response_lengths == [1, 7, 7, 7]
        assert [a.index for a in cache[1:3]] == [1, 3]
        assert torch.equal(cache[-1].response_ids, answer(5).response_ids)
        with pytest.raises(IndexError):
            cache[4]


def test_a_shard_that_is_cut_after_it_was_checked_is_an_error(tmp_path):
    cache = AnswerCache(tmp_path, PARTS, 100)
    cache.append([answer(0), answer(1)])
    (shard,) = cache.shards()
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(CacheError, match=r"is damaged .*run again"):
        cache[1]
    shard.unlink()
    with pytest.raises(CacheError, match=r"is damaged .*run again"):
        cache[1]


def test_only_the_answers_that_are_asked_for_are_read(tmp_path, monkeypatch):
    AnswerCache(tmp_path, PARTS, 60_001).append([answer(i) for i in range(20)])
    opened, safe_open = [], module.safe_open

    def counted(path, framework):
        opened.append(path)
        return safe_open(path, framework)

    monkeypatch.setattr(module, "safe_open", counted)
    cache = AnswerCache(tmp_path, PARTS, 60_001)
    assert len(opened) == 1  # for its checksum
    assert len(cache) == len(cache.indices) == len(cache.response_lengths) == 20
    assert [a.index for a in until(cache, 15)] == [0, 1, 2]  # of 7 tokens each
    assert len(opened) <= 5
