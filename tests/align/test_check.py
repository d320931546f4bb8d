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

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def pair(tmp_path, write_tokenizer):
    """pair(changes of the draft's tokenizer, target={…}) writes both and checks them."""

    def check(target=None, weights=None, corpus=None, **draft):
        specs = []
        for name, changes in (("target", target or {}), ("draft", draft)):
            specs.append(write_tokenizer(tmp_path / name, **changes))
            if weights:
                save_file(weights[name], tmp_path / name / "model.safetensors")
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
        ({"tokens": "bacdefgh"}, "permuted", None),
        ({"tokens": "abcdefg"}, "subset", None),  # the ids of <s> and </s> move
        ({"tokens": [*"abcdefg", None]}, "subset", "padded"),  # they do not
        ({"tokens": "abcdefghi"}, "superset", None),
        ({"added": ("<s>", "</s>", "<tool>")}, "superset", "padded"),
        ({"tokens": "abcdwxyz"}, "intersection", None),
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
    assert verdict.findings == ()


def test_one_swapped_pair_among_the_first_ids(pair):
    verdict = pair(tokens="abdcefgh")
    (finding,) = [f for f in verdict.findings if f.code == "TOK-001"]
    assert finding.ids == (2, 3)
    assert str(finding) == (
        "TOK-001 FATAL: 2 of 10 ids differ (2 is 'c' for the target, 'd' for the draft); drafting "
        "would corrupt. Fix: save the draft with its embedding and head rows in the target's order."
    )


def test_equal_sizes_of_different_vocabularies(pair):
    verdict = pair(tokens="abcdefgX")
    assert verdict.relation == "intersection"
    assert "'h' for the target, 'X' for the draft" in found(verdict, "TOK-001")
    assert verdict.coverages == {"target_by_count": 0.9, "draft_by_count": 0.9}


def test_a_draft_with_too_few_rows_cannot_read_the_target(pair):
    verdict = pair(target={"added": ("<s>", "</s>", "<t>")})
    assert verdict.relation == "subset"
    assert verdict.fatal
    assert "cannot read the target's ids up to 10" in found(verdict, "TOK-002")


@pytest.mark.parametrize("side", ["target", "draft"])
def test_ids_beyond_the_rows(pair, side):
    verdict = pair(**({"target": {"rows": 9}} if side == "target" else {"rows": 9}))
    assert verdict.fatal
    assert "has ids up to 9, but its embedding has 9 rows" in found(verdict, "TOK-002")


def test_rows_of_a_multimodal_config_are_in_its_text_config(pair):
    nested = {"vocab_size": 3, "text_config": {"vocab_size": 64, "eos_token_id": 9}}
    verdict = pair(config=nested)
    assert verdict.relation == "padded"
    assert "rows 10 (target) and 64 (draft)" in found(verdict, "TOK-002")


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


def test_special_ids(pair):
    verdict = pair(tokenizer_config={"bos_token": {"content": "</s>"}, "pad_token": "<none>"})
    assert "bos_token is 8 for the target, 9 for the draft" in found(verdict, "TOK-006")
    assert "names a pad_token that its vocabulary does not hold" in found(verdict, "TOK-006")
    assert not verdict.fatal


def test_a_special_flag_on_one_side_only(pair):
    verdict = pair(special=False)
    assert (verdict.relation, verdict.strategy) == ("identical", "direct")
    assert "2 tokens are special on one side only" in found(verdict, "TOK-008")


def test_stops_are_the_union_of_all_sources(pair):
    verdict = pair(target={"generation_config": {"eos_token_id": [8, 9]}})
    assert "The target's config lists only [9] of its stops [8, 9]" in found(verdict, "TOK-007")
    assert "ends at [8, 9] for the target, at [9] for the draft" in found(verdict, "TOK-007")
    assert not codes(verdict, "error", "fatal")


def test_a_stop_that_cannot_be_drafted(pair):
    verdict = pair(tokens="abcdefgh", added=("<s>",), eos="<s>", rows=10)
    assert verdict.strategy == "padded"
    assert "stops [9] cannot be drafted" in found(verdict, "TOK-007")
    assert "TOK-007" in codes(verdict, "error")


def test_no_stop_at_all(pair):
    nothing = {"eos": None, "generation_config": {"eos_token_id": None}}
    verdict = pair(target=nothing, **nothing)
    assert "No token ends a text" in found(verdict, "TOK-007")


def test_chat_templates(pair):
    assert "draft has another" in found(pair(template="other"), "TOK-009")


def test_no_chat_template(pair):
    verdict = pair(target={"template": None})
    assert "messages cannot be rendered" in found(verdict, "TOK-009")


def test_a_template_in_the_tokenizer_config(pair):
    named = [{"name": "tool", "template": "x"}, {"name": "default", "template": "same"}]
    verdict = pair(
        target={"template": None, "tokenizer_config": {"chat_template": "same"}},
        template=None,
        tokenizer_config={"chat_template": named},
    )
    assert "TOK-009" not in codes(verdict)


def test_soft_caps(pair):
    verdict = pair(config={"final_logit_softcapping": 30.0, "logit_scale": 1.0})
    assert "{'final_logit_softcapping': 30.0}" in found(verdict, "TOK-012")


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


# --- input and output


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer.json", "{}"),
        (
            "tokenizer.json",
            '{"model": {"type": "BPE", "vocab": 3}, "decoder": {"type": "ByteLevel"}}',
        ),
        ("tokenizer.json", '{"model": {"type": "WordPiece", "vocab": {}}}'),
        ("tokenizer.json", "not json"),
        ("config.json", "[]"),
        ("tokenizer_config.json", '{"eos_token": {"no": "content"}}'),
        ("generation_config.json", '{"eos_token_id": [[1]]}'),
    ],
)
def test_ill_formed_files_exit_with_2(tmp_path, write_tokenizer, capsys, name, text):
    target = write_tokenizer(tmp_path / "target")
    draft = write_tokenizer(tmp_path / "draft")
    (tmp_path / "draft" / name).write_text(text)
    assert main(["--target", target, "--draft", draft]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert str(tmp_path / "draft") in captured.err


def test_exit_codes_and_json(tmp_path, write_tokenizer, capsys):
    target = write_tokenizer(tmp_path / "target")
    good = write_tokenizer(tmp_path / "good", rows=16)
    bad = write_tokenizer(tmp_path / "bad", tokens="bacdefgh")
    assert main(["--target", target, "--draft", good, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["relation"] == report["strategy"] == "padded"
    assert report["fatal"] is False
    assert report["shared_ids"] == 10
    assert report["findings"][0].keys() == {"code", "severity", "message", "fix", "ids"}
    assert main(["--target", target, "--draft", bad, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cost"] is None
    assert main(["--target", target, "--draft", str(tmp_path / "none")]) == 2


def test_the_table_names_what_was_found(tmp_path, write_tokenizer, capsys):
    target = write_tokenizer(tmp_path / "target")
    bad = write_tokenizer(tmp_path / "bad", tokens="[red]bacd")
    assert main(["--target", target, "--draft", bad]) == 1
    shown = capsys.readouterr().out
    assert "intersection" in shown
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
    assert not imported & {"torch", "transformers", "huggingface_hub", "tokenizers"}
