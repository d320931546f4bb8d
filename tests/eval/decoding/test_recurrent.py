"""Targets with linear attention: drafts and rows change no output, and little is read again."""

import dataclasses
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from align.checkpoint import Checkpoint
from eval.decoding.build import build_decoder
from eval.decoding.drafters.drafter import timed_step
from eval.decoding.drafters.lookup import prompt_lookup
from eval.decoding.drafters.mtp import FORMAT
from eval.decoding.generation import Kept, generate_batched
from eval.decoding.loop import Decoding, decode
from eval.decoding.recurrent import StatefulCache
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.prompts import Prompt
from tests.mtp import mtp_config, random_head

NEVER = frozenset({99})
GREEDY = Decoding(Sampling(), NEVER, 30)
PROMPT = Prompt("p", prompt="unused")
TEXTS = [[3, 14, 15, 9, 3, 14], [9], [6, 5, 35, 8, 6, 5, 35], [1, 2], [0, 13, 27, 4, 30]]
FAMILIES = ["qwen3_next", "qwen3_5_text"]


@pytest.fixture(scope="module", params=FAMILIES)
def target(request):
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(mtp_config(request.param)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3 if weight.ndim > 1 else 1)
    return Target(Checkpoint("tiny", Path()), model, build_decoder(model, 90), NEVER)


@pytest.fixture(scope="module")
def own(target):
    return [decode(target.decoder, None, PROMPT, ids, GREEDY).tokens for ids in TEXTS]


@pytest.fixture
def read(monkeypatch):
    """How often each number of inputs was read again."""
    counts, original = Counter(), StatefulCache._read_again

    def counted(cache, layers, row, start):
        counts[start - max(0, cache.begun[row])] += 1
        original(cache, layers, row, start)

    monkeypatch.setattr(StatefulCache, "_read_again", counted)
    return counts


def test_the_baseline_reads_each_token_once(target, own, read):
    model = target.model
    for ids, tokens in zip(TEXTS, own, strict=True):
        assert decode(target.decoder, None, PROMPT, ids, GREEDY).tokens == tokens
        with torch.no_grad():
            logits = model(torch.tensor([ids + tokens[:-1]]), use_cache=False).logits
        assert logits[0, len(ids) - 1 :].argmax(-1).tolist() == tokens
    assert not read


@pytest.mark.parametrize("length", [1, 3, 8])
def test_drafts_change_no_output(target, own, read, length):
    head = random_head(mtp_config(target.model.config.model_type), 2)
    head.set_input_embeddings(target.model.get_input_embeddings())
    rejected = 0
    for drafter in (FORMAT.drafter(head, None, target), prompt_lookup(target)):
        for ids, tokens in zip(TEXTS, own, strict=True):
            run = decode(target.decoder, drafter, PROMPT, ids, GREEDY, length)
            assert run.tokens == tokens
            rejected += sum(a < d for a, d in zip(run.accepted, run.drafted, strict=True))
    assert 0 < sum(read.values()) <= rejected
    assert max(read) <= length + 1  # never the whole text


@pytest.mark.parametrize("rows", [1, 3])
def test_rows_that_take_the_next_prompt_have_its_outputs_and_states(target, own, rows):
    layers = (0, 1, 2)
    made = generate_batched(target.decoder, TEXTS, GREEDY, rows, [0] * 5, Kept(layers=layers))
    for output in made:
        assert output.tokens == own[output.index]
        text = torch.tensor([TEXTS[output.index] + output.tokens[:-1]])
        with torch.no_grad():
            hidden = target.model(text, output_hidden_states=True, use_cache=False).hidden_states
        want = torch.stack([hidden[layer][0] for layer in layers], 1).bfloat16()
        got = torch.cat([states.reshape(-1, *want.shape[1:]) for states in output.states])
        torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_a_row_forgets_the_states_of_its_former_prompt(target):
    """The next prompt is as long as the former one, whose output was one token."""
    prompts = torch.tensor([[6, 5, 35, 8, 2], [1, 2, 9, 4, 7]])
    one, kept = dataclasses.replace(GREEDY, max_new_tokens=1), Kept(lambda logits: (logits,))
    with torch.no_grad():
        want = target.model(prompts, use_cache=False).logits[:, -1]
    for output in generate_batched(target.decoder, prompts.tolist(), one, 1, [0, 0], kept):
        ((logits,),) = output.captured
        torch.testing.assert_close(logits, want[output.index], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("width", "again"), [(1, {}), (2, {1: 1}), (5, {3: 1})])
def test_a_timed_step_reads_again_what_a_half_accepted_draft_costs(target, read, width, again):
    cache = target.decoder.new_cache(1, 40)
    step = timed_step(target.decoder, cache, width, 20, Sampling())
    for _ in range(3):
        read.clear()
        step()
        assert read == again


def test_a_token_costs_the_keys_of_full_attention_only(target):
    config = target.model.config
    cache = target.decoder.new_cache(1, 7)
    assert cache.bytes_per_token() == 2 * config.num_key_value_heads * config.head_dim * 4
