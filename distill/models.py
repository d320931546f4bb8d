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
from align.checkpoint import Checkpoint
from align.errors import UserError
from align.transplant import resized, transplant
from align.trim import byte_units, choose_tokens
from align.vocab_map import VocabMap, build_map
from align.vocabulary import Vocabulary, mask_token
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
    """Target and draft, and how their vocabularies are mapped (align/check.py).

    Without a sibling `draft` is `target`. published: a draft of the recipe's kind that the run
    starts from. vocab_map: None if the strategy needs no map. layers: the target's hidden states
    that the draft reads; empty for most kinds. fit_layers: those that only its initialisation
    reads. mask: the id of the draft's mask; None for kinds without a mask. decoded_here: whether
    the reference decoder computes the target in this process.
    """

    target: Checkpoint
    draft: Checkpoint
    published: Checkpoint | None
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
        if head is None and not self.target.text_config.tie_word_embeddings:
            raise UserError(_quantised_end(self.target.spec, "lm_head"))
        return self.target_embedding(dtype) if head is None else head

    def _target_tensor(self, ending: str, dtype: torch.dtype) -> Tensor | None:
        def wanted(name: str) -> bool:
            return name.endswith(ending) and ".layers." not in name  # which an MTP head has

        for name, tensor in self.target.tensors(wanted).items():
            if not is_plain(tensor):
                raise UserError(_quantised_end(self.target.spec, name))
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


def open_models(recipe: Recipe) -> tuple[Checkpoint, Checkpoint | None]:
    """The recipe's target, and its draft: a sibling or a published draft."""
    draft = None if recipe.draft is None else Checkpoint.open(recipe.draft)
    return Checkpoint.open(recipe.target), draft


def check_models(recipe: Recipe, target: Checkpoint, draft: Checkpoint | None) -> Pair:
    """The pair, read from files alone. A dry run fetches no weights; a run fetches them all first.

    target, draft: of `open_models`. Raises UserError where the draft cannot be made or trained;
    SourceError names files that are missing, damaged, or of other tokenizers.
    """
    if recipe.device_map is not None and (processes := PartialState().num_processes) > 1:
        raise UserError(
            f"device_map is auto, but {processes} processes were started, each of which would put "
            "the whole target on the same GPUs; start one (accelerate launch --num_processes 1), "
            "or use a server (answers: server)."
        )
    remote, started = recipe.remote_target, recipe.answers == "vllm"
    for model in (None if remote else target, draft):
        if model is not None and not recipe.dry_run:
            model.fetch()
    sibling, published = (draft, None) if recipe.sibling is not None else (None, draft)
    decoded_here = not (remote or (started and (target.quantisation or too_large(recipe, target))))
    if decoded_here:
        for model in filter(None, (target, sibling)):
            refuse_undecodable(model.config)
    for model in filter(None, (target if decoded_here else None, draft)):
        model.refuse_quantised()
    words, drafted = target.vocabulary, (sibling or target).vocabulary
    verdict = compare(target, sibling or target)
    strategy = choose_strategy(verdict, recipe.strategy, tuned=True)
    print(f"vocabulary: relation {verdict.relation}, mapping {strategy}")
    vocab_map = build_map(words, drafted) if strategy in ("remap", "transplant") else None
    mask = mask_token(words) if recipe.kind.has_mask and published is None else None
    if recipe.cache_top_k > words.vocab_size:
        raise UserError(
            f"cache_top_k {recipe.cache_top_k} is more than the {words.vocab_size} tokens of the "
            "target's vocabulary; lower it."
        )
    if recipe.sibling is None:
        if not (decoded_here or recipe.kind.states_from_vllm):
            raise UserError(
                f"{recipe.target!r} is quantised or too large to be decoded here, but drafter "
                f"{recipe.kind_name!r} is made from its layers; use eagle3, medusa or dflash, or "
                "name a sibling with draft."
            )
        keeps_layers = recipe.kind.language_model
        num_layers = recipe.num_draft_layers if keeps_layers else 0
        check_prunable(words.config, num_layers, recipe.kind.targets)
        if started and recipe.kind.states_from_vllm:  # `target_ends` reads no model within another
            check_prunable(target.config.to_dict(), 0, recipe.kind.targets)
        # a published draft has chosen its entries
        if recipe.draft_vocab_size is not None and recipe.draft is None:
            mass = torch.zeros(words.vocab_size)
            choose_tokens(mass, recipe.draft_vocab_size, forced_tokens(words))
    for model in filter(None, (target if decoded_here else None, sibling)):
        if model.has_weights:
            model.load(torch.float32, "meta")
    about = None if published is None else published.config_json
    layers = recipe.kind.target_layers(words.config, about)
    fit_layers: tuple[int, ...] = ()
    if draft is None:
        fit_layers = recipe.kind.fit_layers(words.config, recipe.num_draft_layers)
    mapping = verdict, strategy, vocab_map
    pair = Pair(
        target, sibling or target, published, *mapping, layers, fit_layers, mask, decoded_here
    )
    if layers and not decoded_here and target.has_weights:
        pair.target_head(getattr(torch, recipe.dtype))  # refused before outputs are generated
    return pair


def target_ends(pair: Pair, dtype: torch.dtype, device: str) -> TargetEnds:
    """What feature drafts read of the target, from its checkpoint by name, on that device."""
    config = pair.target.config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(pruned_config(config, 1), dtype=dtype)
    read = {
        "model.embed_tokens.weight": pair.target_embedding(dtype),
        "lm_head.weight": pair.target_head(dtype),
    }
    unread = model.state_dict().keys() - read.keys()
    tensors = pair.target.tensors(unread.__contains__)
    read |= {name: tensor.to(dtype) for name, tensor in tensors.items() if is_plain(tensor)}
    on_device = {name: tensor.to(device) for name, tensor in read.items()}
    model.load_state_dict(on_device, strict=False, assign=True)
    if model.base_model.norm.weight.is_meta:
        raise UserError(
            f"{pair.target.spec!r} has no tensor model.norm.weight, which a draft reads; save it "
            "with save_pretrained of transformers, or name a sibling with draft."
        )
    model.config = config
    return TargetEnds(pair.target, model)


def with_published_kind(recipe: Recipe, target: Checkpoint, draft: Checkpoint | None) -> Recipe:
    """The recipe with the kind and head size of its published draft; else the same recipe.

    Raises UserError for a draft of another kind than the recipe names, or of another target.
    """
    if draft is None:
        return recipe
    about, published = draft.config_json, published_format(draft.folder)
    if published is None and recipe.kind.trained:  # the checkpoint of a target has a head
        return recipe
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
    text = target.text_config
    if recipe.drafter not in (None, published.name):
        raise UserError(
            f"drafter is {recipe.drafter!r}, but draft {recipe.draft!r} is of kind "
            f"{published.name!r}; leave drafter out."
        )
    published.check_config(draft.folder, text)
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
    kept = {*target.all_stops, *target.tokenizer.all_special_ids, *byte_units(target.tokens)}
    return {i for i in kept if i < target.vocab_size}  # a special token may have no entry


def target_loader(
    recipe: Recipe, pair: Pair, prompts: Prompts
) -> functools._lru_cache_wrapper[Target]:
    """A function that loads the target at its first call. Its `cache_clear` frees the target.

    The target's context is long enough for every prompt with its output. Raises UserError if
    the draft's context is shorter, and if a GPU is smaller than the target.
    """
    dtype, device = getattr(torch, recipe.dtype), target_device(recipe)
    sets = prompts.evaluation, prompts.training, prompts.tuning, prompts.held_out
    ids = [row for prompt_set in sets for row in prompt_set.ids]
    new = max(recipe.max_new_tokens, recipe.answer_max_new_tokens)
    needed = context_length(ids, new, recipe.max_gamma)
    if recipe.draft is not None and not recipe.remote_target:
        draft = pair.published or pair.draft
        if form := published_format(draft.folder):
            reads = form.positions(draft.config_json)
        else:
            reads = longest_context(draft.text_config)
        if reads is not None and reads < needed:
            raise UserError(
                f"draft {recipe.draft!r} reads {reads} positions, but the longest prompt and its "
                f"output take {needed}; lower max_prompt_length, "
                "max_new_tokens or answer_max_new_tokens, or name another draft. A published draft "
                "learns longer texts if its config.json has a larger max_position_embeddings."
            )
    here = not recipe.remote_target and recipe.answers != "vllm"
    if here and (sizes := too_large(recipe, pair.target)):
        raise UserError(
            f"{recipe.target!r} {sizes}. Spread it over several (accelerate launch --num_processes "
            "1 … --device_map auto), or let an engine compute it (answers: vllm, or server)."
        )
    return functools.cache(lambda: load_target(pair.target, dtype, device, needed))


def too_large(recipe: Recipe, target: Checkpoint) -> str:
    """The sizes of target and GPU, if the target is for one GPU and larger than it; else ""."""
    if target_device(recipe) != "cuda":
        return ""
    count, dtype = parameters(target.text_config), recipe.dtype
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
    model, words = pair.draft.load(torch.float32), pair.draft.vocabulary
    ends = vars(model.generation_config)
    # a config with a temperature but without do_sample cannot be saved
    model.generation_config = GenerationConfig(
        **{name: ends.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    )
    rows = pair.target.vocabulary.vocab_size
    if pair.vocab_map is not None:
        return transplant(model, pair.vocab_map, pair.target.vocabulary, words, rows)
    return resized(model, words, rows)


def head_entries(token_ids: Tensor | None, vocab_size: int) -> Tensor | None:
    """The entry of each target id in a trimmed head [V], else -1; None for an untrimmed head."""
    if token_ids is None:
        return None
    rows = torch.full((vocab_size,), -1)
    rows[token_ids.cpu()] = torch.arange(len(token_ids))
    return rows
