"""A pair measured in an engine that is installed here: one function for all of them."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, PreTrainedConfig

from align.check import compare as compare_vocabularies
from align.machine import use_machine
from align.sources import load_config, load_model, load_tokenizer, read_json, resolve_checkpoint
from align.transplant import resized
from align.vocabulary import read_vocabulary
from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.assisted import Assisted
from eval.engines.driven import DrivenEngine, measure_driven
from eval.engines.environments import vllm_python
from eval.engines.llama_cpp import LlamaCpp
from eval.engines.local_vllm import (
    METHODS,
    gpu_share,
    serve_vllm,
    servers_held,
    speculation,
    tensor_parallel,
)
from eval.engines.turns import Start, running
from eval.engines.vllm import VllmServer
from eval.engines.vllm_servers import compare, report_of
from eval.measuring.evaluation import context_length
from eval.measuring.journal import JOURNAL, Journal
from eval.prompts import PromptSet
from eval.reporting.report import OF_LENGTH, Report

PATIENCE = 600.0  # seconds without a byte from a server: on a CPU it answers slowly


@contextmanager
def driven_engine(
    name: str,
    target: str,
    drafts: Mapping[str, str],
    gamma: int,
    positions: int,
    dtype: torch.dtype,
    device: str,
) -> Iterator[DrivenEngine]:
    """transformers or llama.cpp with a target and drafts, by their specs.

    positions: that a prompt, its answer and a draft may take. dtype, device: of transformers.
    Raises EngineMissing where it is not installed, another ValueError where it cannot take them.
    """
    if name == "transformers":
        yield Assisted.load(target, drafts, gamma, dtype, device)
        return
    with LlamaCpp(target, drafts, gamma, positions) as engine:
        yield engine


def measure_installed(
    engine: str, target: Path, draft: Path, prompts: PromptSet, gamma: int, max_new_tokens: int
) -> Report:
    """The report of a tuned draft in an engine, greedily, against the target alone in the same.

    engine: one of NAMES. target, draft: checkpoints' folders, GGUF files for llama.cpp. gamma: the
    length that is best in our decoder; vLLM, where a draft step costs another part of a target
    step, is measured with half of it, too, and the faster one comes last.
    Raises as `driven_engine`, and as `compare`.
    """
    use_machine()
    decoding = Decoding(Sampling(), frozenset(), max_new_tokens)
    drafts = {"tuned": str(draft)}  # by the name that it has in a run's report
    if engine == "vllm":
        lengths = sorted({gamma, (gamma + 1) // 2})
        report = measure_started(str(target), drafts, lengths, prompts, decoding, {})
        by_speed = sorted(report.drafts.items(), key=lambda item: item[1].speedup.mean)
        return report.model_copy(update={"drafts": dict(by_speed)})
    provenance = {"served_by": serve_command(engine, target, draft, gamma)}
    positions = context_length(prompts.ids, max_new_tokens, gamma)
    dtype: Any = torch.float32
    if engine == "transformers":
        dtype = load_config(str(target)).dtype or dtype  # as transformers itself loads it
    with (
        tempfile.TemporaryDirectory() as scratch,
        driven_engine(engine, str(target), drafts, gamma, positions, dtype, "cpu") as driven,
    ):
        decoding = Decoding(Sampling(), driven.stops, max_new_tokens)
        journal = Journal(Path(scratch) / JOURNAL)
        return measure_driven(driven, prompts, decoding, journal, provenance)


def measure_started(
    target: str,
    drafts: Mapping[str, str],
    gammas: Sequence[int],
    prompts: PromptSet,
    decoding: Decoding,
    provenance: dict[str, Any],
    loads: Sequence[int] = (),
) -> Report:
    """The report of drafts in vLLM, by name, with a server started here for each and for none.

    target, drafts: specs, quantised ones too; a draft as `speculation` takes it. gammas: draft
    lengths; of several, a draft's name has its own. loads: as of `compare`.

    Each server has its own copy of the target. Where all find memory side by side, those of one
    length run at the same time as the baseline, then those of the next; otherwise one server at a
    time. Raises EngineMissing, and as `compare`.
    """
    vllm_python()
    positions = context_length(prompts.ids, decoding.max_new_tokens, max(gammas))
    path = resolve_checkpoint(target, quantised=True)
    config = load_config(str(path))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as plain:
        found = {
            draft: draft if draft in METHODS else str(_in_size(draft, path, config, Path(scratch)))
            for draft in drafts.values()
        }
        models = [Path(draft) for draft in found.values() if draft not in METHODS]
        gpus = torch.cuda.device_count()
        parts = tensor_parallel(gpus, config, models)
        together = servers_held(path, models, parts) > len(drafts)
        provenance = provenance | {"vllm_servers": "at once" if together else "one at a time"}
        more = ["--no-enable-prefix-caching"]  # else a prompt that is asked again costs less
        if gpus:
            more += ["--tensor-parallel-size", str(parts)]
            more += [
                "--gpu-memory-utilization",
                gpu_share(1 + len(drafts) if together else 1, parts),
            ]
            provenance |= {"tensor_parallel": parts}
        if not together:
            print(f"One vLLM at a time: no memory for {1 + len(drafts)} of them", flush=True)

        @contextmanager
        def serving(*arguments: str) -> Iterator[VllmServer]:
            # in its dtype, as `vllm serve` does it
            with serve_vllm(
                path, *arguments, *more, positions=positions, dtype="auto", eager=not gpus
            ) as url:
                yield VllmServer(url, PATIENCE, connections=max([1, *loads]))

        compared = []
        baseline: Start = serving
        if together:
            baseline = running(plain.enter_context(serving()))
        for lengths in [[gamma] for gamma in gammas] if together else [gammas]:
            paths, starts = {}, {}
            for gamma, (name, draft) in product(lengths, drafts.items()):
                name += f"{OF_LENGTH}{gamma}" if gammas[1:] else ""
                paths[name] = draft
                starts[name] = partial(serving, *speculation(found[draft], gamma))
            asked = prompts.prompts
            compared.append(compare(starts, baseline, asked, decoding, paths, loads, together))
    return report_of(
        compared,
        prompts,
        decoding,
        provenance,
        target,
        device="cuda" if gpus else "cpu",
        dtype=str(config.dtype or "auto").removeprefix("torch."),
    )


def _in_size(draft: str, target: Path, config: PreTrainedConfig, scratch: Path) -> Path:
    """The folder of a draft for vLLM, which refuses a model with other rows than the target's.

    Where only padding differs (Qwen2.5 has 151,936 rows, or 152,064), it is a copy in `scratch`
    with the target's rows, as training makes it. config: the target's.
    """
    folder = resolve_checkpoint(draft, quantised=True)
    about, rows = read_json(folder / "config.json"), config.get_text_config().vocab_size
    plain = about.get("model_type") in CONFIG_MAPPING and "quantization_config" not in about
    if not plain or about.get("vocab_size", rows) == rows or "Eagle3" in str(about):
        return folder
    vocabulary = read_vocabulary(draft)
    if compare_vocabularies(read_vocabulary(str(target)), vocabulary).strategy != "padded":
        return folder
    dtype = getattr(torch, str(about.get("dtype", about.get("torch_dtype", "float32"))))
    copy = scratch / str(len(list(scratch.iterdir())))
    resized(load_model(draft, dtype), vocabulary, rows).save_pretrained(copy)
    load_tokenizer(draft).save_pretrained(copy)
    return copy


def serve_command(
    engine: str,
    target: str | Path,
    draft: str | Path,
    gamma: int,
    folder: Path | None = None,
    own_ids: bool = False,
    chat: bool = False,
    sampling: str = "do_sample=False",
) -> str:
    """The command, or for transformers the Python, that uses the draft as it is measured here.

    folder, own_ids: as of `speculation`. chat: transformers asks in chat form. sampling: arguments
    of its generate.
    """
    if engine == "vllm":
        speculating = speculation(draft, gamma, folder, own_ids)
        return shlex.join(["vllm", "serve", str(target), *speculating])
    if engine == "llama.cpp":
        # gamma tokens a time, however unsure the draft is
        length = ["--spec-type", "draft-simple", "--spec-draft-n-max", str(gamma)]
        sure = ["--spec-draft-p-min", "0"]
        return shlex.join(["llama-server", "-m", str(target), "-md", str(draft), *length, *sure])
    inputs = 'tokenizer("...", return_tensors="pt")'
    if chat:
        inputs = """tokenizer.apply_chat_template(
    [{"role": "user", "content": "..."}],
    add_generation_prompt=True,
    return_dict=True,
    return_tensors="pt",
)"""
    return f"""from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained({json.dumps(str(target))})
target = AutoModelForCausalLM.from_pretrained({json.dumps(str(target))})
draft = AutoModelForCausalLM.from_pretrained({json.dumps(str(draft))})
# the defaults draft 20 tokens, and stop on low confidence
draft.generation_config.num_assistant_tokens = {gamma}
draft.generation_config.num_assistant_tokens_schedule = "constant"
draft.generation_config.assistant_confidence_threshold = 0

inputs = {inputs}
output = target.generate(**inputs, assistant_model=draft, {sampling})
print(tokenizer.decode(output[0]))"""
