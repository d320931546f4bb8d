"""What a run needs of memory: a formula a stage, from the models' configs alone.

Parameters are counted by the models' own code, built without weights. All sizes are bytes, at the
longest prompt and the longest answers that the recipe allows: what a run needs at most.
docs/memory.md holds the formulas against peaks that were measured.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from distill.drafters.pruned import pruned_config
from distill.losses import CHUNK
from distill.models import check_prunable, layers_read
from distill.recipe import Recipe
from distill.teacher.answers import ANSWERS_PER_SHARD
from distill.teacher.store import bytes_per_token
from eval.decoding.forward import PIECE
from eval.decoding.generation import PREFILL_ROWS, rows_at_once
from eval.measuring.agreement import BATCH

PROMPT_TOKENS = PIECE  # of the longest prompt, where that is not known yet
STATE_BYTES = 2  # of each of the numbers in a hidden state, in bf16
LOGIT_BYTES = 10  # of a logit with the fp32 copies that make it a token or a loss
COMPARED_BYTES = 35  # of a logit of p and q while alpha is taken, at several temperatures
RUNTIME = 2**30  # of every device: the process, or a GPU's context and the libraries' workspaces
FRAGMENTED = 0.1  # of every device: what an allocator cannot use


@dataclass(frozen=True)
class Stage:
    """What is in memory at a stage's peak. buffers: activations, logits, copies of a moment."""

    name: str
    target: int = 0
    draft: int = 0
    gradients: int = 0
    optimizer: int = 0
    kv: int = 0
    buffers: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by what they are of; none that is zero."""
        sizes = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}
        return {name: size for name, size in sizes.items() if size}

    @property
    def peak(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Needs:
    """Of a run: its stages, and bytes on disk."""

    stages: list[Stage]
    answers_on_disk: int
    checkpoint: int
    states_on_disk: int

    @property
    def largest(self) -> Stage:
        """The stage that takes most."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def device(self) -> int:
        """Bytes of a machine or GPU that holds every stage, RUNTIME and fragmentation included."""
        return round((self.largest.peak + RUNTIME) / (1 - FRAGMENTED))

    def lines(self) -> list[str]:
        """As text: a stage a line, then all of them."""
        lines = []
        for stage in self.stages:
            parts = ", ".join(f"{name} {_gib(size)}" for name, size in stage.parts.items())
            lines.append(f"{stage.name}: {_gib(stage.peak)} GiB ({parts})")
        disk = f"answers {_gib(self.answers_on_disk)}, a checkpoint {_gib(self.checkpoint)}"
        if self.states_on_disk:
            disk += f", the target's hidden states {_gib(self.states_on_disk)}"
        return [*lines, f"a device of {self.device / 1e9:.1f} GB holds it; GiB on disk: {disk}"]


def needs(
    recipe: Recipe,
    target: PreTrainedConfig,
    draft: PreTrainedConfig | None,
    prompt_tokens: int = PROMPT_TOKENS,
) -> Needs:
    """What the recipe's run needs with models of these configs; draft None: the target, pruned.

    prompt_tokens: of the longest prompt. Where a server runs the target, nobody answers or
    evaluates here. A draft on the target's states is taken for a pruned one of a single layer.
    """
    target = target.get_text_config()
    dtype: torch.dtype = getattr(torch, recipe.dtype)
    size, on_cpu = dtype.itemsize, bool(recipe.training.get("use_cpu", False))
    prompt = min(prompt_tokens, target.max_position_embeddings // 2)
    room = target.max_position_embeddings - prompt - recipe.max_gamma - 1
    answer, new = min(recipe.answer_max_new_tokens, room), min(recipe.max_new_tokens, room)
    states = len(layers_read(recipe, target.to_dict())) * target.hidden_size * STATE_BYTES
    head = target.vocab_size * target.hidden_size * size

    model = _pruned(recipe, target) if draft is None else _shape(draft.get_text_config())
    weights, embedding = _numbers(model), _numbers(model.get_input_embeddings())
    distilling = _distilling(recipe, model, prompt + answer, answer)
    if draft is None:
        drafting = (weights - embedding) * size  # its embedding is the target's
        # the fitted head, in pieces and whole; of a trimmed one the full form is made again
        preparing = Stage("preparing", draft=drafting, buffers=2 * head)
        exporting = Stage("exporting", draft=4 * weights, buffers=2 * head)
    else:
        drafting = weights * size
        preparing = Stage("preparing", draft=4 * weights)
        exporting = Stage("exporting", draft=4 * weights, buffers=embedding * size)
    stages = [preparing, distilling, exporting]
    if recipe.answers != "server":
        whole = _shape(target)
        held = size * _numbers(whole)
        rows = min(recipe.answer_batch_size, recipe.max_train_prompts * recipe.answers_per_prompt)
        kv, beside = _decoding(target, size, rows, prompt, answer)
        if recipe.train_on_prompts:  # their logits, a piece at a time, and one row of it in fp32
            piece = min(prompt, PIECE) * target.vocab_size
            beside = max(beside, piece * (PREFILL_ROWS * size + LOGIT_BYTES))
        if on_cpu:  # else the states of answers that are not on disk yet are on the host
            beside += (rows + ANSWERS_PER_SHARD) * (prompt + answer) * states
        stages.insert(0, Stage("answering", held, kv=kv, buffers=beside))
        if draft is None:
            stages[1] = replace(preparing, target=held)
            drafting //= size if on_cpu else 1  # in eight bits
        kv, beside = _decoding(target, size, BATCH, prompt, new)
        compared = new * target.vocab_size * COMPARED_BYTES - kv
        in_fp32 = 4 * max(map(_numbers, _layers(whole)))  # by the check of ties
        buffers = max(beside, compared, in_fp32)
        stages.append(Stage("evaluating", held, 2 * drafting, kv=kv, buffers=buffers))
    count = recipe.max_train_prompts * recipe.answers_per_prompt
    taught = answer + recipe.train_on_prompts * prompt
    return Needs(
        stages,
        count * taught * bytes_per_token(recipe.cache_top_k, target.vocab_size),
        3 * distilling.gradients,  # the trained weights in fp32 and both of AdamW's moments
        count * (answer + prompt) * states,
    )


def _decoding(
    config: PreTrainedConfig, size: int, rows: int, prompt: int, new: int
) -> tuple[int, int]:
    """Of so many rows the KV cache, and the prefill or the logits beside; see generate_batched.

    size: bytes of a number.
    """
    kv = _kv_bytes_per_token(config, size)
    short = min(prompt, PIECE)  # prompts of up to so many tokens are read together
    read, cached = PREFILL_ROWS * short, max(PREFILL_ROWS * short, prompt)
    activations = read * (3 * _inner(config) + 8 * config.hidden_size) * size
    mask = config.num_attention_heads // _key_heads(config) * short * prompt * size
    logits = rows * config.vocab_size * LOGIT_BYTES
    slots = max(rows * (short + new), rows_at_once(rows, prompt, new) * (prompt + new))
    return slots * kv, cached * kv + max(activations + mask, logits)


def _kv_bytes_per_token(config: PreTrainedConfig, size: int) -> int:
    """Of all layers, as a decoder's cache holds them. size: bytes of a number.

    MLA keeps what keys and values are made of, and the rotated part, once for all heads.
    """
    layers = config.num_hidden_layers - getattr(config, "num_kv_shared_layers", 0)
    if latent := getattr(config, "kv_lora_rank", None):
        return layers * (latent + config.qk_rope_head_dim) * size
    # Gemma-4's layers differ; earlier versions of transformers know no such
    each = list(getattr(config, "per_layer_config", None) or [config] * layers)[:layers]
    return 2 * size * sum(_key_heads(layer) * _head_size(layer) for layer in each)


def _key_heads(config: PreTrainedConfig) -> int:
    heads: int = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads


def _head_size(config: PreTrainedConfig) -> int:
    size: int | None = getattr(config, "head_dim", None)
    return size or config.hidden_size // config.num_attention_heads


def _distilling(recipe: Recipe, model: PreTrainedModel, width: int, answer: int) -> Stage:
    """A step with AdamW's moments already there, as from the second one on."""
    config, args = model.config.get_text_config(), recipe.training
    rows = args.get("per_device_train_batch_size", 8)
    masks = round(recipe.kind.masks(recipe.max_gamma) * answer)
    width += masks
    hidden, layers = config.hidden_size, config.num_hidden_layers
    bf16 = args.get("bf16", not args.get("fp16", False))
    product = 2 if bf16 else 4  # bytes of what a product reads and gives
    embedding: Any = model.get_input_embeddings()
    head = model.get_output_embeddings().weight
    weights = _numbers(model)
    trained = weights if embedding.weight is head else weights - _numbers(embedding)
    if recipe.use_peft:
        trained = _in_adapters(recipe, model)
        weights += trained
    # what a layer keeps for its gradients: of the MLP, and of norms and attention, partly in fp32
    of_a_layer = rows * width * (4 * product * _inner(config) + 38 * hidden)
    kept, recomputed = layers * of_a_layer, 0
    if recipe.activation_checkpointing:
        kept, recomputed = layers * rows * width * 4 * hidden, of_a_layer
    kept += 5 * rows * width**2 if masks else 0  # what sees what, as bools and as numbers
    copies = trained * product if bf16 else 0  # by autocast, of what is trained
    chunk = min(CHUNK, rows * answer) * len(head) * LOGIT_BYTES + head.numel() * product
    # gradients come as activations go
    live = max(kept, 4 * trained) + max(chunk, recomputed) + copies
    return Stage(
        "distilling",
        draft=4 * weights,
        gradients=4 * trained,
        optimizer=8 * trained,
        buffers=live - 4 * trained,
    )


def _pruned(recipe: Recipe, target: PreTrainedConfig) -> PreTrainedModel:
    """The pruned draft, with its trimmed head and an embedding of its own."""
    layers = recipe.num_draft_layers if recipe.kind.language_model else 1
    check_prunable(target.to_dict(), layers)
    model = _shape(pruned_config(target, layers))
    rows, size = model.get_output_embeddings().weight.shape
    trimmed = nn.Linear(size, recipe.draft_vocab_size or rows, bias=False, device="meta")
    model.set_output_embeddings(trimmed)
    return model


def _shape(config: PreTrainedConfig) -> PreTrainedModel:
    """A model of that config without weights."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _numbers(module: nn.Module) -> int:
    """How many parameters there are, tied ones counted once."""
    return sum(p.numel() for p in module.parameters())


def _in_adapters(recipe: Recipe, model: PreTrainedModel) -> int:
    """How many numbers LoRA trains: of each linear layer but the head, r times both its widths."""
    named = recipe.lora_target_modules
    return sum(
        recipe.lora_r * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module is not model.get_output_embeddings()
        and (named == "all-linear" or name.rpartition(".")[2] in named.split(","))
    )


def _layers(model: nn.Module) -> list[nn.Module]:
    stacks = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    return [layer for stack in stacks for layer in stack]


def _inner(config: PreTrainedConfig) -> int:
    """The width of a layer's MLP."""
    return getattr(config, "intermediate_size", None) or 4 * config.hidden_size


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}"
