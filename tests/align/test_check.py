"""Each relation and each finding, by a pair of tokenizers made to have it."""

import gzip
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from align.check import check_pair, main
from align.sources import SourceError

ROOT = Path(__file__).resolve().parents[2]


def edit(folder, change):
    """Change the tokenizer.json in a folder by a function of it."""
    path = folder / "tokenizer.json"
    backend = json.loads(path.read_text())
    change(backend)
    path.write_text(json.dumps(backend))


@pytest.fixture
def pair(tmp_path, write_tokenizer):
    """pair(**changes of the draft's tokenizer, target={…}) writes both and checks them.

    change: made to the draft's tokenizer.json.
    """

    def check(target=None, weights=None, corpus=None, change=None, **draft):
        specs = []
        for name, changes in (("target", target or {}), ("draft", draft)):
            specs.append(write_tokenizer(tmp_path / name, **changes))
            if weights:
                save_file(weights[name], tmp_path / name / "model.safetensors")
        if change:
            edit(tmp_path / "draft", change)
        return check_pair(*specs, corpus=corpus)

    return check


def codes(verdict, *severities):
    return [f.code for f in verdict.findings if not severities or f.severity in severities]


def found(verdict, code):
    return " ".join(f.message for f in verdict.findings if f.code == code)


@pytest.mark.parametrize(
    ("draft", "relation", "strategy"),
    [
        ({}, "identical", "direct"),
        ({"rows": 64}, "padded", "padded"),
        ({"added": ("<s>", "</s>", "[PAD10]", "[PAD11]")}, "padded", "padded"),
        ({"tokens": "bacdefgh"}, "permuted", "remap"),
        ({"tokens": "abcdefg"}, "subset", "intersection"),  # the ids of <s> and </s> move
        ({"tokens": [*"abcdefg", None]}, "subset", "padded"),  # they do not
        ({"tokens": "abcdefghi"}, "superset", "remap"),
        ({"added": ("<s>", "</s>", "<tool>")}, "superset", "padded"),
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


def test_the_target_as_its_own_draft(tmp_path, write_tokenizer):
    spec = write_tokenizer(tmp_path / "target")
    verdict = check_pair(spec, spec)
    assert (verdict.relation, verdict.strategy, verdict.coverage) == ("identical", "direct", 1.0)
    assert verdict.tuned_strategy == "direct"
    # of the letters a to h alone no probe can be written, and </s> in a message ends it
    assert {f.code for f in verdict.findings} == {"TOK-005", "TOK-010"}
    assert codes(verdict, "error", "fatal") == []


def test_one_swapped_pair_among_the_first_ids(pair):
    verdict = pair(tokens="abdcefgh")
    (finding,) = [f for f in verdict.findings if f.code == "TOK-001"]
    assert finding.ids == (2, 3)
    assert str(finding) == (
        "TOK-001 ERROR: 2 of 10 ids differ (2 is 'c' for the target, 'd' for the draft); drafting "
        "by id would corrupt. Fix: strategy remap."
    )


def test_equal_sizes_of_different_vocabularies(pair):
    verdict = pair(tokens="abcdefgX")
    assert verdict.relation == "intersection"
    assert "'h' for the target, 'X' for the draft" in found(verdict, "TOK-001")
    by_count = {name: v for name, v in verdict.coverages.items() if name.endswith("count")}
    assert by_count == {"target_by_count": 0.9, "draft_by_count": 0.9}
    assert 0.8 < verdict.coverage < 0.95  # weighted by use in English text


@pytest.mark.parametrize("whose", ["target", "draft"])
def test_ids_beyond_the_rows(pair, whose):
    verdict = pair(**({"target": {"rows": 9}} if whose == "target" else {"rows": 9}))
    assert verdict.fatal
    assert "has ids up to 9, but its embedding has 9 rows" in found(verdict, "TOK-002")


def test_rows_and_ties_are_read_from_the_weights(pair):
    def weights(rows, **more):
        return {"model.embed_tokens.weight": torch.zeros(rows, 2), **more}

    head = {"lm_head.weight": torch.zeros(12, 2), "lm_head.bias": torch.zeros(12)}
    verdict = pair(weights={"target": weights(10), "draft": weights(12, **head)})
    assert verdict.relation == "padded"
    assert "config of" in found(verdict, "TOK-002")
    assert "vocab_size 10, its embedding has 12 rows" in found(verdict, "TOK-002")
    assert "has a bias" in found(verdict, "TOK-012")
    assert "tied to the embedding in the target, separate from it in" in found(verdict, "TOK-012")


def test_truncated_weights_are_ill_formed(pair, tmp_path):
    tensors = {"model.embed_tokens.weight": torch.zeros(10, 2)}
    verdict = pair(weights={"target": tensors, "draft": tensors})
    path = tmp_path / "draft" / "model.safetensors"
    for length in (path.stat().st_size - 1, 20, 3, 0):
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(SourceError, match="no whole safetensors file"):
            check_pair(verdict.target, verdict.draft)


def test_holes_and_doubles(pair):
    verdict = pair(tokens=[*"abcdefg", None], added=("<s>", "</s>", "a"), special=False)
    assert "1 ids of" in found(verdict, "TOK-003")
    assert "10 and 0 are both 'a'" in found(verdict, "TOK-003")


NO_STOP = {"eos": None, "generation_config": {"eos_token_id": None}}
# the draft's (and the target's) differences from eight letters, <s> and </s>; what is said of them
FINDINGS = [
    (
        {"target": {"added": ("<s>", "</s>", "<t>")}},
        "TOK-002",
        "cannot read the target's ids up to",
    ),
    (
        {"config": {"vocab_size": 3, "text_config": {"vocab_size": 64, "eos_token_id": 9}}},
        *("TOK-002", "rows 10 (target) and 64 (draft)"),  # of a multimodal one
    ),
    (
        {"tokenizer_config": {"bos_token": {"content": "</s>"}, "pad_token": "<none>"}},
        *("TOK-006", "bos_token is 8 for the target, 9 for the draft"),
        "names a pad_token that its vocabulary does not hold",
    ),
    ({"special": False}, "TOK-008", "2 added tokens are flagged otherwise", "'<s>': special)"),
    (
        {"target": {"generation_config": {"eos_token_id": [8, 9]}}},
        *("TOK-007", "The target's config lists only [9] of its stops [8, 9]"),
        "ends at [8, 9] for the target, at [9] for the draft",
    ),
    (
        {"target": {"config": {"eos_token_id": [7, 8, 9]}}, "tokens": "abcdefg"},
        *("TOK-007", "ends at [7, 8, 9] for the target", "stops [7] cannot be drafted"),
        "The target's tokenizer lists only [9] of its stops [7, 8, 9]",
    ),
    ({"added": ("<s>",), "eos": "<s>", "rows": 10}, "TOK-007", "stops [9] cannot be drafted"),
    (NO_STOP | {"target": NO_STOP}, "TOK-007", "No token ends a text"),
    ({"template": "other"}, "TOK-009", "draft has another"),
    ({"template": "{{ messages[0]['content'] }}"}, "TOK-009", "another that renders the same"),
    ({"target": {"template": None}}, "TOK-009", "messages cannot be rendered"),
    (
        {
            "target": {
                "template": "{% if tools %}{{ raise_exception('no tools') }}{% endif %}"
                "{{ messages[1].content }}"
            }
        },
        *("TOK-009", "does not take a system message and tools (no tools)"),
    ),
    ({}, "TOK-010", "holds '</s>' becomes the stop itself"),
    (
        {"config": {"final_logit_softcapping": 30.0, "logit_scale": 1.0}},
        *("TOK-012", "{'final_logit_softcapping': 30.0}"),
    ),
]


@pytest.mark.parametrize(("changes", "code", "messages"), [(f[0], f[1], f[2:]) for f in FINDINGS])
def test_what_is_found_and_how_it_is_said(pair, changes, code, messages):
    verdict = pair(**changes)
    assert not verdict.fatal
    assert all(message in found(verdict, code) for message in messages)


def test_a_template_in_the_tokenizer_config_is_one(pair):
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": "same"}]
    verdict = pair(
        target={"template": None, "tokenizer_config": {"chat_template": "same"}},
        template=None,
        tokenizer_config={"chat_template": named},
    )
    assert "TOK-009" not in codes(verdict)


# --- tokenizer.json changed on one side, the vocabulary the same


def begins_with_bos(backend):
    sequence = {"id": "A", "type_id": 0}
    backend["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": sequence}],
        "pair": [{"Sequence": sequence}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [8], "tokens": ["<s>"]}},
    }


@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        (lambda b: b["model"].update(merges=[["a", "b"]]), "TOK-004", "merges (0 and 1) differ"),
        (lambda b: b.update(normalizer={"type": "NFC"}), "TOK-004", "normalizer differ"),
        (lambda b: b["model"].update(unk_token="a"), "TOK-004", "unk_token differ"),
        (begins_with_bos, "TOK-006", "puts '', the draft's '<s>'"),
        (
            lambda b: b["added_tokens"][0].update(lstrip=True),
            *("TOK-008", "1 added tokens are flagged otherwise by the draft (8, '<s>': lstrip)"),
        ),
    ],
)
def test_the_same_vocabulary_in_another_pipeline(pair, change, code, message):
    tokens = [*"abcdefgh"]
    if "merges" in message:
        tokens = [*"abcdefg", "ab"]
    verdict = pair(change=change, target={"tokens": tokens}, tokens=tokens)
    assert (verdict.relation, verdict.strategy) == ("identical", "direct")
    assert message in found(verdict, code)
    assert not codes(verdict, "error", "fatal")


@pytest.fixture
def spelling(spell):
    """All 256 bytes as tokens: what texts can be written in."""
    return [spell(bytes([i])) for i in range(256)]


def test_pipelines_are_seen_on_the_probes(pair, spelling, tmp_path):
    def verdict(change):
        for folder in tmp_path.iterdir():
            shutil.rmtree(folder)
        return pair(change=change, target={"tokens": spelling}, tokens=spelling)

    lower = verdict(lambda backend: backend.update(normalizer={"type": "Lowercase"}))
    messages = found(lower, "TOK-005")
    assert "do not come back from the tokenizer of" in messages
    assert "THE PARTIES" in messages
    assert "encoded otherwise" not in messages  # longest_match steps in
    prefix = verdict(lambda backend: backend["pre_tokenizer"].update(add_prefix_space=True))
    assert "pre_tokenizer differ" in found(prefix, "TOK-004")
    assert "TOK-005" not in codes(prefix)  # the space in front is known and taken off
    trimmed = verdict(lambda backend: backend.update(post_processor=backend["pre_tokenizer"]))
    (finding,) = [f for f in trimmed.findings if f.code == "TOK-005"]
    assert finding.severity == "info"
    assert "are the same, but begin or end elsewhere by the draft's offsets" in finding.message


def test_a_template_that_doubles_the_bos(tmp_path, write_tokenizer):
    spec = write_tokenizer(tmp_path / "target", template="{{ bos_token }}{{ messages[0].content }}")
    edit(tmp_path / "target", begins_with_bos)
    assert "('<s>' twice)" in found(check_pair(spec, spec), "TOK-009")


def test_prompts_that_are_encoded_otherwise_once_an_answer_follows(tmp_path, write_tokenizer):
    spec = write_tokenizer(tmp_path / "t", tokens=["T", "h", "e", "Ġ", "L", "ĠL"])
    edit(tmp_path / "t", lambda b: b["model"].update(merges=[["Ġ", "L"]]))
    assert "'The '" in found(check_pair(spec, spec), "TOK-011")


def test_an_adapter_that_trains_rows_beside_its_model(pair, tmp_path, write_tokenizer):
    target = write_tokenizer(tmp_path / "t")
    draft = write_tokenizer(tmp_path / "d")
    (tmp_path / "d" / "adapter_config.json").write_text('{"modules_to_save": ["embed_tokens"]}')
    assert "['embed_tokens']" in found(check_pair(target, draft), "TOK-013")


def test_an_adapter_with_rows_of_its_own_is_refused(tmp_path, write_tokenizer, capsys):
    target = write_tokenizer(tmp_path / "t")
    save_file(
        {"base_model.model.model.embed_tokens.weight": torch.zeros(12, 2)},
        Path(write_tokenizer(tmp_path / "d")) / "adapter_model.safetensors",
    )
    with pytest.raises(SourceError, match=r"TOK-013: .*with 12 rows.*merge it"):
        check_pair(target, str(tmp_path / "d"))
    before = sorted(tmp_path.rglob("*"))
    assert main(["--target", target, "--draft", str(tmp_path / "d")]) == 2
    assert capsys.readouterr().err.startswith("error: TOK-013: ")
    assert sorted(tmp_path.rglob("*")) == before


def tables(ids, rows=10, **changes):
    ids = torch.tensor(ids)
    t2d = torch.zeros(rows, dtype=torch.bool)
    t2d[ids] = True
    return {"d2t": ids - torch.arange(len(ids)), "t2d": t2d} | changes


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (tables([0, 3, 9]), None),
        (tables([0, 3]), "lacks 1 stops"),
        ({"d2t": torch.zeros(3, dtype=torch.long)}, "t2d is missing"),
        (tables([0, 3, 9], d2t=torch.zeros(3, dtype=torch.long)), "name different ids"),
        (tables([0, 3, 9], d2t=torch.tensor([0, -1, 7])), "sends two rows to one id"),
        (tables([0, 3, 9], d2t=torch.tensor([0, 2, 8])), "leads to id 10"),
        (tables([0, 3, 9], rows=11), "t2d has 11 entries"),
    ],
)
def test_the_tables_of_a_trimmed_head(tmp_path, write_tokenizer, stored, message):
    target, draft = write_tokenizer(tmp_path / "t"), write_tokenizer(tmp_path / "d")
    (tmp_path / "d" / "compact").mkdir()
    save_file(stored, tmp_path / "d" / "compact" / "model.safetensors")
    verdict = check_pair(target, draft)
    if message is None:
        assert "TOK-015" not in codes(verdict)
    else:
        assert message in found(verdict, "TOK-015")
    assert verdict.fatal == (message is not None and "stops" not in message)


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
    """Of the letters "aaab" + "hh" the draft lacks h: 4 of 6; of the target's 10 tokens, 1."""
    path = tmp_path / name
    rows = [{"prompt": "aaab"}, {"prompt": None, "messages": [{"role": "user", "content": "hh"}]}]
    text = "aaabhh" if name.endswith(".txt") else "\n".join(map(json.dumps, rows)) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    verdict = pair(tokens="abcdefgX", corpus=str(path))
    assert verdict.coverage == pytest.approx(4 / 6)
    assert verdict.coverages["target_by_frequency"] == pytest.approx(4 / 6)
    assert verdict.coverages["target_by_count"] == pytest.approx(9 / 10)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("corpus.txt", b"", "holds no text"),
        ("corpus.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("corpus.txt.gz", b"plain", "plain or in gzip"),
        ("prompts.jsonl", b'{"prompt": "a"}\n{', "Line 2 of"),
        ("prompts.jsonl", b"[1]", "Line 1 of"),
        ("prompts.jsonl", b'{"messages": [{}]}', "Line 1 of"),
        ("prompts.jsonl", b'{"prompt": null}', "holds no text"),
    ],
)
def test_a_corpus_that_cannot_be_read(pair, tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        pair(corpus=str(tmp_path / name))


def test_padding_that_a_tokenizer_file_asks_for_is_left_out(tmp_path, write_tokenizer):
    """Of two texts encoded together the shorter would be filled up with a token that counts."""
    spec = write_tokenizer(tmp_path / "t")
    other = write_tokenizer(tmp_path / "d", tokens="abcdefgX")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "ah"}\n{"text": "aaaaaaaaaa"}\n')
    plain = check_pair(spec, other, corpus=str(corpus))
    padding = {"strategy": "BatchLongest", "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 7, "pad_type_id": 0, "pad_token": "h"}
    edit(tmp_path / "t", lambda backend: backend.update(padding=padding))
    assert check_pair(spec, other, corpus=str(corpus)).coverages == plain.coverages


# --- input and output


NO_VOCABULARY = '{"model": {"type": "BPE", "vocab": 3}, "decoder": {"type": "ByteLevel"}}'


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer.json": "{}"}, ""),
        ({"tokenizer.json": NO_VOCABULARY}, ""),
        ({"tokenizer.json": '{"model": {"type": "WordPiece", "vocab": {}}}'}, ""),
        ({"tokenizer.json": "not json"}, ""),
        ({"config.json": "[]"}, ""),
        ({"tokenizer_config.json": '{"eos_token": {"no": "content"}}'}, ""),
        ({"generation_config.json": '{"eos_token_id": [[1]]}'}, ""),
        ({"tokenizer.json": None}, "has no tokenizer"),
        ({"tokenizer.json": None, "tokenizer.model": "\0damaged"}, "cannot be read"),
        ({"tokenizer.json": None, "vocab.json": '{"a": 0}'}, ""),  # half of an old pair of files
    ],
)
def test_missing_or_ill_formed_files_exit_with_2(tmp_path, write_tokenizer, capsys, files, message):
    target, draft = (write_tokenizer(tmp_path / name) for name in ("target", "draft"))
    for name, text in files.items():
        path = tmp_path / "draft" / name
        path.unlink() if text is None else path.write_text(text)
    before = sorted(tmp_path.rglob("*"))
    assert main(["--target", target, "--draft", draft]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: TOK-000: ")
    assert draft in shown.err
    assert message in shown.err
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written


def test_an_unknown_token_that_has_no_id_exits_with_2(tmp_path, write_tokenizer, capsys):
    target, draft = write_tokenizer(tmp_path / "target"), write_tokenizer(tmp_path / "draft")
    # as an added token it is found by name, but not by the model, which needs it
    edit(tmp_path / "draft", lambda backend: backend["model"].update(unk_token="<s>"))
    assert main(["--target", target, "--draft", draft]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: TOK-000: ")
    assert "`<s>` not found in the vocabulary" in error


def test_a_slow_only_tokenizer_exits_with_2(tmp_path, write_tokenizer, capsys, monkeypatch):
    target, draft = write_tokenizer(tmp_path / "target"), write_tokenizer(tmp_path / "draft")
    (tmp_path / "draft" / "tokenizer.json").unlink()
    slow = type("SlowTokenizer", (), {"is_fast": False})
    monkeypatch.setattr("align.vocabulary.load_tokenizer", lambda spec: slow())
    assert main(["--target", target, "--draft", draft]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: TOK-000: ")
    assert "SlowTokenizer is a slow tokenizer" in error
    assert "add the tokenizer.json of its fast form" in error


def test_exit_codes_and_json(tmp_path, write_tokenizer, capsys):
    target = write_tokenizer(tmp_path / "target")
    good = write_tokenizer(tmp_path / "good", rows=16)
    bad = write_tokenizer(tmp_path / "bad", tokens="ijklmnop")
    assert main(["--target", target, "--draft", good, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["relation"] == report["strategy"] == "padded"
    assert report["fatal"] is False
    assert report["shared_ids"] == 10
    assert report["findings"][0].keys() == {"code", "severity", "message", "fix", "ids"}
    assert main(["--target", target, "--draft", bad, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["strategy"], report["tuned_strategy"], report["costs"]) == (None, None, {})
    assert main(["--target", target, "--draft", str(tmp_path / "none")]) == 2


def test_the_table_names_what_was_found(tmp_path, write_tokenizer, capsys):
    target = write_tokenizer(tmp_path / "target")
    bad = write_tokenizer(tmp_path / "bad", tokens="[red]bacd", rows=9)
    assert main(["--target", target, "--draft", bad]) == 1
    shown = capsys.readouterr().out
    assert "\x1b" not in shown  # colour is for terminals
    assert "intersection" in shown
    assert "llama.cpp" in shown
    assert "none as they are" in shown
    assert "TOK-001" in shown


def test_a_bad_call_exits_with_2():
    with pytest.raises(SystemExit) as stopped:
        main(["--target", "x"])
    assert stopped.value.code == 2


@pytest.mark.parametrize("command", [["-m", "align.check"], ["align/check.py"]])
def test_the_command_starts_without_loading_a_model_library(tmp_path, write_tokenizer, command):
    spec = write_tokenizer(tmp_path / "target")
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
