import torch

from tests.benchmarks.widen import widened


def test_the_enlarged_model_has_the_small_models_logits(tiny_llama):
    small = tiny_llama(1, spread=4, num_key_value_heads=2, head_dim=8)
    for weight in small.parameters():
        weight.data = weight.data.bfloat16().float()
    large = widened(small, 128, 96, 16, 8).float()
    assert large.num_parameters() > 4 * small.num_parameters()
    ids = torch.arange(40)[None]
    torch.testing.assert_close(large(ids).logits, small(ids).logits, rtol=1e-4, atol=1e-4)
