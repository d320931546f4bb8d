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


def test_a_draft_with_too_few_rows_cannot_read_the_target(pair):
    verdict = pair(target={"added": ("<s>", "</s>", "<t>")})
    assert (verdict.relation, verdict.strategy) == ("subset", "intersection")
    assert "cannot read the target's ids up to 10" in found(verdict, "TOK-002")


@pytest.mark.parametrize("whose", ["target", "draft"])
def test_ids_beyond_the_rows(pair, whose):
    verdict = pair(**({"target": {"rows": 9}} if whose == "target" else {"rows": 9}))
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


def test_an_unknown_token_on_one_side(edited):
    def unknown(backend):
        backend["model"]["unk_token"] = "a"

    verdict = edited(unknown, tokenizer_config={"unk_token": "a"})
    assert (verdict.relation, verdict.strategy) == ("identical", "direct")
    assert "unk_token differ" in found(verdict, "TOK-004")
    assert "unk_token is None for the target, 0 for the draft" in found(verdict, "TOK-006")


def test_a_special_flag_on_one_side_only(pair):
    verdict = pair(special=False)
    assert (verdict.relation, verdict.strategy) == ("identical", "direct")
    assert "2 added tokens are flagged otherwise" in found(verdict, "TOK-008")
    assert "'<s>': special)" in found(verdict, "TOK-008")


def test_stops_are_the_union_of_all_sources(pair):
    verdict = pair(target={"generation_config": {"eos_token_id": [8, 9]}})
    assert "The target's config lists only [9] of its stops [8, 9]" in found(verdict, "TOK-007")
    assert "ends at [8, 9] for the target, at [9] for the draft" in found(verdict, "TOK-007")
    assert not codes(verdict, "error", "fatal")


def test_three_stops_in_one_list(pair):
    verdict = pair(target={"config": {"eos_token_id": [7, 8, 9]}}, tokens="abcdefg")
    assert "ends at [7, 8, 9] for the target" in found(verdict, "TOK-007")
    assert "The target's tokenizer lists only [9] of its stops [7, 8, 9]" in found(
        verdict, "TOK-007"
    )
    assert "stops [7] cannot be drafted" in found(verdict, "TOK-007")


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


# --- pipelines, probes, templates, tables


def edit(folder, change):
    """Change the tokenizer.json in a folder by a function of it."""
    path = folder / "tokenizer.json"
    backend = json.loads(path.read_text())
    change(backend)
    path.write_text(json.dumps(backend))


@pytest.fixture
def edited(tmp_path, write_tokenizer):
    """edited(change, **draft): the verdict once `change` was made to the draft's tokenizer."""

    def check(change, target=None, **draft):
        specs = [write_tokenizer(tmp_path / "target", **(target or {}))]
        specs.append(write_tokenizer(tmp_path / "draft", **draft))
        edit(tmp_path / "draft", change)
        return check_pair(*specs)

    return check


def test_the_same_vocabulary_with_other_merges(edited):
    def merge(backend):
        backend["model"]["merges"] = [["a", "b"]]

    tokens = [*"abcdefgh", "ab"]
    verdict = edited(merge, target={"tokens": tokens}, tokens=tokens)
    assert (verdict.relation, verdict.strategy) == ("identical", "direct")
    assert "merges (0 and 1) differ" in found(verdict, "TOK-004")
    assert not codes(verdict, "error", "fatal")


@pytest.mark.parametrize(
    "normalizer", [{"type": "NFC"}, {"type": "NFKC"}, {"type": "Lowercase"}], ids=str
)
def test_another_normaliser(edited, normalizer):
    verdict = edited(lambda backend: backend.update(normalizer=normalizer))
    assert "normalizer differ" in found(verdict, "TOK-004")
    assert verdict.strategy == "direct"


@pytest.fixture
def spelling(tmp_path, write_tokenizer, spell):
    """All 256 bytes as tokens: what texts can be written in."""
    return [spell(bytes([i])) for i in range(256)]


def test_a_normaliser_that_loses_case_is_seen_on_the_probes(edited, spelling):
    lowercase = {"type": "Lowercase"}
    verdict = edited(
        lambda backend: backend.update(normalizer=lowercase),
        target={"tokens": spelling},
        tokens=spelling,
    )
    messages = found(verdict, "TOK-005")
    assert "do not come back from the tokenizer of" in messages
    assert "THE PARTIES" in messages
    assert "encoded otherwise" not in messages  # longest_match steps in


def test_a_prefix_space_on_one_side(edited, spelling):
    def prefix(backend):
        backend["pre_tokenizer"]["add_prefix_space"] = True

    verdict = edited(prefix, target={"tokens": spelling}, tokens=spelling)
    assert verdict.relation == "identical"
    assert "pre_tokenizer differ" in found(verdict, "TOK-004")
    assert "TOK-005" not in codes(verdict)  # the space in front is known and taken off


def test_offsets_that_leave_out_spaces_on_one_side(edited, spelling):
    def trim(backend):
        backend["post_processor"] = backend["pre_tokenizer"]

    verdict = edited(trim, target={"tokens": spelling}, tokens=spelling)
    assert (verdict.relation, verdict.strategy) == ("identical", "direct")
    (finding,) = [f for f in verdict.findings if f.code == "TOK-005"]
    assert finding.severity == "info"
    assert "are the same, but begin or end elsewhere by the draft's offsets" in finding.message


def test_a_bos_on_one_side(edited):
    def bos(backend):
        sequence = {"id": "A", "type_id": 0}
        backend["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": sequence}],
            "pair": [{"Sequence": sequence}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [8], "tokens": ["<s>"]}},
        }

    verdict = edited(bos)
    assert "puts '', the draft's '<s>'" in found(verdict, "TOK-006")


def test_the_same_special_string_with_other_flags(edited):
    def strip(backend):
        backend["added_tokens"][0]["lstrip"] = True

    verdict = edited(strip)
    assert "1 added tokens are flagged otherwise by the draft (8, '<s>': lstrip)" in found(
        verdict, "TOK-008"
    )


def test_a_template_that_doubles_the_bos(tmp_path, write_tokenizer):
    spec = write_tokenizer(tmp_path / "target", template="{{ bos_token }}{{ messages[0].content }}")
    sequence = {"id": "A", "type_id": 0}
    edit(
        tmp_path / "target",
        lambda backend: backend.update(
            post_processor={
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": sequence}],
                "pair": [{"Sequence": sequence}],
                "special_tokens": {"<s>": {"id": "<s>", "ids": [8], "tokens": ["<s>"]}},
            }
        ),
    )
    assert "('<s>' twice)" in found(check_pair(spec, spec), "TOK-009")


def test_a_template_that_refuses_tools(pair):
    refuses = "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[1].content }}"
    verdict = pair(target={"template": refuses})
    assert "does not take a system message and tools (no tools)" in found(verdict, "TOK-009")


def test_templates_that_differ_but_render_the_same(pair):
    verdict = pair(template="{{ messages[0]['content'] }}")
    assert "another that renders the same" in found(verdict, "TOK-009")


def test_a_stop_inside_a_users_text(pair):
    verdict = pair()
    assert "holds '</s>' becomes the stop itself" in found(verdict, "TOK-010")


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
    before = sorted(tmp_path.rglob("*"))
    assert main(["--target", target, "--draft", draft]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: TOK-000: ")
    assert str(tmp_path / "draft") in captured.err
    assert sorted(tmp_path.rglob("*")) == before


def test_an_unknown_token_that_has_no_id_exits_with_2(tmp_path, write_tokenizer, capsys):
    target, draft = write_tokenizer(tmp_path / "target"), write_tokenizer(tmp_path / "draft")
    # as an added token it is found by name, but not by the model, which needs it
    edit(tmp_path / "draft", lambda backend: backend["model"].update(unk_token="<s>"))
    assert main(["--target", target, "--draft", draft]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: TOK-000: ")
    assert "`<s>` not found in the vocabulary" in error


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer"),
        ({"tokenizer.model": b"\x00damaged"}, "cannot be read"),
        ({"vocab.json": b'{"a": 0}'}, "TOK-000"),  # half of an old pair of files
    ],
)
def test_missing_or_unreadable_tokenizers_exit_with_2(
    tmp_path, write_tokenizer, capsys, files, message
):
    target = write_tokenizer(tmp_path / "target")
    draft = write_tokenizer(tmp_path / "draft")
    (tmp_path / "draft" / "tokenizer.json").unlink()
    for name, content in files.items():
        (tmp_path / "draft" / name).write_bytes(content)
    before = sorted(tmp_path.rglob("*"))
    assert main(["--target", target, "--draft", draft]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: TOK-000: ")
    assert message in error
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written


def test_a_slow_only_tokenizer_exits_with_2(tmp_path, write_tokenizer, capsys, monkeypatch):
    class SlowTokenizer:
        is_fast = False

    target = write_tokenizer(tmp_path / "target")
    draft = write_tokenizer(tmp_path / "draft")
    (tmp_path / "draft" / "tokenizer.json").unlink()
    monkeypatch.setattr("align.vocabulary.load_tokenizer", lambda spec: SlowTokenizer())
    before = sorted(tmp_path.rglob("*"))
    assert main(["--target", target, "--draft", draft]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: TOK-000: ")
    assert "SlowTokenizer is a slow tokenizer" in error
    assert "add the tokenizer.json of its fast form" in error
    assert sorted(tmp_path.rglob("*")) == before


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
