"""Sizes from configs: against the models' cards, by hand, and against a step that was measured."""

import dataclasses
import gc
import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from tests.benchmarks.what_fits import CONFIGS, config_of, hub_recipes, needs_of, row
from torch.profiler import profile
from transformers import LlamaConfig, LlamaForCausalLM

from align import sources
from distill import memory, models
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
from distill.memory import FRAGMENTED, RUNTIME, Needs, Stage, needs
from distill.recipe import build_recipe
from distill.train import run
from tests.eval.decoding.test_families import built, made

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


def stage(needed, name):
    return next(part for part in needed.stages if part.name == name)


def test_parameters_are_those_of_the_cards():
    for name, count in PARAMETERS.items():
        assert memory._numbers(memory._shape(config_of(name))) == count
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
    needed = needs(tiny_job, SHAPE, None, 100)
    target = 2 * (4 * LAYER + 2 * 4096 * 256 + 256)
    answering, distilling = stage(needed, "answering"), stage(needed, "distilling")
    assert answering.target == stage(needed, "evaluating").target == target
    # 12 rows of 100 + 24 tokens, keys and values, 2 heads of 32, 4 layers
    assert answering.kv == 12 * 124 * 2 * 2 * 32 * 4 * 2
    trained = 4 * (LAYER + 1000 * 256 + 256)
    assert distilling.gradients == trained
    assert distilling.optimizer == 2 * trained
    assert distilling.draft == trained + 4 * 4096 * 256  # the embedding is frozen
    assert distilling.target == 0
    assert needed.checkpoint == 3 * trained
    assert needed.answers_on_disk == 12 * 24 * (30 * 4 + 4)
    assert needed.states_on_disk == 0
    assert needs(dataclasses.replace(tiny_job, drafter="eagle3"), SHAPE, None).states_on_disk > 0


def test_adapters_train_little_and_a_server_leaves_no_target(tiny_job):
    served = {"answers": "server", "answer_url": "http://x:1", "draft": "sibling"}
    recipe = dataclasses.replace(tiny_job, use_peft=True, lora_r=8, **served)
    draft = LlamaConfig(**SHAPE.to_dict() | {"num_hidden_layers": 1})
    needed = needs(recipe, SHAPE, draft, 100)
    assert [part.name for part in needed.stages] == ["preparing", "distilling", "exporting"]
    assert all(part.target == 0 for part in needed.stages)
    # rank 8 on q, k, v, o, gate, up and down: the sum of both widths of each
    widths = {"q": 512, "k": 320, "v": 320, "o": 512, "gate": 768, "up": 768, "down": 768}
    assert stage(needed, "distilling").gradients == 4 * 8 * sum(widths.values())
    some = dataclasses.replace(recipe, lora_target_modules="q_proj,v_proj")
    fewer = stage(needs(some, SHAPE, draft, 100), "distilling")
    assert fewer.gradients == 4 * 8 * (widths["q"] + widths["v"])


def test_a_longer_prompt_takes_more(tiny_job):
    short, long = (needs(tiny_job, SHAPE, None, tokens) for tokens in (100, 400))
    for name in ("answering", "distilling", "evaluating"):
        assert stage(long, name).peak > stage(short, name).peak


@pytest.mark.parametrize(
    "family",
    [
        *("Llama", "DeepseekV2", "DeepseekV3", "Glm4MoeLite"),
        *("Gemma3n Gemma3nTextConfig", "Gemma4 Gemma4TextConfig"),
    ],
)
def test_a_token_takes_in_the_plan_what_it_takes_in_the_cache(family):
    decoder, _ = built(made(family))
    config = made(family).config.get_text_config()
    assert memory._kv_bytes_per_token(config, 4) == decoder.new_cache(1, 1).bytes_per_token()


def peak_of(work):
    """Bytes alive together while it runs, by torch's own allocator."""
    gc.collect()  # what died before is not to be freed meanwhile
    with profile(profile_memory=True) as profiled:
        work()
    allocations, left = [], list(profiled.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.typed[0].name == "Allocation":
            allocations.append((event.start_time_ns, event.extra_fields.alloc_size))
    sizes = (size for _, size in sorted(allocations, key=lambda pair: pair[0]))
    return max(itertools.accumulate(sizes))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_training_step_takes_what_the_formula_says(tiny_job, checkpointing):
    changes = {"draft": "sibling", "drafter": None, "activation_checkpointing": checkpointing}
    recipe = build_recipe(tiny_job.values() | changes)
    said = stage(needs(recipe, SHAPE, SHAPE, 232), "distilling")

    def step():
        model = LlamaForCausalLM(SHAPE)
        model.get_input_embeddings().weight.requires_grad_(False)
        model.set_attn_implementation("sdpa")
        give_loss_forward(model, recipe.kind, forward_kl)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        trained = [p for p in model.parameters() if p.requires_grad]
        moments = [torch.zeros_like(p) for p in trained * 2]
        cached = torch.zeros((4 * 24, 30), dtype=torch.long)
        model(
            input_ids=torch.zeros((4, 256), dtype=torch.long),
            positions=cached[:, 0],
            top_ids=cached,
            top_logprobs=torch.full(cached.shape, -4.0),
        ).loss.backward()
        return moments

    assert said.peak == pytest.approx(peak_of(step), rel=0.1)


def test_the_device_holds_the_largest_stage_and_what_nobody_can_use():
    needed = Needs([Stage("a", target=2**33), Stage("b", draft=2**34, buffers=1)], 0, 0, 0)
    assert needed.largest.name == "b"
    assert needed.device * (1 - FRAGMENTED) - RUNTIME == pytest.approx(2**34, abs=2)
    assert needed.lines()[1] == "b: 16.00 GiB (draft 16.00, buffers 0.00)"


@pytest.mark.parametrize(("name", "recipe"), hub_recipes().items())
def test_docs_and_headers_name_what_the_configs_give(name, recipe):
    assert row(name, recipe) in DOCS.read_text("utf-8")
    header = Path(memory.__file__).parents[1].joinpath("recipes", f"{name}.yaml").read_text("utf-8")
    (size,) = re.findall(r"# Hardware: one \w+ of (\d+) GB", header)
    assert needs_of(recipe).device <= int(size) * 10**9


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


def test_a_target_that_is_not_here_gets_its_memory(job, tmp_path, monkeypatch, capsys, on_the_hub):
    recipe = job(tmp_path / "run", target="org/target", draft="org/draft", dry_run=True)
    monkeypatch.setattr(models, "load_target", None)
    assert run(recipe) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^answering: 0\.\d\d GiB \(", shown, flags=re.MULTILINE)
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


def test_a_gpu_recipe_gets_its_memory_without_one(job, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(job(tmp_path / "run", dry_run=True, use_cpu=False, bf16=True)) == 0
    shown = capsys.readouterr().out
    assert "a device of 1.2 GB holds it" in shown
    assert "not measured, the recipe trains on a GPU and there is none here" in shown
