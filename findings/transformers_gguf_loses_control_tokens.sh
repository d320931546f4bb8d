#!/usr/bin/env bash
# Control tokens of a GGUF whose names are not ASCII are cut into pieces by transformers.
#
# One would guess: a token that a GGUF file lists with type 3 (control) is one token in the tokenizer
# that transformers makes of the file, whatever characters its name has.
# What happens: names in ASCII stay one token. A name with full-width bars, as in DeepSeek's files,
# is encoded as the bytes of its characters. Nothing is logged. A chat prompt then has other ids than
# in llama.cpp, and no beginning or end that the model knows.
# Cause, by reading: the names are raw text, and the reader takes them for byte-level strings.
#
# Versions: transformers 5.23.0, gguf 0.19.0, torch 2.13.0. Source: huggingface/transformers#49008.
# Output seen on 2026-11-28:
#   <|user|> -> ['<|user|>']
#   <｜User｜> -> 11 ids, file says 1
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 gguf==0.19.0 torch==2.13.0
cd "$folder"
venv/bin/python - <<'PY'
import gguf
from transformers import AutoTokenizer

printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
shifted = iter(range(256, 512))
alphabet = [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]
alphabet.append("ab")  # the merge of a and b
names = {"<|user|>": 257, "<｜User｜>": 258}

writer = gguf.GGUFWriter("file.gguf", "qwen2")
for add, value in (
    (writer.add_context_length, 64), (writer.add_embedding_length, 8), (writer.add_block_count, 1),
    (writer.add_feed_forward_length, 8), (writer.add_head_count, 1), (writer.add_head_count_kv, 1),
    (writer.add_layer_norm_rms_eps, 1e-6), (writer.add_vocab_size, 259),
    (writer.add_tokenizer_model, "gpt2"), (writer.add_tokenizer_pre, "qwen2"),
    (writer.add_token_list, [*alphabet, *names]),
    (writer.add_token_types, [1] * 257 + [3] * 2),
    (writer.add_token_merges, ["a b"]), (writer.add_eos_token_id, 257),
):
    add(value)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.close()

tokenizer = AutoTokenizer.from_pretrained(".", gguf_file="file.gguf")
ids = {name: tokenizer(name, add_special_tokens=False).input_ids for name in names}
print("<|user|> ->", tokenizer.convert_ids_to_tokens(ids["<|user|>"]))
print("<｜User｜> ->", len(ids["<｜User｜>"]), "ids, file says 1")
assert ids["<|user|>"] == [257], "the ASCII name is no longer one token"
assert len(ids["<｜User｜>"]) > 1, "mended: the other name is one token as well"
PY
