"""A draft of several tokens in one pass: lossless, and its masks stand where they should."""

import itertools

import pytest
import torch

from eval.decoding.build import build_decoder
from eval.decoding.drafters import parallel
from eval.decoding.drafters.in_turn import SequentialHead
from eval.decoding.drafters.lookup_first import lookup_first
from eval.decoding.drafters.parallel import ParallelDrafter
from eval.decoding.forward import KVCache
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.stock import StockDecoder
from eval.decoding.verification import Sampling
from eval.prompts import Prompt
from tests.eval.decoding.enumeration import assert_exact, played

VOCAB, DEPTH, CONTEXT, LONGEST = 61, 4, 90, 40
NEVER = frozenset({VOCAB + 1})
GREEDY = Decoding(Sampling(), NEVER, LONGEST)
PROMPTS = [Prompt(str(i), prompt="unused") for i in range(5)]
IDS = [[3, 14, 15, 9, 2], [7], [1, 2, 1, 2, 1, 2, 1, 2, 5], [30, 31], [8, 50, 60, 0, 44, 12, 12]]


def sequential(rows, rank=4):
    generator = torch.Generator().manual_seed(3)
    read = torch.randn((rows + 1, rank), generator=generator)
    read[-1] = 0
    return SequentialHead(read, torch.randn((rows, rank), generator=generator))


def random_masks():
    return torch.randn((DEPTH - 1, 32), generator=torch.Generator().manual_seed(9))


@pytest.fixture(scope="module")
def target(tiny):
    return build_decoder(tiny(0), CONTEXT)


@pytest.fixture(scope="module")
def drafts(tiny):
    """random, good at the first token (the target's own), with a trimmed head, of stock modules."""
    kept = torch.arange(0, VOCAB, 2)
    trimmed = tiny(0)
    trimmed.lm_head.weight = torch.nn.Parameter(trimmed.lm_head.weight[kept].clone())
    about = {"vocab_size": VOCAB, "vocabulary": {}, "depth": DEPTH}
    masks = random_masks()
    return {
        "random": ParallelDrafter(decoder=build_decoder(tiny(7), CONTEXT, masks=masks), **about),
        "good": ParallelDrafter(
            decoder=build_decoder(tiny(0), CONTEXT, masks=masks),
            sequential=sequential(VOCAB),
            **about,
        ),
        "trimmed": ParallelDrafter(
            decoder=build_decoder(trimmed, CONTEXT, masks=masks),
            token_ids=kept,
            sequential=sequential(len(kept)),
            **about,
        ),
        "stock": ParallelDrafter(decoder=StockDecoder(tiny(0), CONTEXT, masks=masks), **about),
    }


NAMES = ["random", "good", "trimmed", "stock"]


def texts(target, drafter, rows, length, how=GREEDY):
    return decode(target, drafter, PROMPTS[:rows], IDS[:rows], how, length)


@pytest.fixture(scope="module")
def alone(target):
    """The target's own texts."""
    return [
        decode(target, None, PROMPTS[:1], [ids], GREEDY, DraftLength(0))[0].tokens for ids in IDS
    ]


@pytest.mark.parametrize("stop_below", [0.0, 0.02, 0.3])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_texts_are_the_targets_own(target, drafts, alone, name, rows, stop_below):
    for gamma in (1, 2, 3, DEPTH, DEPTH + 3):
        runs = texts(target, drafts[name], rows, DraftLength(gamma, stop_below))
        assert [run.tokens for run in runs] == alone[:rows]
        assert max(max(run.drafted) for run in runs) <= min(gamma, DEPTH)
        if name == "good":  # its first token is the target's own
            assert sum(sum(run.accepted) for run in runs) > 0


def test_the_lean_and_the_stock_decoder_draft_alike(target, drafts, tiny):
    lean = ParallelDrafter(
        decoder=build_decoder(tiny(0), CONTEXT, masks=random_masks()),
        vocab_size=VOCAB,
        vocabulary={},
        depth=DEPTH,
    )
    for rows in (1, 5):
        one, other = (
            texts(target, draft, rows, DraftLength(DEPTH)) for draft in (lean, drafts["stock"])
        )
        assert [run.accepted for run in one] == [run.accepted for run in other]


def test_behind_prompt_lookup_the_texts_stay_the_same(target, drafts, alone):
    both = lookup_first(drafts["good"])
    for rows in (1, 5):
        runs = decode(target, both, PROMPTS[:rows], IDS[:rows], GREEDY, DraftLength(DEPTH))
        assert [run.tokens for run in runs] == alone[:rows]
        free = sum(sum(run.free) for run in runs)
        assert 0 < free < sum(sum(run.drafted) for run in runs)  # some looked up, some drafted


@pytest.mark.parametrize("name", NAMES)
def test_each_row_of_a_batch_accepts_what_it_accepts_alone(target, drafts, name):
    runs = texts(target, drafts[name], 5, DraftLength(DEPTH))
    for ids, run in zip(IDS, runs, strict=True):
        (single,) = decode(target, drafts[name], PROMPTS[:1], [ids], GREEDY, DraftLength(DEPTH))
        whole = min(run.whole_blocks, single.whole_blocks) - DEPTH
        assert whole > 3
        assert run.accepted[:whole] == single.accepted[:whole]


class Reader:
    """A decoder that keeps the ids it reads, and drafts the target's own text if they stand right.

    At a mask of depth d it looks back: d - 1 masks in order, before them the text, from its first
    token on. Anything else gives token 0 all the mass.
    """

    def __init__(self, target):
        self.target = target
        self.embedding, self.device = target.embedding, target.device
        self.dtype, self.context_length = target.dtype, target.context_length
        self.known = {}

    def own_bytes(self):
        return 0

    def new_cache(self, rows, slots):
        return KVCache([torch.full((rows, 1, slots, 1), -1.0)], [torch.zeros((rows, 1, slots, 1))])

    def forward(self, tokens, start, cache, last_only=False, states=None):
        starts = [start] * len(tokens) if isinstance(start, int) else start.tolist()
        logits = torch.zeros((*tokens.shape, VOCAB))
        for row, at in enumerate(starts):
            slots = cache.keys[0][row, 0, :, 0]
            slots[at : at + tokens.shape[1]] = tokens[row].float()
            for i in range(tokens.shape[1]):
                logits[row, i, self.next(slots[: at + i + 1].long().tolist())] = 9.0
        return logits[:, -1:] if last_only else logits

    def next(self, read):
        text = list(itertools.takewhile(lambda token: token < VOCAB, read))
        masks = read[len(text) :]
        if not text or -1 in text or masks != list(range(VOCAB, VOCAB + len(masks))):
            return 0
        for _ in range(len(masks) + 1):
            text.append(self.greedy(tuple(text)))
        return text[-1]

    def greedy(self, text):
        if text not in self.known:
            cache = self.target.new_cache(1, len(text))
            logits = self.target.forward(torch.tensor([text]), 0, cache, last_only=True)
            self.known[text] = int(logits.argmax())
        return self.known[text]


@pytest.fixture(scope="module")
def perfect(target):
    return ParallelDrafter(decoder=Reader(target), vocab_size=VOCAB, vocabulary={}, depth=DEPTH)


def test_a_draft_that_knows_what_follows_is_accepted_whole(target, perfect):
    for rows in (1, 5):
        for gamma in (2, DEPTH):
            for run in texts(target, perfect, rows, DraftLength(gamma)):
                assert run.accepted == run.drafted
                assert set(run.drafted[:-1]) == {gamma}


def test_masks_of_another_depth_are_caught(target, perfect, monkeypatch):
    def deeper(self, count):
        return list(range(VOCAB + 1, VOCAB + count))

    monkeypatch.setattr(ParallelDrafter, "masks", deeper)
    with pytest.raises(AssertionError):
        test_a_draft_that_knows_what_follows_is_accepted_whole(target, perfect)


@pytest.mark.parametrize("by", [-1, 1])
def test_a_pass_off_by_one_position_is_caught(target, perfect, monkeypatch, by):
    right = parallel.starts

    def shifted(positions):
        return right([max(0, at + by) for at in positions])

    monkeypatch.setattr(parallel, "starts", shifted)
    with pytest.raises(AssertionError):
        test_a_draft_that_knows_what_follows_is_accepted_whole(target, perfect)


def test_a_state_of_the_mask_beside_is_caught(target, perfect, monkeypatch):
    propose = ParallelDrafter.in_turn

    def beside(self, logits, *rest):
        return propose(self, lambda depth, before: logits(max(0, depth - 1), before), *rest)

    monkeypatch.setattr(ParallelDrafter, "in_turn", beside)
    with pytest.raises(AssertionError):
        test_a_draft_that_knows_what_follows_is_accepted_whole(target, perfect)


def test_a_mask_is_read_at_its_own_depth(tiny):
    """The lean decoder with masks is transformers' model on the same embeddings."""
    model, masks = tiny(3), random_masks()
    decoder = build_decoder(model, CONTEXT, masks=masks)
    ids = torch.tensor([[5, 6, 7, VOCAB, VOCAB + 1, VOCAB + 2]])
    embeds = torch.cat([model.model.embed_tokens(ids[:, :3]), masks[None]], dim=1)
    with torch.no_grad():
        expected = model(inputs_embeds=embeds).logits
    found = decoder.forward(ids, 0, decoder.new_cache(1, 8))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_alpha_is_taken_on_the_first_token_which_knows_no_mask(drafts, drafter):
    draft = drafts["good"]
    plain = drafter(draft.decoder)
    for one in (Sampling(), Sampling(0.7)):
        (q,) = draft.teacher_forced([1, 2, 3], [4, 5, 6], [one], {})
        (expected,) = plain.teacher_forced([1, 2, 3], [4, 5, 6], [one], {})
        assert torch.equal(q, expected)


@pytest.mark.parametrize("length", [DraftLength(2), DraftLength(3, 0.25)], ids=str)
def test_sampled_tokens_have_the_targets_distribution(tiny, monkeypatch, length):
    vocab = 6
    target = build_decoder(tiny(0, vocab), 40)
    masks = random_masks()
    draft = ParallelDrafter(
        decoder=build_decoder(tiny(1, vocab), 40, masks=masks),
        vocab_size=vocab,
        vocabulary={},
        depth=DEPTH,
        sequential=sequential(vocab),
    )
    how = Decoding(Sampling(1.5, top_k=2), NEVER, 4)
    assert_exact(played(monkeypatch), target, draft, [[1, 2], [3, 3, 3]], how, length)
