"""Popular families as tiny random models of transformers' own classes: exact, or refused.

`python tests/eval/decoding/test_families.py` writes the table of families in docs/drafters.md.
"""

import re
from pathlib import Path

import pytest
import torch
import transformers

from eval.decoding.build import build_decoder
from eval.decoding.fused import BATCHED_ROWS, FusedDecoder
from eval.decoding.graphs import GraphedDecoder
from eval.decoding.transformers_forward import TransformersDecoder
from tests.eval.decoding.replayed import Replayed

PAGE = Path(__file__).parents[3] / "docs/drafters.md"
TABLE = re.compile(r"^\| decoder \|.*\n(?:\|.*\n)*\n(?:\|.*\n)*", re.MULTILINE)
VOCAB, CONTEXT, WINDOW = 53, 48, 8
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = {"sliding_window": WINDOW}
ALTERNATING = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"] * 2}
GPT = {"n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
MLA = {
    **MIXTURE,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
HYBRID = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
PER_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
# by transformers' class, where it is not NAMEForCausalLM and NAMEConfig with the model's and the
# configuration's as well: what its configuration has beside SHAPE
FAMILIES = {
    "Llama": {},
    "Mistral": SLIDING,
    "Ministral": {**SLIDING, "head_dim": 8},
    "Mixtral": {**SLIDING, "num_local_experts": 4},
    "Qwen2": {**SLIDING, "use_sliding_window": True, "max_window_layers": 2},
    "Qwen2Moe": {**MIXTURE, "num_experts": 4, "shared_expert_intermediate_size": 16},
    "Qwen3": {"head_dim": 8},
    "Qwen3Moe": {**MIXTURE, "num_experts": 4, "head_dim": 8},
    "Qwen3Next": HYBRID,
    "Qwen3_5 Qwen3_5TextConfig": HYBRID,
    "Qwen3_5Moe Qwen3_5MoeTextConfig": HYBRID,
    "Gemma": {"head_dim": 8},
    "Gemma2": {**SLIDING, "head_dim": 8},
    "Gemma3 Gemma3TextConfig": {**ALTERNATING, "head_dim": 8},
    "Gemma3n Gemma3nTextConfig": {
        **ALTERNATING,
        **PER_LAYER,
        "head_dim": 8,
        "num_kv_shared_layers": 1,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
        "laurel_rank": 4,
    },
    "Gemma4 Gemma4TextConfig": {
        **ALTERNATING,
        **PER_LAYER,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_kv_shared_layers": 1,
    },
    "GptOss": {**SLIDING, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Llama4 Llama4TextConfig": {
        "head_dim": 8,
        "attention_chunk_size": WINDOW,
        "num_local_experts": 4,
        "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    },
    "DeepseekV2": MLA,
    "DeepseekV3": MLA,
    "Glm4": {"head_dim": 8},
    "Glm4Moe": {**MIXTURE, "n_routed_experts": 4, "head_dim": 8},
    "Glm4MoeLite": MLA,
    "Phi": {},
    "Phi3": SLIDING,
    "Phimoe": {"num_local_experts": 4},
    "Olmo": {},
    "Olmo2": {},
    "Olmo3": SLIDING,
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Granite": {
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 1.5,
    },
    "GraniteMoe": {"num_local_experts": 4},
    "SmolLM3": {"no_rope_layer_interval": 2},
    "Cohere": {},
    "Cohere2": {**SLIDING, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "Exaone4": ALTERNATING,
    "Starcoder2": SLIDING,
    "StableLm": {},
    "GPT2 GPT2LMHeadModel": GPT,
    "GPTNeo": {
        "num_layers": 4,
        "num_heads": 4,
        "window_size": WINDOW,
        "attention_types": [[["global", "local"], 2]],
    },
    "GPTJ": {**GPT, "rotary_dim": 8},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "Falcon": {},
    "Bloom": {"n_layer": 4, "n_head": 4, "max_position_embeddings": None},
    "Mpt": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_position_embeddings": None},
    "Lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "Jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "FalconH1": {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "head_dim": 8},
    "Mamba": {},
    "DeepseekV32": MLA,
}
FUSED = "Llama,Mistral,Qwen2,Qwen3,Gemma3 Gemma3TextConfig,Phi3,Olmo2,Granite,SmolLM3".split(",")


def made(family):
    name, *others = family.split()
    classes = {"model": f"{name}ForCausalLM", "config": f"{name}Config"}
    classes |= {"config" if other.endswith("Config") else "model": other for other in others}
    shape = {key: value for key, value in (SHAPE | FAMILIES[family]).items() if value is not None}
    config = getattr(transformers, classes["config"])(**shape)
    torch.manual_seed(0)
    model = getattr(transformers, classes["model"])(config).eval()
    # norms and biases start as ones and zeros, which would hide a forgotten one
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def texts():
    return torch.randint(3, VOCAB, (2, 40), generator=torch.Generator().manual_seed(1))


def plain(model):
    """Logits [2, 40, V] of transformers' own forward, without a cache."""
    with torch.no_grad():
        return model(texts(), use_cache=False).logits.float()


def decoded(decoder):
    """The same logits in blocks, drafted tokens taken back between them, then in ragged rows."""
    rows, whole = texts(), []
    for row in (0, 1):
        cache, parts = decoder.new_cache(1, CONTEXT), []
        for at in range(0, 40, 5):
            decoder.forward(rows[1 - row, None, at : at + 3], at, cache)
            parts.append(decoder.forward(rows[row, None, at : at + 5], at, cache))
        whole.append(torch.cat(parts, 1)[0].float())
    cache = decoder.new_cache(2, CONTEXT)
    decoder.forward(rows, 0, cache)
    first = torch.tensor([35, 14])
    places = first[:, None] + torch.arange(4)
    ragged = decoder.forward(rows.gather(1, places), first, cache).float()
    return torch.stack(whole), places, ragged


def built(model):
    """The model's decoder, or what is said instead."""
    try:
        return build_decoder(model, CONTEXT), ""
    except ValueError as error:
        return None, str(error)


def described(family):
    """A family's model type, its decoder, and the note of its row in the table."""
    model = made(family)
    decoder, refusal = built(model)
    note = re.sub(
        "^.*cannot be decoded here: (.* (?=layers keep))?|(, so|; use a) .*$", "", refusal
    )
    kind = (
        "fused" if isinstance(decoder, FusedDecoder) else "Transformers" if decoder else "refused"
    )
    if decoder and "sliding_window" in FAMILIES[family]:
        note = "window"
    if decoder and "attention_chunk_size" in FAMILIES[family]:
        note = "chunk"
    if decoder and "linear_key_head_dim" in FAMILIES[family]:
        note = "linear attention"
    return model.config.model_type, kind, note


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_has_the_logits_of_transformers_or_is_refused(family):
    model = made(family)
    decoder, refusal = built(model)
    if decoder is None:
        assert re.fullmatch("A .* model cannot be decoded here: .*; use a .*", refusal)
        return
    exact = plain(model)
    for dtype in (torch.float32, torch.bfloat16):
        theirs = plain(model.to(dtype))
        decoders = [build_decoder(model, CONTEXT)]
        if isinstance(decoders[0], FusedDecoder):
            decoders.append(TransformersDecoder(model, CONTEXT))
            decoders.append(GraphedDecoder(decoders[0], Replayed()))
        for decoder in decoders:
            whole, places, ragged = decoded(decoder)
            some, rounded = (
                x.gather(1, places[..., None].expand_as(ragged)) for x in (exact, theirs)
            )
            for got, want, other in ((whole, exact, theirs), (ragged, some, rounded)):
                if dtype == torch.float32:
                    torch.testing.assert_close(got, want, atol=2e-5, rtol=1e-4)
                else:  # both are off by rounding, in another order: none twice as far as the other
                    assert (got - want).norm() < 2 * (other - want).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FUSED)
def test_a_token_of_a_fused_forward_has_the_bits_in_a_block_that_it_has_alone(family, dtype):
    if dtype == torch.float32 and not torch.backends.mkl.is_available():
        pytest.skip("fp32 sums have one order with MKL only")
    decoder, _ = built(made(family).to(dtype))
    assert isinstance(decoder, FusedDecoder)
    text, cache = texts()[:1], decoder.new_cache(1, CONTEXT)
    decoder.forward(text[:, :35], 0, cache)
    block = decoder.forward(text[:, 35:], 35, cache)
    alone = [decoder.forward(text[:, i : i + 1], i, cache) for i in range(35, 40)]
    assert torch.equal(torch.cat(alone, 1), block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_window_may_hide_whole_blocks_of_slots(dtype):
    shape = SHAPE | {"max_position_embeddings": 1400, "sliding_window": 100}
    torch.manual_seed(0)
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**shape)).eval().to(dtype)
    text = torch.randint(3, VOCAB, (1, 1300), generator=torch.Generator().manual_seed(1))
    decoder = build_decoder(model, 1400)
    assert isinstance(decoder, FusedDecoder)
    cache, many = decoder.new_cache(1, 1400), decoder.new_cache(BATCHED_ROWS, 1400)
    decoder.forward(text[:, :1290], 0, cache)
    block = decoder.forward(text[:, 1290:], 1290, cache)
    alone = [decoder.forward(text[:, i : i + 1], i, cache) for i in range(1290, 1300)]
    if dtype == torch.bfloat16:  # a window changes nothing about equal bits (cpu_bits.py)
        assert torch.equal(torch.cat(alone, 1), block)
    for row in range(BATCHED_ROWS):
        many.copy_row(row, cache, 0, 1290)
    first = torch.full((BATCHED_ROWS,), 1290)
    batch = decoder.forward(text[:, 1290:].expand(BATCHED_ROWS, -1), first, many)
    with torch.no_grad():
        want = model(text, use_cache=False).logits[:, 1290:]
    tolerance = {torch.float32: (2e-5, 1e-4), torch.bfloat16: (2e-2, 2e-2)}[dtype]
    for got in (block, batch[-1:]):
        torch.testing.assert_close(got, want, atol=tolerance[0], rtol=tolerance[1])


def test_rows_of_llama_4_share_an_attention_scale_or_are_refused():
    """Seen by rounding alone: the trial of a few tokens is below the first change of the scale."""
    shape = SHAPE | FAMILIES["Llama4 Llama4TextConfig"] | {"floor_scale": 16, "attn_scale": 1.0}
    torch.manual_seed(0)
    config = transformers.Llama4TextConfig(**shape)
    model = transformers.Llama4ForCausalLM(config).eval()
    decoder, text = build_decoder(model, CONTEXT), texts()
    cache = decoder.new_cache(2, CONTEXT)
    parts = [(text[:, :30], 0), (text[:, 30:], torch.tensor([30, 30]))]
    got = torch.cat([decoder.forward(*part, cache) for part in parts], 1)
    torch.testing.assert_close(got, plain(model), atol=2e-5, rtol=1e-4)
    decoder.forward(text[:, 5:10], torch.tensor([5, 9]), cache)
    with pytest.raises(ValueError, match="above 16 tokens"):
        decoder.forward(text[:, 5:10], torch.tensor([5, 14]), cache)


def table():
    groups = {}
    for family in FAMILIES:
        name, *rest = described(family)
        groups.setdefault(tuple(rest), []).append(f"`{name}`")
    order = sorted(groups, key=lambda group: (group[0] != "fused", group))
    taken = [group for group in order if group[0] != "refused"]
    rows = "".join(f"| {' | '.join(group)} | {', '.join(groups[group])} |\n" for group in taken)
    refused = "".join(
        f"| {', '.join(groups[group])} | {group[1]} |\n" for group in order if group not in taken
    )
    return f"""| decoder | attention besides full attention | `model_type` |
| --- | --- | --- |
{rows}
| refused | because |
| --- | --- |
{refused}"""


def test_the_table_of_families_is_up_to_date():
    assert TABLE.findall(PAGE.read_text("utf-8")) == [table()]


if __name__ == "__main__":
    PAGE.write_text(TABLE.sub(lambda _: table(), PAGE.read_text("utf-8")), "utf-8")
