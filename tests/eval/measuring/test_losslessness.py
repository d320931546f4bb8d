"""Greedy texts compared, on tiny models whose answers are known: alone and in batches."""

import dataclasses

import pytest

from eval.decoding.batched import decode_batch
from eval.decoding.drafting import Draft
from eval.decoding.drafts import Target
from eval.decoding.forward import build_decoder
from eval.decoding.loop import Decoding, DraftLength, decode_baseline
from eval.decoding.verification import Sampling
from eval.measuring.losslessness import LosslessCheck
from eval.prompts import Prompt

VOCAB = 40
NEVER = frozenset({VOCAB + 1})
PROMPTS = [Prompt(f"p{i}", prompt="unused") for i in range(3)]
IDS = [[3, 14, 15], [9, 2], [6, 5, 35, 8]]
ALONE = [([prompt], [ids]) for prompt, ids in zip(PROMPTS, IDS, strict=True)]
TOGETHER = [(PROMPTS, IDS)]
GREEDY = Decoding(Sampling(), NEVER, 20)
LENGTH = DraftLength(3)


@pytest.fixture(scope="module")
def target(tiny):
    model = tiny(0, VOCAB)
    return Target("tiny", model, None, build_decoder(model, 100), NEVER)


def baselines(target):
    return [[decode_baseline(target.decoder, *prompts, *ids, GREEDY)] for prompts, ids in ALONE]


def changed(run, at):
    tokens = list(run.tokens)
    tokens[at] = (tokens[at] + 1) % VOCAB
    return dataclasses.replace(run, tokens=tokens)


def check(target, runs, batches=ALONE, draft=None):
    """The ledger of runs against the target alone, decoded in the same batches."""
    base = baselines(target)
    if batches is TOGETHER:
        base = [decode_batch(target.decoder, None, PROMPTS, IDS, GREEDY, LENGTH)]
    found = LosslessCheck(target, GREEDY, LENGTH)
    return found.ledger(draft or Draft(target.decoder), batches, base, runs)


def test_identical_runs_are_identical(target):
    assert check(target, baselines(target)) == {
        "prompts": 3,
        "identical": 3,
        "tie_divergences": 0,
        "unexplained": 0,
        "divergences": [],
    }


def test_another_token_where_nothing_ties_is_unexplained(target):
    base = baselines(target)
    other = changed(*base[1], 7)
    counts = check(target, [base[0], [other], base[2]])
    (entry,) = counts.pop("divergences")
    assert counts == {"prompts": 3, "identical": 2, "tie_divergences": 0, "unexplained": 1}
    assert (entry["prompt"], entry["position"], entry["tie"]) == ("p1", 7, False)
    assert entry["target"] == [base[1][0].tokens[7]]
    assert entry["drafted"] == [other.tokens[7]]
    assert entry["gap"] > entry["error"] >= 0


def test_a_text_that_is_cut_short_is_unexplained(target):
    first, *others = baselines(target)
    short = dataclasses.replace(*first, tokens=first[0].tokens[:-1])
    assert check(target, [[short], *others])["unexplained"] == 1


class Duplicated:
    """A target whose logits for two tokens are always equal up to the noise of wide forwards."""

    def __init__(self, decoder, noise):
        self.decoder, self.noise = decoder, noise
        self.device, self.context_length = decoder.device, decoder.context_length
        self.new_cache = decoder.new_cache

    def forward(self, tokens, start, cache, last_only=False):
        logits = self.decoder.forward(tokens, start, cache, last_only).clone()
        best = logits.argmax(-1, keepdim=True)
        partner = (best + 1) % VOCAB
        gap = self.noise if tokens.shape[1] > 1 else -self.noise  # the order hangs on the width
        return logits.scatter(-1, partner, logits.gather(-1, best) + gap)


def test_a_tie_is_explained_only_when_fp32_agrees(target):
    tied = dataclasses.replace(target, decoder=Duplicated(target.decoder, 1e-3))
    base = baselines(tied)
    # the partner of the likeliest token, at a gap of 1e-3, in blocks of two
    wide = dataclasses.replace(changed(*base[0], 5), drafted=[1] * 19)
    runs = [[wide], *base[1:]]
    assert check(tied, runs)["tie_divergences"] == 1
    # the same divergence, but an exact decoder that itself gives other tokens with a draft
    found = LosslessCheck(tied, GREEDY, LENGTH)
    found.exact = Duplicated(target.decoder, 1e-3)
    assert found.ledger(Draft(target.decoder), ALONE, base, runs)["unexplained"] == 1


def test_ties_of_a_batch_are_explained_row_by_row(target, tiny):
    draft = Draft(build_decoder(tiny(1, VOCAB), 100))
    tied = dataclasses.replace(target, decoder=Duplicated(target.decoder, 1e-3))
    runs = decode_batch(tied.decoder, draft, PROMPTS, IDS, GREEDY, LENGTH)
    counts = check(tied, [runs], TOGETHER, draft)
    assert counts["tie_divergences"] == 3
    for entry in counts["divergences"]:
        assert entry["gap"] == pytest.approx(1e-3, rel=1e-2)
        assert entry["error"] == pytest.approx(2e-3, rel=1e-2)  # below in one, above in the other


def test_a_changed_word_of_a_batch_is_unexplained(target, tiny):
    draft = Draft(build_decoder(tiny(1, VOCAB), 100))
    runs = decode_batch(target.decoder, draft, PROMPTS, IDS, GREEDY, LENGTH)
    assert check(target, [runs], TOGETHER, draft)["identical"] == 3
    runs[2] = changed(runs[2], 9)
    counts = check(target, [runs], TOGETHER, draft)
    assert (counts["identical"], counts["unexplained"]) == (2, 1)
    assert counts["divergences"][0]["prompt"] == "p2"


@pytest.mark.parametrize("draft_seed", [0, 1])
def test_a_replayed_batch_gives_the_logits_that_were_decoded_with(target, tiny, draft_seed):
    """Rows that end at different times, so that the batch closes up: bit by bit the same logits."""
    seen = {}

    class Watched(Duplicated):
        def forward(self, tokens, start, cache, last_only=False):
            logits = self.decoder.forward(tokens, start, cache, last_only)
            starts = start.tolist() if hasattr(start, "tolist") else [start] * len(tokens)
            for row, at in enumerate(starts):
                for i, after in enumerate(logits[row]):
                    # kept once: a later block may begin where a rejected one stood
                    key = (tuple(tokens[row, : i + 1].tolist()), at + i)
                    seen.setdefault(key, []).append(after)
            return logits

    stops = frozenset({decode_baseline(target.decoder, PROMPTS[0], IDS[0], GREEDY).tokens[6]})
    how = dataclasses.replace(GREEDY, stops=stops)
    draft = Draft(build_decoder(tiny(draft_seed, VOCAB), 100))
    watched = dataclasses.replace(target, decoder=Watched(target.decoder, 0))
    runs = decode_batch(watched.decoder, draft, PROMPTS, IDS, how, LENGTH)
    lengths = [len(run.tokens) for run in runs]
    assert len(set(lengths)) > 1
    decoded = [after for rows in seen.values() for after in rows]
    seen.clear()
    for at in range(max(lengths)):
        wanted = {row: at for row, length in enumerate(lengths) if at < length}
        found = LosslessCheck(target, how, LENGTH)._logits_at(wanted, IDS, runs)
        assert sorted(found) == sorted(wanted)
        for row, logits in found.items():
            assert int(logits.argmax()) == runs[row].tokens[at]
            assert any(logits.equal(after) for after in decoded)
