"""A draft padded or cut to its target's rows: sizes, what stays, what is never drafted."""

import copy
from types import SimpleNamespace

import pytest
import torch

from align.transplant import resized

COUNT = 300  # tokens of the tokenizer
IDS = torch.randint(0, COUNT, (8, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def vocabulary():
    return SimpleNamespace(spec="D", count=COUNT, encode=lambda text: [*text])


@pytest.fixture
def sibling(tiny_llama):
    """sibling(rows, tied): sure of itself; where its head is its own, most logits are below 0."""

    def make(rows, tied=False):
        model = tiny_llama(3, spread=4, vocab_size=rows, tie_word_embeddings=tied)
        with torch.no_grad():
            if not tied:
                model.model.embed_tokens.weight[:, 0] = 0.5
                model.lm_head.weight[:, 0] -= 0.5
            model.lm_head.weight.mul_(16)
        return model

    return make


@torch.no_grad()
def logits(model):
    return model(IDS).logits.double()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("rows", "wanted"), [(320, 384), (384, 320), (320, 320)])
def test_all_sizes_are_the_targets_and_nothing_else_changes(
    sibling, vocabulary, tmp_path, rows, wanted, tied
):
    model = sibling(rows, tied)
    before = copy.deepcopy(model.state_dict()), model.config.to_dict()
    moved = resized(model, vocabulary, wanted)
    assert before[1] == model.config.to_dict()
    assert all(tensor.equal(before[0][name]) for name, tensor in model.state_dict().items())
    moved.save_pretrained(tmp_path)
    for model_again in (moved, type(moved).from_pretrained(tmp_path)):
        embedding, head = model_again.get_input_embeddings(), model_again.get_output_embeddings()
        assert len(embedding.weight) == len(head.weight) == embedding.num_embeddings == wanted
        assert head.out_features == model_again.config.vocab_size == wanted
        assert (head.weight is embedding.weight) == tied
        kept = min(rows, wanted)
        torch.testing.assert_close(logits(model_again)[..., :kept], logits(model)[..., :kept])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_a_padded_row_is_never_drafted(sibling, vocabulary, tied, temperature):
    model = sibling(320, tied)
    q = (logits(resized(model, vocabulary, 384)) / temperature).softmax(-1)
    assert float(q[..., 320:].sum(-1).max()) < 1e-4
    if not tied:  # a row of zeros would be
        plain = torch.cat([logits(model), torch.zeros(*IDS.shape, 64)], -1) / temperature
        assert float(plain.softmax(-1)[..., 320:].sum(-1).max()) > 0.5


@pytest.mark.parametrize("training", [0.0, 0.5])
def test_a_padded_row_stays_under_the_average_wherever_the_states_move(
    sibling, vocabulary, training
):
    moved = resized(sibling(320), vocabulary, 384)
    with torch.no_grad():
        for parameter in moved.model.layers.parameters():
            parameter.add_(training * torch.randn_like(parameter))
    scores = logits(moved)
    assert bool((scores[..., 320:].amax(-1) < scores[..., :320].amax(-1)).all())
    for temperature in (0.5, 1.0, 2.0):
        q = (scores / temperature).softmax(-1)
        assert bool((q[..., 320:].mean(-1) <= q[..., :320].mean(-1)).all())


def test_with_a_bias_a_padded_row_has_none_of_q(sibling, vocabulary):
    model = sibling(320)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(320))
    q = logits(resized(model, vocabulary, 384)).softmax(-1)
    assert float(q[..., 320:].sum()) == 0


@pytest.mark.parametrize(("rows", "kept"), [(384, True), (320, True), (310, False)])
def test_a_mask_whose_row_is_cut_is_no_mask_any_more(sibling, vocabulary, rows, kept):
    model = sibling(320)
    model.config.pard_token = 315
    assert hasattr(resized(model, vocabulary, rows).config, "pard_token") == kept
    assert model.config.pard_token == 315
