"""What was exported, loaded again as its users load it, and its alpha measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from peft import PeftModel
from safetensors import safe_open
from torch import Tensor

from align.atomic import atomic_file
from align.process import use_machine
from align.sources import load_model, read_json
from distill.models import target_device
from distill.recipe import read_yaml
from eval.decoding.build import build_decoder
from eval.decoding.drafters.checkpoint import teacher_forced_logits
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
from eval.prompts import PromptSet, load_prompts, render_all
from eval.reporting.report import Measured, Report

KEPT = Path("report", "reloaded.json")  # what was measured, by the weights it was measured on
JOURNAL = Path("report", "reloaded.jsonl")
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
    its alpha may be another. without_states: of a draft that was measured with the target's, too.
    """

    name: str
    path: Path
    engine: str = "transformers"
    base: str | None = None
    quantised: bool = False
    without_states: bool = False


@dataclass(frozen=True)
class Reloaded:
    """alpha of a form, and the share of q's mass on ids that the trimmed head has no row for."""

    sha256: str
    alpha: Measured
    dropped_mass: float | None = None


def reload_forms(run: Path, report: Report, forms: Sequence[Form]) -> dict[str, Reloaded]:
    """alpha of every form, by name, on the run's evaluation prompts, with the run's sampling.

    What was measured of the same weights before is taken from `report/reloaded.json`. Raises
    ReloadError for a form whose alpha is not the run's within 0.01, or whose trimmed ids hold more
    than 0.5% of q's mass.
    """
    found = _Measurement(run, report)
    shas = {form.name: weights_sha256(str(form.path)) for form in forms}
    new = [form for form in forms if shas[form.name] not in found.kept]
    if new:
        print(
            f"Loading {', '.join(form.name for form in new)} again and measuring alpha on "
            f"{report.prompts.n} prompts: minutes on a CPU, kept for the next time.",
            flush=True,
        )
        found.measure(new)
    measured = {}
    for form in forms:
        sha256 = shas[form.name]
        assert sha256 is not None
        measured[form.name] = one = found.kept[sha256]
        check(form, one, report)
    return measured


def check(form: Form, found: Reloaded, report: Report) -> None:
    """Print what a form was found to be. Raises ReloadError where it is not what was measured."""
    alpha = report.tuned[1].alpha
    assert alpha is not None
    print(f"{form.name}: alpha {found.alpha:.4f}, in the run {alpha.mean:.4f}")
    if found.dropped_mass is not None:
        print(f"{form.name}: {found.dropped_mass:.3%} of q's mass on ids that the head dropped")
        if found.dropped_mass > DROPPED_LIMIT and not form.quantised:
            raise ReloadError(
                f"The {form.name} gives {found.dropped_mass:.2%} of its probability to tokens that "
                f"the trimmed head dropped, over {DROPPED_LIMIT:.1%}, so sampled drafts would be "
                "tokens that it never learnt. If an earlier version exported it, make the draft "
                "again in a new folder; if this one did, with a larger draft_vocab_size or none."
            )
    own_alpha = form.quantised or form.without_states
    if not own_alpha and abs(found.alpha.mean - alpha.mean) > ALPHA_TOLERANCE:
        raise ReloadError(
            f"The {form.name}, loaded again by {form.engine}, has alpha {found.alpha.mean:.4f}, "
            f"but the run measured {alpha.mean:.4f}: more than {ALPHA_TOLERANCE} apart, so it is "
            f"not the draft that was measured. Evaluate the run again (python -m eval.run --run "
            f"DIR); if they still differ, the export is broken: report it."
        )


class _Measurement:
    """The run's target and prompts, loaded once they are needed, and what was measured before."""

    def __init__(self, run: Path, report: Report) -> None:
        self.run, self.report = run, report
        self.recipe = read_yaml(run / "recipe.yaml")
        decoding = report.decoding
        self.sampling = Sampling(decoding.temperature, decoding.top_k, decoding.top_p)
        about = [report.prompts.sha256, report.dtype, asdict(self.sampling)]
        self.about = [*about, decoding.max_new_tokens, report.target]
        self.texts: list[list[int]] | None = None
        self.kept: dict[str, Reloaded] = {}
        if (run / KEPT).is_file():
            before = read_json(run / KEPT)
            if before["about"] == self.about:
                self.texts = before["texts"]
                for sha256, one in before["forms"].items():
                    alpha = Measured.model_validate(one["alpha"])
                    self.kept[sha256] = Reloaded(sha256, alpha, one["dropped_mass"])

    def measure(self, forms: Sequence[Form]) -> None:
        """Add what the forms are to `kept`, and keep it on disk."""
        target, prompts = self._loaded()
        strategy = read_json(self.run / "vocab_check.json")["used"]
        how = Decoding(
            self.sampling, target.stops, self.report.decoding.max_new_tokens, self._seed()
        )
        with Journal(self.run / JOURNAL) as journal:
            journal.begin(self.about, [weights_sha256(str(form.path)) for form in forms])
            self.texts = self.texts or journal.once(
                "target texts", lambda: target_texts(target, prompts.ids, how)
            )
            for form in forms:
                one = self._one(form, target, prompts, strategy, journal)
                self.kept[one.sha256] = one
        with atomic_file(self.run / KEPT) as file:
            forms_kept = {
                sha: {"alpha": one.alpha.model_dump(), "dropped_mass": one.dropped_mass}
                for sha, one in self.kept.items()
            }
            json.dump({"about": self.about, "texts": self.texts, "forms": forms_kept}, file)

    def _seed(self) -> int:
        seed = self.report.provenance.get("seed", 0)
        assert isinstance(seed, int)
        return seed

    def _loaded(self) -> tuple[Target, PromptSet]:
        use_machine()
        given = load_prompts(str(self.run / "prompts" / "eval.jsonl"))
        dtype, device = getattr(torch, self.report.dtype), target_device(self.recipe)
        target = load_target(self.recipe["target"], dtype, device, 64)
        new = self.report.decoding.max_new_tokens
        room = target.model.config.get_text_config().max_position_embeddings
        prompts = PromptSet(
            self.report.prompts.source, given, render_all(given, target.tokenizer, room, new)
        )
        if prompts.sha256 != self.report.prompts.sha256:
            raise ReloadError(
                f"The report was made on other prompts ({self.report.prompts.sha256[:12]}…) than "
                f"the run's own ({prompts.sha256[:12]}…), so its alpha cannot be measured again; "
                f"evaluate the run: python -m eval.run --run {self.run}."
            )
        target.decoder = build_decoder(target.model, context_length(prompts.ids, new, 1))
        return target, prompts

    @torch.inference_mode()
    def _one(
        self, form: Form, target: Target, prompts: PromptSet, strategy: str, journal: Journal
    ) -> Reloaded:
        ours = form.engine == "draftsmith" or strategy in OWN_IDS
        forced = _by_our_decoder(form, target, strategy) if ours else _plain(form, target)
        dropped = self._dropped(form, target)
        samplings = [self.sampling, replace(self.sampling, temperature=1.0, top_k=None, top_p=1.0)]
        assert self.texts is not None

        def measure(_: int, row: tuple[list[int], list[int]]) -> list[float]:
            ids, text = row
            if self.sampling.greedy:  # the text is the target's greedy choice at every position
                p = F.one_hot(torch.tensor([text]), target.vocab_size).to(target.decoder.device)
            else:
                scores = teacher_forced_logits(target.decoder, [*ids, *text[:-1]], len(ids))
                p = warp(scores, self.sampling)
            q, whole = forced(ids, text, samplings)
            alpha = float(agreement(p.float(), q.float()).sum())
            mass = 0.0 if dropped is None else float(whole[..., dropped].sum())
            return [alpha, float(len(text)), mass]

        rows = journal.each(
            form.name,
            list(zip(prompts.ids, self.texts, strict=True)),
            measure,
            lambda row: row,
            "prompt",
        )
        agreements = [
            Agreement(prompt.id, prompt.category, alpha, int(positions), group=prompt.group)
            for prompt, (alpha, positions, _) in zip(prompts.prompts, rows, strict=True)
        ]
        sha256 = weights_sha256(str(form.path))
        assert sha256 is not None
        share = sum(row[2] for row in rows) / sum(row[1] for row in rows)
        return Reloaded(sha256, metrics.alpha(agreements), None if dropped is None else share)

    def _dropped(self, form: Form, target: Target) -> Tensor | None:
        """The ids [K] that the compact form has no row for, of a form over the whole vocabulary."""
        compact = self.run / "draft" / "compact" / "model.safetensors"
        if form.engine == "draftsmith" or not compact.is_file():
            return None
        with safe_open(compact, "pt") as tensors:
            if "t2d" not in tensors.keys():  # noqa: SIM118 - a file of tensors is no mapping
                return None
            has_row: Tensor = tensors.get_tensor("t2d")
        return (~has_row).nonzero()[:, 0].to(target.decoder.device)


def _by_our_decoder(form: Form, target: Target, strategy: str) -> Forced:
    """q of a form that only our decoder runs, over the target's ids."""
    drafter = load_drafter(str(form.path), target, strategy)

    def forced(ids: list[int], text: list[int], how: Sequence[Sampling]) -> Iterator[Tensor]:
        states: HiddenStates = dict.fromkeys(drafter.layers)
        if states:
            teacher_forced_logits(target.decoder, [*ids, *text[:-1]], len(ids), states)
        return drafter.teacher_forced(ids, text, how, states)

    return forced


def _plain(form: Form, target: Target) -> Forced:
    """q of a checkpoint as transformers' AutoModelForCausalLM computes it, in the run's dtype."""
    dtype, device = target.decoder.dtype, target.decoder.device
    model: Any
    if form.base is None:
        model = load_model(str(form.path), dtype)
    else:
        whole: Any = PeftModel.from_pretrained(load_model(form.base, torch.float32), form.path)
        model = whole.merge_and_unload().eval()
        for weight in model.parameters():
            # and not the rotary frequencies, as in a checkpoint
            weight.data = weight.data.to(dtype)
    model = model.to(device)

    def forced(ids: list[int], text: list[int], how: Sequence[Sampling]) -> Iterator[Tensor]:
        tokens = torch.tensor([[*ids, *text[:-1]]], device=model.device)
        logits = model(tokens, logits_to_keep=len(text)).logits
        for sampling in how:
            q = warp(logits, sampling)[..., : target.vocab_size]
            yield F.pad(q, (0, target.vocab_size - q.shape[-1]))

    return forced
