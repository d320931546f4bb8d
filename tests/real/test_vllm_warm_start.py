"""Heads that others published: as good here as in a real vLLM, tuned, exported, and served again.

It needs an environment with vLLM (python -m eval.engines.environments vllm), and no model.
"""

import numpy as np
import pytest
import torch

from distill.recipe import build_recipe
from distill.train import run
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.engines.local_vllm import serve_vllm, speculation
from eval.engines.vllm import VllmServer
from eval.prompts import Prompt, PromptSet
from tests.distill.conftest import TEXTS
from tests.distill.test_warm_start import KIND_OF, publish
from tests.siblings import LARGE, save_sibling

pytestmark = pytest.mark.real
POSITIONS = ("--max-model-len", "256")
GAMMA, NEW = 2, 100


def recipe_of(folder, name, **keys):
    return build_recipe(
        {"target": str(folder / "target"), "output_dir": str(folder / name)}
        | {part: str(folder / f"{part}.jsonl") for part in ("train_prompts", "eval_prompts")}
        | {"dtype": "float32", "bf16": False, "use_cpu": True, "learning_rate": 3e-3}
        | {"cache_top_k": 30, "answer_max_new_tokens": 96, "max_new_tokens": 16, "gamma": GAMMA}
        | {"speed_prompts": 2, "tuning_prompts": 1, "max_gamma": GAMMA}
        | keys
    )


def accepted_by_position(target, drafter, prompts):
    """The share of greedy drafts whose first i tokens are accepted, as vLLM counts them [GAMMA].

    That is, with the last draft of an output as long as the others.
    """
    decoding = Decoding(Sampling(), target.stops, NEW + GAMMA)
    drafts, accepted = 0, np.zeros(GAMMA)
    for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True):
        (run,) = decode(target.decoder, drafter, [prompt], [ids], decoding, DraftLength(GAMMA))
        done = run.prefill_tokens
        for tokens, count in zip(run.block_tokens, run.accepted, strict=True):
            if done < NEW:
                drafts += 1
                accepted += np.arange(GAMMA) < count
            done += tokens
    return accepted / drafts


@pytest.mark.parametrize("layout", KIND_OF)
def test_it_is_accepted_as_often_there_as_here_before_and_after(tmp_path, vllm, layout):
    save_sibling(tmp_path / "target", LARGE, 1)
    for name, texts in (("train", TEXTS[:12]), ("eval", TEXTS[12:])):
        rows = "".join(f'{{"prompt": "{text[:20]}"}}\n' for text in texts)
        (tmp_path / f"{name}_prompts.jsonl").write_text(rows)
    rows = 270 if layout == "eagle" else None  # vLLM maps a trimmed head's ids, a whole one's not
    made = {"drafter": KIND_OF[layout], "draft_vocab_size": rows}
    first = recipe_of(tmp_path, "first", **made, max_steps=10)
    assert run(first) == 0
    publish(first.folder / "draft", tmp_path / "published", layout)
    second = recipe_of(tmp_path, "second", draft=str(tmp_path / "published"), max_steps=150)
    assert run(second) == 0
    target = load_target(str(tmp_path / "target"), torch.float32, "cpu", 256)
    prompts = [Prompt(text, prompt=text[:20]) for text in TEXTS[:8]]
    asked = PromptSet("", prompts, [target.tokenizer(p.prompt)["input_ids"] for p in prompts])
    plain = VllmServer(vllm(tmp_path / "target", *POSITIONS), 600)
    how = Decoding(Sampling(), frozenset(), NEW)
    first_tokens = []
    for draft in (tmp_path / "published", second.folder / "draft"):
        with serve_vllm(tmp_path / "target", *speculation(draft, GAMMA), positions=256) as address:
            server = VllmServer(address, 600)
            before = server.counters()
            for prompt in prompts:
                texts = [side.decode(prompt, how).run.tokens for side in (server, plain)]
                assert texts[0] == texts[1]
            drafts, _, _, *accepted = (server.counters() - before).tolist()
        here = accepted_by_position(target, load_drafter(str(draft), target), asked)
        print(f"{layout}: vLLM {np.array(accepted) / drafts}, here {here}")
        assert np.allclose(np.array(accepted) / drafts, here, atol=0.02)
        first_tokens.append(here[0])
    assert first_tokens[1] > first_tokens[0] + 0.02
