"""DFlash drafts as others publish them, with random weights, and a forward slot by slot."""

import json

import torch
from safetensors.torch import save_file
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

# config.json of z-lab/Qwen3-4B-DFlash-b16 without sizes and ids
Z_LAB = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "transformers_version": "4.57.3",
    "use_cache": True,
    "use_sliding_window": False,
}
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim"),
    *("num_attention_heads", "num_key_value_heads"),
)
DRAFTED = 3  # tokens of a block


def mixed(conv, side, h, weights):
    """The slots h [W, H] mixed with those before them; weights: of each slot [W, 2, taps, H]."""
    if conv is None:
        return h
    return torch.stack(
        [
            sum(weights[i, side, tap] * h[i - tap] for tap in range(weights.shape[2]) if tap <= i)
            for i in range(len(h))
        ]
    )


def mixing(conv, h):
    """The weights of each slot h [W, H] in a mixture [W, 2, taps, H]."""
    if conv is None:
        return None
    _, taps, size = conv.base_kernel.shape
    by_group = conv.kernel_projection(h).view(len(h), 2, taps, -1, 1)
    return conv.base_kernel + by_group.expand(-1, -1, -1, -1, size // by_group.shape[3]).flatten(3)


def by_definition(model, states, tokens, views):
    """The LM head's inputs [W, H] of the block `tokens` [W], without caches and masks.

    states: the target's before the anchor [T, L * H]. views: by layer, its window, and whether it
    is causal.
    """
    body, start, width = model.model, len(states), len(tokens)
    context, x = body.hidden_norm(body.fc(states)), body.embed_tokens(tokens)
    cos, sin = body.rotary_emb(x[None], torch.arange(start + width)[None])
    for layer, (window, causal) in zip(body.layers, views, strict=True):
        own, h = layer.self_attn, layer.input_layernorm(x)
        weights = mixing(layer.attention_conv, h)
        normed = mixed(layer.attention_conv, 0, h, weights)
        read = torch.cat([context, normed])
        q, k, v = (
            part(h).unflatten(-1, (-1, own.head_dim)).transpose(0, 1)
            for part, h in ((own.q_proj, normed), (own.k_proj, read), (own.v_proj, read))
        )
        q = apply_rotary_pos_emb(own.q_norm(q), own.q_norm(q), cos[0, start:], sin[0, start:], 0)[0]
        k = apply_rotary_pos_emb(own.k_norm(k), own.k_norm(k), cos[0], sin[0], 0)[0]
        k, v = (part.repeat_interleave(own.num_key_value_groups, 0) for part in (k, v))
        outputs = []
        for place in range(start, start + width):
            first = 0 if window is None else max(0, place - window + 1)
            seen = slice(first, place + 1 if causal else None)
            scores = (q[:, place - start, None] * k[:, seen]).sum(-1) * own.scaling
            outputs.append((scores.softmax(-1)[..., None] * v[:, seen]).sum(1).flatten())
        x = x + mixed(layer.attention_conv, 1, own.o_proj(torch.stack(outputs)), weights)
        h = layer.post_attention_layernorm(x)
        weights = mixing(layer.mlp_conv, h)
        x = x + mixed(layer.mlp_conv, 1, layer.mlp(mixed(layer.mlp_conv, 0, h, weights)), weights)
    return body.norm(x)


def save_published(folder, shape, target_layers, token_ids=None):
    """Write a draft of two layers with one k_norm, and return its folder.

    shape: a config with SIZES. target_layers: the layers that it reads, counted from 0. token_ids:
    target ids of its head's entries, in the layout of speculators; None: z-lab's layout, in which
    the head is the target's.
    """
    sizes = {key: shape[key] for key in SIZES}
    rows, size, inner, width, heads, keys = sizes.values()
    layers, mask = 2, rows - 1
    about = Z_LAB | sizes | {"num_hidden_layers": layers, "max_window_layers": layers}
    about |= {"layer_types": ["full_attention"] * layers}
    tensors = {
        "fc.weight": (size, len(target_layers) * size),
        "hidden_norm.weight": (size,),
        "norm.weight": (size,),
    }
    for number in range(layers):
        tensors |= {
            f"layers.{number}.{name}.weight": of
            for name, of in {
                "input_layernorm": (size,),
                "post_attention_layernorm": (size,),
                "self_attn.q_proj": (heads * width, size),
                "self_attn.k_proj": (keys * width, size),
                "self_attn.v_proj": (keys * width, size),
                "self_attn.o_proj": (size, heads * width),
                "self_attn.q_norm": (width,),
                "self_attn.k_norm": (width,),
                "mlp.gate_proj": (inner, size),
                "mlp.up_proj": (inner, size),
                "mlp.down_proj": (size, inner),
            }.items()
        }
    about |= {"block_size": DRAFTED + 1}
    if token_ids is None:
        about["num_target_layers"] = max(target_layers) + 2
        about["dflash_config"] = {"mask_token_id": mask, "target_layer_ids": list(target_layers)}
    else:
        tensors["lm_head.weight"] = (len(token_ids), size)
        methods = [{"proposal_type": "greedy", "speculative_tokens": DRAFTED}]
        verifier = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
        own = {key: about.pop(key) for key in ("architectures", "block_size", "dtype")}
        del about["auto_map"]
        about = own | {
            "auto_map": {"": "config.DFlashSpeculatorConfig"},
            "speculators_model_type": "dflash",
            "speculators_config": {
                "algorithm": "dflash",
                "default_proposal_method": "greedy",
                "proposal_methods": methods,
                "verifier": verifier,
            },
            "aux_hidden_state_layer_ids": [layer + 1 for layer in target_layers],
            "draft_vocab_size": len(token_ids),
            "mask_token_id": mask,
            "max_anchors": 3072,
            "sample_from_anchor": False,
            "sliding_window_non_causal": True,
            "target_hidden_size": None,
            "transformer_layer_config": about,
        }
    generator = torch.Generator().manual_seed(0)
    random = {
        name: torch.randn(of, generator=generator).mul(0.1).add(len(of) == 1).bfloat16()
        for name, of in tensors.items()
    }
    for number in range(layers):  # as vLLM on a CPU needs it
        random[f"layers.{number}.self_attn.k_norm.weight"] = torch.ones(width).bfloat16()
    if token_ids is not None:
        has_entry = torch.zeros(rows, dtype=torch.bool)
        has_entry[token_ids] = True
        random |= {"d2t": token_ids - torch.arange(len(token_ids)), "t2d": has_entry}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(about))
    save_file(random, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
