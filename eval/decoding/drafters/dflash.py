"""DFlash: one pass fills a block of masks behind the newest token (arXiv 2602.06036).

The block's first slot is the newest token, the anchor; slot k drafts the k-th token after it. The
layers see no token of the text before the anchor, but the target's hidden states there, fused by
`fc` and `hidden_norm`: they are further keys and values in each layer. The slots of a block see
each other in both directions; in a causal layer they do not see later slots. In a layer with a
window, a slot sees the positions less than the window behind its own, as in z-lab's code and vLLM.
speculators trains with the window of the anchor for all slots, so a text that is longer than the
window gives other states at its end. Embedding and LM head are the target's.

DFlash2 mixes each slot with the slots before it, before and after attention and MLP (`Mixture`),
and adds to the logits of the likeliest tokens a score by the token drafted before (`Selector`).

A folder holds the checkpoint in z-lab's layout or that of speculators, and compact.json if
draftsmith made it. Legend: A anchors, W slots of a block, T tokens of context, L layers read, H
hidden size, D size of an attention head, K entries of the head, V the target's vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM

from align.dflash_config import DFLASH2, SLIDING, is_dflash, plain_config
from align.errors import UserError
from align.files import read_json
from eval.decoding.build import longest_context
from eval.decoding.drafters import eagle3
from eval.decoding.drafters.compact import (
    check_compact,
    fill,
    read_token_ids,
    refuse_other_embedding,
    refuse_other_layers,
    refuse_other_target,
    refuse_unknown_parts,
    weights_of,
)
from eval.decoding.drafters.drafter import (
    HeadDrafter,
    Proposal,
    Session,
    Text,
    no_draft,
    on_target_ids,
    timed_choice,
)
from eval.decoding.drafters.formats import DraftFormat
from eval.decoding.forward import HiddenStates, KVCache
from eval.decoding.fused import FusedDecoder, Step
from eval.decoding.target import Target, model_bytes
from eval.decoding.verification import Sampling
from eval.decoding.weights import Product

EMBEDDING, HEAD, PREFIX = "model.embed_tokens.weight", "lm_head.weight", "model."
TYPES = ["full_attention", SLIDING]
BLOCKS = 32  # blocks of a text that are read together


class DFlash(DraftFormat):
    def head_size(self, config: Mapping[str, Any]) -> int | None:
        if not is_dflash(config):
            return None
        return int(config.get("draft_vocab_size") or plain_config(config)["vocab_size"])

    def longest(self, config: Mapping[str, Any]) -> int | None:
        size = plain_config(config).get("block_size") if is_dflash(config) else None
        return size - 1 if size else None

    def positions(self, config: Mapping[str, Any]) -> int:
        return longest_context(Qwen3Config(**plain_config(config)))

    def check_config(self, folder: Path, target: PreTrainedConfig) -> None:
        about = read_json(folder / "config.json")
        plain = plain_config(about)
        inner = plain["dflash_config"]
        types = plain.get("layer_types") or ()
        window = plain.get("use_sliding_window") and plain.get("sliding_window")
        parts = {
            "model_type": (plain.get("model_type"), "qwen3"),
            "attention_bias": (bool(plain.get("attention_bias")), False),
            "layer_types": (sorted({*TYPES, *types}), TYPES),
            "lack of sliding_window": (SLIDING in types and not window, False),
            "is_neox_style": (plain.get("is_neox_style", True), True),
            "final_logit_softcapping": (inner.get("final_logit_softcapping") or 0, 0),
            "lack of target_layer_ids": ("target_layer_ids" not in inner, False),
            "mask_embedding.pt": ((folder / "mask_embedding.pt").exists(), False),
        }
        for key in ("attention_value_scale", "output_multiplier", "input_embedding_scale"):
            parts[key] = (inner.get(key) or 1, 1)
        for key in ("use_swa", "sample_from_anchor", "attention_sink_bias"):
            parts[key] = (bool(inner.get(key)), False)
        refuse_unknown_parts(folder, "DFlash", parts)
        refuse_other_target(folder, plain, target)
        refuse_other_layers(folder, target_layers({}, about), target.num_hidden_layers)
        if not 0 <= inner["mask_token_id"] < target.vocab_size:
            raise UserError(
                f"{folder} has mask token {inner['mask_token_id']}, but this target has "
                f"{target.vocab_size} tokens; correct mask_token_id in config.json."
            )

    def load(self, folder: Path, target: Target) -> DFlashDrafter:
        head = target.model.get_output_embeddings().weight.detach()
        text = target.model.config.get_text_config()
        return self.drafter(*load_dflash(folder, target.decoder.embedding, head, text), target)

    def drafter(self, model: Any, token_ids: Tensor | None, target: Target) -> DFlashDrafter:
        embedding = target.decoder.embedding
        decoder = DFlashDecoder(model, target.decoder.context_length, embedding)
        return DFlashDrafter(
            **on_target_ids(token_ids, embedding, self.name),
            bytes=model_bytes(model, EMBEDDING, *([] if model.own_head else [HEAD])),
            kv_bytes_per_token=decoder.new_cache(1, 1).bytes_per_token(),
            decoder=decoder,
            most=model.config.block_size - 1,
            layers=target_layers({}, model.config.to_dict()),
        )


FORMAT = DFlash()


def target_layers(
    target: Mapping[str, Any], published: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """The numbers (forward.py) of the target's hidden states that a draft reads.

    A published draft's config.json names them, counting layers from 0; the default is EAGLE-3's.
    """
    if published is None:
        return eagle3.target_layers(target)
    return tuple(i + 1 for i in plain_config(published)["dflash_config"]["target_layer_ids"])


class Mixture(nn.Module):
    """Mixes each slot with the slots before it in its block, before and after a part of a layer.

    taps: slots that are mixed. group: neighbouring values that have one weight by the slot's state.
    """

    def __init__(self, size: int, taps: int, group: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(2, taps, size))
        self.kernel_projection = nn.Linear(size, 2 * taps * (size // group), bias=False)

    def forward(self, h: Tensor, depths: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """The mixed output of the part. h: [B, Q, H]. depths: numbers in the blocks [B, Q]."""
        _, taps, size = self.base_kernel.shape
        by_state = self.kernel_projection(h).unflatten(-1, (2, taps, -1))
        by_state = by_state.repeat_interleave(size // by_state.shape[-1], -1)
        seen = torch.stack([depths >= tap for tap in range(taps)], -1)[..., None]

        def mixed(h: Tensor, weights: Tensor) -> Tensor:
            before = torch.stack([F.pad(h, (0, 0, tap, -tap)) for tap in range(taps)], -2)
            return (weights * before * seen).sum(-2)

        of_input, of_output = (self.base_kernel + by_state).unbind(-3)
        return mixed(part(mixed(h, of_input)), of_output)


def mixed_around(
    mixture: Mixture | None, h: Tensor, depths: Tensor, part: Callable[[Tensor], Tensor]
) -> Tensor:
    """The part's output [B, Q, H], mixed if there is a mixture."""
    mixed: Tensor = part(h) if mixture is None else mixture(h, depths, part)
    return mixed


class Selector(nn.Module):
    """Scores of the `count` likeliest tokens, by the slot's state and the token before."""

    def __init__(self, rows: int, size: int, rank: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.predecessor_codebook = nn.Parameter(torch.empty(rows, rank))
        self.successor_codebook = nn.Parameter(torch.empty(rows, rank))
        self.hidden_projection = nn.Linear(size, rank, bias=False)

    def forward(self, logits: Tensor, y: Tensor, before: Tensor) -> Tensor:
        """The logits [N, V], -inf for other tokens. y: the head's inputs [N, H]. before: [N]."""
        best, tokens = logits.topk(self.count)
        context = self.predecessor_codebook[before] * self.hidden_projection(y)
        best = best + (context[:, None] * self.successor_codebook[tokens]).sum(-1)
        return torch.full_like(logits, float("-inf")).scatter(-1, tokens, best)


def build_dflash(config: Any, rows: int) -> Any:
    """The draft without weights: a Qwen3 with `fc` and `hidden_norm`. rows: entries of its head.

    `candidate_selector`, and each layer's `attention_conv` and `mlp_conv`, are None in DFlash.
    """
    size, inner = config.hidden_size, config.dflash_config
    more = inner if inner.keys() >= DFLASH2 else None
    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(config)
        body = model.model
        body.fc = nn.Linear(len(inner["target_layer_ids"]) * size, size, bias=False)
        body.hidden_norm = type(body.norm)(size, config.rms_norm_eps)
        model.lm_head = nn.Linear(size, rows, bias=False)
        body.candidate_selector = more and Selector(
            rows, size, more["selector_rank"], more["selector_top_k"]
        )
        for layer, kind in zip(body.layers, config.layer_types, strict=True):
            causal = kind == SLIDING if config.is_causal is None else config.is_causal
            layer.self_attn.is_causal = causal
            for name in ("attention_conv", "mlp_conv"):
                taps = more and (more["conv_kernel_size"], more["conv_group_size"])
                setattr(layer, name, taps and Mixture(size, *taps))
    model._no_split_modules = []  # parts of the layers are called alone
    # rotary tables are not in a checkpoint, so they are computed
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model


def load_dflash(
    folder: Path,
    embedding: Tensor,
    head: Tensor,
    target: PreTrainedConfig | None = None,
    tuned: bool = False,
) -> tuple[Any, Tensor | None]:
    """A folder's model on the target's embedding and head [V, H], and the target id of each head
    entry [K]; None for a head over all ids.

    `model.own_head` tells whether the folder has a head, `model.about` is its config.json. target:
    the target's config, to check a published draft. tuned: see `load_eagle3`. Raises UserError if
    the draft was made for another target or cannot be computed here.
    """
    about, tensors = read_json(folder / "config.json"), weights_of(folder, str(embedding.device))
    published = tensors.pop("embed_tokens.weight", None)
    if not tuned:
        refuse_other_embedding(folder, published, embedding)
    if target is None or (folder / "compact.json").is_file():
        check_compact(folder, None if tuned else embedding, tensors["fc.weight"].dtype)
    else:
        FORMAT.check_config(folder, target)
    token_ids = read_token_ids(folder, tensors)
    own_head = tensors.pop(HEAD, None)
    weights = {PREFIX + name: tensor.to(embedding.dtype) for name, tensor in tensors.items()}
    head = (head if own_head is None else own_head).to(embedding)
    config: Any = Qwen3Config(**plain_config(about) | {"tie_word_embeddings": False})
    model = build_dflash(config, len(head))
    model.own_head, model.about = own_head is not None, about
    fill(model, {**weights, EMBEDDING: embedding, HEAD: head}, folder)
    return model.to(embedding.device).eval(), token_ids


class DFlashDecoder(FusedDecoder):
    """The layers with a cache of the context, for inference.

    A block's keys and values are written behind those of the context, and are overwritten by the
    next ones.
    """

    def __init__(self, model: Any, context_length: int, embedding: Tensor) -> None:
        # the last block of a text reaches beyond the text
        reach = context_length + model.config.block_size
        super().__init__(model, reach, embedding)
        body = model.model
        self.mask = model.config.dflash_config["mask_token_id"]
        self.hidden_norm = self._scale(body.hidden_norm)
        self.fc = Product.of(body.fc)
        first = self.heads * self.head_size  # behind the queries
        self.key_values = [Product(layer.qkv.weight[first:], None) for layer in self.layers]
        self.views = [
            (layer.self_attn.sliding_window, layer.self_attn.is_causal) for layer in body.layers
        ]
        self.mixtures = [(layer.attention_conv, layer.mlp_conv) for layer in body.layers]
        self.selector: Callable[..., Tensor] | None = body.candidate_selector

    @torch.inference_mode()
    def add_context(self, states: Tensor, start: int, cache: KVCache) -> None:
        """Cache the context of tokens from position `start` on. states: the target's [1, T, L * H].

        The states are those of all layers read, side by side.
        """
        context = self._norm(self.fc(states), self.hidden_norm)
        new, half = slice(start, start + context.shape[1]), self.head_size // 2
        cos, sin = (table[new] for table in self.angles[self.kinds[0]])
        for product, layer, keys, values in zip(
            self.key_values, self.layers, cache.keys, cache.values, strict=True
        ):
            heads = product(context).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            k, v = heads.chunk(2, dim=1)
            assert layer.head_norms is not None
            k = self._norm(k, layer.head_norms[1])
            keys[:, :, new], values[:, :, new] = k * cos + torch.roll(k, half, -1) * sin, v

    @torch.inference_mode()
    def read(
        self, anchors: Tensor, positions: Tensor, width: int, cached: int, cache: KVCache
    ) -> Tensor:
        """The head's inputs [A, width, H] of the blocks behind these anchors [A].

        positions: of the anchors [A]; a block sees the context before its anchor. cached: the
        number of tokens whose context is in the cache.
        """
        masks = anchors.new_full((len(anchors), width - 1), self.mask)
        tokens = torch.cat([anchors[:, None], masks], 1).view(1, -1)
        offsets = torch.arange(width, device=self.device)
        owners = positions.repeat_interleave(width)
        context = torch.arange(cached, device=self.device)
        seen = torch.cat([context < owners[:, None], owners == owners[:, None]], 1)
        places = (positions[:, None] + offsets).flatten()
        behind = places[:, None] - torch.cat([context, places])

        (cos, sin), end = self.angles[self.kinds[0]], seen.shape[1]
        cos, sin = cos[places], sin[places]

        def write(held: Tensor, values: Tensor) -> None:
            held[:, :, cached:end] = values

        @functools.cache
        def step_of(window: int | None, causal: bool) -> Step:
            visible = seen if window is None else seen & (behind < window)
            visible = visible & (behind >= 0) if causal else visible
            mask = visible.repeat(self.group, 1)  # [heads / key heads * A * W, S]
            attend = self._grouped(F.scaled_dot_product_attention, end, mask)
            return Step(cos, sin, write, attend)

        x = F.embedding(tokens, self.embedding).to(self.dtype)
        depths = offsets.repeat(len(anchors))[None]
        for number, (layer, view) in enumerate(zip(self.layers, self.views, strict=True)):
            keys, values = cache.keys[number], cache.values[number]
            around_attention, around_mlp = self.mixtures[number]
            attended = partial(self._attended, layer, keys=keys, values=values, step=step_of(*view))
            h = self._norm(x, layer.input_norm)
            x = x + mixed_around(around_attention, h, depths, attended)
            h = self._norm(x, layer.mlp_norm)
            x = x + mixed_around(around_mlp, h, depths, partial(self._mlp, layer))
        return self._norm(x, self.final_norm).view(len(anchors), width, -1)

    @torch.inference_mode()
    def selected(self, logits: Tensor, y: Tensor, before: Tensor) -> Tensor:
        """The logits [N, K] of slots with the head's inputs y [N, H] behind the tokens `before`."""
        return logits if self.selector is None else self.selector(logits, y, before)


@dataclass(kw_only=True)
class DFlashDrafter(HeadDrafter):
    """The acceptance rate is that of blocks as trained; runs have vLLM's (`DFlashSession`)."""

    decoder: DFlashDecoder
    most: int

    def start(self, text: Text) -> Session:
        return DFlashSession(self, text)

    @torch.inference_mode()
    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        decoder, width = self.decoder, self.most + 1
        tokens = torch.tensor([*ids, *text[:-1]], device=decoder.device)
        cache = decoder.new_cache(1, len(tokens) + BLOCKS * width)
        decoder.add_context(self.side_by_side(states, decoder.dtype), 0, cache)
        anchors = torch.arange(len(ids) - 1, len(tokens), device=decoder.device)
        first_masks = [
            decoder.read(tokens[part], part, width, len(tokens), cache)[:, 1]
            for part in anchors.split(BLOCKS)
        ]
        y = torch.cat(first_masks)
        return decoder.selected(decoder.head(y), y, tokens[anchors]), 0

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        return self.draft_at_once(context_length, sampling, 1)

    def draft_at_once(
        self, context_length: int, sampling: Sampling, count: int
    ) -> Callable[[], None]:
        decoder = self.decoder
        cache = decoder.new_cache(1, context_length + count + 1)
        anchor = torch.ones(1, dtype=torch.long, device=decoder.device)

        def logits() -> Tensor:
            y = decoder.read(anchor, anchor * context_length, count + 1, context_length, cache)
            return decoder.selected(decoder.head(y[0, 1:]), y[0, 1:], anchor.expand(count))

        return timed_choice(logits, sampling)


class DFlashSession(Session):
    """`newest`: the newest token [1]. `known`: the number of tokens before it, whose context is in
    the cache. A block has the anchor and the draft length, as in vLLM, whose proposer queries
    1 + num_speculative_tokens; z-lab's code runs blocks as trained.
    """

    def __init__(self, drafter: DFlashDrafter, text: Text) -> None:
        self.drafter, self.sampling, self.generator = drafter, text.sampling, text.generator
        self.most = min(drafter.most, text.draft_length)
        self.cache = drafter.decoder.new_cache(1, text.slots)
        self.known = 0
        self._read(text.ids, text.states)

    def _read(self, ids: Sequence[int], states: HiddenStates) -> None:
        """Cache the context of the tokens before the last of `ids`, which is the newest."""
        decoder = self.drafter.decoder
        read = self.drafter.side_by_side(states, decoder.dtype)
        decoder.add_context(read, self.known, self.cache)
        self.known += read.shape[1]
        self.newest = torch.tensor(ids[-1:], device=decoder.device)

    def propose(self, count: int) -> Proposal:
        decoder, count = self.drafter.decoder, min(count, self.most)
        if count < 1:
            return no_draft(decoder.device)
        position = self.newest.new_tensor([self.known])
        y = decoder.read(self.newest, position, self.most + 1, self.known, self.cache)
        scores = decoder.head(y[:, 1 : count + 1])

        def logits(depth: int, before: Tensor | None) -> Tensor:
            before = self.newest if before is None else before
            return decoder.selected(scores[:, depth], y[:, depth + 1], before)

        return self.drafter.in_turn(logits, count, self.sampling, self.generator)

    def commit(self, emitted: list[int], accepted: int, states: HiddenStates) -> None:
        # the target has read all emitted tokens except the last one, which is now the newest
        read = {k: states[k][:, : len(emitted)] for k in self.drafter.layers}  # type: ignore[index]
        self._read(emitted, read)
