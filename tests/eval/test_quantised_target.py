"""A target out of a quantised GGUF file, and a draft that was made for another form of it."""

import shutil
from dataclasses import replace

import pytest
import torch

from align.sources import gguf_kind, load_model
from align.to_gguf import write_gguf
from distill.drafters import pruned
from distill.drafters.kind import Draft
from eval.decoding.drafters.causal_lm import teacher_forced_logits
from eval.decoding.drafters.compact import OtherEmbedding
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling, agreement, warp
from eval.reporting.build import build_report
from eval.reporting.text import render_markdown
from tests.distill.conftest import tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama):
    """`target`, `target.gguf` in q4_0, and `draft`: the target in full form and in compact form."""
    root = tmp_path_factory.mktemp("quantised")
    words = tokenizer(["he"], 258, "</s>")
    model = tiny_llama(spread=4, vocab_size=258, eos_token_id=0)
    model.generation_config.eos_token_id = 0
    model.to(torch.bfloat16).save_pretrained(root / "target")
    words.save_pretrained(root / "target")
    shutil.copytree(root / "target", root / "draft")
    whole = load_model(str(root / "target"), torch.float32)
    embedding = whole.get_input_embeddings().weight.detach()
    (root / "draft" / "compact").mkdir()
    pruned.KIND.save(root / "draft" / "compact", Draft(whole), embedding, "")
    write_gguf(root / "target", root / "target.gguf", "q4_0")
    return root


def loaded(folder, name):
    spec = str(folder / name)
    return load_target(spec, torch.float32, "cpu", 64)


def test_a_target_in_another_dtype_is_the_same(folder, tmp_path, capsys):
    """A run in fp32 on a target stored in bf16. Where rounding differs, both dtypes are named."""
    target = load_target(str(folder / "target"), torch.bfloat16, "cpu", 64)
    drafter = load_drafter(str(folder / "draft"), target)
    assert (drafter.form, drafter.decoder.dtype) == ("compact", torch.bfloat16)
    assert "full-vocabulary" not in capsys.readouterr().err
    text = list(range(1, 41))
    p = warp(teacher_forced_logits(target.decoder, [5, *text[:-1]], 1)[0], Sampling())
    assert agreement(p, drafter.teacher_forced([5], text, Sampling(), {})).mean() > 0.8
    whole = load_model(str(folder / "target"), torch.float32)
    finer = whole.get_input_embeddings().weight.detach() * 1.0001
    pruned.KIND.save(tmp_path, Draft(whole), finer, "")
    with pytest.raises(OtherEmbedding, match=r" float32 .* bfloat16,"):
        load_drafter(str(tmp_path), target)


def test_a_draft_made_for_one_form_drafts_for_the_other(folder, capsys):
    assert load_drafter(str(folder / "draft"), loaded(folder, "target")).form == "compact"
    assert "full-vocabulary" not in capsys.readouterr().err
    target = loaded(folder, "target.gguf")
    drafter = load_drafter(str(folder / "draft"), target)
    assert "taking the full-vocabulary" in capsys.readouterr().err
    assert drafter.form != "compact"
    assert drafter.vocabulary["relation"] == "identical"
    # the target as it was drafts for itself in four bits: near it, and not it
    how = Sampling()
    text = list(range(1, 41))
    p = warp(teacher_forced_logits(target.decoder, [5, *text[:-1]], 1)[0], how)
    q = drafter.teacher_forced([5], text, how, {})
    assert 0.3 < float(agreement(p, q).mean()) < 1


def test_the_report_names_the_quantisation(folder, run_info, measurement):
    assert gguf_kind(str(folder / "target.gguf")) == "Q4_0"
    drafts = [measurement("tuned", 0.6)]
    target = build_report(run_info, drafts).target_named
    assert target == run_info.about["target"]
    about = run_info.about | {"target_quantization": "Q4_0"}
    report = build_report(replace(run_info, about=about), drafts)
    assert report.target_quantization == "Q4_0"
    assert f"{target} (GGUF Q4_0)" in render_markdown(report)
