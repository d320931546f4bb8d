"""The decoders against transformers: the same weights, one plain forward over the whole text."""

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eval.decoding import weights
from eval.decoding.build import build_decoder
from eval.decoding.forward import KVCache
from eval.decoding.fused import BATCHED_ROWS, FusedDecoder
from eval.decoding.graphs import GraphedDecoder
from eval.decoding.target import model_bytes
from eval.decoding.transformers_forward import TransformersDecoder
from tests.eval.decoding.replayed import Replayed

VOCAB, CONTEXT = 53, 48
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def randomised(model):
    """Norms and biases start as ones and zeros, which would hide a forgotten one."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def made(kind):
    torch.manual_seed(0)
    models = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE)),
        "llama with biases": lambda: LlamaForCausalLM(
            LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True)
        ),
        "llama 3 rope": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=LLAMA3_ROPE)),
        "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE)),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE, head_dim=16)),
        "gemma3": lambda: Gemma3ForCausalLM(
            Gemma3TextConfig(**SHAPE, head_dim=8, sliding_window=CONTEXT, rope_theta=1e4)
        ),
    }
    return randomised(models[kind]())


@pytest.fixture(scope="module", params=["llama", "llama with biases", "llama 3 rope"])
def model(request):
    return made(request.param)


def decoders(model):
    built = build_decoder(model, CONTEXT)
    assert isinstance(built, FusedDecoder)
    return [built, TransformersDecoder(model, CONTEXT), GraphedDecoder(built, Replayed())]


def plain(model, rows):
    """Logits of transformers' own forward of each row alone, no cache."""
    with torch.no_grad():
        return [model(torch.tensor([row]), use_cache=False).logits[0] for row in rows]


def drawn(*lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


def assert_close(got, want):
    # fp32: the order of sums differs
    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [2, BATCHED_ROWS + 3])
@pytest.mark.parametrize("width", [1, 4])
def test_ragged_rows_have_the_logits_of_each_row_alone(model, count, width):
    rows = drawn(*[3 + 5 * i % 17 for i in range(count)])
    want = plain(model, rows)
    for decoder in decoders(model):
        cache, single = decoder.new_cache(count, CONTEXT), decoder.new_cache(1, CONTEXT)
        heads = [len(row) - width if len(row) > width else 0 for row in rows]
        for i, (row, head) in enumerate(zip(rows, heads, strict=True)):
            if head:
                decoder.forward(torch.tensor([row[:head]]), 0, single)
                cache.copy_row(i, single, 0, head)
        tails = [(row[head:] + [0] * width)[:width] for row, head in zip(rows, heads, strict=True)]
        got = decoder.forward(torch.tensor(tails), torch.tensor(heads), cache)
        for i, (row, head) in enumerate(zip(rows, heads, strict=True)):
            assert_close(got[i, : len(row) - head], want[i][head:])


def test_a_shared_embedding_is_used_in_place():
    model = made("llama")
    shared = model.model.embed_tokens.weight.detach().clone()
    decoder = FusedDecoder(model, CONTEXT, shared)
    assert decoder.embedding is shared


def test_a_cache_is_resized_in_place():
    keys, values = torch.randn(3, 2, 5, 4), torch.randn(3, 2, 5, 4)
    cache = KVCache([keys], [values])
    for slots in (5, 9):
        assert cache.resized(slots) is cache
        assert cache.slots == slots
        assert torch.equal(cache.keys[0][:, :, :5], keys)
        assert torch.equal(cache.values[0][:, :, :5], values)
    cache.resized(2)
    assert torch.equal(cache.values[0], values[:, :, :2])
    assert KVCache([keys], [values]).bytes_per_token() == 2 * 2 * 4 * 4


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3"])
def test_hidden_states_of_named_layers_are_those_of_transformers(kind):
    model = made(kind)
    decoder = build_decoder(model, CONTEXT)
    text = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(text, output_hidden_states=True).hidden_states
    layers = range(len(expected))
    cache, plain = decoder.new_cache(2, 20), decoder.new_cache(2, 20)
    for part, start in ((slice(0, 6), 0), (slice(6, 9), 6)):
        for last_only in (False, True):
            states = dict.fromkeys(layers)
            logits = decoder.forward(text[:, part], start, cache, last_only, states)
            assert_close(logits, decoder.forward(text[:, part], start, plain, last_only))
            for layer in layers:
                assert_close(states[layer], expected[layer][:, part])


def test_what_a_decoder_cannot_do_is_said():
    with pytest.raises(ValueError, match=r"65 tokens is needed, .* llama .* 64 positions"):
        build_decoder(made("llama"), 65)
    # past so many tokens the angles of all of a text are others, drafted tokens included
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 24, "factor": 2.0}
    rope |= {"rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    long = LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope)).eval()
    with pytest.raises(ValueError, match=r"25 tokens is needed, .* llama .* 24 positions"):
        build_decoder(long, 25)
    build_decoder(long, 24)
    recurrent = made("gemma3")
    recurrent.config.layer_types = ["linear_attention"] * 3
    with pytest.raises(ValueError, match="linear_attention layers keep a state that"):
        build_decoder(recurrent, CONTEXT)
    spread = Gemma2ForCausalLM(Gemma2Config(**SHAPE))
    spread.model.norm.to("meta")
    with pytest.raises(ValueError, match=r"gemma2 model are on cpu, meta, but only .*llama"):
        build_decoder(spread, CONTEXT)


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_scaled_positions_are_read_though_the_config_keeps_the_original_number(kind):
    """Qwen2.5 names 32k positions beside a factor of 4."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 16} if kind == "yarn" else {}
    shape = SHAPE | {"max_position_embeddings": 16, "rope_parameters": rope}
    model, (text,) = randomised(LlamaForCausalLM(LlamaConfig(**shape))), drawn(60)
    decoder = build_decoder(model, 64)
    got = decoder.forward(torch.tensor([text]), 0, decoder.new_cache(1, 64))[0]
    assert_close(got, plain(model, [text])[0])
    with pytest.raises(ValueError, match=r"llama .* 64 positions"):
        build_decoder(model, 65)


def storages(model, decoder=None):
    """Bytes of each piece of memory that holds weights of the model or the decoder, by address."""
    held = [*model.parameters()]
    for part in (part for layer in decoder.layers for part in layer) if decoder else ():
        if isinstance(part, weights.Product):
            held.append(part.weight)
    found = [t.untyped_storage() for t in held]
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.mark.parametrize("kind", ["llama", "llama with biases", "qwen2", "qwen3"])
def test_fused_weights_are_the_models_own(kind, tmp_path):
    model, text = made(kind), drawn(9)
    before, size = {k: v.clone() for k, v in model.state_dict().items()}, model_bytes(model)
    (logits,) = plain(model, text)
    decoder = build_decoder(model, CONTEXT)
    memory = storages(model, decoder)
    assert sum(memory.values()) == sum(storages(model).values()) == size == model_bytes(model)
    layer = model.model.layers[0]
    for fused, parts in (("qkv", ("q", "k", "v")), ("gate_up", ("gate", "up"))):
        module = layer.mlp if fused == "gate_up" else layer.self_attn
        own = [getattr(module, f"{part}_proj").weight for part in parts]
        assert torch.equal(getattr(decoder.layers[0], fused).weight, torch.cat(own))
    # a decoder of other contexts reads the same memory
    assert storages(model, build_decoder(model.train(), 20)) == memory
    # other uses of the model do not notice
    assert torch.equal(plain(model.eval(), text)[0], logits)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    assert torch.equal(plain(again, text)[0], logits)
    # and neither does a decoder of a model whose weights have moved since
    assert_close(decoder.forward(torch.tensor(text), 0, decoder.new_cache(1, CONTEXT))[0], logits)
    model.to(torch.bfloat16)
    moved = build_decoder(model, CONTEXT)
    assert moved.layers[0].qkv.weight.dtype == torch.bfloat16
    assert sum(storages(model, moved).values()) == size // 2


def test_weights_of_a_mapped_file_are_let_go_once_fused(tmp_path):
    config = LlamaConfig(**(SHAPE | {"hidden_size": 256, "intermediate_size": 2048}))
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    old = [layer.mlp.gate_proj.weight.detach() for layer in model.model.layers]
    want = [weight.clone() for weight in old]

    def resident():
        with open("/proc/self/smaps") as maps:
            parts = maps.read().split(f"{tmp_path}/model.safetensors")[1:]
        return sum(int(part.split("Rss:")[1].split()[0]) * 1024 for part in parts)

    for parameter in model.parameters():
        parameter.sum()
    before = resident()
    assert before >= model_bytes(model)
    build_decoder(model, CONTEXT)
    fused = sum(2 * weight.nbytes for weight in old)
    assert before - resident() > 0.9 * fused  # all but the pages that their neighbours share
    assert all(map(torch.equal, old, want))  # who still reads them reads the file again
