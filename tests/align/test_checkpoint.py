"""A model is read whole, or an error says what to do."""

import hashlib
import json
import os
import subprocess

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from align.checkpoint import Checkpoint, weight_files, weights_sha256
from align.errors import SourceError, UserError, abridged
from align.files import read_json
from tests.align.conftest import PYTHON, ROOT


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


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
        Checkpoint.open(spec)


def test_only_json_tokenizer_and_safetensors_come_from_the_hub(checkpoint, monkeypatch):
    asked = []

    def snapshot_download(repo_id, **options):
        asked.append(options["allow_patterns"])
        return str(checkpoint)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    weights = (checkpoint / "model.safetensors").rename(checkpoint / "other.safetensors")
    model = Checkpoint.open("org/model")
    assert model.folder == checkpoint
    model.fetch()  # without an index, a part may be missing
    assert set(asked[1]) - set(asked[0]) == {"*.safetensors"}
    pickles = [p for p in asked[1] if "bin" in p or p.endswith((".pt", ".py"))]
    assert pickles == ["mask_embedding.pt"]  # a draft with one is refused
    weights.unlink()
    assert not model.has_weights


@pytest.mark.parametrize("cached", [False, True])
def test_a_process_asks_the_hub_once_and_reads_one_revision(checkpoint, monkeypatch, cached):
    """A Hub that drops packets lets each request wait for its time limit."""
    asked, snapshot = [], checkpoint.rename(checkpoint.with_name("abc"))
    weights, away = snapshot / "model.safetensors", checkpoint.with_name("weights")
    if not cached:
        weights.rename(away)

    def snapshot_download(repo_id, revision, **_):
        asked.append(revision)
        if revision is not None:
            away.rename(weights)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    for _ in range(2):
        model = Checkpoint.open("org/model")
        assert model.has_weights == (cached or len(asked) > 1)
        model.load(torch.float32)
        model.fetch()
        assert (model.folder, model.has_weights) == (snapshot, True)
    assert asked == [None] if cached else [None, "abc"]


def test_the_hash_of_weights_covers_every_file(tmp_path):
    """It is that of the list that `sha256sum *.safetensors` prints."""
    for shards in ((b"one",), (b"one", b"two"), (b"one", b"three")):
        files = {f"model-{i}.safetensors": weights for i, weights in enumerate(shards)}
        for name, weights in files.items():
            (tmp_path / name).write_bytes(weights)
        sums = [f"{hashlib.sha256(w).hexdigest()}  {name}\n" for name, w in files.items()]
        of_list = hashlib.sha256("".join(sums).encode()).hexdigest()
        expected = of_list if len(shards) > 1 else sums[0][:64]
        assert weights_sha256(tmp_path) == expected
    assert weights_sha256(tmp_path / "none") is None
    # an index of the Hub, whose files are not here yet
    shards = {"weight_map": {"weight": "model-00001-of-00002.safetensors"}}
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors.index.json").write_text(json.dumps(shards))
    assert weights_sha256(tmp_path / "hub") is None


def test_the_hash_of_the_config_is_of_what_is_computed(checkpoint):
    path = checkpoint / "config.json"
    about, before = read_json(path), Checkpoint.open(checkpoint).config_sha256
    for changes, same in (
        ({"dtype": "float16", "transformers_version": "9", "eos_token_id": 7}, True),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, False),
    ):
        path.write_text(json.dumps(about | changes))
        assert (Checkpoint.open(checkpoint).config_sha256 == before) == same


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
    Checkpoint.open("org/folders")
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
        Checkpoint.open(checkpoint).load(torch.float32, device)


def test_an_ill_formed_tokenizer(checkpoint):
    (checkpoint / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(SourceError, match="tokenizer"):
        assert Checkpoint.open(checkpoint).tokenizer


def test_a_sentencepiece_file_needs_two_packages(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer.model").write_bytes(b"\n\x0e")
    with pytest.raises(SourceError, match="sentencepiece protobuf"):
        assert Checkpoint.open(checkpoint).tokenizer


def test_what_needs_no_weights_is_read_without(checkpoint):
    pickled(checkpoint)
    quantised(checkpoint)
    assert len(Checkpoint.open(checkpoint).tokenizer) > 0
    assert Checkpoint.open(checkpoint).config.quantization_config  # a server may run it quantised


def test_what_is_not_refused(checkpoint):
    with_tensor("self_attn.bias", WHOLE.byte())(checkpoint)  # GPT-2's mask
    for empty in (None, {}):
        edit_config(checkpoint, quantization_config=empty)
        Checkpoint.open(checkpoint).load(torch.float32)
    edit_config(checkpoint, return_dict=False)
    model = Checkpoint.open(checkpoint).load(torch.float32)
    assert model(torch.tensor([[1]])).logits.isfinite().all()
    edit_config(checkpoint, auto_map={"AutoModelForCausalLM": "m.Evil"})
    Checkpoint.open(checkpoint)  # transformers has the model without that code
    for declared in (
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"a": 8}},
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
    ):
        edit_config(checkpoint, quantization_config=declared)  # of the KV cache alone
        assert Checkpoint.open(checkpoint).quantisation == ""
        Checkpoint.open(checkpoint).load(torch.float32)
    for declared in ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, {"a": 4}):
        edit_config(checkpoint, quantization_config=declared)
        assert Checkpoint.open(checkpoint).quantisation
    quantised(checkpoint)
    Checkpoint.open(checkpoint).fetch()  # for the kernels of an engine


def test_tensors_that_the_class_does_not_compute_are_named(checkpoint, recwarn):
    Checkpoint.open(checkpoint).load(torch.float32)
    assert not recwarn
    path = checkpoint / "model.safetensors"
    save_file(load_file(path) | {"selector.weight": torch.ones(1)}, path, {"format": "pt"})
    with pytest.warns(UserWarning, match=r"selector\.weight"):
        Checkpoint.open(checkpoint).load(torch.float32)


def test_shards_that_the_index_does_not_name_are_not_read(checkpoint):
    assert weight_files(checkpoint) == [checkpoint / "model.safetensors"]
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00001.safetensors")
    save_file({"stale": torch.ones(1)}, checkpoint / "model-00001-of-00002.safetensors")
    assert len(weight_files(checkpoint)) == 2  # without an index, all of them
    weights = {"weight_map": {"a": "model-00001-of-00001.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(weights))
    assert weight_files(checkpoint) == [checkpoint / "model-00001-of-00001.safetensors"]
    Checkpoint.open(checkpoint).fetch()
    weights["weight_map"]["b"] = "model-00003-of-00003.safetensors"
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(weights))
    with pytest.raises(SourceError, match="model-00003-of-00003"):  # found before it is read
        Checkpoint.open(checkpoint).fetch()
    for named in ({}, {"weight_map": None}, {"weight_map": {}}):
        (checkpoint / "model.safetensors.index.json").write_text(json.dumps(named))
        with pytest.raises(SourceError, match="names no weights"):
            weight_files(checkpoint)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to put it on")
def test_a_model_that_is_spread_over_gpus_is_never_left_on_the_cpu(checkpoint):
    with pytest.raises(SourceError, match="CUDA_VISIBLE_DEVICES"):
        Checkpoint.open(checkpoint).load(torch.float32, "auto")


def test_a_gpu_reads_the_files_itself_and_one_that_is_too_small_is_no_damage(
    checkpoint, monkeypatch
):
    def full(*_, device_map, **__):
        assert device_map == {"": "cuda"}  # or every process would hold a copy in memory first
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(SourceError, match="does not fit"):
        Checkpoint.open(checkpoint).load(torch.float32, "cuda")


# --- the environment


def test_telemetry_is_off_unless_the_user_turns_it_on():
    script = "import align, os; print(os.environ['HF_HUB_DISABLE_TELEMETRY'])"
    env = {k: v for k, v in os.environ.items() if k != "HF_HUB_DISABLE_TELEMETRY"}
    for value, expected in ((None, "1"), ("0", "0")):
        extra = {} if value is None else {"HF_HUB_DISABLE_TELEMETRY": value}
        command = [PYTHON, "-c", script]
        run = subprocess.run(command, cwd=ROOT, env=env | extra, capture_output=True, text=True)
        assert run.stdout.strip() == expected


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
