"""What an engine is given to load."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from align.sources import load_model
from align.vocabulary import read_vocabulary
from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines import installed
from eval.prompts import PromptSet
from tests.siblings import COUNT, LARGE, SMALL, save_sibling


def quantised(folder):
    folder.mkdir()
    config = {"model_type": "qwen2", "quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return str(folder)


def draft_in_vllm(monkeypatch, target, draft, look=Path):
    """`look` at the folder that vLLM is given for a draft, which is there while it runs."""
    found = []

    @contextmanager
    def serve(path, *arguments, **_):
        assert str(path) == target
        if "--speculative-config" in arguments:
            folder = json.loads(arguments[1])["model"]
            found.append((folder, look(folder)))
            raise InterruptedError
        yield "http://127.0.0.1:1"

    monkeypatch.setattr(installed, "vllm_python", lambda: None)
    monkeypatch.setattr(installed, "serve_vllm", serve)
    monkeypatch.setattr("eval.engines.local_vllm.memory_left", lambda: 16 * 2**30)
    prompts, decoding = PromptSet("", [], [[1]]), Decoding(Sampling(), frozenset(), 8)
    with pytest.raises(InterruptedError):
        installed.measure_started(target, {"tuned": draft}, [4], prompts, decoding, {})
    return found[0]


def test_a_quantised_pair_reaches_vllm_which_computes_what_we_do_not(tmp_path, monkeypatch):
    target, draft = quantised(tmp_path / "target"), quantised(tmp_path / "draft")
    assert draft_in_vllm(monkeypatch, target, draft)[0] == draft


@pytest.mark.parametrize("rows", [(LARGE, SMALL), (SMALL, LARGE), (LARGE, LARGE)])
def test_a_draft_that_differs_in_padding_reaches_vllm_in_the_targets_size(
    tmp_path, monkeypatch, rows
):
    target, draft = str(tmp_path / "target"), str(tmp_path / "draft")
    for folder, count, seed in ((target, rows[0], 1), (draft, rows[1], 2)):
        save_sibling(folder, count, seed)

    def look(folder):
        return load_model(folder, torch.float32), read_vocabulary(folder).tokens

    folder, (served, tokens) = draft_in_vllm(monkeypatch, target, draft, look)
    before, same_tokens = look(draft)
    assert torch.equal(served.lm_head.weight[:COUNT], before.lm_head.weight[:COUNT])
    assert len(served.lm_head.weight) == served.config.vocab_size == rows[0]
    assert tokens == same_tokens
    assert (folder == draft) == (rows[0] == rows[1])
    assert rows[0] == rows[1] or not Path(folder).exists()  # it was for the servers


@pytest.mark.parametrize(("gamma", "lengths"), [(1, [1]), (2, [1, 2]), (5, [3, 5])])
def test_vllm_is_measured_with_half_the_length_too(monkeypatch, sample_report, gamma, lengths):
    """A draft step costs another part of a target step there than in our decoder."""

    def started(target, drafts, gammas, *_):
        assert (drafts, gammas) == ({"tuned": "D"}, lengths)
        slow, fast = sample_report.drafts["untuned"], sample_report.drafts["tuned"]
        assert slow.speedup.mean < fast.speedup.mean
        both = {"tuned, gamma 1": fast, "tuned, gamma 2": slow}
        return sample_report.model_copy(update={"drafts": both})

    monkeypatch.setattr(installed, "measure_started", started)
    prompts = PromptSet("", [], [[1]])
    report = installed.measure_installed("vllm", Path("T"), Path("D"), prompts, gamma, 8)
    assert report.last == ("tuned, gamma 1", sample_report.drafts["tuned"])
