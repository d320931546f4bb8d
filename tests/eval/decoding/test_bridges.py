"""Every way to map two vocabularies: q is what the draft says over the tokens that both have."""

import random

import pytest
import torch

from align.check import compare
from align.checkpoint import Checkpoint
from align.transplant import transplant
from align.vocab_map import build_map
from eval.decoding.build import build_decoder
from eval.decoding.drafters.drafter import Text
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.sibling import MapDrafter
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling, warp
from eval.prompts import Prompt
from tests.eval.decoding.world import make_side

NEVER = frozenset({99})
SAMPLING = Sampling(temperature=1.3, top_k=3)
TARGET = {"tokens": ["a", "b", "ab", "ba"], "merges": [["a", "b"], ["b", "a"]]}
TARGET_ROWS = 6  # two of them padding
# "aa" is the draft's alone, "ba" the target's
DRAFT = {"tokens": ["aa", "a", "b", "ab"], "merges": [["a", "a"], ["a", "b"]]}
# name: relation, strategy, the draft's tokenizer, rows of its head
BRIDGES = {
    "direct": ("identical", "direct", TARGET, TARGET_ROWS),
    "padded": ("padded", "padded", TARGET, 9),
    "permuted": ("permuted", "remap", {"tokens": ["ba", "ab", "b", "a"]}, 5),
    "subset": ("subset", "padded", {"tokens": ["a", "b", "ab"]}, 4),
    "subset, moved": ("subset", "intersection", {"tokens": ["ab", "b", "a"]}, 3),
    "superset": ("superset", "padded", {"tokens": ["a", "b", "ab", "ba", "aa"]}, 5),
    "superset, moved": ("superset", "remap", {"tokens": ["aa", "ba", "ab", "b", "a"]}, 5),
    "intersection": ("intersection", "intersection", DRAFT, 5),
    "transplant": ("intersection", "transplant", DRAFT, 5),
}
IDS = [1, 0, 2]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, tiny_llama):
    """A folder with a target and a draft for each of BRIDGES: tokenizer, config, weights."""
    folder = tmp_path_factory.mktemp("pairs")
    no_stops = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    heads = {"target": TARGET_ROWS} | {name: pair[3] for name, pair in BRIDGES.items()}
    for seed, (name, rows) in enumerate(heads.items()):
        make_side(folder / name, **(BRIDGES[name][2] if name in BRIDGES else TARGET))
        model = tiny_llama(seed, spread=5, vocab_size=rows, **no_stops)
        model.save_pretrained(folder / name)
    return folder


@pytest.fixture
def target(checkpoints, forwards):
    checkpoint = Checkpoint.open(checkpoints / "target")
    model = checkpoint.load(torch.float32)
    return Target(checkpoint, model, build_decoder(model, 60), NEVER)


@pytest.fixture
def load(checkpoints, target):
    """load(name): the draft of that name, loaded as any run loads it."""

    def load_it(name):
        relation, strategy, _, _ = BRIDGES[name]
        found = load_drafter(str(checkpoints / name), target, strategy)
        assert (found.vocabulary["relation"], found.vocabulary["strategy"]) == (relation, strategy)
        return found

    return load_it


@pytest.mark.parametrize("name", BRIDGES)
def test_no_strategy_changes_the_model_it_is_given(checkpoints, load, monkeypatch, name):
    given = Checkpoint.open(checkpoints / name).load(torch.float32)
    before = {key: tensor.clone() for key, tensor in given.state_dict().items()}
    configs = (given.config.to_dict(), given.generation_config.to_dict())
    modules = [id(module) for module in given.modules()]
    monkeypatch.setattr(Checkpoint, "load", lambda *_: given)
    load(name)
    assert before.keys() == given.state_dict().keys()
    assert all(tensor.equal(before[key]) for key, tensor in given.state_dict().items())
    assert configs == (given.config.to_dict(), given.generation_config.to_dict())
    assert modules == [id(module) for module in given.modules()]


# --- q is what the draft says


def plain_q(name, model, context, sampling):
    """q after `context` [V] by the model of transformers and the tables above, token by token."""
    _, strategy, words, _ = BRIDGES[name]
    own = words["tokens"]
    alike = [[d for d, word in enumerate(own) if word == token] for token in TARGET["tokens"]]
    # the last of those spelt alike is written; "ba" is the one token that a draft may lack
    pieces = [found[-1:] or [alike[1][-1], alike[0][-1]] for found in alike]
    q = torch.zeros(TARGET_ROWS)
    if strategy == "transplant":
        old_in, old_out = model.get_input_embeddings().weight, model.lm_head.weight
        inputs = torch.stack([old_in[pieces[t][-1]] for t in context])
        hidden = model.base_model(inputs_embeds=inputs[None]).last_hidden_state[0, -1]
        rows = [
            old_out[p[0]] if len(p) == 1 else (2 * old_out[p[0]] + old_out[p[1]]) / 3
            for p in pieces
        ]
        q[: len(rows)] = warp(torch.stack([hidden @ row for row in rows]), sampling)
        return q
    by_id = strategy in ("direct", "padded")
    read = [*context] if by_id else [d for t in context for d in pieces[t]]
    logits = model(torch.tensor([read])).logits[0, -1]
    shared = [(t, d) for t, found in enumerate(alike) for d in found]
    for (t, _), share in zip(shared, warp(logits[[d for _, d in shared]], sampling), strict=True):
        q[t] += share
    return q


@pytest.mark.parametrize("name", BRIDGES)
@torch.no_grad()
def test_q_is_the_drafts_own_over_the_shared_tokens(checkpoints, load, name):
    """After every stretch of a text, and while it grows."""
    draft = load(name)
    model = Checkpoint.open(checkpoints / name).load(torch.float32)
    text = [0, 3, 2, 3, 1, 0, 3, 3, 2, 1, 1, 0]
    for sampling in (SAMPLING, Sampling(1.0)):
        forced = draft.teacher_forced(IDS, text, sampling, {})
        generator = torch.Generator().manual_seed(0)
        session = draft.start(Text(IDS, 32, sampling, generator, {}, 3))
        for at, token in enumerate(text):
            expected = plain_q(name, model, [*IDS, *text[:at]], sampling)
            proposal = session.propose(1)
            session.commit([token], int(proposal.tokens[0] == token), {})
            for q in (forced[at], proposal.q[0]):
                torch.testing.assert_close(q, expected, atol=1e-5, rtol=1e-4)
                assert q[expected == 0].sum() == 0


def test_entries_of_the_same_token_share_its_probability(tiny_llama, drafter):
    decoder = build_decoder(tiny_llama(vocab_size=3), 8)
    draft = drafter(decoder, 4, token_ids=torch.tensor([2, 0, 2]))
    q = draft.over_target_ids(torch.tensor([[0.5, 0.25, 0.25]]))
    assert q.tolist() == [[0.25, 0, 0.75, 0]]


# --- by map, with real models and tokenizers


@pytest.fixture
def lacking(tmp_path, tiny_llama, forwards):
    """A draft by map that lacks two of the target's letters, c and d."""
    target = make_side(tmp_path / "t", [*"abcdefgh"])
    draft = make_side(tmp_path / "d", [*"hgfeab"])
    decoder = build_decoder(tiny_llama(1, spread=6, vocab_size=6), 160)
    about = {"vocab_size": 8, "vocabulary": {}}
    return MapDrafter(target=target, draft=draft, decoder=decoder, **about)


def test_a_draft_that_cannot_spell_every_token_reads_on_without_them(lacking, tiny_llama):
    own = build_decoder(tiny_llama(0, spread=6, vocab_size=8), 80)
    how = Decoding(Sampling(1.5), NEVER, 40, seed=3)
    for ids in ([0, 2, 5], [2, 3, 3]):  # the second is nothing at all to the draft
        run = decode(own, lacking, Prompt("p", prompt="unused"), ids, how, 3)
        assert len(run.tokens) == 40
        assert sum(run.accepted) > 0
        assert {2, 3} & set(run.tokens)
        q = lacking.teacher_forced(ids, run.tokens, how.sampling, {})
        assert q[:, 2:4].sum() == 0


def test_a_draft_by_map_begins_a_text_as_its_own_tokenizer_does(lacking, monkeypatch):
    """In what it drafts as in its acceptance rate."""
    ids = [0, 5, 1]
    plain = lacking.teacher_forced(ids, [4], Sampling(1.0), {})
    monkeypatch.setitem(vars(lacking.draft), "prefix", [3])
    q = lacking.teacher_forced(ids, [4], Sampling(1.0), {})
    assert (q - plain).abs().max() > 0.01
    session = lacking.start(Text(ids, 100, Sampling(1.0), torch.Generator(), {}, 3))
    torch.testing.assert_close(session.propose(1).q, q)


def test_the_cache_of_a_draft_by_map_grows_with_the_text(lacking):
    """A draft may have many tokens for one of the target's; zeroing a whole context takes time."""
    ids = [0, 5, 1] * 30
    session = lacking.start(Text(ids[:1], 6, Sampling(1.0), torch.Generator(), {}, 3))
    assert (session.cache.slots < len(ids)) != lacking.recorded  # graphs have whole caches
    session.commit(ids[1:], 0, {})
    q = lacking.teacher_forced(ids, [4], Sampling(1.0), {})
    torch.testing.assert_close(session.propose(1).q, q)


# --- remap and transplant

LETTERS = [chr(ord("a") + i) for i in range(26)]


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request, tiny_llama):
    return tiny_llama(5, spread=4, vocab_size=50, tie_word_embeddings=request.param)


@pytest.fixture
def shuffled(tmp_path):
    """A target with the letters of the draft in another order, and the map between them."""
    order = random.Random(3).sample(range(26), 26)
    target = make_side(tmp_path / "t", [LETTERS[i] for i in order], added=[("</s>", True)])
    draft = make_side(tmp_path / "d", LETTERS, added=[("</s>", True)])
    return target, draft


def test_remapped_logits_are_the_old_ones_in_the_targets_order(shuffled, model, tmp_path):
    target, draft = shuffled
    verdict = compare(*(Checkpoint.open(tmp_path / side) for side in "td"))
    assert (verdict.relation, verdict.strategy, verdict.tuned_strategy) == (
        "permuted",
        "remap",
        "remap",
    )
    vocab_map = build_map(target, draft)
    moved = transplant(model, vocab_map, target, draft, 40)
    ids = torch.tensor([[3, 1, 4, 1, 5, 26, 9]])
    old = model(vocab_map.to_draft[ids]).logits
    assert torch.equal(moved(ids).logits[..., :27], old[..., vocab_map.to_draft])
    assert moved.config.vocab_size == 40
    assert (moved.get_output_embeddings().weight is moved.get_input_embeddings().weight) == (
        model.config.tie_word_embeddings
    )


def test_new_tokens_get_rows_of_their_pieces(tmp_path, tiny_llama):
    target = make_side(
        tmp_path / "t", ["abc", "a", "<unused1>"], added=[("</s>", True)], eos="</s>"
    )
    draft = make_side(tmp_path / "d", ["c", "a", "b"])
    model = tiny_llama(5, vocab_size=8)
    moved = transplant(model, build_map(target, draft), target, draft, 6)
    rows, old = moved.lm_head.weight, model.lm_head.weight
    expected = (4 * old[1] + 2 * old[2] + old[0]) / 7  # a, b, c: weights 1, 1/2, 1/4
    torch.testing.assert_close(rows[0], expected)
    inputs, old_inputs = moved.get_input_embeddings().weight, model.get_input_embeddings().weight
    assert inputs[0].equal(old_inputs[0])  # the last piece
    assert rows[1].equal(old[1])
    assert inputs[1].equal(old_inputs[1])
    assert moved.config.eos_token_id == moved.generation_config.eos_token_id == 3


def test_ids_that_stand_for_nothing_get_no_more_than_the_average_one(tmp_path, tiny_llama):
    unused = [f"<unused{i}>" for i in range(400)]
    target, draft = (
        make_side(tmp_path / "t", [*LETTERS, *unused]),
        make_side(tmp_path / "d", LETTERS),
    )
    model = tiny_llama(5, spread=4, vocab_size=26)
    with torch.no_grad():  # as in trained models: states share a direction, most logits are below 0
        model.get_input_embeddings().weight.add_(torch.randn(32))
        states = model.base_model(torch.arange(26)[None]).last_hidden_state[0]
        model.lm_head.weight.sub_(3 * states.mean(0) / states.mean(0).norm())
    moved = transplant(model, build_map(target, draft), target, draft, 430)
    with torch.no_grad():
        q = moved(torch.randint(26, (1, 50))).logits.softmax(-1)
    assert (q[..., 26:].amax(-1) < q[..., :26].mean(-1)).all()
