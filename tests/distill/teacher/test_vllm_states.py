"""Hidden states from a vLLM, with a stand-in that writes files as vLLM 0.32 does."""

import dataclasses
import fcntl
import json
import os
import shlex
import shutil
import sys
import threading
from contextlib import contextmanager
from itertools import count, pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlavaConfig

import eval.run
from align.checkpoint import Checkpoint
from align.errors import SourceError, UserError
from align.files import read_json
from distill.models import check_models, open_models, target_ends
from distill.prompt_sets import collect_prompts
from distill.teacher import vllm_states, vllm_target
from distill.teacher.answers import USED
from distill.teacher.states import LocalStates, states_of
from distill.teacher.store import Answers, Store, name_of
from distill.teacher.vllm_states import extracted, state_reader
from distill.teacher.vllm_target import answering_target
from distill.train import run
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.engines.server import Server, ServerError
from eval.engines.start_vllm import VLLM_PYTHON
from eval.prompts import Prompt
from tests.conftest import cache_without_answers
from tests.distill.teacher.test_server_target import StandIn

KINDS = ["eagle3", "medusa", "dflash"]
SHORT = {"draft": None, "answers": "vllm", "cache_top_k": 6, "answer_max_new_tokens": 12}


class Extractor(StandIn):
    """It writes the states of a prompt after its response; the last ones before the final norm.

    folder: None if it only answers. moved: added to the token ids in its files.
    """

    def __init__(self, target, layers, folder, **changes):
        self.layers, self.folder, self.numbers, self.moved = layers, folder, count(), 0
        super().__init__(target, names=["target"], ended=False, mangle=self.extract, **changes)

    def extract(self, sent):
        if self.folder is None:
            return
        path = Path(self.folder) / f"{next(self.numbers)}.safetensors"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        sent["kv_transfer_params"] = {"hidden_states_path": str(path)}
        ids = torch.tensor(sent["choices"][0]["prompt_token_ids"])

        def write():
            states = torch.stack([self.before_norm(ids)[layer] for layer in self.layers], 1)
            save_file({"token_ids": ids + self.moved, "hidden_states": states}, path)
            os.close(lock)

        threading.Timer(0.01, write).start()

    def before_norm(self, ids):
        """The states [T, H] of every layer."""
        model, last = self.target.model, []
        with self.lock, torch.no_grad():
            hook = model.model.norm.register_forward_pre_hook(lambda _, read: last.append(read[0]))
            states = model(ids[None], output_hidden_states=True).hidden_states
            hook.remove()
        return [state[0] for state in (*states[:-1], last[0])]


@pytest.fixture(scope="module")
def target(folder):
    return load_target(Checkpoint.open(folder / "roomy"), torch.float32, "cpu", 128)


@pytest.fixture(autouse=True)
def started(monkeypatch, target):
    """Every server that was started; those that extract states have a folder."""
    servers = []

    @contextmanager
    def serve(_, *arguments, **variables):
        options = dict(pairwise(arguments))
        layers = folder = None
        if "--kv-transfer-config" in options:
            config = json.loads(options["--speculative-config"])["draft_model_config"]
            layers = config["hf_config"]["eagle_aux_hidden_state_layer_ids"]
            transfer = json.loads(options["--kv-transfer-config"])
            folder = transfer["kv_connector_extra_config"]["shared_storage_path"]
            module = transfer["kv_connector_module_path"] + ".py"
            assert [path.name for path in Path(variables["PYTHONPATH"]).iterdir()] == [module]
            assert "--no-enable-prefix-caching" in arguments
        server = Extractor(target, layers, folder)
        servers.append(server)
        try:
            yield server.url
        finally:
            server.stop()
            server.ended = True

    monkeypatch.setattr(vllm_target, "serve_vllm", serve)
    monkeypatch.setattr(vllm_states, "serve_vllm", serve)
    monkeypatch.setenv(VLLM_PYTHON, sys.executable)
    return servers


@pytest.fixture(scope="module")
def quantised(folder, tmp_path_factory):
    """The target as engines compute it: matrices of its layers in eight bits with a scale."""
    made = shutil.copytree(folder / "roomy", tmp_path_factory.mktemp("fp8") / "target")
    tensors = load_file(made / "model.safetensors")
    for name in [n for n, t in tensors.items() if ".layers." in n and t.ndim > 1]:
        tensors[name.replace("weight", "weight_scale")] = scale = tensors[name].abs().max() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    config = read_json(made / "config.json") | {"quantization_config": {"quant_method": "fp8"}}
    (made / "config.json").write_text(json.dumps(config))
    return made


def acceptance(target, draft, texts):
    """The share of first draft tokens that are accepted in the outputs of the training."""
    drafter, accepted = load_drafter(str(draft), target), []
    for text in texts[:12]:
        ids = target.checkpoint.tokenizer(" ".join(text.split()[:6]))["input_ids"]
        decoding = Decoding(Sampling(), target.stops, 12)
        done = decode(target.decoder, drafter, Prompt(text, prompt=text), ids, decoding, 1)
        accepted += [count > 0 for count in done.accepted]
    return sum(accepted) / len(accepted)


def check_states(run_folder, layers, target):
    """The number of texts whose states of these layers are stored, as this process has them."""
    store = Store(Path(read_json(run_folder / USED)["store"]))
    states, found = states_of(store, layers), store.of_states(layers)
    assert set(found.made_by(list(found))) == {"vllm"}
    answers = [answer for answer in Answers(store, list(store)) if name_of(answer.text) in found]
    local = LocalStates(lambda: target).read([answer.text for answer in answers], layers)
    for answer, expected in zip(answers, local, strict=True):
        torch.testing.assert_close(states(answer), expected, atol=0.02, rtol=0.01)
    return len(answers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_quantised_target_gets_a_draft(
    job, tmp_path, quantised, target, started, texts, monkeypatch, capsys, kind
):
    monkeypatch.setattr("distill.models.load_target", None)  # it cannot be loaded
    keys = SHORT | {"target": str(quantised), "drafter": kind, "max_steps": 150}
    recipe = job(tmp_path / "run", **keys, fit_tokens=10**6)
    assert run(dataclasses.replace(recipe, dry_run=True)) == 0
    assert not started
    assert run(recipe) == 0
    answering, extracting = started
    assert answering.ended
    assert extracting.ended
    assert not Path(extracting.folder).exists()
    command = capsys.readouterr().out.partition("python -m eval.run ")[2]
    assert eval.run.parse(shlex.split(command)[:8]).output_dir == recipe.folder
    pair = check_models(recipe, *open_models(recipe))
    read = check_states(recipe.folder, pair.layers, target)
    assert pair.fit_layers == ((2,) if kind == "eagle3" else ())
    if pair.fit_layers:
        assert check_states(recipe.folder, pair.fit_layers, target) <= read
    assert len(extracting.requests) == read  # one for all layers of a text
    assert acceptance(target, recipe.folder / "draft", texts) > 0.3
    assert run(recipe) == 0  # nothing is missing
    assert len(started) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_draft_is_that_of_the_loaded_target(
    job, folder, tmp_path, started, monkeypatch, kind
):
    made = []
    for answers in ("vllm", "local"):
        (tmp_path / answers).mkdir()
        monkeypatch.setenv("DRAFTSMITH_CACHE", cache_without_answers(tmp_path / answers))
        keys = SHORT | {"target": str(folder / "roomy"), "drafter": kind, "answers": answers}
        recipe = job(tmp_path / answers / "run", **keys, max_steps=0)
        assert run(recipe, measured=False) == 0
        made.append(load_file(recipe.folder / "prepared" / "model.safetensors"))
    assert len(started) == 2
    assert made[0].keys() == made[1].keys()
    for name, tensor in made[0].items():
        torch.testing.assert_close(tensor, made[1][name], atol=0.05, rtol=0.05)


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_a_draft_is_trained_further(job, folder, tmp_path, started, monkeypatch, kind):
    keys = SHORT | {"target": str(folder / "roomy"), "max_steps": 1}
    first = job(tmp_path / "first", **keys, drafter=kind)
    assert run(first, measured=False) == 0
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("DRAFTSMITH_CACHE", cache_without_answers(tmp_path / "cache"))
    keys["draft"] = str(first.folder / "draft")
    assert run(job(tmp_path / "again", **keys), measured=False) == 0
    assert len(started) == 4


def test_a_model_within_another_is_refused(job, tmp_path, quantised, started):
    """Its tensors have other names."""
    made = shutil.copytree(quantised, tmp_path / "nested")
    inner = read_json(made / "config.json")
    outer = {"model_type": "llava", "text_config": inner}
    outer["quantization_config"] = inner.pop("quantization_config")
    (made / "config.json").write_text(json.dumps(outer))
    with pytest.raises(UserError, match="llava"):
        run(job(tmp_path / "run", **SHORT, target=str(made), drafter="eagle3"))
    assert not started


@pytest.mark.parametrize("nested", [False, True])
def test_states_are_read_where_the_outputs_are_generated(
    job, folder, tmp_path, monkeypatch, nested
):
    """`answers: auto` picks a vLLM on a GPU."""
    monkeypatch.setattr("distill.teacher.vllm_target.who_answers", lambda *_: ("vllm", "a GPU"))
    recipe = job(tmp_path / "run", draft=None, target=str(folder / "roomy"), drafter="eagle3")
    pair = check_models(recipe, *open_models(recipe))
    target = answering_target(recipe, pair, collect_prompts(recipe, pair.target), None)
    if nested:
        pair.target.config = LlavaConfig()
    with state_reader(recipe, pair, target, None) as reader:
        assert reader.by == ("local" if nested else "vllm")


def test_states_in_the_store_are_not_read_again(job, folder, tmp_path, started, monkeypatch):
    keys = SHORT | {"target": str(folder / "roomy"), "drafter": "medusa", "max_steps": 1}
    recipe = job(tmp_path / "run", **keys)
    monkeypatch.setattr("distill.teacher.store.ANSWERS_PER_SHARD", 4)
    append, appended = Store.append, []

    def fails(store, records, by):
        if "states" in store.folder.name:
            appended.append(records)
            if len(appended) == 2:
                raise KeyboardInterrupt
        append(store, records, by)

    with monkeypatch.context() as patch:
        patch.setattr(Store, "append", fails)
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
    assert [server.ended for server in started] == [True, True]
    left = Path(started[1].folder)
    assert not left.exists()
    left.mkdir()
    (left / "0.safetensors").write_text("of a run that was killed")
    assert run(recipe, measured=False) == 0
    assert len(started) == 3
    assert not left.exists()
    store = Store(Path(read_json(recipe.folder / USED)["store"])).of_states((2,))
    asked = [body for _, body in started[2].requests]
    assert len(asked) == len(list(store)) - 4


def test_a_file_of_another_prompt_or_cut_short_is_refused(tmp_path, target, monkeypatch):
    text, server = torch.tensor([3, 5, 7, 9]), Extractor(target, (1,), tmp_path)
    assert extracted(Server(server.url), text).shape == (3, 1, target.model.config.hidden_size)
    assert not list(tmp_path.iterdir())
    server.moved = 1
    with pytest.raises(ServerError, match="3 other tokens"):
        extracted(Server(server.url), text)
    monkeypatch.setitem(
        globals(), "save_file", lambda tensors, path: path.write_bytes(b"full disk")
    )
    with pytest.raises(SourceError, match="is damaged"):
        extracted(Server(server.url), text)
    server.stop()


def test_ends_are_read_by_name(job, folder, quantised, target):
    recipe = job("unused", **SHORT, target=str(quantised), drafter="medusa")
    ends = target_ends(check_models(recipe, *open_models(recipe)), torch.float32, "cpu").model
    assert ends.config.num_hidden_layers == target.model.config.num_hidden_layers
    whole = target.model.state_dict()
    read = {name for name, tensor in ends.state_dict().items() if not tensor.is_meta}
    assert {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} < read
    assert "model.layers.0.input_layernorm.weight" in read
    assert not [name for name in read if "proj" in name]
    for name in read:
        assert torch.equal(ends.state_dict()[name], whole[name])
    recipe = job("unused", **SHORT, target=str(folder / "roomy"), drafter="medusa")
    ends = target_ends(
        check_models(recipe, *open_models(recipe)), torch.bfloat16, "cpu"
    ).model.state_dict()
    assert "model.layers.1.mlp.up_proj.weight" not in ends
    for name, tensor in ends.items():
        assert torch.equal(tensor, whole[name].bfloat16())


def changed(quantised, folder, change):
    """A copy of the quantised target with other tensors."""
    made = shutil.copytree(quantised, folder / "changed")
    tensors = load_file(made / "model.safetensors")
    change(tensors)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    return made


def in_eight_bits(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)


def packed(tensors):
    tensors["lm_head.qweight"] = tensors.pop("lm_head.weight").to(torch.int32)


@pytest.mark.parametrize("change", [in_eight_bits, packed])
def test_a_quantised_head_is_refused(job, tmp_path, quantised, started, change):
    made = changed(quantised, tmp_path, change)
    with pytest.raises(UserError, match="lm_head"):
        run(job(tmp_path / "run", **SHORT, target=str(made), drafter="medusa"))
    assert not started


@pytest.mark.parametrize("drafter", [None, "pard"])
def test_a_quantised_target_has_no_layers_for_a_draft(job, tmp_path, quantised, started, drafter):
    with pytest.raises(UserError, match="made from its layers"):
        run(job(tmp_path / "run", **SHORT, target=str(quantised), drafter=drafter))
    assert not started


def test_a_quantised_target_gets_a_sibling(job, folder, tmp_path, quantised, started, capsys):
    keys = SHORT | {"target": str(quantised), "draft": str(folder / "large"), "max_steps": 1}
    recipe = job(tmp_path / "run", **keys)
    assert run(recipe) == 0
    assert len(started) == 1
    assert "--engine vllm" in capsys.readouterr().out
    assert (recipe.folder / "draft" / "model.safetensors").is_file()
