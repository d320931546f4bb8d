"""What an interrupted evaluation is known again by: all that its rows depend on."""

import dataclasses
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from align.checkpoint import Checkpoint
from eval.decoding.build import build_decoder
from eval.decoding.loop import Decoding
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring import evaluation
from eval.measuring.evaluation import Plan, _begin, evaluate, without_graphs
from eval.measuring.journal import Journal
from eval.prompts import Prompt, PromptSet
from eval.reporting.build import build_report

VOCAB = 40
HOW = Decoding(Sampling(0.7), frozenset({3}), 20, seed=1)
PROMPTS = PromptSet("made up", [Prompt("a", prompt="x"), Prompt("b", prompt="y")], [[3, 1], [9]])
CATEGORISED = Prompt("a", prompt="x", category="odd")


@pytest.fixture(scope="module")
def key(tiny_llama, drafter):
    """The models' labels, and what the journal is begun with, with some parts changed."""

    class Begun:
        def begin(self, *what):
            self.what = what

    model = tiny_llama(vocab_size=VOCAB)
    target = Target(Checkpoint("tiny", Path()), model, build_decoder(model, 60), HOW.stops)
    other = drafter(build_decoder(tiny_llama(1, vocab_size=VOCAB), 60), VOCAB)

    def make(
        target=target,
        draft=other,
        prompts=PROMPTS,
        tuning=PROMPTS,
        how=HOW,
        plan=Plan(2, 3, 2),  # noqa: B008
    ):
        journal = Begun()
        with torch.inference_mode():
            labels = _begin(journal, target, {"draft": draft}, (prompts, tuning), how, plan)
        target, *settings = journal.what
        return (target, labels["draft"]), *settings

    make.target = target
    return make


@pytest.mark.parametrize(
    "changes",
    [
        {"how": dataclasses.replace(HOW, sampling=Sampling(0.8))},
        {"how": dataclasses.replace(HOW, stops=frozenset({4}))},
        {"how": dataclasses.replace(HOW, max_new_tokens=21)},
        {"how": dataclasses.replace(HOW, seed=2)},
        {"how": dataclasses.replace(HOW, rule="token")},
        {"how": dataclasses.replace(HOW, draft_sample_method="greedy")},
        {"prompts": dataclasses.replace(PROMPTS, ids=[[3, 1], [8]])},
        {"prompts": dataclasses.replace(PROMPTS, prompts=PROMPTS.prompts[::-1])},
        {"prompts": dataclasses.replace(PROMPTS, prompts=[CATEGORISED, PROMPTS.prompts[1]])},
        {"tuning": dataclasses.replace(PROMPTS, ids=[[3, 1], [8]])},
        {"plan": Plan(3, 3, 2)},
        {"plan": Plan(2, 4, 2)},
        {"plan": Plan(2, 3, 1)},
    ],
)
def test_another_evaluation_has_another_key(key, changes):
    assert key() == key()
    assert key(**changes) != key()


def test_other_models_have_another_key(key, drafter, tiny_llama):
    same, other = (build_decoder(tiny_llama(seed, vocab_size=VOCAB), 60) for seed in (1, 2))
    assert key(draft=drafter(same, VOCAB)) == key()
    assert key(draft=drafter(other, VOCAB)) != key()
    assert key(draft=drafter(same, VOCAB, path="lookup-first:draft")) != key()
    assert key(target=dataclasses.replace(key.target, decoder=other)) != key()


def test_models_are_known_by_the_first_tokens_of_a_long_prompt(key, monkeypatch):
    monkeypatch.setattr(evaluation, "PROBED_TOKENS", 4)  # logits of 8,192 tokens are gigabytes
    prompts, changed = (
        dataclasses.replace(PROMPTS, ids=[[3, 1, 4, 1, last], [9]]) for last in (5, 6)
    )
    by_models, *rest = key(prompts=prompts)
    assert key(prompts=changed)[0] == by_models
    assert key(prompts=changed)[1:] != tuple(rest)


@pytest.fixture
def clock(monkeypatch):
    """The seconds so far: one for each result, as a stage reads the clock before each."""
    clock = SimpleNamespace(now=0.0)

    def read():
        clock.now += 1
        return clock.now

    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=read))
    return clock


@pytest.fixture
def evaluated(key, letters, journal, clock):
    """Evaluates so many prompts in so many seconds; the report."""
    target = key.target
    target.checkpoint.tokenizer = letters(VOCAB)

    def make(drafter, count, seconds, tuning=None, how=HOW, timed=None, groups=None):
        names = [str(i % groups) if groups else None for i in range(count)]
        prompts = [Prompt(str(i), prompt="x", group=name) for i, name in enumerate(names)]
        shown = PromptSet("made up", prompts, [[i, 3, i] for i in range(count)])
        plan = Plan(None if tuning else 2, 3, timed or count, seconds)
        relation = {"relation": "identical", "strategy": "direct", "coverage": 1.0}
        drafter = dataclasses.replace(drafter, vocabulary=relation)
        given = target, {"draft": drafter}, shown, tuning or shown, how, plan, journal, {}
        return build_report(*evaluate(*given))

    return make


@pytest.mark.parametrize(
    ("seconds", "answered", "timed"),
    [(None, 40, 40), (168.0, 16, 16), (58.0, 12, 12), (50.0, 12, 10), (0.0, 12, 2)],
)
def test_all_stages_keep_the_time(
    key, drafter, evaluated, clock, monkeypatch, seconds, answered, timed
):
    monkeypatch.setattr(evaluation, "BATCH", 4)
    tuning = [[39 - i, 3] for i in range(8)]
    tuning = PromptSet("other", [Prompt(f"t{i}", prompt="x") for i in range(8)], tuning)
    report = evaluated(drafter(key.target.decoder, VOCAB), 40, seconds, tuning)
    draft = report.drafts["draft"]
    assert draft.gamma_policy == "fixed, fastest on 8 other prompts"
    assert draft.alpha.n == report.prompts.n == answered
    assert draft.speedup.n == draft.lossless.prompts == timed
    assert draft.sampled_check.prompts == timed
    assert draft.lossless.identical == timed  # compared greedily, though tokens were sampled
    # of the same prompts, however many are evaluated
    drawn = PromptSet("", [Prompt(str(i), prompt="x") for i in range(40)], [[i] for i in range(40)])
    ids = {row.id for row in draft.per_prompt if row.seconds}
    assert ids == {prompt.id for prompt in drawn.drawn(timed, HOW.seed).prompts}
    assert not seconds or clock.now <= 1.35 * seconds + 3


@pytest.mark.parametrize(("groups", "answered", "clusters"), [(20, 15, 12), (3, 12, 3)])
def test_the_time_is_kept_by_groups_which_are_the_samples_of_intervals(
    key, drafter, evaluated, monkeypatch, groups, answered, clusters
):
    monkeypatch.setattr(evaluation, "BATCH", 4)
    report = evaluated(drafter(key.target.decoder, VOCAB), 40, 55.0, groups=groups)
    draft = report.drafts["draft"]
    assert draft.alpha.n == report.prompts.n == answered
    assert draft.alpha.clusters >= draft.speedup.clusters == clusters
    assert report.answers.copy_share.either.clusters == draft.alpha.clusters
    assert (draft.speedup.ci95 is None) == (clusters < 10)


def test_the_target_runs_without_graphs_if_it_verifies_too_many_tokens():
    """Drafts of 16 tokens are verified by forwards of 17."""
    recorded, eager = SimpleNamespace(recorded=True), SimpleNamespace(recorded=False)
    assert without_graphs(recorded, {"a": recorded, "b": eager}, [15, 3]) == ["b"]
    assert without_graphs(recorded, {"a": recorded, "b": eager}, [16, 3]) == ["target", "b"]
    assert without_graphs(eager, {"a": recorded}, [3]) == ["target"]


def test_an_interrupted_evaluation_goes_on_with_its_prompts(key, drafter, evaluated, monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH", 4)
    draft = drafter(key.target.decoder, VOCAB)
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "decode_in_turns", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluated(draft, 40, 60.0)
    report = evaluated(draft, 40, 600.0)  # these seconds would be enough for all 40 prompts
    assert report.drafts["draft"].alpha.n == report.prompts.n < 40


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_added_draft_or_length_costs_only_itself(
    key, drafter, tiny_llama, letters, journal, monkeypatch, temperature
):
    """The evaluation ended early, in its last stage. Then a draft or a length is tried beside."""
    target = key.target
    target.checkpoint.tokenizer = letters(VOCAB)
    how = dataclasses.replace(HOW, sampling=Sampling(temperature))
    prompts = PromptSet("", [Prompt(str(i), prompt="x") for i in range(6)], [[i] for i in range(6)])
    tuning = PromptSet("", [Prompt("t", prompt="x")], [[7, 8]])
    relation = {"relation": "identical", "strategy": "direct", "coverage": 1.0}
    models = {
        name: drafter(build_decoder(tiny_llama(seed, vocab_size=VOCAB), 60), VOCAB, path=name)
        for seed, name in enumerate(("a", "b"), 1)
    }
    models = {name: dataclasses.replace(m, vocabulary=relation) for name, m in models.items()}

    def stages(names, longest):
        """The report, and the number of results by stage that this process added."""
        drafts, plan = {name: models[name] for name in names}, Plan(None, longest, 6)
        before, begun = Counter(), Journal(journal.path)
        monkeypatch.setattr(begun, "begin", lambda *about: begin(*about) or before.update(counts()))
        begin = Journal.begin.__get__(begun)

        def counts():
            return {stage: len(results) for stage, results in begun.results.items()}

        logs = evaluate(target, drafts, prompts, tuning, how, plan, begun, {})
        return build_report(*logs), Counter(counts()) - before

    whole, first = stages(["a"], 3)
    again, added = stages(["a"], 3)
    assert not added
    assert again.drafts["a"] == whole.drafts["a"]
    both, added = stages(["a", "b"], 3)
    assert {stage.partition(" (")[0].split()[-1] for stage in added} == {"b", "a"}
    assert not [stage for stage in added if stage in first]
    assert both.drafts["a"].speedup == whole.drafts["a"].speedup
    assert both.drafts["b"].speedup.n == both.drafts["b"].alpha.n == 6
    alone, added = stages(["b"], 3)
    assert alone.drafts["b"].speedup == both.drafts["b"].speedup
    # step costs are of all models together
    assert {stage.partition(" (")[0] for stage in added} == {"steps of b", "timed steps of b"}
    _, added = stages(["a", "b"], 4)
    assert all("(" in stage for stage in added)  # of the drafts, not of the target
    rates = [count for stage, count in added.items() if stage.startswith("acceptance rate")]
    assert rates == [6, 6]


def test_timed_prompts_are_drawn_and_costs_are_of_the_middle_of_an_output(
    key, drafter, evaluated, monkeypatch
):
    """A file may be sorted by category."""
    given, right = [], evaluation.decode_in_turns
    monkeypatch.setattr(
        evaluation, "decode_in_turns", lambda *args: given.append(args[2]) or right(*args)
    )
    endless = dataclasses.replace(HOW, stops=frozenset({VOCAB + 1}))
    report = evaluated(drafter(key.target.decoder, VOCAB), 40, None, how=endless, timed=4)
    names = [prompt.id for prompt in given[0].prompts]
    assert len(names) == 4
    assert names != ["0", "1", "2", "3"]
    # prompts of 3 tokens, outputs of 20
    assert report.drafts["draft"].costs.context_length == 13


def test_outputs_of_one_token_have_a_report(key, drafter, evaluated):
    draft = drafter(key.target.decoder, VOCAB)
    how = dataclasses.replace(HOW, max_new_tokens=1)
    report = evaluated(draft, 4, None, how=how).drafts["draft"]
    assert report.itl_ms is None
    assert "itl_ms" in {missing.field for missing in report.missing}
    assert report.lossless.identical == 4


@pytest.mark.parametrize("shared", [[1, 3, 1], [99, 3, 99]])
def test_draft_lengths_are_not_chosen_on_evaluated_prompts(key, drafter, evaluated, shared):
    tuning = PromptSet("other", [Prompt("t", prompt="x")], [[i % VOCAB for i in shared]])
    draft = drafter(key.target.decoder, VOCAB)
    if shared[0] == 1:
        with pytest.raises(ValueError, match="'t' would choose the draft length and be evaluated"):
            evaluated(draft, 4, None, tuning)
    else:
        report = evaluated(draft, 4, None, tuning)
        assert report.decoding.gamma_policy == "fixed, fastest on 1 other prompts"


def test_the_time_that_is_left_makes_no_other_evaluation(key):
    assert key(plan=Plan(2, 3, 2, seconds=9.0)) == key(plan=Plan(2, 3, 2, seconds=4.0))
