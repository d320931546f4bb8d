"""The draft before training: a sibling as is, or the target pruned in depth, head refitted.

Legend: H hidden size, V the target's vocabulary, K rows of the draft's head.
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from align.atomic import atomic_file, atomic_folder, write_json
from align.sources import read_json
from align.trim import choose_tokens, coverage_curve, lost_mass
from distill.adapters import base_draft, full_head
from distill.drafters.base import kind_of
from distill.models import Pair, TargetOfRun, forced_tokens, load_sibling
from distill.recipe import Recipe
from distill.teacher.states import States, states_of
from distill.teacher.store import Answers, CachedAnswer
from eval.decoding.drafters.pruned import load_compact, save_compact
from eval.decoding.forward import input_embedding
from eval.decoding.target import Target
from eval.decoding.weights import linear

FIT_RIDGE = 1e-4  # relative to the mean diagonal: only keeps the solve well conditioned
PREPARED = "prepared.json"
FULL_HEAD = "full_head.safetensors"
HEAD_ROWS = 4096  # of a head are in fp32 at once

# From a folder and the target's embedding [V, H]: the draft, and its head's ids [K], None for all
Load = Callable[[Path, Tensor], tuple[PreTrainedModel, Tensor | None]]


@dataclass
class PreparedDraft:
    """A draft and how its head stands to the target's vocabulary.

    token_ids: target id of each head row [K], None when the head covers the whole vocabulary.
    full_head: the fitted head over all of V [V, H] that `token_ids` was cut from; None for a
    sibling.
    lost_mass: share of the target's mass that the head cannot draft.
    """

    model: PreTrainedModel
    token_ids: Tensor | None
    full_head: Tensor | None
    lost_mass: float


class FrozenEmbedding(nn.Embedding):
    """An embedding that is not trained: it keeps its dtype in a model that is trained in fp32.

    Its rows in fp32 are those very numbers.
    """

    def __init__(self, weight: Tensor) -> None:
        rows, size = weight.shape
        super().__init__(rows, size, _weight=weight, _freeze=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenEmbedding:
        # where it goes is asked of no rows: converted whole it would be copied, twice
        return super()._apply(lambda tensor: tensor.to(fn(tensor[:0]).device), recurse)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


def prepare_draft(
    recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Answers
) -> PreparedDraft:
    """The untuned draft of the recipe's kind."""
    return kind_of(recipe).prepare(recipe, pair, target, answers)


def prepare_pruned(
    recipe: Recipe,
    pair: Pair,
    target: TargetOfRun,
    answers: Answers,
    finish: Callable[[PreparedDraft], None] = lambda made: None,
    layers: tuple[int, ...] = (),
    load: Load = load_compact,
) -> PreparedDraft:
    """The pruned target, kept in `prepared/`.

    finish: what another kind makes of it first. layers: the target's states that this kind reads.
    load: how it is read.
    """
    folder = recipe.folder / "prepared"
    about, head = folder / PREPARED, folder / FULL_HEAD
    if not (about.exists() and head.exists()):
        embedding = pair.target_embedding(getattr(torch, recipe.dtype))
        if recipe.base is None:
            made = prune_and_fit(
                target.loaded.model,
                answers,
                recipe.num_draft_layers,
                recipe.fit_tokens,
                recipe.draft_vocab_size,
                forced_tokens(pair.target),
            )
            finish(made)
            save_compact(folder, made.model, made.token_ids, embedding, recipe.kind, layers)
        else:
            made = _from_base(recipe.base, answers, embedding)
            with atomic_folder(folder) as partial:  # the same bytes: adapters know them by hash
                shutil.copytree(base_draft(recipe.base) / "compact", partial, dirs_exist_ok=True)
        assert made.full_head is not None
        with atomic_file(head, "wb") as file:
            save_file({"full_head": made.full_head}, file.name)
        write_json(about, {"lost_mass": made.lost_mass})
        del made  # from here on it is read from the files, a page at a time
    prepared = read_prepared(recipe, pair, load)
    kept, lost = recipe.num_draft_layers, prepared.lost_mass
    print(f"draft: {kept} layers, trimmed head loses {lost:.2%} of p's mass")
    return prepared


class FitData(NamedTuple):
    """What a draft that reads the target's states is fitted on.

    embedding: the target's [V, H]. head: its output head's rows for `token_ids` [K, H], all rows
    where that is None.
    """

    embedding: Tensor
    head: Tensor
    token_ids: Tensor | None
    states: States
    answers: list[CachedAnswer]


def prepare_on_states(
    recipe: Recipe,
    pair: Pair,
    target: TargetOfRun,
    answers: Answers,
    make: Callable[[Path, FitData], dict[str, Any] | None],
    load: Load,
) -> PreparedDraft:
    """A draft that is no model without the target's states, kept in `prepared/`.

    make: writes the fitted draft into a folder, and returns what PREPARED says besides.
    """
    folder = recipe.folder / "prepared"
    embedding = pair.target_embedding(getattr(torch, recipe.dtype))
    if not (folder / PREPARED).exists():
        states = states_of(recipe, pair, answers)
        assert states is not None
        forced = forced_tokens(pair.target)
        ids, lost = head_tokens(answers, pair.vocab_size, recipe.draft_vocab_size, forced)
        head = target.loaded.model.get_output_embeddings().weight.detach()
        head = head if ids is None else head[ids]
        some = list(until(answers, recipe.fit_tokens))
        about = make(folder, FitData(embedding, head, ids, states, some))
        write_json(folder / PREPARED, {"lost_mass": lost, **(about or {})})
    model, token_ids = load(folder, embedding)
    lost = lost_mass_of(recipe)
    print(f"draft: {recipe.kind}, trimmed head loses {lost:.2%} of p's mass")
    return PreparedDraft(model, token_ids, None, lost)


def first_rows(recipe: Recipe, target: Target) -> tuple[Tensor, Tensor | None]:
    """A head of the recipe's size [K, H] and its ids [K], None for all, for a draft to be timed.

    Which rows a head keeps depends on the answers: here they are the target's first.
    """
    head = target.model.get_output_embeddings().weight.detach()[: recipe.draft_vocab_size].clone()
    ids = torch.arange(len(head), device=target.decoder.device)
    return head, None if recipe.draft_vocab_size is None else ids


def read_prepared(recipe: Recipe, pair: Pair, load: Load = load_compact) -> PreparedDraft:
    """The untuned draft that `prepare_draft` has left, read again."""
    if recipe.draft is not None:
        return PreparedDraft(load_sibling(recipe.draft, pair), None, None, 0.0)
    folder = recipe.folder / "prepared"
    dtype = getattr(torch, recipe.dtype)
    model, token_ids = load(folder, pair.target_embedding(dtype))
    model.set_input_embeddings(FrozenEmbedding(pair.target_embedding(dtype)))
    head = load_file(folder / FULL_HEAD)["full_head"]
    return PreparedDraft(model, token_ids, head, lost_mass_of(recipe))


def _from_base(base: str, answers: Iterable[CachedAnswer], embedding: Tensor) -> PreparedDraft:
    """The base's draft as it stands; `lost_mass` on these answers. Raises ValueError for another
    target's.
    """
    model, token_ids = load_compact(base_draft(base) / "compact", embedding)
    mass = domain_mass(answers, len(embedding))
    lost = 0.0 if token_ids is None else lost_mass(mass, token_ids)
    return PreparedDraft(model, token_ids, full_head(base), lost)


def lost_mass_of(recipe: Recipe) -> float:
    """Share of the target's mass that the head of the run's prepared draft cannot draft."""
    if recipe.draft is not None:
        return 0.0
    return float(read_json(recipe.folder / "prepared" / PREPARED)["lost_mass"])


def print_coverage(pair: Pair, answers: Iterable[CachedAnswer]) -> None:
    """What share of the target's mass on the answers trimmed heads of each size would lose."""
    mass = domain_mass(answers, pair.vocab_size)
    print("draft_vocab_size  lost mass")
    for size, lost in coverage_curve(mass, forced_tokens(pair.target)):
        print(f"{size:>16}  {lost:.3%}")


def domain_mass(answers: Iterable[CachedAnswer], vocab_size: int) -> Tensor:
    """Probability the target gave each token over the cached positions, summed [V]."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for answer in answers:
        p = answer.top_logprobs.double().exp()
        mass.index_add_(0, answer.top_ids.flatten(), p.flatten())
    return mass


def head_tokens(
    answers: Iterable[CachedAnswer], vocab_size: int, size: int | None, forced: Iterable[int]
) -> tuple[Tensor | None, float]:
    """The `size` ids [K] that a trimmed head keeps, and the share of p's mass that it loses.

    size: None for a whole head, which loses nothing.
    """
    if size is None:
        return None, 0.0
    mass = domain_mass(answers, vocab_size)
    ids = choose_tokens(mass, size, forced)
    return ids, lost_mass(mass, ids)


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
    if target.get_output_embeddings().bias is not None:
        raise ValueError(
            "TOK-012: the target's head has a bias, which a refitted or trimmed head would lack; "
            "name a sibling with --draft."
        )
    target_head = target.get_output_embeddings().weight
    projection = _fit_projection(target, answers, num_layers, fit_tokens).to(target_head.device)
    full_head = torch.cat(
        [(rows.float() @ projection).to(rows.dtype) for rows in target_head.split(HEAD_ROWS)]
    )
    token_ids, lost = head_tokens(answers, len(target_head), head_size, forced_tokens)
    head = full_head if token_ids is None else full_head[token_ids]
    model = build_pruned(target, num_layers, head)
    return PreparedDraft(
        model=model,
        token_ids=token_ids,
        full_head=full_head,
        lost_mass=lost,
    )


def pruned_config(target: PreTrainedConfig, num_layers: int) -> Any:
    """The target's config for its first layers under a head of their own."""
    config: Any = copy.deepcopy(target)
    config.num_hidden_layers = num_layers
    config.tie_word_embeddings = False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    return config


def build_pruned(target: PreTrainedModel, num_layers: int, head: Tensor) -> PreTrainedModel:
    """The target's first layers, sharing its embedding, under a `head` [K, H] of their own.

    All on the embedding's device, wherever the target's layers are.
    """
    config, embedding = pruned_config(target.config, num_layers), input_embedding(target)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    kept = {
        name: tensor.to(embedding.device, copy=True)
        for name, tensor in target.model.state_dict().items()
        if not name.startswith("layers.") or int(name.split(".")[1]) < num_layers
    }
    kept["embed_tokens.weight"] = embedding
    # the fitted projection starts from the plain normalised state
    kept["norm.weight"] = torch.ones_like(kept["norm.weight"])
    model.model.load_state_dict(kept, assign=True)
    model.model.rotary_emb = type(target.model.rotary_emb)(config).to(embedding.device)
    model.lm_head = linear(head.to(embedding.device))
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.eval()


def _fit_projection(
    target: PreTrainedModel, answers: Iterable[CachedAnswer], num_layers: int, fit_tokens: int
) -> Tensor:
    """The matrix A [H, H] that minimises |A x - y|^2 from pruned to full final states, in fp32."""
    config: Any = target.config
    size, eps = config.hidden_size, config.rms_norm_eps
    fit = LeastSquares(size, size)
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
        for answer in until(answers, fit_tokens):
            ids = torch.cat([answer.prompt_ids, answer.response_ids])[None].to(target.device)
            target.model(input_ids=ids[:, :-1], use_cache=False)
            response = slice(len(answer.prompt_ids) - 1, None)
            x = F.rms_norm(seen["early"][0, response].float(), (size,), eps=eps)
            y = seen["final"][0, response].float()
            fit.add(x, y)
            bar.update(min(len(x), fit_tokens - bar.n))  # the last answer goes beyond
    finally:
        for hook in hooks:
            hook.remove()
        bar.close()
    return fit.solution()


class LeastSquares:
    """The matrix M that minimises |M x - y|^2 over all rows x [N, I] and y [N, O] added."""

    def __init__(self, inputs: int, outputs: int, ridge: float = FIT_RIDGE) -> None:
        """ridge: relative to the mean diagonal of the inputs' products."""
        self.ridge = ridge
        self.gram = torch.zeros(inputs, inputs, dtype=torch.float64)
        self.cross = torch.zeros(inputs, outputs, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        self.gram += (x.T @ x).cpu()
        self.cross += (x.T @ y.to(x.device)).cpu()

    def solution(self, inputs: int | None = None) -> Tensor:
        """M [O, I] in fp32; inputs: from the first so many alone."""
        gram, cross = self.gram[:inputs, :inputs], self.cross[:inputs]
        ridge = self.ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
        return torch.linalg.solve(gram + ridge, cross).T.float()


def until(answers: Iterable[CachedAnswer], tokens: int) -> Iterator[CachedAnswer]:
    """The first answers, as many as hold so many response tokens."""
    for answer in answers:
        if tokens <= 0:
            return
        tokens -= len(answer.response_ids)
        yield answer
