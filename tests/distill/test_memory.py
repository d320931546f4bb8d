"""Sizes from configs: against the models' cards, by hand, and against tensors that have data."""

import dataclasses
import itertools
import json
import re
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import profile
from transformers import LlamaConfig, LlamaForCausalLM

from align import sources
from distill import dry_run, export, memory
from distill.memory import DEVICES, RUNTIME, Stage, fits, least_shards, needs, smallest_device
from distill.prepare import pruned_config
from distill.recipe import build_recipe
from distill.train import run
from tests.benchmarks.what_fits import CONFIGS, config_of, hub_recipes, markdown, needs_of

DOCS = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
# of the models' cards on the Hub
PARAMETERS = {
    "Llama-3.1-70B-Instruct": 70_553_706_496,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.2-1B-Instruct": 1_235_814_400,
    "Qwen2.5-Coder-7B-Instruct": 7_615_616_512,
    "Qwen2.5-Coder-0.5B-Instruct": 494_032_768,
    "Qwen2.5-Coder-1.5B-Instruct": 1_543_714_304,
    "Qwen2.5-Coder-32B-Instruct": 32_763_876_352,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
}
SHAPE = LlamaConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    max_position_embeddings=1024,
    tie_word_embeddings=False,
)
LAYER = 256 * 256 * 2 + 256 * 64 * 2 + 3 * 256 * 512 + 2 * 256


def stage(found, name):
    return next(one for one in found.stages if one.name == name)


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters_are_those_of_the_cards(name, count):
    assert sum(p.numel() for p in memory._shape(config_of(name), torch.bfloat16).parameters()) == (
        count
    )
    assert {path.name for path in CONFIGS.iterdir()} == set(PARAMETERS)


@pytest.fixture(scope="module")
def tiny_job(job, tmp_path_factory):
    changes = {
        "draft": None,
        "num_draft_layers": 1,
        "draft_vocab_size": 1000,
        "dtype": "bfloat16",
        "answer_batch_size": 16,
        "max_train_prompts": 12,
        "max_gamma": 6,
    }
    return job(tmp_path_factory.mktemp("run"), **changes)


def test_a_pruned_draft_by_hand(tiny_job):
    found = needs(tiny_job, SHAPE, None, 100)
    target = 2 * (4 * LAYER + 2 * 4096 * 256 + 256)
    answering, distilling = stage(found, "answering"), stage(found, "distilling")
    assert answering.target == stage(found, "evaluating").target == target
    # 12 rows of 100 + 24 tokens in blocks of 64 slots, keys and values, 2 heads of 32, 4 layers
    assert answering.kv == 12 * 128 * 2 * 2 * 32 * 4 * 2
    trained = 4 * (LAYER + 1000 * 256 + 256)
    assert distilling.gradients == trained
    assert distilling.optimizer == 2 * trained
    assert distilling.draft == trained + 4 * 4096 * 256  # the embedding is frozen
    assert distilling.target == 0
    assert distilling.layer == 4 * LAYER
    assert found.checkpoint == 3 * trained
    assert found.answers_on_disk == 12 * 24 * (30 * 4 + 4)


def test_adapters_train_little_and_a_server_leaves_no_target(tiny_job):
    recipe = dataclasses.replace(tiny_job, draft="sibling", use_peft=True, lora_r=8)
    draft = LlamaConfig(**SHAPE.to_dict() | {"num_hidden_layers": 1})
    found = needs(recipe, SHAPE, draft, 100, target_here=False)
    assert [one.name for one in found.stages] == ["preparing", "distilling", "exporting"]
    assert all(one.target == 0 for one in found.stages)
    # rank 8 on q, k, v, o, gate, up and down: the sum of both widths of each
    widths = [512, 320, 320, 512, 768, 768, 768]
    assert stage(found, "distilling").gradients == 4 * 8 * sum(widths)


def peak_with_data(work):
    """Bytes alive together while it runs, by torch's own allocator."""
    with profile(profile_memory=True) as profiled:
        work()
    found, left = [], list(profiled.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.typed[0].name == "Allocation":
            found.append((event.start_time_ns, event.extra_fields.alloc_size))
    sizes = (size for _, size in sorted(found, key=lambda one: one[0]))
    return max(itertools.accumulate(sizes))


@pytest.mark.parametrize("scores", [0, 2**30])  # torch's fused attention, and two products
@pytest.mark.parametrize("changes", [{}, {"use_peft": True, "activation_checkpointing": True}])
def test_a_step_with_data_takes_what_one_without_does(tiny_job, monkeypatch, changes, scores):
    monkeypatch.setattr("distill.trainer.SCORES", scores)
    recipe = build_recipe(tiny_job.values() | {"draft": "sibling"} | changes)
    job = memory._Job(recipe, SHAPE, SHAPE, 100)
    said = job.distilling().peak
    monkeypatch.setattr(memory, "_without_data", nullcontext)
    assert peak_with_data(job.distilling) == pytest.approx(said, rel=1e-3)


def test_the_full_form_takes_no_more_than_is_said(tiny_job, monkeypatch):
    recipe = dataclasses.replace(tiny_job, draft_vocab_size=3000)
    for module in (memory, export):  # a trimmed head of many pieces
        monkeypatch.setattr(module, "HEAD_ROWS", 256)
    said = memory._Job(recipe, SHAPE, None, 100).exporting().buffers
    tuned = LlamaForCausalLM(pruned_config(SHAPE, 1)).to(torch.bfloat16)
    tuned.lm_head = torch.nn.Linear(256, 3000, bias=False, dtype=torch.bfloat16)
    full_head = torch.randn(4096, 256, dtype=torch.bfloat16)
    text = SimpleNamespace(prompt_ids=torch.arange(20), response_ids=torch.arange(100))
    answers = [text] * (export.CALIBRATION_TOKENS // 100)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The full-vocabulary form makes another greedy")
        taken = peak_with_data(
            lambda: export.full_vocabulary(tuned, torch.arange(3000), full_head, answers)
        )
    # what is said leaves out what a draft in bf16 no longer takes
    smaller = memory._bytes(memory._Job(recipe, SHAPE, None, 100).draft_shape(torch.bfloat16))
    assert taken <= said + smaller


@pytest.mark.parametrize("name", ["answering", "evaluating"])
def test_decoding_with_data_takes_what_it_does_without(tiny_job, monkeypatch, name):
    job = memory._Job(tiny_job, SHAPE, None, 100)
    said = getattr(job, name)().peak
    monkeypatch.setattr(memory, "_without_data", nullcontext)
    # more with data: weights while the decoder fuses them, which is over once it decodes
    assert said <= peak_with_data(getattr(job, name)) <= 1.3 * said


def test_what_fits_where_by_hand():
    one = Stage("distilling", draft=100 * 10**9, buffers=10**9, layer=2 * 10**9)
    assert one.peak == 101 * 10**9
    assert one.sharded(4) == 28 * 10**9
    assert least_shards(one) == 2  # 50 + 1 + 2 of 80 - 8 - 1.1
    assert least_shards(dataclasses.replace(one, draft=2 * 10**12)) is None
    assert smallest_device(one.peak) == "141 GB"
    assert smallest_device(200 * 10**9) is None
    assert fits(9 * 2**29 - RUNTIME, 5 * 2**30)
    assert not fits(9 * 2**29 - RUNTIME + 2, 5 * 2**30)
    assert [*DEVICES.values()] == sorted(DEVICES.values())


@pytest.mark.parametrize(("name", "recipe"), hub_recipes().items())
def test_docs_and_headers_name_what_the_configs_give(name, recipe):
    shown = markdown(name, recipe)
    assert shown in DOCS.read_text(encoding="utf-8"), "run tests/benchmarks/what_fits.py"
    header = Path(memory.__file__).parents[1].joinpath("recipes", f"{name}.yaml").read_text("utf-8")
    (size,) = re.findall(r"# Hardware: one \w+ of (\d+) GB", header)
    assert fits(needs_of(recipe).peak, int(size) * 10**9)


# --- the dry run


@pytest.fixture
def on_the_hub(monkeypatch, folder, tmp_path):
    """Two models on a Hub of which only the config can be had; what was asked for."""
    asked = []

    def snapshot_download(repo_id, allow_patterns=None, local_files_only=False, **_):
        asked.append(allow_patterns)
        copy = tmp_path / repo_id.replace("/", "-")
        copy.mkdir(exist_ok=True)
        (copy / "config.json").write_bytes((folder / "target" / "config.json").read_bytes())
        return str(copy)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    return asked


def test_a_target_that_is_not_here_gets_the_table(job, tmp_path, monkeypatch, capsys, on_the_hub):
    recipe = job(tmp_path / "run", target="org/target", draft="org/draft", dry_run=True)
    monkeypatch.setattr(dry_run, "load_target", None)
    assert run(recipe) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^answering +0\.00 ", shown, flags=re.MULTILINE)
    assert "not measured, the weights of org/target are not on this machine" in shown
    assert not any("*.safetensors" in (patterns or ()) for patterns in on_the_hub)


def test_weights_of_which_a_part_is_here_are_not_at_hand(on_the_hub, tmp_path):
    assert sources.weights_at_hand(str(tmp_path))  # a folder is read as it is
    assert not sources.weights_at_hand("org/target")
    folder = tmp_path / "org-target"
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "one.safetensors").touch()
    assert not sources.weights_at_hand("org/target")
    (folder / "two.safetensors").touch()
    assert sources.weights_at_hand("org/target")


def test_a_gpu_recipe_gets_the_table_without_one(job, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(job(tmp_path / "run", dry_run=True, use_cpu=False, bf16=True)) == 0
    shown = capsys.readouterr().out
    assert "The run fits on laptop of 8 GiB" in shown
    assert "not measured, the recipe trains on a GPU and there is none here" in shown
