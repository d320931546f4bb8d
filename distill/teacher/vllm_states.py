"""Hidden states from a vLLM that the run starts, so that a target need not be loaded here.

vLLM's speculative method `extract_hidden_states` (vLLM 0.32) keeps the states of each prompt in a
cache, and a KV connector (vllm_connector.py) writes them to a file. A text without its last token
is one prompt. Prefix caching is off, because states of a cached prefix are not computed. Legend: T
tokens of a text, L layers, H hidden size.
"""

from __future__ import annotations

import fcntl
import functools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from align.checkpoint import opened_weights
from align.files import remove
from distill.drafters.kind import TargetEnds
from distill.models import Pair, target_device, target_ends
from distill.recipe import Recipe
from distill.teacher.answers import Answerer, AnsweringTarget
from distill.teacher.server_target import open_server
from distill.teacher.states import LocalStates, StateReader
from distill.teacher.vllm_target import VllmTarget
from eval.decoding.target import Target
from eval.engines.server import Server, ServerError
from eval.engines.start_vllm import serve_vllm

CONNECTOR = Path(__file__).with_name("vllm_connector.py")


@contextmanager
def state_reader(
    recipe: Recipe, pair: Pair, target: AnsweringTarget, load: Callable[[], Target]
) -> Iterator[StateReader]:
    """What computes states, and the base draft's weights: a vLLM and the target's checkpoint if a
    vLLM of the run generates the outputs, else the loaded target.

    The vLLM is started if states are missing, and ends with the block.
    """
    nested = pair.target.text_config is not pair.target.config  # not read by `target_ends`
    if not isinstance(target, VllmTarget) or not recipe.kind.states_from_vllm or nested:
        yield LocalStates(load)
        return
    dtype, device = getattr(torch, recipe.dtype), target_device(recipe).replace("auto", "cuda")
    ends = functools.cache(lambda: target_ends(pair, dtype, device))
    layers = tuple(sorted({*pair.layers, *pair.fit_layers}))
    folder = (recipe.folder / "states").resolve()
    with ExitStack() as stack:
        yield VllmStates(ends, pair, target, layers, folder, stack)


@dataclass
class VllmStates:
    """States of `layers` from a vLLM of the target; its files are in `folder` until they are read.

    load: returns what is read of the checkpoint, after the server has ended, because both take
    memory of a GPU. answering: generated the outputs for the same prompts; its vLLM has ended.
    stack: ends the server.
    """

    by: ClassVar[Answerer] = "vllm"
    load: Callable[[], TargetEnds]
    pair: Pair
    answering: VllmTarget
    layers: tuple[int, ...]
    folder: Path
    stack: ExitStack

    @functools.cached_property
    def server(self) -> Server:
        """The server; the first use starts it."""
        extraction = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": list(self.layers)}
            },
        }
        transfer = {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": CONNECTOR.stem,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": str(self.folder)},
        }
        remove(self.folder)  # a killed run may have left files
        self.folder.mkdir(parents=True)
        self.stack.callback(remove, self.folder)
        code = self.folder / "connector"  # alone, because vLLM has other versions of our packages
        code.mkdir()
        shutil.copy(CONNECTOR, code)
        arguments = [*self.answering.arguments(), "--enforce-eager", "--no-enable-prefix-caching"]
        arguments += ["--speculative-config", json.dumps(extraction)]
        arguments += ["--kv-transfer-config", json.dumps(transfer)]
        print(f"starting vLLM with {' '.join(arguments)}", flush=True)
        folder = self.answering.target.folder
        url = self.stack.enter_context(serve_vllm(folder, *arguments, PYTHONPATH=str(code)))
        return open_server(url, None, self.answering.settings)

    @functools.cached_property
    def norm(self) -> Any:
        """The target's final norm, in fp32 on the CPU."""
        model: Any = target_ends(self.pair, getattr(torch, self.answering.dtype), "cpu").model
        return model.base_model.norm.float()

    def read(self, texts: Sequence[Tensor], layers: Sequence[int]) -> Iterator[Tensor]:
        depth = self.pair.target.text_config.num_hidden_layers
        columns = [self.layers.index(layer) for layer in layers]
        states_of_text = functools.partial(extracted, self.server)
        with ThreadPool(min(self.answering.settings.batch_size, len(texts))) as pool:
            for states in pool.imap(states_of_text, texts):
                read = states[:, columns]
                if depth in layers:  # vLLM has these before the final norm
                    last = read[:, layers.index(depth)]
                    with torch.no_grad():
                        last.copy_(self.norm(last.float()))
                yield read.to(torch.bfloat16)


def extracted(server: Server, text: Tensor) -> Tensor:
    """The states of the server's layers at all tokens of a text [T] but the last [T - 1, L, H].

    Raises ServerError, and SourceError if the server could not write them.
    """
    prompt = text[:-1].tolist()
    body = {"model": server.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0}
    sent = server.ask("/v1/completions", body, f" to a text of {len(text)} tokens")
    path = Path(sent["kv_transfer_params"]["hidden_states_path"])
    lock = path.with_name(f"{path.name}.lock")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_SH)  # vLLM holds it until the file is complete
    with opened_weights(path, remedy="free disk space for it, and run again") as file:
        ids, states = file.get_tensor("token_ids").tolist(), file.get_tensor("hidden_states")
    path.unlink()
    lock.unlink()
    if ids != prompt:
        raise ServerError(
            f"{server.url} wrote the states of {len(ids)} other tokens than the {len(prompt)} of "
            "the request; install the vLLM of docs/engines.md."
        )
    return states
