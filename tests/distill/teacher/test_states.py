"""The target's hidden states: kept while it answers, made where they lack, shared like answers."""

import dataclasses
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from align.files import read_json
from distill import needs, train, trainer
from distill.checkpoint import last_checkpoint
from distill.models import check_models, open_models, target_loader
from distill.prompt_sets import collect_prompts
from distill.teacher import states as module
from distill.teacher.answers import USED, LocalTarget
from distill.teacher.states import LocalStates, cache_states, computed_states, states_of
from distill.teacher.store import Answers, Store, name_of, names_of
from distill.training_set import TrainingSet

LAYERS = (1,)


@pytest.fixture
def begun(job, tmp_path):
    """A run that has not answered anything yet: its target, which reads LAYERS, and prompts."""
    recipe = job(tmp_path / "run", draft=None, drafter="eagle3", answer_batch_size=3)
    pair = check_models(recipe, *open_models(recipe))
    assert pair.layers == LAYERS
    prompts = collect_prompts(recipe, pair.target)
    settings = recipe.answer_settings(pair.target.stops)
    load = target_loader(recipe, pair, prompts)
    return LocalTarget(Store(tmp_path / "store"), settings, load, LAYERS), prompts.training.ids


@pytest.fixture
def passes(monkeypatch):
    """The tokens of each answer that is read in a pass of its own."""
    texts, read_states = [], module.read_states
    monkeypatch.setattr(
        module, "read_states", lambda *given: texts.append(given[1].tolist()) or read_states(*given)
    )
    return texts


@pytest.mark.parametrize("packed", [True, False])
def test_those_of_a_batch_are_computed_as_they_are_stored(begun, packed):
    target, prompts = begun
    answers = target.answers(prompts)
    stored = answers.store.of_states(LAYERS)
    outputs = TrainingSet(answers, None, stored, lambda batch: None, packed, 150, 0)
    part = next(outputs.parts())
    sizes = [outputs.sizes[text] for text in part.texts]
    assert len(set(sizes)) > 1
    batch = outputs.batch(part, [])
    computed = computed_states(target.load().decoder, LAYERS, batch, sizes)
    torch.testing.assert_close(computed, batch.states, atol=0.05, rtol=0.01)
    assert torch.equal(computed.any(-1), batch.states.any(-1))  # none at a last token


def test_without_space_on_the_disk_each_step_computes_them(job, tmp_path, monkeypatch):
    computed, losses = Mock(wraps=computed_states), {}
    monkeypatch.setattr(trainer, "computed_states", computed)
    monkeypatch.setattr(needs, "CHECKPOINT", 0)
    for name in ("stored", "computed"):
        monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / name))
        keys = {"draft": None, "drafter": "eagle3", "fit_tokens": 1, "max_steps": 6}
        recipe = job(tmp_path / name / "run", **keys, logging_steps=1, save_steps=3)
        if name == "computed":  # and it stays so for the run
            with monkeypatch.context() as patch:
                patch.setattr(needs, "free_bytes", lambda _: 7_000)
                patch.setattr(train, "distil_draft", Mock(side_effect=KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    train.run(recipe)
        assert train.run(recipe, measured=False) == 0
        state = read_json(last_checkpoint(recipe.folder) / "trainer_state.json")
        losses[name] = [log["loss"] for log in state["log_history"]]
        used = read_json(recipe.folder / USED)
        store = Store(Path(used["store"]))
        prompts = read_json(recipe.folder / "prompts" / "ids.json")["train"]
        missing = store.of_states(LAYERS).missing(Answers(store, names_of(prompts)).text_names)
        assert (used["states stored"], bool(missing)) == (name == "stored", name == "computed")
        assert computed.called == (name == "computed")
    assert losses["computed"] == pytest.approx(losses["stored"], rel=1e-2)


def check(states, answers, load, layer):
    for answer in answers:
        with torch.no_grad():
            found = load().model(answer.text[None, :-1], output_hidden_states=True)
        read = states(answer)
        assert read.dtype == torch.bfloat16
        expected = found.hidden_states[layer][0, :, None]
        torch.testing.assert_close(read.float(), expected, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answering_keeps_those_of_a_pass_of_the_model(begun, passes, taught, temperature):
    target, prompts = begun
    decoding = target.settings.decoding
    sampling = dataclasses.replace(decoding.sampling, temperature=temperature)
    decoding = dataclasses.replace(decoding, sampling=sampling)
    target.settings = dataclasses.replace(target.settings, decoding=decoding)
    answers = target.answers(prompts, taught)
    cache_states({LAYERS: answers}, LocalStates(target.load))
    assert not passes
    check(states_of(target.store, LAYERS), answers, target.load, 1)


def test_answering_keeps_those_of_the_fit_of_the_first_outputs(begun, passes):
    target, prompts = begun
    names = target.names(prompts)
    target = dataclasses.replace(target, fit_layers=(2,), fit_names=names[2:], fit_tokens=60)
    answers = target.answers(prompts)
    first = Answers(target.store, names[2:]).until(60)
    assert 1 < len(first) < len(names) - 2
    cache_states({LAYERS: answers, (2,): first}, LocalStates(target.load))
    assert not passes
    check(states_of(target.store, (2,)), first, target.load, 2)
    stored = target.store.of_states((2,))
    texts = [name_of(answer.text) for answer in answers]
    assert len(first) <= len(set(stored)) < len(set(texts))
    assert texts[0] not in stored


def test_they_are_made_once_where_they_lack_beside_the_same_answers(begun, passes, capsys):
    target, prompts = begun
    answers = target.answers(prompts)
    shards = list(target.store.folder.glob("shard-*"))
    reader = LocalStates(target.load)
    first, last = (
        Answers(target.store, answers.names[part]) for part in (slice(3), slice(3, None))
    )
    cache_states({LAYERS: answers, (2,): first}, reader)
    cache_states({(2,): answers, (0,): last, (): answers}, reader)
    assert passes == [answer.text.tolist() for answer in answers]
    assert "hidden states of layers [2]: 0 MiB in" in capsys.readouterr().out
    for layer, of in ((1, answers), (2, answers), (0, last)):
        check(states_of(target.store, (layer,)), of, target.load, layer)
    folders = {path.name for path in target.store.folder.glob("states-*")}
    assert folders == {"states-0", "states-1", "states-2"}
    assert list(target.store.folder.glob("shard-*")) == shards
    assert states_of(target.store, ()) is None


@pytest.mark.parametrize("kind", ["eagle3", "pruned", "dflash"])
@pytest.mark.parametrize("minutes", [None, 5])
def test_outputs_are_computed_and_read_once_before_the_first_step(
    job, folder, tmp_path, monkeypatch, passes, kind, minutes
):
    read, read_into = Counter(), Store.read_into

    def counted(store, name, column, out):
        read[name, column] += column != "states"
        read_into(store, name, column, out)

    def first_step(*_):
        assert set(read.values()) <= {0, 1, 2}
        assert {read[key] for key in read if key[1].startswith("top")} == {1}  # by the fit
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "read_into", counted)
    monkeypatch.setattr(train, "distil_draft", first_step)
    keys = {"draft": None, "num_draft_layers": 1, "drafter": kind, "minutes": minutes}
    if kind == "dflash":
        keys["target"] = str(folder / "roomy")
    recipe = job(tmp_path / "run", **keys)
    with pytest.raises(KeyboardInterrupt):
        train.run(recipe)
    assert read
    assert not passes
