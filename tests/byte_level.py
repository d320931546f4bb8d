"""Tiny checkpoints whose tokens are bytes, and the end of a text."""

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

SHAPE = {"vocab_size": 257, "eos_token_id": 256}


def tokenizer_of_bytes():
    """It ends texts by </s>."""
    vocabulary = {token: i for i, token in enumerate([*sorted(ByteLevel.alphabet()), "</s>"])}
    backend = Tokenizer(BPE(vocabulary, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


def save(folder, model):
    """The model with a tokenizer of bytes."""
    model.save_pretrained(folder)
    tokenizer_of_bytes().save_pretrained(folder)


def noisy(model, noise):
    """The model, each weight off by so many standard deviations."""
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * weight.std() * torch.randn(weight.shape)
    return model
