from fractions import Fraction

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from align.checkpoint import Checkpoint
from eval.decoding.build import build_decoder
from eval.decoding.drafters.causal_lm import teacher_forced_logits
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.target import Target
from tests.benchmarks import widen
from tests.dflash import save_published
from tests.eagle3 import LAYOUTS, PublishedEagle3

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TEXT = list(range(40))


def in_bf16(folder):
    """The folder, with weights that bf16 has exactly."""
    path = folder / "model.safetensors"
    rounded = {n: t.bfloat16() if t.is_floating_point() else t for n, t in load_file(path).items()}
    save_file(rounded, path, metadata={"format": "pt"})
    return folder


@pytest.fixture(params=["llama", "qwen2"])
def target(request, tiny_llama, tmp_path):
    if request.param == "llama":
        model = tiny_llama(1, spread=4, **SIZES)
    else:
        torch.manual_seed(1)
        model = Qwen2ForCausalLM(
            Qwen2Config(**SIZES, num_hidden_layers=2, use_sliding_window=False)
        )
        for weight in model.parameters():
            weight.data.mul_(4 if weight.ndim > 1 else 1).add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(tmp_path / "small")
    return in_bf16(tmp_path / "small")


def opened(folder):
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return Target(Checkpoint.open(folder), model, build_decoder(model, 64), frozenset())


def save_head(kind, folder):
    if kind == "dflash":
        return save_published(folder, SIZES | {"head_dim": 8}, [0], torch.arange(0, 61, 2))
    head = PublishedEagle3(kind, SIZES | {"head_dim": 8}, [0, 1], torch.arange(0, 61, 2))
    return head.save(folder)


@pytest.mark.parametrize("kind", ["dflash", *LAYOUTS])
def test_the_large_pair_has_the_small_pairs_logits(target, tmp_path, kind):
    head, seen = in_bf16(save_head(kind, tmp_path / "head")), []
    for source in (target, head):
        widen.widen(Checkpoint.open(source), tmp_path / f"{source.name}-wide", Fraction(2))
    for suffix in ("", "-wide"):
        pair = opened(tmp_path / f"small{suffix}")
        drafter = load_drafter(str(tmp_path / f"head{suffix}"), pair)
        states = dict.fromkeys(drafter.layers)
        logits = teacher_forced_logits(pair.decoder, TEXT[:-1], 10, states)
        seen.append((logits, drafter.text_logits(TEXT[:10], TEXT[10:], states)[0]))
    assert pair.model.num_parameters() > 8 * opened(target).model.num_parameters()
    for small, large in zip(*seen, strict=True):
        torch.testing.assert_close(large, small, rtol=1e-4, atol=1e-4)
        assert small.std() > 0.1


def test_the_large_target_has_the_asked_size(target, tmp_path, monkeypatch):
    monkeypatch.setattr(widen, "PARAMETERS", 500_000)
    widen.main(str(target), tmp_path / "wide")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "wide")
    assert model.num_parameters() == pytest.approx(500_000, rel=0.06)  # in steps of 64 neurons
    (tmp_path / "wide" / "config.json").write_text('{"model_type": "gemma3"}')
    with pytest.raises(SystemExit):
        widen.widen(Checkpoint.open(tmp_path / "wide"), tmp_path / "wider", Fraction(1))
