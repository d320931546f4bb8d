"""The main job with a sibling whose head has fewer or more rows than its target's."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from align.check import check_pair
from distill.train import run
from eval.reporting.report import read_report
from tests.siblings import LARGE, SMALL, save_sibling


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sides")
    save_sibling(folder / "small", SMALL, 0)
    save_sibling(folder / "large", LARGE, 1)
    return folder


@pytest.mark.parametrize(
    ("draft", "target", "lora"),
    [
        ("small", "large", {}),
        ("large", "small", {}),
        ("small", "large", {"use_peft": True, "lora_r": 4}),
    ],
)
def test_the_export_has_the_targets_size(sides, job, texts, tmp_path, draft, target, lora):
    where = {"target": str(sides / target), "draft": str(sides / draft)}
    recipe = job(tmp_path / "run", **where, **lora)
    assert run(recipe) == 0
    report = read_report(recipe.folder / "report" / "report.json")
    untuned, tuned = (report.drafts[name] for name in ("untuned", "tuned"))
    assert untuned.vocabulary.strategy == "padded"
    assert tuned.vocabulary.strategy == "direct"
    for block in (untuned, tuned):
        assert block.lossless.identical == block.lossless.prompts

    verdict = check_pair(recipe.target, str(recipe.folder / "draft"))
    assert verdict.relation == "identical"
    assert {engine.works for engine in verdict.engines} == {"yes"}
    assert not any(finding.code in ("TOK-001", "TOK-002") for finding in verdict.findings)

    models = [AutoModelForCausalLM.from_pretrained(recipe.folder / "draft")]
    models.append(AutoModelForCausalLM.from_pretrained(recipe.target))
    before = AutoModelForCausalLM.from_pretrained(recipe.draft)
    trained = [model.model.layers[0].mlp.up_proj.weight for model in (before, models[0])]
    assert not trained[0].equal(trained[1])
    sizes = [
        {m.config.vocab_size, len(m.lm_head.weight), len(m.get_input_embeddings().weight)}
        for m in models
    ]
    assert sizes[0] == sizes[1] == {models[1].config.vocab_size}
    tokenizer = AutoTokenizer.from_pretrained(recipe.folder / "draft")
    inputs = tokenizer(texts[3], return_tensors="pt").input_ids
    with torch.no_grad():
        q = models[0](inputs).logits.softmax(-1)
    assert float(q[..., SMALL:].sum(-1).max()) < 1e-3
    how = {"attention_mask": torch.ones_like(inputs), "max_new_tokens": 24, "do_sample": False}
    plain = models[1].generate(inputs, **how)
    assert models[1].generate(inputs, assistant_model=models[0], **how).equal(plain)
