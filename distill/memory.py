"""What a run needs of memory, stage by stage, and on which devices it fits: from configs alone.

Nothing is loaded. The models are built without weights, and each stage's own functions run on
tensors that have shapes but no data (torch's FakeTensorMode), while a meter adds up what is alive:
no formula of ours that could go stale, but for what docs/memory.md names. All sizes are bytes, at
the longest prompt and the longest answers that the recipe allows: what a run needs at most.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from distill.adapters import lora_config
from distill.export import CALIBRATION_TOKENS
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
from distill.models import check_prunable
from distill.recipe import Recipe
from distill.teacher.answers import ANSWERS_PER_SHARD, top_logprobs
from distill.teacher.store import bytes_per_token
from distill.trainer import cpu_attention
from distill.training_set import WIDTH
from eval.decoding.build import build_decoder
from eval.decoding.drafters.causal_lm import teacher_forced_logits
from eval.decoding.drafters.pruned import HEAD_ROWS, pruned_config
from eval.decoding.forward import Decoder, input_embedding
from eval.decoding.generation import PREFILL_ROWS
from eval.decoding.verification import Sampling, agreement, sample, warp
from eval.measuring.agreement import BATCH

STATE_BYTES = 2  # of each of the numbers in a hidden state, in bf16
PROMPT_TOKENS = 512  # of the longest prompt, where nobody knows it yet
RUNTIME = 2**30  # of every device: the process, or a GPU's context and the libraries' workspaces
FRAGMENTED = 0.1  # of every device: what an allocator cannot use
DEVICES = {
    "laptop of 8 GiB": 8 * 2**30,
    "laptop of 16 GiB": 16 * 2**30,
    "24 GB": 24 * 10**9,
    "40 GB": 40 * 10**9,
    "48 GB": 48 * 10**9,
    "80 GB": 80 * 10**9,
    "141 GB": 141 * 10**9,
}
SHARDS = (2, 4, 8, 16)  # devices of 80 GB that FSDP spreads a draft over


@dataclass(frozen=True)
class Stage:
    """What is in memory at a stage's peak, bytes.

    buffers: all that is not named: activations, logits, copies that live for a moment. layer: of
    the weights in them, the largest layer, which FSDP gathers whole.
    """

    name: str
    target: int = 0
    draft: int = 0
    gradients: int = 0
    optimizer: int = 0
    kv: int = 0
    buffers: int = 0
    layer: int = 0

    @property
    def peak(self) -> int:
        """Bytes in all."""
        held = self.target + self.draft + self.gradients + self.optimizer + self.kv
        return held + self.buffers

    def sharded(self, devices: int) -> int:
        """Bytes on each of so many devices: what is held is spread, buffers and a layer are not."""
        return -(-(self.peak - self.buffers) // devices) + self.buffers + self.layer


@dataclass(frozen=True)
class Needs:
    """Of a run: its stages, and bytes on disk."""

    stages: list[Stage]
    answers_on_disk: int
    checkpoint: int
    states_on_disk: int = 0

    @property
    def peak(self) -> int:
        """Bytes of the largest stage."""
        return max(stage.peak for stage in self.stages)


def fits(needed: int, device: int) -> bool:
    """Whether so many bytes fit on a device of so many, what nobody can use taken off."""
    return needed <= device * (1 - FRAGMENTED) - RUNTIME


def smallest_device(needed: int) -> str | None:
    """The first of DEVICES that holds so many bytes, None if none does."""
    return next((name for name, size in DEVICES.items() if fits(needed, size)), None)


def least_shards(stage: Stage) -> int | None:
    """How many devices of 80 GB hold a stage that is spread over them; None: not even the most."""
    return next((n for n in SHARDS if fits(stage.sharded(n), DEVICES["80 GB"])), None)


def needs(
    recipe: Recipe,
    target: PreTrainedConfig,
    draft: PreTrainedConfig | None,
    prompt_tokens: int = PROMPT_TOKENS,
    target_here: bool = True,
) -> Needs:
    """What the recipe's run needs with models of these configs; draft None: the target, pruned.

    prompt_tokens: of the longest prompt. target_here: False where a server runs the target; then
    nobody answers or evaluates here.
    """
    job = _Job(recipe, target.get_text_config(), draft and draft.get_text_config(), prompt_tokens)
    stages = [job.preparing(target_here), job.distilling(), job.exporting()]
    if target_here:
        stages = [job.answering(), *stages, job.evaluating()]
    vocab_size: int = target.get_text_config().vocab_size
    rows = recipe.max_train_prompts * recipe.answers_per_prompt
    tokens = rows * (recipe.answer_max_new_tokens + recipe.train_on_prompts * job.prompt)
    positions = rows * (recipe.answer_max_new_tokens + job.prompt)
    return Needs(
        stages,
        tokens * bytes_per_token(recipe.cache_top_k, vocab_size),
        # the trained weights in fp32 and both of AdamW's moments
        3 * next(stage for stage in stages if stage.name == "distilling").gradients,
        positions * job.states_per_token,
    )


class _Job:
    """The stages of one recipe, each run on tensors without data."""

    def __init__(
        self,
        recipe: Recipe,
        target: PreTrainedConfig,
        draft: PreTrainedConfig | None,
        prompt_tokens: int,
    ) -> None:
        if draft is None:
            check_prunable(target.to_dict(), recipe.num_draft_layers)
        self.recipe, self.target, self.draft = recipe, target, draft
        self.dtype: torch.dtype = getattr(torch, recipe.dtype)
        self.on_cpu = bool(recipe.training.get("use_cpu", False))
        self.prompt = min(prompt_tokens, target.max_position_embeddings // 2)
        room = target.max_position_embeddings - self.prompt - recipe.max_gamma - 1
        self.answer = min(recipe.answer_max_new_tokens, room)
        self.new = min(recipe.max_new_tokens, room)
        layers = recipe.kind.layers(target.to_dict())
        self.states_per_token = len(layers) * target.hidden_size * STATE_BYTES

    def draft_shape(self, dtype: torch.dtype) -> PreTrainedModel:
        """The draft; a pruned one with its trimmed head and an embedding of its own."""
        if self.draft is not None:
            return _shape(self.draft, dtype)
        model = _shape(pruned_config(self.target, self.recipe.num_draft_layers), dtype)
        rows, size = model.get_output_embeddings().weight.shape
        rows = self.recipe.draft_vocab_size or rows
        model.set_output_embeddings(nn.Linear(size, rows, False, "meta", dtype))
        return model

    def trained_shape(self, rows: int, width: int) -> PreTrainedModel:
        """The draft in fp32 as `build_trainer` makes it, for such a batch."""
        recipe, model = self.recipe, self.draft_shape(torch.float32)
        embedding: Any = model.get_input_embeddings()
        if embedding.weight is not model.get_output_embeddings().weight:
            embedding.weight.requires_grad_(False)
        how = cpu_attention(model.config, rows, width) if self.on_cpu else "sdpa"
        model.set_attn_implementation(how)
        give_loss_forward(model, recipe.kind, forward_kl)
        if recipe.training.get("activation_checkpointing", False):
            # the state of random numbers cannot be kept without data; it takes no room
            model.activation_checkpointing_enable(
                {"use_reentrant": False, "preserve_rng_state": False}
            )
        if not recipe.use_peft:
            return model
        made: Any = get_peft_model(model, lora_config(recipe))
        return made

    def decode(self, decoder: Decoder, rows: int, new: int, cached: int) -> tuple[int, int]:
        """Bytes of the KV cache and of the buffers beside it, as `generate_batched` answers.

        rows: of the batch. new: tokens of the longest answer. cached: tokens kept of each p.
        """
        with _metered() as meter:
            cache = decoder.new_cache(rows, self.prompt + new)
            kv = meter.live
            prefilled = decoder.new_cache(min(PREFILL_ROWS, rows), self.prompt)
            prompts = torch.zeros((prefilled.rows, self.prompt), dtype=torch.long)
            decoder.forward(prompts, 0, prefilled, last_only=True)
            cache = cache.resized(self.prompt + new)
            tokens = torch.zeros((rows, 1), dtype=torch.long)
            logits = decoder.forward(tokens, self.prompt + new - 1, cache)[:, -1]
            if self.recipe.answer_temperature:
                sample(warp(logits, Sampling(self.recipe.answer_temperature)))
            if cached:
                # of more than there are, the checks of a run say so in better words
                top_logprobs(logits, min(cached, logits.shape[-1]))
        return kv, meter.peak - kv

    def answering(self) -> Stage:
        recipe, shape = self.recipe, _shape(self.target, self.dtype)
        with _without_data():
            model = _placed(shape)
            decoder = build_decoder(model, self.prompt + self.answer)
            rows = min(
                recipe.answer_batch_size, recipe.max_train_prompts * recipe.answers_per_prompt
            )
            kv, buffers = self.decode(decoder, rows, self.answer, recipe.cache_top_k)
        if self.on_cpu:  # else the states of answers that are not on disk yet are on the host
            kept = (rows + ANSWERS_PER_SHARD) * (self.prompt + self.answer)
            buffers += kept * self.states_per_token
        return Stage("answering", target=_bytes(model), kv=kv, buffers=buffers)

    def preparing(self, target_here: bool) -> Stage:
        """A sibling is loaded; of a pruned target the head is fitted and cut."""
        if self.draft is not None or not target_here:
            return Stage("preparing", draft=_bytes(self.draft_shape(torch.float32)))
        draft, shape = self.draft_shape(self.dtype), _shape(self.target, self.dtype)
        own = _bytes(draft) - input_embedding(draft).nbytes
        with _without_data():
            target = _placed(shape)
            with _metered() as meter, torch.no_grad():
                ids = torch.zeros((1, self.prompt + self.answer), dtype=torch.long)
                target.base_model(input_ids=ids, use_cache=False)
                head = target.get_output_embeddings().weight
                projection = torch.zeros((head.shape[1], head.shape[1]))
                pieces = [
                    (rows.float() @ projection).to(rows.dtype) for rows in head.split(HEAD_ROWS)
                ]
                fitted = torch.cat(pieces)
                fitted[: self.recipe.draft_vocab_size].clone()
        return Stage("preparing", target=_bytes(target), draft=own, buffers=meter.peak)

    def distilling(self) -> Stage:
        """A step with AdamW's moments already there, as from the second one on."""
        recipe, args = self.recipe, self.recipe.training
        rows = args.get("per_device_train_batch_size", 8)
        width = -(-(self.prompt + self.answer) // WIDTH) * WIDTH
        shape = self.trained_shape(rows, width)
        with _without_data():
            model = _placed(shape).train()
            trained = [p for p in model.parameters() if p.requires_grad]
            with _metered() as meter:
                moments = [torch.zeros_like(p) for p in trained * 2]
                cached = torch.zeros((rows * self.answer, recipe.cache_top_k), dtype=torch.long)
                batch = {
                    "input_ids": torch.zeros((rows, width), dtype=torch.long),
                    # what transformers makes of a padded batch's mask [B, T]
                    "attention_mask": torch.zeros((rows, 1, width, width)),
                    "positions": cached[:, 0],
                    "top_ids": cached,
                    "top_logprobs": cached.float(),
                }
                bf16 = args.get("bf16", not args.get("fp16", False))
                with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                    loss = model(**batch).loss
                loss.backward()
        gradients, optimizer = (sum(t.nbytes for t in held) for held in (trained, moments))
        return Stage(
            "distilling",
            draft=_bytes(model),
            gradients=gradients,
            optimizer=optimizer,
            buffers=max(0, meter.peak - gradients - optimizer),
            layer=_largest_layer(model),
        )

    def exporting(self) -> Stage:
        """The tuned draft from fp32 to its dtype; of a trimmed head its full form as well."""
        draft, item = self.draft_shape(torch.float32), self.dtype.itemsize
        buffers = max(p.numel() for p in draft.parameters()) * item
        if self.draft is None and self.recipe.draft_vocab_size is not None:
            # export.full_vocabulary, whose shapes depend on data: the fitted head and the one made
            # from it beside a draft that is converted already; of each calibration token its state,
            # listed and joined in fp32, twice in fp64 for the fit, logits of a piece and their exp
            heads = 2 * self.target.vocab_size * self.target.hidden_size * item
            pieces = CALIBRATION_TOKENS * (24 * self.target.hidden_size + 8 * HEAD_ROWS)
            buffers = max(buffers, heads + pieces - _bytes(draft) // 4 * (4 - item))
        return Stage("exporting", draft=_bytes(draft), buffers=buffers)

    def evaluating(self) -> Stage:
        """The target, the untuned and the tuned draft: batched texts, then p and q compared."""
        recipe, context = self.recipe, self.prompt + self.new
        samplings = [recipe.sampling]
        shapes = _shape(self.target, self.dtype), self.draft_shape(self.dtype)
        pruned = self.draft is None
        with _without_data():
            target, draft = map(_placed, shapes)
            decoder = build_decoder(target, context)
            embedding = decoder.embedding if pruned else None
            drafting = build_decoder(draft, context, embedding, int8=pruned and self.on_cpu)
            kv, texts = self.decode(decoder, BATCH, self.new, 0)
            with _metered() as meter:
                ids = [0] * (context - 1)
                logits = teacher_forced_logits(decoder, ids, self.prompt)
                p = [warp(logits, sampling) for sampling in samplings]
                logits = teacher_forced_logits(drafting, ids, self.prompt)
                q = [_over(warp(logits, sampling), p[0]) for sampling in samplings]
                agreement(p[0], q[0])
        own = drafting.own_bytes() if pruned else _bytes(draft)
        # the check of ties holds one layer in fp32
        exact = _largest_layer(target) // self.dtype.itemsize * 4
        buffers = max(texts, meter.peak - kv, exact)
        return Stage("evaluating", target=_bytes(target), draft=2 * own, kv=kv, buffers=buffers)


def _over(q: Tensor, p: Tensor) -> Tensor:
    """q over as many ids as p, as a trimmed head's is put over the target's."""
    return q if q.shape == p.shape else torch.zeros_like(p)


def _shape(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model of that config, its tensors on no device."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def _placed(model: nn.Module) -> Any:
    """The same model with its tensors on a CPU, without data (in FakeTensorMode)."""
    made: dict[int, nn.Parameter] = {}  # tied ones are one
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
            setattr(module, name, made[id(parameter)])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return model


@contextmanager
def _without_data() -> Iterator[None]:
    """Within it tensors have shapes, and no data."""
    with FakeTensorMode(), warnings.catch_warnings():
        # a decoder may ask where weights lie, to see whether they are one copy: nowhere
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


def _bytes(model: nn.Module) -> int:
    """Of the parameters, tied ones counted once."""
    return sum(p.nbytes for p in model.parameters())


def _largest_layer(model: nn.Module) -> int:
    """Bytes of the largest decoder layer."""
    stacks = (m for m in model.modules() if isinstance(m, nn.ModuleList))
    return max((_bytes(layer) for stack in stacks for layer in stack), default=0)


class _Meter(TorchDispatchMode):
    """Bytes of the tensors that were made under it: alive now, and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        before = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if _held(leaf)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if _held(leaf):
                storage = _storage(leaf)
                if storage._cdata not in self.known | before:
                    self.known.add(storage._cdata)
                    self.live += storage.nbytes()
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return made

    def _free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


def _held(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.device.type != "meta"


def _storage(tensor: Tensor) -> Any:
    return tensor.untyped_storage()


@contextmanager
def _metered() -> Iterator[_Meter]:
    meter = _Meter()
    with meter:
        yield meter


# --- As text


def table(found: Needs) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a stage, its GiB, and the smallest device that holds it."""
    columns = ["target", "draft", "gradients", "optimizer", "kv", "buffers", "peak"]
    header = ["stage, GiB", *columns, "fits on"]
    rows = [
        [stage.name, *(_gib(getattr(stage, name)) for name in columns), _home(stage)]
        for stage in found.stages
    ]
    return header, rows


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f}" if size else "-"


def _home(stage: Stage) -> str:
    device, shards = smallest_device(stage.peak), least_shards(stage)
    if device is None:
        return f"{shards} x 80 GB" if shards else "nothing here"
    return device


def summary(found: Needs) -> str:
    """Where the whole run fits, and what it takes on disk."""
    on_disk = (
        f"On disk: answers {_gib(found.answers_on_disk)} GiB, "
        f"a checkpoint {_gib(found.checkpoint)} GiB"
    )
    if found.states_on_disk:
        on_disk += f", the target's hidden states {_gib(found.states_on_disk)} GiB"
    if home := smallest_device(found.peak):
        return f"The run fits on {home} and all above. {on_disk}"
    spread = [least_shards(stage) for stage in found.stages]
    if None in spread:
        return f"The run fits on none of these devices. {on_disk}"
    return (
        f"The run fits on {max(n or 0 for n in spread)} x 80 GB, the target spread by a server "
        f"(answers: server) or by device_map: auto, the draft by FSDP. {on_disk}"
    )


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table for a terminal."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at in (0, len(widths) - 1) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in [header, *rows]
    )
