"""The forms that a draft is published in, exported from its run into one folder.

FOLDER/            the full checkpoint: what transformers and vLLM load; of eagle3 and medusa the
                   only form, for draftsmith's decoder and vLLM
FOLDER/compact/    what draftsmith's decoder runs: own tensors only, `d2t` and `t2d` as EAGLE-3
                   has them (vLLM: target id = row + d2t[row])
FOLDER/adapter/    of a LoRA run, for its base; or FOLDER/ itself, published alone
FOLDER/gguf/       for llama.cpp
FOLDER-target/     a target that only draftsmith can name, as folder and GGUF file
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from align.files import atomic_folder
from align.sources import ADAPTER_CONFIG, read_json, resolve_checkpoint, resolve_file
from align.to_gguf import write_gguf
from distill.card import in_one_file, public_name, short_name
from distill.drafters.kind import kinds
from distill.lora import KEPT, base_draft
from distill.recipe import read_yaml
from distill.reload import Form
from eval.decoding.drafters.adapter import AdapterError

GGUF_KINDS = ("f16", "q8_0", "q4_0")
WHOLE = ("f16",)  # kinds that keep the weights as they are: their alpha must be the run's


def gguf_file(folder: Path, kind: str) -> Path:
    """Where a published folder holds the draft for llama.cpp."""
    return folder / "gguf" / f"draft-{kind}.gguf"


def forms_of(folder: Path, kind: str | None, base: str | None = None) -> list[Form]:
    """The forms in a folder of a draft of that kind, GGUF included.

    base: what an adapter in it belongs to.
    """
    if kind is not None and not kinds()[kind].language_model:
        return [Form(kind, folder, engine="draftsmith")]
    forms = [Form("full checkpoint", folder)]
    if (folder / "compact").is_dir():
        forms.append(Form("compact form", folder / "compact", engine="draftsmith"))
    if base is not None and (folder / "adapter").is_dir():
        forms.append(Form("adapter", folder / "adapter", engine="peft", base=base))
    return forms + [
        Form(
            f"GGUF {bits}",
            gguf_file(folder, bits),
            engine="transformers, dequantised",
            quantised=bits not in WHOLE,
        )
        for bits in GGUF_KINDS
        if gguf_file(folder, bits).is_file()
    ]


def export_forms(run: Path, folder: Path) -> tuple[list[Form], dict[str, str]]:
    """Every form of the run's draft in `folder`, and what is left out: name -> reason."""
    recipe, used = read_yaml(run / "recipe.yaml"), read_json(run / "vocab_check.json")["used"]
    shutil.copytree(run / "draft", folder, dirs_exist_ok=True)
    (folder / "README.md").unlink(missing_ok=True)
    left_out = {}
    kind = recipe.get("drafter")
    if kind is not None and not kinds()[kind].language_model:
        left_out["GGUF"] = f"a draft of kind {kind} is no model of its own"
        return forms_of(folder, kind), left_out
    adapter, base = folder / KEPT, adapter_base(recipe)
    if recipe.get("use_peft"):
        if base is None or used in ("remap", "transplant"):
            left_out["adapter"] = "the model that it adapts was made by the run and is merged only"
            shutil.rmtree(adapter, ignore_errors=True)
        elif not adapter.is_dir():
            left_out["adapter"] = "the run was made by an earlier version, which kept none"
        else:
            _name_base(adapter, public_base(recipe))
    print(f"Writing GGUF {', '.join(GGUF_KINDS)} …", flush=True)
    (folder / "gguf").mkdir()
    try:
        for bits in GGUF_KINDS:
            # of the run's own folder: a file made again is the same, also in the name it holds
            write_gguf(run / "draft", gguf_file(folder, bits), bits)
    except ValueError as error:  # a family or tokenizer that llama.cpp has no name for here
        shutil.rmtree(folder / "gguf")
        left_out["GGUF"] = str(error)
        print(f"No GGUF: {error}")
    return forms_of(folder, kind, base), left_out


def adapter_base(recipe: dict[str, Any]) -> str | None:
    """What peft loads before a run's adapter: a sibling, or a base's full form; None: neither."""
    if recipe.get("base") is not None:
        return str(base_draft(recipe["base"]))
    draft: str | None = recipe.get("draft")
    return draft


def public_base(recipe: dict[str, Any]) -> str:
    """The same under a name that others know: a run by its folder's name."""
    return public_name(recipe.get("base") or recipe["draft"])


def export_adapter(run: Path, folder: Path, base: str | None) -> list[Form]:
    """The run's adapter alone, its base under that name; the form to be measured.

    Raises AdapterError where the run has kept none, or none that others could load.
    """
    recipe, used = read_yaml(run / "recipe.yaml"), read_json(run / "vocab_check.json")["used"]
    loaded = adapter_base(recipe)
    kept = run / "draft" / KEPT
    if loaded is None or used in ("remap", "transplant") or not kept.is_dir():
        raise AdapterError(
            f"{run} has no adapter of a base that others have: train one with use_peft and a "
            "sibling (draft) or a shared base (base), or publish the merged draft."
        )
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    _name_base(folder, base or public_base(recipe))
    return [Form("adapter", folder, engine="peft", base=loaded)]


def _name_base(adapter: Path, base: str) -> None:
    path = adapter / ADAPTER_CONFIG
    config = read_json(path) | {"base_model_name_or_path": base}
    path.write_text(json.dumps(config, indent=2))


def export_target(spec: str, folder: Path) -> None:
    """A target that only draftsmith can name, as a folder that every engine loads.

    Of a GGUF file also that file. An adapter is merged.
    """
    gguf = f"{short_name(spec)}.gguf"
    if (folder / (gguf if in_one_file(spec) else "config.json")).is_file():
        return  # an export is whole, or it is not there
    print(f"Exporting the target to {folder} …", flush=True)
    with atomic_folder(folder) as partial:
        shutil.copytree(resolve_checkpoint(spec), partial, dirs_exist_ok=True)
        if in_one_file(spec):
            shutil.copy(resolve_file(spec), partial / gguf)
