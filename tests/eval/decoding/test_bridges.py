"""Losslessness of every way to bridge two vocabularies, by enumeration; mutants are caught."""

import dataclasses
import itertools
import json
import random

import pytest
import torch

from align.check import compare
from align.sources import load_model
from align.transplant import transplant
from align.vocab_map import MapError, Retokenizer, VocabMap, build_map
from align.vocabulary import read_vocabulary
from distill.drafters.pruned import KIND
from eval.decoding import verification
from eval.decoding.build import build_decoder
from eval.decoding.drafters import bridged as bridges
from eval.decoding.drafters import loading, pruned, sibling
from eval.decoding.drafters.bridged import MapDrafter, TextDrafter, TextSession
from eval.decoding.drafters.causal_lm import CausalLMDrafter
from eval.decoding.drafters.drafter import Texts
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.pruned import load_compact
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling, warp
from eval.prompts import Prompt
from tests.eval.decoding.enumeration import (
    assert_exact,
    emitted,
    of_target,
    played,
    total_variation,
)

PROMPT = Prompt("p", prompt="unused")
NEVER = frozenset({99})
SAMPLING = Sampling(temperature=1.3, top_k=3)
TARGET = {"tokens": ["a", "b", "ab", "ba"], "merges": [["a", "b"], ["b", "a"]]}
TARGET_ROWS = 6  # two of them padding
# "aa" is the draft's alone, "ba" the target's, and "b" the draft has twice
DRAFT = {
    "tokens": ["aa", "a", "b", "ab"],
    "merges": [["a", "a"], ["a", "b"]],
    "added": [("b", False)],
}
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
    "string": ("intersection", "string", DRAFT, 5),
    "transplant": ("intersection", "transplant", DRAFT, 5),
    "trimmed": ("identical", "direct", TARGET, TARGET_ROWS),
}
KEPT = [0, 1, 3]  # by the trimmed head


def baseline(target, ids, how):
    return decode(target, None, [PROMPT], [ids], how, DraftLength(0))[0]


def alone(target, drafter, ids, how, length):
    return decode(target, drafter, [PROMPT], [ids], how, length)[0]


def make_side(folder, tokens, merges=(), added=(), eos=None):
    """A byte-level tokenizer in a folder of its own, read as one side of a pair."""
    part = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": False,
    }
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    backend = {
        "version": "1.0",
        "added_tokens": [
            {"id": len(tokens) + i, "content": content, "special": special, **flags}
            for i, (content, special) in enumerate(added)
        ],
        "normalizer": None,
        "pre_tokenizer": part,
        "post_processor": None,
        "decoder": part,
        "model": {
            "type": "BPE",
            "unk_token": None,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [*merges],
        },
    }
    folder.mkdir()
    size = len(tokens) + len(added)
    (folder / "tokenizer.json").write_text(json.dumps(backend))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": size}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos} if eos else {}))
    return read_vocabulary(str(folder))


class Slots(list):
    """The one row of a Table's cache."""

    def row(self, row):
        return self

    def bytes_per_token(self):
        return 0


class Table:
    """A model whose logits are fixed for every context; a stale slot of its cache would show.

    certain: a length of context after which only token 0 follows.
    """

    def __init__(self, rows, seed, certain=None):
        self.rows, self.seed, self.certain = rows, seed, certain
        self.context_length, self.known = 32, {}
        self.device, self.dtype = torch.device("cpu"), torch.float32

    def new_cache(self, rows, slots):
        return Slots([None] * slots)

    def logits(self, context):
        if context not in self.known:
            rng = random.Random(f"{self.seed} {context}")
            row = torch.tensor([rng.gauss(0, 1.5) for _ in range(self.rows)])
            row[len(TARGET["tokens"]) :] = float("-inf")  # padding
            if len(context) == self.certain:
                row[1:] = float("-inf")
            self.known[context] = row
        return self.known[context]

    def forward(self, tokens, start, cache, last_only=False, states=None):
        rows = []
        for i, token in enumerate(tokens[0].tolist()):
            cache[start + i] = token
            rows.append(self.logits(tuple(cache[: start + i + 1])))
        return torch.stack(rows)[None][:, -1 if last_only else 0 :]


class Remembered(Table):
    """A real model in the same way: its own logits, each computed once."""

    def __init__(self, model, context_length, embedding=None, int8=False, masks=None):
        super().__init__(model.get_output_embeddings().weight.shape[0], None)
        self.model, self.context_length = model, context_length
        self.embedding = model.get_input_embeddings().weight

    def own_bytes(self):
        return 0

    @torch.no_grad()
    def logits(self, context):
        if context not in self.known:
            self.known[context] = self.model(torch.tensor([context])).logits[0, -1]
        return self.known[context]


@pytest.fixture
def branches(monkeypatch):
    return played(monkeypatch)


IDS = [1, 0, 2]
WARM = Decoding(SAMPLING, NEVER, 4)


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
        if name == "trimmed":
            embedding = target_embedding()
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[KEPT])
            (folder / name / "compact").mkdir()
            KIND.save(folder / name / "compact", model, torch.tensor(KEPT), embedding, "")
    return folder


def target_embedding():
    return torch.randn((TARGET_ROWS, 32), generator=torch.Generator().manual_seed(9))


@pytest.fixture
def target():
    table = Table(TARGET_ROWS, "target", certain=len(IDS))
    table.embedding = target_embedding()
    return table


@pytest.fixture
def load(checkpoints, target, monkeypatch):
    """load(name): the draft of that name, loaded as any run loads it, on decoders that remember."""
    for module in (sibling, pruned):
        monkeypatch.setattr(module, "build_decoder", Remembered)

    def load_it(name):
        relation, strategy, _, _ = BRIDGES[name]
        spec = str(checkpoints / "target")
        whole = Target(spec, None, None, target, NEVER)
        found = load_drafter(str(checkpoints / name), whole, strategy)
        assert (found.vocabulary["relation"], found.vocabulary["strategy"]) == (relation, strategy)
        return found

    return load_it


@pytest.mark.parametrize(
    ("length", "rule"),
    [
        (DraftLength(2), "token"),
        (DraftLength(2), "block"),
        (DraftLength(2, 0.4), "block"),
    ],
)
@pytest.mark.parametrize("name", BRIDGES)
def test_sampled_output_is_the_targets_exactly(branches, target, load, name, length, rule):
    how = dataclasses.replace(WARM, rule=rule)
    assert_exact(branches, target, load(name), [IDS], how, length)


@pytest.mark.parametrize("name", BRIDGES)
def test_greedy_output_is_the_targets(target, load, name):
    draft, how = load(name), Decoding(Sampling(), NEVER, 24)
    for ids in (IDS, [3]):
        expected = baseline(target, ids, how)
        for gamma, stop_below in itertools.product((1, 3, 8), (0.0, 0.05)):
            run = alone(target, draft, ids, how, DraftLength(gamma, stop_below))
            assert run.tokens == expected.tokens
            assert sum(run.drafted) > 0


@pytest.mark.parametrize("name", [name for name in BRIDGES if name != "trimmed"])
def test_no_strategy_changes_the_model_it_is_given(checkpoints, target, load, monkeypatch, name):
    given = load_model(str(checkpoints / name), torch.float32)
    before = {key: tensor.clone() for key, tensor in given.state_dict().items()}
    configs = (given.config.to_dict(), given.generation_config.to_dict())
    modules = [id(module) for module in given.modules()]
    monkeypatch.setattr(loading, "load_model", lambda spec, dtype: given)
    how = Decoding(SAMPLING, NEVER, 24)
    alone(target, load(name), IDS, how, DraftLength(2))
    assert before.keys() == given.state_dict().keys()
    assert all(tensor.equal(before[key]) for key, tensor in given.state_dict().items())
    assert configs == (given.config.to_dict(), given.generation_config.to_dict())
    assert modules == [id(module) for module in given.modules()]


# --- mutants that change the output


def unwarped(branches, monkeypatch):
    """q is the softmax of the logits, though a warped one was sampled from."""
    original = CausalLMDrafter.over_target_ids
    monkeypatch.setattr(
        CausalLMDrafter,
        "over_target_ids",
        lambda self, q: original(self, (q.clamp_min(1e-9).log() * 1.3).softmax(-1)),
    )


def tokens_shifted(branches, monkeypatch):
    """Drafted tokens are named one row further on than q says."""
    monkeypatch.setattr(
        CausalLMDrafter, "to_target_ids", lambda self, rows: self.token_ids.roll(1)[rows]
    )


def draft_probability_for_q(branches, monkeypatch):
    """The string-level draft's tokens are verified as if they had been drawn from a flat q."""

    def verify(p, draft_tokens, *rest):
        q = torch.full_like(p[:, :-1], 1 / p.shape[-1])
        return verification.verify_sampled(p, q, draft_tokens, *rest)

    monkeypatch.setattr(verification, "verify_without_q", verify)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [
        ("direct", unwarped),
        ("subset, moved", tokens_shifted),
        ("string", draft_probability_for_q),
        ("transplant", unwarped),
    ],
)
def test_a_broken_bridge_is_caught(branches, target, load, monkeypatch, name, mutant):
    draft = load(name)
    mutant(branches, monkeypatch)
    answers, *_ = emitted(branches, target, draft, [IDS], WARM, DraftLength(2))
    assert total_variation(answers, of_target(target, IDS, WARM)) > 1e-4


# --- what is drafted is what the draft says; mutants that leave the output exact are caught


def plain_q(name, model, context, sampling):
    """q after `context` [V] by the stock model and the tables above, token by token."""
    _, strategy, words, _ = BRIDGES[name]
    own = [*words["tokens"], *(word for word, _ in words.get("added", []))]
    if name == "trimmed":
        own = [own[i] for i in KEPT]
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


@torch.no_grad()
def check_q(name, folder, draft):
    """What is drafted after every stretch of a text, and while it grows, is what the draft says."""
    if name == "trimmed":
        model, _ = load_compact(folder / name / "compact", target_embedding())
    else:
        model = load_model(str(folder / name), torch.float32)
    text = [0, 3, 2, 3, 1, 0, 3, 3, 2, 1, 1, 0]
    samplings = [SAMPLING, Sampling(1.0)]
    found = draft.teacher_forced(IDS, text, samplings, {})
    for sampling, forced in zip(samplings, found, strict=True):
        generator = torch.Generator().manual_seed(0)
        session = draft.start(Texts([IDS], 32, sampling, generator, [{}]))
        for at, token in enumerate(text):
            expected = plain_q(name, model, [*IDS, *text[:at]], sampling)
            proposal = session.propose(1, 0.0)
            session.commit([[token]], [int(proposal.tokens[0, 0] == token)], {})
            for q in (forced[0, at], proposal.q[0, 0]):
                torch.testing.assert_close(q, expected, atol=1e-5, rtol=1e-4)
                assert q[expected == 0].sum() == 0


BY_TOKEN = [name for name in BRIDGES if name != "string"]


@pytest.mark.parametrize("name", BY_TOKEN)
def test_q_is_the_drafts_own_over_the_shared_tokens(checkpoints, load, name):
    check_q(name, checkpoints, load(name))


def test_a_draft_by_map_is_as_certain_as_its_mass_on_shared_tokens_allows(load):
    draft = load("intersection")
    logits = torch.tensor([[1.0, 3.0, -2.0, 0.5, 2.0]])
    assert draft.mapped.tolist() == [1, 2, 3, 4]  # not "aa"
    chosen = torch.tensor([0])  # of these: the head's row 1
    whole = float(logits.softmax(-1)[0, 1])

    def certainty(draft, logits):
        return draft.certainty(draft.cut(logits).float().softmax(-1), chosen, logits)

    assert float(certainty(draft, logits)) == pytest.approx(whole)
    assert certainty(draft, logits.bfloat16()) == certainty(draft, logits)
    plain = certainty(load("direct"), logits[:, :4])
    assert float(plain) == pytest.approx(float(logits[:, :4].softmax(-1)[0, 0]))


def bonus_unmapped(monkeypatch):
    """A token that the draft lacks reaches it as nothing."""
    pieces = Retokenizer.of_token
    monkeypatch.setattr(
        Retokenizer,
        "of_token",
        lambda self, i: pieces(self, i) if self.vocab_map.to_draft[i] >= 0 else [],
    )


def map_shifted(monkeypatch):
    """Every token of the draft goes to the target's next one, in drafts and in q alike."""
    build = bridges.build_map

    def shifted(*sides):
        found = build(*sides)
        to_target = torch.where(found.to_target < 0, -1, (found.to_target + 1) % 4)
        return dataclasses.replace(found, to_target=to_target, to_draft=found.to_draft.roll(1))

    for module in (bridges, sibling):
        monkeypatch.setattr(module, "build_map", shifted)


@pytest.mark.parametrize(
    ("name", "mutant"),
    [("subset, moved", bonus_unmapped), ("intersection", map_shifted), ("transplant", map_shifted)],
)
def test_a_draft_that_says_something_else_is_caught(checkpoints, load, monkeypatch, name, mutant):
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check_q(name, checkpoints, load(name))


# --- greedy, with real models and tokenizers

LETTERS = [chr(ord("a") + i) for i in range(26)]
PAIRS = [[a, b] for a in "aeiou" for b in "nrst"]


def intersection(sides, model, rows=42):
    target, draft = sides
    return MapDrafter(target=target, draft=draft, decoder=model, vocab_size=rows, vocabulary={})


def by_text_of(target, draft, model, rows=42):
    return TextDrafter(target=target, draft=draft, decoder=model, vocab_size=rows, vocabulary={})


@pytest.fixture(scope="module")
def lettered(tmp_path_factory):
    """Two vocabularies of letters and pairs of letters that share some, in other orders."""
    folder = tmp_path_factory.mktemp("lettered")
    mine, theirs = PAIRS[:14], PAIRS[6:]
    target = make_side(
        folder / "target",
        LETTERS + ["".join(pair) for pair in mine],
        mine,
        [("<s>", True), ("</s>", True)],
        "</s>",
    )
    draft = make_side(
        folder / "draft",
        ["".join(pair) for pair in theirs] + LETTERS[::-1],
        theirs,
        [("<|end|>", True)],
        "<|end|>",
    )
    return target, draft


@pytest.fixture(scope="module")
def bridged(lettered, tiny_llama):
    """The target's decoder, and drafts of one model by every strategy that fits the pair."""
    target, draft = lettered
    own = build_decoder(tiny_llama(0, spread=4, vocab_size=len(target.tokens)), 120)
    model = tiny_llama(3, spread=4, vocab_size=len(draft.tokens))
    model.config.pard_token = 3
    rehomed = transplant(model, build_map(target, draft), target, draft, len(target.tokens))
    assert not hasattr(rehomed.config, "pard_token")  # its row is another token's
    return own, {
        "intersection": intersection(lettered, build_decoder(model, 240)),
        "string": by_text_of(target, draft, build_decoder(model, 240)),
        "transplant": CausalLMDrafter(
            decoder=build_decoder(rehomed, 120), vocab_size=42, vocabulary={}
        ),
        "self as text": by_text_of(target, target, own),
        "self by map": intersection((target, target), own),
        "short of room": intersection(lettered, build_decoder(model, 20)),
        "text, short of room": by_text_of(target, draft, build_decoder(model, 20)),
    }


NAMES = ["intersection", "string", "transplant", "self as text", "self by map"]
CRAMPED = ["short of room", "text, short of room"]


@pytest.mark.parametrize("name", NAMES + CRAMPED)
def test_greedy_tokens_are_the_targets_own(bridged, name):
    target, drafts = bridged
    how = Decoding(Sampling(), NEVER, 50)
    ids = [0, 13, 27, 4, 30]
    expected = baseline(target, ids, how)
    for gamma, stop_below in ((1, 0.0), (3, 0.05), (8, 0.0), (8, 0.05)):
        run = alone(target, drafts[name], ids, how, DraftLength(gamma, stop_below))
        assert run.tokens == expected.tokens
        assert sum(run.drafted) > 0
        if name == "self by map" and not stop_below:
            assert sum(run.accepted) == sum(run.drafted)
        if name in CRAMPED:
            assert run.drafted[-1] == 0  # its own ids outran its context; the text went on


@pytest.mark.parametrize("name", NAMES + CRAMPED)
def test_rows_of_a_batch_draft_in_their_own_ids_each(bridged, name):
    """Rows propose unequal numbers of tokens; each text is still the target's own."""
    target, drafts = bridged
    texts, how = [[0, 13, 27, 4, 30], [5], [2, 2, 17, 9], [33, 1]], Decoding(Sampling(), NEVER, 30)
    prompts = [Prompt(str(i), prompt="unused") for i in range(len(texts))]
    expected = [baseline(target, text, how).tokens for text in texts]
    for length in (DraftLength(4), DraftLength(6, 0.05)):
        runs = decode(target, drafts[name], prompts, texts, how, length)
        assert [run.tokens for run in runs] == expected
        if name == "transplant" and length.stop_below:
            continue  # its rows share each step, and stop together
        for run, text in zip(runs, texts, strict=True):
            single = alone(target, drafts[name], text, how, length)
            ends = [1 + sum(single.block_tokens[:i]) for i in range(len(single.block_tokens))]
            whole = sum(30 - end - 1 >= length.gamma for end in ends)  # room for a whole draft
            assert run.accepted[:whole] == single.accepted[:whole]
            assert run.drafted[:whole] == single.drafted[:whole]


def test_a_stop_inside_a_draft_ends_the_text(bridged):
    target, drafts = bridged
    ids = [0, 13, 27, 4, 30]
    text = baseline(target, ids, Decoding(Sampling(), NEVER, 40)).tokens
    for at in (1, 5, 9):
        how = Decoding(Sampling(), frozenset({text[at]}), 40)
        for draft in drafts.values():
            run = alone(target, draft, ids, how, DraftLength(5))
            assert run.tokens == text[: text.index(text[at]) + 1]


def test_the_string_session_feeds_the_text_as_the_draft_would_write_it(lettered, bridged):
    target, draft = lettered
    _, drafts = bridged
    session = TextSession(drafts["string"], [0, 13], Sampling(), torch.Generator())
    ids = [0, 13]
    rng = random.Random(1)
    for _ in range(60):
        proposal = session.propose(4, 0.0).tokens[0].tolist()
        emitted = [*proposal[: rng.randrange(5)], rng.randrange(40)]
        session.extend(emitted)
        ids += emitted
        text = target.bytes_of(ids)
        assert draft.bytes_of(session.ids) == text
        if len(ids) < 16:  # later a cut may be settled that the whole text would make elsewhere
            assert session.ids == draft.encode(text)


def test_half_a_character_is_held_back(tmp_path, tiny_llama):
    units = [chr(c) for c in range(0x100, 0x144)] + [chr(c) for c in range(0x21, 0x7F)]
    units += [chr(c) for c in (*range(0xA1, 0xAD), *range(0xAE, 0x100))]
    side = make_side(tmp_path / "bytes", units)
    model = build_decoder(tiny_llama(1, spread=4, vocab_size=len(units)), 200)
    drafter = by_text_of(side, side, model)
    session = TextSession(drafter, side.encode(b"a"), Sampling(), torch.Generator())
    emoji = side.encode("👩‍👩‍👧".encode())
    assert len(emoji) == 18
    for i, token in enumerate(emoji):
        session.extend([token])
        whole = len(side.bytes_of(session.ids)) - 1
        assert (whole, len(session.held)) == (i + 1 - len(session.held), len(session.held))
        assert len(session.held) < 4
        assert session.held == ("👩‍👩‍👧".encode()[whole : i + 1])
        session.propose(2, 0.0)
    assert session.held == b""


def test_special_tokens_that_both_have_are_no_text(tmp_path, tiny_llama):
    target = make_side(tmp_path / "t", ["a", "b"], added=[("<|x|>", True)])
    draft = make_side(tmp_path / "d", ["b", "a", "<", "|", "x", ">"], added=[("<|x|>", True)])
    model = build_decoder(tiny_llama(1, vocab_size=7), 50)
    drafter = by_text_of(target, draft, model)
    session = TextSession(drafter, [0, 2, 2, 1], Sampling(), torch.Generator())
    assert session.ids == [1, 6, 6, 0]


@pytest.mark.parametrize("name", NAMES)
def test_alpha_is_taken_before_every_token(bridged, name):
    target, drafts = bridged
    ids, text = [0, 13, 27], [4, 30, 2, 2, 28, 9]
    (q,) = drafts[name].teacher_forced(ids, text, [Sampling(1.0)], {})
    assert q.shape == (1, 6, 42)
    assert ((q.sum(-1) - 1).abs() < 1e-5).all()
    if name.startswith("self by"):
        for i in range(len(text)):
            context = torch.tensor([[*ids, *text[:i]]])
            cache = target.new_cache(1, 20)
            logits = target.forward(context, 0, cache, last_only=True)[0, -1]
            cut = drafts[name].to_target_ids(torch.arange(42))
            assert cut.tolist() == [*range(42)]
            torch.testing.assert_close(q[0, i], logits.softmax(-1), atol=1e-5, rtol=1e-4)


def test_a_draft_that_cannot_spell_every_token_reads_on_without_them(tmp_path, tiny_llama):
    target = make_side(tmp_path / "t", [*"abcdefgh"])
    draft = make_side(tmp_path / "d", [*"hgfeab"])  # no c, no d
    own = build_decoder(tiny_llama(0, spread=6, vocab_size=8), 80)
    model = build_decoder(tiny_llama(1, spread=6, vocab_size=6), 160)
    how = Decoding(Sampling(1.5), NEVER, 40, seed=3)
    for ids in ([0, 2, 5], [2, 3, 3]):  # the second is nothing at all to the draft
        bridges = intersection((target, draft), model, 8), by_text_of(target, draft, model, 8)
        for bridge in bridges:
            run = alone(own, bridge, ids, how, DraftLength(3))
            assert len(run.tokens) == 40
            assert sum(run.accepted) > 0
            assert {2, 3} & set(run.tokens)
            (q,) = bridge.teacher_forced(ids, run.tokens, [how.sampling], {})
            assert q[..., 2:4].sum() == 0


@pytest.mark.parametrize("accepted", range(4))
def test_after_a_rejection_a_draft_by_map_drafts_as_if_it_had_read_the_text_alone(
    bridged, accepted
):
    """The target's own token is none of the draft's: it is read in pieces, the first over a slot
    where a rejected token stood.
    """
    draft = bridged[1]["intersection"]

    def session(ids):
        generator = torch.Generator().manual_seed(1)
        return draft.start(Texts([ids], 100, Sampling(1.0), generator, [{}]))

    ids = [0, 13, 27, 4, 30]
    going_on = session(ids)
    proposed = going_on.propose(4, 0.0).tokens[0].tolist()
    emitted = [*proposed[:accepted], 26]  # "an", of which the draft has the letters alone
    going_on.commit([emitted], [accepted], {})
    fresh = session([*ids, *emitted])
    for sessions in (going_on, fresh):
        sessions.sessions[0].generator.manual_seed(2)
    drafts = going_on.propose(3, 0.0), fresh.propose(3, 0.0)
    assert drafts[0].tokens.tolist() == drafts[1].tokens.tolist()
    torch.testing.assert_close(drafts[0].q, drafts[1].q)


def test_where_its_context_ends_a_draft_says_nothing(bridged):
    _, drafts = bridged
    (q,) = drafts["short of room"].teacher_forced([0] * 18, [26, 27, 28, 29], [Sampling(1.0)], {})
    assert q.sum(-1)[0].round().tolist() == [1, 1, 0, 0]


# --- remap and transplant


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


def test_remapped_logits_are_the_old_ones_in_the_targets_order(shuffled, model):
    target, draft = shuffled
    verdict = compare(target, draft)
    assert (verdict.relation, verdict.strategy, verdict.tuned_strategy) == (
        "permuted",
        "remap",
        "remap",
    )
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    vocab_map = build_map(target, draft)
    moved = transplant(model, vocab_map, target, draft, 40)
    ids = torch.tensor([[3, 1, 4, 1, 5, 26, 9]])
    old = model(vocab_map.to_draft[ids]).logits
    assert torch.equal(moved(ids).logits[..., :27], old[..., vocab_map.to_draft])
    assert moved.config.vocab_size == 40
    assert (moved.get_output_embeddings().weight is moved.get_input_embeddings().weight) == (
        model.config.tie_word_embeddings
    )
    # the model given is what it was
    assert model.config.vocab_size == 50
    assert before.keys() == model.state_dict().keys()
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_an_inverted_permutation_is_caught(shuffled, model):
    target, draft = shuffled
    right = build_map(target, draft)
    wrong = VocabMap(right.to_draft, right.to_target)
    moved = transplant(model, wrong, target, draft, 27)
    ids = torch.tensor([[3, 1, 4, 1, 5, 26, 9]])
    old = model(right.to_draft[ids]).logits
    assert not torch.allclose(moved(ids).logits, old[..., right.to_draft], atol=0.1)


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


def test_a_head_bias_or_a_soft_cap_is_refused(shuffled, tiny_llama):
    target, draft = shuffled
    model = tiny_llama(5, vocab_size=50)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(50))
    with pytest.raises(MapError, match=r"TOK-012: .*has a bias.*use strategy intersection"):
        transplant(model, build_map(target, draft), target, draft, 27)
    draft.config["final_logit_softcapping"] = 30.0
    with pytest.raises(MapError, match=r"TOK-012: .*softcapping.*use strategy"):
        transplant(tiny_llama(5, vocab_size=50), build_map(target, draft), target, draft, 27)


def test_too_few_rows_are_refused(shuffled, tiny_llama):
    target, draft = shuffled
    with pytest.raises(MapError, match=r"TOK-002: 20 rows .*ids up to 26"):
        transplant(tiny_llama(5, vocab_size=50), build_map(target, draft), target, draft, 20)
