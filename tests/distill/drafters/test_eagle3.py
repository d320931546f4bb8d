"""EAGLE-3 as it is trained: what it reads, its steps, its export."""

import copy

import pytest
import torch
from safetensors.torch import load_file

from align.sources import read_json
from distill.drafters import eagle3
from distill.drafters.initialisation import divide_states
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
from eval.decoding.drafters.drafter import Text
from eval.decoding.drafters.eagle3 import FORMAT
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from tests.distill.drafters.conftest import SIZE, VOCAB

LAYERS = (1, 2)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 58, 9, 7, 9, 32, 3, 8, 46, 26, 43]


def test_training_reads_what_is_known_when_a_token_is_drafted(random_draft):
    """The first step at token t reads the states up to t - 1, the later ones fewer."""
    model = random_draft("eagle3", layers=LAYERS)
    give_loss_forward(model, eagle3.KIND, forward_kl)
    states = torch.randn(1, 12, len(LAYERS), SIZE, requires_grad=True)

    def loss(positions):
        torch.manual_seed(3)
        count = len(positions)
        return model(
            input_ids=torch.randint(VOCAB, (1, 12)),
            positions=torch.tensor(positions),
            top_ids=torch.randint(VOCAB, (count, 3)),
            top_logprobs=torch.full((count, 3), -1.5),
            states=states,
        ).loss

    def read(positions):
        (gradient,) = torch.autograd.grad(loss(positions), states)
        return [at for at in range(12) if gradient[0, at].abs().sum() > 0]

    # of a draft that begins at 5 or 7 nobody reads what the target makes of that token itself
    assert read([5])[-1] == 4
    assert read([7])[-1] == 6
    # the token after the next is a later one of a draft, and its step reads no newer state
    assert read([5, 6])[-1] == 5


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_steps_of_a_draft_are_those_of_its_session(
    target, random_draft, states, norm_before_residual
):
    """What training makes of the later steps is what decoding does with them."""
    ids = torch.arange(0, VOCAB, 2)
    model = random_draft("eagle3", ids, LAYERS)
    divide_states(model, torch.tensor([0.5, 3.0]))
    model.config.norm_before_residual = norm_before_residual
    given = copy.deepcopy(model)
    divide_states(given, 1 / given.sizes)
    draft, gamma, seen = FORMAT.drafter(given, ids, target), 3, set()
    for end in range(4, len(TEXT)):
        known = states(TEXT[: end - 1], LAYERS)
        so_far = Text(TEXT[:end], 64, Sampling(), torch.Generator(), known, 3)
        got = draft.start(so_far).propose(gamma).tokens.tolist()
        read = torch.stack([known[k] for k in LAYERS], 2)
        read = torch.nn.functional.pad(read, (0, 0, 0, 0, 0, gamma))
        with torch.no_grad():
            whole = torch.tensor([[*TEXT[:end], *got[:-1]]])
            steps = eagle3.unrolled(model, whole, read, gamma)
            rows = [model.lm_head(y[0, end - 1 + g]).argmax() for g, y in enumerate(steps)]
        assert got == ids[torch.stack(rows)].tolist()
        seen.update(got)
    assert len(seen) > 3


def test_the_export_has_the_names_that_engines_load(finished):
    recipe = finished("eagle3")
    config = read_json(recipe.folder / "draft" / "config.json")
    tensors = load_file(recipe.folder / "draft" / "model.safetensors")
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1]
    assert config["draft_vocab_size"] == len(tensors["d2t"]) == 270
    layer, verifier = config["transformer_layer_config"], config["speculators_config"]["verifier"]
    assert (layer["model_type"], layer["architectures"]) == ("llama", ["LlamaForCausalLM"])
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
    target = load_target(recipe.target, torch.float32, "cpu", 64)
    with pytest.raises(ValueError, match=r"layers \[9\], but this target has 2"):
        load_drafter(str(draft), target)
