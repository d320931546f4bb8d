"""DFlash in training (arXiv 2602.06036): blocks of masks learn the target's next tokens at once.

Anchors are drawn anew at each step from the response positions, and so is the number of masks of
each block; longer blocks are rarer. So the loss of slot k has the weight DEEPER ** (k - 1) in the
mean, the exponential decay of the paper, and the draft works at each length up to the longest. A
block sees the target's states before its anchor and its own slots, as in decoding. The
distributions that it learns are those that the target had at the same tokens.

`fc`, the norms and the layers are trained; embedding and LM head are the target's. The selector of
a DFlash2 draft stays as published. `k_norm` is not trained, so that a new draft has the same one in
each layer: vLLM 0.32 on a CPU uses that of the first layer for the context of all layers. Legend: B
rows, T tokens, N response positions, Q slots of a row's blocks, L layers read, H hidden size, D
size of an attention head.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, Qwen3Config

from align.checkpoint import Checkpoint
from align.dflash_config import ARCHITECTURE, SLIDING, plain_config
from align.files import read_json
from distill.drafters.attention import NO_TEXT, Attention, Marks, Rotary, rotated
from distill.drafters.batch import (
    HeadInput,
    Plan,
    TrainingBatch,
    drawn_depths,
    followed,
    mean_depth,
    recomputed,
    slots,
)
from distill.drafters.compact import target_id_maps, tuned_config, write_compact
from distill.drafters.initialisation import scaled, shape_of, to_train, undivided, usual_sizes
from distill.drafters.kind import Config, Draft, DraftKind, Origin
from distill.drafters.layers import heads, normed, rotary_of
from eval.decoding.drafters import dflash
from eval.decoding.drafters.dflash import (
    EMBEDDING,
    HEAD,
    PREFIX,
    build_dflash,
    load_dflash,
    mixed_around,
)
from eval.decoding.weights import linear

DEEPER = 0.78  # exp(-1 / 4), z-lab's decay for blocks of 8
ANCHORS = 0.25  # share of the response positions that are anchors in a training step


class DFlash(DraftKind):
    rate, least_rate = 1e-3, 6e-4  # the latter is that of SpecForge's files, for targets up to 8B
    has_mask = True
    states_from_vllm = True

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
            model, token_ids = load_dflash(origin.published, embedding, whole, config, True)
        return Draft(_to_train(model, usual_sizes(origin), embedding), token_ids)

    def save(self, folder: Path, draft: Draft, embedding: Tensor, target: Checkpoint) -> None:
        model: Any = draft.model
        shared = {EMBEDDING} if model.own_head else {EMBEDDING, HEAD}
        tensors = {
            name.removeprefix(PREFIX): weight
            for name, weight in model.state_dict().items()
            if name not in shared
        }
        tensors["fc.weight"] = undivided(model)
        about = tuned_config(model.about, model.config, embedding, target)
        if "sliding_window_non_causal" in about and SLIDING not in model.config.layer_types:
            # else vLLM 0.32 makes layers without a window causal, which speculators does not
            about["sliding_window_non_causal"] = True
        if draft.token_ids is not None:
            tensors |= target_id_maps(draft.token_ids, len(embedding))
        (folder / "config.json").write_text(json.dumps(about, indent=2))
        write_compact(folder, self.name, tensors, embedding, sizes=model.sizes.tolist())

    def load(self, folder: Path, embedding: Tensor, head: Callable[[], Tensor]) -> Draft:
        model, token_ids = load_dflash(folder, embedding, head())
        sizes = torch.tensor(read_json(folder / "compact.json")["sizes"])
        return Draft(_to_train(model, sizes, embedding), token_ids)

    def plan(self, model: Any, batch: TrainingBatch, training: bool) -> Plan:
        most = model.config.block_size - 1
        text_goes_on = torch.stack([followed(batch.positions, later) for later in range(most)])
        masks = drawn_depths(batch, most, DEEPER)
        if training:  # a depth of 2 is drawn with probability ANCHORS, from other random numbers
            masks[drawn_depths(batch, 2, ANCHORS, again=True) < 2] = -1
        offsets = torch.arange(most + 1)
        anchors, depths = (offsets <= masks[:, None]).nonzero(as_tuple=True)
        of_slots, of_depths, places = slots(batch, anchors, depths)
        # the target has a distribution at a slot if the response is so long
        trained = (depths > 0) & text_goes_on[(depths - 1).clamp_min(0), anchors]
        by_depth = [((depths == d) & trained).nonzero()[:, 0] for d in range(1, most + 1)]
        taken = torch.cat(by_depth)
        learned = (anchors + depths - 1)[taken]
        return Plan(of_slots, of_depths, places[taken], learned, tuple(map(len, by_depth)))

    def head_input(self, model: PreTrainedModel, batch: TrainingBatch) -> HeadInput:
        """The losses are divided by the mean number of masks that a position gets."""
        draft: Any = model
        share = ANCHORS if draft.training else 1.0
        weight = 1 / (share * mean_depth(draft.config.block_size - 1, DEEPER))
        states = read_blocks(draft, batch).flatten(0, 1)[batch.plan.taken]
        return HeadInput(states, batch.plan.learned, weight)


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
    config.is_causal = False
    head = origin.head().cpu()
    model = build_dflash(config, len(head))
    model.about = config.to_dict() | {"architectures": [ARCHITECTURE]}
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
    if model.own_head:
        model.about["draft_vocab_size"] = len(head)
    return model.eval()


def _to_train(model: Any, sizes: Tensor, embedding: Tensor) -> Any:
    model = to_train(model, sizes, embedding)
    selector, layers = model.model.candidate_selector, model.model.layers
    frozen = [model.lm_head, *(layer.self_attn.k_norm for layer in layers)]
    for module in [*frozen, selector] if selector else frozen:
        module.requires_grad_(False)
    return model


def read_blocks(model: Any, batch: TrainingBatch) -> Tensor:
    """The LM head's inputs at all slots of the plan [B, Q, H].

    The slots of a block are its anchor, at depth 0, and its masks.
    """
    body, (anchors, depths, *_) = model.model, batch.plan
    start = batch.positions[anchors.clamp_min(0)]  # [B, Q], in the flattened batch
    before = batch.position_ids.flatten()[start]  # tokens before the anchor
    texts = batch.texts.flatten()[start].masked_fill(anchors < 0, NO_TEXT)
    # a slot at depth 0 is one position behind the last one that it sees
    blocks = Marks(texts, before - 1, anchors, depths + 1)
    context_marks = Marks.of_texts(batch.texts, batch.position_ids)
    attention = Attention(blocks, context_marks.then(blocks.as_keys()))
    mask = model.config.dflash_config["mask_token_id"]
    tokens = batch.input_ids.flatten()[start].masked_fill(depths > 0, mask)
    x = body.embed_tokens(tokens)
    context = normed(body.hidden_norm, body.fc(scaled(model, batch.states)))
    rotary = rotary_of(body, torch.cat([batch.position_ids, before + depths], 1))
    for layer in body.layers:
        x = recomputed(layer, decoded, layer, x, context, rotary, attention, depths)
    return normed(body.norm, x)


def decoded(
    layer: Any, x: Tensor, context: Tensor, rotary: Rotary, attention: Attention, depths: Tensor
) -> Tensor:
    """The layer's output of the slots x [B, Q, H], with the arguments of `attended`.

    depths: the slots' numbers in their blocks [B, Q].
    """
    part = partial(attended, layer.self_attn, context=context, rotary=rotary, attention=attention)
    x = x + mixed_around(layer.attention_conv, normed(layer.input_layernorm, x), depths, part)
    h = normed(layer.post_attention_layernorm, x)
    return x + mixed_around(layer.mlp_conv, h, depths, layer.mlp)


def attended(
    own: Any, slots: Tensor, context: Tensor, rotary: Rotary, attention: Attention
) -> Tensor:
    """The attention's output of the slots [B, Q, H]; they see context [B, T, H] and each other.

    rotary: of the positions of context and slots [B, 1, T + Q, D].
    """
    first, read = context.shape[1], torch.cat([context, slots], 1)
    of_slots = rotary[0][:, :, first:], rotary[1][:, :, first:]
    q, k = rotated(heads(own, "q", slots), of_slots), rotated(heads(own, "k", read), rotary)
    window, both_ways = own.sliding_window, not own.is_causal
    h = attention(q, k, heads(own, "v", read), window=window, both_ways=both_ways)
    output: Tensor = own.o_proj(h.flatten(2))
    return output
