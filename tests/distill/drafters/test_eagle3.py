"""EAGLE-3 as it is trained: what it reads, its steps, its export."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING

from align.checkpoint import Checkpoint
from align.files import read_json
from distill.drafters import eagle3
from distill.drafters.attention import sees
from distill.drafters.initialisation import divide_states
from distill.drafters.kind import Origin
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
from eval.decoding.drafters.drafter import Text
from eval.decoding.drafters.eagle3 import FORMAT, layer_config
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from tests.distill.drafters.batches import batch_of, planned
from tests.distill.drafters.conftest import SIZE, VOCAB
from tests.eagle3 import LAYOUTS

LAYERS, NAMED = (1, 2), "eagle_aux_hidden_state_layer_ids"
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58, 9, 7, 9, 32, 3, 8, 46, 26, 43]


def states_read(model):
    """read(positions): the number of the newest state that the loss at these positions reads."""
    give_loss_forward(model, eagle3.KIND, forward_kl)
    states = torch.randn(11, len(LAYERS), SIZE)
    other = torch.randn(5, len(LAYERS), SIZE)

    def newest(positions):
        texts = [[7, 9, 3, 3, 8, 1], torch.randint(VOCAB, (positions[-1] + 2,)).tolist()]
        read = [other, states[: positions[-1] + 1]]
        batch = batch_of(texts, (5, positions[0] + 1), read)
        rows = len(model.lm_head.weight)
        batch = batch._replace(
            states=batch.states.requires_grad_(),
            positions=batch.positions[1:],  # the other text has no loss
            top_ids=torch.randint(rows, (len(positions), 3)),
            top_logprobs=batch.top_logprobs[1:],
        )
        loss = model(**planned(batch, eagle3.KIND, model)._asdict()).loss
        (gradient,) = torch.autograd.grad(loss, batch.states)
        used = gradient[0].abs().sum((1, 2)) > 0
        assert not used[batch.texts[0] != 1].any()  # neither the other text nor padding
        return max(batch.position_ids[0, used].tolist())

    return newest


def check_what_is_known(model):
    """The first step at token t reads the states up to t - 1, the later ones fewer."""
    newest = states_read(model)
    # of a draft that begins at 5 or 7 nobody reads what the target makes of that token itself
    assert newest([5]) == 4
    assert newest([7]) == 6
    # the token after the next is a later one of a draft, and its step reads no newer state
    assert newest([5, 6]) == 5


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_reads_what_is_known_when_a_token_is_drafted(warm_start, layout):
    check_what_is_known(warm_start(layout)[2].model)


def attention_sees_the_next_state(monkeypatch):
    def further(queries, keys, *rest):
        return sees(queries._replace(positions=queries.positions + 1), keys, *rest)

    monkeypatch.setattr("distill.drafters.attention.sees", further)


def attention_sees_other_texts(monkeypatch):
    def all_texts(queries, keys, *rest):
        none = torch.zeros_like
        queries = queries._replace(texts=none(queries.texts))
        return sees(queries, keys._replace(texts=none(keys.texts)), *rest)

    right = eagle3.Attention
    monkeypatch.setattr("distill.drafters.attention.sees", all_texts)
    monkeypatch.setattr(eagle3, "Attention", lambda *marks: right(*marks, by_text=False))


def states_of_the_token_itself(monkeypatch):
    right = eagle3.unrolled
    monkeypatch.setattr(
        eagle3,
        "unrolled",
        lambda model, batch, steps: right(
            model, batch._replace(states=batch.states.roll(-1, 1)), steps
        ),
    )


MUTANTS = [attention_sees_the_next_state, attention_sees_other_texts, states_of_the_token_itself]


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("layout", ["EAGLE", "speculators, Qwen3 layers"])
def test_a_state_that_nobody_knows_is_caught(warm_start, monkeypatch, layout, mutant):
    model = warm_start(layout)[2].model
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_what_is_known(model)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_trains_and_drafts_what_the_published_draft_computes(target, warm_start, states, layout):
    """Its own code computes each token anew, from the text and the target's states."""
    published, folder, draft = warm_start(layout)
    model = draft.model
    if not hasattr(published, "input_norm") and not hasattr(published, "fc_norm"):
        divide_states(model, torch.tensor([0.5, 3.0]))
    embedding, gamma, seen = target.decoder.embedding, 3, set()
    drafter = load_drafter(str(folder), target)
    for end in range(4, len(TEXT)):
        known = states(TEXT[: end - 1], LAYERS)
        read = torch.stack([known[k] for k in LAYERS], 2)
        right, logits = published.draft(TEXT[:end], read[0], embedding, gamma)
        so_far = Text(TEXT[:end], 64, Sampling(), torch.Generator(), known, 3)
        assert drafter.start(so_far).propose(gamma).tokens.tolist() == right
        batch = batch_of([[*TEXT[:end], *right]], [end], [read[0]])
        with torch.no_grad():
            steps = eagle3.unrolled(model, planned(batch, eagle3.KIND, model), gamma)
            trained = [model.lm_head(y[0, 0]) for y in steps]
        torch.testing.assert_close(torch.stack(trained), logits, atol=1e-4, rtol=1e-4)
        seen.update(right)
    assert len(seen) > 3


VLLM = (  # reads them without a default
    *("hidden_size", "hidden_act", "intermediate_size", "num_attention_heads", "rope_parameters"),
    *("num_key_value_heads", "num_hidden_layers", "rms_norm_eps", "max_position_embeddings"),
    *("vocab_size",),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_published_draft_is_written_as_it_was_read(target, warm_start, tmp_path, layout):
    target.model.save_pretrained(tmp_path / "target")
    published, folder, draft = warm_start(layout, torch.bfloat16)
    if not hasattr(published, "input_norm") and not hasattr(published, "fc_norm"):
        divide_states(draft.model, torch.tensor([0.7, 3.0]))
    embedding = target.decoder.embedding.bfloat16()
    for again in ("once", "twice"):
        written = tmp_path / again
        written.mkdir()
        eagle3.KIND.save(written, draft, embedding, Checkpoint.open(tmp_path / "target"))
        draft = eagle3.KIND.load(written, embedding, None)
    was, now = (load_file(place / "model.safetensors") for place in (folder, written))
    assert now.keys() == was.keys()
    assert [name for name in was if not torch.equal(now[name], was[name])] == []
    was, now = (read_json(place / "config.json") for place in (folder, written))
    if "speculators_config" in was:
        was["speculators_config"]["verifier"]["name_or_path"] = str(tmp_path / "target")
        shape, layers = was.pop("transformer_layer_config"), now.pop("transformer_layer_config")
        assert {key: layers[key] for key in shape} == shape
        completed = CONFIG_MAPPING[shape["model_type"]](**shape)
        assert {key: layers[key] for key in VLLM} == {key: getattr(completed, key) for key in VLLM}
    if NAMED in was.get("eagle_config", {}):  # vLLM's second runner looks in one place
        was[NAMED] = was["eagle_config"][NAMED]
    assert now == was


def test_what_a_config_leaves_out_is_read_as_in_vllm():
    about = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "qwen3"}
    about |= {"hidden_size": 1024, "num_attention_heads": 32, "num_hidden_layers": 1}
    config, completed = layer_config(about), CONFIG_MAPPING["qwen3"](**about)
    for key in ("head_dim", "num_key_value_heads", "intermediate_size", "vocab_size"):
        assert getattr(config, key) == getattr(completed, key)
    assert FORMAT.head_size(about) == completed.vocab_size
    own = {"eagle_config": {eagle3.LAYERS: [3]}}
    assert eagle3.KIND.target_layers({}, own) == (3,)
    assert eagle3.KIND.target_layers({}, own | {eagle3.LAYERS: [1, 2]}) == (1, 2)


def test_the_number_of_steps_is_kept(target, tmp_path):
    target.model.save_pretrained(tmp_path)
    made = eagle3.KIND.initialise(Origin(target, None, [], 1, 3, LAYERS, ttt_steps=2))
    eagle3.KIND.save(tmp_path, made, target.decoder.embedding, Checkpoint.open(tmp_path))
    for model in (made.model, eagle3.KIND.load(tmp_path, target.decoder.embedding, None).model):
        batch = batch_of([[1] * 10], [5], [torch.randn(9, len(LAYERS), SIZE)])
        found = eagle3.KIND.head_input(model, planned(batch, eagle3.KIND, model))
        assert found.learned.tolist() == [*range(5), *range(1, 5)]
        assert found.weight.tolist() == pytest.approx([2 / 3] * 5 + [1 / 3] * 4)


def test_the_export_has_the_names_that_engines_load(finished):
    recipe = finished("eagle3")
    config = read_json(recipe.folder / "draft" / "config.json")
    tensors = load_file(recipe.folder / "draft" / "model.safetensors")
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1]
    assert config["draft_vocab_size"] == len(tensors["d2t"]) == 270
    layer, verifier = config["transformer_layer_config"], config["speculators_config"]["verifier"]
    assert (layer["model_type"], layer["architectures"]) == ("llama", ["LlamaForCausalLM"])
    assert layer.keys() >= {*VLLM}
    assert verifier["architectures"] == ["LlamaForCausalLM"]  # the target's
    assert tensors["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * layer["hidden_size"]
    assert {"fc.weight", "norm.weight", "lm_head.weight", "t2d"} <= tensors.keys()
    assert {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"} <= tensors.keys()
    assert not any("embed" in name for name in tensors)
    assert int(tensors["t2d"].sum()) == 270
    ids = tensors["d2t"] + torch.arange(270)
    assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])


def test_a_draft_that_reads_layers_the_target_lacks_is_refused(finished, copied):
    recipe = finished("eagle3")
    draft = copied(recipe.folder / "draft", {"layers": [9]}, "compact.json")
    target = load_target(Checkpoint.open(recipe.target), torch.float32, "cpu", 64)
    with pytest.raises(ValueError, match=r"layers \[9\], but this target has 2"):
        load_drafter(str(draft), target)


def test_activations_computed_twice_are_not_kept(warm_start, kept_bytes):
    model = warm_start(next(iter(LAYOUTS)))[2].model.train()
    texts = [torch.randint(VOCAB, (12,)).tolist() for _ in range(2)]
    states = [torch.randn(11, len(LAYERS), SIZE) for _ in texts]
    batch = planned(batch_of(texts, (2, 2), states), eagle3.KIND, model)

    def read():
        return torch.stack([*eagle3.unrolled(model, batch, 3)])

    once = kept_bytes(model, read)
    model.gradient_checkpointing_enable()
    twice = kept_bytes(model, read)
    assert twice[0] < 0.9 * once[0]
    torch.testing.assert_close(twice[1], once[1])
