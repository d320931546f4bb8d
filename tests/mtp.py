"""Targets of a few kilobytes with a head for multi-token prediction, of transformers' classes."""

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from align.checkpoint import opened_weights
from align.files import write_json
from distill.drafters.mtp import split_experts
from eval.decoding.drafters.mtp import LAYER, build_mtp, stored_name

BIAS = "e_score_correction_bias"  # of experts; always in fp32
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 256,
}
MLA = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
GROUPED = {"head_dim": 8, "num_key_value_heads": 2}
HYBRID = GROUPED | {  # the first layer has a state for the whole text
    "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4,
    "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
FAMILIES = {
    "deepseek_v3": MLA,
    "glm4_moe": GROUPED,
    "qwen3_next": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID,
}


def mtp_config(family, **shape):
    return AutoConfig.for_model(family, **(SHAPE | FAMILIES[family] | shape))


def random_head(config, seed=0):
    """A draft with random matrices, without embedding and LM head of a target."""
    model = build_mtp(config).to_empty(device="cpu")
    torch.manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.3) if weight.ndim > 1 else weight.uniform_(0.5, 1.5)
        for name, bias in model.named_buffers():
            if name.endswith(BIAS):
                bias.uniform_()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


def save_target(folder, family, seed=0, dtype=torch.float32, spread=4, sure=8, **shape):
    """A target in one file, or in two with an index, whose second one has the head's layer.

    spread, sure: factors on the matrices, and another one on the LM head.
    """
    config = mtp_config(family, **shape)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(spread if weight.ndim > 1 else 1)
        model.lm_head.weight.mul_(sure)
    model.save_pretrained(folder)
    layer = {}
    for name, tensor in random_head(config, seed + 1).state_dict().items():
        if name.startswith(LAYER):
            place = stored_name(name.removeprefix(LAYER), config)
            layer |= split_experts(
                place, tensor.to(torch.float32 if name.endswith(BIAS) else dtype)
            )
    layer = {name: tensor.clone() for name, tensor in layer.items()}
    first = folder / "model.safetensors"
    with opened_weights(first) as file:
        others = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if family == "glm4_moe":
        save_file(others | layer, first, metadata={"format": "pt"})
        return
    shards = {f"model-0000{i}-of-00002.safetensors": t for i, t in enumerate((others, layer), 1)}
    for name, tensors in shards.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    first.unlink()
    places = {name: shard for shard, tensors in shards.items() for name in tensors}
    write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
