"""The target's hidden states: kept while it answers, made where they lack, shared like answers."""

import dataclasses

import pytest
import torch

from distill.held_out import FIRST_INDEX, held_out_answers
from distill.models import check_models, target_loader
from distill.prompt_sets import collect_prompts
from distill.teacher import states as module
from distill.teacher.answers import answer_prompts, note_used, open_store
from distill.teacher.states import cache_states, states_of
from distill.teacher.store import CacheError

KIND = {"draft": None, "drafter": "eagle3"}


@pytest.fixture
def begun(job, tmp_path):
    """A run that has not answered anything yet: recipe, pair, prompts, target, store."""
    recipe = job(tmp_path / "run", **KIND, answer_batch_size=3)
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    load = target_loader(recipe, prompts)
    return recipe, pair, prompts.training.ids, load, open_store(recipe, pair.target)


@pytest.fixture
def passes(monkeypatch):
    """Index of each answer that is read in a pass of its own."""
    indices, states_at = [], module.states_at
    monkeypatch.setattr(
        module, "states_at", lambda *given: indices.append(given[1].index) or states_at(*given)
    )
    return indices


@pytest.mark.parametrize("taught", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_answering_keeps_those_of_a_pass_of_the_model(begun, passes, taught, temperature):
    recipe, pair, prompts, load, store = begun
    recipe = dataclasses.replace(recipe, answer_temperature=temperature)
    answers = answer_prompts(recipe, prompts, load, store, pair.layers, taught)
    cache_states(pair.layers, load, answers)
    assert not passes
    states = states_of(pair.layers, answers)
    assert states.layers == pair.layers == (1,)
    for answer in answers:
        with torch.no_grad():
            found = load().model(answer.text[None, :-1], output_hidden_states=True)
        assert states[answer.index].dtype == torch.bfloat16
        expected = found.hidden_states[1][0, :, None]
        torch.testing.assert_close(states[answer.index].float(), expected, atol=0.05, rtol=0.01)


def test_they_are_made_once_and_only_where_they_lack(begun, passes, capsys):
    recipe, pair, (*training, last), load, store = begun
    answers = answer_prompts(recipe, training, load, store)
    recipe.folder.mkdir()
    names = answer_prompts(recipe, [last], load, store).names
    note_used(recipe.folder, pair.target, answers, names)
    held_out = held_out_answers(recipe.folder)
    with pytest.raises(
        CacheError, match=f"lacks .* of {len(training) + 1} answers, the first .* 0"
    ):
        states_of(pair.layers, answers, held_out)
    cache_states(pair.layers, load, answers[:3], held_out)
    assert passes == [0, 1, 2, FIRST_INDEX]
    cache_states(pair.layers, load, answers, held_out)
    assert passes[4:] == [*range(3, len(training))]
    assert "hidden states of layers [1]: 0 MiB in" in capsys.readouterr().out
    assert FIRST_INDEX in states_of(pair.layers, answers, held_out)


def test_each_layers_have_a_place_of_their_own_beside_the_same_answers(begun, passes):
    recipe, _, prompts, load, store = begun
    answers = answer_prompts(recipe, prompts, load, store, (1,))
    shards = list(store.folder.glob("shard-*"))
    with pytest.raises(CacheError, match="the draft reads them"):
        states_of((2,), answers)
    cache_states((2,), load, answers)
    assert len(passes) == len(prompts)
    assert {path.name for path in store.folder.glob("states-*")} == {"states-1", "states-2"}
    assert list(store.folder.glob("shard-*")) == shards
