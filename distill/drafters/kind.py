"""The interface of a kind of draft in training: a file in this folder that defines KIND.

The file of the same name in eval/decoding/drafters has what the kind needs to draft.
docs/developing.md tells how a kind is added. Legend: P prompt and R response tokens of a text, L
layers read, V the target's vocabulary, K entries of the draft's head, H hidden size.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from align.checkpoint import Checkpoint
from distill import drafters
from distill.drafters.batch import HeadInput, Plan, TrainingBatch
from distill.teacher.store import CachedAnswer
from eval.decoding.forward import input_embedding
from eval.decoding.target import Target

Config = Mapping[str, Any]  # the content of a config.json
RATED_WIDTH = 576  # the hidden size of the drafts that `DraftKind.rate` was found with


class TargetEnds(NamedTuple):
    """What drafts read of a target that only an engine can compute.

    model: the target's config; its embedding, final norm and LM head; and of its layers the first.
    A weight that the checkpoint has only quantised is empty (on the device `meta`).
    """

    checkpoint: Checkpoint
    model: PreTrainedModel


@dataclass(frozen=True)
class Origin:
    """What a base draft is made from: the arguments of `DraftKind.initialise`.

    token_ids: target ids of a trimmed head [K]; None for a head over all of V. texts: outputs for
    the least-squares initialisation; without texts there is none. layers: the target's states that
    the draft reads; `states` returns them at all tokens of a text but the last [P + R - 1, L, H],
    and `fit_states` those of `DraftKind.fit_layers`.
    mask: the id of the draft's mask token, for kinds that have one. published: the folder of a
    draft of this kind, whose weights and head are taken instead. ttt_steps: steps of a draft that
    are trained together, for kinds that read their own states. lora_r, lora_alpha: of kinds that
    are an adapter.
    """

    target: Target | TargetEnds
    token_ids: Tensor | None
    texts: Sequence[CachedAnswer]
    num_layers: int
    max_gamma: int
    layers: tuple[int, ...] = ()
    mask: int | None = None
    published: Path | None = None
    states: Callable[[CachedAnswer], Tensor] | None = None
    ttt_steps: int = 3
    fit_states: Callable[[CachedAnswer], Tensor] | None = None
    lora_r: int = 64
    lora_alpha: int = 128

    @property
    def embedding(self) -> Tensor:
        """The target's input embedding [V, H]."""
        return input_embedding(self.target.model)

    def head(self) -> Tensor:
        """The target's LM head, cut to the vocabulary entries of `token_ids` [K, H]."""
        weight = self.target.model.get_output_embeddings().weight.detach()
        return weight.clone() if self.token_ids is None else weight[self.token_ids]


class Draft(NamedTuple):
    """A draft in training. No weight that is trained is shared with the target.

    token_ids: target id of each entry of its head [K]; None for a head over all of V.
    """

    model: PreTrainedModel
    token_ids: Tensor | None = None


class DraftKind:
    """The drafts of one kind: how they are initialised, trained and saved.

    A kind that is made from the target defines `initialise`, `save` and `load`, or is a subclass of
    `Pruned`. made_from: what a draft can be made from. language_model: whether the draft is a
    causal LM, which may have adapters, another tokenizer, a GGUF file; if it is made from the
    target, it keeps the first num_draft_layers layers. rate: the usual learning rate of a new draft
    of hidden size RATED_WIDTH, without LoRA; a wider draft has a lower rate (`usual_rate`), at
    least least_rate. warmup: its steps until the whole rate; a training of fewer never has it.
    fitted_weights: beginnings of the names of least-squares-initialised weights, which need a lower
    rate. has_mask: whether the draft reads a token that occurs in no text (`Origin.mask`).
    added_modules: names of the modules that are added to a language model and are trained in full
    with LoRA, too. targets: types of the targets that a draft is made from. trained: whether the
    target's checkpoint has a trained base draft. unused: keys of a recipe that must have no value.
    states_from_vllm: whether the target's states may come from a vLLM (vllm_states.py), which
    computes quantised and large targets. adapter: whether the draft is a LoRA on the whole target,
    which SGLang alone serves.
    """

    made_from: tuple[Literal["target", "sibling"], ...] = ("target",)
    language_model = False
    rate, least_rate = 3e-3, 5e-5
    warmup = 30
    fitted_weights: tuple[str, ...] = ()
    has_mask = False
    added_modules: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("llama", "qwen2", "qwen3", "mistral")
    trained = False
    unused: tuple[str, ...] = ()
    states_from_vllm = False
    adapter = False

    @property
    def name(self) -> str:
        """The name of the kind's file, as in recipes and in compact.json."""
        return type(self).__module__.rpartition(".")[2]

    def target_layers(self, target: Config, published: Config | None = None) -> tuple[int, ...]:
        """The target's hidden states that a draft reads, numbered as in eval/decoding/forward.py.

        target: the target's config. published: config.json of a published draft.
        """
        return ()

    def num_layers(self, wanted: int, published: Config | None = None) -> int:
        """The number of layers of a draft that keeps none of the target's.

        wanted: num_draft_layers. published: config.json of a published draft.
        """
        return 1

    def fit_layers(self, target: Config, num_layers: int) -> tuple[int, ...]:
        """The target's hidden states that only the least-squares initialisation reads.

        num_layers: num_draft_layers.
        """
        return ()

    def initialise(self, origin: Origin) -> Draft:
        """The base draft that is made from the target, or read from `origin.published`. The head
        of a language model is trimmed when `load` reads it.

        Its model is a PreTrainedModel, because peft and FSDP wrap it. Since
        `origin.published` was trained, the target may have been fine-tuned. Raises UserError for a
        published draft of another target, or one that cannot be trained here.
        """
        raise NotImplementedError

    def from_sibling(self, model: PreTrainedModel, mask: int | None, max_gamma: int) -> None:
        """Make a sibling over the target's ids a draft of this kind, in place. mask: see Origin."""

    def save(self, folder: Path, draft: Draft, embedding: Tensor, target: Checkpoint) -> None:
        """Write the draft to an existing folder, as `load` and the reference decoder read it.

        embedding: the target's [V, H]; the draft gets its dtype, and its hash is stored.
        """
        raise NotImplementedError

    def load(self, folder: Path, embedding: Tensor, head: Callable[[], Tensor]) -> Draft:
        """The draft that `save` wrote, ready to be trained on the target's embedding.

        head: returns the target's LM head [V, H]. Raises UserError if the draft was made for
        another target.
        """
        raise NotImplementedError

    def exported(self, model: PreTrainedModel) -> PreTrainedModel:
        """A trained language model in the form that engines load."""
        return model

    def packs(self, model: PreTrainedModel) -> bool:
        """Whether a row of a batch may have several texts. Else it has one."""
        return True

    def plan(self, model: PreTrainedModel, batch: TrainingBatch, training: bool) -> Plan | None:
        """What the draft reads beside the batch's texts, and what it learns; made on the CPU.

        training: False for a measurement: then all positions are anchors (`HeadInput.states`).
        """
        return None

    def head_input(self, model: PreTrainedModel, batch: TrainingBatch) -> HeadInput:
        """The LM head's inputs for all draft tokens of the batch's plan."""
        raise NotImplementedError


@functools.cache
def kinds() -> dict[str, DraftKind]:
    """Every kind of draft by its name: the files in this folder that define KIND."""
    names = [module.name for module in pkgutil.iter_modules(drafters.__path__)]
    modules = [importlib.import_module(f"{drafters.__name__}.{name}") for name in names]
    return {module.KIND.name: module.KIND for module in modules if hasattr(module, "KIND")}
