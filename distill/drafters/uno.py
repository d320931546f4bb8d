"""Uno in training (arXiv 2609.04010): a LoRA on the target learns to draft from random tokens.

A pass reads the texts with the target's weights and, behind them, chains of uniformly random tokens
with the LoRA as well. The chain of a response position replaces its token and the tokens after it,
because in decoding that token is drafted in the same pass (eval/decoding/drafters/uno.py). A random
token sees the text before its chain and the random tokens before it in the chain, and learns the
target's distribution at its position. Chains, their lengths and tokens are drawn anew at each step;
longer chains are rarer. The texts depend on no trained weight, so they need no backward pass.
Legend: B rows, Q random tokens of a row, M trained tokens, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor
from transformers import PreTrainedModel

from align.checkpoint import Checkpoint
from align.files import read_json
from distill.drafters.attention import NO_TEXT, Attention, Marks
from distill.drafters.batch import (
    HeadInput,
    Plan,
    TrainingBatch,
    drawn_depths,
    followed,
    mean_depth,
    slots,
)
from distill.drafters.compact import write_compact
from distill.drafters.kind import Draft, DraftKind, Origin
from distill.drafters.layers import normed, rotary_of, trained_states
from eval.decoding.drafters.uno import PRODUCTS, TOKENS, WEIGHTS, read_adapter
from eval.decoding.target import Target

DEEPER = 0.8  # probability that a chain with random tokens to some depth has one more
CHAINS = 0.5  # share of the response positions that have a chain in a training step


class Uno(DraftKind):
    rate, least_rate = 2e-3, 2e-4
    adapter = True
    unused = ("draft_vocab_size",)

    def initialise(self, origin: Origin) -> Draft:
        """An adapter that changes nothing yet; or the one of a folder that `save` has written."""
        assert isinstance(origin.target, Target)  # `check_models` refuses others
        target = origin.target.model
        # other modules on the same weights, because the target stays as it is
        model = copy.deepcopy(target, {id(weight): weight for weight in target.parameters()})
        if origin.published is not None:
            give_adapter(model, origin.published, origin.embedding)
        else:
            names = [name.rpartition(".")[2] for names in PRODUCTS.values() for name in names]
            adapter = LoraConfig(
                r=origin.lora_r,
                lora_alpha=origin.lora_alpha,
                target_modules=names,
                task_type="CAUSAL_LM",
            )
            torch.manual_seed(0)
            model.add_adapter(adapter)
        setattr(model.config, TOKENS, origin.max_gamma)
        return Draft(model)

    def save(self, folder: Path, draft: Draft, embedding: Tensor, target: Checkpoint) -> None:
        """PEFT's folder of an adapter, and the target's config."""
        model: Any = draft.model
        tensors = {
            f"base_model.model.{name}": weight
            for name, weight in get_peft_model_state_dict(model, adapter_name="default").items()
        }
        adapter = copy.copy(model.peft_config["default"])
        adapter.base_model_name_or_path, adapter.inference_mode = target.spec, True
        adapter.save_pretrained(folder)
        model.config.save_pretrained(folder)
        write_compact(folder, self.name, tensors, embedding, WEIGHTS)

    def load(self, folder: Path, embedding: Tensor, head: Callable[[], Tensor]) -> Draft:
        spec = read_json(folder / "adapter_config.json")["base_model_name_or_path"]
        model: Any = Checkpoint.open(spec).load(embedding.dtype)
        give_adapter(model, folder, embedding)
        setattr(model.config, TOKENS, read_json(folder / "config.json")[TOKENS])
        return Draft(model)

    def plan(self, model: Any, batch: TrainingBatch, training: bool) -> Plan:
        lengths = drawn_depths(batch, random_tokens(model), DEEPER)
        if training:  # a depth of 2 is drawn with probability CHAINS, from other random numbers
            lengths[drawn_depths(batch, 2, CHAINS, again=True) < 2] = 0
        entries = [
            ((lengths >= depth) & followed(batch.positions, depth - 1)).nonzero()[:, 0]
            for depth in range(1, random_tokens(model) + 1)
        ]
        chains = torch.cat(entries)
        depths = torch.cat([torch.full_like(part, n) for n, part in enumerate(entries, 1)])
        of_slots, of_depths, places = slots(batch, chains, depths)
        learned = chains + depths - 1
        return Plan(of_slots, of_depths, places, learned, tuple(map(len, entries)))

    def head_input(self, model: PreTrainedModel, batch: TrainingBatch) -> HeadInput:
        """The losses are divided by the mean number of random tokens of a position."""
        share = CHAINS if model.training else 1.0
        weight = 1 / (share * mean_depth(random_tokens(model), DEEPER))
        return HeadInput(read_noise(model, batch), batch.plan.learned, weight)


KIND = Uno()


def random_tokens(model: PreTrainedModel) -> int:
    """The random tokens of the longest draft, whose first token is the target's own."""
    return int(getattr(model.config, TOKENS)) - 1


def give_adapter(model: PreTrainedModel, folder: Path, embedding: Tensor) -> None:
    """Add the folder's adapter to the target. embedding: the target's [V, H]."""
    tensors, _ = read_adapter(folder, embedding)
    model.add_adapter(LoraConfig.from_pretrained(str(folder)))
    named = {name.removeprefix("base_model.model."): t for name, t in tensors.items()}
    set_peft_model_state_dict(model, named)


def read_noise(model: PreTrainedModel, batch: TrainingBatch) -> Tensor:
    """The last states [M, H] that the plan takes of the random tokens behind the texts."""
    body: Any = model.base_model
    chains, depths, taken, *_ = batch.plan
    places = batch.positions[chains.clamp_min(0)]  # [B, Q], in the flattened batch
    before = batch.position_ids.flatten()[places] - 1
    texts = batch.texts.flatten()[places].masked_fill(chains < 0, NO_TEXT)
    of_texts = Marks.of_texts(batch.texts, batch.position_ids)
    noise = Marks(texts, before, chains, depths)
    attend, kept = Attention(of_texts, of_texts), list[tuple[Tensor, Tensor]]()

    def read(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        kept.append((k, v))
        return attend(q, k, v, window=window)

    embedding, nothing = body.embed_tokens, taken[:0]
    model.disable_adapters()
    with torch.no_grad():
        trained_states(model, embedding(batch.input_ids), batch.position_ids, read, nothing)
    model.enable_adapters()

    attention = Attention(noise, of_texts.then(noise.as_keys()))
    seeds = batch.seeds[texts.clamp_min(0)]
    x = embedding(random_ids(seeds, before, depths, len(embedding.weight)))
    rotary = rotary_of(body, before + depths)
    for layer, context in zip(body.layers, kept, strict=True):
        attend_behind = partial(behind, attention, context)
        x = layer(x, packed=attend_behind, trained=taken, position_embeddings=rotary)
    return normed(body.norm, x)[0]


def random_ids(seeds: Tensor, before: Tensor, depths: Tensor, size: int) -> Tensor:
    """Uniformly random ids below `size`: a hash [B, Q] of the text's seed and the place in it.

    So they are the same in any batch and number of processes.
    """
    mixed = seeds * 0x9E3779B1 + before * 0x85EBCA77 + depths * 0xC2B2AE3D
    for _ in range(2):  # the low 32 bits, as products of 64 bits would overflow
        mixed = ((mixed & 0xFFFFFFFF) ^ ((mixed & 0xFFFFFFFF) >> 16)) * 0x45D9F3B
    mixed &= 0xFFFFFFFF
    return (mixed ^ (mixed >> 16)) % size


def behind(
    attention: Attention,
    context: tuple[Tensor, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
) -> Tensor:
    """The attention of random tokens over the keys and values of the texts and their own."""
    keys, values = (torch.cat(pair, 2) for pair in zip(context, (k, v), strict=True))
    return attention(q, keys, values, window=window)
