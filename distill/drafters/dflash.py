"""DFlash in training (arXiv 2602.06036): blocks of masks learn the target's next tokens at once.

Anchors are drawn anew at each step from the response positions, and so is the number of masks of
each block; longer blocks are rarer. So the loss of slot k has the weight DEEPER ** (k - 1) in the
mean, the exponential decay of the paper, and the draft works at each length up to the longest. A
block sees the target's states before its anchor and its own slots, as in decoding. The
distributions that it learns are those that the target had at the same tokens.

`fc`, the norms and the layers are trained; embedding and LM head are the target's. `k_norm` is not
trained, so that a new draft has the same one in each layer: vLLM 0.32 on a CPU uses that of the
first layer for the context of all layers. Legend: B rows, T tokens, N response positions, Q slots
of a row's blocks, L layers read, H hidden size, D size of an attention head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, Qwen3Config
from transformers.models.llama.modeling_llama import repeat_kv, rotate_half

from align.sources import read_json
from distill.drafters.batch import (
    HeadInput,
    Slots,
    TrainingBatch,
    additive,
    drawn_depths,
    mean_depth,
    recomputed,
)
from distill.drafters.compact import target_id_maps, write_compact
from distill.drafters.initialisation import scaled, shape_of, to_train, undivided, usual_sizes
from distill.drafters.kind import Config, Draft, DraftKind, Origin
from eval.decoding.drafters import dflash
from eval.decoding.drafters.dflash import (
    ARCHITECTURE,
    EMBEDDING,
    HEAD,
    PREFIX,
    build_dflash,
    load_dflash,
    plain_config,
)
from eval.decoding.weights import linear

DEEPER = 0.78  # exp(-1 / 4), z-lab's decay for blocks of 8
ANCHORS = 0.25  # share of the response positions that are anchors in a training step


class DFlash(DraftKind):
    has_mask = True
    served_states = True

    def target_layers(self, target: Config, published: Config | None = None) -> tuple[int, ...]:
        return dflash.target_layers(target, published)

    def num_layers(self, wanted: int, published: Config | None = None) -> int:
        return wanted if published is None else int(plain_config(published)["num_hidden_layers"])

    @torch.no_grad()
    def initialise(self, origin: Origin) -> Draft:
        """A draft with random weights, as published drafts start; or a published draft."""
        target, token_ids = origin.target, origin.token_ids
        embedding = origin.embedding
        if origin.published is None:
            model = random_draft(origin)
        else:
            whole = target.model.get_output_embeddings().weight.detach()
            config = target.model.config.get_text_config()
            model, token_ids = load_dflash(origin.published, embedding, whole, config)
        return Draft(_to_train(model, usual_sizes(origin), embedding), token_ids)

    def save(self, folder: Path, draft: Draft, embedding: Tensor, target: str) -> None:
        model: Any = draft.model
        shared = {EMBEDDING} if model.own_head else {EMBEDDING, HEAD}
        tensors = {
            name.removeprefix(PREFIX): weight
            for name, weight in model.state_dict().items()
            if name not in shared
        }
        tensors["fc.weight"] = undivided(model)
        about = model.config.to_dict() | {
            "architectures": [ARCHITECTURE],
            "torch_dtype": str(embedding.dtype).removeprefix("torch."),
        }
        if draft.token_ids is not None:
            tensors |= target_id_maps(draft.token_ids, len(embedding))
            about["draft_vocab_size"] = len(draft.token_ids)
        (folder / "config.json").write_text(json.dumps(about, indent=2))
        write_compact(folder, self.name, tensors, embedding, sizes=model.sizes.tolist())

    def load(self, folder: Path, embedding: Tensor, head: Callable[[], Tensor]) -> Draft:
        model, token_ids = load_dflash(folder, embedding, head())
        sizes = torch.tensor(read_json(folder / "compact.json")["sizes"])
        return Draft(_to_train(model, sizes, embedding), token_ids)

    def head_input(self, model: PreTrainedModel, batch: TrainingBatch) -> HeadInput:
        """The losses are divided by the mean number of masks that a position gets.

        All positions are anchors if the model is not in training mode (`HeadInput.states`).
        """
        draft: Any = model
        most, share = draft.config.block_size - 1, ANCHORS if draft.training else 1.0
        slots = draw_blocks(batch, most, share)
        states = read_blocks(draft, batch, slots)
        learned = slots.anchors + slots.depths - 1
        # the target has a distribution there if the response is so long
        exists = learned < len(batch.positions)
        end = batch.positions[learned.clamp(max=len(batch.positions) - 1)]
        exists &= end == batch.positions[slots.anchors] + slots.depths - 1
        first = (slots.depths == 1).nonzero()[:, 0]
        later = ((slots.depths > 1) & exists).nonzero()[:, 0]
        trained = torch.cat([first, later])
        return HeadInput(
            states[slots.rows[trained], slots.slots[trained]],
            learned[trained],
            1 / (share * mean_depth(most, DEEPER)),
        )


KIND = DFlash()


def random_draft(origin: Origin) -> Any:
    """A draft with random weights in the target's shape, in fp32 on the CPU."""
    text: Any = origin.target.model.config.get_text_config()
    config: Any = Qwen3Config(**shape_of(text), num_hidden_layers=origin.num_layers)
    config.block_size, config.num_target_layers = origin.max_gamma + 1, text.num_hidden_layers
    config.dflash_config = {
        "mask_token_id": origin.mask,
        "target_layer_ids": [number - 1 for number in origin.layers],
    }
    head = origin.head().cpu()
    model = build_dflash(config, len(head))
    model.lm_head, body = linear(head), model.model
    body.to_empty(device="cpu")
    body.rotary_emb = type(body.rotary_emb)(config)  # because it is empty, too
    generator = torch.Generator().manual_seed(0)
    for name, weight in body.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1)
        elif name != "embed_tokens.weight":  # `to_train` sets it
            weight.normal_(std=config.initializer_range, generator=generator)
    model.own_head = origin.token_ids is not None
    return model.eval()


def _to_train(model: Any, sizes: Tensor, embedding: Tensor) -> Any:
    model = to_train(model, sizes, embedding)
    frozen = [model.lm_head, *(layer.self_attn.k_norm for layer in model.model.layers)]
    for module in frozen:
        module.weight.requires_grad_(False)
    return model


def draw_blocks(batch: TrainingBatch, most: int, share: float = 1.0) -> Slots:
    """Draw a block of 1 to `most` masks behind this share of the response positions.

    The slots of a block are its anchor, at depth 0, and its masks.
    """
    masks = drawn_depths(batch.positions, batch.width, batch.seeds, most, DEEPER)
    if share < 1:  # a depth of 2 is drawn with probability `share`, from other random numbers
        drawn = drawn_depths(batch.positions, batch.width, -1 - batch.seeds, 2, share)
        masks[drawn < 2] = -1
    offsets = torch.arange(most + 1, device=masks.device)
    return Slots.of(batch, *(offsets <= masks[:, None]).nonzero(as_tuple=True))


def read_blocks(model: Any, batch: TrainingBatch, slots: Slots) -> Tensor:
    """The LM head's inputs at all slots [B, Q, H]."""
    body, (rows, width) = model.model, batch.input_ids.shape
    places = batch.positions[slots.anchors]
    anchors, depths = slots.placed(slots.anchors, -1), slots.placed(slots.depths, 0)
    before = slots.placed(places % width, 0)  # tokens before the anchor
    mask = torch.full_like(places, model.config.dflash_config["mask_token_id"])
    tokens = torch.where(slots.depths == 0, batch.input_ids.flatten()[places], mask)
    numbers = torch.arange(width, device=before.device)
    seen = numbers < before[..., None]
    same = anchors[:, :, None] == anchors[:, None]
    x = body.embed_tokens(slots.placed(tokens, 0))
    visible = additive(torch.cat([seen, same], -1)[:, None], x)
    context = body.hidden_norm(body.fc(scaled(model, batch.states)))
    positions = torch.cat([numbers.expand(rows, -1), before + depths], 1)
    rotary = body.rotary_emb(x, positions)
    for layer in body.layers:
        x = recomputed(layer, decoded, layer, x, context, rotary, visible)
    states: Tensor = body.norm(x)
    return states


def decoded(
    layer: Any, x: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], visible: Tensor
) -> Tensor:
    """The layer's output of the slots; arguments as of `attended`."""
    x = x + attended(layer, x, context, rotary, visible)
    output: Tensor = x + layer.mlp(layer.post_attention_layernorm(x))
    return output


def attended(
    layer: Any, x: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], visible: Tensor
) -> Tensor:
    """The attention's output of the slots x [B, Q, H]; they see context [B, T, H] and each other.

    rotary: cosines and sines of the positions of context and slots [B, T + Q, D]. visible: the mask
    [B, 1, Q, T + Q].
    """
    attention, slots = layer.self_attn, layer.input_layernorm(x)
    read = torch.cat([context, slots], 1)

    def heads(project: nn.Module, inputs: Tensor) -> Tensor:
        split: Tensor = project(inputs).unflatten(-1, (-1, attention.head_dim))
        return split

    q = attention.q_norm(heads(attention.q_proj, slots)).transpose(1, 2)
    k = attention.k_norm(heads(attention.k_proj, read)).transpose(1, 2)
    v = heads(attention.v_proj, read).transpose(1, 2)
    cos, sin = (table[:, None] for table in rotary)
    first = context.shape[1]
    q = q * cos[:, :, first:] + rotate_half(q) * sin[:, :, first:]
    k = k * cos + rotate_half(k) * sin
    groups = attention.num_key_value_groups
    h = F.scaled_dot_product_attention(q, repeat_kv(k, groups), repeat_kv(v, groups), visible)
    output: Tensor = attention.o_proj(h.transpose(1, 2).flatten(2))
    return output
