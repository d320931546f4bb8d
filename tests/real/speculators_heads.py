"""Heads of the real speculators package, with random weights, and what its own forward computes.

It runs in a Python with speculators 0.9, and uses none of our code:

    python speculators_heads.py make TARGET FOLDER      heads of all kinds but MTP
    python speculators_heads.py make-mtp TARGET FOLDER  a head of the kind mtp
    python speculators_heads.py extract TARGET HEAD     a target's own MTP layer as a head
    python speculators_heads.py read HEAD FILE          the file of a head

A head's file, which is also written beside each new one, has the ids of a text [1, T], the target's
states that the head reads [1, T, L * H], and the logits of the package at its anchors [A].
"""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators import SpeculatorModel, SpeculatorModelConfig
from speculators.models.dflash import core as dflash
from speculators.train.cli import create_transformer_layer_config
from transformers import AutoConfig, AutoModelForCausalLM

TOKENS, ANCHORS, BLOCK, STEPS, MASK = 40, (9, 17, 30), 5, 3, 2
LOSS = {"loss_fn": "kl_div", "loss_implementation": "eager"}
# kind: model type, layers, window, layers without one, more arguments
KINDS = {
    "eagle3": ("eagle3", 1, 2048, [], {"norm_before_fc": True, "norm_output": True}),
    "eagle3, window": ("eagle3", 2, 6, [1], {"fc_norm": True, "draft_vocab_size": 150}),
    "peagle": ("peagle", 1, 2048, [], {}),
    "dflash": ("dflash", 2, 2048, [], {}),
    "dflash, full": ("dflash", 2, 2048, [0, 1], {"draft_vocab_size": 150}),
    "dflash, mixed": ("dflash", 3, 2048, [1], {}),
    "dflash, both ways": ("dflash", 2, 2048, [], {"sliding_window_non_causal": True}),
    "dflash, window": ("dflash", 1, 12, [], {}),
    "dflash2": ("dflash2", 2, 2048, [], {"selector_rank": 8, "selector_top_k": 6}),
    "dspark": ("dspark", 2, 2048, [], {"markov_rank": 8}),
    "xpress": ("xpress", 2, 2048, [], {"xpress_rank": 8}),
}


def made(target, name, layers, window, full, more):
    arch = "llama" if name == "eagle3" else "qwen3"
    config = create_transformer_layer_config(target, layers, arch, "silu", window, full)
    rows = more.get("draft_vocab_size", config.vocab_size)
    kept = torch.arange(config.vocab_size)[:: config.vocab_size // rows][:rows]
    t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
    t2d[kept] = True
    given = {"draft_vocab_size": rows, "block_size": BLOCK, "mask_token_id": MASK}
    given |= {
        "norm_before_residual": True,
        "ttt_steps": STEPS,
        "verifier_name_or_path": target,
        "draft_attn_impl": "sdpa",
        "target_layer_ids": None,
    }
    maps = (t2d, kept - torch.arange(rows)) if rows < config.vocab_size else (None, None)
    return SpeculatorModel.registry[name].from_training_args(config, *maps, **(given | more))


def extracted(target):
    """The head of a target's own MTP layer."""
    config = AutoConfig.from_pretrained(target).get_text_config()
    return SpeculatorModel.registry["mtp"].from_training_args(
        config, num_speculative_steps=STEPS, verifier_name_or_path=target
    )


@torch.no_grad()
def random(model):
    """The model with random weights, except the verifier's."""
    generator = torch.Generator().manual_seed(1)
    for name, weight in model.named_parameters():
        if "verifier" in name or name in ("embed_tokens.weight", "lm_head.weight"):
            continue
        noise = torch.randn(weight.shape, generator=generator)
        weight.copy_(1 + 0.2 * noise if "norm" in name else 0.15 * noise)
    return model


@torch.no_grad()
def read(folder):
    """The tensors of a file (see above)."""
    config = SpeculatorModelConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "sdpa"  # the package's own needs a GPU
    model = SpeculatorModel.from_pretrained(folder, config=config).float().eval()
    verifier = config.speculators_config.verifier.name_or_path
    layers = getattr(config, "aux_hidden_state_layer_ids", None)
    layers = layers or getattr(config, "eagle_aux_hidden_state_layer_ids", None)
    target = AutoModelForCausalLM.from_pretrained(verifier, dtype=torch.float32).eval()
    ids = torch.randint(3, 60, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    states = target(ids, output_hidden_states=True).hidden_states
    last = states[-1]
    read = torch.cat([states[layer] for layer in layers], -1) if layers else last
    texts = {"document_ids": torch.zeros_like(ids), "loss_mask": torch.ones_like(ids)}
    written = {"ids": ids, "states": read, "anchors": torch.tensor(ANCHORS)}
    caught = []
    model.lm_head.register_forward_hook(lambda module, given, logits: caught.append(logits))
    kind = config.speculators_model_type
    if kind in ("dflash", "dflash2", "dspark", "xpress"):
        chosen = torch.tensor(ANCHORS), torch.ones(len(ANCHORS), dtype=torch.bool)
        dflash.select_anchors = lambda *_: chosen
        hidden, logits, *_, places = model._backbone_forward(
            read, ids, texts["loss_mask"], last, texts["document_ids"], max_anchors=len(ANCHORS)
        )
        shape = len(ANCHORS), BLOCK, -1
        if kind == "dflash2":
            before = model._predecessor_ids(ids, places)
            candidates, scores = model.candidate_selector.select(
                logits, hidden, before.reshape(1, -1)
            )
            logits = torch.full_like(logits, float("-inf")).scatter(-1, candidates, scores)
        written["logits"] = logits.view(shape)
    elif kind == "mtp":
        written["logits"] = torch.stack(model(ids, last)[0])
    elif kind == "eagle3":
        # as shift_batch: input i is token i + 1 and the states of token i
        shifted = {key: value[:, 1:] for key, value in texts.items()}
        model(read[:, :-1], ids[:, 1:], position_ids=torch.arange(1, TOKENS)[None], **shifted)
        written["logits"] = torch.stack(caught)
    else:
        shifted = {key: value[:, 1:] for key, value in texts.items()}
        model(
            read[:, :-1],
            ids[:, 1:],
            verifier_last_hidden_states=last[:, 1:],
            **shifted,
            loss_config={},
        )
        written["logits"] = caught[0]
    return {name: tensor.contiguous() for name, tensor in written.items()}


def save(model, folder):
    model.save_pretrained(folder)
    save_file(read(folder), f"{folder}.safetensors")


if __name__ == "__main__":
    command, first, second = sys.argv[1:]
    if command == "read":
        save_file(read(first), second)
    elif command == "extract":
        save(extracted(first), second)
    elif command == "make-mtp":
        save(random(extracted(first)), Path(second) / "mtp")
    else:
        for kind, keys in KINDS.items():
            save(random(made(first, *keys)), Path(second) / kind)
