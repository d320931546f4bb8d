"""A run keeps its minutes: by a clock that is moved by hand, and in runs that are cut off."""

import dataclasses
import json
from time import sleep
from types import SimpleNamespace

import pytest
import torch

from align.errors import UserError
from distill import clock as clock_module
from distill import train
from distill.checkpoint import last_checkpoint
from distill.clock import CLOCK, Clock, answers_in_time
from distill.models import check_models, open_models, target_loader
from distill.prefetch import Prefetcher
from distill.prompt_sets import collect_prompts
from distill.recipe import load_recipe
from distill.teacher.answers import LocalTarget
from distill.teacher.states import LocalStates, cache_states
from distill.teacher.vllm_states import state_reader
from distill.teacher.vllm_target import answering_target
from distill.train import run
from tests.distill.conftest import made_answers, plain_recipe


@pytest.fixture
def time(monkeypatch):
    """The seconds that have passed: `time.now`; Python itself started at 0."""
    passed = SimpleNamespace(now=0.0)
    fake = SimpleNamespace(monotonic=lambda: passed.now, time=lambda: passed.now)
    monkeypatch.setattr(clock_module, "time", fake)
    process = SimpleNamespace(create_time=lambda: passed.now)
    monkeypatch.setattr(clock_module.psutil, "Process", lambda: process)
    return passed


def test_a_run_that_goes_on_counts_what_it_had_used(time, tmp_path):
    first = Clock(tmp_path, 10.0)
    time.now = 150.0
    first.keep()
    time.now = 1000.0  # killed, and started again much later
    second = Clock(tmp_path, 10.0)
    assert second.seconds() == 150
    time.now = 1050.0
    assert second.left(1.0) == 400
    assert second.left(1 / 3) == 0


def test_a_disk_that_is_full_does_not_stop_the_clock(tmp_path, monkeypatch):
    def full(clock):
        tried.append(clock)
        raise UserError("The disk is full")

    tried = []
    monkeypatch.setattr(clock_module, "KEPT_EVERY", 0.001)
    monkeypatch.setattr(Clock, "keep", full)
    (tmp_path / CLOCK).write_text('{"seconds": 1.0, "training": null}')
    with Clock(tmp_path, None) as clock:
        while len(tried) < 2 and clock.keeper.is_alive():
            sleep(0.01)
        assert clock.keeper.is_alive()


def test_without_minutes_nothing_ends_by_time(time, tmp_path):
    clock = Clock(tmp_path, None)
    time.now = 1e9
    assert clock.left(1 / 3) == float("inf")
    assert clock.training_progress() == 0


def nothing():
    """What a target that is there already does to start."""


@pytest.mark.parametrize("start", [0, 100, 180])
def test_a_start_does_not_count_as_speed(time, tmp_path, start):
    clock, made = Clock(tmp_path, 10.0), []

    def begin():
        time.now += start

    def answer(count):
        time.now += (count - sum(made)) / 33
        made.append(count - sum(made))
        return count

    count = answers_in_time(clock, 10**6, list(range(10**6)), 64, begin, answer)
    assert count > 0.9 * (200 - start) * 33
    assert time.now <= 200


def test_a_second_start_for_the_states_has_its_time(time, tmp_path):
    made = []

    def begin():
        time.now += 60

    def answer(count):
        time.now += count - sum(made)
        made.append(count - sum(made))
        return count

    clock = Clock(tmp_path, 10.0)
    assert answers_in_time(clock, 500, list(range(500)), 8, begin, answer, True) > 70
    assert time.now + 60 <= 200


@pytest.mark.parametrize("cached", [0, 6])
def test_states_of_outputs_take_no_more_than_their_share(time, job, tmp_path, monkeypatch, cached):
    recipe = job(tmp_path / "run", draft=None, drafter="eagle3", minutes=5, answer_batch_size=8)
    pair = check_models(recipe, *open_models(recipe))
    prompts = collect_prompts(recipe, pair.target)
    target = answering_target(recipe, pair, prompts, load := target_loader(recipe, pair, prompts))
    # another kind of draft has read other states of the first outputs
    dataclasses.replace(target, layers=(), fit_layers=()).answers(prompts.training.ids[:cached])
    read, generated = LocalStates.read, LocalTarget.made

    def slow(work):
        def after_time(*given):
            for each in work(*given):
                time.now += 20
                yield each

        return after_time

    monkeypatch.setattr(LocalStates, "read", slow(read))
    monkeypatch.setattr(LocalTarget, "made", slow(generated))
    with state_reader(recipe, pair, target, load) as reader:
        answers = train.answered(recipe, pair, prompts, target, reader, Clock(tmp_path, 5.0), True)
        assert time.now in (80, 100)
        assert len(answers) == time.now // 20
        cache_states({pair.layers: answers}, reader)
    assert time.now <= 100


@pytest.mark.parametrize(("began", "warned"), [(199.0, False), (350.0, True), (500.0, True)])
def test_training_that_begins_late_says_so(time, tmp_path, capsys, began, warned):
    clock = Clock(tmp_path, 10.0)
    time.now = began
    clock.training_progress()
    assert ("Warning" in capsys.readouterr().out) == warned
    clock.training_progress()
    assert not capsys.readouterr().out


def test_outputs_that_end_after_the_first_round_say_so(time, tmp_path, capsys):
    def answer(count):
        time.now += 120  # of 200, so that a second output has no time
        return count

    answers_in_time(Clock(tmp_path, 10.0), 9, list(range(9)), 8, nothing, answer)
    assert "Warning" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("seconds", "cached"), [(0.1, 0), (0.1, 500), (1.0, 0), (30.0, 0), (300.0, 0)]
)
def test_answers_are_made_until_their_third_is_over(time, tmp_path, seconds, cached):
    clock, total, made = Clock(tmp_path, 10.0), 5000, []

    def answer(count):
        new = count - cached - sum(made)
        made.append(new)
        time.now += new * seconds
        return count

    count = answers_in_time(clock, total, list(range(cached, total)), 8, nothing, answer)
    assert count == cached + sum(made)
    assert time.now <= 200 or sum(made) == 1  # not a whole batch where that takes too long
    assert sum(made) >= 0.93 * (200 / seconds) - 1


def test_answers_that_are_there_take_no_time_and_none_is_made_late(time, tmp_path):
    clock = Clock(tmp_path, 1.0)
    time.now = 30.0
    assert answers_in_time(clock, 40, list(range(20, 40)), 8, None, lambda count: count) == 20
    assert answers_in_time(clock, 40, [], 8, None, lambda count: count) == 40

    def answer(count):
        time.now += 1
        return count

    # another run has answered others than the first prompts
    assert answers_in_time(clock, 40, list(range(20)), 8, nothing, answer) == 1


def test_the_time_is_written_within_a_stage(tmp_path, monkeypatch):
    monkeypatch.setattr(clock_module, "KEPT_EVERY", 0.01)
    with Clock(tmp_path, 10.0) as clock:
        sleep(0.1)
        assert not clock.path.exists()  # the folder is not claimed
        clock.keep()
        first = json.loads(clock.path.read_text())["seconds"]
        while json.loads(clock.path.read_text())["seconds"] == first:
            assert clock.keeper.is_alive()
            sleep(0.01)


def test_the_share_of_the_training_that_is_over_survives_a_kill(time, tmp_path):
    clock = Clock(tmp_path, 10.0)
    time.now = 200.0
    assert clock.training_progress() == 0  # training has just begun
    time.now = 310.0  # half of the time until 420 seconds is over
    half = clock.training_progress()
    assert half == pytest.approx(0.5, abs=0.02)
    again = Clock(tmp_path, 10.0)  # killed; its folder has the time it had used
    assert again.training_progress() <= half
    time.now = 421.0
    assert clock.training_progress() == 1


def test_training_leaves_time_for_its_last_measurement(time, tmp_path):
    clock = Clock(tmp_path, 10.0)
    time.now = 200.0
    clock.ending = 110.0  # half of the time until 420 seconds
    assert clock.training_progress() == 0
    time.now = 310.0
    assert clock.training_progress() == 1
    clock.keep()
    assert Clock(tmp_path, 10.0).training_progress() == 1


def test_a_training_without_a_checkpoint_begins_anew(tmp_path, tiny_llama, plain_trainer):
    """A kill before the first checkpoint leaves no weights, so the schedule begins again."""
    recipe = plain_recipe(tmp_path, max_steps=100, minutes=10.0)
    trainer = plain_trainer(recipe, tiny_llama(vocab_size=50), made_answers())
    trainer.clock.training = 100.0
    trainer.resume()
    assert trainer.clock.training is None


def test_all_processes_have_the_first_ones_share(time, tmp_path, monkeypatch):
    clock = Clock(tmp_path, 10.0)  # by this process's own clock nothing is over
    monkeypatch.setattr(clock_module, "from_first", lambda own: 1.0)
    assert clock.training_progress() == 1


@pytest.mark.parametrize(("share", "rate"), [(0.0, 1e-2), (0.5, 5e-3)])
def test_the_learning_rate_stands_where_steps_or_time_have_come_to(
    tmp_path, tiny_llama, plain_trainer, share, rate
):
    recipe = plain_recipe(tmp_path, max_steps=100)
    trainer = plain_trainer(recipe, tiny_llama(vocab_size=50), made_answers())
    trainer.model.train()
    trainer.by_time = share
    with Prefetcher(trainer.data, trainer.data.parts(), torch.device("cpu")) as batches:
        trainer.train_step(batches)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(rate)
        trainer.step = 70
        trainer.train_step(batches)
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(3e-3)


def test_a_warm_up_of_a_share_is_of_the_steps_that_the_time_allows(
    tmp_path, tiny_llama, plain_trainer
):
    recipe = plain_recipe(tmp_path, max_steps=1000, warmup_steps=0.1)
    trainer = plain_trainer(recipe, tiny_llama(vocab_size=50), made_answers())
    trainer.model.train()
    with Prefetcher(trainer.data, trainer.data.parts(), torch.device("cpu")) as batches:
        for share, rate in ((0.05, 0.5), (0.1, 1.0), (0.55, 0.5)):
            trainer.by_time = share
            trainer.train_step(batches)
            (group,) = trainer.optimizer.param_groups[:1]
            assert group["lr"] == pytest.approx(rate * group["initial_lr"])


def test_a_training_with_few_steps_in_its_time_warms_up_by_steps(
    tmp_path, tiny_llama, plain_trainer
):
    recipe = plain_recipe(tmp_path, max_steps=100, warmup_steps=10)
    trainer = plain_trainer(recipe, tiny_llama(vocab_size=50), made_answers())
    trainer.model.train()
    trainer.by_time, rates = 0.2, []
    with Prefetcher(trainer.data, trainer.data.parts(), torch.device("cpu")) as batches:
        for _ in range(11):
            trainer.train_step(batches)
            rates.append(trainer.optimizer.param_groups[0]["lr"])
    assert rates[:9] == pytest.approx([step * 1e-3 for step in range(9)])
    assert rates[9:] == pytest.approx([1e-2 * 80 / 90] * 2)


def test_a_run_keeps_its_minutes_and_says_what_repeats_it(job, tmp_path):
    keys = {"max_steps": -1, "num_train_epochs": 1e6, "early_stopping_patience": None}
    recipe = job(tmp_path / "run", minutes=0.5, answer_batch_size=96, **keys)
    assert run(recipe) == 0
    kept = json.loads((recipe.folder / CLOCK).read_text())
    # the time for training was used, though a million epochs were not over
    state = json.loads((last_checkpoint(recipe.folder) / "trainer_state.json").read_text())
    assert kept["training"] < kept["seconds"]
    assert state["step"] < state["steps"]
    repeat = recipe.folder / "repeat.yaml"
    assert "--num_processes 1 " in repeat.read_text().partition("\n")[0]
    repeated = load_recipe(["--recipe", str(repeat)])
    assert repeated.minutes is None
    assert repeated.training["max_steps"] == state["step"]
    assert repeated.max_answers == 11


def test_a_run_that_is_cut_off_in_its_stages_goes_on_with_its_time(job, tmp_path, monkeypatch):
    recipe = job(tmp_path / "run", minutes=5.0, max_steps=4)

    def cut(*_):
        raise KeyboardInterrupt

    used = [0.0]
    for stage in ("answered", "prepare_draft", "evaluate", None):
        with monkeypatch.context() as patch:
            if stage:
                patch.setattr(train, stage, cut)
                with pytest.raises(KeyboardInterrupt):
                    run(recipe)
            else:
                assert run(recipe) == 0
        used.append(json.loads((recipe.folder / CLOCK).read_text())["seconds"])
        assert used[-1] > used[-2], stage
