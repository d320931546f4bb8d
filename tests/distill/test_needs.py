"""What a run needs: memory from configs, and the disk for the hidden states."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import read_json
from align.vocabulary import mask_token
from distill import models, needs, train
from distill.train import run
from eval.prompts import PromptSet
from tests.dflash import save_published
from tests.eagle3 import PublishedEagle3

PRUNED = {"draft": None, "num_draft_layers": 1}
CONFIGS = Path(__file__).with_name("configs")
PAIR = {"target": 70, "draft": 8}
PROMPTS = SimpleNamespace(
    **dict.fromkeys(("evaluation", "training", "tuning", "held_out"), PromptSet("", [], [[1]]))
)
ON_A_SERVER = {"answers": "server", "answer_url": "http://localhost:8000"}


def pair_of(recipe, layers=0, decoded_here=False):
    """The pair of configs without weights and tokenizers. layers: their number."""
    target, draft = models.open_models(recipe)
    sibling, published = (None, draft) if recipe.sibling is None else (draft, None)
    here = {"target": target, "draft": sibling or target, "published": published}
    return SimpleNamespace(**here, layers=range(layers), decoded_here=decoded_here)


def test_hidden_states_need_disk(job, tmp_path):
    """Each of a 70B's states takes 16 KiB a token."""
    recipe = job(tmp_path, target=str(CONFIGS / "Llama-3.1-70B-Instruct"), **PRUNED)
    _, states = needs.cache_bytes(recipe, pair_of(recipe, 5), [[1] * 100] * 1000, 300)
    assert states == 5 * 1000 * 400 * 2**14


@pytest.mark.parametrize(
    ("free", "device", "cached", "minutes", "refused", "warned", "stored"),
    [
        (1_000, "cpu", 0, None, True, False, False),
        (7_000, "full", 0, None, True, False, True),
        (7_000, "cpu", 0, None, False, True, False),
        (8_000, "cpu", 0, None, False, True, True),
        (54_000, "cuda", 0, None, False, False, False),
        (7_000, "cpu", 0, 5, False, True, True),  # fewer outputs fit
        (900, "cpu", 0, 5, True, False, False),
        (54_000, "cpu", 0, None, False, True, True),
        (55_000, "cpu", 0, None, False, False, True),
        (55_000, "cuda", 0, None, False, False, True),
        (8_000, "cpu", 11, None, False, False, False),  # their states alone take 20 kB
        (8_000, "cpu", 11, 5, False, True, True),
        (23_000, "cpu", 11, None, False, False, True),
    ],
)
def test_what_does_not_fit_on_the_disk_is_not_stored_or_refused_before_an_output_is_generated(
    job, tmp_path, monkeypatch, capsys, free, device, cached, minutes, refused, warned, stored
):
    """11 prompts with 83 tokens in all, outputs of 1 to 24 tokens of 124 bytes, and 64 bytes of a
    state at each token: 7,380 to 54,944 bytes, 1,364 to 32,736 of them without states.
    """
    keys = PRUNED | {"minutes": minutes, "fit_tokens": 1}
    if cached:
        with monkeypatch.context() as patch:
            patch.setattr(train, "prepare_draft", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                run(job(tmp_path / "other", **keys))
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(needs.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(needs, "CHECKPOINT", 0)
    monkeypatch.setattr(needs, "target_device", lambda _: device.replace("full", "cpu"))
    monkeypatch.setattr(needs, "memory_left", lambda _: 0 if device == "full" else 2**40)
    monkeypatch.setattr(train, "answered", answered := Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(UserError if refused else KeyboardInterrupt):
        run(job(tmp_path / "run", drafter="eagle3", **keys))
    assert answered.called != refused
    assert refused or answered.call_args.args[-1] == stored
    assert ("Warning: The run writes" in capsys.readouterr().out) == warned
    assert (tmp_path / "run").exists() != refused


def test_a_draft_that_does_not_fit_on_the_disk_is_refused(job, tmp_path, monkeypatch):
    monkeypatch.setattr(
        needs.shutil,
        "disk_usage",
        lambda folder: SimpleNamespace(free=2**40 * (tmp_path not in (folder, *folder.parents))),
    )
    with pytest.raises(UserError):
        run(job(tmp_path / "run", **PRUNED))


def test_the_target_has_room_for_each_set_of_prompts(job, tmp_path, monkeypatch):
    recipe = job(tmp_path / "run")
    loaded = Mock()
    monkeypatch.setattr(models, "load_target", loaded)
    recipe_pair = SimpleNamespace(**vars(pair_of(recipe)))
    for name in vars(PROMPTS):
        long = SimpleNamespace(**vars(PROMPTS) | {name: PromptSet("", [], [[1] * 60])})
        models.target_loader(recipe, recipe_pair, long)()
        assert loaded.call_args.args[-1] > 60 + recipe.answer_max_new_tokens


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({"drafter": "dflash"}, 1),
        ({"drafter": "dflash", "num_draft_layers": 4}, 4),
        ({"drafter": "dflash", "draft": "z-lab"}, 2),
        ({"drafter": "dflash", "draft": "speculators"}, 2),
        ({"drafter": "eagle3", "num_draft_layers": 4}, 1),
        ({"drafter": "eagle3", "draft": "speculators, Qwen3 layers"}, 2),
        ({"drafter": "medusa", "num_draft_layers": 4}, 1),
    ],
)
def test_the_layers_of_a_draft_need_memory(job, tmp_path, monkeypatch, capsys, keys, layers):
    shape = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 16, "head_dim": 8}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    if keys.get("drafter") == "dflash" and "draft" in keys:
        ids = torch.arange(99) if keys["draft"] == "speculators" else None
        save_published(tmp_path / "draft", shape, [1], ids)
    elif "draft" in keys:
        PublishedEagle3(keys["draft"], shape, [1], torch.arange(99)).save(tmp_path / "draft")
    monkeypatch.setattr(needs, "RUNTIME", 0)
    keys = PRUNED | keys | ({"draft": str(tmp_path / "draft")} if "draft" in keys else {})
    recipe = job(tmp_path, target=str(CONFIGS / "Llama-3.1-8B-Instruct"), **keys)
    needs.print_memory(recipe, pair_of(recipe), 100, answers_here=False)
    (needed,) = re.findall(r"memory.*: ([\d.,]+) GiB needed", capsys.readouterr().out)
    ends, layer = 2 * 128_256 * 4096, 218_112_000  # parameters
    assert float(needed) == pytest.approx(1.3 * 16 * (ends + layers * layer) / 2**30, rel=1e-2)


def test_a_special_token_beyond_the_head_has_no_entry(folder, tmp_path):
    """As the padding that many fine-tunes of Llama 2 add; its id is that of no row."""
    shutil.copytree(folder / "roomy", tmp_path / "target")
    path = tmp_path / "target" / "config.json"
    about = read_json(path)
    checkpoint = Checkpoint.open(tmp_path / "target")
    checkpoint.tokenizer.add_special_tokens({"pad_token": "<pad>"})
    checkpoint.tokenizer.save_pretrained(tmp_path / "target")
    count = len(checkpoint.tokenizer) - 1
    path.write_text(json.dumps(about | {"vocab_size": count}))
    words = Checkpoint.open(tmp_path / "target").vocabulary
    assert words.tokenizer.pad_token_id == words.vocab_size == count
    assert count not in models.forced_tokens(words)
    with pytest.raises(UserError, match="no entry that no text uses"):
        mask_token(words)


@pytest.mark.parametrize("name", ["target", "large"])
def test_parameters_are_counted_from_the_config(folder, name):
    whole = AutoModelForCausalLM.from_pretrained(folder / name).num_parameters()
    assert models.parameters(Checkpoint.open(folder / name).config) == whole


@pytest.mark.parametrize(
    ("changes", "processes", "needed"),
    [
        ({"use_peft": True, "device_map": "auto"}, 1, 59.3),  # to train the draft on one of them
        (ON_A_SERVER, 1, 156.6),
        (ON_A_SERVER, 8, 20.4),
    ],
    ids=["spread", "alone", "sharded"],
)
def test_what_eight_gpus_need(job, tmp_path, monkeypatch, capsys, changes, processes, needed):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *device: (79 * 2**30, 80 * 2**30))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr(needs, "PartialState", lambda: SimpleNamespace(num_processes=processes))
    named = {key: str(CONFIGS / f"Llama-3.1-{b}B-Instruct") for key, b in PAIR.items()}
    recipe = job(tmp_path, **named | changes, use_cpu=False, dtype="bfloat16")
    pair = pair_of(recipe, decoded_here=not recipe.remote_target)
    needs.print_memory(recipe, pair, 100, answers_here=True)
    (line,) = re.findall("memory of a GPU: .*", capsys.readouterr().out)
    assert f"{needed} GiB needed" in line
    assert ("TOO LITTLE" in line) == (needed > 79)
    if recipe.device_map is None:
        monkeypatch.setattr(models, "target_device", lambda _: "cuda")
        with pytest.raises(UserError, match="takes 131 GiB, but a GPU here has 80"):
            models.target_loader(job(tmp_path, **named, dtype="bfloat16"), pair, PROMPTS)
