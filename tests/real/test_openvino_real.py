"""A real OpenVINO GenAI decodes the embedded target with itself as the draft."""

import pytest

from align.sources import load_tokenizer, resolve_checkpoint
from distill.recipe import load_recipe
from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.driven import measure_driven
from eval.engines.environments import EngineMissing, installed
from eval.engines.openvino import OpenVino
from eval.measuring.journal import Journal
from eval.prompts import Prompt, PromptSet, render_all

pytestmark = pytest.mark.real

TOKENS, GAMMA = 24, 3


def test_the_text_is_the_target_s_own(tmp_path):
    try:
        installed("openvino")
    except EngineMissing as reason:
        pytest.skip(str(reason))
    spec = load_recipe(["--recipe", "code"]).target
    prompts = [
        Prompt("a", prompt="def mean(values):\n"),
        Prompt("b", messages=[{"role": "user", "content": "What is 2+2? One word."}]),
    ]
    ids = render_all(prompts, load_tokenizer(spec), 2048, TOKENS)
    timed, target = PromptSet("made up", prompts, ids), resolve_checkpoint(spec)
    with OpenVino(target, {"self": target}) as engine:
        assert engine.stops >= {2}  # <|im_end|>
        how = Decoding(Sampling(), engine.stops, TOKENS)
        report = measure_driven(engine, timed, how, GAMMA, Journal(tmp_path / "j"), {})
    draft = report.drafts["self"]
    assert draft.lossless.identical == 2
    assert report.decoding.ended_by_stop == 0.5
    assert draft.tau.mean > GAMMA  # in f32 nearly every token of its own is accepted
    assert draft.memory is None
