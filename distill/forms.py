"""The forms that a draft is published in, exported from its run into one folder.

FOLDER/            the full checkpoint: what transformers and vLLM load
FOLDER/compact/    what draftsmith's decoder runs: own tensors only, `d2t` and `t2d` as EAGLE-3
                   has them (vLLM: target id = row + d2t[row])
FOLDER/adapter/    of a LoRA run, for its base
FOLDER/gguf/       for llama.cpp
FOLDER-target/     a target that only draftsmith can name, as folder and GGUF file
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from align.atomic import atomic_folder
from align.sources import read_json, resolve_checkpoint, resolve_file
from align.to_gguf import write_gguf
from distill.card import public_name, short_name
from distill.recipe import read_yaml
from distill.reload import Form
from distill.trainer import last_checkpoint

GGUF_KINDS = ("f16", "q8_0", "q4_0")
WHOLE = ("f16",)  # kinds that keep the weights as they are: their alpha must be the run's


def gguf_file(folder: Path, kind: str) -> Path:
    """Where a published folder holds the draft for llama.cpp."""
    return folder / "gguf" / f"draft-{kind}.gguf"


def forms_of(folder: Path, base: str | None = None) -> list[Form]:
    """The forms in a folder, GGUF included; base: what an adapter in it belongs to."""
    forms = [Form("full checkpoint", folder)]
    if (folder / "compact").is_dir():
        forms.append(Form("compact form", folder / "compact", engine="draftsmith"))
    if base is not None and (folder / "adapter").is_dir():
        forms.append(Form("adapter", folder / "adapter", engine="peft", base=base))
    return forms + [
        Form(
            f"GGUF {kind}",
            gguf_file(folder, kind),
            engine="transformers, dequantised",
            quantised=kind not in WHOLE,
        )
        for kind in GGUF_KINDS
        if gguf_file(folder, kind).is_file()
    ]


def export_forms(run: Path, folder: Path) -> tuple[list[Form], dict[str, str]]:
    """Every form of the run's draft in `folder`, and what is left out: name -> reason."""
    recipe, used = read_yaml(run / "recipe.yaml"), read_json(run / "vocab_check.json")["used"]
    shutil.copytree(run / "draft", folder, dirs_exist_ok=True)
    (folder / "README.md").unlink(missing_ok=True)
    left_out = {}
    base = recipe.get("draft")
    if recipe.get("use_peft"):
        checkpoint = last_checkpoint(run)
        if base is None or used in ("remap", "transplant"):
            left_out["adapter"] = "the model that it adapts was made by the run and is merged only"
        elif checkpoint is None:
            left_out["adapter"] = "the run's last checkpoint is gone"
        else:
            _export_adapter(checkpoint, folder / "adapter", public_name(base))
    print(f"Writing GGUF {', '.join(GGUF_KINDS)} …", flush=True)
    (folder / "gguf").mkdir()
    try:
        for kind in GGUF_KINDS:
            # of the run's own folder: a file made again is the same, also in the name it holds
            write_gguf(run / "draft", gguf_file(folder, kind), kind)
    except ValueError as error:  # a family or tokenizer that llama.cpp has no name for here
        shutil.rmtree(folder / "gguf")
        left_out["GGUF"] = str(error)
        print(f"No GGUF: {error}")
    return forms_of(folder, base), left_out


def _export_adapter(checkpoint: Path, to: Path, base: str) -> None:
    """The adapter of a checkpoint, its base under a name that others know."""
    to.mkdir()
    shutil.copy(checkpoint / "adapter_model.safetensors", to)
    config = read_json(checkpoint / "adapter_config.json")
    (to / "adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": base}, indent=2)
    )


def export_target(spec: str, folder: Path) -> None:
    """A target that only draftsmith can name, as folder and GGUF file that every engine loads."""
    gguf = f"{short_name(spec)}.gguf"
    if (folder / gguf).is_file():
        return  # it appeared whole
    print(f"Exporting the target to {folder} …", flush=True)
    with atomic_folder(folder) as partial:
        shutil.copytree(resolve_checkpoint(spec), partial, dirs_exist_ok=True)
        shutil.copy(resolve_file(spec), partial / gguf)
