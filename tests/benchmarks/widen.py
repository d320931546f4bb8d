"""A target that answers as a small one and costs as much as a large one, for a GPU without the Hub.

    python tests/benchmarks/widen.py TARGET FOLDER

TARGET is a Llama. FOLDER gets a Llama of WIDTH in bf16: 6.9 billion parameters for SmolLM2-135M.
Each weight of the small model is a corner of a weight of the large model. The residual stream is
zero beyond the small model's width, so the logits are the same up to rounding. All other weights
are random, because zeros can be faster. So the acceptance is that of the small target's draft, and
the times are those of a large target.
"""

import copy
import sys

import torch
from transformers import LlamaForCausalLM

from align.checkpoint import Checkpoint
from align.machine import use_machine

# four times SmolLM2-135M's width, so that its norms are halved, which bf16 does exactly
WIDTH, INTERMEDIATE, HEADS, KEY_HEADS = 2304, 28_672, 72, 24
STANDARD_DEVIATION = 0.02


def widened(small, width=WIDTH, intermediate=INTERMEDIATE, heads=HEADS, key_heads=KEY_HEADS):
    """The large model, in bf16 on the default device."""
    config, narrow = copy.deepcopy(small.config), small.config.hidden_size
    if heads * config.num_key_value_heads != key_heads * config.num_attention_heads:
        raise ValueError(f"{heads} heads for {key_heads} keys would pair other heads and keys.")
    config.head_dim = getattr(config, "head_dim", None) or narrow // config.num_attention_heads
    config.hidden_size, config.intermediate_size = width, intermediate
    config.num_attention_heads, config.num_key_value_heads = heads, key_heads
    config.rms_norm_eps *= narrow / width
    config.dtype = torch.bfloat16
    large = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    sources = dict(small.named_parameters())
    with torch.no_grad():
        for name, weight in large.named_parameters():
            source = sources[name]
            if source.ndim == 1:  # a norm: the mean square is over more entries, all of them zero
                weight.zero_()
                weight[:narrow] = source * (narrow / width) ** 0.5
                continue
            to_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            weight.normal_(std=STANDARD_DEVIATION)
            if to_residual:
                weight[narrow:] = 0  # nothing is added beyond the small model's width
                weight[:, source.shape[1] :] = 0  # nor by the added heads and neurons
            elif "layers." not in name:
                weight[:, narrow:] = 0  # embedding and LM head
            rows, columns = source.shape
            weight[:rows, :columns] = source
    return large


def main(target, folder):
    use_machine()
    small = Checkpoint.open(target).load(torch.bfloat16)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        large = widened(small)
    large.save_pretrained(folder)
    Checkpoint.open(target).tokenizer.save_pretrained(folder)
    print(f"{sum(p.numel() for p in large.parameters()) / 1e9:.2f} billion parameters in {folder}")


if __name__ == "__main__":
    main(*sys.argv[1:])
