"""The loop of one text: what a step logs, where a text ends, what its random numbers depend on."""

from types import SimpleNamespace

import pytest
import torch

from eval.decoding import loop
from eval.decoding.build import build_decoder
from eval.decoding.drafters.drafter import Proposal, no_draft
from eval.decoding.loop import Decoding, _emit, decode
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Sampling
from eval.prompts import Prompt

VOCAB = 61
NEVER = frozenset({VOCAB + 1})
PROMPT = Prompt("p", prompt="unused")
IDS = [3, 14, 15, 9, 2]


@pytest.fixture(scope="module")
def target(tiny, forwards):
    return build_decoder(tiny(0), 80)


@pytest.mark.parametrize(
    ("accepted", "stop", "emitted", "drafted"),
    [
        (0, 9, [9], 3),  # the target's own token ends the text: nothing is accepted for it
        (1, 9, [5, 9], 3),
        (3, 9, [5, 6, 7, 9], 3),
        (2, 6, [5, 6], 2),  # a drafted token ends the text, and with it the draft
        (3, 5, [5], 1),
    ],
)
def test_a_text_ends_at_a_drafted_token_or_at_the_targets_own(accepted, stop, emitted, drafted):
    run = PromptRun.of(PROMPT, 4, [0.1], [[1]])
    given = run, [5, 6, 7], accepted, 9, 20, 3
    assert _emit(*given, frozenset({-1, stop, 99})) == emitted
    assert run.tokens == [1, *emitted]
    assert (run.drafted, run.block_tokens) == ([drafted], [len(emitted)])
    assert run.accepted == [min(accepted, drafted)]
    run.block_seconds.append(0.1)
    assert run.problem() is None


def test_copied_tokens_behind_the_end_of_a_text_are_not_counted(target):
    tokens = decode(target, None, PROMPT, IDS, Decoding(Sampling(), NEVER, 20)).tokens
    end = next(i for i in range(2, 20) if tokens[i] not in tokens[:i])
    drafts = (Proposal(torch.tensor(tokens[at : at + 3]), free=True) for at in range(1, 20, 4))
    session = SimpleNamespace(propose=lambda _: next(drafts), commit=lambda *_: None)
    copying = SimpleNamespace(layers=(), start=lambda text: session)
    stopped = Decoding(Sampling(), frozenset({tokens[end]}), 20)
    run = decode(target, copying, PROMPT, IDS, stopped, 3)
    assert run.tokens == tokens[: end + 1]
    assert end % 4 not in (0, 3)  # it is copied, and another token behind it
    assert run.free[-1] == run.drafted[-1] == end % 4


def test_the_first_token_comes_after_the_draft_has_read_the_prompt(target, monkeypatch):
    """As a server's does."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    nothing = no_draft(target.device)
    session = SimpleNamespace(propose=lambda _: nothing, commit=lambda *_: None)

    def start(text):
        clock.now += 5
        return session

    reading = SimpleNamespace(layers=(), start=start)
    run = decode(target, reading, PROMPT, IDS, Decoding(Sampling(), NEVER, 3))
    assert (run.prefill_seconds, run.block_seconds) == (5, [0, 0])


def test_steps_that_had_room_for_fewer_are_left_out(target, adversary, drafter):
    """However many tokens they emit: else long steps would be missing in the mean."""
    how, seen = Decoding(Sampling(), NEVER, 12), []
    opposed = drafter(adversary(target))
    run = decode(target, opposed, PROMPT, IDS, how, 4, lambda run: seen.append(len(run.tokens)))
    assert seen == [*range(1, 13)]
    # a token a step: from the eighth step on fewer than four drafted tokens have room
    assert run.block_tokens == [1] * 11
    assert (run.late, run.whole_blocks) == (4, 7)
    assert run.drafted == [4] * 7 + [3, 2, 1, 0]
    for length, late in ((10, 0), (11, 1)):
        run = decode(target, drafter(target), PROMPT, IDS, how, length)
        assert run.late == late


def test_random_numbers_depend_on_the_seed_and_the_prompt(tiny, target, drafter):
    draft = drafter(build_decoder(tiny(1), 80))

    def tokens(name, seed):
        how = Decoding(Sampling(1.5), NEVER, 20, seed)
        return tuple(decode(target, draft, Prompt(name, prompt="x"), IDS, how, 2).tokens)

    drawn = {(name, seed): tokens(name, seed) for name in "ab" for seed in range(10)}
    assert len(set(drawn.values())) == 20
    assert tokens("b", 9) == drawn["b", 9]
