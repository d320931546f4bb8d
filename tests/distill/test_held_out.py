"""The acceptance rate on held-out prompts while training: measured, and acted on."""

import json
import os
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from align.errors import UserError
from align.files import read_json, write_json
from distill import held_out
from distill.checkpoint import (
    BEST,
    START,
    WEIGHTS,
    best_measurement,
    last_checkpoint,
    mark_complete,
)
from distill.held_out import HeldOut, Measurement, held_out_curve, read_measurements
from distill.losses import acceptance
from distill.models import check_models, open_models, target_loader
from distill.prompt_sets import collect_prompts, hold_out
from distill.teacher.answers import USED
from distill.teacher.store import Answers, CachedAnswer, Store, names_of
from distill.train import run
from distill.trainer import distil
from eval.decoding.drafters.causal_lm import teacher_forced_logits
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.verification import Sampling
from eval.prompts import Prompt
from eval.reporting.fields import read_report
from tests.distill.conftest import plain_recipe

VOCAB = 50
SHAPE = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "pad_token_id": 0}
STEPS = [0, 1, 2, 3, 5, 6, 9, 12, 15, 18, 21, 24]  # of 24, after which the draft is measured


def made_answers(count=24, seed=5):
    """Answers of a target that says the token after the last one: it can be learnt."""
    generator = torch.Generator().manual_seed(seed)
    answers = []
    for _ in range(count):
        start = int(torch.randint(2, VOCAB, (1,), generator=generator))
        text = (start + torch.arange(12)) % (VOCAB - 2) + 2
        ids = torch.stack([text[4:], (text[4:] + 1) % VOCAB], dim=1)
        logprobs = torch.tensor([0.9, 0.05]).log().expand(8, 2)
        answers.append(CachedAnswer(text[:4], text[4:], ids, logprobs))
    return answers


@pytest.fixture
def trained(tmp_path, tiny_llama, plain_trainer, followed):
    """Trains with held-out rows; gives the draft and what was seen."""

    def train(name="run", patience=None, steps=24, **changes):
        keys = {"max_steps": steps, "logging_steps": 4, "save_steps": 8, "gamma": 2}
        keys |= {"early_stopping_patience": patience}
        recipe = plain_recipe(tmp_path / name, **keys | changes)
        model = tiny_llama(**SHAPE)
        held_out = made_answers(10, seed=6)
        trainer = plain_trainer(recipe, model, made_answers(), held_out=held_out)
        return (distil(trainer), read_measurements(recipe.folder), recipe.folder)

    return train


def best_of(measurements, categories=None):
    """The best of these measurements on prompts of these categories."""
    count = len(measurements[0].positions)
    prompts = [Prompt("p", "?", category=each) for each in categories or [None] * count]
    followed = HeldOut(Path(), prompts, 0.0, None)
    followed.measurements = {each.step: each for each in measurements}
    return followed.best


def agreement_of(draft):
    """Greedy agreement of the draft on the held-out rows, computed plainly."""
    hits = []
    for answer in made_answers(10, seed=6):
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[None]
        with torch.no_grad():
            guess = draft(ids).logits[0, 3:-1].argmax(-1)
        hits += (guess == answer.top_ids[:, 0]).tolist()
    return sum(hits) / len(hits)


def test_what_is_measured_is_the_drafts_agreement_and_its_best_weights_are_kept(trained, capsys):
    draft, seen, folder = trained()
    assert [one.step for one in seen] == STEPS
    assert seen[-1].acceptance_rate > seen[0].acceptance_rate + 0.2
    best = max(one.acceptance_rate for one in seen)
    assert agreement_of(draft) == pytest.approx(best)
    shown = capsys.readouterr().out
    so_far = [one.step for i, one in enumerate(seen) if best_of(seen[: i + 1]) is one]
    assert shown.count("the best so far") == len(so_far)
    kept = {int(path.parent.name.partition("-")[2]) for path in folder.glob("*/complete")}
    assert kept == {16, 24}
    assert best_measurement(folder)["step"] == so_far[-1]
    kept_at = f"kept: the draft after step {best_of(seen).step} of 24, held-out prompts"
    assert f"{kept_at} {1 + best:.3f} tokens a step" in shown
    tokens = [one.tokens for one in seen]
    assert tokens[-1] == 24 * 8  # all that were taught; half of them after half an epoch
    assert dict(zip([one.step for one in seen], tokens, strict=True))[3] == 12 * 8


def worse_after(last):
    """HeldOut.record, but 0 accepted after this step."""
    record = HeldOut.record

    def worse(self, latest, progress):
        if latest.step > last:
            none = [0.0] * len(latest.accepted)
            latest = replace(latest, accepted=none, emitted=none)
        return record(self, latest, progress)

    return worse


def better_with_each_step(self, latest, progress, record=HeldOut.record):
    emitted = [(2.0 + latest.step) * number for number in latest.positions]
    return record(self, replace(latest, emitted=emitted), progress)


def test_the_best_weights_come_back_where_the_last_are_worse(trained, monkeypatch):
    monkeypatch.setattr(HeldOut, "record", worse_after(12))
    draft, seen, folder = trained()
    best = best_of(seen)
    assert best.step <= 12
    assert agreement_of(draft) == pytest.approx(best.acceptance_rate)
    # and again from the finished training's checkpoint, with nothing trained, after it has moved
    monkeypatch.setattr(HeldOut, "record", None)
    folder.rename(folder.with_name("moved"))
    assert agreement_of(trained("moved")[0]) == pytest.approx(best.acceptance_rate)


@pytest.mark.parametrize("save_strategy", ["epoch", "no"])
def test_the_best_weights_are_kept_however_checkpoints_are_saved(trained, save_strategy):
    draft, seen, _ = trained(save_strategy=save_strategy, steps=8)
    assert agreement_of(draft) == pytest.approx(best_of(seen).acceptance_rate)


def test_training_stops_when_alpha_has_not_risen_for_a_while(trained, monkeypatch):
    monkeypatch.setattr(HeldOut, "record", worse_after(2))
    draft, seen, folder = trained(patience=2)
    assert [one.step for one in seen] == STEPS[: STEPS.index(2) + 3]
    assert agreement_of(draft) == pytest.approx(seen[STEPS.index(2)].acceptance_rate)
    assert last_checkpoint(folder).name == f"checkpoint-{seen[-1].step}"
    again, later, _ = trained(patience=2)  # trains no further
    assert later == seen
    assert agreement_of(again) == agreement_of(draft)


@pytest.mark.parametrize(
    ("keys", "worse", "steps"),
    [
        ({"draft": "org/draft"}, 5, 18),  # an epoch has 6
        ({"draft": "org/draft"}, 99, 36),
        ({}, 5, 36),
    ],
)
def test_a_trained_draft_has_three_epochs_unless_more_gain(
    trained, monkeypatch, keys, worse, steps
):
    record = worse_after(worse) if worse < 99 else better_with_each_step
    monkeypatch.setattr(HeldOut, "record", record)
    _, seen, _ = trained(num_train_epochs=6, steps=-1, **keys)
    assert seen[-1].step == steps


@pytest.mark.parametrize(
    ("draft", "largest", "kept"),
    [
        ("org/draft", 1 / 2, 1 / 2),
        ("org/draft", 1 / 4, 1 / 4),
        ("org/draft", 0, 0),
        (None, 1 / 2, 0),
    ],
)
def test_a_part_of_the_change_is_kept_where_all_of_it_is_worse(
    trained, tiny_llama, monkeypatch, draft, largest, kept
):
    record = HeldOut.record

    def better_up_to_the_largest(self, latest, progress):
        if latest.change > largest:
            latest = replace(latest, emitted=[0.0] * len(latest.emitted))
        return record(self, latest, progress)

    monkeypatch.setattr(HeldOut, "record", better_up_to_the_largest)
    result, seen, folder = trained(steps=8, **({"draft": draft} if draft else {}))
    best = best_of(seen)
    assert (best.step, best.change) == ((8, kept) if kept else (0, 1))
    assert not (folder / START).exists()
    if kept:
        start, end = tiny_llama(**SHAPE).state_dict(), load_file(folder / "checkpoint-8" / WEIGHTS)
        for name, weight in result.named_parameters():
            torch.testing.assert_close(weight, start[name].lerp(end.get(name, start[name]), kept))
        again, later, _ = trained(steps=8, draft=draft)  # of the finished training
        assert later == seen
        for name, weight in again.named_parameters():
            assert torch.equal(weight, result.state_dict()[name]), name


def test_a_resumed_run_has_seen_what_an_uninterrupted_one_has(trained):
    straight, seen, folder = trained(save_total_limit=99)
    killed = shutil.copytree(folder, folder.parent / "killed")
    shutil.move(folder, folder.parent / "moved")
    for path in killed.glob("checkpoint-*"):
        if int(path.name.partition("-")[2]) > 8:
            shutil.rmtree(path)
    resumed, again, _ = trained("killed", save_total_limit=99)
    assert again == seen
    for name, weight in straight.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_a_killed_run_goes_on_though_its_best_weights_are_of_a_later_step(trained, monkeypatch):
    straight, seen, folder = trained("straight", save_steps=4)

    def die(path, *_):
        if path.name == "checkpoint-12":
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("distill.checkpoint.mark_complete", die_before(die))
        with pytest.raises(KeyboardInterrupt):
            trained(save_steps=4)
    folder = folder.with_name("run")
    assert (folder / "checkpoint-12").exists()
    assert last_checkpoint(folder) == folder / "checkpoint-8"
    assert best_measurement(folder)["step"] > 8
    resumed, again, _ = trained(save_steps=4)
    assert again == seen
    for name, weight in straight.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name
    assert {path.name for path in folder.glob("checkpoint-*")} == {"checkpoint-20", "checkpoint-24"}
    os.truncate(folder / BEST, 999)
    with pytest.raises(UserError, match=BEST):
        trained(save_steps=4)


def die_before(die):
    def mark(*given):
        die(*given)
        mark_complete(*given)

    return mark


def test_measuring_keeps_to_its_share(trained, monkeypatch):
    monkeypatch.setattr(held_out, "SHARE", 0.1)
    _, seen, _ = trained()
    # a measurement of 10 rows takes 10 / 4 of a third of a step; the first and the last are free
    assert [one.step for one in seen] == [0, 9, 17, 24]


@pytest.mark.parametrize(("saving", "measured"), [(0.0, 12), (10.0, 3)])
def test_saving_counts_as_measuring(saving, measured, tmp_path):
    """100 steps take a second each; with 10 for saving one measurement is between the ends."""
    clock = SimpleNamespace(minutes=1.0, training=0.0, now=0.0, seconds=lambda: clock.now)
    followed = HeldOut(tmp_path, [Prompt("p", "?")], 1 / 12, clock)
    followed.resume(0, 0.0)
    for step in range(101):
        clock.now += step > 0
        if step == 0 or followed.due(step, step / 100):
            clock.now += saving
            followed.record(Measurement(step, step, *[[1.0]] * 4), step / 100)
            if step:
                followed.pauses.append(saving)
    assert len(followed.measurements) == measured


def test_a_base_draft_that_training_worsens_is_kept(job, tmp_path, followed, capsys):
    recipe = job(tmp_path / "run", draft=str(tmp_path / "target"), max_steps=4, learning_rate=1.0)
    shutil.copytree(recipe.target, tmp_path / "target")
    assert run(recipe) == 0
    assert "draft/ is the base draft" in capsys.readouterr().out
    assert best_of(read_measurements(recipe.folder)).step == 0
    report = read_report(recipe.folder / "report" / "report.json")
    assert report.base_kept in (recipe.folder / "draft" / "README.md").read_text()
    assert report.drafts["tuned"].alpha.mean == report.drafts["untuned"].alpha.mean == 1.0


# --- the bound of the cut


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("cached", [2, 5, 19])
def test_alpha_lies_within_what_the_cut_leaves_open(temperature, cached):
    torch.manual_seed(cached)
    p, logits = torch.randn(300, 20).double() * 2, torch.randn(300, 20)
    top, ids = p.log_softmax(-1).topk(cached, dim=-1)
    q = (logits.double() / temperature).softmax(-1)
    alpha = torch.minimum((p / temperature).softmax(-1), q).sum(-1)
    low, lacking = acceptance(logits, ids, top, temperature)
    assert (low <= alpha + 1e-6).all()
    assert (alpha <= low + lacking + 1e-6).all()
    assert lacking.mean() < (0.6 if cached == 2 else 0.3)


def test_greedy_acceptance_is_agreement_with_the_targets_own_choice():
    logits = torch.tensor([[0.0, 5.0, 1.0], [0.0, 5.0, 1.0], [0.0, 5.0, 1.0]])
    ids = torch.tensor([[1, 0], [0, 1], [-1, 1]])  # the target's best: the same, another, no row
    low, lacking = acceptance(logits, ids, torch.tensor([[0.6, 0.3]] * 3).log(), 0.0)
    assert low.tolist() == [1, 0, 0]
    assert lacking.tolist() == [0, 0, 0]


def test_a_token_without_a_row_is_never_accepted():
    logits = torch.zeros(1, 4)
    logp = torch.tensor([[0.5, 0.25, 0.125]]).log()
    low, lacking = acceptance(logits, torch.tensor([[-1, 0, 3]]), logp, 1.0)
    assert float(low) == pytest.approx(0.25 + 0.125)
    assert float(lacking) == pytest.approx(0.125)  # what is left of p, less than what is left of q


# --- which prompts


def test_what_is_like_a_held_out_prompt_is_not_trained_on():
    def prompt(name, text, group=None):
        return Prompt(name, prompt=text, group=group)

    long = "one two three four five six seven eight nine ten"
    held, rest = hold_out(
        [
            prompt("a", long, "x"),
            prompt("b", "u v w x y z", None),
            prompt("c", f"{long} eleven"),
            prompt("d", "of the same document", "x"),
            prompt("e", "of no document"),
        ],
        3,
    )
    assert [p.id for p in held] == ["a", "d", "b"]
    assert [p.id for p in rest] == ["e"]
    assert hold_out(rest, 0) == ([], rest)


def test_a_group_larger_than_what_is_wanted_is_passed_over():
    many = [Prompt(f"a{i}", prompt=f"{i} of one", group="x") for i in range(9)]
    few = [Prompt(f"b{i}", prompt=f"{i} of another", group="y") for i in range(3)]
    held, rest = hold_out([*many, *few], 2)
    assert held == few
    assert rest == many
    assert hold_out(many, 2) == ([], many)


def test_prompts_that_are_all_alike_are_trained_on(job, tmp_path, followed, capsys):
    template = " ".join(f"word{i}" for i in range(24))
    lines = [json.dumps({"id": str(i), "prompt": f"{template} {i}"}) for i in range(12)]
    (tmp_path / "alike.jsonl").write_text("\n".join(lines))
    recipe = job(tmp_path / "run", train_prompts=str(tmp_path / "alike.jsonl"))
    made = collect_prompts(recipe, check_models(recipe, *open_models(recipe)).target)
    assert not made.held_out.prompts
    assert len(made.training.prompts) == 11
    assert "because 9 of 11 are near-duplicates of 2 others" in capsys.readouterr().out


def test_the_best_weights_are_those_whose_whole_drafts_are_accepted():
    early = Measurement(1, 1, [9.0], [0.0], [10], emitted=[19.0])
    late = Measurement(2, 2, [8.9], [0.0], [10], emitted=[23.0])
    assert early.acceptance_rate > late.acceptance_rate
    assert best_of([early, late]) is late


@pytest.mark.parametrize(
    ("gains", "categories", "kept"),
    [
        ([0.2, 0.3] * 6, None, 9),
        ([0.2, -0.1] * 6, None, 0),  # a higher mean, by chance
        ([0.0] * 12, None, 0),
        ([0.2, -0.1] * 4, None, 9),  # too few prompts for an interval
        ([0.5, 0.6] * 6 + [-0.1, -0.2] * 6, ["new"] * 12 + ["old"] * 12, 0),
        ([0.5, 0.6] * 6 + [0.1, -0.2] * 6, ["new"] * 12 + ["old"] * 12, 9),
    ],
)
def test_the_base_draft_is_kept_unless_a_gain_over_it_is_shown(gains, categories, kept):
    count = len(gains)
    base, after = (
        Measurement(step, step, [4.0] * count, [0.0] * count, [10] * count, emitted)
        for step, emitted in ((0, [15.0] * count), (9, [15 + 10 * gain for gain in gains]))
    )
    assert best_of([base, after], categories).step == kept


def test_prompts_of_one_document_are_one_in_the_curve(tmp_path):
    accepted, positions = [2.0, 8.0, 3.0] * 12, [10] * 36
    measured = Measurement(5, 90, accepted, [0.0] * 36, positions, accepted)
    groups = [f"document {i // 3}" for i in range(36)]
    seen = {"groups": groups, "kept": 5, "measurements": [asdict(measured)]}
    write_json(tmp_path / held_out.MEASUREMENTS, seen)
    (point,) = held_out_curve(tmp_path).points
    assert (point.alpha.clusters, point.alpha.n) == (12, 36)
    assert point.alpha.mean == pytest.approx(13 / 30)


def test_a_run_follows_held_out_prompts_and_reports_the_curve(job, tmp_path, followed, capsys):
    recipe = job(tmp_path / "run", max_steps=12, tokens_per_step=20, gamma=2)
    assert run(recipe) == 0
    shown = capsys.readouterr().out
    assert "9 to train on (" in shown
    assert "2 held out, 1 to choose the draft length" in shown
    seen = read_measurements(recipe.folder)
    curve = read_report(recipe.folder / "report" / "report.json").held_out
    assert [point.tokens for point in curve.points] == [one.tokens for one in seen]
    assert [point.alpha.mean for point in curve.points] == pytest.approx(
        [one.acceptance_rate for one in seen]
    )
    (kept,) = (point for point in curve.points if point.kept)
    assert kept.alpha.n == 2
    assert kept.alpha.mean == max(point.alpha.mean for point in curve.points)
    page = (recipe.folder / "report" / "report.html").read_text()
    assert "Held-out training prompts" in page


@pytest.mark.parametrize("kind", ["eagle3", "medusa"])
def test_of_drafts_of_several_steps_the_first_token_is_followed(
    job, tmp_path, followed, monkeypatch, capsys, kind
):
    made = {"draft": None, "drafter": kind, "num_draft_layers": 1, "draft_vocab_size": 270}
    recipe = job(tmp_path / "run", **made, max_steps=30)
    assert run(recipe) == 0
    best = best_of(read_measurements(recipe.folder))
    # the number that decided, not that of the first tokens
    shown = capsys.readouterr().out
    number = f"{best.tokens_per_step:.3f} tokens a step"
    assert re.search(rf"kept: .* step {best.step} of \d+, held-out prompts {number}", shown)
    every = read_measurements(recipe.folder)
    so_far = [one for i, one in enumerate(every) if best_of(every[: i + 1]) is one]
    assert shown.count("the best so far") == len(so_far)
    assert best.tokens_per_step >= 1 + best.acceptance_rate
    pair = check_models(recipe, *open_models(recipe))
    prompts = collect_prompts(recipe, pair.target)
    target = target_loader(recipe, pair, prompts)()
    drafter = load_drafter(str(recipe.folder / "draft"), target)
    found = []
    store = Store(Path(read_json(recipe.folder / USED)["store"]))
    for answer in Answers(store, names_of(prompts.held_out.ids)):
        ids, text = answer.prompt_ids.tolist(), answer.response_ids.tolist()
        states = dict.fromkeys(drafter.layers)
        teacher_forced_logits(target.decoder, [*ids, *text[:-1]], len(ids), states)
        q = drafter.teacher_forced(ids, text, Sampling(), states)
        found.append(int((q.argmax(-1) == answer.top_ids[:, 0]).sum()))
    assert found == best.accepted
    assert sum(found) > 0
