"""DFlash in training: a block is the one that is drafted, and it sees no more than that."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from align.checkpoint import Checkpoint
from align.files import read_json
from distill.drafters.dflash import ANCHORS, KIND, read_blocks
from distill.drafters.kind import Draft, Origin
from eval.decoding.build import build_decoder
from eval.decoding.drafters.dflash import FORMAT, Mixture, load_dflash
from eval.decoding.drafters.drafter import Text
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.engines.start_vllm import has_several_k_norms
from tests.dflash import by_definition
from tests.distill.drafters.batches import batch_of, planned

VOCAB, MASK, MOST, LAYERS = 61, 60, 4, (1, 2)
# prompt lengths, and texts of which the first is padded
PROMPTS, TEXTS = (3, 5), ([3, 14, 15, 9, 2, 7, 30, 31], [8, 50, 44, 12, 12, 1, 2, 4, 6, 13, 22])


@pytest.fixture(scope="module")
def target(tiny_llama):
    model = tiny_llama(3, spread=5, num_hidden_layers=3, num_key_value_heads=2)
    return Target(Checkpoint("tiny", Path()), model, build_decoder(model, 90), frozenset())


@pytest.fixture(scope="module", params=["both ways", "causal in a window", "DFlash2"])
def draft(target, request):
    made = KIND.initialise(Origin(target, None, [], 2, MOST, LAYERS, MASK)).model
    if request.param == "DFlash2":
        for layer in made.model.layers:
            layer.attention_conv, layer.mlp_conv = Mixture(32, 2, 8), Mixture(32, 3, 16)
            for part in (layer.attention_conv, layer.mlp_conv):
                nn.init.normal_(part.base_kernel, std=0.1)
    if request.param == "causal in a window":
        first = made.model.layers[0].self_attn
        first.is_causal, first.sliding_window = True, MOST + 1
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 2)
            elif not name.endswith(("embed_tokens.weight", "lm_head.weight")):
                weight.mul_(8)
    return made


def states_of(target, ids):
    states = dict.fromkeys(LAYERS)
    cache = target.decoder.new_cache(1, len(ids))
    target.decoder.forward(torch.tensor([ids]), 0, cache, states=states)
    return states


@pytest.fixture(scope="module", params=[True, False], ids=["packed", "a row each"])
def batch(target, draft, request):
    read = [states_of(target, text[:-1]) for text in TEXTS]
    states = [torch.stack([each[k][0] for k in LAYERS], 1) for each in read]
    unplanned = batch_of(TEXTS, PROMPTS, states, [4, 5], request.param)
    return planned(unplanned, KIND, draft, training=False)


def place_of(batch, number):
    """The row of the batch, the text and the place in the text of a response position."""
    at = int(batch.positions[number])
    text = int(batch.texts.flatten()[at])
    return at // batch.input_ids.shape[1], text, int(batch.numbers[number])


def test_a_block_is_the_one_that_is_drafted_from_the_cache(target, draft, batch):
    with torch.no_grad():
        logits = draft.lm_head(read_blocks(draft, batch))
    drafter = FORMAT.drafter(draft, None, target)
    lengths = set()
    for number in range(len(batch.positions)):
        row, text_number, position = place_of(batch, number)
        block = (batch.plan.anchors[row] == number).nonzero()[:, 0]
        count = len(block) - 1
        assert batch.plan.depths[row, block].tolist() == list(range(count + 1))
        # the session has read the text from its prompt on, as in decoding
        text, start = TEXTS[text_number], PROMPTS[text_number]
        states = states_of(target, text[:-1])
        known = {k: v[:, : start - 1] for k, v in states.items()}
        given = Text(text[:start], 64, Sampling(1.0), torch.Generator(), known, count)
        session = drafter.start(given)
        for end in range(start, position + 1):
            session.commit([text[end]], 0, {k: v[:, end - 1 : end] for k, v in states.items()})
        expected = logits[row, block[1:]].softmax(-1)
        torch.testing.assert_close(session.propose(count).q, expected, atol=1e-5, rtol=1e-4)
        lengths.add(count)
    assert len(lengths) > 2


@pytest.mark.parametrize("window", [None, 1, 3, 30])
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_a_slot_sees_what_its_layer_lets_it_see(target, draft, window, causal):
    model, (ids, _) = copy.deepcopy(draft), TEXTS
    views = [(window, causal), (None, not causal)]
    for layer, view in zip(model.model.layers, views, strict=True):
        layer.self_attn.sliding_window, layer.self_attn.is_causal = view
    drafter, states = FORMAT.drafter(model, None, target), states_of(target, ids)
    read, cache = drafter.side_by_side(states, torch.float32), drafter.decoder.new_cache(1, 40)
    drafter.decoder.add_context(read, 0, cache)
    anchors = torch.tensor([3, 7])
    inputs = drafter.decoder.read(torch.tensor(ids)[anchors], anchors, MOST, len(ids), cache)
    for anchor, block in zip(anchors.tolist(), inputs, strict=True):
        tokens = torch.tensor([ids[anchor], *[MASK] * (MOST - 1)])
        expected = by_definition(model, read[0, :anchor], tokens, views)
        torch.testing.assert_close(block, expected, atol=1e-5, rtol=1e-4)


def test_each_mask_learns_the_token_at_its_place(draft, batch):
    states, learned, _ = KIND.head_input(draft.eval(), batch)
    count = len(batch.positions)
    assert learned[:count].tolist() == list(range(count))
    whole, trained = read_blocks(draft, batch), 0
    for row, slot in (batch.plan.anchors >= 0).nonzero().tolist():
        anchor, depth = int(batch.plan.anchors[row, slot]), int(batch.plan.depths[row, slot])
        _, text, position = place_of(batch, anchor)
        if depth and position + depth < len(TEXTS[text]):
            same = (states == whole[row, slot]).all(1) & (learned == anchor + depth - 1)
            assert same.sum() == 1
            trained += 1
    assert trained == len(learned) > count


def test_anchors_are_drawn_anew_in_training(draft, batch):
    drawn, masks = set(), {True: 0, False: 0}
    for seed in range(300):
        for training in masks:
            plan = KIND.plan(draft, batch._replace(seeds=batch.seeds + 2 * seed), training)
            masks[training] += int((plan.depths > 0).sum())
            if training:
                drawn.add(tuple(plan.anchors.flatten().tolist()))
    assert len(drawn) > 200
    assert masks[True] == pytest.approx(ANCHORS * masks[False], rel=0.1)
    few, all_ = (
        KIND.head_input(draft.train(training), planned(batch, KIND, draft, training))
        for training in (True, False)
    )
    assert len(few.states) < len(all_.states)
    assert few.weight * ANCHORS == pytest.approx(all_.weight)


def test_a_block_sees_neither_its_anchors_state_nor_later_tokens(draft, batch):
    before = read_blocks(draft, batch)
    anchor = len(batch.positions) - 3
    row, text, position = place_of(batch, anchor)
    block = batch.plan.anchors[row] == anchor

    def changed(first, last, of_text=text, tokens=False):
        """Whether the block changes with the states (or tokens) from `first` up to `last`."""
        states, ids = batch.states.clone(), batch.input_ids.clone()
        last = len(TEXTS[of_text]) if last is None else last
        within = (batch.position_ids >= first) & (batch.position_ids < last)
        within &= batch.texts == of_text
        states[within] += 1
        ids[within] += int(tokens)
        after = read_blocks(draft, batch._replace(states=states, input_ids=ids))
        return not torch.equal(before[row, block], after[row, block])

    assert changed(position - 1, position)
    assert changed(0, 1)
    assert not changed(position, None)
    assert not changed(position + 1, None, tokens=True)
    assert changed(position, position + 1, tokens=True)
    assert not changed(0, None, 1 - text)  # nor another text


def test_all_layers_share_a_k_norm_that_is_not_trained(target):
    made = KIND.initialise(Origin(target, None, [], 2, MOST, LAYERS, MASK)).model
    frozen = {name for name, weight in made.named_parameters() if not weight.requires_grad}
    norms = {f"model.layers.{i}.self_attn.k_norm.weight" for i in range(2)}
    assert frozen == norms | {"model.embed_tokens.weight", "lm_head.weight"}
    assert all((made.get_parameter(name) == 1).all() for name in norms)


def test_several_k_norms_are_seen_because_vllm_on_a_cpu_has_one(target, draft, tmp_path):
    embedding = target.decoder.embedding
    made = KIND.initialise(Origin(target, None, [], 2, MOST, LAYERS, MASK)).model
    for name, model in (("one", made), ("several", draft)):
        (tmp_path / name).mkdir()
        KIND.save(tmp_path / name, Draft(model), embedding, Checkpoint("a target", Path()))
        assert has_several_k_norms(tmp_path / name) == (name == "several")


def test_the_layout_of_speculators_is_read_like_z_labs(target, tmp_path):
    draft = KIND.initialise(Origin(target, None, [], 2, MOST, LAYERS, MASK)).model
    embedding, head = target.decoder.embedding, target.model.lm_head.weight
    (tmp_path / "draft").mkdir()
    KIND.save(tmp_path / "draft", Draft(draft), embedding, Checkpoint("a target", Path()))
    (tmp_path / "draft" / "compact.json").unlink()
    plain = load_dflash(tmp_path / "draft", embedding, head, target.model.config)[0]
    path = tmp_path / "draft" / "config.json"
    shape = read_json(path)
    inner = shape.pop("dflash_config")
    about = {"speculators_model_type": "dflash", "block_size": shape.pop("block_size")}
    about |= {"mask_token_id": MASK, "transformer_layer_config": shape}
    about |= {"sliding_window_non_causal": False}  # of layers with a window: there are none
    del shape["layer_types"]  # without which vLLM makes no window
    shape |= {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    about["aux_hidden_state_layer_ids"] = [i + 1 for i in inner["target_layer_ids"]]
    path.write_text(json.dumps(about))
    assert FORMAT.head_size(about) == VOCAB
    assert KIND.target_layers({}, about) == LAYERS
    other = load_dflash(tmp_path / "draft", embedding, head, target.model.config)[0]
    assert other.config.layer_types == plain.config.layer_types == ["full_attention"] * 2
    assert other.config.block_size == plain.config.block_size == MOST + 1
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
        assert torch.allclose(tensor, draft.state_dict()[name])
    (tmp_path / "again").mkdir()
    origin = Origin(target, None, [], 2, MOST, LAYERS, published=tmp_path / "draft")
    KIND.save(tmp_path / "again", KIND.initialise(origin), embedding, "a target")
    written = read_json(tmp_path / "again" / "config.json")
    changed = {"dtype", "torch_dtype", "sliding_window_non_causal", "transformer_layer_config"}
    assert {k: v for k, v in about.items() if k not in changed}.items() <= written.items()
    assert written["sliding_window_non_causal"] is True  # which means the same there


def test_activations_computed_twice_are_not_kept(draft, batch, kept_bytes):
    once = kept_bytes(draft.train(), lambda: read_blocks(draft, batch))
    draft.gradient_checkpointing_enable()
    twice = kept_bytes(draft, lambda: read_blocks(draft, batch))
    draft.gradient_checkpointing_disable()
    assert twice[0] < 0.7 * once[0]
    torch.testing.assert_close(twice[1], once[1])
