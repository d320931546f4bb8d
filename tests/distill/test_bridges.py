"""The main job with a draft of another tokenizer, on models of a few kilobytes: every bridge."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedTokenizerFast,
)

from align.check import check_pair
from align.checkpoint import Checkpoint
from align.files import read_json
from align.vocab_map import VOCAB_MAP
from distill.models import check_models, open_models, target_loader
from distill.prompt_sets import collect_prompts
from distill.train import run
from eval.decoding.fused import FusedDecoder
from eval.reporting.fields import read_report
from tests.distill.conftest import TOKENS


def run_it(recipe):
    assert run(recipe) == 0
    return read_report(recipe.folder / "report" / "report.json").model_dump(mode="json")


@pytest.mark.parametrize("used", ["transplant", "remap"])
def test_a_draft_of_another_tokenizer_is_tuned(finished, used):
    recipe = finished(used)
    drafts = read_report(recipe.folder / "report" / "report.json").drafts
    assert drafts["untuned"].vocabulary.strategy == used
    assert drafts["tuned"].vocabulary.strategy == "direct"  # it has the target's ids
    assert drafts["tuned"].alpha.mean > drafts["untuned"].alpha.mean
    assert (recipe.folder / VOCAB_MAP).is_file()
    assert check_pair(recipe.target, str(recipe.folder / "draft")).relation == "identical"
    assert read_json(recipe.folder / "vocab_check.json")["used"] == used
    # an embedding apart from the head is trained only where it has rows that never were
    before, after = (
        Checkpoint.open(spec).load(torch.float32).get_input_embeddings().weight
        for spec in (recipe.draft, recipe.folder / "draft")
    )
    vocab_map = check_models(recipe, *open_models(recipe)).vocab_map
    mapped = vocab_map.mapped
    same = after[vocab_map.to_target[mapped]].equal(before[mapped])
    assert same == (used == "remap")


@pytest.mark.parametrize("name", ["padded", "padded before", "padded lora"])
def test_a_draft_with_a_padded_head_is_exported_in_the_targets_size(finished, texts, name):
    recipe = finished(name)
    drafts = read_report(recipe.folder / "report" / "report.json").drafts
    assert drafts["untuned"].vocabulary.strategy == "padded"
    assert drafts["tuned"].vocabulary.strategy == "direct"
    verdict = check_pair(recipe.target, str(recipe.folder / "draft"))
    assert verdict.relation == "identical"
    assert {engine.works for engine in verdict.engines} == {"yes"}
    assert not any(finding.code in ("TOK-001", "TOK-002") for finding in verdict.findings)
    before, draft, target = (
        AutoModelForCausalLM.from_pretrained(spec)
        for spec in (recipe.draft, recipe.folder / "draft", recipe.target)
    )
    trained = [model.model.layers[0].mlp.up_proj.weight for model in (before, draft)]
    assert not trained[0].equal(trained[1])
    sizes = [
        (m.config.vocab_size, len(m.lm_head.weight), len(m.get_input_embeddings().weight))
        for m in (draft, target)
    ]
    assert sizes[0] == sizes[1]
    tokenizer = AutoTokenizer.from_pretrained(recipe.folder / "draft")
    inputs = tokenizer(texts[3], return_tensors="pt").input_ids
    with torch.no_grad():
        q = draft(inputs).logits.softmax(-1)
    assert float(q[..., TOKENS:].sum(-1).max()) < 1e-3
    how = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 24, "do_sample": False}
    plain = target.generate(inputs, **how)
    assert target.generate(inputs, assistant_model=draft, **how).equal(plain)


def test_a_gemma_target_with_a_llama_draft(folder, job, tmp_path):
    words = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=len(words) + 4,  # rows of padding as well
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=128,
            layer_types=["sliding_attention", "full_attention"],
            eos_token_id=0,
            pad_token_id=0,
        )
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(12 if parameter.ndim > 1 else 1)
    model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path / "gemma")
    words.save_pretrained(tmp_path / "gemma")
    recipe = job(tmp_path / "run", target=str(tmp_path / "gemma"))
    report = run_it(recipe)
    pair = check_models(recipe, *open_models(recipe))
    assert pair.strategy == "transplant"
    target = target_loader(recipe, pair, collect_prompts(recipe, pair.target))()
    assert isinstance(target.decoder, FusedDecoder)
    blocks = report["drafts"]
    assert all(block["lossless"]["identical"] == 3 for block in blocks.values())
    assert blocks["tuned"]["vocabulary"]["relation"] == "identical"  # padding rows included
    saved = Checkpoint.open(tmp_path / "run" / "draft").load(torch.float32)
    assert saved.get_output_embeddings().weight.shape[0] == len(words) + 4


def test_the_coverage_curve_is_printed(job, tmp_path, capsys):
    recipe = job(tmp_path / "run", draft=None, num_draft_layers=1, coverage_curve=True)
    assert run(recipe) == 0
    lines = capsys.readouterr().out.splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("draft_vocab_size"))
    assert lines[head].split() == ["draft_vocab_size", "lost", "probability"]
    assert lines[-1].split() == ["300", "0.000%"]
    assert not (tmp_path / "run" / "prepared").exists()


def without_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def with_a_bias(folder):
    path = folder / "model.safetensors"
    save_file(load_file(path) | {"lm_head.bias": torch.zeros(290)}, path)


@pytest.mark.parametrize(
    ("spoil", "strategy", "code"),
    [  # every code: tests/align/test_check.py
        (without_tokenizer, "auto", "TOK-000"),
        (with_a_bias, "auto", "TOK-012"),
        (with_a_bias, "transplant", "TOK-012"),
        (lambda folder: None, "remap", "strategy 'remap'"),
    ],
)
def test_a_draft_that_cannot_be_tuned_leaves_nothing_written(
    job, folder, tmp_path, spoil, strategy, code
):
    shutil.copytree(folder / "draft", tmp_path / "bad")
    spoil(tmp_path / "bad")
    recipe = job(tmp_path / "run", draft=str(tmp_path / "bad"), strategy=strategy)
    with pytest.raises(ValueError, match=code):
        run(recipe)
    assert not recipe.folder.exists()
