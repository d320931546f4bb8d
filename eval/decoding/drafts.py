"""Targets and drafts as the decoder runs them, the compact form of a pruned draft included.

The compact form (`draft/compact/`) holds the draft's own tensors only: its layers, its norm, its
head over `token_ids`. The input embedding is the target's, shared in memory and named by its hash.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from align.atomic import atomic_folder
from align.check import Strategy, choose_strategy, compare
from align.side import Side, read_side
from align.sources import load_model, load_tokenizer, read_json
from align.transplant import transplant
from align.vocab_map import Reader, build_map
from eval.decoding.drafting import Draft, StringDraft
from eval.decoding.forward import Decoder, build_decoder

EMBEDDING = "model.embed_tokens.weight"
COMPACT = "draftsmith-compact/2"
LONGER = 2  # a text in a draft's own ids has at most so many times the target's, as a rule


def stop_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Every id that ends a text: tokenizer, config and generation config together."""
    generation = model.generation_config
    sources = [
        tokenizer.eos_token_id,
        model.config.get_text_config().eos_token_id,
        generation.eos_token_id if generation is not None else None,
    ]
    stops: set[int] = set()
    for ids in sources:
        stops.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(stops)


def tensor_sha256(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes, on whatever device it is."""
    data = tensor.detach().contiguous().view(torch.uint8).cpu().numpy()
    return hashlib.sha256(data.tobytes()).hexdigest()


def model_bytes(model: PreTrainedModel) -> int:
    """Bytes of a model's parameters, tied ones counted once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


@dataclass
class Target:
    """The target twice: `model` for stock generation and fp32 checks, `decoder` for ours."""

    spec: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    decoder: Decoder
    stops: frozenset[int]

    @property
    def bytes(self) -> int:
        return model_bytes(self.model)


@dataclass
class Candidate:
    """A draft to be measured: how it is named, what it is, what it weighs."""

    name: str
    path: str
    form: str
    vocabulary: dict[str, Any]
    draft: Draft | StringDraft
    draft_bytes: int
    full_form_bytes: int | None


def load_target(spec: str, dtype: torch.dtype, device: torch.device, context_length: int) -> Target:
    """The target of a spec, ready to decode contexts of `context_length` tokens."""
    loaded: Any = load_model(spec, dtype)
    model, tokenizer = loaded.to(device), load_tokenizer(spec)
    decoder = build_decoder(model, context_length)
    return Target(spec, model, tokenizer, decoder, stop_tokens(model, tokenizer))


def save_compact(
    folder: Path, model: PreTrainedModel, token_ids: Tensor | None, embedding: Tensor
) -> None:
    """Write the compact form; `embedding` is the target's, of which only the hash is kept."""
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k != EMBEDDING}
    if token_ids is not None:
        # as other engines store them: the target's id less the row's number, and who has a row
        rows = torch.arange(len(token_ids), device=token_ids.device)
        tensors["d2t"] = (token_ids - rows).int()
        tensors["t2d"] = torch.zeros(len(embedding), dtype=torch.bool)
        tensors["t2d"][token_ids.cpu()] = True
    with atomic_folder(folder) as partial:
        model.config.save_pretrained(partial)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        about = {"format": COMPACT, "embedding_sha256": tensor_sha256(embedding)}
        (partial / "compact.json").write_text(json.dumps(about, indent=2))


def load_compact(folder: Path, embedding: Tensor) -> tuple[PreTrainedModel, Tensor | None]:
    """The model and its head's token ids, on the target's own embedding [V, H].

    Raises ValueError when the draft was made for another target.
    """
    about = read_json(folder / "compact.json")
    if about.get("format") != COMPACT:
        raise ValueError(
            f"{folder} has format {about.get('format')!r}, not {COMPACT!r}; it was written by "
            "another version: make the draft again, or use the full form beside it."
        )
    if about["embedding_sha256"] != tensor_sha256(embedding):
        raise ValueError(
            f"{folder} was made for another target: its input embedding has hash "
            f"{about['embedding_sha256'][:12]}…, this target's is "
            f"{tensor_sha256(embedding)[:12]}…. Use the target it was made for, in the same "
            "dtype, or the full form beside it."
        )
    tensors = load_file(folder / "model.safetensors", device=str(embedding.device))
    token_ids = None
    if "d2t" in tensors:
        d2t = tensors.pop("d2t").long()
        token_ids = d2t + torch.arange(len(d2t), device=d2t.device)
        named = tensors.pop("t2d").nonzero()[:, 0]
        if not torch.equal(named, token_ids.sort().values):
            raise ValueError(
                f"TOK-015: d2t and t2d of {folder} name different ids, so its drafts would be "
                "other tokens than meant; make the draft again."
            )
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=embedding.dtype)
    rows, size = tensors["lm_head.weight"].shape
    model.lm_head = nn.Linear(size, rows, bias=False, device="meta")
    model.load_state_dict({**tensors, EMBEDDING: embedding}, assign=True)
    # rotary tables are no parameters: build them for real
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(embedding.device)
    return model.eval(), token_ids


def compact_decoder(model: PreTrainedModel, context_length: int, embedding: Tensor) -> Decoder:
    """The decoder of a pruned draft, which reads its target's embedding [V, H].

    On a CPU in eight bits: one step of a draft is hardly more than reading its weights, and what
    rounding them costs in alpha is far less than the time it saves (docs/lab-notes.md).
    """
    on_cpu = embedding.device.type == "cpu"
    return build_decoder(model, context_length, embedding, int8=on_cpu)


def compact_candidate(
    name: str, folder: Path, target: Target, full_form_bytes: int | None
) -> Candidate:
    """A pruned draft in its compact form, which speaks the target's ids by construction."""
    embedding = target.decoder.embedding
    model, token_ids = load_compact(folder, embedding)
    decoder = compact_decoder(model, target.decoder.context_length, embedding)
    vocab = embedding.shape[0]
    return Candidate(
        name=name,
        path=str(folder),
        form="compact",
        vocabulary={
            "relation": "identical",
            "strategy": "direct",
            "coverage": 1.0 if token_ids is None else len(token_ids) / vocab,
        },
        draft=Draft(decoder, token_ids),
        draft_bytes=decoder.own_bytes(),
        full_form_bytes=full_form_bytes,
    )


def load_candidate(name: str, spec: str, target: Target, strategy: str = "auto") -> Candidate:
    """A draft by its spec: the compact form where the folder has one, else a checkpoint as it is.

    strategy: how its vocabulary is bridged (align/check.py); "auto" takes the verdict's.
    Raises ValueError when no lossless strategy exists for the pair, or the one asked for is none.
    """
    folder = Path(spec)
    full = folder / "model.safetensors"
    if (folder / "compact" / "compact.json").is_file():
        return compact_candidate(
            name, folder / "compact", target, full.stat().st_size if full.is_file() else None
        )
    if (folder / "compact.json").is_file():
        return compact_candidate(name, folder, target, None)
    left, right = read_side(target.spec), read_side(spec)
    verdict = compare(left, right)
    chosen = choose_strategy(verdict, strategy, tuned=False)
    loaded: Any = load_model(spec, target.decoder.dtype)
    model = loaded.to(target.decoder.device)
    shared_ids = verdict.shared_ids
    if chosen in ("remap", "transplant"):
        rows = target.decoder.embedding.shape[0]
        model = transplant(model, build_map(left, right), left, right, rows)
        shared_ids = left.count
    size = model_bytes(model)
    return Candidate(
        name=name,
        path=spec,
        form="full",
        vocabulary={
            "relation": verdict.relation,
            "strategy": chosen,
            "coverage": verdict.coverage,
        },
        draft=bridged_draft(model, target, left, right, chosen, shared_ids),
        draft_bytes=size,
        full_form_bytes=size,
    )


def bridged_draft(
    model: PreTrainedModel,
    target: Target,
    target_side: Side,
    draft_side: Side,
    strategy: Strategy,
    shared_ids: int,
) -> Draft | StringDraft:
    """A checkpoint as a draft under a strategy of align/check.py.

    Under "remap" and "transplant" it has the target's rows already. shared_ids: as in `Verdict`.
    Raises MapError when the strategy cannot bridge the two.
    """
    rows = model.get_output_embeddings().weight.shape[0]
    if strategy not in ("intersection", "string"):
        decoder = build_decoder(model, target.decoder.context_length)
        return Draft(decoder, rows=None if rows == shared_ids else shared_ids)
    limit = model.config.get_text_config().max_position_embeddings
    decoder = build_decoder(model, min(limit, LONGER * target.decoder.context_length))
    if strategy == "string":
        count = draft_side.count
        return StringDraft(decoder, target_side, draft_side, None if rows == count else count)
    vocab_map = build_map(target_side, draft_side)
    mapped = vocab_map.mapped
    token_ids = vocab_map.to_target[mapped]
    return Draft(
        decoder,
        token_ids=token_ids.to(decoder.device),
        rows=mapped.to(decoder.device),
        reader=Reader(vocab_map, target_side, draft_side),
        feed=vocab_map.to_draft[token_ids].to(decoder.device),
    )
