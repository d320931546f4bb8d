"""llama.cpp, which takes GGUF files: llama_cpp.mjs in a process of node, asked by child.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eval.engines.child import ChildEngine, EngineError
from eval.engines.environments import LLAMA_CPP_SCRIPT, installed, node


class LlamaCpp(ChildEngine):
    """llama.cpp with GGUF files. positions: that a prompt, its answer and a draft may take.

    Raises EngineMissing where llama.cpp is not installed, EngineError as a ChildEngine does.
    """

    def __init__(self, target: Path, drafts: Mapping[str, Path], positions: int) -> None:
        folder = installed("llama.cpp")
        for name, path in {"target": target, **drafts}.items():
            with open(path, "rb") as file:
                if file.read(4) != b"GGUF":
                    raise EngineError(
                        f"{name}: {path} is no GGUF file, and llama.cpp reads no others; write the "
                        f"checkpoint as one (python -m align.to_gguf)."
                    )
        threads = str(torch.get_num_threads())
        command = [node("node"), str(LLAMA_CPP_SCRIPT), str(folder), threads]
        super().__init__("llama.cpp", command, folder, target, drafts, context=positions)

    def explain(
        self, blocks: dict[str, Any], ids: list[int], position: int
    ) -> tuple[Tensor, Tensor] | None:
        calls = {name: blocks[name] for name in ("drafted", "emitted")}
        single, wide = self.ask("logits", ids=ids, position=position, **calls)
        return torch.tensor(single), torch.tensor(wide)
