"""Check 16: models that behave, and models that do not."""

import json
import shutil

import pytest
import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from align.behaviour import _rolls_back
from align.check import check_pair
from tests.align.conftest import spell

UNITS = [spell(bytes([byte])) for byte in range(256)]


@pytest.fixture
def pair(tmp_path, write_tokenizer, tiny_llama):
    """pair(change of the draft's model, **draft's tokenizer): codes, severities and messages."""

    def check(change=lambda model: None, **draft):
        specs = []
        for name, how in (("target", {}), ("draft", draft)):
            spec = write_tokenizer(tmp_path / name, **({"tokens": UNITS} | how))
            config = json.loads((tmp_path / name / "config.json").read_text())
            model = tiny_llama(1, vocab_size=config["vocab_size"])
            if name == "draft":
                change(model)
            model.save_pretrained(tmp_path / "weights")
            for path in (tmp_path / "weights").iterdir():
                shutil.move(path, tmp_path / name / path.name)
            specs.append(spec)
        return check_pair(*specs, weights=True)

    return check


def found(verdict):
    return [f for f in verdict.findings if f.code == "TOK-016"]


def test_models_that_behave(pair):
    assert found(pair()) == []


def test_rows_of_padding_that_leak(pair):
    (finding,) = found(pair(rows=600))  # rows as likely as any other
    assert finding.severity == "warning"
    assert "to ids that stand for nothing" in finding.message
    assert min(finding.ids) >= 258


def test_weights_that_are_not_finite(pair):
    def spoil(model):
        with torch.no_grad():
            model.lm_head.weight[5] = float("nan")

    verdict = pair(spoil)
    assert verdict.fatal
    assert "are not finite" in found(verdict)[0].message


def test_mass_and_bytes_that_only_one_side_has(pair):
    words = [f"word{i}" for i in range(100)]
    verdict = pair(tokens=[*UNITS[:236], *words])
    assert verdict.strategy == "intersection"
    messages = " ".join(f.message for f in found(verdict))
    assert "to tokens that the target lacks" in messages
    assert "20 tokens of the target cannot be written" in messages


@torch.inference_mode()
def test_a_state_that_cannot_be_rolled_back(tiny_llama):
    class Runs:
        """Every token ever read leaves a trace."""

        def __init__(self):
            self.model = tiny_llama(1)

        def __call__(self, ids, past_key_values=None, **how):
            out = self.model(ids, past_key_values=past_key_values, **how)
            if past_key_values is not None:
                out.logits = out.logits + 1.0 * ids.shape[1]
            return out

    read = [3, 1, 4, 1, 5, 9, 2, 6]
    assert not list(_rolls_back(tiny_llama(1), read))
    (finding,) = _rolls_back(Runs(), read)
    assert "After a rejected token is taken back" in finding.message


@torch.inference_mode()
def test_a_state_that_is_not_kept_by_position():
    layers = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = Lfm2Config(vocab_size=32, hidden_size=16, intermediate_size=32, **layers, **heads)
    (finding,) = _rolls_back(Lfm2ForCausalLM(config).eval(), [3, 1, 4, 1, 5, 9, 2, 6])
    assert "does not run on a cache of keys and values" in finding.message
