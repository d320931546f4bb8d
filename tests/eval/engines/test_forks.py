"""Forks between servers' greedy texts: near ties flipped by rounding, and drafts not verified."""

import json
import re
import zlib

import numpy as np
import pytest
import torch

from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.forks import WIDEST_TIE
from eval.engines.turns import running
from eval.engines.vllm import VllmServer
from eval.engines.vllm_servers import compare, measure_servers
from eval.prompts import Prompt, PromptSet
from tests.eval.engines.conftest import Fake

VOCAB = 128  # with the bytes that prompts are made of
LENGTH = 20
PROMPTS = [Prompt(f"p{i}", prompt=f"prompt {i}") for i in range(6)]


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


class Serving(Fake):
    """A server of `model`, whose forwards are of a kind: one token each, or a block to verify.

    draft: a model that writes every third token, unverified. silent: of log-probabilities.
    stretch: they are told so many times as far apart.
    """

    def __init__(self, block, model, draft=None, silent=False, stretch=1):
        self.served, self.draft, self.silent, self.stretch = model, draft, silent, stretch
        super().__init__(block)

    def write(self, ids, count):
        """A text, and the log-probabilities at each of its tokens."""
        text, rows = [], []
        for place in range(count):
            before = [*ids, *text]
            rows.append(self.served.logprobs(before, f"blocks of {self.block}"))
            unverified = self.draft is not None and place % 3 == 2
            row = self.draft.logprobs(before, "draft") if unverified else rows[-1]
            text.append(int(row.argmax()))
        return text, rows

    def written(self, body):
        ids = list(body["prompt"].encode())
        return ids, self.write(ids, body["max_tokens"])[0]

    def scored(self, body):
        if self.silent:
            return super().scored(body)
        ids = body["prompt"]
        tokens, rows = self.write(ids, body["max_tokens"])
        if body.get("echo"):
            read = [self.served.logprobs(ids[:at], "prefill") for at in range(1, len(ids))]
            tokens, rows = [*ids, *tokens], [None, *read, *rows]
        tops = [
            None
            if row is None
            else {
                f"token_id:{i}": self.stretch * float(row[i])
                for i in [token, *row.topk(5).indices.tolist()]
            }
            for token, row in zip(tokens, rows, strict=True)
        ]
        named = [f"token_id:{token}" for token in tokens]
        return {"choices": [{"logprobs": {"tokens": named, "top_logprobs": tops}}]}


@pytest.fixture
def texts(fake):
    """The ledger of a server of a model that drafts against a server of it that does not."""

    def compare(model, drafting, plain=None):
        report = measure_servers(
            {"served": VllmServer(fake(3, Serving, model=model, **drafting).url, 5.0)},
            VllmServer(fake(1, Serving, model=model, **plain or {}).url, 5.0),
            PromptSet("made up", PROMPTS, []),
            Decoding(Sampling(), frozenset(), LENGTH),
            {"command": "test"},
        )
        return report.drafts["served"].lossless, report

    return compare


@pytest.mark.parametrize("draft", [{}, {"draft": Model(0.02, 0.5)}])
def test_servers_that_run_one_at_a_time_are_judged_alike(fake, draft):
    starts = [
        running(VllmServer(server.url, 5.0))
        for server in (fake(1, Serving, model=Model()), fake(3, Serving, model=Model(), **draft))
    ]
    decoding = Decoding(Sampling(), frozenset(), LENGTH)
    ledgers = [
        compare({"a": starts[1]}, starts[0], PROMPTS, decoding, {"a": ""}, together=together)
        .logs[0]
        .lossless
        for together in (True, False)
    ]
    assert ledgers[0] == ledgers[1]
    assert len(ledgers[0]["divergences"]) >= 4


@pytest.mark.parametrize(
    ("together", "failing", "answers"),
    [(True, 0, 6), (True, 1, 5), (True, 2, 18), (False, 0, 9), (False, 2, 6), (False, 2, 18)],
)
def test_what_was_measured_before_a_server_fails_is_judged(fake, together, failing, answers):
    """A fault of the baseline or of a draft, with a prompt or at a load."""
    model = Model()
    made = [fake(1, Serving, model=model), *(fake(3, Serving, model=model) for _ in "ab")]
    made[failing].refuses_after = answers
    starts = [running(VllmServer(server.url, 5.0)) for server in made]
    drafts = {"a": starts[1], "b": starts[2]}
    how = Decoding(Sampling(), frozenset(), LENGTH)
    compared = compare(drafts, starts[0], PROMPTS, how, {"a": "", "b": ""}, [1], together)
    count = len(compared.prompts)
    assert count
    for log in compared.logs:
        assert len(log.runs) == len(log.baseline) == log.lossless["prompts"] == count
        assert "answered 400" in str(log.missing)


def test_near_ties_that_rounding_flips_are_the_same_text(texts):
    ledger, report = texts(Model(), {})
    assert ledger.tie_divergences == len(ledger.divergences) >= 4
    assert ledger.verdict == "same up to ties"
    assert all(entry.gap <= 2 * entry.error < WIDEST_TIE for entry in ledger.divergences)
    assert not any("NOT LOSSLESS" in warning for warning in report.warnings)
    assert f"{ledger}" in report.headline


def test_without_rounding_no_text_parts(texts):
    assert texts(Model(noise=0.0), {})[0].verdict == "identical"


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("unlike", [0.5, 3.0])
def test_a_draft_that_is_not_verified_changes_the_text(texts, noise, unlike):
    """Also one that is mostly right, whose texts may be identical or part at ties alone."""
    ledger, report = texts(Model(noise), {"draft": Model(noise, unlike)})
    assert ledger.unexplained >= {0.5: 4, 3.0: len(PROMPTS)}[unlike]
    assert ledger.verdict == "changed"
    assert report.warnings[0].startswith(f"NOT LOSSLESS, do not serve draft served: {ledger}")


def test_a_change_behind_a_tie_is_found(texts):
    """The first token that differs is a tie; those that follow are not the target's."""
    model = Model()
    ledger, _ = texts(model, {"draft": Model(0.02, 3.0)})
    behind = [entry for entry in ledger.divergences if entry.gap and entry.gap <= 2 * entry.error]
    assert behind
    assert all(re.search(r"its token \d+ lies \d.* nats behind", entry.why) for entry in behind)


@pytest.mark.parametrize("side", [0, 1])
def test_a_server_without_logprobs_leaves_the_fork_named(texts, side):
    silent = [{}, {}]
    silent[side] = {"silent": True}
    ledger, report = texts(Model(), *silent)
    reason = "not explained: the server gave no log-probabilities"
    assert {entry.why for entry in ledger.divergences} == {reason}
    assert ledger.unexplained == len(ledger.divergences) >= 4
    assert reason in report.warnings[0]


def test_the_server_that_drafts_cannot_excuse_itself(texts):
    """By saying that all tokens are alike: that any fork is a tie, or any error large."""
    mutant = {"draft": Model(0.02, 0.5)}
    honest, _ = texts(Model(), mutant)
    liar, _ = texts(Model(), mutant | {"stretch": 1e-6})
    assert liar.unexplained == honest.unexplained >= 4


def test_a_server_that_is_sure_of_the_other_token_sees_no_tie(texts):
    assert texts(Model(), {"stretch": 30})[0].verdict == "changed"
