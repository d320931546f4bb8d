"""The loop from traffic to a draft publishes what has passed its gate, and nothing else, ever."""

import calendar
import errno
import gzip
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.special import stdtrit

from align import files
from align.cache import cache_folder
from align.checkpoint import Checkpoint, weights_sha256
from align.errors import UserError
from align.files import read_json
from distill import adapt as module
from distill.adapt import main
from distill.gate import FAILED, NOTHING, PUBLISHED, REFUSED, judged, lower_bound, undecided
from distill.recipe import OWN, TRAINING, build_recipe, dump
from distill.recipe_files import read_yaml, yaml_text
from distill.teacher.logged_rows import WITHOUT_HALF, LeftOut
from distill.traffic import DAY, Split, digest, read_traffic, rows_of, split, usable
from eval.decoding.target import load_target
from eval.engines.start_vllm import VllmLauncher, serve_vllm, speculation
from eval.measuring.intervals import Starts
from eval.measuring.journal import JOURNAL
from eval.measuring.runs import REFERENCE_ONLY
from eval.prompts import Prompt, write_prompts
from eval.reporting.build import build_report
from eval.reporting.fields import LoadPoint
from eval.reporting.files import write_report
from eval.reporting.traffic import NotComparable
from tests.conftest import made_up_measurement, made_up_run
from tests.distill.conftest import WORDS as SPOKEN
from tests.distill.teacher.test_logged import TEMPLATE
from tests.distill.teacher.test_server_target import StandIn
from tests.siblings import LARGE, save_sibling
from tests.test_docs import ROOT, blocks, commands

# --- The gate

PLAIN, BETTER, WORSE = 0.0, 0.25, -0.25  # gains in acceptance


@pytest.fixture(scope="module")
def compared(run_info):
    """Makes the report of a served and a new draft: compared(rng, gain in acceptance, …)."""

    def runs(rng, alpha, prompts):
        """The logs of one draft. alpha: of each prompt; a draft's acceptance varies around it."""
        for i in range(prompts):
            share = min(max(alpha[i] + rng.gauss(0, 0.05), 0.02), 0.98)
            run = made_up_run(rng, str(i), share, 3, blocks=rng.randrange(12, 32))
            noise = rng.lognormvariate(0, 0.03)
            yield replace(run, block_seconds=[seconds * noise for seconds in run.block_seconds])

    def report(rng, gain, prompts=40, engine="torch", mismatch=False):
        plain = [made_up_run(rng, str(i), 0, 0, blocks=30) for i in range(prompts)]
        alpha = [rng.gauss(0.55, 0.12) for _ in range(prompts)]
        bad = {"prompt": "0", "position": 3, "target": "a", "drafted": "b", "tie": False}
        divergences = [bad | {"gap": 1.0, "error": 0.01}] * mismatch
        fields = {"baseline": plain, "agreement": None, "costs": None, "missing": REFERENCE_ONLY}
        fields["lossless"] = {"prompts": prompts, "divergences": divergences}
        drafts = [
            made_up_measurement(name, 0.5, runs=[*runs(rng, shares, prompts)], **fields)
            for name, shares in (("untuned", alpha), ("tuned", [a + gain for a in alpha]))
        ]
        about = run_info.about | {"engine": engine}
        return build_report(replace(run_info, about=about), drafts)

    return report


@pytest.mark.parametrize(
    ("recent", "earlier", "engine", "status"),
    [
        (PLAIN, PLAIN, "torch", NOTHING),  # the traffic has not moved
        (WORSE, WORSE, "torch", NOTHING),
        (WORSE, BETTER, "torch", NOTHING),
        (BETTER, WORSE, "torch", REFUSED),
        (BETTER, BETTER, "vllm", PUBLISHED),
    ],
)
def test_twenty_weeks(compared, recent, earlier, engine, status):
    """Only a draft that is faster on the newest day and not worse on earlier prompts passes."""
    rng = random.Random(2)  # with the 95% interval, 2 of the first 20 weeks would pass
    weeks = [
        judged([compared(rng, recent, engine=engine)], compared(rng, earlier, engine=engine), 0.1)
        for _ in range(20)
    ]
    assert {verdict for verdict, _ in weeks} == {status}


@pytest.mark.parametrize(
    ("engine", "half", "over_starts", "status"),
    [
        ("torch", 0.001, None, PUBLISHED),
        ("vllm", 0.001, None, NOTHING),  # the interval does not cover starts
        ("vllm", 0.001, 0.0009, PUBLISHED),
        ("vllm", 0.012, 0.001, PUBLISHED),
        ("vllm", 0.012, 0.0119, NOTHING),  # t at this level is 4 times that of 95%
    ],
)
def test_what_a_server_start_changes_is_no_gain(compared, engine, half, over_starts, status):
    """In vLLM one draft under two names differed by 4% of its speed-up (docs/lab-notes.md)."""
    report = compared(random.Random(1), PLAIN)
    served, gain = report.drafts["untuned"].speedup.mean, report.gain[0].speedup
    gain.mean, gain.ci95 = 0.04 * served, ((0.04 - half) * served, (0.04 + half) * served)
    report.engine = engine
    if over_starts:
        gain.over_starts = over_starts * served
        servers = ("target", "untuned", "tuned")
        report.starts = Starts(seconds_per_token={name: [1.0, 1.02] for name in servers})
    assert judged([report], report, 0.1)[0] == status


def test_four_starts_show_what_two_leave_undecided(compared):
    """As measured in vLLM (docs/lab-notes.md): 24 prompts, three servers, 3.2% between starts."""

    def report(mean):
        made = compared(random.Random(1), PLAIN, engine="vllm", prompts=24)
        gain = made.gain[0].speedup
        gain.mean, gain.ci95, gain.over_starts = mean, (mean - 0.105, mean + 0.105), 0.092
        gain.freedom = 23.0
        servers = ("target", "untuned", "tuned")
        made.starts = Starts(seconds_per_token={name: [1.0, 1.046] for name in servers})
        return made

    better, plain, worse = report(0.25), report(0.05), report(-0.25)
    assert [undecided(one) for one in (better, plain, worse)] == [True, False, False]
    over_prompts = np.sqrt(0.105**2 - 0.092**2) / stdtrit(23, 0.975) * stdtrit(23, 0.9995)
    for count in (1, 2):
        error = 0.092 / stdtrit(3, 0.975) / np.sqrt(count)
        half = np.hypot(over_prompts, error * stdtrit(3 * count, 0.9995))
        assert lower_bound([better] * count) == pytest.approx(0.25 - half, rel=1e-6)
        assert (half < 0.25) == (count == 2)
    assert lower_bound([better, plain]) == pytest.approx(lower_bound([better] * 2) - 0.1)
    assert judged([better, plain], better, 0.2)[0] == NOTHING
    assert judged([better, better], better, 0.2)[0] == PUBLISHED
    better.starts = None  # running servers, or the reference decoder
    assert not undecided(better)


def test_a_draft_that_changes_outputs_is_refused(compared):
    rng = random.Random(1)
    good, bad = compared(rng, BETTER), compared(rng, BETTER, mismatch=True)
    pairs = ([good], good), ([bad], good), ([good, bad], good), ([good], bad)
    verdicts = [judged(*pair, 0.1)[0] for pair in pairs]
    assert verdicts == [PUBLISHED, REFUSED, REFUSED, REFUSED]


@pytest.mark.parametrize(
    ("new", "served", "status"),
    [
        ((1.35, 0.01), (1.3, 0.01), PUBLISHED),
        ((1.3, 0.02), (1.3, 0.02), PUBLISHED),
        ((1.3, 0.2), (1.3, 0.0), REFUSED),  # it may lose more than the margin
        ((1.3, 0.0), (1.3, 0.2), REFUSED),
        ((1.1, 0.01), (1.3, 0.01), REFUSED),
    ],
)
@pytest.mark.parametrize("slower", ["recent", "earlier"])
def test_a_draft_that_loses_at_a_load_of_the_gate_is_refused(compared, new, served, status, slower):
    """It is faster at one request at a time; the operator's server has eight."""
    reports = {name: compared(random.Random(1), BETTER) for name in ("recent", "earlier")}
    for name, (speedup, half) in (("untuned", served), ("tuned", new)):
        draft = reports[slower].drafts[name]
        measured = draft.speedup.model_copy(
            update={"mean": speedup, "ci95": (speedup - half, speedup + half)}
        )
        draft.by_load = [
            LoadPoint.model_construct(concurrency=8, request_rate=None, speedup=measured)
        ]
    assert judged([reports["recent"]], reports["earlier"], 0.1)[0] == status


@pytest.mark.parametrize(("without", "status"), [("tuned", REFUSED), ("untuned", PUBLISHED)])
def test_a_draft_that_is_overloaded_at_a_load_of_the_gate_is_refused(compared, without, status):
    """Then its report has no speed-up at this load."""
    report = compared(random.Random(1), BETTER)
    for name in {"tuned", "untuned"} - {without}:
        point = LoadPoint.model_construct(
            concurrency=None, request_rate=2.0, speedup=report.drafts[name].speedup
        )
        report.drafts[name].by_load = [point]
    assert judged([report], report, 0.1)[0] == status


def test_a_gain_on_traffic_that_no_draft_makes_faster(compared):
    report = compared(random.Random(1), BETTER)
    assert "none" not in judged([report], report, 0.1)[1]
    report.drafts["tuned"].speedup.ci95 = (0.94, 1.03)
    status, reason = judged([report], report, 0.1)
    assert status == PUBLISHED
    assert "none" in reason


def test_too_few_prompts_publish_nothing(compared):
    rng = random.Random(1)
    few, many = compared(rng, BETTER, prompts=9), compared(rng, BETTER)
    with pytest.raises(NotComparable):
        judged([few], many, 0.1)
    assert judged([many], few, 0.1)[0] == REFUSED  # without an interval any loss is possible


# --- The rows

WORDS = [f"word{i}" for i in range(500)]
SECRET = "please send the numbers of the last quarter to jane@example.org before noon"
EVALUATED = "write a function that counts the vowels in each line of a long text file"


def row(day, text=None, consent=True, said="Done."):
    """A row of that many days after the beginning of time."""
    text = text or " ".join(random.Random(day).choices(WORDS, k=12))
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": said}]
    return {"time": day * DAY, "messages": turns, "consent": consent}


def kept(*rows, limit=100):
    """The days of the rows that are kept on day 100."""
    redact = [re.compile(r"[\w.]+@[\w.]+")]
    evaluated = [Prompt("0", EVALUATED)]
    usual = usable(rows, evaluated, 100 * DAY, 30, redact, limit, LeftOut())
    return [r["time"] / DAY for r in usual]


def test_rows_that_only_a_server_can_answer_are_left_out():
    assert kept(row(99), row(98) | {"response_format": {"type": "json_object"}}) == [99]


@pytest.mark.parametrize("rows", [[], [{"messages": []}], [row(1), {"messages": []}]])
def test_rows_without_a_time_are_refused(tmp_path, rows):
    (tmp_path / "monday.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(UserError, match="monday" if rows else str(tmp_path)):
        read_traffic(tmp_path)


def write_log(path, *rows):
    path.write_bytes(
        b"\n".join(r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows)
    )


def half_of(path):
    """A gzip file of rows, up to its middle."""
    path.write_bytes(gzip.compress(json.dumps([row(i) for i in range(40)]).encode())[:-100])


def test_what_is_no_row_is_counted_by_file(tmp_path, capsys):
    write_log(tmp_path / "a.jsonl", row(1), b'{"time": 3, "mess', row(2), {"messages": []}, row(3))
    write_log(tmp_path / "a.jsonl.1", row(4))
    (tmp_path / "a.jsonl-20260101.gz").write_bytes(gzip.compress(json.dumps(row(5)).encode()))
    half_of(tmp_path / "b.jsonl.gz")
    foreign = ["a.jsonl.pos", ".a.jsonl.swp", ".a.jsonl", "a.jsonl.2026-01-01.zst", "notes.txt"]
    for name in foreign:
        (tmp_path / name).write_bytes(b"\x00\xff")
    (tmp_path / "c.jsonl").mkdir()
    rows, left_out = read_traffic(tmp_path)
    assert sorted(r["time"] / DAY for r in rows) == [1, 2, 3, 4, 5]
    assert +left_out.counts == {"not readable": 4, "files that are no log": len(foreign)}
    out = capsys.readouterr().out
    assert re.search(r"a\.jsonl: 3 rows; left out: 2 not readable .*line 2", out)
    assert re.search(r"b\.jsonl\.gz: 0 rows; left out: 1 not readable", out)


def test_a_batch_in_two_files_of_a_folder(tmp_path):
    asked = {"custom_id": "a", "body": {"messages": row(1)["messages"][:1]}, "time": DAY}
    given = {"custom_id": "a", "response": {"body": {"choices": [{"message": {"content": "A"}}]}}}
    write_log(tmp_path / "output.jsonl", given, given | {"custom_id": "b"})
    write_log(tmp_path / "z-input.jsonl", asked)
    (made,), left_out = read_traffic(tmp_path)
    assert [turn["role"] for turn in made["messages"]] == ["user", "assistant"]
    assert +left_out.counts == {WITHOUT_HALF: 1}


@pytest.mark.parametrize(
    "dropped",
    [
        row(100.5),  # its clock is ahead
        row(69.9),
        row(98, consent=False),
        row(98, consent="no"),
        row(98, SECRET),
        row(98, said=SECRET),
        row(98, f"{row(99)['messages'][0]['content']} again"),
        row(98, EVALUATED),
        row(98) | {"messages": [{"role": "user", "image": "cat.png"}]},
    ],
    ids="future old consent no-consent redacted said repeated evaluated not-readable".split(),
)
def test_rows_that_are_not_kept(dropped):
    assert kept(row(97), dropped, row(99.5), row(99)) == [99.5, 99, 97]


def test_the_newest_rows_are_kept_of_the_newest_day_and_of_the_days_before():
    days = [99.9, 99.8, 99.7, 98.5, 98.4, 98.3]
    assert kept(*map(row, days), limit=2) == [99.9, 99.8, 98.5, 98.4]


def parts(since, trained, old_share=0.5, run_rows=20, an_hour=2, late=range(0)):
    """The days of the rows to train and to test on, from day 90 to day 100.

    trained: the day until which rows have been trained on, except for those that were late.
    """
    rows = [row(100 - i / 24 / an_hour) for i in range(int(240 * an_hour))]
    known = [digest(r) for i, r in enumerate(rows) if r["time"] <= trained * DAY and i not in late]
    cut = split(rows, [row(0)] * run_rows, since * DAY, known, old_share)
    train, test = (sorted(r["time"] / DAY for r in rows) for rows in (cut.train, cut.test))
    return train, test, cut


def test_the_newest_day_is_tested_and_only_earlier_rows_are_trained_on():
    train, test, cut = parts(since=95, trained=95)
    assert len(test) == 48
    assert min(test) > 99 == max(train)
    assert cut.newest == 100 * DAY
    assert len(cut.trained) == 432
    assert {*cut.trained} == {digest(row(100 - i / 48)) for i in range(48, 480)}
    assert sum(day > 95 for day in train) == sum(day <= 95 for day in train) == 192
    assert 0.0 in train  # a row of the run


def test_a_day_is_tested_once():
    """The rows of a test that ended in nothing train the next draft, and are not tested again."""
    train, test, _ = parts(since=99.5, trained=97)
    assert min(test) > 99.5 == max(train)
    assert not parts(since=99.9, trained=97)[1]


def test_rows_that_come_late_are_trained_on_and_not_tested():
    late = range(300, 320)  # of a replica whose file came after the rows around them were used
    train, test, _ = parts(since=99, trained=98, old_share=0, late=late)
    assert len(train) == 48 + len(late)
    assert min(train) < 94 < min(test)


def test_days_with_few_rows_are_tested_together():
    """Eight rows a day: ten are tested, and the others trained on."""
    train, test, _ = parts(since=0, trained=0, run_rows=0, an_hour=1 / 3)
    assert (len(test), len(train)) == (10, 70)
    assert max(train) < min(test) < 99
    train, test, _ = parts(since=99.2, trained=98, run_rows=0, an_hour=1 / 3)
    assert not test  # seven are new
    train, test, _ = parts(since=98, trained=96, old_share=0, an_hour=1 / 3)
    assert (len(test), len(train)) == (10, 22)


def test_a_rolled_back_draft_s_rows_are_new_again():
    train, _, _ = parts(since=99, trained=0, run_rows=0)
    assert len(train) == 432


def test_a_share_of_zero_is_no_old_row():
    assert min(parts(since=99, trained=98, old_share=0)[0]) > 98


@pytest.mark.parametrize(("since", "trained"), [(99.85, 95), (95, 98.85)])
def test_too_few_rows_of_a_part(since, trained):
    train, test, cut = parts(since, trained)
    assert not train
    assert not test
    assert cut.lacking


def test_no_row_at_all():
    assert split([], [row(0)], 5 * DAY, [], 0.3).lacking


def test_the_rows_of_a_run_that_was_trained_on_logged_outputs(folder, tmp_path):
    recipe = {"target": str(folder / "target"), "train_prompts": "a", "eval_prompts": "b"}
    (tmp_path / "recipe.yaml").write_text(dump(build_recipe(recipe | {"answers": "logged"})))
    (tmp_path / "answers.json").write_text(json.dumps({"store": "none", "count": 3}))
    turns, output = [{"role": "user", "content": "Hi."}], {"token_ids": [5, 6], "temperature": 0.7}
    prompts = [Prompt("0", messages=turns, logged_output=output), Prompt("1", "raw")]
    write_prompts(tmp_path / "prompts" / "train.jsonl", [*prompts, Prompt("2", messages=turns)])
    (tmp_path / "prompts" / "ids.json").write_text(json.dumps({"train": [[1], [2], [3]]}))
    (made,) = rows_of(tmp_path)  # the others are raw, and no longer cached
    assert made.items() >= output.items()
    assert [turn["role"] for turn in made["messages"]] == ["user", "assistant"]


# --- The loop, with a training and a measurement that cost nothing


class Loop:
    """A run, and calls of its loop. gains: in acceptance, of the next drafts."""

    def __init__(self, run, reports):
        self.run, self.home, self.reports = run, run / "adapt", reports
        self.gains = BETTER, PLAIN
        self.now = 1_800_000_000.0
        self.made = 0  # drafts

    def call(self, *more):
        self.now += 7 * DAY
        return main([str(self.run), "--traffic", "unread", *map(str, more)])

    def train(self, recipe, measured=True, summary=True):
        """What a training run leaves."""
        self.made, self.recipe = self.made + 1, recipe
        draft = recipe.folder / "draft"
        made_draft(draft, self.made)
        (recipe.folder / "recipe.yaml").write_text(dump(recipe))
        (recipe.folder / "provenance.json").write_text("{}")
        if measured:
            self.report(recipe.folder, self.gains[0], weights_sha256(draft))

    def evaluate(self, options, summary=True):
        folder = Path(options[options.index("--output_dir") + 1])
        (tuned,) = (option[6:] for option in options if option.startswith("tuned="))
        self.report(folder, self.gains[1], weights_sha256(Path(tuned)))
        return 0

    def report(self, folder, gain, sha256):
        shutil.copytree(self.reports[gain], folder / "report")
        path = folder / "report" / "report.json"
        values = json.loads(path.read_text())
        values["drafts"]["tuned"] |= {"sha256": sha256}
        path.write_text(json.dumps(values))

    @property
    def served(self):
        """The number of the served draft; the run's own is 0. Its files are whole."""
        folder = (self.home / "current").resolve(strict=True)
        assert sorted(path.name for path in folder.iterdir() if path.name != "README.md") == FILES
        return int(load_file(folder / "model.safetensors")["weight"][0])


FILES = ["config.json", "model.safetensors", "tokenizer.json"]


def made_draft(folder, number):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    save_file({"weight": torch.full((64,), float(number))}, folder / "model.safetensors")


@pytest.fixture(scope="module")
def reports(compared, tmp_path_factory):
    """A report of each gain."""
    folders = {gain: tmp_path_factory.mktemp("report") for gain in (PLAIN, BETTER, WORSE)}
    for gain, folder in folders.items():
        write_report(folder, compared(random.Random(1), gain, prompts=20))
    return folders


@pytest.fixture
def loop(tmp_path, monkeypatch, reports):
    run = tmp_path / "code"
    made_draft(run / "draft", 0)
    made_draft(tmp_path / "target", 0)
    recipe = {"target": str(tmp_path / "target"), "train_prompts": "a", "eval_prompts": "b"}
    (run / "recipe.yaml").write_text(dump(build_recipe(recipe)))
    (run / "provenance.json").write_text("{}")
    (run / "vocab_check.json").write_text("{}")
    monkeypatch.setattr(VllmLauncher, "program", lambda: None)
    made = Loop(run, reports)

    def rows(args, state, served, now, about):
        assert state.until < now
        about["rows"] = 2
        return Split([row(0)], [row(1)], now - DAY, ["0a"])

    monkeypatch.setattr(module, "select", rows)
    monkeypatch.setattr(module, "write_rows", lambda path, rows: path.parent.mkdir(exist_ok=True))
    monkeypatch.setattr(module.train, "run", made.train)
    monkeypatch.setattr(module.evaluation, "main", made.evaluate)
    monkeypatch.setattr(module.time, "time", lambda: made.now)
    monkeypatch.setattr(module, "derived_licence", lambda specs: (None, "nobody says"))
    return made


@pytest.mark.parametrize(
    ("gains", "status"),
    [
        ((BETTER, PLAIN), PUBLISHED),
        ((PLAIN, BETTER), NOTHING),
        ((WORSE, BETTER), NOTHING),
        ((BETTER, WORSE), REFUSED),
    ],
)
def test_what_passes_the_gate_is_served(loop, gains, status, capsys):
    loop.gains = gains
    assert loop.call() == status
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{module.VERDICTS[status]}: ")
    assert loop.served == (status == PUBLISHED)
    state = module.State(**read_json(loop.home / "state.json"))
    assert state.until == loop.now - DAY
    if status == PUBLISHED:
        assert state.trained == {"run": [], module.when(loop.now): ["0a"]}
    else:
        assert not state.trained
    assert not (loop.home / "work").exists()
    (name,) = (loop.home / "reports").iterdir()
    parts = ["recent", "earlier"][: 1 if status == NOTHING else 2]  # the second needs a gain
    assert {part.name for part in name.iterdir()} == {*parts}
    for gain, part in zip(gains, parts, strict=False):
        advised, kept = (
            " eval.run " in (folder / "report.md").read_text()
            for folder in (loop.reports[gain], name / part / "report")
        )
        assert advised  # of drafts that are there
        assert not kept


def test_the_draft_before_the_last_is_served_again(loop):
    assert main([str(loop.run), "--rollback"]) == FAILED  # there is none
    assert [loop.call(), loop.call(), loop.served] == [PUBLISHED, PUBLISHED, 2]
    assert main([str(loop.run), "--rollback"]) == PUBLISHED
    assert loop.served == 1
    assert main([str(loop.run), "--rollback"]) == FAILED
    loop.gains = PLAIN, PLAIN
    assert loop.call() == NOTHING
    assert loop.served == 1
    assert len([*(loop.home / "drafts").iterdir()]) == 1  # what no link names is deleted


def test_a_rollback_holds_the_draft_until_it_is_resumed(loop):
    assert [loop.call(), loop.call()] == [PUBLISHED, PUBLISHED]
    assert main([str(loop.run), "--rollback"]) == PUBLISHED
    assert [loop.call(), loop.call(), loop.served, loop.made] == [NOTHING, NOTHING, 1, 2]
    assert main([str(loop.run), "--resume"]) == PUBLISHED
    assert [loop.call(), loop.served] == [PUBLISHED, 3]


def test_a_check_stores_nothing_and_trains_nothing(loop):
    assert loop.call("--check") == NOTHING
    assert [path.name for path in loop.home.iterdir() if path.name != "drafts"] == ["current"]
    assert loop.made == 0


@pytest.mark.parametrize(
    "gate",
    [
        "--engine vlm --gamma 4",
        "--engine vllm",  # without a draft length
        "--engine vllm --gamma 2,4",
        "--engine vllm --gamma 4 --gama 4",
        "--gamma 4 --fail_under_alpha 0.5",
        "--gamma 4 --fail_under_speedup 0",
        "--gamma 4 --draft other=prompt-lookup",
        "--base_url http://localhost:8001 --baseline_url http://localhost:8000 --prompts p.jsonl",
    ],
)
def test_a_gate_that_cannot_judge_is_refused_before_the_training(loop, gate, capsys):
    assert loop.call("--gate", gate) == FAILED
    assert "--gate" in capsys.readouterr().err
    assert loop.made == 0


def test_an_engine_that_is_not_there_is_missed_before_the_training(loop, monkeypatch):
    def program():
        raise UserError("There is no vLLM.")

    monkeypatch.setattr(VllmLauncher, "program", program)
    assert loop.call(*ENGINE) == FAILED
    assert loop.made == 0


def result(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_result_as_json(loop, monkeypatch, capsys):
    assert loop.call("--json") == PUBLISHED
    published = result(capsys)
    assert published.items() >= {"verdict": "published", "exit_status": 0, "rows": 2}.items()
    assert published["served"] == module.when(loop.now)
    assert main([str(loop.run), "--rollback", "--json"]) == PUBLISHED
    assert result(capsys)["exit_status"] == PUBLISHED
    assert main([str(loop.run), "--resume"]) == PUBLISHED

    def broken(*args, **more):
        raise RuntimeError("not thought of")

    monkeypatch.setattr(module.train, "run", broken)
    assert loop.call("--json") == FAILED  # 1 would be a refused draft
    assert result(capsys)["exit_status"] == FAILED


def test_two_drafts_and_their_reports_are_kept(loop):
    for _ in range(4):
        assert loop.call("--days", 5) == PUBLISHED
        for report in (loop.home / "reports").iterdir():
            written = calendar.timegm(time.strptime(report.name, "%Y-%m-%dT%H-%M-%SZ"))
            os.utime(report, (written, written))
    loop.gains = PLAIN, PLAIN
    assert loop.call("--days", 5) == NOTHING
    drafts, reports = (
        {path.name for path in (loop.home / part).iterdir()} for part in ("drafts", "reports")
    )
    assert len(drafts) == 2
    assert reports == drafts | {module.when(loop.now)}


def test_all_is_deleted(loop):
    assert loop.call() == PUBLISHED
    assert main([str(loop.run), "--delete"]) == PUBLISHED
    assert not loop.home.exists()
    assert loop.call() == PUBLISHED  # a new beginning, from the run's draft


def test_a_second_job_does_nothing(loop, monkeypatch):
    second = []

    def train(recipe, measured, summary):
        second.append(loop.call())
        loop.train(recipe, measured)

    monkeypatch.setattr(module.train, "run", train)
    assert loop.call() == PUBLISHED
    assert (second, loop.made) == ([NOTHING], 1)


def test_links_to_the_target_of_a_served_mtp_draft_stay_links(loop):
    served = loop.run / "draft" / "served"
    served.mkdir()
    (served / "target.safetensors").symlink_to(loop.run.parent / "target" / "model.safetensors")
    (served / "tuned.safetensors").symlink_to(Path("..") / "model.safetensors")
    copy = module.served_draft(loop.run) / "served"
    assert all((copy / path.name).is_symlink() for path in served.iterdir())
    assert (copy / "tuned.safetensors").resolve() == copy.parent / "model.safetensors"


def test_what_users_wrote_is_not_kept_longer(loop):
    """By no call, whatever it ends with."""
    assert loop.call() == PUBLISHED
    rows = loop.home / "rows.jsonl"
    stored = [row(0) | {"time": loop.now - age * DAY} for age in (1, 29)]
    rows.write_text("".join(json.dumps(each) + "\n" for each in stored))
    outputs = loop.home / "reports" / "2027-01-01T00-00-00Z" / "recent" / "report" / JOURNAL
    outputs.parent.mkdir(parents=True)
    outputs.write_text("of a measurement that was killed")
    loop.call()  # a week later
    assert [json.loads(line) for line in rows.read_text().splitlines()] == stored[:1]
    assert not outputs.exists()


def test_a_clock_that_went_back_is_told(loop, capsys):
    assert loop.call() == PUBLISHED
    loop.now -= 30 * DAY
    assert loop.call() == FAILED
    assert module.when(loop.now) in capsys.readouterr().err
    assert loop.served == 1
    loop.now += 30 * DAY
    assert loop.call() == PUBLISHED


def test_training_that_improved_nothing_is_not_measured(loop, monkeypatch):
    monkeypatch.setattr(module.evaluation, "main", None)
    loop.made = -1  # the next draft is the run's own
    assert loop.call() == NOTHING


@pytest.mark.parametrize("from_target", [True, False])
def test_what_goes_over_from_the_run(loop, from_target):
    """Settings of training and deployment; no counts, no checkpoint, nothing of the base draft."""
    path = loop.run / "recipe.yaml"
    keys = {"max_answers": 400, "max_steps": 600, "resume_from_checkpoint": "outputs/old"}
    keys |= {
        "drafter": "pruned",
        "num_draft_layers": 3,
        "draft_vocab_size": 300,
        "answers": "local",
    }
    keys |= {"train_on_prompts": True, "instruction": "{prompt}", "max_train_prompts": 30}
    kept = {"tokens_per_step": 60, "gamma": 2, "temperature": 0.5, "minutes": 7}
    path.write_text(yaml_text(read_yaml(path) | keys | kept | {"learning_rate": 1e-4}))
    assert loop.call() == PUBLISHED
    values = loop.recipe.values()
    assert values.items() >= kept.items()
    assert values["answer_temperature"] == 0.5
    assert not {"max_steps", "resume_from_checkpoint"} & values.keys()
    unset = {key: OWN[key].default for key in keys.keys() & OWN.keys()}
    unset |= {"answers": "logged", "max_train_prompts": 1}
    assert values.items() >= unset.items()


def test_each_recipe_key_goes_over_or_is_decided_here():
    ours = "train_prompts eval_prompts output_dir draft answers answer_temperature long_prompts"
    ours += " warmup_steps max_train_prompts"
    of_run = "drafter instruction strategy num_draft_layers draft_vocab_size fit_tokens dry_run"
    of_run += " answers_per_prompt train_on_prompts max_answers coverage_curve max_steps run_name"
    of_run += " resume_from_checkpoint project engine old_prompts"
    assert {*OWN, *TRAINING} - {*module.KEPT} == {*ours.split(), *of_run.split()}
    assert {*module.KEPT} <= {*OWN, *TRAINING}


@pytest.mark.parametrize(
    ("dtype", "trained"), [("bfloat16", "float32"), ("float16", "float16"), ("float32", "float32")]
)
def test_a_cpu_without_bf16_does_not_train_in_it(loop, monkeypatch, dtype, trained):
    """The run was made on another machine, and the new training begins on this one."""
    path = loop.run / "recipe.yaml"
    path.write_text(yaml_text(read_yaml(path) | {"dtype": dtype}))
    monkeypatch.setattr("distill.recipe.usual_dtype", lambda on_cpu: "float32")
    assert loop.call() == PUBLISHED
    assert loop.recipe.dtype == trained


@pytest.mark.parametrize(("status", "ends"), [(2, FAILED), (130, 130), (1, FAILED)])
def test_a_measurement_that_fails_publishes_nothing(loop, monkeypatch, status, ends):
    monkeypatch.setattr(module.evaluation, "main", lambda options, summary: status)
    assert loop.call() == ends
    assert loop.served == 0
    assert not (loop.home / "state.json").exists()
    assert not (loop.home / "work").exists()


SERVER = ["--train", "--answer_url http://localhost:8000"]
ENGINE = ["--gate", "--engine vllm --gamma 4"]
EAGLE3 = {"speculators_model_type": "eagle3", "draft_vocab_size": 9}


@pytest.mark.parametrize(
    ("target", "draft", "options", "asked"),
    [
        ({}, {}, ENGINE, 1),
        ({}, {}, SERVER, 0),
        ({}, {}, SERVER + ENGINE, 1),
        ({"quantization_config": {"quant_method": "awq"}}, {}, ENGINE, 0),
        ({"quantization_config": {"quant_method": "awq"}}, {}, SERVER + ENGINE, 1),
        ({}, EAGLE3, ENGINE, 1),
        ({}, EAGLE3, SERVER + ENGINE, 0),  # a server sends no hidden states
        ({"quantization_config": {"quant_method": "awq"}}, EAGLE3, ENGINE, 0),
    ],
)
def test_a_target_that_is_not_computed_here_needs_server_and_engine(
    loop, monkeypatch, capsys, target, draft, options, asked
):
    for folder, keys in ((loop.run.parent / "target", target), (loop.run / "draft", draft)):
        path = folder / "config.json"
        path.write_text(json.dumps(read_json(path) | keys))
    calls = []
    monkeypatch.setattr(module.evaluation, "main", lambda *asked, summary: calls.append(asked) or 2)
    assert loop.call(*options) == FAILED
    assert (len(calls), loop.made) == (asked, asked)
    advised = "--answer_url" in capsys.readouterr().err
    assert advised == (not asked and not draft)  # of a draft that can follow


def test_an_undecided_comparison_is_repeated(loop, monkeypatch):
    monkeypatch.setattr(module, "undecided", lambda report: True)
    loop.gains = BETTER, BETTER
    assert loop.call(*ENGINE) == PUBLISHED
    (reports,) = (loop.home / "reports").iterdir()
    assert {path.name for path in reports.iterdir()} == {"recent", "repeated", "earlier"}


@pytest.mark.parametrize(
    ("keys", "options", "rate"),
    [
        ({}, "", 1e-3 * (576 / 4096) ** 2),  # new weights of Llama's width have 6e-5
        ({"learning_rate": 6e-4, "warmup_steps": 900}, "", 2e-4),
        ({"learning_rate": 6e-4, "drafter": "eagle3"}, "", 6e-5),
        ({"learning_rate": 6e-4, "draft": "d"}, "", 6e-4),
        ({"learning_rate": 6e-4, "drafter": "mtp"}, "", 6e-4),  # it was trained before, too
        ({"learning_rate": 6e-5, "drafter": "eagle3"}, "", 1e-5),
        ({"learning_rate": 6e-4}, "--learning_rate 1e-4", 1e-4),
    ],
)
def test_a_draft_continues_at_a_part_of_the_rate_of_new_weights(loop, keys, options, rate):
    path = loop.run / "recipe.yaml"
    path.write_text(dump(build_recipe(read_yaml(path) | keys)))
    assert loop.call("--train", options) == PUBLISHED
    assert loop.recipe.training["learning_rate"] == pytest.approx(rate)
    assert loop.recipe.training["warmup_steps"] == 0.1


def test_the_gate_s_options_measure_both_parts(loop, monkeypatch):
    asked = []
    monkeypatch.setattr(
        module.evaluation, "main", lambda options, summary: asked.append(options) or 2
    )
    assert loop.call("--gate", "--engine vllm --gamma 4") == FAILED
    (options,) = asked
    assert options[-6:-2] == ["--engine", "vllm", "--gamma", "4"]
    assert options[-1].endswith("recent")


def test_the_disk_that_may_be_used(loop, monkeypatch, capsys):
    monkeypatch.setattr(files, "WATCHED_EVERY", 0.01)

    def never_ends(recipe, measured, summary):
        (recipe.folder / "large").write_bytes(bytes(2**20))
        while True:
            time.sleep(0.01)

    monkeypatch.setattr(module.train, "run", never_ends)
    assert loop.call("--disk_gib", 2**-11) == FAILED
    assert "GiB" in capsys.readouterr().err
    assert not (loop.home / "work").exists()
    assert loop.served == 0


# --- Two days of a service with two replicas


@pytest.fixture
def days(loop, monkeypatch, tmp_path):
    """The loop with the rows of a folder of logs; the run itself has none."""
    write_prompts(loop.run / "prompts" / "eval.jsonl", [Prompt("0", EVALUATED)])
    monkeypatch.setattr(module, "select", SELECT)
    monkeypatch.setattr(module, "write_rows", WRITE_ROWS)
    monkeypatch.setattr(module, "rows_of", lambda run: [])
    trained = []

    def train(recipe, measured=True, summary=True):
        lines = (recipe.folder.parent / "train.jsonl").read_text().splitlines()
        trained.append({json.loads(line)["time"] for line in lines})
        loop.train(recipe, measured, summary)

    monkeypatch.setattr(module.train, "run", train)
    loop.trained, loop.logs = trained, tmp_path / "logs"
    loop.logs.mkdir()
    return loop


SELECT, WRITE_ROWS = module.select, module.write_rows


def test_two_days_of_late_broken_and_foreign_logs(days, capsys):
    """Nothing is lost or used twice, no call fails, and what is left out is counted."""
    begun = days.now / DAY

    def log(name, hours, *broken):
        rows = [row(begun + 7 + hour / 24) for hour in hours]
        write_log(days.logs / name, *rows[:5], *broken, *rows[5:])
        return {r["time"] for r in rows}

    def call():
        status = main([str(days.run), "--traffic", str(days.logs), "--json"])
        return status, result(capsys)

    days.now += 9 * DAY
    first = log("a.jsonl", range(0, 40), b'{"time": 5, "messages": [{"role"', {"messages": []})
    half_of(days.logs / "b.jsonl.gz")
    (days.logs / "a.jsonl.pos").write_text("40")
    status, told = call()
    assert status == PUBLISHED
    assert told["left_out"] == {"not readable": 3, "files that are no log": 1}
    assert (told["rows"], told["newest_row"]) == (40, max(first))
    assert days.trained[0] | {t for t in first if t > max(first) - DAY} == first

    late = log("b.jsonl", np.arange(0.5, 40))  # the other replica's file of the same hours
    days.now += DAY
    second = log("a2.jsonl", range(41, 60), b"\xff\xfe")
    status, told = call()
    assert status == PUBLISHED
    assert told["left_out"] == {"not readable": 4, "files that are no log": 1}
    assert told["rows"] == len(first | late | second)
    tested = {t for t in second | late if t > max(first)}
    assert first | late | second == days.trained[0] | days.trained[1] | tested
    assert late - tested <= days.trained[1]
    assert not tested & days.trained[1]
    status, told = call()  # the same logs again
    assert (status, told["rows"]) == (NOTHING, len(first | late | second))


# --- Faults at every step


ADDING = ("mkdir", "symlink", "rename", "replace")  # that a full disk may refuse


class Faults:
    """Ends the process, or fills the disk, at a step that changes a name."""

    def __init__(self, patch, at=0, fault=None):
        self.steps, self.at, self.fault = 0, at, fault
        for name in ADDING:
            patch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, step):
        def work(*given, **more):
            self.steps += 1
            if self.steps == self.at:
                self.fault()
            return step(*given, **more)

        return work


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def fill():
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def again(loop, tmp_path):
    """Makes a loop that has published two drafts what it was then, in the folder and the clock."""
    assert [loop.call(), loop.call(), loop.served] == [PUBLISHED, PUBLISHED, 2]
    (loop.home / "work" / "run").mkdir(parents=True)  # of a killed call
    shutil.copytree(loop.home, tmp_path / "then", symlinks=True)
    now = loop.now

    def restore():
        shutil.rmtree(loop.home)
        shutil.copytree(tmp_path / "then", loop.home, symlinks=True)
        loop.now, loop.made = now, 2

    return restore


def steps_of(loop):
    """The numbers of the steps of a call."""
    with pytest.MonkeyPatch.context() as patch:
        faults = Faults(patch)
        assert loop.call() == PUBLISHED
    assert faults.steps > 20
    return range(1, faults.steps + 1)


def test_a_call_that_is_killed_at_any_step(loop, again):
    """The earlier draft or the new one is served, whole, and the next call ends as ever."""
    fork = multiprocessing.get_context("fork")

    def call(step):
        torch.set_num_threads(1)  # a fork has none of its parent's threads
        with pytest.MonkeyPatch.context() as patch:
            Faults(patch, step, die)
            loop.call()

    for step in steps_of(loop):
        again()
        process = fork.Process(target=call, args=[step])
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert loop.served in (2, 3)
        if step % 6 == 0:
            loop.made += 1
            assert loop.call() == PUBLISHED
            left = sorted(path.name for path in loop.home.iterdir())
            assert left == ["current", "drafts", "previous", "reports", "state.json"]


def test_a_full_disk_at_any_step(loop, again, monkeypatch, capsys):
    failed = 0
    for step in steps_of(loop):
        again()
        with monkeypatch.context() as patch:
            Faults(patch, step, fill)
            status = loop.call()
        assert loop.served == {PUBLISHED: 3, FAILED: 2}[status]  # published: a folder was there
        assert ("disk is full" in capsys.readouterr().err) == (status == FAILED)
        failed += status == FAILED
    assert failed > 20


# --- The second half of docs/tutorial.md, with models of a few kilobytes

SENTENCES = [" ".join(random.Random(i).sample(SPOKEN.split(), 9)) for i in range(108)]
FP32 = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "256")


class Chatting(StandIn):
    """A stand-in that is asked conversations."""

    def ids(self, body):
        asked = body["messages"]
        return self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_dict=False
        )


@contextmanager
def made_up_server(target, draft):
    def say(sent):
        (choice,) = sent["choices"]
        text = server.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
        choice["message"] = {"role": "assistant", "content": text}

    loaded = load_target(Checkpoint.open(target), torch.float32, "cpu", 256)
    server = Chatting(loaded, names=["target"], mangle=say)
    try:
        yield server.url
    finally:
        server.stop()


def vllm_server(target, draft):
    return serve_vllm(target, *FP32, *speculation(draft, 2))


@pytest.fixture
def page():
    """The tutorial's script that asks a server, its call of the loop, and its served draft."""
    parts = blocks(ROOT / "docs" / "tutorial.md")
    (script,) = [body for _, body in parts if "urlopen" in body]
    bash = [words for language, body in parts if language == "bash" for words in commands(body)]
    (call,) = [words for words in bash if "distill.adapt" in words]
    (serve,) = [words for words in bash if "readlink" in words[-1]]
    return script.replace('"max_tokens": 64', '"max_tokens": 24'), call, json.loads(serve[-1])


@pytest.fixture
def tutorial(job, tmp_path, monkeypatch):
    """The folder in which the first half of the tutorial is done."""
    save_sibling(tmp_path / "target", LARGE, 1)
    tokenizer = Checkpoint.open(tmp_path / "target").tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path / "target")
    keys = {"target": str(tmp_path / "target"), "draft": None, "num_draft_layers": 1}
    for name, texts in (("train", SENTENCES[:96]), ("eval", SENTENCES[96:])):
        turns = [[{"role": "user", "content": f"Explain it.\n{text}"}] for text in texts]
        lines = [json.dumps({"messages": turn}) + "\n" for turn in turns]
        (tmp_path / f"explain-{name}.jsonl").write_text("".join(lines))
        keys[f"{name}_prompts"] = str(tmp_path / f"explain-{name}.jsonl")
    keys |= {"draft_vocab_size": 280, "max_train_prompts": 20, "max_steps": 1, "gamma": 2}
    keys |= {"speed_prompts": 12, "max_new_tokens": 8, "tokens_per_step": 240}
    assert module.train.run(job(tmp_path / "outputs" / "explain", **keys)) == 0
    monkeypatch.chdir(tmp_path)
    return tmp_path


def stored():
    """What is in the cache that all runs share, but for the hashes of weights."""
    return sorted(p for p in cache_folder().rglob("*") if "sha256" not in (p.name, p.parent.name))


@pytest.mark.parametrize(
    ("serving", "gate"),
    [
        (made_up_server, []),
        pytest.param(made_up_server, ["--gate", "--max_prompts 16"], marks=pytest.mark.real),
        pytest.param(vllm_server, [], marks=pytest.mark.real),
    ],
)
def test_from_the_log_of_a_server_to_another_draft(
    tutorial, page, monkeypatch, capsys, request, serving, gate
):
    if serving is vllm_server:
        request.getfixturevalue("installed")
    script, call, serve = page
    run = Path("outputs/explain").absolute()
    cached = stored()
    names = {}
    with serving(tutorial / "target", run / "draft") as url:
        exec(script.replace("http://localhost:8000", url), names)
    command = [
        *call[3:],
        "--train",
        "--learning_rate 1e-2 --max_steps 150",
        *gate,
    ]
    with monkeypatch.context() as patch:  # times of so small models are noise
        seen = []
        patch.setattr(module, "gained", lambda recent: (True, "a gain"))
        patch.setattr(module, "judged", lambda *given: seen.append(given) or (PUBLISHED, "Why."))
        assert main(command) == PUBLISHED, capsys.readouterr().err
    out = capsys.readouterr().out
    assert "old ones" in out
    shown = re.findall(r"(?:Draft:|Reports?:|--run|eval\.demo) (\S+)", out)
    assert [Path(path).absolute() for path in shown] == [*(run / "adapt" / "reports").iterdir()]
    ((recent,), earlier, margin) = seen[0]
    assert margin == 0.1
    assert recent.gain[0].alpha.bounds[0] > 0
    assert (recent.prompts.n, earlier.prompts.n) == (16 if gate else 20, 12)  # max_train_prompts

    named = subprocess.check_output(["bash", "-c", f"echo {serve['model']}"], text=True).strip()
    assert Path(named) == (run / "adapt" / "current").resolve()
    before, after = (
        Checkpoint.open(path).load(torch.float32) for path in (str(run / "draft"), named)
    )
    assert after.config.vocab_size == LARGE
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)
    assert recent.drafts["tuned"].sha256 == weights_sha256(Path(named))
    assert (Path(named) / "README.md").exists()
    with serving(tutorial / "target", named) as url:
        names["URL"] = f"{url}/v1/chat/completions"
        again = names["ask"](0, names["lines"][0])
    first = Path("logs", "gateway.jsonl").read_text().splitlines()[0]
    outputs = [json.loads(row)["response"]["choices"][0]["token_ids"] for row in (first, again)]
    assert outputs[0] == outputs[1]

    assert not (run / "adapt" / "work").exists()
    assert stored() == cached  # no texts of users
    assert main(command) == NOTHING  # no new row
