"""GGUF files: their fields, and the checkpoint that is made of one."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from align.cache import cached, file_sha256
from align.errors import SourceError, listed, one_line

if TYPE_CHECKING:
    from gguf import GGUFReader
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TURN_ENDS = (  # names by which llama.cpp knows such tokens, and one more
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <|return|> <|call|> <|calls|> <|flush|> <turn|> "
    "<end_of_turn> <|end_of_turn|> <end_of_utterance> <|endoftext|> <|end_of_text|> <EOT> _<EOT> "
    "[EOT] [EOS] <eos> </s> <|tool_response> <｜end▁of▁sentence｜> [e~["
).split()
# llama.cpp's names of rules by which texts are split as transformers' GGUF reader does by default.
# SmolLM's rule also splits numbers into digits.
_GPT2_RULES = (
    "default gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling "
    "smollm"
).split()
_CONVERTED = "bf16-6"  # ends the name of a GGUF file's checkpoint in the cache
_LLAMA3_ROPE = {  # the same in all released models
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def reader_of(file: Path) -> GGUFReader:
    """The reader of a GGUF file, made once, because parsing a large vocabulary takes seconds."""
    return _reader(file, file.stat().st_mtime_ns)


@functools.cache
def _reader(file: Path, changed: int) -> GGUFReader:
    from gguf import GGUFReader

    return GGUFReader(file)


def value_of(file: Path, key: str) -> Any:
    """The value of a key in a GGUF file's header, or None. ARCH in a key: the architecture."""
    fields = reader_of(file).fields
    field = fields.get(key.replace("ARCH", str(fields["general.architecture"].contents())))
    return None if field is None else field.contents()


def quantisation_of(file: Path) -> str:
    """The quantisation that a GGUF file declares (Q4_0, BF16, …)."""
    from gguf import LlamaFileType

    if (kind := value_of(file, "general.file_type")) is None:
        return "GGUF of a kind that it does not name"
    return LlamaFileType(kind).name.removeprefix("MOSTLY_").removeprefix("ALL_")


def converted(spec: str, file: Path) -> Path:
    """A checkpoint folder made from a GGUF file, cached under the file's own checksum.

    The weights are dequantised to fp32 and rounded to bf16. This loses precision, because scale * q
    + minimum has more bits than bf16's eight: on SmolLM2-135M Q4_1 the weights change by 0.14% rms,
    and 0.4% of the greedy choices change. The target of a run is this bf16 checkpoint.
    """

    def fill(folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        print(f"Converting {file.name} to safetensors, once …", file=sys.stderr)
        try:
            reader = reader_of(file)
            parts = reader.fields.get("split.count")
            if parts is not None and parts.contents() > 1:
                raise SourceError(
                    f"{spec!r} is one of {parts.contents()} parts of a model, and a part cannot "
                    "be read; join them with `llama-gguf-split --merge` and name that file."
                )
            # in an empty folder, because a tokenizer beside the file would be read
            with (
                tempfile.TemporaryDirectory() as alone,
                # transformers would parse the file three times more
                mock.patch("gguf.GGUFReader", return_value=reader),
            ):
                (Path(alone) / "model.gguf").symlink_to(file.absolute())
                where: dict[str, Any] = {"gguf_file": "model.gguf", "local_files_only": True}
                auto: Any = AutoModelForCausalLM  # as in Checkpoint.load
                model, loaded = auto.from_pretrained(
                    alone,
                    # otherwise the model is marked as quantised and cannot be saved or trained
                    quantization_config=GgufConfig(dequantize=True),
                    dtype=torch.bfloat16,
                    output_loading_info=True,
                    **where,
                )
                tokenizer = AutoTokenizer.from_pretrained(alone, **where)
            refuse_incomplete(spec, loaded)
            _restore_ends(model, tokenizer, reader)
            lost = _splitting_lost(tokenizer, reader) or _tokens_lost(tokenizer, reader)
            if lost := lost or _restore_rope(model, reader):
                raise SourceError(
                    f"{spec!r} has {lost}, and transformers' GGUF reader drops this; use the "
                    "safetensors checkpoint instead."
                )
        except SourceError:
            raise
        except Exception as error:  # the parser of a broken file raises many types
            raise SourceError(
                f"{spec!r} cannot be read as GGUF ({type(error).__name__}: {one_line(error)}); it "
                "is damaged, not a GGUF file, or of an unsupported architecture. Name the folder "
                "of the safetensors checkpoint instead."
            ) from error
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return cached(f"checkpoints/{file_sha256(file)[:32]}-{_CONVERTED}", fill)


def refuse_incomplete(spec: str, loaded: dict[str, Any]) -> None:
    """Raise SourceError for missing tensors: transformers fills them with random numbers."""
    if missing := sorted(loaded["missing_keys"]):
        raise SourceError(
            f"{spec!r} lacks {len(missing)} of its model's tensors ({listed(missing)}); the "
            "checkpoint is incomplete or not a causal language model: fetch or save it again."
        )


def _restore_ends(model: Any, tokenizer: Any, reader: GGUFReader) -> None:
    """Set the stop tokens to those that end a text or a turn, as llama.cpp does.

    A file may name the token that ends a turn separately, or not at all.
    """
    named = "eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep"
    ends = [reader.fields.get(f"tokenizer.ggml.{name}_token_id") for name in named]
    ids = [int(end.contents()) for end in ends if end is not None]
    # transformers would take the BOS token, and the default of the config's class
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(ids[0]) if ends[0] is not None else None
    if ends[0] is None:
        model.config.eos_token_id = model.config.get_text_config().eos_token_id = None
        model.generation_config.eos_token_id = None
    names = [name for name in _TURN_ENDS if name in str(tokenizer.chat_template)]
    vocabulary = tokenizer.get_vocab()
    if {"<|return|>", "<|call|>"} <= vocabulary.keys():  # "<|end|>" then ends a part of a turn
        names = [name for name in names if name != "<|end|>"]
    ids += [vocabulary[name] for name in names if name in vocabulary]
    if ids:
        stops = list(dict.fromkeys(ids))
        model.generation_config.eos_token_id = stops if len(stops) > 1 else stops[0]


def _splitting_lost(tokenizer: PreTrainedTokenizerBase, reader: GGUFReader) -> str | None:
    """The file's rule of splitting texts, or of the space before them, if another was taken."""
    prefix = reader.fields.get("tokenizer.ggml.add_space_prefix")
    if prefix is not None and not prefix.contents() and tokenizer.tokenize("a")[0][0] == "▁":
        return "no space before a text (add_space_prefix false)"
    rule = reader.fields.get("tokenizer.ggml.pre")
    backend: Any = json.loads(tokenizer.backend_tokenizer.to_str())
    as_gpt2 = (backend["pre_tokenizer"] or {}).get("use_regex")
    if rule is None or not as_gpt2 or rule.contents() in _GPT2_RULES:
        return None
    return f"the splitting rule {rule.contents()!r}"


def _tokens_lost(tokenizer: PreTrainedTokenizerBase, reader: GGUFReader) -> str | None:
    """A control or user-defined token of the file that its own text does not become."""
    from gguf import TokenType

    names, kinds = (
        reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type")
    )
    for token, (name, kind) in enumerate(zip(names, kinds, strict=True)):
        whole = kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
        if whole and tokenizer.encode(name, add_special_tokens=False) != [token]:
            return f"the token {name!r}"
    return None


def _restore_rope(model: PreTrainedModel, reader: GGUFReader) -> str | None:
    """Restore Llama 3's rotary scaling in the config, because transformers' GGUF reader drops it.

    Returns the name of a property that cannot be restored, else None.
    """
    config: Any = model.config.get_text_config()
    # a tied head may be in the file again; tied weights have one address
    unread = {"rope_freqs.weight", *["output.weight"] * config.tie_word_embeddings}
    read = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    held = sum(int(tensor.n_elements) for tensor in reader.tensors if tensor.name not in unread)
    if (more := held - sum(read.values())) > 0:
        return f"{more:,} weights for which the model has no place"
    rope = config.rope_parameters
    if not rope or rope.get("rope_type", "default") != "default":
        return None
    for name, field in reader.fields.items():
        if name.endswith(".rope.scaling.type") and field.contents() != "none":
            return f"rotary scaling {field.contents()!r}"
    factors = tensors.get("rope_freqs.weight")
    if factors is not None and factors.max() > 1:  # the file has only these results of the scaling
        config.rope_parameters = rope | _LLAMA3_ROPE | {"factor": float(factors.max())}
        if not np.allclose(llama3_factors(config), factors, rtol=1e-3):
            return "scaled angles other than Llama 3's"
    return None


def llama3_factors(config: Any) -> np.ndarray[Any, Any]:
    """The factor by which Llama 3's scaling divides each rotary frequency [D/2]."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    steps = np.arange(len(scaled), dtype=np.float32) / len(scaled)
    plain = config.rope_parameters["rope_theta"] ** -steps
    return (plain / scaled.numpy()).astype(np.float32)
