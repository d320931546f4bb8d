"""What was exported, loaded again as its users load it, and its alpha measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from align.machine import use_machine
from align.sources import load_model, read_json
from distill.models import target_device
from distill.recipe import read_yaml
from eval.decoding.build import build_decoder
from eval.decoding.drafters.adapter import merged_in_fp32
from eval.decoding.drafters.causal_lm import teacher_forced_logits
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.forward import HiddenStates
from eval.decoding.loop import Decoding
from eval.decoding.target import Target, load_target, weights_sha256
from eval.decoding.verification import Sampling, agreement, warp
from eval.measuring import metrics
from eval.measuring.agreement import target_texts
from eval.measuring.evaluation import context_length
from eval.measuring.journal import Journal
from eval.measuring.runs import Agreement
from eval.prompts import Lengths, PromptSet, load_prompts, render_set
from eval.reporting.report import Measured, Report

JOURNAL = Path("report", "reloaded.jsonl")  # what was measured, by the weights it was measured on
ALPHA_TOLERANCE = 0.01
DROPPED_LIMIT = 0.005
OWN_IDS = ("intersection", "string")  # strategies under which a draft's ids are not the target's

# q [1, R, V] of a text's R answer tokens under each sampling: (prompt ids, answer, samplings)
Forced = Callable[[list[int], list[int], Sequence[Sampling]], Iterator[Tensor]]


class ReloadError(ValueError):
    """An exported form that is not what the run measured."""


@dataclass(frozen=True)
class Form:
    """One form of a draft. name: as in the card. engine: whose loader read it.

    base: the model that an adapter is for. quantised: the weights are not the run's own, so that
    its alpha may be another.
    """

    name: str
    path: Path
    engine: str = "transformers"
    base: str | None = None
    quantised: bool = False


@dataclass(frozen=True)
class Reloaded:
    """alpha of a form; that minus the run's, paired by prompt; q's mass outside a trimmed head."""

    alpha: Measured
    apart: Measured
    dropped_mass: float | None = None


def reload_forms(run: Path, report: Report, forms: Sequence[Form]) -> dict[str, Reloaded]:
    """alpha of every form, by name, on the run's evaluation prompts, with the run's sampling.

    What was measured of the same weights before is kept in the run. Raises ReloadError for a form
    whose alpha differs from the run's by more than 0.01 and by more than chance (the interval of
    the paired difference excludes zero), or whose trimmed ids hold more than 0.5% of q's mass.
    """
    measurement = _Measurement(run, report)
    reloaded = {}
    for form in forms:
        reloaded[form.name] = measurement.of(form)
        check(form, reloaded[form.name], report)
    return reloaded


def check(form: Form, reloaded: Reloaded, report: Report) -> None:
    """Print what a form was found to be. Raises ReloadError where it is not what was measured."""
    alpha, mass = report.tuned[1].alpha, reloaded.dropped_mass
    assert alpha is not None
    print(f"{form.name}: alpha {reloaded.alpha:.4f}, in the run {alpha.mean:.4f}")
    if mass is not None:
        print(f"{form.name}: {mass:.3%} of q's mass on ids that the head dropped")
    if form.quantised:
        return
    if mass is not None and mass > DROPPED_LIMIT:
        raise ReloadError(
            f"The {form.name} gives {mass:.2%} of its probability to tokens that the trimmed head "
            f"dropped, over {DROPPED_LIMIT:.1%}, so sampled drafts would be tokens that it never "
            f"learnt; make the draft again with a larger draft_vocab_size or none."
        )
    apart = reloaded.apart
    low, high = apart.ci95 or (apart.mean, apart.mean)
    # the run measured the compact form, whose eight bits move a token or two of a few hundred
    if abs(apart.mean) > ALPHA_TOLERANCE and not low <= 0 <= high:
        raise ReloadError(
            f"The {form.name}, loaded again by {form.engine}, has alpha {reloaded.alpha.mean:.4f}, "
            f"but the run measured {alpha.mean:.4f}: more than {ALPHA_TOLERANCE} apart, so it is "
            f"not the draft that was measured. Evaluate the run again (python -m eval.run --run "
            f"DIR); if they still differ, the export is broken: report it."
        )


class _Measurement:
    """The run's prompts; its target, loaded once it is needed; what was measured before."""

    def __init__(self, run: Path, report: Report) -> None:
        self.run, self.report, decoding = run, report, report.decoding
        self.recipe = read_yaml(run / "recipe.yaml")
        self.sampling = Sampling(decoding.temperature, decoding.top_k, decoding.top_p)
        prompts = load_prompts(str(run / "prompts" / "eval.jsonl"))
        self.prompts = PromptSet(report.prompts.source, prompts, [])
        if self.prompts.sha256 != report.prompts.sha256:
            raise ReloadError(
                f"The report was made on other prompts ({report.prompts.sha256[:12]}…) than the "
                f"run's own ({self.prompts.sha256[:12]}…), so its alpha cannot be measured again; "
                f"evaluate the run: python -m eval.run --run {run}."
            )
        self.journal = Journal(run / JOURNAL)  # not deleted at the end, as an evaluation's is
        about = [report.prompts.sha256, report.dtype, asdict(self.sampling)]
        self.journal.begin(*about, decoding.max_new_tokens, report.target)

    @cached_property
    def target(self) -> Target:
        print(
            f"Measuring alpha of what was exported on {self.report.prompts.n} prompts: minutes on "
            "a CPU, kept for the next time.",
            flush=True,
        )
        use_machine()
        dtype, device = getattr(torch, self.report.dtype), target_device(self.recipe)
        target = load_target(self.recipe["target"], dtype, device, 64)
        room = target.model.config.get_text_config().max_position_embeddings
        new = self.report.decoding.max_new_tokens
        # of recipes of older versions, which lack these keys, none was cut
        lengths = Lengths(
            self.recipe.get("max_prompt_length"), self.recipe.get("long_prompts", "error")
        )
        self.prompts = render_set(
            self.prompts.source, self.prompts.prompts, target.tokenizer, room, new, lengths
        )
        target.decoder = build_decoder(target.model, context_length(self.prompts.ids, new, 1))
        return target

    def _texts(self) -> list[list[int]]:
        """The target's answers that alpha is taken on."""
        target, seed = self.target, self.report.provenance.get("seed", 0)
        assert isinstance(seed, int)
        new = self.report.decoding.max_new_tokens
        decoding = Decoding(self.sampling, target.stops, new, seed)
        return target_texts(target, self.prompts.ids, decoding)

    @torch.inference_mode()
    def of(self, form: Form) -> Reloaded:
        texts: list[list[int]] = self.journal.once("target texts", self._texts)
        samplings = [self.sampling, replace(self.sampling, temperature=1.0, top_k=None, top_p=1.0)]
        dropped, forced = self._dropped(form), None

        def measure(number: int, text: list[int]) -> list[float]:
            nonlocal forced
            target = self.target
            forced = forced or self._forced(form)
            ids = self.prompts.ids[number]
            if self.sampling.greedy:  # the text is the target's greedy choice at every position
                p = F.one_hot(torch.tensor([text]), target.vocab_size).to(target.decoder.device)
            else:
                scores = teacher_forced_logits(target.decoder, [*ids, *text[:-1]], len(ids))
                p = warp(scores, self.sampling)
            q, whole = forced(ids, text, samplings)
            mass = 0.0 if dropped is None else float(whole[..., dropped.to(whole.device)].sum())
            return [float(agreement(p.float(), q.float()).sum()), mass]

        stage = f"{form.name} {str(weights_sha256(str(form.path)))[:12]}"
        rows = self.journal.each(stage, texts, measure, lambda row: row, "prompt")
        agreements = [
            Agreement(prompt.id, prompt.category, alpha, len(text), group=prompt.group)
            for prompt, text, (alpha, _) in zip(self.prompts.prompts, texts, rows, strict=True)
        ]
        share = sum(mass for _, mass in rows) / sum(map(len, texts))
        return Reloaded(
            metrics.alpha(agreements),
            metrics.alpha_apart(agreements, self.report.tuned[1].agreements),
            None if dropped is None else share,
        )

    def _dropped(self, form: Form) -> Tensor | None:
        """The ids [K] that the compact form has no row for, of a form over the whole vocabulary."""
        compact = self.run / "draft" / "compact" / "model.safetensors"
        if form.engine == "draftsmith" or not compact.is_file():
            return None
        with safe_open(compact, "pt") as tensors:
            if "t2d" not in tensors.keys():  # noqa: SIM118 - a file of tensors is no mapping
                return None
            has_row: Tensor = tensors.get_tensor("t2d")
        return (~has_row).nonzero()[:, 0]

    def _forced(self, form: Form) -> Forced:
        strategy = read_json(self.run / "vocab_check.json")["used"]
        if form.engine == "draftsmith" or strategy in OWN_IDS:
            return _by_our_decoder(form, self.target, strategy)
        return _plain(form, self.target)


def _by_our_decoder(form: Form, target: Target, strategy: str) -> Forced:
    """q of a form that only our decoder runs, over the target's ids."""
    drafter = load_drafter(str(form.path), target, strategy)

    def forced(ids: list[int], text: list[int], samplings: Sequence[Sampling]) -> Iterator[Tensor]:
        states: HiddenStates = dict.fromkeys(drafter.layers)
        if states:
            teacher_forced_logits(target.decoder, [*ids, *text[:-1]], len(ids), states)
        return drafter.teacher_forced(ids, text, samplings, states)

    return forced


def _plain(form: Form, target: Target) -> Forced:
    """q of a checkpoint as transformers' AutoModelForCausalLM computes it, in the run's dtype."""
    dtype, device = target.decoder.dtype, target.decoder.device
    model: Any
    if form.base is None:
        model = load_model(str(form.path), dtype)
    else:
        model = merged_in_fp32(load_model(form.base, torch.float32), form.base, form.path, dtype)
    model = model.to(device)

    def forced(ids: list[int], text: list[int], samplings: Sequence[Sampling]) -> Iterator[Tensor]:
        tokens = torch.tensor([[*ids, *text[:-1]]], device=model.device)
        logits = model(tokens, logits_to_keep=len(text)).logits
        for sampling in samplings:
            q = warp(logits, sampling)[..., : target.vocab_size]
            yield F.pad(q, (0, target.vocab_size - q.shape[-1]))

    return forced
