"""Each relation and each finding, by a pair of tokenizers made to have it."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from align.check import check_pair, main
from align.sources import SourceError
from tests.align.conftest import spell

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def write(tmp_path, write_tokenizer):
    """write(name, edit=…, weights=…, **how of its tokenizer): a checkpoint's folder.

    edit: a function that changes its tokenizer.json.
    """

    def write(name, edit=None, weights=None, **how):
        spec = write_tokenizer(tmp_path / name, **how)
        if edit is not None:
            path = tmp_path / name / "tokenizer.json"
            backend = json.loads(path.read_text())
            edit(backend)
            path.write_text(json.dumps(backend))
        if weights is not None:
            save_file(weights, tmp_path / name / "model.safetensors")
        return spec

    return write


@pytest.fixture
def pair(write):
    """pair(target={…}, corpus=…, **how of the draft) writes both and checks them."""

    def check(target=None, corpus=None, **draft):
        return check_pair(write("target", **(target or {})), write("draft", **draft), corpus=corpus)

    return check


def found(verdict, code, *severities):
    return " ".join(
        f.message
        for f in verdict.findings
        if f.code == code and f.severity in (severities or (f.severity,))
    )


@pytest.mark.parametrize(
    ("draft", "relation", "strategy"),
    [
        ({}, "identical", "direct"),
        ({"rows": 64}, "padded", "padded"),
        ({"config": {"vocab_size": 3, "text_config": {"vocab_size": 64}}}, "padded", "padded"),
        ({"added": ("<s>", "</s>", "[PAD10]", "[PAD11]")}, "padded", "padded"),
        ({"tokens": "bacdefgh"}, "permuted", "remap"),
        ({"tokens": "abcdefg"}, "subset", "intersection"),  # the ids of <s> and </s> move
        ({"tokens": [*"abcdefg", None]}, "subset", "padded"),  # they do not
        ({"tokens": "abcdefghi"}, "superset", "remap"),
        ({"added": ("<s>", "</s>", "<tool>")}, "superset", "remap"),  # the target has no row for it
        ({"tokens": "abcdefgX"}, "intersection", "intersection"),
        ({"tokens": "abcdwxyz"}, "intersection", "string"),
        ({"tokens": "ijklmnop", "added": ("<|s|>", "<|e|>")}, "disjoint", None),
        ({"tokens": "ijklmnop"}, "disjoint", None),  # special tokens are no common language
    ],
)
def test_relation_and_strategy(pair, draft, relation, strategy):
    verdict = pair(**draft)
    assert (verdict.relation, verdict.strategy) == (relation, strategy)
    assert (
        verdict.fatal == (strategy is None) == ("fatal" in {f.severity for f in verdict.findings})
    )
    assert verdict.shared_ids == (9 if draft.get("tokens") == "abcdefg" else 10)


def test_the_target_as_its_own_draft(write):
    spec = write("target")
    verdict = check_pair(spec, spec)
    assert (verdict.relation, verdict.strategy, verdict.coverage) == ("identical", "direct", 1.0)
    assert verdict.tuned_strategy == "direct"
    # of the letters a to h alone no probe can be written, and </s> in a message ends it
    assert {f.code for f in verdict.findings} == {"TOK-005", "TOK-010"}
    assert {f.severity for f in verdict.findings} <= {"warning", "info"}


# --- findings


def sets(**changes):
    return lambda backend: backend.update(changes)


def sets_model(**changes):
    return lambda backend: backend["model"].update(changes)


def puts_first(backend):
    """A BOS before every text."""
    sequence = {"Sequence": {"id": "A", "type_id": 0}}
    backend["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, sequence],
        "pair": [sequence],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [8], "tokens": ["<s>"]}},
    }


def strips(backend):
    backend["added_tokens"][0]["lstrip"] = True


def begins_with_a_space(backend):
    backend["pre_tokenizer"]["add_prefix_space"] = True


NO_STOP = {"eos": None, "generation_config": {"eos_token_id": None}}
SPELLING = [spell(bytes([i])) for i in range(256)]  # what texts can be written in
EMBEDDING = {"model.embed_tokens.weight": torch.zeros(12, 2)}
BIAS = {"lm_head.weight": torch.zeros(10, 2), "lm_head.bias": torch.zeros(10)}
MERGED = {"tokens": [*"abcdefgh", "ab"]}
SENTENCE = {"tokens": ["T", "h", "e", "Ġ", "L", "ĠL"], "edit": sets_model(merges=[["Ġ", "L"]])}
REFUSES = "{{ raise_exception('no system') }}"
TWICE = {"template": "{{ bos_token }}{{ messages[0].content }}", "edit": puts_first}


@pytest.mark.parametrize(
    ("code", "severity", "message", "how"),
    [
        ("001", "error", "'h' for the target, 'X' for the draft", {"tokens": "abcdefgX"}),
        (
            "001",
            "warning",
            "have a token for the target only, 7 the first",
            {"tokens": [*"abcdefg", None]},
        ),
        ("002", "fatal", "ids up to 9, but its embedding has 9 rows", {"rows": 9}),
        ("002", "fatal", "ids up to 9, but its embedding has 9", {"target": {"rows": 9}}),
        ("002", "warning", "has 10 rows, the target ids up to 10", {"target": {"added": "stu"}}),
        ("002", "error", "has 12 rows in its embedding", {"weights": EMBEDDING}),
        ("003", "warning", "1 ids of", {"tokens": [*"abcdefg", None]}),
        (
            "003",
            "warning",
            "(10 and 0 are both 'a')",
            {"added": ("<s>", "</s>", "a"), "special": False},
        ),
        ("004", "warning", ": normalizer differ", {"edit": sets(normalizer={"type": "NFC"})}),
        ("004", "warning", ": pre_tokenizer differ", {"edit": begins_with_a_space}),
        ("004", "warning", ": unk_token differ", {"edit": sets_model(unk_token="a")}),
        (
            "004",
            "warning",
            "merges (0 and 1) differ",
            {"target": MERGED, **MERGED, "edit": sets_model(merges=[["a", "b"]])},
        ),
        (
            "005",
            "info",
            "(the first: 'The Parties agree; THE PARTIES AGREE.')",
            {"tokens": SPELLING, "edit": sets(normalizer={"type": "Lowercase"})},
        ),
        (
            "006",
            "warning",
            "bos_token is 8 for the target, 9 for the draft",
            {"tokenizer_config": {"bos_token": {"content": "</s>"}}},
        ),
        ("006", "error", "names a pad_token", {"tokenizer_config": {"pad_token": "<none>"}}),
        ("006", "info", "puts '', the draft's '<s>'", {"edit": puts_first}),
        (
            "007",
            "warning",
            "ends at [8, 9] for the target, [9] for the draft",
            {"target": {"generation_config": {"eos_token_id": [8, 9]}}},
        ),
        (
            "007",
            "error",
            "stops [7] cannot be drafted",
            {"target": {"config": {"eos_token_id": [7, 8, 9]}}, "tokens": "abcdefg"},
        ),
        ("007", "error", "stops [9] cannot", {"added": ("<s>",), "eos": "<s>", "rows": 10}),
        ("007", "error", "No token ends a text", {"target": NO_STOP, **NO_STOP}),
        ("008", "warning", "2 added tokens are flagged otherwise", {"special": False}),
        ("008", "warning", "by the draft (8, '<s>': lstrip)", {"edit": strips}),
        ("009", "info", "has another chat template", {"template": "other"}),
        ("009", "info", "has no chat template", {"template": None}),
        ("009", "warning", "no chat template to render", {"target": {"template": None}}),
        ("009", "warning", "message (no system)", {"target": {"template": REFUSES}}),
        ("009", "warning", "both put '<s>' before a text", {"target": TWICE}),
        ("010", "info", "holds '</s>' becomes the stop itself", {}),
        ("011", "info", "(the first: 'The ')", {"target": SENTENCE, **SENTENCE}),
        ("012", "warning", "has a bias", {"weights": EMBEDDING | BIAS}),
        ("012", "info", "{'logit_scale': 0.5}", {"config": {"logit_scale": 0.5}}),
    ],
)
def test_what_is_found(pair, code, severity, message, how):
    verdict = pair(**how)
    assert message in found(verdict, f"TOK-{code}", severity)
    assert verdict.fatal == (severity == "fatal")
    assert all(len(finding.ids) <= 5 for finding in verdict.findings)


@pytest.mark.parametrize(
    ("code", "how"),
    [
        # the space in front is known and taken off
        ("005", {"target": {"tokens": SPELLING}, "tokens": SPELLING, "edit": begins_with_a_space}),
        # of several templates by name the default one is what is rendered
        (
            "009",
            {
                "target": {"template": None, "tokenizer_config": {"chat_template": "same"}},
                "template": None,
                "tokenizer_config": {
                    "chat_template": [
                        {"name": "tool", "template": "x"},
                        {"name": "default", "template": "same"},
                    ]
                },
            },
        ),
        ("012", {"config": {"logit_scale": 1.0}}),
    ],
)
def test_what_is_not_found(pair, code, how):
    assert found(pair(**how), f"TOK-{code}") == ""


def test_how_a_finding_reads(pair):
    (finding,) = [f for f in pair(tokens="abdcefgh").findings if f.code == "TOK-001"]
    assert finding.ids == [2, 3]
    assert str(finding) == (
        "TOK-001 ERROR: 2 of 10 ids differ (2 is 'c' for the target, 'd' for the draft). Fix: "
        "strategy remap."
    )


def test_truncated_weights_are_ill_formed(write, tmp_path):
    target, draft = write("target"), write("draft", weights=EMBEDDING)
    path = tmp_path / "draft" / "model.safetensors"
    for length in (path.stat().st_size - 1, 20, 3, 0):
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(SourceError, match="no whole safetensors file"):
            check_pair(target, draft)


def test_an_adapter_with_rows_of_its_own_is_refused(write, tmp_path, capsys):
    target, draft = write("target"), write("draft")
    rows = {"base_model.model.model.embed_tokens.weight": torch.zeros(12, 2)}
    save_file(rows, tmp_path / "draft" / "adapter_model.safetensors")
    assert main(["--target", target, "--draft", draft]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: TOK-013: ")
    assert "with 12 rows" in error


def tables(ids, rows=10, **changes):
    ids = torch.tensor(ids)
    t2d = torch.zeros(rows, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d} | changes


@pytest.mark.parametrize(
    ("stored", "severity"),
    [
        (tables([0, 3, 9]), None),
        (tables([0, 3]), "error"),  # without the stop
        ({"d2t": torch.zeros(3, dtype=torch.long)}, "fatal"),  # t2d is missing
        (tables([0, 3, 9], d2t=torch.zeros(3, dtype=torch.long)), "fatal"),  # other ids
        (tables([0, 3, 9], d2t=torch.tensor([0, -1, 7])), "fatal"),  # two rows, one id
        (tables([0, 3, 9], d2t=torch.tensor([0, 2, 8])), "fatal"),  # beyond the target's rows
        (tables([0, 3, 9], rows=11), "fatal"),
    ],
)
def test_the_tables_of_a_trimmed_head(write, tmp_path, stored, severity):
    target, draft = write("target"), write("draft")
    (tmp_path / "draft" / "compact").mkdir()
    save_file(stored, tmp_path / "draft" / "compact" / "model.safetensors")
    verdict = check_pair(target, draft)
    assert [f.severity for f in verdict.findings if f.code == "TOK-015"] == [severity] * bool(
        severity
    )
    assert verdict.fatal == (severity == "fatal")


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        ({}, {}, ("yes", "yes", "yes", "yes")),
        ({}, {"tokens": "abdcefgh"}, ("yes", "no", "no", "no")),  # early ids, equal sizes
        ({}, {"tokens": "abcdefhg"}, ("yes", "no", "no", "no")),
        ({}, {"rows": 64}, ("yes", "no", "greedy only", "yes")),
        ({}, {"rows": 640}, ("yes", "no", "greedy only", "no")),
        ({}, {"tokens": "abcdwxyzst"}, ("yes", "greedy only", "greedy only", "no")),
        ({"rows": 3}, {}, ("no", "no", "greedy only", "yes")),
    ],
)
def test_the_verdict_of_each_engine(pair, target, draft, expected):
    engines = pair(target=target, **draft).engines
    assert [e.engine for e in engines] == ["draftsmith", "transformers", "vLLM", "llama.cpp"]
    assert tuple(e.works for e in engines) == expected


# --- coverage


@pytest.mark.parametrize("name", ["corpus.txt", "prompts.jsonl", "prompts.jsonl.gz"])
def test_coverage_is_weighted_by_a_corpus(pair, tmp_path, name):
    """Of the letters "aaab" + "hh" the draft lacks h: 4 of 6."""
    path = tmp_path / name
    rows = [{"prompt": "aaab"}, {"prompt": None, "messages": [{"role": "user", "content": "hh"}]}]
    text = "aaabhh" if name.endswith(".txt") else "\n".join(map(json.dumps, rows)) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    assert pair(tokens="abcdefgX", corpus=str(path)).coverage == pytest.approx(4 / 6)


def test_without_a_corpus_coverage_is_weighted_by_english_text(pair):
    assert 0.8 < pair(tokens="abcdefgX").coverage < 0.95  # by count 0.9


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("corpus.txt", b"", "holds no text"),
        ("corpus.txt", b"\xff\xfe", "give UTF-8 text"),
        ("corpus.txt.gz", b"plain", "plain or in gzip"),
        ("corpus.txt.gz", gzip.compress(b"a")[:-9], "plain or in gzip"),
        ("prompts.jsonl", b'{"prompt": "a"}\n{', "one JSON object a line"),
        ("prompts.jsonl", b"[1]", "one JSON object a line"),
        ("prompts.jsonl", b'{"messages": [{}]}', "one JSON object a line"),
        ("prompts.jsonl", b'{"prompt": null}', "holds no text"),
    ],
)
def test_a_corpus_that_cannot_be_read(pair, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        pair(corpus=str(tmp_path / name))


def test_padding_that_a_tokenizer_file_asks_for_is_left_out(write, tmp_path):
    """Of two texts encoded together the shorter would be filled up with a token that counts."""
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 7, "pad_type_id": 0, "pad_token": "h"}
    draft = write("draft", tokens="abcdefgX")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "ah"}\n{"text": "aaaaaaaaaa"}\n')
    for spec in (write("plain"), write("padded", edit=sets(padding=padding))):
        assert check_pair(spec, draft, corpus=str(corpus)).coverage == pytest.approx(11 / 12)


# --- input and output


NO_CLASS = '{"model": {"type": "BPE", "vocab": 3}, "decoder": {"type": "ByteLevel"}}'
NEEDS_UNK = sets_model(unk_token="<s>")  # found by name, but not by the model, which needs it


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{}"}, "ill-formed"),
        ({"tokenizer.json": NO_CLASS}, "ill-formed"),
        ({"tokenizer.json": '{"model": {"type": "WordPiece", "vocab": {}}}'}, "neither byte-level"),
        ({"tokenizer.json": "not json"}, "cannot be read"),
        ({"config.json": "[]"}, "no JSON object"),
        ({"tokenizer_config.json": '{"eos_token": {"no": "content"}}'}, "ill-formed"),
        ({"generation_config.json": '{"eos_token_id": [[1]]}'}, "ill-formed"),
        ({"tokenizer.json": None}, "has no tokenizer"),
        ({"tokenizer.json": None, "tokenizer.model": "\0damaged"}, "cannot be read"),
        ({"tokenizer.json": None, "vocab.json": '{"a": 0}'}, ""),  # half of an old pair of files
    ],
)
def test_input_that_is_missing_or_ill_formed_exits_with_2(write, tmp_path, capsys, files, message):
    target, draft = write("target"), write("draft")
    for name, text in files.items():
        path = tmp_path / "draft" / name
        path.unlink() if text is None else path.write_text(text)
    before = sorted(tmp_path.rglob("*"))
    assert main(["--target", target, "--draft", draft]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: TOK-000: ")
    assert message in captured.err
    assert str(tmp_path / "draft") in captured.err
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written


def test_an_unknown_token_that_has_no_id_exits_with_2(write, capsys):
    assert main(["--target", write("target"), "--draft", write("draft", edit=NEEDS_UNK)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: TOK-000: ")
    assert "`<s>` not found in the vocabulary" in error


def test_a_slow_only_tokenizer_exits_with_2(write, tmp_path, capsys, monkeypatch):
    class SlowTokenizer:
        is_fast = False

    target, draft = write("target"), write("draft")
    (tmp_path / "draft" / "tokenizer.json").unlink()
    monkeypatch.setattr("align.vocabulary.load_tokenizer", lambda spec: SlowTokenizer())
    assert main(["--target", target, "--draft", draft]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: TOK-000: ")
    assert "SlowTokenizer is a slow tokenizer" in error


def test_exit_codes_and_json(write, tmp_path, capsys):
    target = write("target")
    good, bad = write("good", rows=16), write("bad", tokens="ijklmnop")
    assert main(["--target", target, "--draft", good, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["relation"] == report["strategy"] == "padded"
    assert report["fatal"] is False
    assert report["shared_ids"] == 10
    assert report["findings"][0].keys() == {"code", "severity", "message", "fix", "ids"}
    assert main(["--target", target, "--draft", bad, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["strategy"], report["tuned_strategy"]) == (None, None)
    assert main(["--target", target, "--draft", str(tmp_path / "none")]) == 2
    with pytest.raises(SystemExit) as stopped:
        main(["--target", "x"])
    assert stopped.value.code == 2


def test_what_is_printed_names_what_was_found(write, capsys):
    assert (
        main(["--target", write("target"), "--draft", write("bad", tokens="bacdefgh", rows=9)]) == 1
    )
    shown = capsys.readouterr().out
    for part in ("permuted", "none as they are", "llama.cpp", "TOK-001 FATAL: ", "Ids: 0, 1."):
        assert part in shown


@pytest.mark.parametrize("command", [["-m", "align.check"], ["align/check.py"]])
def test_the_command_starts_without_loading_a_model_library(write, command):
    spec = write("target")
    run = subprocess.run(
        [sys.executable, "-X", "importtime", *command, "--target", spec, "--draft", spec, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["relation"] == "identical"
    imported = {line.split("|")[-1].strip() for line in run.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "huggingface_hub"}
