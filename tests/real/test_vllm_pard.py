"""A real vLLM drafts in one pass from masks, and accepts what our decoder accepts.

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
from eval.engines.local_vllm import speculation
from eval.engines.vllm import VllmServer
from eval.prompts import Prompt
from tests.distill.conftest import TEXTS
from tests.siblings import LARGE, SMALL, save_sibling

pytestmark = pytest.mark.real
POSITIONS = ("--max-model-len", "256")
GAMMA, NEW = 3, 120


@pytest.mark.parametrize("draft", ["sibling", "pruned"])
def test_greedy_texts_and_acceptance_by_position_are_ours(tmp_path, vllm, draft):
    save_sibling(tmp_path / "target", LARGE, 1)
    save_sibling(tmp_path / "draft", SMALL, 0)
    for name, texts in (("train", TEXTS[:12]), ("eval", TEXTS[12:])):
        rows = "".join(f'{{"prompt": "{text[:20]}"}}\n' for text in texts)
        (tmp_path / f"{name}_prompts.jsonl").write_text(rows)
    places = ("target", "draft") if draft == "sibling" else ("target",)
    recipe = build_recipe(
        {name: str(tmp_path / name) for name in places}
        | {name: str(tmp_path / f"{name}.jsonl") for name in ("train_prompts", "eval_prompts")}
        | {"output_dir": str(tmp_path / "run"), "dtype": "float32", "bf16": False}
        | {"use_cpu": True, "max_steps": 150, "learning_rate": 5e-3, "cache_top_k": 30}
        | {"answer_max_new_tokens": 96, "max_new_tokens": 16, "gamma": 2, "speed_prompts": 2}
        | {"tuning_prompts": 1, "drafter": "pard", "max_gamma": GAMMA, "num_draft_layers": 1}
    )
    assert run(recipe) == 0
    folder = recipe.folder / "draft"
    drafting = speculation(folder, GAMMA)
    assert '"parallel_drafting": true' in drafting[1]
    addresses = (vllm(tmp_path / "target", *POSITIONS, *more) for more in (drafting, []))
    speculative, plain = (VllmServer(address, 600) for address in addresses)
    target = load_target(str(tmp_path / "target"), torch.float32, "cpu", 256)
    drafter = load_drafter(str(folder), target)
    before, how = speculative.counters(), Decoding(Sampling(), frozenset(), NEW)
    calls, accepted = 0, np.zeros(GAMMA)
    for text in TEXTS[:8]:
        prompt = Prompt(text, prompt=text[:20])
        answers = [server.decode(prompt, how) for server in (speculative, plain)]
        ids = target.tokenizer(prompt.prompt)["input_ids"]
        (own,) = decode(target.decoder, drafter, [prompt], [ids], how, DraftLength(GAMMA))
        assert answers[0].run.tokens == answers[1].run.tokens == own.tokens
        calls += len(own.accepted) - 1  # the first token is the prefill's
        accepted += [sum(n > place for n in own.accepted) for place in range(GAMMA)]
    drafts, _, _, *by_position = (speculative.counters() - before).tolist()
    print(f"vLLM {np.array(by_position) / drafts}, here {accepted / calls}")
    assert accepted[1] / calls > 0.1
    # at a text's end vLLM drafts more than there is room for
    assert np.allclose(np.array(by_position) / drafts, accepted / calls, atol=0.03)
