import errno
import re
import shutil
from itertools import islice, takewhile
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
)

from align.errors import UserError
from distill.checkpoint import WEIGHTS, last_checkpoint, mark_complete
from distill.drafters.pruned import KIND as PRUNED
from distill.loss_forward import give_loss_forward, take_loss_forward
from distill.losses import coarse_loss, forward_kl
from distill.prefetch import AHEAD, Prefetcher
from distill.recipe import build_recipe
from distill.recipe_files import RecipeError
from distill.teacher.store import Answers
from distill.trainer import distil
from distill.training_set import TrainingSet
from distill.training_setup import trainable_model, training_config
from tests.distill.conftest import made_answers, plain_recipe, stored

VOCAB = 50
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture
def tiny_model(tiny_llama):
    """Makes the same model each time."""
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "pad_token_id": 0}
    return lambda: tiny_llama(**shape)


@pytest.fixture
def train(plain_trainer):
    return lambda model, answers, recipe: distil(plain_trainer(recipe, model, answers))


def recipe_in(folder, **changes):
    return plain_recipe(folder, **{"max_steps": 8, "logging_steps": 1, "save_steps": 4} | changes)


def data_of(folder, answers, **changes):
    keys = {"packed": True, "tokens_per_step": 10**6, "seed": 1} | changes
    return TrainingSet(stored(folder, answers), None, None, lambda batch: None, **keys)


def batch_of(folder, answers, **changes):
    """All answers in one batch, as the arguments of a forward pass."""
    data = data_of(folder, answers, **changes)
    return data.batch(next(data.parts()), [])._asdict()


def test_batched_loss_is_the_sum_of_single_answers(tmp_path, tiny_model):
    model, answers = tiny_model(), made_answers(5)
    expected = 0.0
    for answer in answers:
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[None]
        logits = model(ids).logits[0, len(answer.prompt_ids) - 1 : -1]
        logprobs = answer.top_logprobs.half()  # as they are stored
        expected += coarse_loss(logits, answer.top_ids, logprobs, forward_kl)[0].sum()
    give_loss_forward(model, PRUNED, forward_kl)
    # fp32 sums in another order
    loss = model(**batch_of(tmp_path, answers)).loss
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("tokens", [2048, 48])
def test_packed_texts_have_the_loss_and_gradients_of_texts_in_rows(tmp_path, tokens):
    """Its layers are not `layers.PLAIN`, so this model can read rows, too."""
    results, answers = [], made_answers(9)
    assert PRUNED.packs(Olmo2ForCausalLM(Olmo2Config(vocab_size=VOCAB, **SMALL)))
    for packed in (False, True):
        torch.manual_seed(0)
        model = Olmo2ForCausalLM(Olmo2Config(vocab_size=VOCAB, **SMALL))
        give_loss_forward(model, PRUNED, forward_kl)
        data = data_of(tmp_path, answers, packed=packed, tokens_per_step=tokens)
        total = torch.zeros(())
        for part in takewhile(lambda part: part.epoch == 0, data.parts()):
            loss = model(**data.batch(part, [])._asdict()).loss
            loss.backward()
            total += loss.detach()
        results.append({name: p.grad for name, p in model.named_parameters()} | {"loss": total})
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-4, atol=1e-5)


def sinks_model():
    torch.manual_seed(0)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
    model = GptOssForCausalLM(GptOssConfig(vocab_size=VOCAB, **SMALL, **experts))
    torch.nn.init.constant_(model.model.layers[0].self_attn.sinks, 2.0)
    return model


def test_a_model_that_has_no_fused_attention_is_trained_with_its_own(tmp_path, plain_trainer):
    model = sinks_model()
    ids = torch.arange(8)[None]
    recipe = recipe_in(tmp_path, max_steps=1, learning_rate=0.0)
    with torch.no_grad():
        expected = model(ids).logits
    distilled = distil(plain_trainer(recipe, model, made_answers()))
    assert distilled.config._attn_implementation == "eager"
    torch.testing.assert_close(distilled(ids).logits, expected)


@pytest.mark.parametrize("use_peft", [False, True])
def test_training_lowers_the_loss_and_leaves_a_plain_model(tmp_path, train, use_peft, tiny_model):
    answers = made_answers()
    batch = batch_of(tmp_path / "batch", answers)

    def loss(model):
        with torch.no_grad():
            give_loss_forward(model, PRUNED, forward_kl)
            value = float(model(**batch).loss)
        take_loss_forward(model)
        return value

    before = loss(tiny_model())
    embedding = tiny_model().model.embed_tokens.weight
    keys = {"use_peft": use_peft, "lora_r": 4, "lora_alpha": 8}
    recipe = recipe_in(tmp_path, **keys, max_steps=40, save_strategy="no")
    tuned = train(tiny_model(), answers, recipe)
    assert loss(tuned) < 0.97 * before
    assert type(tuned) is LlamaForCausalLM
    assert tuned.config.use_cache  # what trains without a cache is served with one
    assert torch.equal(tuned.model.embed_tokens.weight, embedding)
    assert tuned(torch.tensor([[2, 3]])).logits.shape == (1, 2, VOCAB)


@pytest.mark.parametrize("tied", [False, True])
def test_lora_trains_the_new_rows_of_a_transplant_as_well(
    tmp_path, plain_trainer, tiny_llama, tied
):
    def model():
        return tiny_llama(vocab_size=VOCAB, pad_token_id=0, tie_word_embeddings=tied)

    recipe = recipe_in(tmp_path, use_peft=True, lora_r=4, lora_alpha=8)
    trainer = plain_trainer(recipe, model(), made_answers(), strategy="transplant")
    tuned = distil(trainer)
    assert type(tuned) is LlamaForCausalLM
    assert tuned.state_dict().keys() == model().state_dict().keys()
    assert (tuned.lm_head.weight is tuned.model.embed_tokens.weight) == tied
    moved = (tuned.model.embed_tokens.weight - model().model.embed_tokens.weight).abs().amax(1)
    read = torch.cat([torch.cat([a.prompt_ids, a.response_ids[:-1]]) for a in made_answers()])
    assert (moved[read.unique()] > 0).all()
    assert not tuned.lm_head.weight.equal(model().lm_head.weight)


def test_adapters_are_scaled_by_alpha_over_their_rank(tmp_path, tiny_model):
    recipe = recipe_in(tmp_path, use_peft=True, lora_r=4, lora_alpha=24)
    model = trainable_model(recipe, tiny_model(), new_entries=False)
    adapted = model.get_base_model().model.layers[0].mlp.up_proj
    down, up = adapted.lora_A["default"].weight, adapted.lora_B["default"].weight
    torch.nn.init.normal_(up)
    expected = tiny_model().model.layers[0].mlp.up_proj.weight + 6 * up @ down
    merged = model.merge_and_unload().model.layers[0].mlp.up_proj.weight
    torch.testing.assert_close(merged, expected)


@pytest.mark.parametrize("use_peft", [False, True])
def test_checkpoints_hold_what_changes_and_no_card(tmp_path, train, tiny_model, use_peft):
    recipe = recipe_in(tmp_path, use_peft=use_peft, lora_r=4, lora_alpha=8)
    train(tiny_model(), made_answers(), recipe)
    assert not list(tmp_path.rglob("README.md"))
    with safe_open(tmp_path / "checkpoint-8" / WEIGHTS, "pt") as weights:
        names = set(weights.keys())
    assert names
    assert not [name for name in names if "embed" in name]
    assert use_peft or "lm_head.weight" in names


def test_the_loss_stands_beside_the_bar_of_steps(tmp_path, train, tiny_model, capsys):
    train(tiny_model(), made_answers(), recipe_in(tmp_path, disable_tqdm=False))
    shown = capsys.readouterr()
    assert "{" not in shown.out + shown.err
    assert re.search(r"8/8 .*loss=\d\.\d+", shown.err.rpartition("\r")[2])


@pytest.mark.parametrize(
    ("steps", "use_peft", "lost"),  # 6 steps an epoch
    [(8, False, None), (8, True, None), (8, False, "checkpoint-8"), (12, False, "checkpoint-12")],
)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    tmp_path, train, tiny_model, steps, use_peft, lost
):
    """After the last step it trains no further; in a later epoch it sees the rows of that one."""

    def run(name):
        recipe = recipe_in(tmp_path / name, max_steps=steps, use_peft=use_peft)
        return train(tiny_model(), made_answers(), recipe).state_dict()

    straight = run("straight")
    run("killed")
    if lost:
        shutil.rmtree(tmp_path / "killed" / lost)
    resumed = run("killed")
    for name, weight in straight.items():
        assert torch.equal(weight, resumed[name]), name


@pytest.mark.parametrize(
    ("keys", "width", "rate"),
    [
        ({}, 576, 3e-3),
        ({"use_peft": True}, 64, 5e-3),
        ({}, 1536, 3e-3 * 9 / 64),
        ({"drafter": "eagle3"}, 576, 4e-3),
        ({"drafter": "eagle3"}, 1536, 4e-3 * 9 / 64),
        ({"drafter": "dflash"}, 1536, 6e-4),
        ({}, 8192, 5e-5),
        ({"draft": "org/draft"}, 4096, 5e-5),
        ({"draft": "org/draft", "drafter": "eagle3"}, 1152, 1e-4),
        ({"draft": "org/draft", "drafter": "dflash"}, 4096, 1e-5),
        ({"drafter": "mtp"}, 576, 3e-4),
        ({"draft": "org/draft", "use_peft": True}, 896, 2e-4),
    ],
)
def test_a_recipe_without_a_learning_rate_trains_at_that_of_its_draft(keys, width, rate):
    keys = keys | dict.fromkeys(("target", "train_prompts", "eval_prompts"), "unused")
    keys |= {"use_cpu": True, "bf16": False}
    usual = training_config(build_recipe(keys), width=width)
    assert usual.learning_rate == pytest.approx(rate)  # trl's own is 2e-5
    trained = "draft" in keys or keys.get("drafter") == "mtp"
    new = 60 if keys.get("drafter") == "eagle3" else 30
    assert usual.warmup_steps == (0.1 if trained else new)
    given = training_config(build_recipe(keys | {"learning_rate": 0.1}), width=width)
    assert given.learning_rate == 0.1


def test_new_weights_of_a_wider_draft_get_a_lower_rate(plain_trainer, tiny_llama, tmp_path):
    wide = tiny_llama(vocab_size=VOCAB, hidden_size=1152, intermediate_size=24, pad_token_id=0)
    recipe = recipe_in(tmp_path)
    del recipe.training["learning_rate"]
    assert plain_trainer(recipe, wide, made_answers()).config.learning_rate == 7.5e-4


@pytest.mark.parametrize("scaler", [True, False])
def test_a_scaler_itself_skips_an_update_that_is_not_finite(
    tmp_path, tiny_model, plain_trainer, monkeypatch, scaler
):
    """Of fp16: without its own step it refuses the next one."""
    recipe = recipe_in(tmp_path, optim="adamw_torch")
    trainer = plain_trainer(recipe, tiny_model(), made_answers())
    trainer.optimizer.optimizer.defaults["fused"] = None
    trainer.accelerator.scaler = Mock() if scaler else None
    monkeypatch.setattr(trainer, "backward", lambda *_: torch.tensor(torch.inf))
    monkeypatch.setattr(trainer.accelerator, "clip_grad_norm_", lambda *_: torch.tensor(torch.inf))
    monkeypatch.setattr(trainer.optimizer, "step", stepped := Mock())
    with Prefetcher(trainer.data, trainer.data.parts(), torch.device("cpu")) as batches:
        trainer.train_step(batches)
    assert stepped.called == scaler


def test_without_held_out_prompts_no_checkpoint_is_the_best(tmp_path, train, tiny_model):
    train(tiny_model(), made_answers(), recipe_in(tmp_path, save_strategy="no", max_steps=1))
    assert not list(tmp_path.glob("checkpoint-*"))


@pytest.mark.parametrize("optim", ["adamv_torch", "grokadamw"])
def test_an_optimiser_that_is_not_there_is_refused_first(tmp_path, optim):
    with pytest.raises(RecipeError, match=f"transformers refuses .*{optim}"):
        training_config(recipe_in(tmp_path, optim=optim))


def test_a_recipe_for_a_gpu_that_is_not_there_names_the_cause(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    keys = {"use_cpu": False, "bf16": True, "optim": "adamv_torch"}
    with pytest.raises(RecipeError, match="torch finds no GPU here"):
        training_config(recipe_in(tmp_path, **keys))
    with pytest.raises(RecipeError) as refusal:
        training_config(recipe_in(tmp_path, **keys | {"use_cpu": True}))
    assert "GPU here" not in str(refusal.value)


@pytest.mark.parametrize("name", ["checkpoint-9", "true"])
def test_a_checkpoint_that_is_not_there_is_refused_first(tmp_path, name):
    recipe = recipe_in(tmp_path, resume_from_checkpoint=str(tmp_path / name))
    with pytest.raises(RecipeError, match=f"resume_from_checkpoint is '.*{name}'"):
        training_config(recipe)


@pytest.mark.parametrize("use_peft", [False, True])
def test_activations_computed_twice_change_nothing(tmp_path, train, tiny_model, use_peft):
    drafts = [
        train(
            tiny_model(),
            made_answers(),
            recipe_in(tmp_path / str(twice), use_peft=use_peft, activation_checkpointing=twice),
        )
        for twice in (False, True)
    ]
    for name, weight in drafts[0].state_dict().items():
        torch.testing.assert_close(drafts[1].state_dict()[name], weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("damaged", ["optimizer.pt", "model.safetensors", "complete", "lost"])
def test_a_damaged_checkpoint_is_not_resumed(tmp_path, train, tiny_model, damaged):
    train(tiny_model(), made_answers(), recipe_in(tmp_path))
    assert last_checkpoint(tmp_path).name == "checkpoint-8"
    checkpoint = tmp_path / "checkpoint-8"
    if damaged == "lost":
        (checkpoint / "trainer_state.json").unlink()
    else:
        (checkpoint / damaged).write_bytes((checkpoint / damaged).read_bytes()[:40])
    assert last_checkpoint(tmp_path).name == "checkpoint-4"
    with pytest.raises(RecipeError, match="checkpoint-8"):
        training_config(recipe_in(tmp_path, resume_from_checkpoint=str(checkpoint)))


def test_the_last_checkpoint_has_the_highest_number(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step in (9, 90, 100, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        mark_complete(tmp_path / f"checkpoint-{step}", "48 tokens a step")
    assert last_checkpoint(tmp_path).name == "checkpoint-1000"
    (tmp_path / "checkpoint-1000" / "complete").unlink()  # cut short
    assert last_checkpoint(tmp_path).name == "checkpoint-100"


def test_a_checkpoint_of_other_steps_is_refused_and_passes_are_free(tmp_path, train, tiny_model):
    train(tiny_model(), made_answers(), recipe_in(tmp_path))
    with pytest.raises(RecipeError, match="tokens_per_step"):
        train(tiny_model(), made_answers(), recipe_in(tmp_path, tokens_per_step=24))
    train(tiny_model(), made_answers(), recipe_in(tmp_path, gradient_accumulation_steps=2))


def same_weights(first, second, **tolerance):
    for name, weight in first.state_dict().items():
        torch.testing.assert_close(second.state_dict()[name], weight, **tolerance)


@pytest.mark.parametrize("tokens", [48, 10])  # 10: a step has fewer texts than parts
def test_passes_of_a_step_do_not_change_it(tmp_path, train, tiny_model, tokens):
    drafts = []
    for passes in (1, 2, 3):
        keys = {"gradient_accumulation_steps": passes, "tokens_per_step": tokens}
        recipe = recipe_in(tmp_path / str(passes), **keys)
        drafts.append(train(tiny_model(), made_answers(), recipe))
    before, after = tiny_model().state_dict(), drafts[0].state_dict()
    assert not any(
        torch.equal(before[name], after[name].cpu()) for name in before if "proj" in name
    )
    same_weights(drafts[0], drafts[1], rtol=1e-4, atol=1e-5)
    same_weights(drafts[0], drafts[2], rtol=1e-4, atol=1e-5)


def test_the_precision_is_that_of_the_recipe(tmp_path, tiny_model, plain_trainer, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")  # of `accelerate config`
    for bf16, precision in ((False, "no"), (True, "bf16")):
        trainer = plain_trainer(recipe_in(tmp_path, bf16=bf16), tiny_model(), made_answers())
        assert trainer.accelerator.mixed_precision == precision


def test_bf16_leaves_the_weights_in_fp32(tmp_path, train, tiny_model):
    tuned = train(tiny_model(), made_answers(), recipe_in(tmp_path, bf16=True))
    assert {weight.dtype for weight in tuned.state_dict().values()} == {torch.float32}


def test_a_disk_that_fills_at_a_checkpoint_is_explained(tmp_path, train, tiny_model, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("distill.checkpoint.torch.save", fails)
    with pytest.raises(UserError, match=r"disk is full: .*checkpoint-4"):
        train(tiny_model(), made_answers(), recipe_in(tmp_path))
    assert last_checkpoint(tmp_path) is None


def test_no_checkpoint_is_deleted_before_the_next_is_complete(
    tmp_path, train, tiny_model, monkeypatch
):
    newest = []
    monkeypatch.setattr(
        "distill.checkpoint.remove",
        lambda path: newest.append((path.name, last_checkpoint(tmp_path))),
    )
    train(tiny_model(), made_answers(), recipe_in(tmp_path, save_steps=2))
    steps = [(name, last and last.name) for name, last in newest]
    assert ("checkpoint-2", "checkpoint-6") in steps
    assert ("checkpoint-4", "checkpoint-8") in steps


def without_numbers(answers):
    for answer in answers:
        answer.top_logprobs[:] = float("nan")
    return answers


def test_a_step_that_is_not_finite_is_skipped_and_named(tmp_path, train, tiny_model, capsys):
    answers = made_answers(8)
    without_numbers(answers[5:6])
    recipe = recipe_in(tmp_path, tokens_per_step=10, max_steps=8, logging_steps=4)
    tuned = train(tiny_model(), answers, recipe)
    assert all(weight.isfinite().all() for weight in tuned.state_dict().values())
    assert capsys.readouterr().out.count("outputs [5] of the cache") == 1
    # the others were trained
    other = train(tiny_model(), made_answers(8), recipe_in(tmp_path / "other", tokens_per_step=10))
    assert not torch.equal(tuned.lm_head.weight, other.lm_head.weight)


@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_torch"])
def test_a_skipped_step_changes_nothing(tmp_path, tiny_model, plain_trainer, optim):
    recipe = recipe_in(tmp_path, optim=optim, max_steps=2, learning_rate=0.1)
    trainer = plain_trainer(recipe, tiny_model(), without_numbers(made_answers(4)))
    before = {name: weight.clone() for name, weight in trainer.plain.state_dict().items()}
    trainer.train()
    assert trainer.step == 2
    for name, weight in trainer.plain.state_dict().items():
        assert torch.equal(weight, before[name]), name


def test_three_steps_in_a_row_that_are_not_finite_end_the_training(tmp_path, train, tiny_model):
    with pytest.raises(UserError, match=r"step 3 on outputs \[.*\] of the cache"):
        train(tiny_model(), without_numbers(made_answers(8)), recipe_in(tmp_path))


class Reads(TorchDispatchMode):
    """Counts the reads of device values."""

    count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        read = {"_local_scalar_dense", "nonzero", "item", "is_nonzero", "equal"}
        self.count += function.__name__.partition(".")[0] in read
        return function(*arguments, **keywords or {})


def test_a_step_reads_no_value_from_the_device(tmp_path, tiny_model, plain_trainer, monkeypatch):
    recipe = recipe_in(tmp_path, gradient_accumulation_steps=2)
    trainer = plain_trainer(recipe, tiny_model(), made_answers())

    def backward(part, batch):
        loss = sum(p.square().sum() for p in trainer.plain.parameters()) * part.weight
        trainer.accelerator.backward(loss)
        return loss.detach()

    monkeypatch.setattr(trainer, "backward", backward)  # the kinds have tests of their own
    with Prefetcher(trainer.data, trainer.data.parts(), torch.device("cpu")) as batches:
        trainer.train_step(batches)  # makes the optimiser's state
        with Reads() as reads:
            for _ in range(3):
                trainer.train_step(batches)
        assert reads.count == 0
        with reads:
            trainer.read_skipped()
            trainer.loss.item()
        assert reads.count > 0  # they are seen


@pytest.mark.parametrize("steps", [None, 5])
def test_each_output_is_read_once_an_epoch(tmp_path, tiny_model, plain_trainer, monkeypatch, steps):
    numbers = []
    read = Answers.__getitem__
    monkeypatch.setattr(Answers, "__getitem__", lambda self, n: numbers.append(n) or read(self, n))
    epochs = {"max_steps": steps} if steps else {"max_steps": -1, "num_train_epochs": 1}
    trainer = plain_trainer(recipe_in(tmp_path, **epochs), tiny_model(), made_answers())
    numbers.clear()
    trainer.train()
    whole = trainer.data.steps(0)
    begun = [text for part in islice(trainer.data.parts(), trainer.step) for text in part.texts]
    assert numbers[: len(begun)] == begun
    # and those of the batches that were made ahead
    assert len(numbers) <= sum(map(len, whole)) + sum(map(len, trainer.data.steps(1)[: AHEAD + 1]))
    if steps is None:
        assert sorted(numbers[: len(begun)]) == list(range(24))
