"""The map of a pair: what is mapped, what is retokenized, what is saved."""

import json

import pytest
from safetensors import safe_open

from align.checkpoint import Checkpoint
from align.vocab_map import VOCAB_MAP, Retokenizer, build_map, save_map
from tests.align import conftest
from tests.align.conftest import STRINGS


def write(folder, tokenizer):
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    size = tokenizer.get_vocab_size()
    eos = tokenizer.token_to_id("<|im_end|>")
    config = {"model_type": "llama", "vocab_size": size, "eos_token_id": eos}
    (folder / "config.json").write_text(json.dumps(config))
    special = {"tokenizer_class": "PreTrainedTokenizerFast"}
    special |= {"eos_token": "<|im_end|>"} if eos is not None else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return Checkpoint.open(folder).vocabulary


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory, byte_level_tokenizer):
    return write(tmp_path_factory.mktemp("tokenizers") / "byte_level", byte_level_tokenizer)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    letters = [*"▁abcdefghijklmnopqrstuvwxyz(),:0123456789\n\té"]
    merges = [("▁", "▁"), ("r", "e"), ("re", "t"), ("▁▁", "▁▁"), ("▁", "x")]
    tokenizer = conftest.sentencepiece([*letters, *("".join(m) for m in merges), "A"], merges)
    tokenizer.add_special_tokens(["<|im_end|>"])
    return write(tmp_path_factory.mktemp("tokenizers") / "sentencepiece", tokenizer)


def rewritten(vocabulary, folder, change):
    """The vocabulary once `change` was made to a copy of its tokenizer.json."""
    backend = json.loads(json.dumps(vocabulary.backend))
    change(backend)
    folder.mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text((vocabulary.folder / name).read_text())
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    return Checkpoint.open(folder).vocabulary


@pytest.fixture(params=["byte_level", "sentencepiece"])
def both_ways(request, byte_level, sentencepiece):
    """(target, draft) in both directions."""
    pair = [byte_level, sentencepiece]
    return pair if request.param == "byte_level" else pair[::-1]


def test_a_text_reaches_the_draft_byte_by_byte(both_ways):
    target, draft = both_ways
    retokenizer = Retokenizer(build_map(target, draft), target, draft)
    for text in STRINGS:
        ids = target.longest_match(text.encode())
        assert target.bytes_of(ids) == text.encode()
        assert draft.bytes_of(retokenizer.continuation(ids)) == text.encode()


def test_an_emoji_cut_at_every_byte_is_written(both_ways):
    data = "👩\u200d👩\u200d👧".encode()
    parts = [part for at in range(1, len(data)) for part in (data[:at], data[at:])]
    for vocabulary in both_ways:
        for part in (*parts, b"\x80\xbf"):
            assert vocabulary.bytes_of(vocabulary.longest_match(part)) == part


def test_the_map_round_trips_by_bytes(both_ways):
    target, draft = both_ways
    found = build_map(target, draft)
    assert len(found.mapped) > 256  # the byte units, and more
    for d in found.mapped.tolist():
        t = int(found.to_target[d])
        assert target.tokens[t] == draft.tokens[d]
        assert draft.tokens[int(found.to_draft[t])] == draft.tokens[d]
    for t, d in enumerate(found.to_draft.tolist()):
        if d >= 0:
            assert draft.tokens[d] == target.tokens[t]
            assert target.tokens[int(found.to_target[d])] == target.tokens[t]


def test_byte_pieces_and_written_ones_are_many_to_one(sentencepiece, byte_level):
    piece, written = (sentencepiece.backend["model"]["vocab"][name] for name in ("<0x41>", "A"))
    found = build_map(byte_level, sentencepiece)
    assert found.to_target[piece] == found.to_target[written] >= 0
    assert found.to_draft[found.to_target[piece]] == written  # the one that texts are written with


def test_a_byte_piece_listed_after_the_written_one_does_not_win(
    sentencepiece, byte_level, tmp_path
):
    def swap(backend):  # as in Gemma's, where "\n" comes before the bytes
        words = backend["model"]["vocab"]
        words["<0x0A>"], words["\n"] = words["\n"], words["<0x0A>"]

    vocabulary = rewritten(sentencepiece, tmp_path / "gemma", swap)
    found = build_map(vocabulary, byte_level)
    newline = byte_level.longest_match(b"\n")
    written = vocabulary.backend["model"]["vocab"]["\n"]
    assert found.to_target[newline].tolist() == [written] == vocabulary.longest_match(b"\n")


@pytest.fixture
def pair_of(tmp_path, write_tokenizer):
    """pair_of(target={…}, **draft): both vocabularies of a made-up pair."""

    def make(target=None, **draft):
        specs = (("target", target or {}), ("draft", draft))
        return [
            Checkpoint.open(write_tokenizer(tmp_path / name, **how)).vocabulary
            for name, how in specs
        ]

    return make


@pytest.mark.parametrize(
    ("draft", "to_target"),
    [
        ({}, [*range(10)]),
        ({"rows": 64}, [*range(10)]),
        ({"tokens": "bacdefgh"}, [1, 0, *range(2, 10)]),
        ({"tokens": "abcdefg"}, [*range(7), 8, 9]),
        ({"tokens": "abcdefghi"}, [*range(8), -1, 8, 9]),
        ({"tokens": "abcdwxyz"}, [0, 1, 2, 3, -1, -1, -1, -1, 8, 9]),
    ],
    ids=["identical", "padded", "permuted", "subset", "superset", "intersection"],
)
def test_each_relation(pair_of, draft, to_target):
    assert build_map(*pair_of(**draft)).to_target.tolist() == to_target


def test_a_byte_that_no_token_begins_with_is_left_out(pair_of):
    target, _ = pair_of()
    assert target.longest_match(b"XaYYbX") == [0, 1]


def test_an_end_of_text_is_one_whatever_it_is_called(pair_of):
    target, draft = pair_of(added=("<s>", "<|end|>"), eos="<|end|>")
    found = build_map(target, draft)
    assert (int(found.to_target[9]), int(found.to_draft[9])) == (9, 9)


def test_a_bos_becomes_what_the_draft_begins_with(pair_of):
    begin = {"added": ("<begin>", "</s>"), "tokenizer_config": {"bos_token": "<begin>"}}
    target, draft = pair_of(target=begin, **begin)
    retokenizer = Retokenizer(build_map(target, draft), target, draft)
    assert retokenizer.from_start([8, 0, 1]) == [0, 1]
    draft.prefix = [8]
    assert retokenizer.from_start([8, 0, 1]) == retokenizer.from_start([0, 1]) == [8, 0, 1]
    assert retokenizer.continuation([99]) == []  # a padding row of the target stands for nothing


def test_a_saved_map_names_its_tokenizers(pair_of, tmp_path):
    target, draft = pair_of(tokens="abcdwxyz")
    vocab_map = build_map(target, draft)
    save_map(tmp_path / VOCAB_MAP, vocab_map, target, draft)
    with safe_open(tmp_path / VOCAB_MAP, "pt") as file:
        header = file.metadata()
        for name in ("to_target", "to_draft"):
            assert file.get_tensor(name).equal(getattr(vocab_map, name))
    assert (header["target_sha256"], header["draft_sha256"]) == (target.sha256, draft.sha256)
