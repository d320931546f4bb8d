"""Heads on the target's last hidden state (Medusa, arXiv 2401.10774).

The target has read all but the newest token. From its state before that one (after the final norm),
head d drafts the token d places after the newest: a residual block, then an output head that all
share. There is no cache of keys and values, and no model that reads the text: a head is a step.

Training reads the cached states alone: from the state at token t, head d learns the target's
distribution over the token after t + d. The heads start as a fit (`fit_heads`):

1. A_d is the least-squares map from the state at t to the state at t + d.
2. A block adds SiLU(W x + b) to x. It gets W = A_d - I, and a b a few times as large as W x: there
   SiLU is nearly linear.
3. One more least-squares map, over all depths, takes out what b adds and what is not linear. It is
   multiplied into the output head.

A folder holds the checkpoint as vLLM loads it (its MedusaModel), and compact.json. Legend: B rows,
T positions, N response positions, D heads, L layers read, H hidden size, K rows of the output head,
V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from align.sources import read_json
from eval.decoding.drafters.compact import (
    check_compact,
    fill,
    refuse_other_target,
    weights_of,
    write_about,
)
from eval.decoding.drafters.drafter import (
    HeadDrafter,
    Proposal,
    Session,
    Texts,
    on_target_ids,
    timed_choice,
)
from eval.decoding.drafters.kind import Heads
from eval.decoding.drafters.training import (
    AnsweredText,
    HeadInput,
    LeastSquares,
    Start,
    TrainingBatch,
    drawn_depths,
    mean_depth,
    states_before,
)
from eval.decoding.forward import HiddenStates
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.decoding.weights import INT8_TERMS, Product

BIAS = 2.0  # of a block, in root mean squares of what it is to add
DEEPER = 0.5  # probability that a position which trains head d trains head d + 1, too


class MedusaConfig(PreTrainedConfig):
    """vLLM's keys."""

    model_type = "medusa"
    hidden_size: int = 4096
    vocab_size: int = 32000
    num_heads: int = 4
    truncated_vocab_size: int = 32000
    num_hidden_layers: int = 1  # of a block
    original_lm_head: bool = True  # one output head for all
    medusa_fc_bias: bool = True


class Block(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size)])

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.layers[0](x))


class MedusaModel(PreTrainedModel):
    config: MedusaConfig
    config_class = MedusaConfig
    _supports_sdpa = True  # it has no attention, so any implementation is right

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.blocks = nn.ModuleList([Block(size) for _ in range(config.num_heads)])
        self.lm_head = nn.Linear(size, config.truncated_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """None: it reads states."""

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


class Medusa(Heads):
    engines = ("vllm",)
    slow = ("blocks", "lm_head")

    def layers(
        self, config: Mapping[str, Any], about: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        return (config["num_hidden_layers"],)

    def rows_of(self, about: Mapping[str, Any]) -> int | None:
        if about.get("model_type") != "medusa":
            return None
        return int(about.get("truncated_vocab_size") or about["vocab_size"])

    @torch.no_grad()
    def start(self, start: Start) -> tuple[PreTrainedModel, Tensor | None]:
        """Heads that all draft what the target's own head says, then fitted; in fp32."""
        head = start.head()
        model = MedusaModel(
            MedusaConfig(
                hidden_size=head.shape[1],
                vocab_size=start.target.get_output_embeddings().weight.shape[0],
                num_heads=start.max_gamma,
                truncated_vocab_size=len(head),
            )
        )
        for weight in model.blocks.parameters():
            weight.zero_()
        model.lm_head.weight.copy_(head)
        if start.texts:
            fit_heads(model, start.texts)
        return model, None

    def save(
        self,
        folder: Path,
        model: PreTrainedModel,
        token_ids: Tensor | None,
        embedding: Tensor,
        target: str,
    ) -> None:
        tensors = {name: tensor.to(embedding.dtype) for name, tensor in model.state_dict().items()}
        if token_ids is not None:
            tensors["token_map"] = token_ids.cpu()
        model.config.architectures = ["MedusaModel"]
        model.config.save_pretrained(folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_about(folder, "medusa", embedding)

    def load_to_train(
        self, folder: Path, embedding: Tensor
    ) -> tuple[PreTrainedModel, Tensor | None]:
        tensors = load_file(folder / "model.safetensors", device=str(embedding.device))
        # the target's own numbers, in whatever dtype it is loaded
        check_compact(folder, embedding.to(tensors["lm_head.weight"].dtype))
        return _heads(folder, tensors)

    def check_published(self, folder: Path, target: PreTrainedConfig) -> None:
        about = read_json(folder / "config.json")
        computed = {"original_lm_head": True, "medusa_fc_bias": True, "num_hidden_layers": 1}
        for key, value in computed.items():
            if about.get(key, value) != value:
                raise ValueError(
                    f"{folder} has {key} {about[key]}, but Medusa heads are computed here with "
                    f"{value} only (one output head for all depths); measure it as it is in vLLM."
                )
        refuse_other_target(folder, about, target, ("hidden_size", "vocab_size"))

    def published(
        self, folder: Path, target: PreTrainedModel, texts: Sequence[AnsweredText] = ()
    ) -> tuple[PreTrainedModel, Tensor | None]:
        """As vLLM loads it: blocks of one layer, and one head for all depths."""
        self.check_published(folder, target.config.get_text_config())
        tensors = {name: tensor.float() for name, tensor in weights_of(folder, "cpu").items()}
        return _heads(folder, tensors)

    def first_input(self, model: PreTrainedModel, batch: TrainingBatch) -> Tensor:
        heads: Any = model
        states: Tensor = heads.blocks[0](states_before(batch)[:, 0].to(heads.lm_head.weight.dtype))
        return states

    def head_inputs(self, model: PreTrainedModel, batch: TrainingBatch) -> Iterator[HeadInput]:
        """The sum over the depths drawn, divided by how many a position has on average."""
        heads: Any = model
        positions, width, dtype = batch.positions, batch.width, heads.lm_head.weight.dtype
        depths = drawn_depths(positions, width, batch.seeds, len(heads.blocks), DEEPER)
        rows, states = positions // width, batch.states[..., 0, :].flatten(0, 1)
        weight = 1 / mean_depth(len(heads.blocks), DEEPER)
        for depth, block in enumerate(heads.blocks, start=1):
            drawn = (depths[: len(depths) - depth] >= depth).nonzero()[:, 0]
            # of the N positions, those whose answer has another token so much later
            entries = drawn[rows[drawn] == rows[drawn + depth]]
            read = states[positions[entries]].to(dtype)
            yield HeadInput(block(read), entries + depth, weight)

    def drafter(
        self, model: PreTrainedModel, token_ids: Tensor | None, target: Target
    ) -> MedusaDrafter:
        """In the target's dtype, on a CPU in eight bits."""
        heads: Any = model
        embedding = target.decoder.embedding
        int8 = embedding.device.type == "cpu" and heads.config.hidden_size % INT8_TERMS == 0
        blocks = [Product.of(block.layers[0].to(embedding), int8=int8) for block in heads.blocks]
        head = Product.of(heads.lm_head.to(embedding), int8=int8)
        return MedusaDrafter(
            **on_target_ids(token_ids, embedding),
            bytes=sum(part.nbytes for part in (*blocks, head)),
            layers=self.layers(target.model.config.get_text_config().to_dict()),
            embedding=embedding,
            blocks=blocks,
            head=head,
        )


def _heads(folder: Path, tensors: dict[str, Tensor]) -> tuple[PreTrainedModel, Tensor | None]:
    token_ids = tensors.pop("token_map", None)
    with torch.device("meta"):
        model = MedusaModel(MedusaConfig.from_pretrained(folder))
    fill(model, tensors, folder)
    return model.eval(), None if token_ids is None else token_ids.long()


KIND = Medusa()


@torch.no_grad()
def fit_heads(model: MedusaModel, texts: Sequence[AnsweredText]) -> None:
    """The closed form of the module's docstring, from the states of these texts."""
    size = model.config.hidden_size
    maps = []
    for depth in range(1, len(model.blocks) + 1):
        to_later = LeastSquares(size, size)
        for x, y in _pairs(texts, depth):
            to_later.add(x, y)
        maps.append(to_later.solution() - torch.eye(size))
    squares, count = torch.zeros(len(maps), size), 0
    for x, _ in _pairs(texts, 1):
        squares += torch.stack([(x @ added.T).pow(2).sum(0) for added in maps])
        count += len(x)
    bias = BIAS * (squares / count).sqrt().amax(0)
    to_state = LeastSquares(size, size)
    for depth, (block, added) in enumerate(zip(model.blocks, maps, strict=True), start=1):
        layer: Any = block.layers[0]  # type: ignore[index]
        layer.weight.copy_(added)
        layer.bias.copy_(bias)
        for x, y in _pairs(texts, depth):
            to_state.add(block(x), y)
    model.lm_head.weight.copy_(model.lm_head.weight @ to_state.solution())


def _pairs(texts: Sequence[AnsweredText], depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The target's states at a text's response positions and those `depth` tokens later [N, H]."""
    for text in texts:
        assert text.states is not None
        states = text.states[len(text.prompt_ids) - 1 :, 0].float()
        if len(states) > depth:
            yield states[:-depth], states[depth:]


@dataclass(kw_only=True)
class MedusaDrafter(HeadDrafter):
    """embedding: the target's [V, H]. blocks: D of them, with one `head` for all."""

    embedding: Tensor
    blocks: list[Product]
    head: Product

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """[B, T, K] at a depth from 0 on, from the target's states [B, T, H]."""
        return self.head(states + F.silu(self.blocks[depth](states)))

    def start(self, texts: Texts) -> Session:
        return MedusaSession(self, texts)

    @torch.inference_mode()
    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        """Logits of a draft's first token; none where no token stands before the newest."""
        before = self.side_by_side(states, self.embedding.dtype)[:, :-1]
        logits = self.logits(before, 0)[:, max(0, len(ids) - 2) :]
        return logits, len(text) - logits.shape[1]

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        """A head, and the choice of its token."""
        state = self.embedding.new_zeros((1, 1, self.embedding.shape[1]))
        return timed_choice(lambda: self.logits(state, 0)[:, -1], sampling)

    @torch.inference_mode()
    def probe(self, ids: list[int]) -> Tensor:
        state = self.embedding.new_ones((1, 1, self.embedding.shape[1]))
        return torch.stack([self.logits(state, depth) for depth in range(len(self.blocks))])


class MedusaSession(Session):
    """`states` [B, 1, H]: the target's before the newest token of each row."""

    def __init__(self, drafter: MedusaDrafter, texts: Texts) -> None:
        self.drafter, self.sampling, self.generator = drafter, texts.sampling, texts.generator
        dtype = drafter.embedding.dtype
        self.states = torch.cat(
            [drafter.side_by_side(states, dtype)[:, -1:] for states in texts.states]
        )

    @torch.inference_mode()
    def propose(self, count: int, stop_below: float) -> Proposal:
        drafter, states = self.drafter, self.states
        count = min(count, len(drafter.blocks))
        if count < 1:
            empty = torch.zeros((len(states), 0), dtype=torch.long, device=states.device)
            return Proposal(empty)
        return drafter.in_turn(
            lambda depth, _: drafter.logits(states, depth)[:, -1],
            count,
            stop_below,
            self.sampling,
            self.generator,
        )

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        read = self.drafter.side_by_side(states, self.drafter.embedding.dtype)
        # of what was emitted the target has read all but the last, which is the newest now
        last = torch.tensor([len(tokens) - 1 for tokens in emitted], device=read.device)
        rows = torch.arange(len(emitted), device=read.device)
        self.states = read[rows, last][:, None]

    def keep(self, rows: list[int]) -> None:
        self.states = self.states[torch.tensor(rows, device=self.states.device)]
