"""LoRA: the run keeps its adapters as peft writes them, and its draft is what peft merges."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from align.sources import read_json
from distill import train
from distill.train import run
from eval.decoding.drafters.pruned import load_compact
from eval.decoding.target import load_target

LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 16, "max_steps": 12}


@pytest.mark.parametrize("pruned", [True, False])
def test_the_adapters_on_the_prepared_draft_are_the_merged_draft(
    job, folder, tmp_path, monkeypatch, pruned
):
    monkeypatch.setattr(train, "evaluate", lambda *_: None)
    start = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 290}
    changes = start if pruned else {"draft": str(folder / "target")}
    recipe = job(tmp_path / "run", **changes, **LORA)
    assert run(recipe) == 0
    adapter = recipe.folder / "adapter"
    files = sorted(path.name for path in adapter.iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    base = str(recipe.folder / "prepared") if pruned else recipe.draft
    about = read_json(adapter / "adapter_config.json")
    assert about["base_model_name_or_path"] == base
    assert (about["r"], about["lora_alpha"]) == (4, 16)  # peft's own are 8 and 8
    assert not (recipe.folder / "draft" / "adapter").exists()

    if pruned:
        embedding = load_target(recipe.target, torch.float32, "cpu", 64).decoder.embedding
        before, _ = load_compact(recipe.folder / "prepared", embedding)
        after, _ = load_compact(recipe.folder / "draft" / "compact", embedding)
    else:
        before, after = map(AutoModelForCausalLM.from_pretrained, (base, recipe.folder / "draft"))
    ids = torch.tensor([[5, 9, 20, 40, 7, 8, 30, 31]])
    with torch.no_grad():
        prepared = before.eval()(ids).logits
        by_peft = PeftModel.from_pretrained(before, str(adapter)).eval()(ids).logits
        merged = after.eval()(ids).logits
    assert not torch.allclose(prepared, merged, atol=0.1)
    torch.testing.assert_close(by_peft, merged, atol=2e-4, rtol=1e-4)
