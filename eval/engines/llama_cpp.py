"""llama.cpp's llama-server as an engine: its client, its program, and servers started here.

Names of options and fields are those of llama.cpp's tools/server/README.md (build b10434).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from align.cache import cache_folder
from align.checkpoint import Checkpoint
from align.errors import UserError
from align.from_gguf import value_of
from align.to_gguf import DFLASH, EAGLE3, refuse_target, write_gguf
from eval.decoding.drafters import LOOKUP, LOOKUP_FIRST
from eval.decoding.loop import Decoding, seed_of
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import SampleMethod
from eval.engines.contender import Output
from eval.engines.conversation import chat_request, json_schema
from eval.engines.engine_server import EngineServer, Launcher, option_value
from eval.engines.near_ties import TOP, Logprobs
from eval.engines.process import started_server
from eval.engines.server import ServerError
from eval.measuring.environment import cpu_model
from eval.prompts import Prompt

PROGRAM = "DRAFTSMITH_LLAMA_SERVER"  # the environment variable that names a llama-server
DRAFT_KIND = "q8_0"  # GGUF type of drafts (docs/engines.md)
SPECULATION = {DFLASH: "draft-dflash", EAGLE3: "draft-eagle3"}  # of drafts that read states
LOST = -1  # the id of a token that the stream did not name
# Lengths of n-gram speculation: tokens that match, and tokens drafted then. llama.cpp's own, 12 and
# 48, seldom match and verify more than is accepted (docs/engines.md).
NGRAM, NGRAM_DRAFT = 3, 6
# On a CPU: two pools of threads, of target and draft, that wait actively take each other's cores;
# sampling in the backend sorts the whole vocabulary.
NO_POLLING, BACKEND_SAMPLING = ("--poll", "0"), "--no-spec-draft-backend-sampling"
STRIDE = 4  # tokens in a forward that reads an output again, as many as a step verifies
# Sampling that the server would take from its own defaults.
PLAIN = {
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "dry_multiplier": 0.0,
}


class LlamaServer(EngineServer):
    """A llama-server as an `Engine`, by its own API, because its OpenAI API has no token ids."""

    engine, owner, version_at = "llama.cpp", "llamacpp", ("/props", "build_info")

    def decode(self, prompt: Prompt, decoding: Decoding) -> Output:
        output = super().decode(prompt, decoding)
        if LOST in (tokens := output.run.tokens):
            body = self._body(output.prompt_ids, prompt, decoding)
            again = self.ask("/completion", body | {"return_tokens": True})["tokens"]
            if [a for a, b in zip(again, tokens, strict=False) if b != LOST] != [
                token for token in tokens if token != LOST
            ] or len(again) != len(tokens):
                raise ServerError(
                    f"{self.url} gave another output when prompt {prompt.id!r} was repeated; send "
                    "it no other requests."
                )
            output.run.tokens[:] = again
        return output

    def streamed(self, prompt: Prompt, decoding: Decoding) -> Output:
        """As in EngineServer; tokens that end within a character have the id LOST.

        The server sends each token in a message, and times it by its speculation step.
        """
        ids = self._prompt_ids(prompt)
        body = self._body(ids, prompt, decoding)
        body |= {"stream": True, "return_tokens": True, "timings_per_token": True}
        times, steps = [time.perf_counter()], list[list[int]]()
        step, ended, text = None, None, ""
        for message in self.messages("/completion", body, prompt):
            lost = message["tokens_predicted"] - sum(map(len, steps)) - len(message["tokens"])
            tokens, ended = [LOST] * lost + message["tokens"], message.get("stop_type")
            text += message["content"]
            now, at = time.perf_counter(), message["timings"]["predicted_ms"]
            if tokens and at == step:
                steps[-1] += tokens
                times[-1] = now
            elif tokens:
                steps.append(tokens)
                times.append(now)
            step = at
        if not steps or ended is None:
            self.break_off(prompt, again=ended is None)
        run = PromptRun.of(prompt, len(ids), np.diff(times).tolist(), steps)
        return Output(run, ids, ended != "limit", text=text)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        text = prompt.prompt
        if prompt.messages is not None:
            text = self.ask("/apply-template", chat_request(prompt))["prompt"]
        asked = {"content": text, "add_special": True, "parse_special": True}
        return list(map(int, self.ask("/tokenize", asked)["tokens"]))

    def _body(self, ids: list[int], prompt: Prompt, decoding: Decoding) -> dict[str, Any]:
        sampling, schema = decoding.sampling, json_schema(prompt)
        body: dict[str, Any] = PLAIN | {"prompt": ids, "n_predict": decoding.max_new_tokens}
        body |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0}
        body |= {"top_p": sampling.top_p, "cache_prompt": False, "ignore_eos": decoding.ignore_eos}
        body |= {} if schema is None else {"json_schema": schema}
        return body | {"seed": seed_of(decoding.seed, prompt.id) % (2**32 - 1)}  # which is random

    def read(self, greedy: Output) -> None:
        """None: a server with a draft has no log-probabilities of tokens that it drafted."""

    def logprob(self, output: Output) -> str:
        return "llama-server has no log-probabilities of given tokens"

    def written(self, prompt: list[int], count: int) -> tuple[list[int], list[Logprobs]]:
        return self._asked(prompt, count, cached=False)

    def read_wide(self, prompt: list[int], output: list[int]) -> list[Logprobs]:
        """As in `Judge`, at every STRIDE-th token; the others have none."""
        logprobs: list[Logprobs] = [{} for _ in output]
        for at in range(STRIDE, len(output), STRIDE):
            # The prefix is in the cache, so that one forward computes STRIDE tokens.
            _, (logprobs[at],) = self._asked(prompt + output[:at], 1, cached=at > STRIDE)
        return logprobs

    def read_from(self, prompt: list[int], output: list[int], at: int) -> list[Logprobs]:
        """As in `Judge`, one token a forward; the tokens before `at` have none."""
        asked = (self._asked(prompt + output[:i], 1) for i in range(at, len(output)))
        return [{} for _ in output[:at]] + [row for _, (row,) in asked]

    def _asked(
        self, ids: list[int], count: int, cached: bool = True
    ) -> tuple[list[int], list[Logprobs]]:
        """Greedy tokens after `ids`, Logprobs each. cached: use a prefix that is in the cache."""
        body = PLAIN | {"prompt": ids, "n_predict": count, "temperature": 0.0}
        sent = self.ask("/completion", body | {"n_probs": TOP, "cache_prompt": cached})
        try:
            told = sent["completion_probabilities"]
            rows = [{top["id"]: top["logprob"] for top in one["top_logprobs"]} for one in told]
            return [one["id"] for one in told], rows
        except (LookupError, TypeError):
            raise ServerError("the server returned no log-probabilities") from None


def llama_server() -> Path:
    """The program: $DRAFTSMITH_LLAMA_SERVER, else on the PATH, else CACHE/engines/llama-server.

    Raises UserError.
    """
    cached = cache_folder() / "engines" / "llama-server"
    path = Path(os.environ.get(PROGRAM) or shutil.which("llama-server") or cached)
    if not path.is_file():
        raise UserError(
            f"{path} is not a file; install llama.cpp's llama-server (docs/engines.md), and name "
            f"it by {PROGRAM}=FILE."
        )
    return path.resolve()  # the libraries beside it are found by its own name


def environment_of(program: Path) -> dict[str, str]:
    """The environment variables for a llama-server, whose libraries are beside it."""
    libraries = f"{program.parent}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}"
    return {**os.environ, "LD_LIBRARY_PATH": libraries.rstrip(os.pathsep)}


def printed(program: Path, argument: str) -> str:
    """What a llama-server prints with this argument."""
    command, variables = [str(program), argument], environment_of(program)
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    return run.stdout


def devices(program: Path, arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The GPUs that a llama-server with these arguments uses, as (id, model name)."""
    usual, most = (os.environ.get(f"LLAMA_ARG_{name}", "") for name in ("DEVICE", "N_GPU_LAYERS"))
    wanted = option_value(arguments, usual, "--device", "-dev").split(",")
    layers = option_value(arguments, most, "--n-gpu-layers", "--gpu-layers", "-ngl")
    listed = printed(program, "--list-devices")
    gpus = re.findall(r"^ +(\w+): (.+) \([1-9]\d* MiB", listed, re.M)  # BLAS has 0 MiB
    return [gpu for gpu in gpus if layers != "0" and (wanted == [""] or gpu[0] in wanted)]


class LlamaLauncher(Launcher):
    """llama-servers of a target on this machine.

    A Hugging Face checkpoint is written as GGUF: the target in its own dtype, drafts as DRAFT_KIND.
    """

    client = LlamaServer
    program = staticmethod(llama_server)

    def __post_init__(self) -> None:
        program = self.program()
        self.installed = [str(program), program.stat().st_size, program.stat().st_mtime_ns]
        self.dtype = self.target.gguf_kind or str(self.target.config.dtype)
        self.dtype = self.dtype.removeprefix("torch.")
        kinds = {"float32": "f32", "float16": "f16"}
        self.model, _ = self._gguf(self.target, kinds.get(self.dtype, "bf16"))
        self.files: dict[str, tuple[Path, str]] = {}
        for draft in {*self.drafts} - {LOOKUP}:
            try:
                self.opened[draft] = Checkpoint.open(draft.removeprefix(LOOKUP_FIRST))
                self.files[draft] = self._gguf(self.opened[draft], DRAFT_KIND, self.model)
            except (UserError, OSError) as error:
                self.unreadable[draft] = str(error)
        # One cache of prompts is switched off by each request, the other one here.
        self.arguments = ["--ctx-size", str(self.positions * self.slots), "--cache-ram", "0"]
        self.arguments += ["--parallel", str(self.slots), *self.given]
        gpus = devices(program, self.given)
        self.device = re.sub(r"\d", "", gpus[0][0]).lower() if gpus else "cpu"
        self.of_models = list[str]()  # arguments of each draft that is a model
        if self.device == "cpu":
            samples_in_backend = BACKEND_SAMPLING in printed(program, "--help")
            self.of_models += [*NO_POLLING, *[BACKEND_SAMPLING] * samples_in_backend]
        counts = Counter(name for _, name in gpus)
        models = [f"{count} x {name}" if count > 1 else name for name, count in counts.items()]
        self.hardware = ", ".join(models) or cpu_model()

    @staticmethod
    def longest(target: Checkpoint) -> int:
        if target.gguf_kind is None:
            return Launcher.longest(target)
        return int(value_of(target.source, "ARCH.context_length"))

    def lengths(self, draft: str, gammas: Sequence[int]) -> Sequence[int]:
        """n-grams alone have one length, because a match costs no draft step."""
        length = option_value(self.given, NGRAM_DRAFT, "--spec-ngram-simple-size-m")
        return [length] if draft == LOOKUP else super().lengths(draft, gammas)

    def longest_draft(self, draft: str) -> int | None:
        file, architecture = self.files.get(draft, (None, None))
        size = value_of(file, "ARCH.block_size") if file and architecture == DFLASH else None
        return None if size is None else size - 1  # a block's first slot is the newest token

    def command(
        self, draft: str, draft_length: int, draft_sample_method: SampleMethod | None
    ) -> list[str]:
        """As in Launcher; checkpoints are named as GGUF files, which `align.to_gguf` writes."""
        model = None
        if draft != LOOKUP:
            model = as_gguf(self.opened[draft]), self.files[draft][1]
        words = ["llama-server", "--model", str(as_gguf(self.target))]
        return [*words, *drafting(draft, model, draft_length, self.of_models), *self.given]

    @contextmanager
    def serve(
        self, draft: str, draft_length: int, draft_sample_method: SampleMethod | None
    ) -> Iterator[str]:
        program = llama_server()
        command = [str(program), "--model", str(self.model), "--alias", "target"]
        command += (
            drafting(draft, self.files.get(draft), draft_length, self.of_models) if draft else []
        )
        command += ["--metrics", "--offline", *self.arguments]
        with started_server("llama-server", command, environment_of(program)) as address:
            yield address

    def _gguf(self, model: Checkpoint, kind: str, target: Path | None = None) -> tuple[Path, str]:
        """A GGUF file of the model, and its architecture. target: a draft's, as a GGUF file."""
        if model.gguf_kind is not None:
            mask = value_of(model.source, "tokenizer.ggml.mask_token_id")
            architecture = str(value_of(model.source, "general.architecture"))
            if target and architecture in SPECULATION:
                refuse_target(model.spec, target, mask)
            return model.source, architecture
        path = self.scratch / f"{len(list(self.scratch.iterdir()))}.gguf"
        return path, write_gguf(model, path, kind, target)


def as_gguf(model: Checkpoint) -> Path:
    """Its GGUF file, or the name of the file that is to be written."""
    return model.source if model.gguf_kind else Path(f"{Path(model.spec).name}.gguf")


def drafting(
    draft: str, model: tuple[Path, str] | None, draft_length: int, of_models: Sequence[str]
) -> list[str]:
    """The arguments with which a llama-server drafts.

    draft: prompt-lookup, a spec, or lookup-first:SPEC. model: the GGUF file of the spec's model,
    and its architecture. of_models: the other arguments of a model.
    """
    kinds, arguments = list[str](), list[str]()
    if draft.startswith((LOOKUP, LOOKUP_FIRST)):
        kinds.append("ngram-simple")
        arguments += ["--spec-ngram-simple-size-n", str(NGRAM)]
        arguments += ["--spec-ngram-simple-size-m", str(NGRAM_DRAFT)]
    if model is not None:
        file, architecture = model
        kinds.append(SPECULATION.get(architecture, "draft-simple"))
        # drafts have a fixed length, as in other engines
        arguments += ["--model-draft", str(file), *of_models]
        arguments += ["--spec-draft-n-max", str(draft_length), "--spec-draft-p-min", "0"]
    return ["--spec-type", ",".join(kinds), *arguments]
