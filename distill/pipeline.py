"""The main job's stages; each finds what an interrupted run left and goes on from there."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from accelerate import PartialState
from safetensors import safe_open
from safetensors.torch import load_file, save, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from align.atomic import atomic_file, atomic_folder
from align.check import choose_strategy, compare
from align.checks import VOCAB_MAP
from align.process import use_machine
from align.side import read_side
from align.sources import load_model, load_tokenizer, resolve_checkpoint
from align.token_bytes import token_keys
from align.transplant import transplant
from align.trim import byte_units, coverage_curve
from align.vocab_map import Reader, VocabMap, build_map, load_map, save_map
from distill.answers import answer_prompts, hash_prompts
from distill.logit_cache import LogitCache
from distill.prepare import (
    PreparedDraft,
    domain_mass,
    full_vocabulary,
    head_rows,
    prune_and_fit,
)
from distill.prompts import evaluation_prompts, training_prompts, tuning_split
from distill.publish import write_card
from distill.recipe import Recipe, RecipeError, dump
from distill.trainer import build_trainer, distil, training_config
from eval.decoding.drafts import (
    Candidate,
    Target,
    compact_candidate,
    load_candidate,
    load_compact,
    load_target,
    save_compact,
)
from eval.decoding.forward import build_decoder
from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.measuring.evaluation import Plan, PromptSet, context_length, evaluate_drafts
from eval.measuring.journal import JOURNAL, Journal
from eval.prompts import prompts_sha256, render_all, write_prompts
from eval.reporting.report import write_report

# What two runs of one folder may differ in.
FREE_KEYS = {
    "dry_run",
    "coverage_curve",
    "resume_from_checkpoint",
    "output_dir",
    "logging_steps",
    "save_steps",
}
PACKAGES = "torch transformers trl peft accelerate datasets evaluate gguf safetensors".split()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Run:
    """One run of a recipe in its output folder. Stages are called in order by distill/train.py."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe, self.folder = recipe, recipe.folder
        use_machine(PartialState().num_processes)
        training_config(recipe)  # a value that transformers refuses is found now, not after minutes
        self.sampling = Sampling(recipe.temperature, recipe.top_k, recipe.top_p)
        self.started = time.time()
        if not recipe.dry_run:
            self._refuse_another_run()

    def _refuse_another_run(self) -> None:
        path = self.folder / "recipe.yaml"
        if path.exists():
            found, asked = yaml.safe_load(path.read_text()) or {}, yaml.safe_load(dump(self.recipe))
            changed = sorted(
                key
                for key in (found.keys() | asked.keys()) - FREE_KEYS
                if found.get(key) != asked.get(key)
            )
            if changed:
                detail = "; ".join(f"{k}: {found.get(k)!r} -> {asked.get(k)!r}" for k in changed)
                raise RecipeError(
                    f"{self.folder} holds a run of another recipe ({detail}). Give --output_dir a "
                    "new folder, or delete that one."
                )

    # --- check

    def check_vocabularies(self) -> None:
        """recipe.yaml, vocab_check.json and the map; a pair that cannot be tuned leaves nothing."""
        recipe = self.recipe
        target = read_side(recipe.target)
        draft = target if recipe.draft is None else read_side(recipe.draft)
        self.sides, self.verdict = (target, draft), compare(target, draft)
        self.strategy = choose_strategy(self.verdict, recipe.strategy, tuned=True)
        print(f"vocabulary: {self.verdict.relation}, strategy {self.strategy}")
        if draft.head_bias or draft.logit_changes:
            raise ValueError(
                f"TOK-012: the head of {draft.spec!r} has "
                f"{'a bias' if draft.head_bias else draft.logit_changes}, which neither the loss "
                "nor new or trimmed rows take over, so it can draft as it is (eval.run) but not be "
                "tuned here; name another draft with --draft."
            )
        self.vocab_map: VocabMap | None = None
        path = self.folder / VOCAB_MAP
        if self.strategy in ("remap", "transplant", "intersection"):
            if path.exists():
                self.vocab_map = load_map(path, target, draft)
            else:
                self.vocab_map = build_map(target, draft)
        if not recipe.dry_run:
            with atomic_file(self.folder / "recipe.yaml") as file:
                file.write(dump(recipe))
            if self.vocab_map is not None and not path.exists():
                save_map(path, self.vocab_map)
            with atomic_file(self.folder / "vocab_check.json") as file:
                json.dump(self.verdict.to_json() | {"used": self.strategy}, file, indent=2)

    # --- prompts

    def collect_prompts(self) -> None:
        """Training, tuning and evaluation prompts that do not overlap, rendered to ids."""
        recipe = self.recipe
        evaluation = evaluation_prompts(recipe.eval_prompts, recipe.max_eval_prompts, recipe.seed)
        limit = recipe.max_train_prompts + recipe.tuning_prompts
        prompts, self.overlap = training_prompts(
            recipe.train_prompts, evaluation, limit, recipe.seed
        )
        tuning, training = tuning_split(prompts, recipe.tuning_prompts)
        self.evaluation = self._rendered(recipe.eval_prompts, evaluation, recipe.max_new_tokens)
        self.tuning = self._rendered(recipe.train_prompts, tuning, recipe.max_new_tokens)
        self.training = self._rendered(recipe.train_prompts, training, recipe.answer_max_new_tokens)
        tokens = sum(map(len, self.training.ids))
        print(
            f"prompts: {len(training)} to train on ({tokens} tokens), "
            f"{len(tuning)} to choose gamma, {len(evaluation)} to evaluate; "
            f"{self.overlap.dropped} dropped as near-duplicates"
        )
        if not recipe.dry_run:
            for name, part in (("train", training), ("tuning", tuning), ("eval", evaluation)):
                write_prompts(self._made("prompts") / f"{name}.jsonl", part)

    def _rendered(self, source: str, prompts: list[Any], new_tokens: int) -> PromptSet:
        config = self.target.model.config.get_text_config()
        limit = config.max_position_embeddings - self.recipe.max_gamma - 1
        ids = render_all(prompts, self.target.tokenizer, limit, new_tokens)
        return PromptSet(source, prompts, ids)

    def _made(self, name: str) -> Path:
        (self.folder / name).mkdir(parents=True, exist_ok=True)
        return self.folder / name

    # --- models

    @cached_property
    def target(self) -> Target:
        """The target; its decoder is for short contexts until `fit_contexts` lengthens it."""
        device = torch.device("cuda" if self._on_gpu else "cpu")
        return load_target(self.recipe.target, getattr(torch, self.recipe.dtype), device, 64)

    @property
    def _on_gpu(self) -> bool:
        return torch.cuda.is_available() and not self.recipe.training.get("use_cpu", False)

    def fit_contexts(self) -> None:
        """Make the target's decoder long enough for every prompt and its answer."""
        recipe = self.recipe
        new = max(recipe.max_new_tokens, recipe.answer_max_new_tokens)
        ids = self.evaluation.ids + self.training.ids + self.tuning.ids
        length = context_length(ids, new, recipe.max_gamma)
        if self.target.decoder.context_length < length:
            self.target.decoder = build_decoder(self.target.model, length)

    @cached_property
    def target_hashes(self) -> dict[str, str]:
        """What decides p: weights, tokenizer, chat template."""
        folder = resolve_checkpoint(self.recipe.target)
        weights = hashlib.sha256()
        for path in sorted(folder.glob("*.safetensors")):
            weights.update(file_sha256(path).encode())
        template = self.target.tokenizer.chat_template or ""
        return {
            "target weights": weights.hexdigest(),
            "tokenizer": file_sha256(folder / "tokenizer.json"),
            "chat template": hashlib.sha256(str(template).encode()).hexdigest(),
            "dtype": self.recipe.dtype,
        }

    @property
    def embedding(self) -> Tensor:
        """The target's input embedding [V, H], which a pruned draft shares."""
        return self.target.decoder.embedding

    # --- answers

    @property
    def vocab_size(self) -> int:
        return self.embedding.shape[0]

    def answer_prompts(self) -> None:
        """The target's answers and distributions, in `answers/`."""
        recipe = self.recipe
        self.fit_contexts()
        ids = self.training.ids * recipe.answers_per_prompt
        clock = time.time()
        self.cache: LogitCache = answer_prompts(
            self.target.decoder,
            ids,
            self.folder / "answers",
            self.target_hashes,
            self.vocab_size,
            self.target.stops,
            Sampling(recipe.answer_temperature),
            recipe.answer_max_new_tokens,
            recipe.answer_batch_size,
            recipe.cache_top_k,
            recipe.seed,
        )
        # by index: the order on disk is the order in which answers finished
        self.answers = sorted(self.cache, key=lambda answer: answer.index)
        tokens = sum(len(answer.response_ids) for answer in self.answers)
        seconds = time.time() - clock
        print(
            f"answers: {tokens} tokens in {seconds:.0f} s, "
            f"{self.cache.bytes_per_token():.0f} B each"
        )

    # --- the draft

    def prepare_draft(self) -> None:
        """The untuned draft: the sibling as it is, or `prepared/` from the pruned target."""
        recipe = self.recipe
        if recipe.draft is not None:
            self.prepared = PreparedDraft(self.sibling(recipe.draft), None, None, 0.0)
            return
        folder, embedding = self.folder / "prepared", self.embedding
        if not (folder / "complete").exists():
            prepared = prune_and_fit(
                self.target.model,
                self.answers,
                recipe.num_draft_layers,
                recipe.fit_tokens,
                recipe.draft_vocab_size,
                self._forced_tokens(),
            )
            save_compact(folder, prepared.model, prepared.token_ids, embedding)
            full_head = prepared.full_head
            assert full_head is not None
            with atomic_file(folder / "full_head.safetensors", "wb") as file:
                file.write(save({"full_head": full_head}, {"lost_mass": str(prepared.lost_mass)}))
            with atomic_file(folder / "complete") as file:
                file.write("\n")
        model, token_ids = load_compact(folder, embedding)
        with safe_open(folder / "full_head.safetensors", "pt") as weights:
            full_head = weights.get_tensor("full_head")
            lost = float(weights.metadata()["lost_mass"])
        self.prepared = PreparedDraft(model, token_ids, full_head, lost)
        print(f"draft: {recipe.num_draft_layers} layers, trimmed head loses {lost:.2%} of p's mass")

    def sibling(self, spec: str) -> PreTrainedModel:
        """The draft of that spec in fp32, on the target's ids where the strategy re-homes it."""
        model = load_model(spec, torch.float32)
        if self.strategy in ("remap", "transplant"):
            assert self.vocab_map is not None
            model = transplant(model, self.vocab_map, *self.sides, self.vocab_size)
        return model

    def _forced_tokens(self) -> set[int]:
        """Ids that a trimmed head always keeps: stops, special tokens, the byte units."""
        tokenizer = self.target.tokenizer
        return {
            *self.target.stops,
            *tokenizer.all_special_ids,
            *byte_units(token_keys(tokenizer)),
        }

    def print_coverage(self) -> None:
        """What share of the target's mass on the answers trimmed heads of each size would lose."""
        mass = domain_mass(self.answers, self.vocab_size)
        print("draft_vocab_size  lost mass")
        for size, lost in coverage_curve(mass, self._forced_tokens()):
            print(f"{size:>16}  {lost:.3%}")

    def trained_rows(self, token_ids: Tensor | None) -> Tensor | None:
        """Row of the draft's head for each target id [V], -1 where it has none; None if equal.

        token_ids: those of a trimmed head [K].
        """
        if self.strategy == "intersection":
            assert self.vocab_map is not None
            known = self.vocab_map.to_draft[: self.vocab_size]
            return F.pad(known, (0, self.vocab_size - len(known)), value=-1)
        if self.strategy == "padded":
            return head_rows(torch.arange(self.verdict.shared_ids), self.vocab_size)
        return head_rows(token_ids, self.vocab_size)

    @property
    def reader(self) -> Reader | None:
        """How a draft in ids of its own reads the target's."""
        if self.strategy != "intersection":
            return None
        assert self.vocab_map is not None
        return Reader(self.vocab_map, *self.sides)

    @property
    def draft_tokenizer(self) -> PreTrainedTokenizerBase:
        """What the draft's ids mean: the target's tokenizer, but for a draft that drafts by map."""
        own = self.strategy == "intersection" and self.recipe.draft is not None
        return load_tokenizer(str(self.recipe.draft)) if own else self.target.tokenizer

    def distil_draft(self) -> None:
        """`self.tuned`: the draft in fp32 after training, read back when that had ended before."""
        done = self.folder / "tuned"
        if not (done / "model.safetensors").exists():
            trainer = build_trainer(
                self.prepared.model,
                self.answers,
                self.trained_rows(self.prepared.token_ids),
                self.draft_tokenizer,
                self.recipe,
                self.reader,
                new_rows=self.strategy == "transplant",
            )
            tuned = distil(trainer, self.recipe)
            with atomic_folder(done) as partial:
                state = {k: v.contiguous() for k, v in tuned.state_dict().items()}
                tied = tuned.get_output_embeddings().weight is tuned.get_input_embeddings().weight
                if tied:
                    state.pop("lm_head.weight")
                save_file(state, partial / "model.safetensors")
        else:
            tuned = self.prepared.model.float()
            tuned.load_state_dict(load_file(done / "model.safetensors"), strict=False)
        self.tuned = tuned

    def export_draft(self) -> None:
        """`draft/`: a checkpoint for every engine, and `draft/compact/` for our decoder."""
        dtype, folder = getattr(torch, self.recipe.dtype), self.folder / "draft"
        prepared = self.prepared
        self.tuned.to(dtype)
        full = self.tuned
        if prepared.token_ids is not None:
            assert prepared.full_head is not None
            full = full_vocabulary(self.tuned, prepared.token_ids, prepared.full_head, self.answers)
            full = full.to(dtype)
        with atomic_folder(folder) as partial:
            full.save_pretrained(partial)
            self.draft_tokenizer.save_pretrained(partial)
            if self.recipe.draft is None:
                embedding = self.embedding
                save_compact(partial / "compact", self.tuned, prepared.token_ids, embedding)

    # --- evaluation

    def candidates(self) -> list[Candidate]:
        recipe = self.recipe
        full = (self.folder / "draft" / "model.safetensors").stat().st_size
        if recipe.draft is None:
            return [
                compact_candidate("untuned", self.folder / "prepared", self.target, full),
                compact_candidate("tuned", self.folder / "draft" / "compact", self.target, full),
            ]
        return [
            load_candidate("untuned", recipe.draft, self.target, self.strategy),
            load_candidate("tuned", str(self.folder / "draft"), self.target, self.strategy),
        ]

    def evaluate(self) -> dict[str, Any]:
        """The report, written to `report/`, and the model card made from it."""
        recipe = self.recipe
        self.fit_contexts()
        provenance = self._provenance()
        with Journal(self.folder / "report" / JOURNAL) as journal:
            report = evaluate_drafts(
                self.target,
                self.candidates(),
                self.evaluation,
                self.tuning,
                Decoding(self.sampling, self.target.stops, recipe.max_new_tokens, recipe.seed),
                Plan(recipe.gamma, recipe.max_gamma, recipe.speed_prompts),
                journal,
                self.overlap.exact + self.overlap.near,
                provenance,
            )
            write_report(self.folder / "report", report)
            with atomic_file(self.folder / "provenance.json") as file:
                json.dump(provenance, file, indent=2)
            write_card(self.folder)
        return report

    def _provenance(self) -> dict[str, Any]:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,  # an installed wheel has no repository
        ).stdout.strip()
        return {
            "command": sys.argv,
            "versions": {name: importlib.metadata.version(name) for name in PACKAGES}
            | {"python": platform.python_version()},
            "git_commit": commit or None,
            "seed": self.recipe.seed,
            "hashes": self.target_hashes
            | {
                "train_prompts": prompts_sha256(self.training.prompts),
                "eval_prompts": prompts_sha256(self.evaluation.prompts),
                "train_ids": hash_prompts(self.training.ids),
            },
            "overlap": self.overlap.to_json(),
            "lost_mass": self.prepared.lost_mass,
            "seconds": round(time.time() - self.started, 1),
        }
