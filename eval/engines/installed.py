"""A pair measured in an engine that is installed here: one function for all of them."""

from __future__ import annotations

import json
import shlex
import tempfile
from pathlib import Path

import torch

from align.process import use_machine
from align.sources import load_config
from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.assisted import Assisted, load_assistant, load_stock
from eval.engines.driven import measure_driven
from eval.engines.environments import ENGINES, EngineMissing
from eval.engines.llama_cpp import LlamaCpp
from eval.engines.local_vllm import serve_vllm, speculation
from eval.engines.vllm import VllmServer, measure_servers
from eval.measuring.evaluation import context_length
from eval.measuring.journal import JOURNAL, Journal
from eval.prompts import PromptSet
from eval.reporting.report import Report

__all__ = ["NAMES", "EngineMissing", "measure_installed", "serve_command"]

NAMES = ("transformers", *ENGINES)
_PATIENCE = 600.0  # seconds without a byte from a server: on a CPU it answers slowly


def measure_installed(
    engine: str,
    target: Path,
    draft: Path,
    prompts: PromptSet,
    gamma: int,
    max_new_tokens: int,
    seed: int = 42,
) -> Report:
    """The report of a draft in an engine, greedily, against the target alone in the same engine.

    engine: one of NAMES. target, draft: checkpoints' folders, GGUF files for llama.cpp. The draft
    is called by the last part of its path. Raises EngineMissing where the engine is not installed
    here, another ValueError where it cannot take the pair or fails.
    """
    use_machine()
    provenance = {"seed": seed, "served_by": serve_command(engine, target, draft, gamma)}
    positions = context_length(prompts.ids, max_new_tokens, gamma)
    if engine == "vllm":
        with (
            serve_vllm(target, *speculation(draft, gamma), positions=positions) as speculative,
            serve_vllm(target, positions=positions) as plain,
        ):
            return measure_servers(
                VllmServer(speculative, _PATIENCE),
                VllmServer(plain, _PATIENCE),
                prompts.prompts,
                prompts.source,
                Sampling(),
                max_new_tokens,
                seed,
                provenance,
                draft.name,
                str(target),
            )
    with tempfile.TemporaryDirectory() as scratch:
        journal = Journal(Path(scratch) / JOURNAL)
        if engine == "llama.cpp":
            with LlamaCpp(target, {draft.name: draft}, positions) as process:
                how = Decoding(Sampling(), process.stops, max_new_tokens, seed)
                return measure_driven(process, prompts, how, gamma, journal, provenance)
        assert engine == "transformers", engine
        dtype = load_config(str(target)).dtype or torch.float32  # as transformers itself loads it
        assert isinstance(dtype, torch.dtype), dtype
        stock = load_stock(str(target), dtype, "cpu")
        assisted = Assisted(stock, [load_assistant(draft.name, str(draft), stock, gamma)])
        how = Decoding(Sampling(), stock.stops, max_new_tokens, seed)
        return measure_driven(assisted, prompts, how, gamma, journal, provenance)


def serve_command(
    engine: str, target: str | Path, draft: str | Path, gamma: int, folder: Path | None = None
) -> str:
    """The command, or for transformers the Python, that uses the draft as it is measured here.

    folder: where the draft lies now, if not there.
    """
    if engine == "vllm":
        return shlex.join(["vllm", "serve", str(target), *speculation(draft, gamma, folder)])
    if engine == "llama.cpp":
        # gamma tokens a time, however unsure the draft is
        length = ["--spec-type", "draft-simple", "--spec-draft-n-max", str(gamma)]
        sure = ["--spec-draft-p-min", "0"]
        return shlex.join(["llama-server", "-m", str(target), "-md", str(draft), *length, *sure])
    assert engine == "transformers", engine
    load = "AutoModelForCausalLM.from_pretrained({})"
    return "\n".join(
        [
            "from transformers import AutoModelForCausalLM",
            f"target = {load.format(json.dumps(str(target)))}",
            f"draft = {load.format(json.dumps(str(draft)))}",
            f"draft.generation_config.num_assistant_tokens = {gamma}",
            'draft.generation_config.num_assistant_tokens_schedule = "constant"',
            "draft.generation_config.assistant_confidence_threshold = 0.0",
            "target.generate(**inputs, assistant_model=draft, do_sample=False)",
        ]
    )
