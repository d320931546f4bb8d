"""Prompt lookup: what it drafts, and that the output stays the target's."""

import json

import pytest
import torch

from eval.decoding.drafts import Target
from eval.decoding.forward import build_decoder
from eval.decoding.lookup import LookupDecoder, following, lookup_candidate
from eval.decoding.loop import Decoding, DraftLength, decode_baseline, decode_speculative
from eval.decoding.verification import Sampling
from eval.measuring.evaluation import Plan, PromptSet, evaluate_drafts
from eval.measuring.timing import measure_agreement, target_texts
from eval.prompts import Prompt

VOCAB = 40
GREEDY = Decoding(Sampling(), frozenset({VOCAB + 1}), 40)
PROMPTS = [Prompt(f"p{i}", prompt="unused") for i in range(3)]
IDS = [[3, 14, 15, 9, 3, 14], [9, 2], [6, 5, 35, 8, 6, 5]]


@pytest.fixture(scope="module")
def target(tiny_llama):
    model = tiny_llama(0, spread=4, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None)
    return Target("tiny", model, None, build_decoder(model, 100), GREEDY.stops)


@pytest.mark.parametrize(
    ("text", "token"),
    [
        ([1, 2, 3, 9, 1, 2, 3], 9),
        ([1, 2, 3, 8, 2, 3, 7, 1, 2, 3], 8),  # three tokens go before two
        ([5, 1, 7, 1], 7),
        ([5, 1, 6, 5, 1, 7, 5, 1], 7),  # the latest place
        ([4, 4, 4], 4),
        ([1, 2, 3], None),
        ([1], None),
    ],
)
def test_what_followed_the_last_tokens_before(text, token):
    assert following(text) == token


def test_rolling_back_forgets_what_was_not_accepted(target):
    decoder = LookupDecoder(target)
    cache = decoder.new_cache(1, 50)
    decoder.forward(torch.tensor([[1, 2, 3, 1]]), 0, cache, last_only=True)
    logits = decoder.forward(torch.tensor([[2]]), 4, cache)
    assert int(logits[0, -1].argmax()) == 3
    decoder.forward(torch.tensor([[9]]), 4, cache)
    assert cache.texts == [[1, 2, 3, 1, 9]]
    assert decoder.forward(torch.tensor([[7]]), 5, cache).unique().tolist() == [0.0]


def test_a_whole_text_at_once_gives_what_its_tokens_give_one_by_one(target):
    decoder = LookupDecoder(target)
    text = [1, 2, 1, 2, 3, 1, 2]
    whole = decoder.forward(torch.tensor([text]), 0, decoder.new_cache(1, 50))
    cache = decoder.new_cache(1, 50)
    single = [decoder.forward(torch.tensor([[t]]), i, cache)[0, 0] for i, t in enumerate(text)]
    assert torch.equal(whole[0], torch.stack(single))


@pytest.mark.parametrize("length", [DraftLength(1), DraftLength(4), DraftLength(4, 0.4)])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_is_the_targets_own(target, length, temperature):
    how = Decoding(Sampling(temperature), GREEDY.stops, 40)
    draft = lookup_candidate("rival", target).draft
    accepted = 0
    for prompt, ids in zip(PROMPTS, IDS, strict=True):
        base = decode_baseline(target.decoder, prompt, ids, how)
        run = decode_speculative(target.decoder, draft, prompt, ids, how, length)
        accepted += sum(run.accepted)
        assert len(run.tokens) == 40
        if temperature == 0:
            assert run.tokens == base.tokens
    if temperature == 0:
        assert accepted > 0


def test_alpha_counts_the_tokens_it_would_have_got(target, journal):
    texts = target_texts(target, IDS, GREEDY)
    draft = lookup_candidate("rival", target).draft
    (found,), _ = measure_agreement(target, [draft], PROMPTS, IDS, texts, Sampling(), journal)
    for row, ids, text in zip(found, IDS, texts, strict=True):
        right = [following(ids + text[:at]) for at in range(len(text))]
        # where nothing is found, the likeliest of equals is token 0
        assert row.alpha_sum == sum((r or 0) == t for r, t in zip(right, text, strict=True))


class Spelling:
    """A tokenizer of letters, as far as a report needs one."""

    is_fast = True

    class backend_tokenizer:
        @staticmethod
        def to_str():
            vocab = {chr(0x41 + i): i for i in range(VOCAB)}
            model = {"type": "BPE", "vocab": vocab}
            return json.dumps({"model": model, "decoder": {"type": "ByteLevel"}})


def test_it_stands_in_a_report_like_any_draft(target, journal):
    target.tokenizer = Spelling()
    candidates = [lookup_candidate("rival", target), lookup_candidate("again", target)]
    prompts = PromptSet("made up", PROMPTS, IDS)
    report = evaluate_drafts(
        target,
        candidates,
        prompts,
        prompts,
        GREEDY,
        Plan(None, 3, 3, sweep_prompts=2),
        journal,
        None,
        {"command": "test"},
        others=PromptSet("elsewhere", PROMPTS[:2], IDS[:2]),
    )
    rival = report["drafts"]["rival"]
    assert rival["memory"]["overhead"] == 0
    assert rival["vocabulary"]["strategy"] == "prompt lookup"
    assert [point["gamma"] for point in rival["gamma_sweep"]] == [1, 2, 3]
    assert rival["other_prompts"]["source"] == "elsewhere"
    assert rival["other_prompts"]["alpha"]["n"] == 2
    assert rival["lossless"]["identical"] == 3
    assert report["prompts"]["random_bits"] == round(5.321928, 2)
    assert "".join(rival["atlas"]["heat_map"][0]["tokens"]).isascii()
    assert report["decoding"]["ended_by_stop"] == 0
