"""What training asks of every kind of draft."""

import dataclasses
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from align.checkpoint import Checkpoint
from align.files import read_json
from distill.clock import Clock
from distill.drafters.attention import Attention, sees
from distill.drafters.kind import kinds
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
from distill.models import check_models, open_models, target_loader
from distill.prepare import prepare_draft, untrained_drafter
from distill.prompt_sets import collect_prompts
from distill.recipe import build_recipe
from distill.teacher.answers import USED
from distill.teacher.store import Answers, Store, names_of
from distill.trainer import distil_draft
from distill.training_setup import optimizer_of, training_config
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from tests.distill.drafters.batches import batch_of, planned
from tests.distill.drafters.conftest import SIZE

TEXTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5], [8, 46, 26, 43, 38, 32, 7, 9, 50, 28, 8, 4, 19])
PROMPTS, SEEDS = (4, 3), (7, 2**31 + 4)
DENSE = {"by_text": False}
KINDS = ["pruned", "pard", "eagle3", "dflash", "medusa", "mtp", "uno"]


def losses_of(kind, model, layers, texts, packed):
    """The loss of these texts, by number, and its gradients."""
    states = [torch.randn(12, layers, SIZE) for _ in TEXTS]
    chosen = [TEXTS[i] for i in texts]
    batch = batch_of(
        chosen,
        [PROMPTS[i] for i in texts],
        [states[i][: len(TEXTS[i]) - 1] for i in texts] if layers else None,
        [SEEDS[i] for i in texts],
        packed,
    )
    top = (batch.positions[:, None] * 0 + batch.input_ids.flatten()[batch.positions + 1, None]) % 9
    batch = batch._replace(top_ids=torch.cat([top, top + 9, top + 20], 1))
    model.zero_grad()
    loss = model(**planned(batch, kind, model)._asdict()).loss
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", KINDS)
def test_the_loss_of_a_text_hangs_neither_on_padding_nor_on_other_texts(target, random_draft, name):
    """Else packed texts, or another number of processes, would take other steps."""
    kind, model = kinds()[name], random_draft(name).train()
    packs = kind.packs(model)
    assert packs == (name != "mtp")
    give_loss_forward(model, kind, forward_kl)
    layers = len(kind.target_layers(target.model.config.to_dict()))

    def losses(texts, packed):
        torch.manual_seed(5)
        return losses_of(kind, model, layers, texts, packed)

    apart = [losses([i], packs) for i in range(2)]
    for order in ([0, 1], [1, 0]):
        loss, gradients = losses(order, packs)
        torch.testing.assert_close(loss, apart[0][0] + apart[1][0])
        for weight, gradient in gradients.items():
            alone = apart[0][1][weight] + apart[1][1][weight]
            torch.testing.assert_close(gradient, alone, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", KINDS)
def test_a_plan_has_the_tokens_of_drafts_by_their_depth(random_draft, name, training):
    """A measurement finds by it the position at which each token's draft begins."""
    batch = batch_of(TEXTS, PROMPTS, seeds=SEEDS)
    plan = kinds()[name].plan(random_draft(name, max_gamma=5), batch, training)
    if plan is None:  # first tokens alone
        return
    texts, numbers = batch.texts.flatten()[batch.positions], batch.numbers
    before = range(len(numbers))
    for depth, learned in enumerate(plan.learned.split(plan.counts)):
        begins = learned - depth
        assert len({*begins.tolist()}) == len(begins)
        assert {*begins.tolist()} <= {*before}  # no token follows one that is not there
        assert torch.equal(texts[begins], texts[learned])
        assert torch.equal(numbers[begins] + depth, numbers[learned])
        before = begins.tolist()
    assert training or plan.counts[0] == len(numbers)
    assert plan.counts[2:]


@pytest.mark.parametrize("name", ["pruned", "pard", "uno"])
def test_layers_that_are_computed_twice_keep_no_activations(random_draft, kept_bytes, name):
    kind, model = kinds()[name], random_draft(name).train()
    give_loss_forward(model, kind, forward_kl)
    batch = planned(batch_of(TEXTS, PROMPTS, seeds=SEEDS), kind, model)

    def read():
        torch.manual_seed(5)
        return kind.head_input(model, batch).states

    once = kept_bytes(model, read)
    model.gradient_checkpointing_enable()
    twice = kept_bytes(model, read)
    assert twice[0] < 0.8 * once[0]
    for gradient, other in zip(once[1], twice[1], strict=True):
        torch.testing.assert_close(gradient, other)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["dflash", "uno"])
def test_a_batch_that_draws_no_anchor_is_no_loss(target, random_draft, monkeypatch, name, packed):
    """As a part with a short output may."""
    drawn = f"distill.drafters.{name}.drawn_depths"
    monkeypatch.setattr(drawn, lambda batch, *_, **keys: torch.ones_like(batch.positions))
    kind, model = kinds()[name], random_draft(name).train()
    give_loss_forward(model, kind, forward_kl)
    layers = len(kind.target_layers(target.model.config.to_dict()))
    loss, gradients = losses_of(kind, model, layers, [0, 1], packed)
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients.values())


def other_texts_are_seen(queries, keys, *rest):
    none = torch.zeros_like
    return sees(
        queries._replace(texts=none(queries.texts)), keys._replace(texts=none(keys.texts)), *rest
    )


def a_token_sees_the_next(queries, keys, *rest):
    return sees(queries._replace(positions=queries.positions + 1), keys, *rest)


@pytest.mark.parametrize("mutant", [other_texts_are_seen, a_token_sees_the_next])
@pytest.mark.parametrize("name", ["pruned", "pard", "eagle3", "dflash", "uno"])
def test_a_mask_that_shows_too_much_changes_the_loss(
    target, random_draft, monkeypatch, name, mutant
):
    """So the test before cannot miss it."""
    kind, model = kinds()[name], random_draft(name).train()
    layers = len(kind.target_layers(target.model.config.to_dict()))
    give_loss_forward(model, kind, forward_kl)
    right = Attention.__init__
    monkeypatch.setattr(
        Attention, "__init__", lambda self, *marks, **keys: right(self, *marks, **keys | DENSE)
    )
    losses = []
    for change in (sees, mutant):
        monkeypatch.setattr("distill.drafters.attention.sees", change)
        torch.manual_seed(5)
        losses.append(losses_of(kind, model, layers, [0, 1], True)[0])
    assert (losses[0] - losses[1]).abs() > 1e-3 * losses[0].abs()


def test_layers_that_do_not_keep_packed_texts_apart_get_a_row_each(tiny_llama):
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 61}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    sibling = kinds()["sibling"]
    packed = dict.fromkeys(["llama", "phi3", "gpt2", "qwen3_moe"], True)
    recurrent = {"layer_types": ["conv", "full_attention"]}
    for name, right in (packed | dict.fromkeys(["lfm2", "gemma2", "falcon"], False)).items():
        more = recurrent if name == "lfm2" else {}
        model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**shape, **heads, **more))
        before = model.config._attn_implementation
        assert sibling.packs(model) == kinds()["pard"].packs(model) == right, name
        assert model.config._attn_implementation == before


@pytest.mark.parametrize("name", ["eagle3", "medusa"])
def test_a_step_in_small_batches_is_that_of_a_large_one(finished, tmp_path, name):
    folder = shutil.copytree(finished(name).folder, tmp_path / "run")
    recipe = dataclasses.replace(finished(name), output_dir=str(folder))
    pair = check_models(recipe, *open_models(recipe))
    prompts = collect_prompts(recipe, pair.target)
    load = target_loader(recipe, pair, prompts)
    store = Store(Path(read_json(folder / USED)["store"]))
    answers = Answers(store, names_of(prompts.training.ids))
    weights = []
    for passes in (1, 4):
        keys = {"gradient_accumulation_steps": passes, "max_steps": 2, "save_strategy": "no"}
        other = dataclasses.replace(recipe, training=recipe.training | keys)
        prepared = prepare_draft(other, pair, load, answers)
        outputs = answers, Answers(store, []), prompts.held_out
        draft = distil_draft(other, pair, prepared, *outputs, Clock(folder, None))
        weights.append({name: w.detach() for name, w in draft.named_parameters()})
    before = prepare_draft(recipe, pair, load, answers).model.get_output_embeddings().weight
    assert not torch.equal(weights[0]["lm_head.weight"], before.float())
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-4, atol=1e-5)


def test_a_spread_target_is_for_one_process(finished, monkeypatch):
    recipe = dataclasses.replace(finished("medusa"), device_map="auto")
    check_models(recipe, *open_models(recipe))
    monkeypatch.setattr("distill.models.PartialState", lambda: SimpleNamespace(num_processes=2))
    with pytest.raises(ValueError, match="device_map is auto, but 2 processes"):
        check_models(recipe, *open_models(recipe))


@pytest.mark.parametrize("name", ["remap", "trimmed", "eagle3", "medusa", "mtp", "pard sibling"])
def test_an_untrained_drafter_is_of_the_kind_that_will_draft(finished, name):
    recipe = finished(name)
    target = load_target(Checkpoint.open(recipe.target), torch.float32, "cpu", 64)
    found = untrained_drafter(recipe, check_models(recipe, *open_models(recipe)), target)
    trained = load_drafter(str(recipe.folder / "draft"), target)
    assert type(found) is type(trained)
    assert found.kv_bytes_per_token == trained.kv_bytes_per_token
    assert found.bytes == trained.bytes
    found.step(20, Sampling())()


def test_fitted_weights_of_a_new_draft_alone_have_a_lower_rate(random_draft):
    kind, model = kinds()["eagle3"], random_draft("eagle3")
    keys = dict.fromkeys(("target", "train_prompts", "eval_prompts"), "unused")
    keys |= {"drafter": "eagle3", "use_cpu": True, "bf16": False, "learning_rate": 1e-2}
    names = {weight: label for label, weight in model.named_parameters()}
    for draft, rate in ((None, 1e-3), ("org/draft", 1e-2)):
        recipe = build_recipe(keys | {"draft": draft})
        optimizer = optimizer_of(recipe, training_config(recipe), model)
        rates = {names[p]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
        for beginning in kind.fitted_weights:
            fitted = [rates.pop(label) for label in list(rates) if label.startswith(beginning)]
            assert fitted == pytest.approx([rate])
        assert list(rates.values()) == pytest.approx([1e-2] * len(rates))
