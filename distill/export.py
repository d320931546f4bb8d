"""The distilled draft as engines load it.

A language model gets a head over the whole vocabulary. Other kinds are in the formats of engines,
where a head may be trimmed. Legend: V the target's vocabulary, K entries of a trimmed head, H
hidden size.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from align.files import atomic_folder, read_json, write_json
from distill.drafters.kind import Draft
from distill.models import Pair
from distill.recipe import Recipe
from distill.teacher.store import Answers, CachedAnswer
from eval.decoding.forward import input_embedding
from eval.decoding.weights import linear

BASE_KEPT = "base_draft_kept.json"  # in a run's folder: why `draft/` is the base draft
SUPPRESSION = 40.0  # how far the logits of trimmed tokens are below the mean of the trained ones
SUPPRESSION_TOKENS = 8_000  # half to find it, half to check it
DROPPED_MASS = 1e-4  # most probability of the trimmed tokens on the checked half


def export_draft(
    recipe: Recipe, pair: Pair, prepared: Draft, distilled: Any, answers: Answers | None
) -> None:
    """Write `draft/`, which engines and the reference decoder load."""
    with atomic_folder(recipe.folder / "draft") as partial:
        write_draft(recipe, pair, prepared._replace(model=distilled), partial, answers)


def write_draft(
    recipe: Recipe, pair: Pair, draft: Draft, folder: Path, answers: Answers | None = None
) -> None:
    """Write a draft to an existing folder, as engines load it.

    answers: for the full head of a language model whose head is trimmed.
    """
    kind, dtype = recipe.kind, getattr(torch, recipe.dtype)
    pair.target.tokenizer.save_pretrained(folder)
    if not kind.language_model:
        kind.save(folder, draft, pair.target_embedding(dtype), pair.target)
    else:
        full = draft.model.to(dtype)
        if recipe.sibling is None:
            embedding = input_embedding(full).to(dtype)
            # because a FrozenEmbedding returns fp32
            full.set_input_embeddings(nn.Embedding.from_pretrained(embedding))
        if draft.token_ids is not None:
            assert answers is not None
            full = full_vocabulary(full, draft.token_ids, answers.until(SUPPRESSION_TOKENS))
        kind.exported(full).save_pretrained(folder)
    for_older_transformers(folder)


def for_older_transformers(folder: Path) -> None:
    """Rewrite a saved draft's config and tokenizer so that transformers 4 and 5 read the same."""
    about = read_json(folder / "config.json")
    about.pop("auto_map", None)  # it names files with code, which the folder does not have
    for keys in (about, about.get("transformer_layer_config", {})):
        rope = dict(keys.get("rope_parameters") or {})
        if keys.get("model_type") == "gemma3_text":  # rotary parameters by type of layer
            keys["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
            rope = dict(rope["full_attention"])
        if "rope_theta" in rope:
            moved = rope.keys() & {"rope_theta", "partial_rotary_factor"}
            keys |= {key: rope.pop(key) for key in moved}
            scaled = rope.get("rope_type", "default") != "default"
            keys["rope_scaling"] = rope if scaled else None
    write_json(folder / "config.json", about)
    words = read_json(folder / "tokenizer_config.json")
    for argument in ("is_local", "local_files_only"):  # arguments of our call
        words.pop(argument, None)
    if words.get("tokenizer_class") == "TokenizersBackend":
        words["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(words.get("extra_special_tokens"), list):
        words["additional_special_tokens"] = words.pop("extra_special_tokens")
    write_json(folder / "tokenizer_config.json", words)


@torch.no_grad()
def full_vocabulary(
    distilled: PreTrainedModel, token_ids: Tensor, answers: Iterable[CachedAnswer]
) -> PreTrainedModel:
    """The distilled draft under a head over the target's whole vocabulary [V, H].

    Trimmed tokens get one entry: the mean of the trained entries, and SUPPRESSION times a w with
    w·h = -1 (least squares over half of the draft's states h at the outputs). Where this holds, its
    logit is by SUPPRESSION below the mean of the trained logits, so a trimmed token is never the
    greedy choice, and their probability is at most V / K * exp(-SUPPRESSION) (Jensen's inequality).
    The other half of the states checks this; if it fails there, a warning says how far.
    """
    states = []
    for answer in answers:
        hidden = distilled.base_model(
            input_ids=answer.text[None, :-1].to(distilled.device), use_cache=False
        ).last_hidden_state
        states.append(hidden[0, len(answer.prompt_ids) - 1 :])
    # on the CPU, because CUDA's solver needs states of full rank
    h, checked = torch.cat(states).double().cpu().tensor_split(2)
    lower = torch.linalg.lstsq(h, -torch.ones_like(h[:, :1])).solution[:, 0]
    trained = distilled.get_output_embeddings().weight
    entry = trained.double().mean(0) + SUPPRESSION * lower.to(trained.device)
    head = entry.to(trained.dtype).repeat(len(input_embedding(distilled)), 1)
    head[token_ids.to(head.device)] = trained
    checked = checked.to(trained.device, torch.float32)
    logits, lowered = checked @ trained.float().T, checked @ entry.to(trained.dtype).float()
    kept = float((lowered < logits.amax(-1)).float().mean())
    total = lowered + math.log(max(1, len(head) - len(trained)))
    mass = float((total - logits.logsumexp(-1)).sigmoid().mean())
    if kept < 0.999 or mass > DROPPED_MASS:
        warnings.warn(
            "The draft may have a lower acceptance rate with its head over the whole vocabulary: "
            f"its greedy token differs at {1 - kept:.1%} of positions, and trimmed tokens have "
            f"{mass:.2%} of the probability.",
            stacklevel=2,
        )
    whole: Any = copy.deepcopy(distilled, {id(weight): weight for weight in distilled.parameters()})
    whole.lm_head, whole.config.vocab_size = linear(head), len(head)
    copied: PreTrainedModel = whole
    return copied
