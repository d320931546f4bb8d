"""A real vLLM loads a draft that a run has padded or cut to its target's size.

It needs an environment with vLLM (python -m eval.engines.environments vllm), and no model.
"""

import pytest

from distill.recipe import build_recipe
from distill.train import run
from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.local_vllm import speculation
from eval.engines.server import ServerError
from eval.engines.vllm import VllmServer
from eval.prompts import Prompt
from tests.distill.conftest import TEXTS
from tests.siblings import LARGE, SMALL, save_sibling

pytestmark = pytest.mark.real
POSITIONS = ("--max-model-len", "256")


@pytest.mark.parametrize(("draft_rows", "target_rows"), [(SMALL, LARGE), (LARGE, SMALL)])
def test_greedy_texts_are_those_without_a_draft(tmp_path, vllm, draft_rows, target_rows):
    save_sibling(tmp_path / "draft", draft_rows, 0)
    save_sibling(tmp_path / "target", target_rows, 1)
    for name, texts in (("train", TEXTS[:12]), ("eval", TEXTS[12:])):
        rows = "".join(f'{{"prompt": "{text[:20]}"}}\n' for text in texts)
        (tmp_path / f"{name}_prompts.jsonl").write_text(rows)
    recipe = build_recipe(
        {name: str(tmp_path / name) for name in ("target", "draft")}
        | {name: str(tmp_path / f"{name}.jsonl") for name in ("train_prompts", "eval_prompts")}
        | {"output_dir": str(tmp_path / "run"), "dtype": "float32", "bf16": False}
        | {"use_cpu": True, "max_steps": 60, "learning_rate": 5e-3, "cache_top_k": 30}
        | {"answer_max_new_tokens": 24, "max_new_tokens": 16, "gamma": 2, "speed_prompts": 2}
        | {"tuning_prompts": 1}
    )
    assert run(recipe) == 0
    if draft_rows < target_rows:  # as it was before
        with pytest.raises(ServerError, match="ended with status"):
            vllm(tmp_path / "target", *POSITIONS, *speculation(tmp_path / "draft", 2))
    drafting = speculation(recipe.folder / "draft", 2)
    addresses = (vllm(tmp_path / "target", *POSITIONS, *more) for more in (drafting, []))
    speculative, plain = (VllmServer(address, 600) for address in addresses)
    before, how = speculative.counters(), Decoding(Sampling(), frozenset(), 48)
    for text in TEXTS[:8]:
        prompt = Prompt(text, prompt=text[:20])
        answers = [server.decode(prompt, how).run.tokens for server in (speculative, plain)]
        assert answers[0] == answers[1]
        assert len(answers[0]) == 48
    _, drafted, accepted, *_ = (speculative.counters() - before).tolist()
    print(f"{accepted:.0f} of {drafted:.0f} drafted tokens accepted")
    assert drafted > 0
