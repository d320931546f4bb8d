"""Adapters with random weights."""

import torch

from eval.decoding.drafters.uno import PREFIX, PRODUCTS


def random_adapter(model, rank=4, seed=3):
    """Tensors of an adapter for all products of the model's layers, by their names in a folder."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for number, layer in enumerate(model.model.layers):
        for name in (name for names in PRODUCTS.values() for name in names):
            product = layer.get_submodule(name)
            shapes = {"A": (rank, product.in_features), "B": (product.out_features, rank)}
            for side, shape in shapes.items():
                weight = 0.3 * torch.randn(shape, generator=generator)
                tensors[f"{PREFIX}.{number}.{name}.lora_{side}.weight"] = weight
    return tensors
