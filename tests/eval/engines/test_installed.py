"""What an engine is given to load."""

import json

import pytest

from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines import installed
from eval.prompts import PromptSet


def quantised(folder):
    folder.mkdir()
    config = {"model_type": "qwen2", "quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return str(folder)


def test_a_quantised_pair_reaches_vllm_which_computes_what_we_do_not(tmp_path, monkeypatch):
    target, draft = quantised(tmp_path / "target"), quantised(tmp_path / "draft")
    asked = []

    def serve(path, *arguments, **_):
        asked.append((str(path), *arguments))
        raise InterruptedError

    monkeypatch.setattr(installed, "vllm_python", lambda: None)
    monkeypatch.setattr(installed, "serve_vllm", serve)
    prompts, decoding = PromptSet("", [], [[1]]), Decoding(Sampling(), frozenset(), 8)
    with pytest.raises(InterruptedError):
        installed.measure_started(target, {"tuned": draft}, 4, prompts, decoding, {})
    ((served, _, config),) = asked
    assert served == target
    assert json.loads(config)["model"] == draft
