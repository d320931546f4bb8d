"""A checkpoint as GGUF, read back by transformers (by llama.cpp: tests/real)."""

import json

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from align.checkpoint import Checkpoint
from align.errors import SourceError, UserError
from align.to_gguf import _GPT2, _LLAMA3, KINDS, main, write_gguf
from tests.align.conftest import STRINGS
from tests.dflash import save_published
from tests.eagle3 import PublishedEagle3

SHAPE = {
    "vocab_size": 448,  # 28 rows more than the tokenizer has tokens
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
THETA = {"rope_type": "default", "rope_theta": 50_000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "llama": lambda: LlamaConfig(**SHAPE, rope_parameters=THETA),
    "llama-tied": lambda: LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "llama-3": lambda: LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=128),
    "qwen2": lambda: Qwen2Config(**SHAPE, tie_word_embeddings=True, rope_parameters=THETA),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=128, rope_parameters=THETA),
}


@pytest.fixture
def checkpoint(tmp_path, byte_level_tokenizer):
    """Makes a random model in bf16, with norms and biases that tell: checkpoint(config, split)."""

    def make(config, split=None, normalizer=None, name="model"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.to(torch.bfloat16).save_pretrained(tmp_path / name)
        backend = Tokenizer.from_str(byte_level_tokenizer.to_str())
        if split is not None:
            backend.pre_tokenizer = split
        if normalizer is not None:
            backend.normalizer = normalizer
        words = PreTrainedTokenizerFast(
            tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|im_end|>"
        )
        words.chat_template = "{{ messages[0].content }}"
        words.save_pretrained(tmp_path / name)
        return tmp_path / name

    return make


def split_by(pattern):
    whole = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), whole])


BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def logits(spec, ids):
    with torch.inference_mode():
        return Checkpoint.open(spec).load(torch.float32)(torch.tensor([ids])).logits[0]


def fields(path):
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def kinds(path):
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_same_model(family, checkpoint, tmp_path):
    folder = checkpoint(FAMILIES[family]())
    for kind in ("f32", "bf16"):
        write_gguf(Checkpoint.open(folder), tmp_path / f"{kind}.gguf", kind)
        ids = list(range(0, 420, 7))
        # the weights are the same bits: only the order of additions could differ
        torch.testing.assert_close(
            logits(tmp_path / f"{kind}.gguf", ids), logits(folder, ids), rtol=1e-5, atol=1e-5
        )
        tied = FAMILIES[family]().tie_word_embeddings
        assert ("output.weight" in kinds(tmp_path / f"{kind}.gguf")) != tied


NOBODYS = LLAMA3 | {"original_max_position_embeddings": 1024}


def test_a_head_of_its_own_beside_a_flag_of_tied_weights(checkpoint, tmp_path):
    folder = checkpoint(FAMILIES["llama"]())
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(about | {"tie_word_embeddings": True}))
    model = Checkpoint.open(folder).load(torch.float32)
    before = model.lm_head.weight.clone()
    model.tie_weights()
    assert torch.equal(model.lm_head.weight, before)
    assert not model.config.tie_word_embeddings
    write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", "f32")
    ids = list(range(0, 420, 7))
    torch.testing.assert_close(
        logits(tmp_path / "model.gguf", ids), model(torch.tensor([ids])).logits[0]
    )


@pytest.mark.parametrize(
    ("more", "lost"),
    [
        ({"attention_bias": True}, "weights for which"),
        ({"rope_parameters": NOBODYS}, "scaled angles"),
    ],
)
def test_what_transformers_would_lose_is_refused(more, lost, checkpoint, tmp_path):
    write_gguf(
        Checkpoint.open(checkpoint(LlamaConfig(**SHAPE, **more))), tmp_path / "model.gguf", "f32"
    )
    with pytest.raises(SourceError, match=lost):
        Checkpoint.open(tmp_path / "model.gguf").load(torch.float32)


def test_a_file_tells_its_kind(checkpoint, tmp_path):
    folder = checkpoint(FAMILIES["llama"]())
    for kind in ("f32", "q4_0"):
        write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", kind)
        assert Checkpoint.open(tmp_path / "model.gguf").gguf_kind == kind.upper()
    assert Checkpoint.open(folder).gguf_kind is None


def test_the_tokenizer_is_the_same(checkpoint, tmp_path):
    folder = checkpoint(FAMILIES["llama"]())
    write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", "f16")
    mine, theirs = (
        Checkpoint.open(folder).tokenizer,
        Checkpoint.open(tmp_path / "model.gguf").tokenizer,
    )
    assert theirs(STRINGS).input_ids == mine(STRINGS).input_ids
    assert theirs.eos_token_id == mine.eos_token_id == 0
    assert theirs.chat_template == mine.chat_template


def test_chat_templates_by_name_are_written_by_name(checkpoint, tmp_path):
    """llama-server takes `tool_use` for requests with tools."""
    folder = checkpoint(FAMILIES["llama"]())
    words = Checkpoint.open(folder).tokenizer
    words.chat_template = {"tool_use": "{{ tools }}", "other": "x"}
    (folder / "chat_template.jinja").unlink()
    words.save_pretrained(folder)
    write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", "f16")
    told, start = fields(tmp_path / "model.gguf"), "tokenizer.chat_template"
    assert start not in told
    assert (told[f"{start}.tool_use"], told[f"{start}.other"]) == ("{{ tools }}", "x")


def test_what_llama_cpp_is_told(checkpoint, tmp_path):
    write_gguf(Checkpoint.open(checkpoint(FAMILIES["mistral"]())), tmp_path / "model.gguf", "f16")
    told = fields(tmp_path / "model.gguf")
    assert told["general.architecture"] == "llama"
    assert told["llama.context_length"] == 128, "beyond its window it is another model"
    assert told["llama.attention.head_count_kv"] == 2
    assert told["llama.rope.dimension_count"] == told["llama.attention.key_length"] == 16
    assert told["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    tokens, types = told["tokenizer.ggml.tokens"], told["tokenizer.ggml.token_type"]
    assert (tokens[0], types[0]) == ("<|im_end|>", gguf.TokenType.CONTROL)
    assert (tokens[447], types[447]) == ("[PAD447]", gguf.TokenType.UNUSED)
    assert types[419] == gguf.TokenType.NORMAL
    assert told["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("framed", [False, True])
def test_a_bos_and_an_eos_are_added_only_where_the_tokenizer_adds_them(
    checkpoint, tmp_path, framed
):
    folder = checkpoint(FAMILIES["llama"]())
    words = Checkpoint.open(folder).tokenizer
    words.bos_token = "!"
    if framed:
        words.backend_tokenizer.post_processor = processors.TemplateProcessing(
            "! $A <|im_end|>",
            special_tokens=[(t, words.convert_tokens_to_ids(t)) for t in ("!", "<|im_end|>")],
        )
    words.save_pretrained(folder)
    write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", "f16")
    told = fields(tmp_path / "model.gguf")
    assert told["tokenizer.ggml.bos_token_id"] == words.bos_token_id
    assert told["tokenizer.ggml.add_bos_token"] is framed
    assert told["tokenizer.ggml.add_eos_token"] is framed


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind, checkpoint, tmp_path):
    folder = checkpoint(FAMILIES["llama"]())
    write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", kind)
    made = kinds(tmp_path / "model.gguf")
    bits = int(kind[1]) if kind[0] == "q" else None
    assert made["blk.1.ffn_down.weight"] == kind.upper()
    assert made["output.weight"] == made["token_embd.weight"] == ("Q8_0" if bits else kind.upper())
    assert made["blk.0.attn_norm.weight"] == "F32"
    mine, theirs = (
        Checkpoint.open(spec).load(torch.float32).model.layers[1].mlp.down_proj.weight.detach()
        for spec in (folder, tmp_path / "model.gguf")
    )
    # the step is the largest of 32 weights, two sigma, over 2^(bits-1); its error a third of it
    error = float((mine - theirs).norm() / mine.norm())
    assert error < {None: 2**-9, 8: 0.01, 5: 0.05, 4: 0.1}[bits]
    assert error > {None: -1, 8: 0.002, 5: 0.02, 4: 0.04}[bits], "so few bits cannot be that good"


def test_rows_of_no_whole_block_are_f16(checkpoint, tmp_path):
    folder = checkpoint(LlamaConfig(**(SHAPE | {"hidden_size": 48})))
    write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", "q8_0")
    made = kinds(tmp_path / "model.gguf")
    assert made["token_embd.weight"] == made["blk.0.attn_q.weight"] == "F16"
    assert made["blk.0.ffn_down.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("split", "name"),
    [
        (BYTE_LEVEL, "gpt-2"),
        (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), BYTE_LEVEL]), "smollm"),
        (split_by(_LLAMA3.replace("{1,3}", "")), "qwen2"),
        (split_by(_GPT2), "gpt-2"),
    ],
    ids=["gpt-2", "smollm", "qwen2", "spelled out"],
)
def test_the_pre_tokenizer_is_named(split, name, checkpoint, tmp_path):
    write_gguf(
        Checkpoint.open(checkpoint(FAMILIES["llama"](), split)), tmp_path / "model.gguf", "f16"
    )
    assert fields(tmp_path / "model.gguf")["tokenizer.ggml.pre"] == name


def test_a_llama_3_takes_whole_pieces(checkpoint, tmp_path):
    folder = checkpoint(FAMILIES["llama"](), split_by(_LLAMA3))
    with pytest.raises(SourceError, match="llama-bpe"):  # it would merge where llama.cpp does not
        write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", "f16")
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["ignore_merges"] = True
    (folder / "tokenizer.json").write_text(json.dumps(words))
    write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", "f16")
    assert fields(tmp_path / "model.gguf")["tokenizer.ggml.pre"] == "llama-bpe"


@pytest.mark.parametrize(
    ("split", "normalizer"),
    [
        (split_by(r"\w+"), None),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None),
        (None, normalizers.Lowercase()),
    ],
    ids=["another expression", "a space put first", "lower case"],
)
def test_a_tokenizer_that_llama_cpp_does_not_know(split, normalizer, checkpoint, tmp_path):
    folder = checkpoint(FAMILIES["llama"](), split, normalizer)
    with pytest.raises(SourceError, match="smollm"):
        write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", "f16")
    assert not list(tmp_path.glob("*.gguf*"))


def test_a_tokenizer_without_merges_is_refused(checkpoint, tmp_path):
    folder = checkpoint(FAMILIES["llama"]())
    words = json.loads((folder / "tokenizer.json").read_text())
    words["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(SourceError, match="merges"):
        write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", "f16")
    assert not list(tmp_path.glob("*.gguf*"))


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ({"num_hidden_layers": 3}, "layers.2"),
        ({"vocab_size": 500}, "fetch or copy"),
        ({"model_type": "gpt_neox"}, "gpt_neox"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}}, "'linear'"),
    ],
)
def test_what_cannot_be_written(change, value, checkpoint, tmp_path):
    folder = checkpoint(FAMILIES["llama"]())
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.gguf").write_text("what stood there")
    with pytest.raises(SourceError, match=value):
        write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", "f16")
    assert (tmp_path / "model.gguf").read_text() == "what stood there"


@pytest.fixture
def dflash(checkpoint, tmp_path):
    """A published DFlash draft, and the GGUF file of its target."""
    config = FAMILIES["llama"]()
    write_gguf(Checkpoint.open(checkpoint(config)), tmp_path / "target.gguf", "f16")
    shape = SHAPE | {"head_dim": 16}
    return save_published(tmp_path / "draft", shape, [0]), tmp_path / "target.gguf"


def test_a_dflash_draft_has_its_targets_tokenizer(dflash, tmp_path):
    draft, target = dflash
    assert write_gguf(Checkpoint.open(draft), tmp_path / "draft.gguf", "f32", target) == "dflash"
    written, of_target = fields(tmp_path / "draft.gguf"), fields(target)
    assert written["general.architecture"] == "dflash"
    # the first layer's output is the input of the layer of number 1
    assert (written["dflash.block_size"], written["dflash.target_layers"]) == (4, [1])
    assert (written["dflash.embedding_length"], written["dflash.attention.key_length"]) == (64, 16)
    assert written["tokenizer.ggml.mask_token_id"] == SHAPE["vocab_size"] - 1
    words = {name for name in of_target if name.startswith("tokenizer.")}
    assert "tokenizer.ggml.merges" in words
    assert all(written[name] == of_target[name] for name in words)
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "draft.gguf").tensors}
    own = load_file(draft / "model.safetensors")
    names = {
        "fc": "fc",
        "enc.output_norm": "hidden_norm",
        "output_norm": "norm",
        "blk.1.attn_norm": "layers.1.input_layernorm",
        "blk.1.attn_q": "layers.1.self_attn.q_proj",
        "blk.1.attn_k_norm": "layers.1.self_attn.k_norm",
        "blk.1.attn_output": "layers.1.self_attn.o_proj",
        "blk.0.ffn_norm": "layers.0.post_attention_layernorm",
        "blk.0.ffn_down": "layers.0.mlp.down_proj",
    }
    for name, theirs in names.items():
        written = torch.from_numpy(tensors[f"{name}.weight"].copy())
        assert torch.equal(written, own[f"{theirs}.weight"].float())
    assert len(tensors) == len(own)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention", "sliding_attention"]}, "has sliding_attention,"),
        ({"is_causal": True}, "has causal,"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "has linear,"),
        (
            {"dflash_config": {"target_layer_ids": [0], "mask_token_id": 9, "causal": True}},
            "has causal,",
        ),
        ({"dflash_config": {"target_layer_ids": [1], "mask_token_id": 9}}, "up to layer 2"),
        ({"dflash_config": {"mask_token_id": 0}, "num_target_layers": None}, "no target_layer_ids"),
        ({"dflash_config": {"target_layer_ids": [0]}}, "no mask_token_id"),
        ({"hidden_size": 96}, "states of 96 numbers"),
        ({"vocab_size": 512}, "drafts 512 tokens"),
        ({"dflash_config": {"target_layer_ids": [0], "mask_token_id": 448}}, "has mask token 448"),
    ],
)
def test_a_dflash_draft_that_cannot_be_written(dflash, tmp_path, changes, message):
    draft, target = dflash
    about = json.loads((draft / "config.json").read_text()) | changes
    (draft / "config.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=message):
        write_gguf(Checkpoint.open(draft), tmp_path / "draft.gguf", "f16", target)


def test_a_dflash_draft_with_a_trimmed_head_or_without_its_target(dflash, tmp_path, capsys):
    draft, target = dflash
    assert main([str(draft), str(tmp_path / "d.gguf"), "--target", str(target)]) == 0
    assert main([str(draft), str(tmp_path / "d.gguf")]) == 2
    assert "--target" in capsys.readouterr().err
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.ones(9, 64)}, draft / "model.safetensors")
    with pytest.raises(UserError, match=r"has lm_head\.weight,"):
        write_gguf(Checkpoint.open(draft), tmp_path / "draft.gguf", "f16", target)
    other = save_published(tmp_path / "other", SHAPE | {"head_dim": 16}, [0], torch.arange(9))
    with pytest.raises(UserError, match=r"has d2t, lm_head\.weight, t2d,"):
        write_gguf(Checkpoint.open(other), tmp_path / "draft.gguf", "f16", target)


@pytest.fixture
def eagle3(checkpoint, tmp_path):
    """Writes a published EAGLE-3 draft, and the GGUF file of its target: eagle3(layout)."""
    config = FAMILIES["llama"]()
    config.num_hidden_layers = 8
    write_gguf(Checkpoint.open(checkpoint(config)), tmp_path / "target.gguf", "f16")

    def make(layout, head=9, read=(2, 4, 5), **shape):
        sizes = SHAPE | {"head_dim": 16, "num_hidden_layers": 1} | shape
        draft = PublishedEagle3(layout, sizes, read, torch.arange(head) * (448 // head))
        return draft.save(tmp_path / layout), tmp_path / "target.gguf"

    return make


@pytest.mark.parametrize(
    ("layout", "before_residual"),
    [("speculators", True), ("EAGLE", False), ("EAGLE, by its authors", False)],
)
def test_an_eagle_3_draft_with_a_trimmed_head(layout, before_residual, eagle3, tmp_path):
    draft, target = eagle3(layout)
    assert write_gguf(Checkpoint.open(draft), tmp_path / "draft.gguf", "f32", target) == "eagle3"
    written, of_target = fields(tmp_path / "draft.gguf"), fields(target)
    assert written["eagle3.target_layers"] == [2, 4, 5]
    assert written["eagle3.target_hidden_size"] == written["eagle3.embedding_length"] == 64
    assert (written["eagle3.block_count"], written["eagle3.vocab_size"]) == (1, 448)
    assert written["eagle3.norm_before_residual"] == before_residual
    assert written["eagle3.norm_before_fc"] is False
    assert written["eagle3.rope.freq_base"] == 5000
    words = {name for name in of_target if name.startswith("tokenizer.")}
    assert all(written[name] == of_target[name] for name in words)
    parts = gguf.GGUFReader(tmp_path / "draft.gguf").tensors
    tensors = {part.name: torch.from_numpy(part.data.copy()) for part in parts}
    assert torch.equal(tensors.pop("d2t"), torch.arange(9) * 49), "target ids, not differences"
    own = load_file(draft / "model.safetensors")
    first = "layers.0" if layout == "speculators" else "midlayer"
    names = {
        "fc": "fc",
        "output": "lm_head",
        "output_norm": "norm",
        "blk.0.attn_norm": f"{first}.input_layernorm",
        "blk.0.attn_norm_2": f"{first}.hidden_norm",
        "blk.0.attn_v": f"{first}.self_attn.v_proj",
        "blk.0.attn_output": f"{first}.self_attn.o_proj",
        "blk.0.ffn_norm": f"{first}.post_attention_layernorm",
        **{f"blk.0.ffn_{part}": f"{first}.mlp.{part}_proj" for part in ("gate", "up", "down")},
    }
    for name, theirs in names.items():
        assert torch.equal(tensors.pop(f"{name}.weight"), own[f"{theirs}.weight"])
    # rows i and i + 8 of a head of 16 are turned together, and are neighbours in llama.cpp
    order = torch.stack([torch.arange(8), torch.arange(8) + 8], 1).flatten()
    for kind, heads in (("q", 4), ("k", 2)):
        rows = own[f"{first}.self_attn.{kind}_proj.weight"].view(heads, 16, 128)[:, order]
        assert torch.equal(tensors.pop(f"blk.0.attn_{kind}.weight"), rows.flatten(0, 1))
    assert not tensors


def test_a_whole_head_and_an_embedding_of_its_own(eagle3, tmp_path):
    draft, target = eagle3("speculators", head=448)
    tensors = load_file(draft / "model.safetensors")
    save_file(tensors | {"embed_tokens.weight": torch.ones(448, 64)}, draft / "model.safetensors")
    about = json.loads((draft / "config.json").read_text())
    del about["norm_before_residual"]
    (draft / "config.json").write_text(json.dumps(about))
    write_gguf(Checkpoint.open(draft), tmp_path / "draft.gguf", "q8_0", target)
    assert fields(tmp_path / "draft.gguf")["eagle3.norm_before_residual"], "speculators' default"
    made = kinds(tmp_path / "draft.gguf")
    assert "d2t" not in made
    assert made["token_embd.weight"] == made["output.weight"] == made["fc.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("layout", "changes", "message"),
    [
        ("speculators, by default since 2026", {}, "norm_output, sliding_attention"),
        ("speculators, Qwen3 layers", {}, r"fc_norm\.0\.weight, .*layers\.1.*q_norm"),
        ("EAGLE 3.1", {}, r"fc_norm\.0\.weight"),
        ("speculators", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "has linear,"),
        ("speculators", {"read": (3,)}, "1 hidden states"),
        ("speculators", {"read": (2, 4, 8)}, "up to layer 8"),
        ("speculators", {"vocab_size": 512}, "drafts 512 tokens"),
    ],
)
def test_an_eagle_3_draft_that_cannot_be_written(layout, changes, message, eagle3, tmp_path):
    draft, target = eagle3(layout, **changes)
    with pytest.raises(UserError, match=message):
        write_gguf(Checkpoint.open(draft), tmp_path / "draft.gguf", "f16", target)


def test_targets_whose_states_llama_cpp_does_not_keep(checkpoint, eagle3, dflash, tmp_path):
    write_gguf(Checkpoint.open(checkpoint(FAMILIES["qwen2"]())), tmp_path / "qwen2.gguf", "f16")
    for draft in (eagle3("speculators")[0], dflash[0]):
        with pytest.raises(UserError, match="qwen2"):
            write_gguf(
                Checkpoint.open(draft), tmp_path / "draft.gguf", "f16", tmp_path / "qwen2.gguf"
            )


def test_the_command(checkpoint, tmp_path, capsys):
    folder = checkpoint(FAMILIES["qwen3"]())
    assert main([str(folder), str(tmp_path / "model.gguf"), "--kind", "q4_0"]) == 0
    assert "q4_0" in capsys.readouterr().out
    assert main([str(tmp_path / "nowhere"), str(tmp_path / "model.gguf")]) == 2
    assert str(tmp_path / "nowhere") in capsys.readouterr().err
