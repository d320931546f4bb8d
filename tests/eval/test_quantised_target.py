"""A target out of a quantised GGUF file, and a draft that was made for another form of it."""

import shutil
from dataclasses import replace

import pytest
import torch

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.to_gguf import write_gguf
from distill.drafters import medusa
from distill.drafters.kind import Draft
from eval.decoding.drafters.causal_lm import teacher_forced_logits
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.medusa import MedusaConfig, MedusaModel
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling, agreement, warp
from eval.reporting.build import build_report
from tests.distill.conftest import tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_llama):
    """`target`, `target.gguf` in q4_0, `draft` (a copy of the target), and `heads` on `target`."""
    root = tmp_path_factory.mktemp("quantised")
    words = tokenizer(["he"], 258, "</s>")
    model = tiny_llama(spread=4, vocab_size=258, eos_token_id=0)
    model.generation_config.eos_token_id = 0
    model.to(torch.bfloat16).save_pretrained(root / "target")
    words.save_pretrained(root / "target")
    shutil.copytree(root / "target", root / "draft")
    (root / "heads").mkdir()
    save_heads(root, root / "heads")
    write_gguf(Checkpoint.open(root / "target"), root / "target.gguf", "q4_0")
    return root


def save_heads(root, folder, change=1.0):
    """Medusa heads on the embedding of root/target in fp32, times `change`."""
    embedding = Checkpoint.open(root / "target").load(torch.float32).get_input_embeddings().weight
    about = {"hidden_size": 32, "vocab_size": 258, "truncated_vocab_size": 258, "num_heads": 1}
    heads = MedusaModel(MedusaConfig(**about))
    medusa.KIND.save(folder, Draft(heads), embedding.detach() * change, "")


def loaded(folder, name):
    spec = str(folder / name)
    return load_target(Checkpoint.open(spec), torch.float32, "cpu", 64)


def test_a_target_in_another_dtype_is_the_same(folder, tmp_path):
    """A run in fp32 on a target stored in bf16. Where rounding differs, both dtypes are named."""
    target = load_target(Checkpoint.open(folder / "target"), torch.bfloat16, "cpu", 64)
    assert load_drafter(str(folder / "heads"), target).form == "medusa"
    save_heads(folder, tmp_path, 1.0001)
    with pytest.raises(UserError, match=r" float32 .* bfloat16,"):
        load_drafter(str(tmp_path), target)


def test_a_draft_made_for_a_target_drafts_for_its_quantised_file(folder):
    target = loaded(folder, "target.gguf")
    with pytest.raises(UserError, match="input embedding of hash"):
        load_drafter(str(folder / "heads"), target)  # they share the target's embedding
    drafter = load_drafter(str(folder / "draft"), target)
    assert (drafter.form, drafter.vocabulary["relation"]) == ("full", "identical")
    # the target as it was drafts for itself in four bits: near it, and not it
    how = Sampling()
    text = list(range(1, 41))
    p = warp(teacher_forced_logits(target.decoder, [5, *text[:-1]], 1)[0], how)
    q = drafter.teacher_forced([5], text, how, {})
    assert 0.3 < float(agreement(p, q).mean()) < 1


def test_the_report_names_the_quantisation(folder, run_info, measurement):
    assert Checkpoint.open(folder / "target.gguf").gguf_kind == "Q4_0"
    drafts = [measurement("tuned", 0.6)]
    target = build_report(run_info, drafts).target_named
    assert target == run_info.about["target"]
    about = run_info.about | {"target_quantization": "Q4_0"}
    report = build_report(replace(run_info, about=about), drafts)
    assert report.target_quantization == "Q4_0"
    assert report.target_named == f"{target} (GGUF Q4_0)"
