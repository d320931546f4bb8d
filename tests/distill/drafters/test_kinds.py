"""What training asks of every kind of draft."""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from align.sources import read_json
from distill.clock import Clock
from distill.drafters.kind import kinds
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
from distill.models import check_models, target_loader
from distill.prepare import prepare_draft, untrained_drafter
from distill.prompt_sets import collect_prompts
from distill.teacher.answers import USED
from distill.teacher.store import Answers, Store, names_of
from distill.trainer import distil_draft
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from tests.distill.drafters.conftest import SIZE, VOCAB


def batch_of(positions, states, seed, layers):
    """Made up: one row, the target's most likely tokens at each position."""
    torch.manual_seed(3)
    count = len(positions)
    return {
        "input_ids": torch.randint(VOCAB, (1, states)),
        "positions": torch.tensor(positions),
        "top_ids": torch.randint(VOCAB, (count, 3)),
        "top_logprobs": torch.full((count, 3), -1.5),
        "states": torch.randn(1, states, layers, SIZE) if layers else None,
        "seeds": torch.tensor([seed]),
    }


@pytest.mark.parametrize("name", ["pruned", "pard", "eagle3", "medusa", "mtp"])
def test_the_loss_of_a_row_hangs_neither_on_its_padding_nor_on_what_is_beside_it(
    target, random_draft, name
):
    """Else another number of processes would take other steps."""
    kind, model = kinds()[name], random_draft(name)
    give_loss_forward(model, kind, forward_kl)
    layers = len(kind.target_layers(target.model.config.to_dict()))
    short = batch_of([3, 4, 5, 6, 7], 9, 7, layers)
    long = batch_of([2, 3, 4, 5, 6, 8, 9, 10, 11], 13, 2**31 + 4, layers)
    both = {key: torch.cat([short[key], long[key]]) for key in ("top_ids", "top_logprobs", "seeds")}
    both["input_ids"] = torch.cat([F.pad(short["input_ids"], (0, 4)), long["input_ids"]])
    both["positions"] = torch.cat([short["positions"], 13 + long["positions"]])
    if layers:
        both["states"] = torch.cat([F.pad(short["states"], (0, 0, 0, 0, 0, 4)), long["states"]])
    with torch.no_grad():
        apart = model(**short).loss + model(**long).loss
        torch.testing.assert_close(model(**both).loss, apart)


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_a_step_in_small_batches_is_that_of_a_large_one(finished, tmp_path, name):
    folder = shutil.copytree(finished(name).folder, tmp_path / "run")
    recipe = dataclasses.replace(finished(name), output_dir=str(folder))
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    load = target_loader(recipe, prompts)
    store = Store(Path(read_json(folder / USED)["store"]))
    answers = Answers(store, names_of(prompts.training.ids))
    weights = []
    for rows, together in ((4, 1), (1, 4)):
        keys = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": together}
        keys |= {"max_steps": 2, "save_strategy": "no"}
        other = dataclasses.replace(recipe, training=recipe.training | keys)
        prepared = prepare_draft(other, pair, load, answers)
        draft = distil_draft(
            other, pair, prepared, answers, Answers(store, []), Clock(folder, None)
        )
        weights.append({name: w.detach() for name, w in draft.named_parameters()})
    before = prepare_draft(recipe, pair, load, answers).model.get_output_embeddings().weight
    assert not torch.equal(weights[0]["lm_head.weight"], before.float())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-4, atol=1e-5)


def test_a_spread_target_is_for_one_process(finished, monkeypatch):
    recipe = dataclasses.replace(finished("medusa"), device_map="auto")
    check_models(recipe)
    monkeypatch.setattr("distill.models.PartialState", lambda: SimpleNamespace(num_processes=2))
    with pytest.raises(ValueError, match="device_map is auto, but 2 processes"):
        check_models(recipe)


@pytest.mark.parametrize("name", ["remap", "trimmed", "eagle3", "medusa", "mtp", "pard sibling"])
def test_an_untrained_drafter_is_of_the_kind_that_will_draft(finished, name):
    recipe = finished(name)
    target = load_target(recipe.target, torch.float32, "cpu", 64)
    found = untrained_drafter(recipe, check_models(recipe), target)
    trained = load_drafter(str(recipe.folder / "draft"), target)
    assert type(found) is type(trained)
    assert found.kv_bytes_per_token == trained.kv_bytes_per_token
    assert found.bytes == trained.bytes
    found.step(20, Sampling())()
