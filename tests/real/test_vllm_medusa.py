"""vLLM's own Medusa loads what the kind saves, all of it, and drafts the tokens that we do.

It needs a Python with vLLM (docs/engines.md), and no model. vLLM does not start a server with a
trimmed head of Medusa; one with a whole head is served by test_vllm_drafts.py.
"""

import json
import subprocess

import pytest
import torch
from safetensors.torch import save_file

from distill.drafters.medusa import KIND
from eval.decoding.drafters.medusa import MedusaConfig, MedusaModel
from eval.engines.environment import environment_of

pytestmark = pytest.mark.real
VOCAB, ROWS, SIZE, HEADS = 512, 192, 64, 4
DRAFTED = HEADS - 1  # a server may be asked for fewer tokens than there are heads

CHILD = """
import json, sys
from types import SimpleNamespace
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.models.medusa import Medusa
from vllm.transformers_utils.configs.medusa import MedusaConfig

folder, states, drafted = sys.argv[1:]
config = MedusaConfig.from_pretrained(folder)
config.num_lookahead_tokens = int(drafted)
asked = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(1, 0, f"file://{states}.store", 0, "gloo")
    initialize_model_parallel(1)
    model = Medusa(vllm_config=SimpleNamespace(speculative_config=asked))
    wanted = {name for name, _ in model.named_parameters()}
    loaded = model.load_weights(load_file(f"{folder}/model.safetensors").items())
    for module in model.modules():
        if method := getattr(module, "quant_method", None):
            method.process_weights_after_loading(module)
    x = load_file(states)["states"].to(model.lm_head.weight.dtype)
    tokens = [logits.argmax(-1).tolist() for logits in model.compute_logits(model(x))]
print(json.dumps({"lacking": sorted(wanted - set(loaded)), "tokens": tokens}))
"""


def test_vllms_own_class_loads_it_and_drafts_alike(tmp_path, installed):
    torch.manual_seed(0)
    config = MedusaConfig(
        hidden_size=SIZE, vocab_size=VOCAB, num_heads=HEADS, truncated_vocab_size=ROWS
    )
    model, ids = MedusaModel(config), torch.randperm(VOCAB)[:ROWS]
    for weight in model.parameters():
        weight.data.normal_()
    (tmp_path / "heads").mkdir()
    KIND.save(tmp_path / "heads", model, ids, torch.zeros(VOCAB, SIZE), "a target")
    states = torch.randn(50, SIZE)
    save_file({"states": states}, tmp_path / "states")
    child = subprocess.run(
        [installed, "-c", CHILD, tmp_path / "heads", tmp_path / "states", str(DRAFTED)],
        env=environment_of(installed) | {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    found = json.loads(child.stdout.splitlines()[-1])
    assert found["lacking"] == []
    with torch.no_grad():
        ours = [ids[model.lm_head(block(states)).argmax(-1)] for block in model.blocks]
    for theirs, mine in zip(found["tokens"], ours[:DRAFTED], strict=True):
        assert theirs == mine.tolist()
