"""Target and draft of a run: checked as a pair first, then loaded.

Legend: V the target's vocabulary, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from align.check import Strategy, Verdict, choose_strategy, compare
from align.errors import UserError
from align.sources import (
    load_config,
    load_model,
    opened_weights,
    quantisation,
    read_json,
    refuse_quantised,
    resolve_checkpoint,
    weight_files,
    weights_cached,
)
from align.transplant import resized, transplant
from align.trim import byte_units, choose_tokens
from align.vocab_map import VocabMap, build_map
from align.vocabulary import Vocabulary, mask_token, read_vocabulary
from distill.drafters.kind import DraftKind, TargetEnds
from distill.drafters.pruned import pruned_config
from distill.prompt_sets import Prompts
from distill.recipe import Recipe, build_recipe
from eval.decoding.build import longest_context, refuse_undecodable
from eval.decoding.drafters.formats import published_format
from eval.decoding.target import Target, load_target
from eval.measuring.evaluation import context_length


@dataclass(frozen=True)
class Pair:
    """The vocabularies of target and draft, and how they are mapped (align/check.py).

    Without a sibling `draft` is `target`. vocab_map: None if the strategy needs no map. layers: the
    target's hidden states that the draft reads; empty for most kinds. fit_layers: those that only
    its initialisation reads. mask: the id of the draft's mask; None for kinds without a mask.
    decoded_here: whether the reference decoder computes the target in this process.
    """

    target: Vocabulary
    draft: Vocabulary
    verdict: Verdict
    strategy: Strategy
    vocab_map: VocabMap | None
    layers: tuple[int, ...]
    fit_layers: tuple[int, ...]
    mask: int | None
    decoded_here: bool

    def target_embedding(self, dtype: torch.dtype) -> Tensor:
        """The target's input embedding [V, H], on the CPU, memory-mapped from its file.

        Pages that are read stay in memory. The check of the embedding's hash reads all pages, so
        call this again for an embedding that stays. Raises UserError for a quantised embedding.
        """
        embedding = self._target_tensor("embed_tokens.weight", dtype)
        assert embedding is not None  # all types of DraftKind.targets have this tensor
        return embedding

    def target_head(self, dtype: torch.dtype) -> Tensor:
        """The target's LM head [V, H], like its embedding, which is also its head if it is tied."""
        head = self._target_tensor("lm_head.weight", dtype)
        if head is None and not load_config(self.target.spec).get_text_config().tie_word_embeddings:
            raise UserError(_quantised_end(self.target.spec, "lm_head"))
        return self.target_embedding(dtype) if head is None else head

    def _target_tensor(self, ending: str, dtype: torch.dtype) -> Tensor | None:
        for path in weight_files(self.target.folder):
            with opened_weights(path) as file:
                names = [n for n in file.keys() if n.endswith(ending)]  # noqa: SIM118
                if names := [n for n in names if ".layers." not in n]:  # else of an MTP head
                    tensor = file.get_tensor(names[0])
                    if not is_plain(tensor):
                        raise UserError(_quantised_end(self.target.spec, names[0]))
                    return tensor.to(dtype)
        return None


def is_plain(tensor: Tensor) -> bool:
    """Whether a checkpoint's tensor has numbers that need no scale."""
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1


def _quantised_end(spec: str, name: str) -> str:
    return (
        f"The tensor {name} of {spec!r} is quantised, and a draft reads it; use a checkpoint whose "
        "embedding and LM head are not quantised, or name a sibling with draft."
    )


def check_models(recipe: Recipe) -> Pair:
    """The pair, read from files alone. A dry run fetches no weights; a run fetches them all first.

    Raises UserError where the draft cannot be made or trained; SourceError names files that
    are missing, damaged, or of other tokenizers.
    """
    if recipe.device_map is not None and (processes := PartialState().num_processes) > 1:
        raise UserError(
            f"device_map is auto, but {processes} processes were started, each of which would put "
            "the whole target on the same GPUs; start one (accelerate launch --num_processes 1), "
            "or use a server (answers: server)."
        )
    served, fetch, started = recipe.served, not recipe.dry_run, recipe.answers == "vllm"
    target = read_vocabulary(recipe.target, fetch and not served, quantised=started)
    draft = target if recipe.sibling is None else read_vocabulary(recipe.sibling, weights=fetch)
    published = None  # config.json of a published draft that the recipe starts from
    if recipe.draft is not None and recipe.sibling is None:
        published = read_json(resolve_checkpoint(recipe.draft, weights=fetch) / "config.json")
    decoded_here = not (served or (started and (quantisation(target.folder) or too_large(recipe))))
    if decoded_here:
        refuse_quantised(recipe.target, target.folder)
        for spec in filter(None, (recipe.target, recipe.sibling)):
            refuse_undecodable(load_config(spec))
    verdict = compare(target, draft)
    strategy = choose_strategy(verdict, recipe.strategy, tuned=True)
    print(f"vocabulary: relation {verdict.relation}, mapping {strategy}")
    vocab_map = build_map(target, draft) if strategy in ("remap", "transplant") else None
    mask = mask_token(target) if recipe.kind.has_mask and published is None else None
    if recipe.cache_top_k > target.vocab_size:
        raise UserError(
            f"cache_top_k {recipe.cache_top_k} is more than the {target.vocab_size} tokens of the "
            "target's vocabulary; lower it."
        )
    if recipe.sibling is None:
        if not (decoded_here or recipe.kind.served_states):
            raise UserError(
                f"{recipe.target!r} is quantised or too large to be decoded here, but drafter "
                f"{recipe.kind_name!r} is made from its layers; use eagle3, medusa or dflash, or "
                "name a sibling with draft."
            )
        keeps_layers = recipe.kind.language_model
        num_layers = recipe.num_draft_layers if keeps_layers else 0
        check_prunable(target.config, num_layers, recipe.kind.targets)
        if started and recipe.kind.served_states:  # `target_ends` reads no model within another
            check_prunable(load_config(recipe.target).to_dict(), 0, recipe.kind.targets)
        if recipe.draft_vocab_size is not None:
            mass = torch.zeros(target.vocab_size)
            choose_tokens(mass, recipe.draft_vocab_size, forced_tokens(target))
    for spec in filter(None, (recipe.target if decoded_here else None, recipe.sibling)):
        if weights_cached(spec):
            load_model(spec, torch.float32, "meta")
    layers = recipe.kind.target_layers(target.config, published)
    fit_layers: tuple[int, ...] = ()
    if recipe.draft is None:
        fit_layers = recipe.kind.fit_layers(target.config, recipe.num_draft_layers)
    about = verdict, strategy, vocab_map, layers, fit_layers, mask, decoded_here
    pair = Pair(target, draft, *about)
    if layers and not decoded_here and weights_cached(recipe.target):
        pair.target_head(getattr(torch, recipe.dtype))  # refused before outputs are generated
    return pair


def target_ends(pair: Pair, dtype: torch.dtype, device: str) -> TargetEnds:
    """What feature drafts read of the target, from its checkpoint by name, on that device."""
    config = load_config(pair.target.spec)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(pruned_config(config, 1), dtype=dtype)
    read = {
        "model.embed_tokens.weight": pair.target_embedding(dtype),
        "lm_head.weight": pair.target_head(dtype),
    }
    wanted = model.state_dict().keys() - read.keys()
    for path in weight_files(pair.target.folder):
        with opened_weights(path) as file:
            tensors = {name: file.get_tensor(name) for name in wanted & set(file.keys())}
        read |= {name: tensor.to(dtype) for name, tensor in tensors.items() if is_plain(tensor)}
    on_device = {name: tensor.to(device) for name, tensor in read.items()}
    model.load_state_dict(on_device, strict=False, assign=True)
    if model.base_model.norm.weight.is_meta:
        raise UserError(
            f"{pair.target.spec!r} has no tensor model.norm.weight, which a draft reads; save it "
            "with save_pretrained of transformers, or name a sibling with draft."
        )
    model.config = config
    return TargetEnds(pair.target.spec, model)


def with_published_kind(recipe: Recipe) -> Recipe:
    """The recipe with the kind and head size of its published `draft`; else the same recipe.

    Raises UserError for a draft of another kind than the recipe names, or of another target.
    """
    if recipe.draft is None:
        return recipe
    folder = resolve_checkpoint(recipe.draft, weights=False)
    about = read_json(folder / "config.json")
    published = published_format(folder)
    if published is None:
        parallel = about.get("pard_token") is not None
        if parallel and recipe.drafter is None:
            return build_recipe(recipe.values() | {"drafter": "pard"})
        if (parallel and recipe.kind_name != "pard") or not recipe.kind.language_model:
            raise UserError(
                f"drafter is {recipe.kind_name!r}, but draft {recipe.draft!r} is of kind "
                f"{'pard' if parallel else 'sibling'!r}; leave drafter out."
            )
        return recipe
    size = published.head_size(about)
    text = load_config(recipe.target).get_text_config()
    if recipe.drafter not in (None, published.name):
        raise UserError(
            f"drafter is {recipe.drafter!r}, but draft {recipe.draft!r} is of kind "
            f"{published.name!r}; leave drafter out."
        )
    published.check_config(folder, text)
    trimmed = None if size == text.vocab_size else size
    keys = {"drafter": published.name, "draft_vocab_size": trimmed}
    return build_recipe(recipe.values() | keys)


def check_prunable(
    config: dict[str, Any], num_layers: int, targets: Sequence[str] = DraftKind.targets
) -> None:
    """Raise UserError where no draft of a kind can be made from the target of that config.

    num_layers: the layers that a pruned draft keeps; 0 for kinds that keep none. targets: see
    DraftKind.
    """
    if config["model_type"] not in targets:
        raise UserError(
            f"This draft cannot be made from a target of type {config['model_type']!r}, only from "
            f"{', '.join(targets)}; name a sibling with --draft, and --drafter sibling or pard."
        )
    if num_layers >= config["num_hidden_layers"]:
        raise UserError(
            f"num_draft_layers {num_layers} must be at least 1 and below the target's "
            f"{config['num_hidden_layers']} layers; use a smaller number."
        )


def forced_tokens(target: Vocabulary) -> set[int]:
    """Ids that a trimmed head always keeps: stops, special tokens, single-byte tokens."""
    return {*target.all_stops, *target.tokenizer.all_special_ids, *byte_units(target.tokens)}


def target_loader(recipe: Recipe, prompts: Prompts) -> functools._lru_cache_wrapper[Target]:
    """A function that loads the target at its first call. Its `cache_clear` frees the target.

    The target's context is long enough for every prompt with its output. Raises UserError if
    the draft's context is shorter, and if a GPU is smaller than the target.
    """
    dtype, device = getattr(torch, recipe.dtype), target_device(recipe)
    ids = prompts.evaluation.ids + prompts.training.ids + prompts.tuning.ids
    new = max(recipe.max_new_tokens, recipe.answer_max_new_tokens)
    needed = context_length(ids, new, recipe.max_gamma)
    if recipe.draft is not None and not recipe.served:
        folder = resolve_checkpoint(recipe.draft, weights=False)
        if form := published_format(folder):
            reads = form.positions(read_json(folder / "config.json"))
        else:
            reads = longest_context(load_config(recipe.draft).get_text_config())
        if reads is not None and reads < needed:
            raise UserError(
                f"draft {recipe.draft!r} reads {reads} positions, but the longest prompt and its "
                f"output take {needed}; lower max_prompt_length, "
                "max_new_tokens or answer_max_new_tokens, or name another draft. A published draft "
                "learns longer texts if its config.json has a larger max_position_embeddings."
            )
    if not recipe.served and recipe.answers != "vllm" and (sizes := too_large(recipe)):
        raise UserError(
            f"{recipe.target!r} {sizes}. Spread it over several (accelerate launch --num_processes "
            "1 … --device_map auto), or let an engine compute it (answers: vllm, or server)."
        )
    return functools.cache(lambda: load_target(recipe.target, dtype, device, needed))


def too_large(recipe: Recipe) -> str:
    """The sizes of target and GPU, if the target is for one GPU and larger than it; else ""."""
    if target_device(recipe) != "cuda":
        return ""
    count, dtype = parameters(load_config(recipe.target).get_text_config()), recipe.dtype
    size, total = count * getattr(torch, dtype).itemsize, torch.cuda.mem_get_info()[1]
    sizes = f"takes {size / 2**30:.0f} GiB, but a GPU here has {total / 2**30:.0f}"
    return sizes if size > total else ""


def parameters(config: PreTrainedConfig) -> int:
    """The number of parameters of a model of this config. Tied weights count once."""
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config).num_parameters())


def target_device(recipe: Recipe) -> str:
    """The device of the target, as an argument of `load_target`."""
    if recipe.device_map is not None:
        return recipe.device_map
    on_gpu = torch.cuda.is_available() and not recipe.training.get("use_cpu", False)
    return "cuda" if on_gpu else "cpu"


def load_sibling(pair: Pair) -> PreTrainedModel:
    """The pair's draft in fp32, over the target's vocabulary."""
    model = load_model(pair.draft.spec, torch.float32)
    ends = vars(model.generation_config)
    # a config with a temperature but without do_sample cannot be saved
    model.generation_config = GenerationConfig(
        **{name: ends.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    if pair.vocab_map is not None:
        rows = pair.target.vocab_size
        return transplant(model, pair.vocab_map, pair.target, pair.draft, rows)
    return resized(model, pair.draft, pair.target.vocab_size)


def head_entries(token_ids: Tensor | None, vocab_size: int) -> Tensor | None:
    """The entry of each target id in a trimmed head [V], else -1; None for an untrimmed head."""
    if token_ids is None:
        return None
    rows = torch.full((vocab_size,), -1)
    rows[token_ids.cpu()] = torch.arange(len(token_ids))
    return rows
