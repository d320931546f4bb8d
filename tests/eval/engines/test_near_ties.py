"""Divergences of servers' greedy outputs: ties flipped by rounding, and drafts not verified."""

import json
import multiprocessing
import os
import re
import signal
import zlib
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import numpy as np
import pytest
import torch

from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.comparison import Comparison
from eval.engines.contender import Contender, Task, runs_already
from eval.engines.llama_cpp import LlamaServer
from eval.engines.load import WARM_UP, timed_pass
from eval.engines.measure import measure_servers
from eval.engines.near_ties import WIDEST_TIE, explain
from eval.engines.sglang import SglangServer
from eval.engines.visits import take_turns, there_and_back
from eval.engines.vllm import VllmServer
from eval.measuring.journal import Journal
from eval.measuring.output_check import Divergence
from eval.prompts import Prompt, PromptSet
from eval.reporting.fields import Load
from eval.reporting.warnings import find_warnings
from tests.fake_vllm import Constant

NONE = {"gap": None, "error": None, "tie": False}
VOCAB = 128  # with the bytes that prompts are made of
LENGTH = 20
PROMPTS = [Prompt(f"p{i}", prompt=f"prompt {i}") for i in range(6)]


def decoding(temperature=0.0):
    return Decoding(Sampling(temperature), frozenset(), LENGTH)


def rng(*of):
    return np.random.default_rng(zlib.crc32(json.dumps(of).encode()))


class Model:
    """Logits of made-up text in bf16, off by `noise` in a way of its own for each kind of forward.

    At every fifth token of a text the two best are a tie. weights: another number, another model.
    """

    def __init__(self, noise=0.02, weights=0.0):
        self.noise, self.weights = noise, weights

    def logprobs(self, ids, forward):
        logits = rng(ids).normal(0, 3, VOCAB)
        logits += self.weights * rng("weights", ids).normal(0, 1, VOCAB)
        if len(ids) % 5 == 0:
            best, second = logits.argsort()[[-1, -2]]
            logits[second] = logits[best]
        logits += rng(forward, ids).normal(0, self.noise, VOCAB)
        return torch.tensor(logits).bfloat16().float().log_softmax(-1)


class Served(Constant):
    """A `model` as a server computes it: its forwards are of a kind, one token each or a step.

    draft: a model that writes every third token, unverified. lenient: this token may also be the
    second likeliest, if it is so few nats behind (as with vLLM's `fly`). silent: of
    log-probabilities.
    stretch: they are told so many times as far apart.
    """

    def __init__(self, forward, model, draft=None, lenient=0.0, silent=False, stretch=1):
        self.forward, self.model, self.draft, self.lenient = forward, model, draft, lenient
        self.silent, self.stretch = silent, stretch

    def ids(self, body):
        return list(body["prompt"].encode())

    def row(self, logprobs, token):
        ids = [token, *logprobs.topk(5).indices.tolist()]
        return {i: self.stretch * float(logprobs[i]) for i in ids}

    def write(self, ids, body):
        text, rows = [], []
        for place in range(body["max_tokens"]):
            before = [*ids, *text]
            wide = body.get("wide") and not place
            logprobs = self.model.logprobs(before, "prefill" if wide else self.forward)
            unverified = self.draft is not None and place % 3 == 2
            written = self.draft.logprobs(before, "draft") if unverified else logprobs
            best, second = written.topk(2).indices.tolist()
            near = place % 3 == 2 and written[best] - written[second] < self.lenient
            text.append(second if near else best)
            rows.append(self.row(logprobs, text[-1]))
        return text, None if self.silent else rows, "length"

    def read(self, ids):
        prefill = (self.model.logprobs(ids[:at], "prefill") for at in range(1, len(ids)))
        return [self.row(logprobs, token) for logprobs, token in zip(prefill, ids[1:], strict=True)]


@pytest.fixture(params=[VllmServer, LlamaServer, SglangServer])
def texts(fake, request):
    """The ledger of a server of a model that drafts against a server of it that does not."""

    def compare(model, drafting, plain=None, temperature=0.0, prompts=PROMPTS):
        client = request.param
        of_draft = fake(3, Served("blocks of 3", model, **drafting), owner=client.owner)
        of_target = fake(1, Served("blocks of 1", model, **plain or {}), owner=client.owner)
        report = measure_servers(
            {"served": client(of_draft.url)},
            client(of_target.url),
            Task(PromptSet("made up", prompts, []), decoding(temperature)),
        )
        return report.drafts["served"].lossless, report

    return compare


def compared(servers, order):
    """The comparison of a server without a draft and one with it, and its divergences."""
    contenders = [Contender(runs_already(VllmServer(s.url))) for s in servers]
    comparison = Comparison(contenders, Task(PromptSet("made up", PROMPTS, []), decoding()))
    comparison.run(order)
    return comparison, comparison.divergent(contenders[1])


@pytest.mark.parametrize("draft", [{}, {"draft": Model(0.02, 0.5)}])
def test_servers_that_run_one_at_a_time_are_judged_alike(fake, draft):
    servers = (
        fake(1, Served("blocks of 1", Model())),
        fake(3, Served("blocks of 3", Model(), **draft)),
    )
    orders = take_turns, there_and_back, partial(there_and_back, starts=1)
    at_once, *one_at_a_time = (compared(servers, order)[1] for order in orders)
    assert one_at_a_time == [at_once] * 2
    assert len(at_once) >= 4


@pytest.mark.parametrize("order", [take_turns, there_and_back])
@pytest.mark.parametrize("down", [False, True])
def test_outputs_from_before_a_failure_of_the_baseline_are_judged(fake, order, down):
    """It refuses a prompt and goes on; or it fails for good, and then excuses no output."""
    servers = fake(1, Served("blocks of 1", Model())), fake(3, Served("blocks of 3", Model()))
    if down:
        servers[0].refuses_after = 5
    else:
        servers[0].faults = [*[None] * 5, 400]
    comparison, entries = compared(servers, order)
    assert sum(number < len(PROMPTS) for number in comparison.baseline.outputs) == 5
    assert len(entries) >= 3
    assert {entry["tie"] for entry in entries} == {not down}
    assert {entry.get("judged", True) for entry in entries} == {not down}


LOADS = [Load(concurrency=1), Load(concurrency=2)]
STAGES = ["start", "decode", "explain", "pass"]


def journaled(servers, path, loads=LOADS, dies_at=None, temperature=0.0, starts=2):
    """The comparison of started servers, with its journal; the asked requests of each stage.

    dies_at: stage and number of the event at which the process is killed, before it asks.
    """
    seen = dict.fromkeys(STAGES, 0)

    def happens(stage):
        seen[stage] += 1
        if (stage, seen[stage]) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    class Client(VllmServer):
        def decode(self, prompt, decoding):
            happens("decode")
            return super().decode(prompt, decoding)

        def explain(self, *args):
            happens("explain")
            return super().explain(*args)

    def timed(*args):
        happens("pass")
        return timed_pass(*args)

    @contextmanager
    def running(server):
        happens("start")
        yield Client(server.url)

    names = ["", *(f"draft {i}" for i in range(1, len(servers)))]
    contenders = [
        Contender(partial(running, server), name, identity=server.url)
        for name, server in zip(names, servers, strict=True)
    ]
    journal = Journal(path / "measured.jsonl")
    task = Task(PromptSet("", PROMPTS, []), decoding(temperature), {}, list(loads), None, journal)
    comparison = Comparison(contenders, task)
    with patch("eval.engines.comparison.timed_pass", timed):
        comparison.run(partial(there_and_back, starts=starts))
    return comparison, seen


def asked(servers):
    """The requests of each server that are no warm-up, in any order."""
    return [
        sorted(json.dumps(body) for _, body in server.requests if body.get("max_tokens") != WARM_UP)
        for server in servers
    ]


def two_servers(fake):
    return [fake(1, Served("blocks of 1", Model())), fake(3, Served("blocks of 3", Model()))]


def test_a_server_killed_in_any_stage_is_asked_nothing_twice(fake, tmp_path):
    whole = two_servers(fake)
    (tmp_path / "whole").mkdir()
    comparison, events = journaled(whole, tmp_path / "whole")
    entries = comparison.divergent(comparison.drafting[0])
    assert len(entries) >= 4
    assert events["start"] == 4
    assert events["explain"] == len(entries)
    for stage, count in events.items():
        for number in (2, count):
            servers, path = two_servers(fake), tmp_path / f"{stage} {number}"
            path.mkdir()
            process = multiprocessing.get_context("fork").Process(
                target=journaled, args=(servers, path), kwargs={"dies_at": (stage, number)}
            )
            process.start()
            process.join()
            assert process.exitcode == -signal.SIGKILL
            again, _ = journaled(servers, path)
            assert asked(servers) == asked(whole), (stage, number)
            assert again.divergent(again.drafting[0]) == entries
            assert len(again.by_load(again.drafting[0])[0]) == 2
            for server in servers:
                server.stop()


def test_an_added_contender_load_or_start_costs_only_itself(fake, tmp_path):
    def streamed():
        return [len(server.streamed) for server in servers]

    servers = two_servers(fake)
    journaled(servers, tmp_path, [Load(concurrency=1)])
    before = streamed()
    servers.append(fake(2, Served("blocks of 2", Model())))
    journaled(servers, tmp_path, [Load(concurrency=1)])
    assert streamed()[:2] == before
    counts = streamed()
    comparison, _ = journaled(servers, tmp_path, [Load(concurrency=1), Load(concurrency=2)])
    passes_of_two = 2 * (2 + 10 + 2 + 2)  # with requests that warm up
    assert [b - a for a, b in zip(counts, streamed(), strict=True)] == [passes_of_two] * 3
    assert [len(comparison.by_load(draft)[0]) for draft in comparison.drafting] == [2, 2]
    counts = streamed()
    comparison, events = journaled(servers, tmp_path, [Load(concurrency=1)], starts=3)
    assert [b - a for a, b in zip(counts, streamed(), strict=True)] == [len(PROMPTS)] * 3
    assert events["start"] == 3
    assert {len(times) for times in comparison.starts().seconds_per_token.values()} == {3}


def test_sampled_outputs_are_read_once(fake, tmp_path):
    servers = two_servers(fake)
    comparison, _ = journaled(servers, tmp_path, [], temperature=0.7)
    before = asked(servers)
    again, events = journaled(servers, tmp_path, [], temperature=0.7)
    assert asked(servers) == before
    assert events["start"] == 0
    for one, other in zip(comparison.drafting, again.drafting, strict=True):
        assert one.logprobs == other.logprobs
        assert len(one.logprobs) == len(PROMPTS)


def test_a_pass_at_a_rate_is_read_as_it_was_measured(fake, tmp_path):
    servers, rate = two_servers(fake), [Load(rate=100.0)]
    points = []
    for _ in range(2):
        comparison, _ = journaled(servers, tmp_path, rate)
        points.append(comparison.by_load(comparison.drafting[0]))
        counts = [len(server.requests) for server in servers]
    assert points[0] == points[1]
    journaled(servers, tmp_path, rate)
    assert [len(server.requests) for server in servers] == counts


def test_near_ties_that_rounding_flips_are_the_same_text(texts):
    ledger, report = texts(Model(), {})
    assert ledger.tie_divergences == len(ledger.divergences) >= 4
    assert (ledger.tie_divergences, ledger.unexplained) == (ledger.prompts - ledger.identical, 0)
    assert all(entry.gap <= 2 * entry.error < WIDEST_TIE for entry in ledger.divergences)
    assert "mismatch" not in {warning.code for warning in find_warnings(report)}


def test_what_a_grammar_forces_is_no_mismatch(fake):
    """The judge's log-probabilities do not know the grammar of a response_format."""
    servers = (
        fake(1, Served("blocks of 1", Model())),
        fake(3, Served("blocks of 3", Model(0.02, 3))),
    )
    asked = [replace(prompt, response_format={"type": "json_object"}) for prompt in PROMPTS]
    contenders = [Contender(runs_already(VllmServer(server.url))) for server in servers]
    comparison = Comparison(contenders, Task(PromptSet("made up", asked, []), decoding()))
    comparison.run(take_turns)
    entries = comparison.divergent(contenders[1])
    assert entries
    assert not any(entry["judged"] for entry in entries)


def test_without_rounding_no_text_parts(texts):
    ledger, _ = texts(Model(noise=0.0), {})
    assert ledger.identical == ledger.prompts


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("unlike", [0.5, 3.0])
def test_a_draft_that_is_not_verified_changes_the_text(texts, noise, unlike):
    """Also one that is mostly right, whose texts may be identical or part at ties alone."""
    ledger, report = texts(Model(noise), {"draft": Model(noise, unlike)})
    assert ledger.unexplained >= {0.5: 4, 3.0: len(PROMPTS)}[unlike]
    assert find_warnings(report)[0].code == "mismatch"


def test_a_rule_that_takes_less_likely_tokens_is_found(texts):
    ledger, report = texts(Model(), {"lenient": 1.0})
    assert ledger.unexplained >= 4
    assert find_warnings(report)[0].code == "mismatch"


def test_a_change_behind_a_tie_is_found(texts):
    """The first token that differs is a tie; those that follow are not the target's."""
    model = Model()
    ledger, _ = texts(model, {"draft": Model(0.02, 3.0)})
    behind = [entry for entry in ledger.divergences if entry.gap and entry.gap <= 2 * entry.error]
    assert behind
    reason = re.compile(r"its token \d+ (lies \d.* nats behind|is not among)")
    assert all(reason.search(entry.why) for entry in behind)


@pytest.mark.parametrize(
    ("texts", "side"),
    [
        (VllmServer, 0),
        (VllmServer, 1),
        (LlamaServer, 1),
        (SglangServer, 0),
        (SglangServer, 1),
    ],
    indirect=["texts"],
)
def test_a_server_without_logprobs_leaves_the_divergence_named(texts, side):
    silent = [{}, {}]
    silent[side] = {"silent": True}
    ledger, report = texts(Model(), *silent)
    assert ledger.not_judged == len(ledger.divergences) >= 4
    assert (ledger.unexplained, report.broken) == (0, [])
    codes = {warning.code for warning in find_warnings(report)}
    assert "not-judged" in codes
    assert "mismatch" not in codes


def test_the_server_that_drafts_cannot_excuse_itself(texts):
    """By saying that all tokens are alike: that any divergence is a tie, or any error large."""
    mutant = {"draft": Model(0.02, 0.5)}
    honest, _ = texts(Model(), mutant)
    liar, _ = texts(Model(), mutant | {"stretch": 1e-6})
    assert liar.unexplained == honest.unexplained >= 4


class Read(LlamaServer):
    """A judge that reads tokens; its forwards of several tokens have the given log-probabilities.

    rows: at each token of an output of three tokens, of which the second one differs.
    """

    def __init__(self, rows, wide):
        self.rows, self.wide = rows, wide

    def written(self, prompt, count):
        return [1, 2, 3], self.rows

    def read_wide(self, prompt, output):
        return self.wide

    def read_from(self, prompt, output, at):
        return self.rows


CLOSE, APART = {2: -0.7, 5: -0.8}, {2: -0.1, 5: -3.0}


@pytest.mark.parametrize(
    ("second", "wide", "tie", "judged"),
    [
        (CLOSE, [{}] * 3, False, False),  # llama-server reads no token of a short output
        (CLOSE, [{1: -0.2}, {}, {}], True, True),
        (APART, [{}] * 3, False, True),  # further apart than any error explains
        ({2: -0.1}, [{}] * 3, False, True),
    ],
)
def test_a_short_output_is_judged_where_its_error_does_not_matter(second, wide, tie, judged):
    judge = Read([{1: 0.0}, second, {3: 0.0}], wide)
    fields = explain(judge, None, [9], ([1, 2, 3], [1, 5, 3]), 1)
    entry = Divergence(prompt="", position=1, target="", drafted="", **NONE | fields)
    assert (entry.tie, entry.judged) == (tie, judged)


@pytest.mark.parametrize("texts", [VllmServer, SglangServer], indirect=True)
def test_a_server_with_an_unverified_draft_gains_nothing_by_silence(texts):
    ledger, report = texts(Model(), {"draft": Model(0.02, 3.0), "silent": True})
    assert ledger.unexplained >= 4
    assert report.broken == ["served"]


@pytest.mark.parametrize("texts", [VllmServer], indirect=True)
def test_a_server_that_is_sure_of_the_other_token_sees_no_tie(texts):
    assert texts(Model(), {"stretch": 30})[0].unexplained


@pytest.mark.parametrize("texts", [VllmServer, SglangServer], indirect=True)
def test_the_server_without_a_draft_reads_sampled_outputs(texts):
    sampled = {"temperature": 0.7, "prompts": [Prompt(f"p{i}", prompt=f"{i}") for i in range(10)]}
    checks = []
    for draft in ({}, {"draft": Model(0.02, 3.0)}):
        _, report = texts(Model(), draft, **sampled)
        checks.append(report.drafts["served"].sampled_check)
    honest, mutant = checks
    assert (honest.prompts, mutant.prompts) == (10, 10)
    assert honest.p_value > 0.01 > mutant.p_value
    assert mutant.difference.mean < -0.1
    draft = texts(Model(), {}, {"silent": True}, **sampled)[1].drafts["served"]
    assert draft.sampled_check is None
    missing = {entry.field: entry.reason for entry in draft.missing}
    assert missing["sampled_check"] == "the server returned no log-probabilities"
