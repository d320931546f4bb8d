"""OpenVINO GenAI: openvino_child.py in a process of its own environment, asked by child.py.

GenAI makes its IR from a GGUF file by itself (enable_save_ov_model), so that nothing else converts
a checkpoint. Its own reader of quantised files is not used: of the embedded target's Q4_1 file it
made a model with other text than llama.cpp and transformers (openvino-genai 2026.4.0).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from align.check import compare
from align.sources import load_config, load_tokenizer
from align.to_gguf import write_gguf
from align.vocabulary import read_vocabulary
from eval.engines.child import ChildEngine, EngineError
from eval.engines.environments import installed


class OpenVino(ChildEngine):
    """OpenVINO GenAI with checkpoints' folders, converted here; computes in fp32.

    Raises EngineMissing where it is not installed, SourceError for a checkpoint that cannot be
    written as GGUF, EngineError as a ChildEngine does.
    """

    def __init__(self, target: Path, drafts: Mapping[str, Path]) -> None:
        folder = installed("openvino")
        for name, path in drafts.items():
            verdict = compare(read_vocabulary(str(target)), read_vocabulary(str(path)))
            if verdict.strategy not in ("direct", "padded"):
                raise EngineError(
                    f"Draft {name!r}: its vocabulary is {verdict.relation} to the target's, and "
                    f"OpenVINO takes equal ones only; tune the draft for this target "
                    f"(distill/train.py)."
                )
        self._scratch = tempfile.TemporaryDirectory()
        files = {}
        for number, path in enumerate((target, *drafts.values())):
            files[path] = Path(self._scratch.name) / str(number) / "model.gguf"
            files[path].parent.mkdir()
            write_gguf(path, files[path], "f16")
        stops = {load_tokenizer(str(target)).eos_token_id}
        of_config = load_config(str(target)).get_text_config().eos_token_id
        stops |= set(of_config if isinstance(of_config, list) else [of_config])
        # -P: beside the script are modules of ours, which no import of its own may find
        script = str(Path(__file__).with_name("openvino_child.py"))
        super().__init__(
            "openvino",
            [str(folder / "bin" / "python"), "-P", script],
            folder,
            target,
            drafts,
            files,
            threads=torch.get_num_threads(),
            stops=sorted(stops - {None}),
        )

    def close(self) -> None:
        super().close()
        self._scratch.cleanup()
