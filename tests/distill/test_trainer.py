import errno
import itertools
import math
import pickle
import re
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from safetensors import safe_open
from torch.utils.data import BatchSampler
from transformers import GptOssConfig, GptOssForCausalLM, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from align.errors import UserError
from distill.drafters.pruned import KIND as PRUNED
from distill.held_out import FIRST_INDEX
from distill.loss_forward import give_loss_forward, take_loss_forward
from distill.losses import coarse_loss, forward_kl, sharpen
from distill.recipe import RecipeError, build_recipe
from distill.teacher.store import Answers, Store
from distill.trainer import SameOrder, distil, last_checkpoint, mark_complete, training_config
from distill.training_set import DistillationCollator, answer_rows
from tests.distill.conftest import made_answers, plain_recipe

VOCAB = 50


@pytest.fixture
def tiny_model(tiny_llama):
    """Makes the same model each time."""
    shape = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "pad_token_id": 0}
    return lambda: tiny_llama(**shape)


@pytest.fixture
def train(plain_trainer):
    return lambda model, answers, recipe: distil(plain_trainer(recipe, model, answers), recipe)


def recipe_in(folder, **changes):
    return plain_recipe(folder, **{"max_steps": 8, "logging_steps": 1, "save_steps": 4} | changes)


def batch_of(answers):
    return DistillationCollator(answers.__getitem__)(list(answer_rows(answers)))


def test_batched_loss_is_the_sum_of_single_answers(tiny_model):
    model, answers = tiny_model(), made_answers(5)
    expected = 0.0
    for answer in answers:
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[None]
        logits = model(ids).logits[0, len(answer.prompt_ids) - 1 : -1]
        expected += coarse_loss(logits, answer.top_ids, answer.top_logprobs, forward_kl)[0].sum()
    give_loss_forward(model, PRUNED, forward_kl)
    batch = batch_of(answers)
    batch.pop("index")
    # fp32 sums in another order
    torch.testing.assert_close(model(**batch).loss, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("prompt_tokens", [1, 4])
def test_the_loss_is_divided_by_the_response_tokens(
    tmp_path, tiny_model, plain_trainer, prompt_tokens
):
    answers = made_answers(3)
    for answer in answers:
        answer.prompt_ids = answer.prompt_ids.repeat(2)[:prompt_tokens]
    batch = batch_of(answers)
    count = sum(len(a.response_ids) for a in answers)
    assert int((batch["labels"] != -100).sum()) == count
    trainer = plain_trainer(recipe_in(tmp_path), tiny_model(), answers)
    # as the trainer counts: labels are those of the next token, so the first of a row is left out
    assert int(trainer._get_num_items_in_batch([batch], torch.device("cpu"))) == count
    assert len(batch["positions"]) == len(batch["top_ids"])


def test_a_wide_batch_keeps_no_attention_scores(tmp_path, tiny_model, plain_trainer, monkeypatch):
    trainer = plain_trainer(recipe_in(tmp_path), tiny_model(), made_answers(5))
    model, found = trainer.model, []
    batch = batch_of(made_answers(5))
    rows, width = batch["input_ids"].shape
    scores = rows * model.config.num_attention_heads * width**2
    limit = 6 * scores * model.config.num_hidden_layers
    for limited in (limit, limit - 1):
        monkeypatch.setattr("distill.trainer.SCORES", limited)
        inputs, kept = trainer._prepare_inputs(dict(batch)), []

        def keep(tensor, kept=kept):
            kept.append(tensor.shape)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = trainer.compute_loss(model, inputs)
        loss.backward()
        squares = [shape for shape in kept if shape[-2:] == (width, width)]
        found.append((max(map(math.prod, squares), default=0), loss.detach()))
        found[-1] += (model.lm_head.weight.grad.clone(),)
        model.zero_grad()
    (eager, *of_products), (fused, *of_fused) = found
    assert eager == scores
    assert fused < scores
    torch.testing.assert_close(of_fused, of_products, rtol=1e-4, atol=1e-6)


def test_a_model_that_has_no_fused_attention_is_trained_with_its_own(tmp_path, plain_trainer):
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    model = GptOssForCausalLM(GptOssConfig(vocab_size=VOCAB, **shape, **experts, **heads))
    torch.nn.init.constant_(model.model.layers[0].self_attn.sinks, 2.0)
    ids = torch.arange(8)[None]
    recipe = recipe_in(tmp_path, max_steps=1, learning_rate=0.0)
    with torch.no_grad():
        expected = model(ids).logits
    distilled = distil(plain_trainer(recipe, model, made_answers()), recipe)
    assert distilled.config._attn_implementation == "eager"
    torch.testing.assert_close(distilled(ids).logits, expected)


def test_a_padding_token_without_an_entry_is_not_read_and_not_written(
    tmp_path, tiny_model, plain_trainer
):
    recipe = recipe_in(tmp_path, max_steps=1)
    trainer = plain_trainer(recipe, tiny_model(), made_answers(), pad="[PAD]")
    draft = distil(trainer, recipe)
    assert draft.config.pad_token_id < VOCAB
    draft.save_pretrained(tmp_path / "draft")
    LlamaForCausalLM.from_pretrained(tmp_path / "draft")


def test_workers_that_are_spawned_can_read_outputs(tmp_path, tiny_model, plain_trainer):
    answers = made_answers(5)
    store = Store(tmp_path / "store")
    store.append({str(i): answer.packed(VOCAB) for i, answer in enumerate(answers)}, "local")
    cached = Answers(store, ["0", "1", "2"]), Answers(store, ["3", "4"])
    trainer = plain_trainer(recipe_in(tmp_path), tiny_model(), *cached)
    collate = pickle.loads(pickle.dumps(trainer.data_collator))
    rows = [{"index": 1}, {"index": FIRST_INDEX}]
    expected = batch_of([answers[1], answers[3]])
    assert torch.equal(collate(rows)["input_ids"], expected["input_ids"])


def test_the_teacher_temperature_sharpens_what_is_learnt(tmp_path, tiny_model, plain_trainer):
    answers, losses = made_answers(5), []
    for temperature, sharper in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.5)):
        recipe = recipe_in(tmp_path, teacher_temperature=temperature)
        trainer, batch = plain_trainer(recipe, tiny_model(), answers), batch_of(answers)
        batch["top_logprobs"] = sharpen(batch["top_logprobs"], sharper)
        losses.append(float(trainer.compute_loss(trainer.model, trainer._prepare_inputs(batch))))
    assert losses[1] == pytest.approx(losses[2], rel=1e-6)
    assert losses[1] != pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize("use_peft", [False, True])
def test_training_lowers_the_loss_and_leaves_a_plain_model(tmp_path, train, use_peft, tiny_model):
    answers = made_answers()
    batch = batch_of(answers)
    batch.pop("index")

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
    tuned = distil(trainer, recipe)
    assert type(tuned) is LlamaForCausalLM
    assert tuned.state_dict().keys() == model().state_dict().keys()
    assert (tuned.lm_head.weight is tuned.model.embed_tokens.weight) == tied
    moved = (tuned.model.embed_tokens.weight - model().model.embed_tokens.weight).abs().amax(1)
    read = torch.cat([torch.cat([a.prompt_ids, a.response_ids[:-1]]) for a in made_answers()])
    assert (moved[read.unique()] > 0).all()
    assert not tuned.lm_head.weight.equal(model().lm_head.weight)


@pytest.mark.parametrize("use_peft", [False, True])
def test_checkpoints_hold_what_changes_and_no_card(tmp_path, train, tiny_model, use_peft):
    recipe = recipe_in(tmp_path, use_peft=use_peft, lora_r=4, lora_alpha=8)
    train(tiny_model(), made_answers(), recipe)
    assert not list(tmp_path.rglob("README.md"))
    name = "adapter_model.safetensors" if use_peft else "model.safetensors"
    with safe_open(tmp_path / "checkpoint-8" / name, "pt") as weights:
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


@pytest.mark.parametrize("rows", [24, 26, 3])
def test_the_order_of_rows_is_that_of_any_number_of_processes_and_another_in_each_epoch(rows):
    lengths = [5 + i * 7 % 11 for i in range(rows)]
    orders = []
    for processes, micro in ((1, 4), (2, 2), (4, 1), (2, 1)):  # 4 rows a step, the last in two
        order = SameOrder(lengths, 4, seed=1)
        shards = [
            list(BatchSamplerShard(BatchSampler(order, micro, False), processes, rank))
            for rank in range(processes)
        ]
        batches = itertools.chain.from_iterable(zip(*shards, strict=True))
        orders.append([row for batch in batches for row in batch])
    assert orders[0] == orders[1] == orders[2] == orders[3]
    assert set(orders[0]) == set(range(rows))
    assert len(orders[0]) == -(-rows // 4) * 4
    order.epoch = 1
    assert set(order) == set(range(rows))
    assert list(order) != orders[0] or rows < 4  # all rows are in one step, by length


def test_steps_of_another_size_do_not_go_on_from_a_checkpoint(tmp_path, train, tiny_model):
    train(tiny_model(), made_answers(), recipe_in(tmp_path))
    half = {"per_device_train_batch_size": 2}
    with pytest.raises(RecipeError, match=r"with 4 sequences a step, .* with 2 sequences a step;"):
        train(tiny_model(), made_answers(), recipe_in(tmp_path, **half))
    train(tiny_model(), made_answers(), recipe_in(tmp_path, **half, gradient_accumulation_steps=2))


@pytest.mark.parametrize(
    ("draft", "use_peft", "width", "rate"),
    [
        (None, False, 576, 3e-3),
        (None, True, 64, 5e-3),
        (None, False, 1536, 3e-3 * 9 / 64),
        (None, False, 8192, 5e-5),
        ("org/draft", False, 4096, 5e-5),
        ("org/draft", True, 896, 2e-4),
    ],
)
def test_a_recipe_without_a_learning_rate_trains_at_that_of_its_draft(draft, use_peft, width, rate):
    keys = dict.fromkeys(("target", "train_prompts", "eval_prompts"), "unused")
    keys |= {"draft": draft, "use_peft": use_peft, "use_cpu": True, "bf16": False}
    usual = training_config(build_recipe(keys), width=width)
    assert usual.learning_rate == pytest.approx(rate)  # trl's own is 2e-5
    given = training_config(build_recipe(keys | {"learning_rate": 0.1}), width=width)
    assert given.learning_rate == 0.1


def test_new_weights_of_a_wider_draft_get_a_lower_rate(plain_trainer, tiny_llama, tmp_path):
    wide = tiny_llama(vocab_size=VOCAB, hidden_size=1152, intermediate_size=24, pad_token_id=0)
    recipe = recipe_in(tmp_path)
    del recipe.training["learning_rate"]
    assert plain_trainer(recipe, wide, made_answers()).args.learning_rate == 7.5e-4


def test_without_held_out_prompts_no_checkpoint_is_the_best(tmp_path, train, tiny_model):
    train(tiny_model(), made_answers(), recipe_in(tmp_path, save_strategy="best", max_steps=1))
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


@pytest.mark.parametrize("gpus", [0, 1, 8])
def test_one_process_trains_on_one_gpu(tmp_path, monkeypatch, gpus):
    # transformers would wrap the model in DataParallel, and multiply the batch
    monkeypatch.setattr(SFTConfig, "n_gpu", gpus)
    assert training_config(recipe_in(tmp_path))._n_gpu == min(1, gpus)


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


def test_bf16_sets_the_products_and_leaves_weights_and_distributions(
    tmp_path, train, tiny_model, plain_trainer
):
    recipe = recipe_in(tmp_path, bf16=True)
    tuned = train(tiny_model(), made_answers(), recipe)
    assert {weight.dtype for weight in tuned.state_dict().values()} == {torch.float32}
    trainer = plain_trainer(recipe, tiny_model(), made_answers())
    batch = batch_of(made_answers(5))
    prepared = trainer._prepare_inputs(batch)
    assert prepared["top_logprobs"].dtype == torch.int32  # which nobody rounds
    model = tiny_model()
    give_loss_forward(model, PRUNED, forward_kl)
    assert torch.equal(model(**prepared).loss, model(**batch).loss)


def test_a_disk_that_fills_at_a_checkpoint_is_explained(tmp_path, train, tiny_model, monkeypatch):
    def fails(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(SFTTrainer, "_save_checkpoint", fails)
    with pytest.raises(UserError, match=r"disk is full: .*checkpoint-4 could not be written"):
        train(tiny_model(), made_answers(), recipe_in(tmp_path))
    assert last_checkpoint(tmp_path) is None


def test_no_checkpoint_is_deleted_before_the_next_is_complete(
    tmp_path, train, tiny_model, monkeypatch
):
    newest = []
    monkeypatch.setattr(
        "distill.trainer.rotate_checkpoints",
        lambda folder, *_, **__: newest.append(last_checkpoint(Path(folder)).name),
    )
    train(tiny_model(), made_answers(), recipe_in(tmp_path, save_steps=2))
    assert newest == [f"checkpoint-{step}" for step in (2, 4, 6, 8)]
    assert len([*tmp_path.glob("checkpoint-*")]) == 4


@pytest.mark.parametrize("damaged", ["optimizer.pt", "model.safetensors", "complete", "lost"])
def test_a_damaged_checkpoint_is_not_resumed(tmp_path, train, tiny_model, damaged):
    train(tiny_model(), made_answers(), recipe_in(tmp_path))
    assert last_checkpoint(tmp_path).name == "checkpoint-8"
    checkpoint = tmp_path / "checkpoint-8"
    if damaged == "lost":
        (checkpoint / "scheduler.pt").unlink()
    else:
        (checkpoint / damaged).write_bytes((checkpoint / damaged).read_bytes()[:40])
    assert last_checkpoint(tmp_path).name == "checkpoint-4"
    with pytest.raises(RecipeError, match="checkpoint-8"):
        training_config(recipe_in(tmp_path, resume_from_checkpoint=str(checkpoint)))


def test_the_last_checkpoint_has_the_highest_number(tmp_path):
    assert last_checkpoint(tmp_path) is None
    for step in (9, 90, 100, 1000):
        (tmp_path / f"checkpoint-{step}").mkdir()
        mark_complete(tmp_path / f"checkpoint-{step}", "4 sequences a step")
    assert last_checkpoint(tmp_path).name == "checkpoint-1000"
    (tmp_path / "checkpoint-1000" / "complete").unlink()  # cut short
    assert last_checkpoint(tmp_path).name == "checkpoint-100"


def test_a_loss_that_is_not_a_number_names_the_answers(tmp_path, train, tiny_model):
    answers = made_answers(8)
    for answer in answers:
        answer.top_logprobs[:] = float("nan")
    with pytest.raises(ValueError, match=r"loss is nan at step 1, on outputs \[.*\] of the cache"):
        train(tiny_model(), answers, recipe_in(tmp_path))
