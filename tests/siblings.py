"""Two sides of a pair that have one tokenizer and heads padded to other sizes."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.distill.conftest import TEXTS, tokenizer

COUNT, SMALL, LARGE = 300, 320, 384  # tokens; rows of two heads


def save_sibling(folder, rows, seed, layers=2):
    """A Llama that is like real ones: sure of its tokens, and never of its padding."""
    tokenizer(TEXTS, COUNT, "</s>").save_pretrained(folder)
    torch.manual_seed(seed)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 2048, "eos_token_id": 0}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=rows, **shape, **heads))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.ndim > 1 else 1)
        head = model.lm_head.weight
        head.mul_(16)
        # nor does a text end before its length
        head[COUNT:] = head[0] = head[:COUNT].mean(0)
    model.save_pretrained(folder)
