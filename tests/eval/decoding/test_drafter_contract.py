"""What every drafter keeps, whatever it is: outputs are the target's, q is what was sampled from.

A new kind of draft is a line in DRAFTERS.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from align.checkpoint import Checkpoint
from align.transplant import transplant
from align.vocab_map import build_map
from eval.decoding import forward
from eval.decoding.build import build_decoder
from eval.decoding.drafters import causal_lm
from eval.decoding.drafters import eagle3 as eagle3_module
from eval.decoding.drafters.causal_lm import CausalLMDrafter, TokenSession
from eval.decoding.drafters.dflash import FORMAT as DFLASH
from eval.decoding.drafters.dflash import DFlashDecoder, DFlashSession, build_dflash
from eval.decoding.drafters.drafter import HeadDrafter, Text
from eval.decoding.drafters.eagle3 import FORMAT as EAGLE3
from eval.decoding.drafters.eagle3 import Eagle3Session, build_eagle3, layer_config
from eval.decoding.drafters.lookup import lookup_first, prompt_lookup
from eval.decoding.drafters.medusa import MedusaDrafter, MedusaSession
from eval.decoding.drafters.mtp import FORMAT as MTP
from eval.decoding.drafters.pard import PardDrafter
from eval.decoding.drafters.sibling import MapDrafter
from eval.decoding.drafters.uno import Adapted, UnoSession, uno_drafter
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import Target
from eval.decoding.transformers_forward import TransformersDecoder
from eval.decoding.verification import Sampling
from eval.decoding.weights import Product
from eval.measuring.evaluation import Plan, evaluate
from eval.measuring.runs import AT_LONGEST
from eval.prompts import Prompt, PromptSet
from eval.reporting.build import build_report
from tests.eval.decoding.enumeration import emitted, of_target, played, total_variation
from tests.eval.decoding.world import Remembered, RememberedNoise, make_side
from tests.mtp import mtp_config, random_head
from tests.uno import random_adapter

LONGEST, CONTEXT, DEPTH = 40, 90, 4
NEVER = frozenset({99})
GREEDY = Decoding(Sampling(), NEVER, LONGEST)
PROMPT = Prompt("p", prompt="unused")
TEXTS = [[3, 14, 15, 9, 3, 14], [9], [6, 5, 35, 8, 6, 5, 35], [1, 2], [0, 13, 27, 4, 30]]


@dataclasses.dataclass
class World:
    """A target, the vocabularies of a pair, and what makes models of so many vocabulary entries."""

    target: Target
    sides: tuple
    tiny: Callable  # (seed, vocab) -> a Llama
    remember: bool  # whether decoders remember: for enumeration

    def model(self, seed, vocab=None):
        return self.tiny(seed, vocab or self.vocab)

    @property
    def vocab(self):
        return len(self.target.decoder.embedding)

    def drafter(self, model, build=build_decoder, context=CONTEXT, kind=CausalLMDrafter, **fields):
        decoder = build(model, context)
        decoder = Remembered(decoder) if self.remember else decoder
        return kind(decoder=decoder, vocab_size=self.vocab, vocabulary=VOCABULARY, **fields)

    def noisy(self):
        """The target's weights with some noise: right now and then."""
        model, generator = copy.deepcopy(self.model(0)), torch.Generator().manual_seed(5)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
        return model


VOCABULARY = {"relation": "identical", "strategy": "direct", "coverage": 1.0}


def itself(world):
    return world.drafter(world.model(0))


def padded(world):
    return world.drafter(world.model(9, world.vocab + 8), entries=world.vocab)


def trimmed(world):
    model, kept = world.model(0), torch.arange(0, world.vocab, 2)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[kept].clone())
    return world.drafter(model, token_ids=kept)


def by_map(world, context=240):
    target, draft = world.sides
    model = world.model(3, len(draft.tokens))
    return world.drafter(model, context=context, kind=MapDrafter, target=target, draft=draft)


def transplanted(world):
    target, draft = world.sides
    vocab_map, model = build_map(target, draft), world.model(3, len(draft.tokens))
    return world.drafter(transplant(model, vocab_map, target, draft, world.vocab))


def pard(world, seed=0, most=DEPTH):
    """The mask is the last vocabulary entry, with an embedding of its own."""
    model, mask = copy.deepcopy(world.model(seed)), world.vocab - 1
    with torch.no_grad():
        model.get_input_embeddings().weight[mask].normal_()
    return world.drafter(model, kind=PardDrafter, mask=mask, most=most)


def eagle3(world, kept=None, layers=None, **switches):
    """layers: keys of the layers' config. switches: keys of config.json."""
    target, shape = world.target, {"hidden_size": 32, "intermediate_size": 40, "head_dim": 8}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    shape |= {"vocab_size": world.vocab} | (layers or {})
    about = {"speculators_model_type": "eagle3", "transformer_layer_config": shape}
    config = layer_config(about | {"norm_before_residual": kept is not None} | switches)
    ids = torch.arange(world.vocab) if kept is None else kept(world.vocab)
    torch.manual_seed(2)
    model = random_weights(build_eagle3(config, (1, 2), len(ids)))
    model.set_input_embeddings(target.model.get_input_embeddings())
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return EAGLE3.drafter(model, ids, target)


def eagle3_1(world):
    """Two layers, the second one with a window."""
    types = {"num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"]}
    layers = types | {"sliding_window": 4, "use_sliding_window": True}
    return eagle3(world, layers=layers, norm_before_fc=True, norm_output=True)


def eagle3_qwen3(world):
    return eagle3(world, layers={"model_type": "qwen3", "num_hidden_layers": 2}, fc_norm=True)


def random_weights(model):
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1) if weight.ndim == 1 else weight.normal_(std=0.3)
    return model


def dflash(world, is_causal=False, more=None, **layers):
    shape = {"intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    shape |= {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 8} | layers
    config = Qwen3Config(vocab_size=world.vocab, **shape)
    config.block_size, config.is_causal = 4, is_causal
    config.dflash_config = {"mask_token_id": world.vocab - 1, "target_layer_ids": [0, 1]}
    config.dflash_config |= more or {}
    torch.manual_seed(2)
    model = random_weights(build_dflash(config, world.vocab))
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    model.own_head = False
    model.set_input_embeddings(world.target.model.get_input_embeddings())
    model.set_output_embeddings(world.target.model.get_output_embeddings())
    return DFLASH.drafter(model, None, world.target)


def dflash_windows(world):
    """As z-lab and speculators publish it: causal in the layer with a window."""
    types = ["sliding_attention", "full_attention"]
    return dflash(world, None, layer_types=types, sliding_window=3, use_sliding_window=True)


def dflash2(world):
    mixture = {"conv_kernel_size": 2, "conv_group_size": 8}
    return dflash(world, more=mixture | {"selector_rank": 4, "selector_top_k": 3})


def medusa(world):
    torch.manual_seed(0)
    head = world.target.model.lm_head.weight.detach()
    return MedusaDrafter(
        vocab_size=world.vocab,
        vocabulary=VOCABULARY,
        layers=(2,),
        blocks=[Product(0.3 * torch.randn(32, 32), torch.randn(32)) for _ in range(DEPTH)],
        head=Product(head, None),
        embedding=torch.zeros(world.vocab, 32),
    )


def mtp(world, family):
    """A head of that family on this target."""
    model = random_head(mtp_config(family, vocab_size=world.vocab), 2)
    model.set_input_embeddings(world.target.model.get_input_embeddings())
    return MTP.drafter(model, None, world.target)


def uno(world):
    base, adapter = world.target.decoder, random_adapter(world.target.model)
    if not world.remember:
        return uno_drafter(adapter, 0.1, DEPTH, base)
    drafter = uno_drafter(adapter, 0.1, DEPTH, base.decoder)
    drafter.decoder = RememberedNoise(base, drafter.decoder)
    return drafter


def first(make):
    return lambda world: lookup_first(make(world), NEVER)


# name: what makes it, how much of a greedy draft is accepted
DRAFTERS = {
    "itself": (itself, "all"),
    "noisy": (lambda world: world.drafter(world.noisy()), "some"),
    "unrelated": (lambda world: world.drafter(world.model(7)), "any"),
    "trimmed": (trimmed, "some"),
    "padded": (padded, "any"),
    "Transformers forward": (
        lambda world: world.drafter(world.noisy(), TransformersDecoder),
        "some",
    ),
    "by map": (by_map, "any"),
    "by map, short of room": (lambda world: by_map(world, 14), "any"),
    "transplanted": (transplanted, "any"),
    "PARD": (pard, "some"),
    "PARD, any length": (lambda world: pard(world, 5, None), "any"),
    "EAGLE-3": (eagle3, "any"),
    "EAGLE-3, trimmed": (lambda world: eagle3(world, lambda v: torch.arange(0, v, 2)), "any"),
    "EAGLE 3.1": (eagle3_1, "any"),
    "EAGLE-3, Qwen3 layers": (eagle3_qwen3, "any"),
    "Medusa": (medusa, "any"),
    "DFlash": (dflash, "any"),
    "DFlash, windows": (dflash_windows, "any"),
    "DFlash2": (dflash2, "any"),
    "Uno": (uno, "some"),
    "MTP, DeepSeek": (lambda world: mtp(world, "deepseek_v3"), "any"),
    "MTP, GLM": (lambda world: mtp(world, "glm4_moe"), "any"),
    "MTP, Qwen": (lambda world: mtp(world, "qwen3_next"), "any"),
    "n-gram": (lambda world: prompt_lookup(world.target), "some"),
    "n-gram, then by map": (first(by_map), "some"),
    "n-gram, then EAGLE-3": (first(eagle3), "some"),
    "n-gram, then DFlash": (first(dflash), "some"),
}


LETTERS = [chr(ord("a") + i) for i in range(26)]
PAIRS = [[a, b] for a in "aeiou" for b in "nrst"]


@pytest.fixture(scope="module")
def world(tiny, letters, tmp_path_factory, forwards):
    """Letters and pairs of letters, of which target and draft share some, at other ids."""
    folder, (mine, theirs) = tmp_path_factory.mktemp("sides"), (PAIRS[:14], PAIRS[6:])
    words = [*LETTERS, *map("".join, mine)]
    ends = [("<s>", True), ("</s>", True)]
    target = make_side(folder / "target", words, mine, ends, "</s>")
    words = [*map("".join, theirs), *LETTERS[::-1]]
    draft = make_side(folder / "draft", words, theirs, [("<|end|>", True)], "<|end|>")

    checkpoint = Checkpoint("tiny", Path())
    checkpoint.tokenizer = letters(42)
    loaded = Target(checkpoint, tiny(0, 42), build_decoder(tiny(0, 42), CONTEXT), NEVER)
    return World(loaded, (target, draft), tiny, remember=False)


@pytest.fixture(scope="module")
def small(tiny, tmp_path_factory, forwards):
    """So few tokens that all outputs can be enumerated; two are padding, one only one side has."""
    folder = tmp_path_factory.mktemp("small")
    target = make_side(folder / "target", ["a", "b", "ab", "ba"], [["a", "b"], ["b", "a"]])
    draft = make_side(folder / "draft", ["aa", "a", "b", "ab"], [["a", "a"], ["a", "b"]])

    decoder = Remembered(build_decoder(tiny(0, 6), 40))
    return World(
        Target(Checkpoint("tiny", Path()), tiny(0, 6), decoder, NEVER), (target, draft), tiny, True
    )


@pytest.fixture(scope="module")
def own(world):
    """The target's own outputs."""
    return [decode(world.target.decoder, None, PROMPT, ids, GREEDY).tokens for ids in TEXTS]


@pytest.fixture(scope="module")
def made(world):
    """The drafter of a name, made once."""
    drafters = {}

    def make(name):
        if name not in drafters:
            drafters[name] = DRAFTERS[name][0](world)
        return drafters[name]

    return make


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_outputs_are_the_targets_own(world, made, own, name):
    drafted = accepted = 0
    for ids, tokens in zip(TEXTS, own, strict=True):
        for length in (1, 3, 8):
            run = decode(world.target.decoder, made(name), PROMPT, ids, GREEDY, length)
            assert run.tokens == tokens
            assert run.problem() is None
            assert max(run.drafted) <= length
            if (most := made(name).most) is not None:
                assert max(run.drafted) == min(length, most)
            drafted, accepted = drafted + sum(run.drafted), accepted + sum(run.accepted)
            if name.startswith("n-gram, then"):
                free = sum(run.free)
                assert free <= sum(run.drafted)
                assert length == 1 or len(ids) < 4 or 0 < free < sum(run.drafted)
    assert drafted > 0
    if DRAFTERS[name][1] == "all":
        assert accepted == drafted
    if DRAFTERS[name][1] == "some":
        assert 0 < accepted < drafted


@pytest.mark.parametrize("name", DRAFTERS)
def test_stops_and_the_length_limit_end_a_text_where_they_end_the_targets(world, made, own, name):
    ids, tokens = TEXTS[0], own[0]
    for longest in (1, 2, 3, 6, 12):
        how = dataclasses.replace(GREEDY, max_new_tokens=longest)
        run = decode(world.target.decoder, made(name), PROMPT, ids, how, DEPTH)
        assert run.tokens == tokens[:longest]
    for stop in {*tokens[:12]}:
        how = dataclasses.replace(GREEDY, stops=frozenset({stop}))
        run = decode(world.target.decoder, made(name), PROMPT, ids, how, DEPTH)
        assert run.tokens == tokens[: tokens.index(stop) + 1]
        assert run.problem() is None


SAMPLED = {
    "block": Decoding(Sampling(1.5, top_k=3), NEVER, 3),
    "token": Decoding(Sampling(1.5, top_k=3), NEVER, 3, rule="token"),
    "top-p": Decoding(Sampling(1.5, top_p=0.7), NEVER, 3),
    "argmax drafts": Decoding(Sampling(1.5), NEVER, 3, 0, "token", "greedy"),
}
REPEATS = [1, 0, 2, 1, 0, 2, 1]


@pytest.mark.parametrize("how", SAMPLED)
@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_outputs_have_the_targets_distribution(small, monkeypatch, name, how):
    target, drafter, decoding = small.target.decoder, DRAFTERS[name][0](small), SAMPLED[how]
    outputs, accepted, _ = emitted(played(monkeypatch), target, drafter, REPEATS, decoding, 2)
    assert abs(sum(outputs.values()) - 1) < 1e-6
    assert total_variation(outputs, of_target(target, REPEATS, decoding)) < 1e-5
    assert accepted > 0


def unwarped(monkeypatch):
    """q is the softmax of other logits than a token was sampled from."""
    right = HeadDrafter.over_target_ids
    monkeypatch.setattr(
        HeadDrafter,
        "over_target_ids",
        lambda self, q: right(self, (q.clamp_min(1e-9).log() * 1.3).softmax(-1)),
    )


def tokens_shifted(monkeypatch):
    """Drafted tokens are named one entry further on than q says."""
    right = HeadDrafter.to_target_ids
    monkeypatch.setattr(
        HeadDrafter, "to_target_ids", lambda self, entries: (right(self, entries) + 1) % 4
    )


@pytest.mark.parametrize("mutant", [unwarped, tokens_shifted])
@pytest.mark.parametrize(
    "name", ["unrelated", "by map", "EAGLE-3", "Medusa", "PARD", "DFlash", "Uno"]
)
def test_a_q_that_was_not_sampled_from_is_caught(small, monkeypatch, name, mutant):
    target, drafter, decoding = small.target.decoder, DRAFTERS[name][0](small), SAMPLED["block"]
    mutant(monkeypatch)
    outputs, *_ = emitted(played(monkeypatch), target, drafter, REPEATS, decoding, 2)
    assert total_variation(outputs, of_target(target, REPEATS, decoding)) > 1e-4


def test_an_adapter_that_verifies_is_caught(small, monkeypatch):
    base, drafter, decoding = small.target.decoder, uno(small), SAMPLED["block"]
    own = of_target(base, REPEATS, decoding)
    monkeypatch.setattr(base, "known", {})
    alone, both = (getattr(d, "fused", d) for d in (base.decoder, drafter.decoder.decoder))
    monkeypatch.setattr(alone, "layers", both.layers)
    outputs, *_ = emitted(played(monkeypatch), base, drafter, REPEATS, decoding, 2)
    assert total_variation(outputs, own) > 1e-4


def states_of(target, ids, layers):
    states = dict.fromkeys(layers)
    target.forward(torch.tensor([ids]), 0, target.new_cache(1, len(ids)), states=states)
    return states


def filled(target, ids):
    """The target's cache after all tokens but the last."""
    cache = target.new_cache(1, CONTEXT)
    target.forward(torch.tensor([ids[:-1]]), 0, cache)
    return cache


@torch.inference_mode()
def check_proposals(world, drafter, ids, text, sampling):
    """What is proposed first while a text goes on is what the acceptance rate is taken on.

    Steps draft one to three tokens; those that were proposed as they stand in the text count as
    accepted. So each step reads on from what was drafted and accepted, or rejected, before it.
    """
    target, layers = world.target.decoder, drafter.layers
    states = states_of(target, [*ids, *text[:-1]], layers)
    rows = drafter.teacher_forced(ids, text, sampling, states)
    assert rows.shape == (len(text), world.vocab)
    read = {layer: state[:, : len(ids)] for layer, state in states.items()}
    generator = torch.Generator().manual_seed(0)
    cache, own = filled(target, [*ids, text[0]]), drafter.own_tokens
    session = drafter.start(Text([*ids, text[0]], CONTEXT, sampling, generator, read, 3, cache))
    position, proposed = 1, 0
    for count in itertools.cycle((1, 2, 3)):
        if position + count >= len(text) - 1:
            break
        tokens, q, _ = session.propose(count)
        if sampling.greedy:  # later tokens, too, are those of a session that begins here
            read = {k: state[:, : len(ids) + position - 1] for k, state in states.items()}
            so_far = [*ids, *text[:position]]
            again = filled(target, so_far)
            fresh = drafter.start(Text(so_far, CONTEXT, sampling, generator, read, 3, again))
            assert fresh.propose(count).tokens.tolist() == tokens.tolist()
            assert own == 0 or tokens.tolist()[:own] == text[position : position + own]
        rated = rows[position + own]
        if len(tokens) == 0:
            assert rated.sum() == 0
        elif len(tokens) > own and q is None:
            assert int(rated.argmax()) == int(tokens[own])
            assert rated.max() == 1
        elif len(tokens) > own:
            torch.testing.assert_close(q[own], rated, atol=1e-5, rtol=1e-4)
        proposed += len(tokens)
        pairs = zip(tokens.tolist(), text[position:], strict=False)
        accepted = len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])
        emitted = text[position : position + accepted + 1]
        start = len(ids) + position - 1
        target.forward(
            torch.cat([torch.tensor(text[position - 1 : position]), tokens])[None], start, cache
        )
        given = {layer: state[:, start : start + count + 1] for layer, state in states.items()}
        session.commit(emitted, accepted, given)
        position += len(emitted)
    assert proposed > 0


def check_all_proposals(world, drafter, own, sampling):
    for ids, text in zip(TEXTS, own, strict=True):
        check_proposals(world, drafter, ids, text, sampling)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_p=0.95)], ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_proposals_are_what_the_acceptance_rate_is_taken_on(world, made, own, name, sampling):
    check_all_proposals(world, made(name), own, sampling)


@pytest.mark.parametrize("name", DRAFTERS)
def test_one_token_after_a_prompt_of_one_token_has_a_distribution(world, made, name):
    states = states_of(world.target.decoder, [9], made(name).layers)
    q = made(name).teacher_forced([9], [5], Sampling(1.0), states)
    assert q.shape == (1, world.vocab)
    assert float(q.sum()) in (0, pytest.approx(1, abs=1e-5))


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_long_text_is_read_in_pieces(world, made, own, monkeypatch, name):
    target, drafter, ids, text = world.target.decoder, made(name), TEXTS[0] * 3, own[1]
    states = states_of(target, [*ids, *text[:-1]], drafter.layers)
    whole = drafter.teacher_forced(ids, text, Sampling(1.0), states)
    tokens = decode(target, None, PROMPT, ids, GREEDY).tokens
    for module in (forward, causal_lm, eagle3_module):
        monkeypatch.setattr(module, "PIECE", 7)
    pieces = drafter.teacher_forced(ids, text, Sampling(1.0), states)
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-4)
    assert decode(target, drafter, PROMPT, ids, GREEDY, DEPTH).tokens == tokens


def rolled_back_one_too_little(monkeypatch):
    right = TokenSession.commit

    def commit(session, emitted, accepted, states):
        right(session, emitted, accepted, states)
        session.in_cache = min(session.in_cache + 1, len(session.text) - 1)

    monkeypatch.setattr(TokenSession, "commit", commit)


def states_off_by_one(monkeypatch):
    for kind in (Eagle3Session, MedusaSession, DFlashSession):

        def commit(session, emitted, accepted, states, right=kind.commit):
            right(session, emitted, accepted, {k: v.roll(1, 1) for k, v in states.items()})

        monkeypatch.setattr(kind, "commit", commit)


def states_of_other_layers(monkeypatch):
    for kind in (Eagle3Session, DFlashSession):

        def commit(session, emitted, accepted, states, right=kind.commit):
            turned = dict(zip(states, [*states.values()][::-1], strict=True))
            right(session, emitted, accepted, turned)

        monkeypatch.setattr(kind, "commit", commit)


def context_one_too_far(monkeypatch):
    """A block sees the state of its own anchor."""
    right = DFlashDecoder.read
    monkeypatch.setattr(
        DFlashDecoder,
        "read",
        lambda self, anchors, positions, width, cached, cache: right(
            self, anchors, positions + 1, width, cached, cache
        ),
    )


def adapter_on_the_newest_token(monkeypatch):
    adds = lambda self, x: self.base(x) + x @ self.down.T @ self.up.T  # noqa: E731
    monkeypatch.setattr(Adapted, "__call__", adds)


def one_position_too_far(monkeypatch):
    right = UnoSession.commit

    def commit(session, emitted, accepted, states):
        right(session, emitted, accepted, states)
        session.length += 1

    monkeypatch.setattr(UnoSession, "commit", commit)


@pytest.mark.parametrize(
    ("mutant", "name"),
    [
        *((rolled_back_one_too_little, name) for name in ("itself", "by map")),
        *((states_off_by_one, name) for name in ("EAGLE-3", "Medusa", "DFlash")),
        *((states_off_by_one, name) for name in ("EAGLE 3.1", "EAGLE-3, Qwen3 layers")),
        *((states_of_other_layers, name) for name in ("EAGLE-3", "DFlash", "EAGLE 3.1")),
        (context_one_too_far, "DFlash"),
        (adapter_on_the_newest_token, "Uno"),
        (one_position_too_far, "Uno"),
    ],
)
def test_a_session_that_reads_another_text_is_caught(world, own, monkeypatch, mutant, name):
    mutant(monkeypatch)
    drafter = DRAFTERS[name][0](world)  # a new one, which replays nothing of the right session
    with pytest.raises(AssertionError):
        check_all_proposals(world, drafter, own, Sampling())


def test_all_stand_in_a_report(world, made, journal):
    drafters = {name: made(name) for name in DRAFTERS}
    prompts = [Prompt(str(i), prompt="unused") for i in range(len(TEXTS))]
    evaluated = PromptSet("made up", prompts, TEXTS)
    tuning = PromptSet("made up", prompts[:2], [[7, 8, 9, 7, 8], [11, 3]])
    plan = Plan(None, 3, len(TEXTS))
    short = dataclasses.replace(GREEDY, max_new_tokens=16)
    logs = evaluate(world.target, drafters, evaluated, tuning, short, plan, journal, {})
    report = build_report(*logs)
    for name, draft in report.drafts.items():
        assert draft.lossless.identical == len(TEXTS)
        assert 1 <= draft.gamma <= 3
        # the first token is right
        assert (draft.alpha.mean == 1) == (name in ("itself", "PARD"))
        assert (draft.payoff is None) == name.startswith("n-gram")


def test_a_draft_that_cannot_be_as_long_is_reported_as_it_is(world, made, journal):
    """Mutant: the report has the length that was asked for."""
    names = ["itself", "PARD", "Medusa", "DFlash", "n-gram, then DFlash"]
    prompts = PromptSet("made up", [Prompt("a", prompt="unused")], TEXTS[:1])
    short = dataclasses.replace(GREEDY, max_new_tokens=16)
    drafters, plan = {name: made(name) for name in names}, Plan(8, 3, 1)
    logs = evaluate(world.target, drafters, prompts, prompts.first(0), short, plan, journal, {})
    found = {log.name: (log.gamma, log.about["gamma_policy"]) for log in logs[1]}
    assert [found[name][0] for name in names] == [8, DEPTH, DEPTH, 3, 8]
    assert {policy for length, policy in found.values() if length == 8} == {"fixed"}
    assert {policy for length, policy in found.values() if length < 8} == {AT_LONGEST}
