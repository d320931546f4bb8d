"""A pair that answers as a small one and costs as much as a large one, for a GPU without the Hub.

    python tests/benchmarks/widen.py TARGET FOLDER [HEAD FOLDER]…

It is an imitation: nobody trained the large models. TARGET is a Llama, Qwen 2 or Qwen 3, each HEAD
an EAGLE-3 or DFlash draft of it. The large target has about PARAMETERS, in bf16. Each weight of a
small model is a corner of a weight of the large model. The residual stream is zero beyond the
small model's width, so the logits are the same up to rounding. All other weights are random,
because zeros can be faster. So the acceptance is that of the small pair, and the times are those of
a large one.
"""

import copy
import json
import shutil
import sys
from fractions import Fraction
from math import ceil
from pathlib import Path

import torch
from safetensors.torch import save_file

from align.checkpoint import Checkpoint
from align.machine import use_machine

FACTOR = 4  # of width and heads, so that norms are halved, which bf16 does exactly
PARAMETERS = 6.9e9
STANDARD_DEVIATION = 0.02
FAMILIES = {"llama", "qwen2", "qwen3"}
UNCHANGED = ("q_norm.weight", "k_norm.weight", "d2t", "t2d")  # of one head; maps of token ids
OUTER = ("embed_tokens.weight", "lm_head.weight")
TO_RESIDUAL = ("o_proj", "down_proj", "fc.weight")


def widen(source, folder, neurons):
    """Write the large model of a `Checkpoint`; its parameters. neurons: large over small MLP."""
    about = copy.deepcopy(source.config_json)
    shape = about.get("transformer_layer_config", about)  # of speculators
    if (family := shape.get("model_type", "llama")) not in FAMILIES:
        sys.exit(
            f"{source.spec} is of family {family}, which is not {', '.join(sorted(FAMILIES))}."
        )
    ignored = shutil.ignore_patterns("*.safetensors*", "compact*", "checkpoint-*")
    shutil.copytree(source.folder, folder, ignore=ignored)
    narrow = shape["hidden_size"]
    for key in ("hidden_size", "num_attention_heads", "num_key_value_heads"):
        if shape.get(key):
            shape[key] *= FACTOR
    shape["intermediate_size"] = inner(shape["intermediate_size"], neurons)
    shape["rms_norm_eps"] /= FACTOR
    (folder / "config.json").write_text(json.dumps(about | {"dtype": "bfloat16"}, indent=2))
    wide = source.tensors()
    for name, small in wide.items():
        if not name.endswith(UNCHANGED):
            wide[name] = wider(name, small, narrow, neurons)
    save_file(wide, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(weight.numel() for weight in wide.values())


def inner(size, neurons):
    """The large size of an MLP."""
    return 64 * ceil(size * neurons / 64)


def wider(name, small, narrow, neurons):
    """The large tensor of a small one, on the CPU. narrow: the small model's width."""
    sizes = [FACTOR * size for size in small.shape]
    if name.endswith(OUTER):
        sizes[0] = small.shape[0]
    for part, dimension in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)):
        if part in name:
            sizes[dimension] = inner(small.shape[dimension], neurons)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    large = torch.empty(sizes, dtype=torch.bfloat16, device=device).normal_(std=STANDARD_DEVIATION)
    small, norm = small.to(device), small.ndim == 1 and "norm" in name
    if norm or name.endswith(OUTER):
        large.zero_()
    if any(part in name for part in TO_RESIDUAL):
        large[narrow:] = 0  # nothing is added beyond the small model's width
    if "o_proj" in name or "down_proj" in name:
        large[:, small.shape[1] :] = 0  # nor by the added heads and neurons
        large[:narrow, : small.shape[1]] = small
    elif small.ndim == 1 and not norm:  # a bias of heads
        large[: len(small)] = small
    else:  # it reads a residual stream, or several side by side
        rows = large if norm else large[: len(small)]
        streams = rows.view(-1, FACTOR * narrow)
        # a norm's mean square is over more entries, all of them zero
        streams[:, :narrow] = small.view(-1, narrow) * (FACTOR**-0.5 if norm else 1)
    return large.cpu()


def neurons_for(about):
    """The ratio of MLPs with which the large target has about PARAMETERS; at least 1."""
    size, layers, neurons = (
        about["hidden_size"],
        about["num_hidden_layers"],
        about["intermediate_size"],
    )
    heads = about["num_attention_heads"]
    keys = about.get("num_key_value_heads") or heads
    width = FACTOR * size
    attention = 2 * width * width * layers * (1 + Fraction(keys, heads))
    embeddings = (1 if about.get("tie_word_embeddings") else 2) * about["vocab_size"] * width
    rest = int(PARAMETERS - attention - embeddings) // (3 * width * layers)
    return max(Fraction(rest, neurons), Fraction(1))


def main(target, folder, *heads):
    use_machine()
    neurons = neurons_for(Checkpoint.open(target).config_json)
    for spec, destination in ((target, folder), *zip(heads[::2], heads[1::2], strict=True)):
        source = Checkpoint.open(spec)
        source.fetch()
        count = widen(source, Path(destination), neurons)
        print(f"{count / 1e9:.2f} billion parameters in {destination}")


if __name__ == "__main__":
    main(*sys.argv[1:])
