"""Each relation and each finding, by a pair of tokenizers made to have it."""

import gzip
import json
import shutil

import pytest
import torch
from safetensors.torch import save_file

from align.check import check_pair, choose_strategy, main
from align.checkpoint import Checkpoint
from align.checks import Comparison, differences
from align.errors import SourceError
from tests.align.conftest import spell


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


def told(verdict, *codes):
    """(code, severity) of the findings, all of them or those with the codes."""
    return [(f.code, f.severity) for f in verdict.findings if not codes or f.code in codes]


@pytest.mark.parametrize(
    ("draft", "relation", "strategy"),
    [
        ({}, "identical", "direct"),
        ({"config": {"text_config": None}}, "identical", "direct"),
        ({"rows": 64}, "padded", "padded"),
        ({"config": {"vocab_size": 3, "text_config": {"vocab_size": 64}}}, "padded", "padded"),
        ({"added": ("<s>", "</s>", "[PAD10]", "[PAD11]")}, "padded", "padded"),
        ({"tokens": "bacdefgh"}, "permuted", "remap"),
        ({"tokens": "abcdefg"}, "subset", "intersection"),  # the ids of <s> and </s> move
        ({"added": ("<s>",), "eos": "<s>", "rows": 10}, "subset", "padded"),  # they do not
        ({"tokens": "abcdefghi"}, "superset", "remap"),
        ({"added": ("<s>", "</s>", "<tool>")}, "superset", "remap"),  # the target has no row for it
        ({"tokens": "abcdefgX"}, "intersection", "intersection"),
        ({"tokens": "abcdwxyz"}, "intersection", "intersection"),
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
    assert verdict.shared_ids == (9 if relation == "subset" else 10)


def test_the_target_as_its_own_draft(write):
    spec = write("target")
    verdict = check_pair(spec, spec)
    assert (verdict.relation, verdict.strategy, verdict.coverage) == ("identical", "direct", 1.0)
    assert verdict.tuned_strategy == "direct"
    assert not verdict.findings


def test_a_token_where_the_other_has_a_placeholder(pair):
    target = {"added": (*ENDS, "<tool>", "[PAD11]")}
    verdict = pair(target=target, added=(*ENDS, "[PAD10]", "<tool>"))
    assert (verdict.relation, verdict.strategy) == ("permuted", "remap")


OTHERS = {"tokens": "abcdefgX"}
SOFT_CAP = {"config": {"final_logit_softcapping": 30.0}}


@pytest.mark.parametrize(
    ("draft", "asked", "tuned", "chosen"),
    [
        ({}, "auto", True, "direct"),
        ({}, "transplant", True, "direct"),  # the draft has the target's ids
        ({}, "intersection", False, "intersection"),
        ({"rows": 64}, "remap", True, "padded"),
        ({"rows": 64}, "direct", False, None),
        ({"tokens": "bacdefgh"}, "auto", True, "remap"),
        ({"tokens": "bacdefgh"}, "transplant", True, "transplant"),
        ({"tokens": "bacdefgh"}, "direct", False, None),
        (OTHERS, "auto", False, "intersection"),
        (OTHERS, "auto", True, "transplant"),
        (OTHERS, "transplant", False, "transplant"),
        (OTHERS, "intersection", True, None),  # a draft is trained in the target's ids
        (OTHERS, "remap", True, None),
        (OTHERS | SOFT_CAP, "auto", False, "intersection"),
        (OTHERS | SOFT_CAP, "transplant", False, None),
        (SOFT_CAP, "auto", False, "direct"),
        (SOFT_CAP, "auto", True, None),
        ({"tokens": "ijklmnop"}, "auto", False, None),
    ],
)
def test_the_strategy_of_a_run(pair, draft, asked, tuned, chosen):
    verdict = pair(**draft)
    if chosen is None:
        with pytest.raises(ValueError, match=r"TOK-|use '"):
            choose_strategy(verdict, asked, tuned)
    else:
        assert choose_strategy(verdict, asked, tuned) == chosen


# --- findings


def sets(**changes):
    return lambda backend: backend.update(changes)


def sets_model(**changes):
    return lambda backend: backend["model"].update(changes)


def puts(first):
    """An edit after which the tokenizer puts <s> before (or behind) every text."""
    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return sets(
        post_processor={
            "type": "TemplateProcessing",
            "single": parts if first else parts[::-1],
            "pair": parts[1:],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [8], "tokens": ["<s>"]}},
        }
    )


def split(backend):
    """An edit after which texts are split at digits, too."""
    digits = {"type": "Digits", "individual_digits": True}
    steps = [digits, backend["pre_tokenizer"]]
    backend["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}


def begins_with_a_space(backend):
    backend["pre_tokenizer"]["add_prefix_space"] = True


ENDS = ("<s>", "</s>")


def context(length):
    """A config with this context length."""
    return {"config": {"max_position_embeddings": length}}


NO_STOP = {"eos": None, "generation_config": {"eos_token_id": None}}
BIAS = {"lm_head.weight": torch.zeros(10, 2), "lm_head.bias": torch.zeros(10)}
MERGED = {"tokens": [*"abcdefgh", "ab"]}
RAISES = "{{ raise_exception('no system') }}"
OF_THE_HUB = (
    "{% generation %}{% endgeneration %}{% if tools is not none %}{{ tools | tojson }}{% endif %}"
)


@pytest.mark.parametrize(
    ("code", "severity", "ids", "how"),
    [
        ("001", "error", [7], {"tokens": "abcdefgX"}),
        ("001", "error", [2, 3], {"tokens": "abdcefgh"}),
        ("001", "fatal", [], {"tokens": "ijklmnop"}),
        ("002", "fatal", [9], {"rows": 9}),
        ("002", "fatal", [9], {"target": {"rows": 9}}),
        ("006", "error", [], {"tokenizer_config": {"pad_token": "<none>"}}),
        ("006", "error", [8], {"target": {"edit": puts(first=False)}}),
        ("007", "error", [], {"target": NO_STOP, **NO_STOP}),
        ("009", "warning", [], {"target": {"template": None}}),
        ("009", "warning", [], {"target": {"template": RAISES}}),
        ("009", "warning", [], {"target": {"template": "{{ 1 / 0 }}"}}),
        ("019", "warning", [], {"target": context(64), "config": {"max_position_embeddings": 63}}),
        ("012", "warning", [], {"weights": BIAS}),
        ("012", "warning", [], {"config": {"logit_scale": 0.5}}),
        (
            "003",
            "warning",
            [],
            {"tokenizer_config": {"tokenizer_class": "GPT2Tokenizer"}, "edit": split},
        ),
        ("003", "warning", [], {"tokenizer_config": {"tokenizer_class": "RobertaTokenizer"}}),
    ],
)
def test_what_is_found(pair, code, severity, ids, how):
    verdict = pair(**how)
    found = [(f.code, f.severity, [*f.ids]) for f in verdict.findings]
    assert (f"TOK-{code}", severity, ids) in found
    assert verdict.fatal == (severity == "fatal")


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("002", {"target": {"rows": 10, "added": ("<s>", "</s>", "<image>")}}),  # no text holds it
        ("009", {"target": {"template": OF_THE_HUB}}),
        ("012", {"config": {"logit_scale": 1.0}}),
        ("019", {"target": context(64), "config": {"max_position_embeddings": 64}}),
        ("019", {"target": context(64)}),
    ],
)
def test_what_is_not_found(pair, code, how):
    assert told(pair(**how), f"TOK-{code}") == []


@pytest.mark.parametrize(
    ("names", "how"),
    [
        ([], {}),
        ([], {"rows": 64}),
        (["normalizer"], {"edit": sets(normalizer={"type": "NFC"})}),
        (["pre_tokenizer"], {"edit": begins_with_a_space}),
        (["unk_token"], {"edit": sets_model(unk_token="a")}),
        (["merges"], {"target": MERGED, **MERGED, "edit": sets_model(merges=[["a", "b"]])}),
        (["bos_token"], {"tokenizer_config": {"bos_token": "</s>"}}),
        (["tokens before a text", "post_processor"], {"edit": puts(first=True)}),
        (["stop tokens"], {"target": {"generation_config": {"eos_token_id": [8, 9]}}}),
        (["chat template"], {"template": "other"}),
        (["chat template"], {"template": None}),
    ],
)
def test_differences_without_effect_stand_in_one_line(write, names, how):
    how = dict(how)
    specs = write("target", **how.pop("target", {})), write("draft", **how)
    sides = (Checkpoint.open(spec).vocabulary for spec in specs)
    assert [*differences(Comparison(*sides))] == names
    assert told(check_pair(*specs), "TOK-017") == [("TOK-017", "info")] * bool(names)


def test_tokens_that_only_the_configuration_adds_are_known(pair):
    """As AutoTokenizer reads them, with which prompts are rendered."""
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    end = {"10": {"content": "<end>", "special": True, **flags}}
    beside = {"eos_token": "<end>", "added_tokens_decoder": end}
    ends = {"eos_token_id": 10}
    verdict = pair(
        target={"tokenizer_config": beside, "config": {"vocab_size": 11} | ends}
        | {"generation_config": ends},
        rows=11,
        added=(*ENDS, "<end>"),
        eos="<end>",
    )
    assert (verdict.relation, verdict.strategy) == ("identical", "direct")
    assert [str(finding) for finding in verdict.findings] == []


def test_truncated_weights_are_ill_formed(write, tmp_path):
    target, draft = write("target"), write("draft", weights=BIAS)
    path = tmp_path / "draft" / "model.safetensors"
    for length in (path.stat().st_size - 1, 20, 3, 0):
        path.write_bytes(path.read_bytes()[:length])
        with pytest.raises(SourceError, match="TOK-000"):
            check_pair(target, draft)


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        ({}, {}, ("yes", "yes", "yes")),
        ({}, {"tokens": "abdcefgh"}, ("no", "no", "yes")),  # it compares from id 5 on
        ({}, {"tokens": "abcdefhg"}, ("no", "no", "no")),
        ({}, {"rows": 64}, ("no", "yes", "yes")),
        ({}, {"rows": 640}, ("no", "yes", "no")),
        ({}, {"edit": sets_model(byte_fallback=True)}, ("yes", "yes", "no")),
        ({}, {"edit": puts(first=True)}, ("yes", "yes", "no")),
        ({}, {"edit": puts(first=False)}, ("yes", "yes", "no")),
        ({}, {"tokens": "abcdwxyzst"}, ("greedy only", "yes", "no")),
        # a name where the other has padding or a placeholder
        ({"rows": 12}, {"rows": 12, "added": (*ENDS, "<tool>")}, ("yes", "yes", "no")),
        ({"added": (*ENDS, "<tool>")}, {"added": (*ENDS, "<|reserved_1|>")}, ("yes", "yes", "no")),
        # other stops, and a token that is special on one side only
        ({}, {"eos": "<s>"}, ("yes", "yes", "yes")),
        ({}, {"special": False}, ("yes", "yes", "yes")),
        ({"rows": 3}, {}, ("no", "yes", "yes")),
    ],
)
def test_the_verdict_of_each_engine(pair, target, draft, expected):
    engines = pair(target=target, **draft).engines
    assert [e.engine for e in engines] == ["transformers", "vLLM", "llama.cpp"]
    assert tuple(e.works for e in engines) == expected


# --- coverage


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("name", ["corpus.txt", "prompts.jsonl", "prompts.jsonl.gz"])
def test_coverage_is_weighted_by_a_corpus(pair, tmp_path, name, mark):
    """The draft lacks the h of the letters "aaab" + "hh": 4 of 6."""
    path = tmp_path / name
    rows = [{"prompt": "aaab"}, {"prompt": None, "messages": [{"role": "user", "content": "hh"}]}]
    text = "aaabhh" if name.endswith(".txt") else "\n".join(map(json.dumps, rows)) + "\n"
    raw = mark + text.encode()
    path.write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
    assert pair(tokens="abcdefgX", corpus=str(path)).coverage == pytest.approx(4 / 6)


def test_templates_by_name_are_named(write, tmp_path):
    """Without a default one, prompts are refused by these names."""
    target = write("target", template=None)
    folder = tmp_path / "target" / "additional_chat_templates"
    folder.mkdir()
    for name in ("rag", "tool_use"):
        (folder / f"{name}.jinja").write_text("{{ messages[0].content }}")
    (finding,) = [f for f in check_pair(target, write("draft")).findings if f.code == "TOK-009"]
    assert "rag, tool_use" in finding.message


def test_without_a_corpus_coverage_is_weighted_by_english_text(pair):
    assert 0.8 < pair(tokens="abcdefgX").coverage < 0.95  # by count 0.9


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("corpus.txt", b""),
        ("corpus.txt", b"\xff\xfe"),
        ("corpus.txt.gz", b"plain"),
        ("corpus.txt.gz", gzip.compress(b"a", mtime=0)[:-9]),
        ("prompts.jsonl", b'{"prompt": "a"}\n{'),
        ("prompts.jsonl", b'{"prompt": null}'),
    ],
)
def test_a_corpus_that_cannot_be_read(pair, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=name):
        pair(corpus=str(tmp_path / name))


# --- weights


UNITS = [spell(bytes([byte])) for byte in range(256)]


@pytest.fixture
def checked(tmp_path, write, tiny_llama):
    """checked(change of the draft's model, **its tokenizer): findings TOK-016, and the verdict."""

    def check(change=lambda model: None, **draft):
        specs = []
        for name, how in (("target", {}), ("draft", draft)):
            specs.append(write(name, **({"tokens": UNITS} | how)))
            config = json.loads((tmp_path / name / "config.json").read_text())
            model = tiny_llama(1, vocab_size=config["vocab_size"])
            if name == "draft":
                change(model)
            model.save_pretrained(tmp_path / "weights")
            for path in (tmp_path / "weights").iterdir():
                shutil.move(path, tmp_path / name / path.name)
        verdict = check_pair(*specs, weights=True)
        return [f for f in verdict.findings if f.code == "TOK-016"], verdict

    return check


def spoil(model):
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")


@pytest.mark.parametrize(
    ("change", "draft", "severity", "strategy"),
    [
        (lambda model: None, {}, None, "direct"),
        (spoil, {}, "fatal", None),
        (lambda model: None, {"rows": 600}, "warning", "padded"),  # rows as likely as any other
        (
            lambda model: None,  # mass that only the draft has
            {"tokens": [*UNITS[:236], *(f"word{i}" for i in range(100))]},
            "warning",
            "intersection",
        ),
    ],
)
def test_models_on_a_probe_text(checked, change, draft, severity, strategy):
    found, verdict = checked(change, **draft)
    assert [finding.severity for finding in found] == [severity] * bool(severity)
    assert verdict.strategy == strategy
    if "rows" in draft:
        assert min(found[0].ids) >= 258


@pytest.mark.parametrize("own_head", [False, True])
def test_a_head_of_its_own_beside_a_flag_of_tied_weights_is_named(checked, own_head):
    def flag(model):
        model.config.tie_word_embeddings = True
        if not own_head:
            model.tie_weights()

    _, verdict = checked(flag)
    assert [f.severity for f in verdict.findings if f.code == "TOK-018"] == ["warning"] * own_head
    assert verdict.strategy == "direct"


# --- input and output


NO_CLASS = '{"model": {"type": "BPE", "vocab": 3}, "decoder": {"type": "ByteLevel"}}'
WORD_PIECE = '{"model": {"type": "WordPiece", "vocab": {}}}'


@pytest.mark.parametrize(
    ("code", "file", "content"),
    [
        ("TOK-000", "tokenizer.json", "{}"),
        ("TOK-000", "tokenizer.json", NO_CLASS),
        ("TOK-000", "tokenizer.json", WORD_PIECE),
        ("TOK-000", "tokenizer.json", "not json"),
        ("TOK-000", "config.json", "[]"),
        ("TOK-000", "tokenizer_config.json", '{"eos_token": {"no": "content"}}'),
        ("TOK-000", "generation_config.json", '{"eos_token_id": [[1]]}'),
        ("TOK-000", "tokenizer.json", None),
        ("TOK-000", "tokenizer.model", "\0"),  # half of an older one
        ("TOK-000", "vocab.json", '{"a": 0}'),
        ("TOK-013", "adapter_config.json", "{}"),
    ],
)
def test_input_that_is_missing_or_ill_formed(write, tmp_path, capsys, code, file, content):
    target, draft = write("target"), write("draft")
    path = tmp_path / "draft" / file
    if content is None or file in ("tokenizer.model", "vocab.json"):
        (tmp_path / "draft" / "tokenizer.json").unlink()
    if content is not None:
        path.write_text(content)
    before = sorted(tmp_path.rglob("*"))
    assert main(["--target", target, "--draft", draft]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {code}: ")
    assert draft in captured.err
    assert sorted(tmp_path.rglob("*")) == before  # nothing is written


def test_a_slow_only_tokenizer_is_refused(write):
    class SlowTokenizer:
        is_fast, eos_token_id = False, None

    model = Checkpoint.open(write("draft"))
    model.tokenizer = SlowTokenizer()
    with pytest.raises(SourceError, match=r"TOK-000: .*SlowTokenizer"):
        assert model.vocabulary


def test_exit_codes_and_json(write, tmp_path, capsys):
    target = write("target")
    good, bad = write("good", rows=16), write("bad", tokens="ijklmnop")
    assert main(["--target", target, "--draft", good, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["relation"] == report["strategy"] == "padded"
    assert report["fatal"] is False
    assert report["shared_ids"] == 10
    assert main(["--target", target, "--draft", bad]) == 1
    shown = capsys.readouterr().out
    assert "disjoint" in shown
    assert "TOK-001 FATAL: " in shown
    assert main(["--target", target, "--draft", bad, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert (report["strategy"], report["tuned_strategy"]) == (None, None)
    assert report["findings"][0].keys() == {"code", "severity", "message", "fix", "ids"}
    assert main(["--target", target, "--draft", str(tmp_path / "none")]) == 2
    with pytest.raises(SystemExit) as stopped:
        main(["--target", "x"])
    assert stopped.value.code == 2
