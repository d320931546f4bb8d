"""llama.cpp, against a stand-in for its process: what is counted, how it fails."""

import sys

import pytest

from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines import llama_cpp
from eval.engines.driven import measure_driven
from eval.engines.llama_cpp import EngineError, LlamaCpp
from eval.measuring.journal import Journal
from eval.prompts import Prompt, PromptSet

# Says TEXT to everything; with a draft in calls of three drafted tokens, the first of them right.
STAND_IN = """#!{python}
import json, os, sys, time
how = os.environ["STAND_IN"]
TEXT = list(range(100, 120))
decoded = 0
for line in sys.stdin:
    asked = json.loads(line)
    what = asked["ask"]
    if what == "load":
        if how == "cut":
            print("gguf: error: tensor 'x' is cut off", file=sys.stderr)
            print(json.dumps({"error": "draft.gguf: Failed to load model"}), flush=True)
            continue
        about = {"bytes": 100, "kv_bytes_per_token": 8, "vocab_size": 200}
        target, draft = about | {"first_other_token": None}, about | {"first_other_token": None}
        if how == "other":
            draft["first_other_token"] = [5, "a", "b"]
        answer = {"dtype": "q8_0", "stops": [119], "versions": {"stand-in": "1"}}
        answer["models"] = [target, draft | {"bytes": 50}]
    elif what == "logits":
        wide = [0.0] * 200
        wide[7] = 1.0
        single = list(wide)
        single[109] = 1.005  # the text's own token there, ahead of 7
        wide[109] = 0.99 if how == "tie" else 1.005
        answer = [single, wide]
    else:
        decoded += 1
        if how == "dies" and decoded > 5:
            print("out of luck: error", file=sys.stderr, flush=True)
            os._exit(3)
        if how == "hangs":
            time.sleep(60)
        if how == "fails":
            print(json.dumps({"error": "no KV slot"}), flush=True)
            continue
        if how == "not json":
            print("ggml: warning", flush=True)
            continue
        text = TEXT[: asked["max_new_tokens"]]
        if asked["draft"] is None:
            drafted, emitted = [[] for _ in text], [[token] for token in text]
        else:
            if how in ("differs", "tie"):
                text[9] = 7
            drafted, emitted, at = [[]], [text[:1]], 1
            while at < len(text):
                room = asked["max_new_tokens"] - at
                n = min(asked["gamma"], room - 1)
                drafted.append([text[at], 1, 2][:n] if n else [])
                emitted.append(text[at : at + (2 if n else 1)])
                at += len(emitted[-1])
            if how == "counts":
                emitted[1] = [100, 101, 102]
        answer = {"drafted": drafted, "emitted": emitted, "seconds": [0.01] * len(emitted)}
    print(json.dumps({"answer": answer}), flush=True)
"""


PROMPTS = [Prompt(str(i), prompt="x", category="ab"[i % 2], group="doc") for i in range(4)]
TIMED = PromptSet("made up", PROMPTS, [[5, 6, i] for i in range(4)])
HOW = Decoding(Sampling(), frozenset([119]), 20)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """Starts a stand-in: engine(how it is)."""
    node = tmp_path / "node"
    node.write_text(STAND_IN.replace("{python}", sys.executable))
    node.chmod(0o755)
    monkeypatch.setattr(llama_cpp, "node", lambda name: str(node))
    monkeypatch.setattr(llama_cpp, "installed", lambda name: tmp_path)
    target, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    for path in (target, draft):
        path.write_bytes(b"GGUF")
    started = []

    def start(how="good"):
        monkeypatch.setenv("STAND_IN", how)
        started.append(LlamaCpp(str(target), {"mine": str(draft)}, 3, 64))
        return started[-1]

    yield start
    for one in started:
        one.__exit__()


def measure(engine, journal, how=HOW):
    return measure_driven(engine, TIMED, how, journal, {"command": "test"})


def test_a_whole_report(engine, journal):
    report = measure(engine(), journal)
    draft = report.drafts["mine"]
    assert (report.engine, report.dtype) == ("llama.cpp", "q8_0")
    assert report.target.endswith("target.gguf")
    assert draft.path.endswith("draft.gguf")
    assert report.provenance["stand-in"] == "1"
    # 20 tokens: one of the prefill, nine calls of two tokens, and one for the last, not counted
    assert draft.tau.mean == 2
    assert draft.accepted_over_drafted.mean == pytest.approx(9 / 27, abs=0.02)
    assert draft.per_position[0].marginal.mean == 1
    assert draft.lossless.identical == draft.lossless.prompts == draft.speedup.n == 4
    assert report.decoding.ended_by_stop == 1
    assert draft.memory.overhead == 0.5
    assert draft.vocabulary.relation == "identical"
    assert set(draft.by_category) == {"a", "b"}
    assert draft.by_context["below 512 tokens"].tau.n == 4
    assert {entry.field for entry in draft.missing} >= {"alpha", "atlas", "c"}


def test_a_text_that_differs_is_not_explained_away(engine, journal):
    report = measure(engine("differs"), journal)
    ledger = report.drafts["mine"].lossless
    assert ledger.unexplained == 4
    assert (ledger.divergences[0].position, ledger.divergences[0].drafted) == (9, "token 7")
    assert report.warnings[0].startswith("NOT LOSSLESS")


def test_a_tie_is_explained_by_the_engine_s_own_logits(engine, journal):
    ledger = measure(engine("tie"), journal).drafts["mine"].lossless
    assert ledger.tie_divergences == 4
    assert all(entry.gap <= 2 * entry.error for entry in ledger.divergences)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        (
            "cut",
            r"failed to load: draft.gguf: Failed .*\(gguf: error: tensor 'x' is cut",
        ),
        ("other", r"Draft 'mine': .*draft.gguf has another vocabulary .*token 5 is 'b'.*tune"),
    ],
)
def test_models_that_cannot_be_loaded(engine, how, says):
    with pytest.raises(EngineError, match=says):
        engine(how)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("dies", r"ended while it was asked to decode \(status 3.*It said: out of luck: error"),
        ("not json", r"answered 'ggml: warning\\n' where JSON with an answer is due"),
        ("counts", "answer to prompt '0' cannot be: .* none of it is used"),
        ("fails", "failed to decode: no KV slot"),
    ],
)
def test_an_engine_that_fails_midway(engine, journal, how, says):
    with pytest.raises(EngineError, match=says):
        measure(engine(how), journal)


def test_an_engine_that_hangs_is_ended(engine, journal, monkeypatch):
    started = engine("hangs")
    monkeypatch.setattr(llama_cpp, "PATIENCE", 0.3)
    with pytest.raises(EngineError, match=r"status -9.*silent for 0.3 s"):
        measure(started, journal)


def test_what_was_measured_before_it_died_is_kept(engine, tmp_path, capsys):
    path = tmp_path / "measured.jsonl"
    with pytest.raises(EngineError), Journal(path) as journal:
        measure(engine("dies"), journal)
    assert "Measured so far: speed at T=0 1/4." in capsys.readouterr().err
    with Journal(path) as journal:
        report = measure(engine(), journal)
    assert report.provenance["resumed"]
    assert report.drafts["mine"].speedup.n == 4


def test_greedy_text_only(engine, journal):
    with pytest.raises(EngineError, match=r"temperature 0.7: .*give --temperature 0"):
        measure(engine(), journal, Decoding(Sampling(0.7), frozenset(), 20))


def test_the_process_ends_with_the_block(engine):
    with engine() as started:
        process = started._process
        assert process.poll() is None
    assert process.poll() is not None


def test_a_file_that_is_no_gguf(tmp_path, engine):
    (tmp_path / "draft.gguf").write_text("none")
    with pytest.raises(EngineError, match=r"draft.gguf is no GGUF file"):
        engine()
