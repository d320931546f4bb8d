"""EAGLE-3 drafts as others publish them, computed by a module of their own: no cache, no fusion.

It follows vLLM 0.32's `llama_eagle3.py` and `qwen3_eagle3.py`, and uses none of our code.
"""

import json

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

# config.json without sizes, by layout; speculators writes the layers' own config beside its keys
SPECULATORS = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}
SPECULATORS |= {"auto_map": {"": "config.Eagle3SpeculatorConfig"}}
EAGLE = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 5, "use_sliding_window": True}
LAYOUTS = {
    "speculators": (SPECULATORS | {"norm_before_residual": True}, {"model_type": "llama"}),
    "speculators, by default since 2026": (
        SPECULATORS | {"norm_before_fc": True, "norm_output": True},
        {"model_type": "llama"} | WINDOW,
    ),
    "speculators, Qwen3 layers": (
        SPECULATORS | {"fc_norm": True},
        {"model_type": "qwen3", "num_hidden_layers": 2},
    ),
    "EAGLE": (EAGLE | {"model_type": "qwen2"}, {"sliding_window": 4}),  # which is not used
    "EAGLE, by its authors": (EAGLE | {"architectures": ["LlamaForCausalLM"]}, {}),
    "EAGLE 3.1": (EAGLE | {"fc_norm": True, "norm_output": True}, {}),
}
SHAPE = {
    "attention_bias": False,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
}


class PublishedEagle3(nn.Module):
    """A draft with random weights. shape: sizes, as keys of a config. read: layers it reads.

    token_ids: target ids of its head's entries.
    """

    def __init__(self, layout, shape, read, token_ids, seed=0):
        super().__init__()
        about, layers = (dict(part) for part in LAYOUTS[layout])
        self.shape = shape = SHAPE | shape | layers
        self.about = about | {"draft_vocab_size": len(token_ids)}
        if "speculators_model_type" in about:
            methods = [{"proposal_type": "greedy", "speculative_tokens": 5}]
            named = {"algorithm": "eagle3", "default_proposal_method": "greedy"}
            verifier = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
            self.about |= {"eagle_aux_hidden_state_layer_ids": list(read)}
            self.about["transformer_layer_config"] = shape | {"num_aux_hidden_states": len(read)}
            self.about["speculators_config"] = named | {
                "proposal_methods": methods,
                "verifier": verifier,
            }
        else:
            self.about = shape | self.about
            self.about["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(read)}
        self.token_ids, size = token_ids, shape["hidden_size"]
        self.qwen3 = layers.get("model_type") == "qwen3"
        self.layers = nn.ModuleList(map(self.layer, range(shape["num_hidden_layers"])))
        self.fc = nn.Linear(len(read) * size, size, bias=False)
        if about.get("norm_before_fc"):
            self.input_norm = self.norm_of(len(read) * size)
        if about.get("fc_norm"):
            self.fc_norm = nn.ModuleList(self.norm_of(size) for _ in read)
        self.norm = self.norm_of(size)
        self.lm_head = nn.Linear(size, len(token_ids), bias=False)
        torch.manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                weight.normal_(std=0.3) if weight.ndim > 1 else weight.uniform_(0.5, 1.5)

    def norm_of(self, size):
        return nn.RMSNorm(size, self.shape["rms_norm_eps"])

    def layer(self, number):
        size, width = self.shape["hidden_size"], self.shape["head_dim"]
        read = 2 * size if number == 0 else size
        heads, key_heads = (
            self.shape[f"num_{kind}_heads"] * width for kind in ("attention", "key_value")
        )
        attention = {
            "q_proj": nn.Linear(read, heads, bias=False),
            "k_proj": nn.Linear(read, key_heads, bias=False),
            "v_proj": nn.Linear(read, key_heads, bias=False),
            "o_proj": nn.Linear(heads, size, bias=False),
        }
        if self.qwen3:
            attention |= {"q_norm": self.norm_of(width), "k_norm": self.norm_of(width)}
        inner = self.shape["intermediate_size"]
        mlp = {
            "gate_proj": nn.Linear(size, inner, bias=False),
            "up_proj": nn.Linear(size, inner, bias=False),
            "down_proj": nn.Linear(inner, size, bias=False),
        }
        norms = ["input_layernorm", "post_attention_layernorm", *["hidden_norm"] * (number == 0)]
        parts = {"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp)}
        return nn.ModuleDict(parts | {name: self.norm_of(size) for name in norms})

    def fused(self, states):
        """The first layer's states [T, H], from the target's of all layers [T, L, H]."""
        read = states.flatten(1)
        if self.about.get("norm_before_fc"):
            read = self.input_norm(read)
        if self.about.get("fc_norm"):
            parts = zip(self.fc_norm, read.chunk(len(self.fc_norm), -1), strict=True)
            read = torch.cat([norm(part) for norm, part in parts], -1)
        return self.fc(read)

    def attended(self, attention, read, sliding):
        """The attention's output at all T inputs."""
        numbers, size = torch.arange(len(read)), self.shape["head_dim"]
        q, k, v = (attention[f"{name}_proj"](read).view(len(read), -1, size) for name in "qkv")
        if self.qwen3:
            q, k = attention["q_norm"](q), attention["k_norm"](k)
        speeds = self.shape["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        angles = (numbers[:, None] * speeds).repeat(1, 2)[:, None]

        def turned(x):
            one, other = x.chunk(2, -1)
            return x * angles.cos() + torch.cat([-other, one], -1) * angles.sin()

        group = q.shape[1] // k.shape[1]
        q, k, v = turned(q), turned(k).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        far = numbers[:, None] - numbers
        hidden = (far < 0) | (far >= (self.shape["sliding_window"] if sliding else len(read)))
        scores = torch.einsum("qhd,khd->hqk", q, k) / size**0.5
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return attention["o_proj"](torch.einsum("hqk,khd->qhd", weights, v).flatten(1))

    def forward(self, embedded, hidden):
        """The head's inputs and the draft's own states [T, H]."""
        for number, layer in enumerate(self.layers):
            if number:
                x, read = hidden, layer["input_layernorm"](hidden)
            else:
                normed = layer["hidden_norm"](hidden)
                speculators = "speculators_model_type" in self.about
                before = self.about.get("norm_before_residual", speculators)
                x = normed if before else hidden
                read = torch.cat([layer["input_layernorm"](embedded), normed], -1)
            sliding = "sliding_attention" in self.shape.get("layer_types", ())
            x = x + self.attended(layer["self_attn"], read, sliding)
            normed, mlp = layer["post_attention_layernorm"](x), layer["mlp"]
            inner = F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed)
            hidden = x + mlp["down_proj"](inner)
        y = self.norm(hidden)
        return y, y if self.about.get("norm_output") else hidden

    @torch.no_grad()
    def draft(self, ids, states, embedding, count):
        """`count` greedy tokens after the text, and the logits of each [count, K].

        states: the target's at all tokens except the last [T - 1, L, H].
        """
        hidden, text, logits = self.fused(states), list(ids), []
        for _ in range(count):
            y, own = self(embedding[text[1:]], hidden)
            logits.append(self.lm_head(y[-1]))
            text.append(int(self.token_ids[logits[-1].argmax()]))
            hidden = torch.cat([hidden, own[-1:]])
        return text[len(ids) :], torch.stack(logits)

    def save(self, folder, dtype=torch.float32):
        """Write config.json and the tensors under their published names."""
        folder.mkdir(parents=True)
        about = self.about | {"torch_dtype": str(dtype).removeprefix("torch.")}
        (folder / "config.json").write_text(json.dumps(about))
        first = "layers.0" if "speculators_model_type" in self.about else "midlayer"
        tensors = {
            name.replace("layers.0", first): tensor.to(dtype)
            for name, tensor in self.state_dict().items()
        }
        entries = torch.arange(len(self.token_ids))
        if len(entries) < self.shape["vocab_size"]:
            has_entry = torch.zeros(self.shape["vocab_size"], dtype=torch.bool)
            has_entry[self.token_ids] = True
            tensors |= {"d2t": self.token_ids - entries, "t2d": has_entry}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
