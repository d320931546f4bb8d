"""DFlash in training: a block is the one that is drafted, and it sees no more than that."""

import json

import pytest
import torch

from align.sources import read_json
from distill.drafters.batch import TrainingBatch
from distill.drafters.dflash import ANCHORS, KIND, draw_blocks, read_blocks
from distill.drafters.kind import Draft, Origin
from eval.decoding.build import build_decoder
from eval.decoding.drafters.dflash import FORMAT, load_dflash
from eval.decoding.drafters.drafter import Text
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.engines.local_vllm import has_several_k_norms

VOCAB, MASK, MOST, LAYERS = 61, 60, 4, (1, 2)
# prompt lengths, and texts of which the first is padded
PROMPTS, TEXTS = (3, 5), ([3, 14, 15, 9, 2, 7, 30, 31], [8, 50, 44, 12, 12, 1, 2, 4, 6, 13, 22])


@pytest.fixture(scope="module")
def target(tiny_llama):
    model = tiny_llama(3, spread=5, num_hidden_layers=3, num_key_value_heads=2)
    return Target("tiny", model, None, build_decoder(model, 90), frozenset())


@pytest.fixture(scope="module")
def draft(target):
    made = KIND.initialise(Origin(target, None, [], 2, MOST, LAYERS, MASK)).model
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


@pytest.fixture(scope="module")
def batch(target):
    width = 16
    ids = torch.zeros(len(TEXTS), width, dtype=torch.long)
    states, positions = torch.zeros(len(TEXTS), width, len(LAYERS), 32), []
    for row, (prompt, text) in enumerate(zip(PROMPTS, TEXTS, strict=True)):
        ids[row, : len(text)] = torch.tensor(text)
        read = states_of(target, text[:-1])
        states[row, : len(text) - 1] = torch.stack([read[k][0] for k in LAYERS], 1)
        positions += [row * width + p for p in range(prompt - 1, len(text) - 1)]
    tops = torch.zeros(len(positions), 1)
    return TrainingBatch(ids, torch.tensor(positions), tops, tops, states, torch.tensor([4, 5]))


def test_a_block_is_the_one_that_is_drafted_from_the_cache(target, draft, batch):
    made = draw_blocks(batch, MOST)
    with torch.no_grad():
        logits = draft.lm_head(read_blocks(draft, batch, made))
    drafter = FORMAT.drafter(draft, None, target)
    lengths = set()
    for number, place in enumerate(batch.positions.tolist()):
        row, position = divmod(place, batch.width)
        block = (made.anchors == number).nonzero()[:, 0]
        count = len(block) - 1
        assert made.depths[block].tolist() == list(range(count + 1))
        # the session has read the text from its prompt on, as in decoding
        text, start = TEXTS[row], PROMPTS[row]
        states = states_of(target, text[:-1])
        known = {k: v[:, : start - 1] for k, v in states.items()}
        given = Text(text[:start], 64, Sampling(1.0), torch.Generator(), known, count)
        session = drafter.start(given)
        for end in range(start, position + 1):
            session.commit([text[end]], 0, {k: v[:, end - 1 : end] for k, v in states.items()})
        expected = logits[row, made.slots[block[1:]]].softmax(-1)
        torch.testing.assert_close(session.propose(count).q, expected, atol=1e-5, rtol=1e-4)
        lengths.add(count)
    assert len(lengths) > 2


def test_each_mask_learns_the_token_at_its_place(draft, batch):
    states, learned, _ = KIND.head_input(draft, batch)
    count, made = len(batch.positions), draw_blocks(batch, MOST)
    assert learned[:count].tolist() == list(range(count))
    whole = read_blocks(draft, batch, made)
    trained = 0
    for row, slot, anchor, depth in zip(*map(torch.Tensor.tolist, made[:4]), strict=True):
        inside = batch.positions[anchor] % batch.width + depth < len(TEXTS[row])
        if depth and inside:
            found = (states == whole[row, slot]).all(1) & (learned == anchor + depth - 1)
            assert found.sum() == 1
            trained += 1
    assert trained == len(learned) > count


def test_anchors_are_drawn_anew_in_training(draft, batch):
    drawn, masks = set(), {ANCHORS: 0, 1.0: 0}
    for seed in range(300):
        for share in masks:
            given = batch._replace(seeds=batch.seeds + 2 * seed)
            made = draw_blocks(given, MOST, share)
            masks[share] += int((made.depths > 0).sum())
            if share == ANCHORS:
                drawn.add(tuple(made.anchors.tolist()))
    assert len(drawn) > 200
    assert masks[ANCHORS] == pytest.approx(ANCHORS * masks[1.0], rel=0.1)
    few, all_ = (KIND.head_input(draft.train(training), batch) for training in (True, False))
    assert len(few.states) < len(all_.states)
    assert few.weight * ANCHORS == pytest.approx(all_.weight)


def test_a_block_sees_neither_its_anchors_state_nor_later_tokens(draft, batch):
    made = draw_blocks(batch, MOST)
    before = read_blocks(draft, batch, made)
    row, anchor = 1, len(batch.positions) - 3
    position = int(batch.positions[anchor]) % batch.width
    places = made.slots[made.anchors == anchor]

    def changed(first, last, tokens=False):
        """Whether the block changes with the states (or tokens) from `first` up to `last`."""
        states, ids = batch.states.clone(), batch.input_ids.clone()
        states[row, first:last] += 1
        ids[row, first:last] += int(tokens)
        after = read_blocks(draft, batch._replace(states=states, input_ids=ids), made)
        return not torch.equal(before[row, places], after[row, places])

    assert changed(position - 1, position)
    assert changed(0, 1)
    assert not changed(position, None)
    assert not changed(position + 1, None, tokens=True)
    assert changed(position, position + 1, tokens=True)


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
        KIND.save(tmp_path / name, Draft(model), embedding, "a target")
        assert has_several_k_norms(tmp_path / name) == (name == "several")


def test_the_layout_of_speculators_is_read_like_z_labs(target, draft, tmp_path):
    embedding, head = target.decoder.embedding, target.model.lm_head.weight
    (tmp_path / "draft").mkdir()
    KIND.save(tmp_path / "draft", Draft(draft), embedding, "a target")
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


def test_activations_computed_twice_are_not_kept(draft, batch, kept_bytes):
    blocks = draw_blocks(batch, MOST)
    once = kept_bytes(draft.train(), lambda: read_blocks(draft, batch, blocks))
    draft.gradient_checkpointing_enable()
    twice = kept_bytes(draft, lambda: read_blocks(draft, batch, blocks))
    draft.gradient_checkpointing_disable()
    assert twice[0] < 0.7 * once[0]
    torch.testing.assert_close(twice[1], once[1])
