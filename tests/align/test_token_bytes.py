"""A token is the bytes it stands for, whatever alphabet the vocabulary is written in."""

import pytest
from transformers import PreTrainedTokenizerFast

from align.token_bytes import backend_tokens, tokens_of
from tests.align.conftest import STRINGS, byte_level, sentencepiece, spell


@pytest.fixture(scope="module")
def fast_tokenizer(byte_level_tokenizer):
    return PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer, eos_token="<|im_end|>")


def test_byte_level_tokens_stand_for_the_text(fast_tokenizer):
    tokens = tokens_of(fast_tokenizer)
    for text in STRINGS:
        ids = fast_tokenizer(text).input_ids
        assert b"".join(tokens[i][1] for i in ids) == text.encode()


def test_byte_level_tokens_hold_every_byte_once(fast_tokenizer):
    tokens = tokens_of(fast_tokenizer)
    assert len(tokens) == len(fast_tokenizer)
    assert sorted(token for token in tokens if len(token[1]) == 1) == [
        ("normal", bytes([byte])) for byte in range(256)
    ]
    assert tokens[0] == ("special", b"<|im_end|>")
    assert len(set(tokens)) == len(tokens)


@pytest.fixture(scope="module")
def sentencepiece_tokenizer():
    tokenizer = sentencepiece(["▁", "a", "▁a", "é", "▁▁"], [("▁", "a"), ("▁", "▁")])
    tokenizer.add_tokens(["▁▁", "<tool>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def test_sentencepiece_tokens_stand_for_the_text(sentencepiece_tokenizer):
    tokens = tokens_of(sentencepiece_tokenizer)
    for text in STRINGS:
        ids = sentencepiece_tokenizer(text).input_ids
        # SentencePiece cannot tell a literal "▁" from a space
        assert b"".join(tokens[i][1] for i in ids) == text.replace("▁", " ").encode()


def test_sentencepiece_tokens(sentencepiece_tokenizer):
    tokens = tokens_of(sentencepiece_tokenizer)
    ids = sentencepiece_tokenizer.get_vocab()
    assert tokens[ids["<0x41>"]] == ("normal", b"A")
    assert tokens[ids["▁a"]] == ("normal", b" a")
    assert tokens[ids["é"]] == ("normal", "é".encode())
    assert tokens[ids["</s>"]] == ("special", b"</s>")
    assert tokens[ids["▁▁"]] == ("normal", b"  ")  # an added token that is a piece as well
    assert tokens[ids["<tool>"]] == ("normal", b"<tool>")


def test_unigram_vocabularies_are_lists():
    backend = {
        "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁the", -1.0], ["<0x0A>", -2.0]]},
        "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always"},
        "added_tokens": [{"id": 0, "content": "<unk>", "special": True}],
    }
    tokens = [("special", b"<unk>"), ("normal", b" the"), ("normal", b"<0x0A>")]
    assert backend_tokens(backend) == tokens
    backend["model"]["byte_fallback"] = True
    assert backend_tokens(backend)[2] == ("normal", b"\n")


def test_marks_of_the_other_kind_are_literal_in_a_byte_level_vocabulary():
    texts = ["▁the", "<0x41>", " the", "é"]
    backend = byte_level({spell(text.encode()): i for i, text in enumerate(texts)})
    assert backend_tokens(backend) == [("normal", text.encode()) for text in texts]


def test_added_tokens_are_literal_in_a_byte_level_vocabulary():
    backend = byte_level({"Ġ": 0}, [(1, "Ġé", False), (2, "<|end|>", True), (3, "  ", False)])
    assert backend_tokens(backend) == [
        ("normal", b" "),
        ("normal", "Ġé".encode()),
        ("special", b"<|end|>"),
        ("normal", b"  "),
    ]


def test_holes_are_none_whatever_the_order_of_the_vocabulary():
    assert backend_tokens(byte_level({"c": 4, "a": 0, "b": 2}, [(5, "</s>", True)])) == [
        ("normal", b"a"),
        None,
        ("normal", b"b"),
        None,
        ("normal", b"c"),
        ("special", b"</s>"),
    ]
    assert backend_tokens(byte_level({})) == []


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ("<unused12>", "unused"),
        ("[unused1]", "unused"),
        ("<|reserved_special_token_3|>", "unused"),
        ("[PAD151936]", "unused"),
        ("<SPECIAL_20>", "unused"),
        ("<|placeholder1|>", "unused"),
        ("<|dummy_0|>", "unused"),
        ("[UNUSED_TOKEN_145]", "unused"),
        ("<｜place▁holder▁no▁0｜>", "unused"),
        ("[control_8]", "unused"),
        ("<|vision_reserved_special_token_1|>", "unused"),
        (">>UNUSED_1<<", "unused"),
        ("<extra_id_0>", "unused"),
        ("<|text_post_train_reserved_special_token_3|>", "unused"),
        ("<|reserved_token_163608|>", "unused"),
        ("<｜hy_place▁holder▁no▁12｜>", "unused"),
        ("<pad>", "special"),
        ("[PAD]", "special"),
        ("<|im_start|>", "special"),
        ("<h1>", "special"),
    ],
)
def test_placeholders_are_unused(content, kind):
    assert backend_tokens(byte_level({}, [(0, content, True)])) == [(kind, content.encode())]
    expected = "unused" if kind == "unused" else "normal"
    assert backend_tokens(byte_level({content: 0})) == [(expected, content.encode())]


def test_tokens_that_do_not_stand_for_bytes_are_refused():
    backend = {
        "model": {"type": "WordPiece", "vocab": {"un": 0, "##do": 1}},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    }
    with pytest.raises(ValueError, match="'WordPiece'"):
        backend_tokens(backend)
