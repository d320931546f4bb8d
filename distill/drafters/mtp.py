"""MTP heads in training: the target's own layer, tuned on its last hidden states (2509.18362).

Several steps of a draft are trained at once. Embedding and LM head stay the target's. Legend: B
rows, T tokens, H hidden size.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from align.checkpoint import Checkpoint
from align.files import write_json
from distill.drafters.batch import (
    HeadInput,
    Plan,
    TrainingBatch,
    unrolled_input,
    unrolled_plan,
)
from distill.drafters.initialisation import FrozenEmbedding
from distill.drafters.kind import Config, Draft, DraftKind, Origin
from eval.decoding.drafters.compact import COMPACT
from eval.decoding.drafters.mtp import (
    ARCHITECTURE,
    EMBED,
    HEAD,
    LAYER,
    NORMED,
    SERVED,
    joined,
    load_mtp,
    outputs,
    place_of,
    stored_name,
)
from eval.decoding.recurrent import HYBRID
from eval.decoding.target import tensor_sha256

STEPS = 3  # steps of a draft that are trained at once
BETA = 0.6  # weight of a step's loss over that of the step before


class Mtp(DraftKind):
    targets = tuple(NORMED)
    trained = True
    # engines give the layer the target's whole LM head; its steps share a cache of keys and values
    unused = ("draft_vocab_size", "activation_checkpointing")

    def target_layers(self, target: Config, published: Config | None = None) -> tuple[int, ...]:
        return (target["num_hidden_layers"],)

    def initialise(self, origin: Origin) -> Draft:
        target = origin.target
        folder = origin.published or target.checkpoint.folder
        config = target.model.config.get_text_config()
        embedding = origin.embedding
        model = load_mtp(folder, embedding, origin.head(), config, tuned=True)
        return Draft(to_train(model, embedding))

    def save(self, folder: Path, draft: Draft, embedding: Tensor, target: Checkpoint) -> None:
        config, source = copy.deepcopy(target.text_config), target.folder
        trained = {name for name, _ in draft.model.named_parameters()}
        files = target.names()
        tensors = dict[str, Tensor]()
        for name, tensor in draft.model.state_dict().items():
            stored = tensor.to(embedding.dtype) if name in trained else tensor
            if name == "lm_head.weight" and config.model_type not in HYBRID:
                tensors[stored_name(HEAD, config)] = stored
            elif name.startswith(LAYER):
                place = stored_name(name.removeprefix(LAYER), config)
                tensors |= {place: stored} if place in files else split_experts(place, stored)
        # a copy of the embedding, which a fine-tuning may have left as it was
        for name in files:
            layer_part = place_of(name, config)
            if layer_part is not None and layer_part[1] == EMBED:
                tensors[name] = embedding
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config.architectures = [ARCHITECTURE]
        config.dtype = embedding.dtype
        config.save_pretrained(folder)
        about = {"format": COMPACT, "drafter": self.name}
        about["embedding_sha256"] = tensor_sha256(embedding)
        (folder / "compact.json").write_text(json.dumps(about, indent=2))
        link_target(folder, source, files, tensors)

    def load(self, folder: Path, embedding: Tensor, head: Callable[[], Tensor]) -> Draft:
        return Draft(to_train(load_mtp(folder, embedding, head()), embedding))

    def packs(self, model: PreTrainedModel) -> bool:
        return False  # its layer may be recurrent, and its steps share one cache

    def plan(self, model: PreTrainedModel, batch: TrainingBatch, training: bool) -> Plan:
        return unrolled_plan(batch, batch.positions, batch.input_ids.numel(), STEPS, False)

    def head_input(self, model: PreTrainedModel, batch: TrainingBatch) -> HeadInput:
        steps = unrolled(model, batch.input_ids, batch.states, STEPS)
        return unrolled_input(list(steps), batch.plan, BETA)


KIND = Mtp()


def to_train(model: PreTrainedModel, embedding: Tensor) -> PreTrainedModel:
    """The model in fp32 with the target's embedding and LM head, which are frozen."""
    model = model.float()
    model.set_input_embeddings(FrozenEmbedding(embedding))
    model.get_output_embeddings().weight.requires_grad_(False)
    return model


def unrolled(
    model: PreTrainedModel, input_ids: Tensor, states: Tensor, steps: int
) -> Iterator[Tensor]:
    """For each step of a draft, the LM head's inputs at each token [B, T, H]; zero at the first.

    At step g the target has read all but the last g tokens. So an input sees the first step's
    inputs at least g before it, and of each later step the input of the same draft. states: [B, T,
    1, H].
    """
    body: Any = model.base_model
    (layer,) = body.layers
    embedded = body.embed_tokens(input_ids[:, 1:])
    if model.config.model_type not in HYBRID:
        embedded = F.pad(embedded[:, 1:], (0, 0, 1, 0))
    hidden = states[:, :-1, 0].to(embedded.dtype)
    numbers = torch.arange(hidden.shape[1], device=hidden.device)
    distances = numbers[:, None] - numbers  # of each query behind each key
    cache = DynamicCache()
    for step in range(steps):
        if step:
            hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        same_draft = [distances == step - later for later in range(1, step + 1)]
        visible = torch.cat([distances >= step, *same_draft], 1)
        mask = torch.zeros_like(visible, dtype=hidden.dtype)
        state = body(
            inputs_embeds=joined(layer, embedded, hidden),
            attention_mask=mask.masked_fill_(~visible, float("-inf"))[None, None],
            position_ids=numbers[None],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state
        y, hidden = outputs(layer, model.config.model_type, state)
        yield F.pad(y, (0, 0, 1, 0))


def split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor of the model as in a checkpoint, where each expert has its own matrices."""
    if match := re.fullmatch(r"(.*\.experts)\.gate_up_proj", name):
        gates, ups = tensor.chunk(2, 1)
        parts = {"gate": gates, "up": ups}
    elif match := re.fullmatch(r"(.*\.experts)\.down_proj", name):
        parts = {"down": tensor}
    else:
        return {name: tensor}
    return {
        f"{match[1]}.{expert}.{kind}_proj.weight": matrix
        for kind, matrices in parts.items()
        for expert, matrix in enumerate(matrices)
    }


def link_target(
    folder: Path,
    target: Path,
    files: Mapping[str, Path],
    tensors: Mapping[str, Tensor],
) -> None:
    """Write `served/`: the target with the layer of this folder, for engines.

    The target's files are links, so nothing is copied. The names of `tensors` are in one more
    shard, which sorts last: vLLM reads all tensors of each shard, and keeps the last of a name.
    files: the target's file of each tensor.
    """
    served, shard = folder / SERVED, "tuned-mtp.safetensors"
    served.mkdir()
    places: dict[str, str] = {}
    size = 0
    for path in sorted(set(files.values())):
        # beside a file model.safetensors, no index is read
        link = path.name.replace("model.safetensors", "model-target.safetensors")
        (served / link).symlink_to(path.resolve())
        size += path.stat().st_size
        places |= {name: link for name, file in files.items() if file == path}
    for path in target.iterdir():
        if path.suffix != ".safetensors" and not path.name.endswith(".index.json"):
            (served / path.name).symlink_to(path.resolve())
    (served / shard).symlink_to(Path("..") / "model.safetensors")
    places |= dict.fromkeys(tensors, shard)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    write_json(served / "model.safetensors.index.json", index)
