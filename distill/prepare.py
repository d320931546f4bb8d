"""The draft before training: a sibling as is, or the target pruned in depth, head refitted.

Legend: H hidden size, V the target's vocabulary, K rows of the draft's head.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from align.trim import choose_tokens, lost_mass
from distill.logit_cache import CachedAnswer
from eval.decoding.forward import input_embedding

PRUNABLE = ("llama", "qwen2", "qwen3", "mistral")
FIT_RIDGE = 1e-4  # relative to the mean diagonal: only keeps the solve well conditioned


@dataclass
class PreparedDraft:
    """A draft and how its head stands to the target's vocabulary.

    token_ids: target id of each head row [K], None when the head covers the whole vocabulary.
    full_head: the fitted head over all of V [V, H] that `token_ids` was cut from, or None.
    lost_mass: share of the target's mass that the head cannot draft.
    """

    model: PreTrainedModel
    token_ids: Tensor | None
    full_head: Tensor | None
    lost_mass: float


def domain_mass(answers: Iterable[CachedAnswer], vocab_size: int) -> Tensor:
    """Probability the target gave each token over the cached positions, summed [V]."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for answer in answers:
        p = answer.top_logprobs.double().exp()
        mass.index_add_(0, answer.top_ids.flatten(), p.flatten())
    return mass


@torch.no_grad()
def prune_and_fit(
    target: PreTrainedModel,
    answers: Iterable[CachedAnswer],
    num_layers: int,
    fit_tokens: int,
    head_size: int | None,
    forced_tokens: Iterable[int],
) -> PreparedDraft:
    """The target's first `num_layers` layers under a head fitted by least squares to its own.

    The fit maps the RMS-normalised state after the last kept layer to the state the target's head
    reads, over about `fit_tokens` response positions; folded into the head it costs nothing to run.
    head_size: rows kept in the head (the domain's most likely tokens), None for all of them.
    """
    config: Any = target.config
    if config.model_type not in PRUNABLE:
        raise ValueError(
            f"A target of type {config.model_type!r} cannot be pruned in depth here "
            f"({', '.join(PRUNABLE)} can); name a sibling with --draft."
        )
    if target.get_output_embeddings().bias is not None:
        raise ValueError(
            "TOK-012: the target's head has a bias, which a refitted or trimmed head would lack; "
            "name a sibling with --draft."
        )
    if not 1 <= num_layers < config.num_hidden_layers:
        raise ValueError(
            f"num_draft_layers {num_layers} must be at least 1 and below the target's "
            f"{config.num_hidden_layers} layers; use a smaller number."
        )
    answers = list(answers)
    projection = _fit_projection(target, answers, num_layers, fit_tokens)
    target_head = target.get_output_embeddings().weight
    full_head = (target_head.float() @ projection).to(target_head.dtype)
    mass = domain_mass(answers, target_head.shape[0])
    token_ids = None if head_size is None else choose_tokens(mass, head_size, forced_tokens)
    head = full_head if token_ids is None else full_head[token_ids]
    model = build_pruned(target, num_layers, head)
    return PreparedDraft(
        model=model,
        token_ids=token_ids,
        full_head=full_head,
        lost_mass=0.0 if token_ids is None else lost_mass(mass, token_ids),
    )


def build_pruned(target: PreTrainedModel, num_layers: int, head: Tensor) -> PreTrainedModel:
    """The target's first layers, sharing its embedding, under a `head` [K, H] of their own."""
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = num_layers
    config.tie_word_embeddings = False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    kept = {
        name: tensor.clone()
        for name, tensor in target.model.state_dict().items()
        if not name.startswith("layers.") or int(name.split(".")[1]) < num_layers
    }
    kept["embed_tokens.weight"] = input_embedding(target)
    # the fitted projection starts from the plain normalised state
    kept["norm.weight"] = torch.ones_like(kept["norm.weight"])
    model.model.load_state_dict(kept, assign=True)
    model.model.rotary_emb = copy.deepcopy(target.model.rotary_emb)
    model.lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
    model.lm_head.weight = nn.Parameter(head.contiguous())
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.eval()


def _fit_projection(
    target: PreTrainedModel, answers: list[CachedAnswer], num_layers: int, fit_tokens: int
) -> Tensor:
    """The matrix A [H, H] that minimises |A x - y|^2 from pruned to full final states, in fp32."""
    size = target.config.hidden_size
    gram = torch.zeros(size, size, dtype=torch.float64)
    cross = torch.zeros(size, size, dtype=torch.float64)
    seen: dict[str, Tensor] = {}
    hooks = [
        target.model.layers[num_layers - 1].register_forward_hook(
            lambda _module, _inputs, output: seen.update(early=output)
        ),
        target.model.norm.register_forward_hook(
            lambda _module, _inputs, output: seen.update(final=output)
        ),
    ]
    bar = tqdm(total=fit_tokens, desc="fit head", unit="token")
    try:
        for answer in _until(answers, fit_tokens):
            ids = torch.cat([answer.prompt_ids, answer.response_ids])[None].to(target.device)
            target.model(input_ids=ids[:, :-1], use_cache=False)
            response = slice(len(answer.prompt_ids) - 1, None)
            x = F.rms_norm(seen["early"][0, response].float(), (size,), eps=1e-6)
            y = seen["final"][0, response].float()
            gram += (x.T @ x).cpu()
            cross += (x.T @ y).cpu()
            bar.update(len(x))
    finally:
        for hook in hooks:
            hook.remove()
        bar.close()
    ridge = FIT_RIDGE * gram.diagonal().mean() * torch.eye(size, dtype=torch.float64)
    return torch.linalg.solve(gram + ridge, cross).T.float()


def _until(answers: list[CachedAnswer], tokens: int) -> Iterator[CachedAnswer]:
    for answer in answers:
        if tokens <= 0:
            return
        tokens -= len(answer.response_ids)
        yield answer


def head_rows(token_ids: Tensor | None, vocab_size: int) -> Tensor | None:
    """Each target id's row in a trimmed head [V], -1 where it has none; None for a whole head."""
    if token_ids is None:
        return None
    rows = torch.full((vocab_size,), -1)
    rows[token_ids] = torch.arange(len(token_ids))
    return rows


SUPPRESSION = (0.0, 5.0, 10.0, 20.0, 40.0, 80.0)  # logits below the fitted ones, tried in order
CALIBRATION_TOKENS = 4_000


@torch.no_grad()
def full_vocabulary(
    tuned: PreTrainedModel,
    token_ids: Tensor,
    full_head: Tensor,
    answers: Iterable[CachedAnswer],
) -> PreTrainedModel:
    """The tuned draft under a head over the target's whole vocabulary, for engines that need one.

    Rows of trimmed tokens are the fitted ones from before training, lowered by a constant: without
    it they would win now and then against states that training has moved. A head has no bias here,
    so the constant is the least-squares row w with w·h = -1 over the draft's own states h; the
    smallest multiple is taken at which the greedy choice is the trimmed head's on 999 of 1000
    positions.
    """
    states = []
    for answer in _until(list(answers), CALIBRATION_TOKENS):
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[None].to(tuned.device)
        hidden = tuned.base_model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
        states.append(hidden[0, len(answer.prompt_ids) - 1 :].float())
    h = torch.cat(states)
    trimmed = torch.ones(len(full_head), dtype=torch.bool, device=h.device)
    trimmed[token_ids] = False
    lower = torch.linalg.lstsq(h.double(), -torch.ones(len(h), 1).double().to(h.device)).solution
    tuned_rows = tuned.get_output_embeddings().weight.float()
    best = (h @ tuned_rows.T).amax(-1)
    outside = full_head[trimmed].float()
    for strength in SUPPRESSION:
        rows = outside + strength * lower.T.float()
        kept = float(((h @ rows.T).amax(-1) < best).float().mean())
        if kept >= 0.999:
            break
    else:
        warnings.warn(
            f"The full-vocabulary form makes another greedy choice than the compact one on "
            f"{1 - kept:.1%} of positions; expect that much less alpha from it.",
            stacklevel=2,
        )
    head = torch.empty_like(full_head, dtype=torch.float32)
    head[trimmed], head[token_ids] = rows, tuned_rows
    model = copy.deepcopy(tuned)
    model.lm_head = nn.Linear(head.shape[1], head.shape[0], bias=False, device="meta")
    model.lm_head.weight = nn.Parameter(head)
    model.config.vocab_size = head.shape[0]
    return model
