"""LoRA: a run keeps the adapters on a sibling, and its draft is what peft merges."""

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM

from align.sources import read_json
from distill import train
from distill.train import run

LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 16, "max_steps": 12}


@pytest.mark.parametrize("made_from_target", [True, False])
def test_the_adapters_on_the_base_draft_are_the_merged_draft(
    job, folder, tmp_path, monkeypatch, made_from_target
):
    monkeypatch.setattr(train, "evaluate", lambda *_: None)
    monkeypatch.chdir(folder)
    pruned = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 290}
    recipe = job(tmp_path / "run", **(pruned if made_from_target else {"draft": "target"}), **LORA)
    assert run(recipe) == 0
    adapter = recipe.folder / "adapter"
    if made_from_target:  # no checkpoint that peft could load is their base
        assert not adapter.exists()
        return
    files = sorted(path.name for path in adapter.iterdir())
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    about = read_json(adapter / "adapter_config.json")
    assert (about["r"], about["lora_alpha"]) == (4, 16)  # peft's own are 8 and 8
    monkeypatch.chdir(tmp_path)  # where the recipe's relative path leads nowhere
    before, after = map(
        AutoModelForCausalLM.from_pretrained, (folder / "target", recipe.folder / "draft")
    )
    ids = torch.tensor([[5, 9, 20, 40, 7, 8, 30, 31]])
    with torch.no_grad():
        base, merged = before(ids).logits, after(ids).logits
        by_peft = AutoPeftModelForCausalLM.from_pretrained(adapter)(ids).logits
    assert not torch.allclose(base, merged, atol=0.1)
    torch.testing.assert_close(by_peft, merged, atol=2e-4, rtol=1e-4)
