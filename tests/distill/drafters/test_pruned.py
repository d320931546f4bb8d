import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import GemmaConfig, LlamaForCausalLM

from align.checkpoint import Checkpoint
from align.trim import choose_tokens
from distill.drafters.initialisation import FrozenEmbedding
from distill.drafters.kind import Origin
from distill.drafters.pruned import KIND, build_pruned
from distill.export import full_vocabulary
from distill.models import check_prunable, head_entries
from distill.prepare import domain_mass
from distill.teacher.states import read_states
from distill.teacher.store import CachedAnswer
from eval.decoding.build import build_decoder
from eval.decoding.target import Target
from eval.decoding.weights import linear

VOCAB, LAYERS = 60, 4


@pytest.fixture(scope="module")
def target(tiny_llama):
    model = tiny_llama(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=LAYERS, tie_word_embeddings=True
    )
    with torch.no_grad():
        model.model.norm.weight.mul_(torch.rand(16) + 0.5)
    return model


@pytest.fixture(scope="module")
def answers(target):
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(20):
        prompt, response = 3 + index % 3, 6 + index % 5
        ids = torch.randint(2, VOCAB, (prompt + response,), generator=generator)
        with torch.no_grad():
            logits = target(ids[None]).logits[0, prompt - 1 : -1]
        top, top_ids = logits.log_softmax(-1).topk(8, dim=-1)
        made.append(CachedAnswer(ids[:prompt], ids[prompt:], top_ids, top))
    return made


def as_target(model):
    return Target(Checkpoint("tiny", Path()), model, build_decoder(model, 64), frozenset())


def prune_and_fit(target, answers, num_layers, head_size, forced):
    mass = domain_mass(answers, VOCAB)
    ids = None if head_size is None else choose_tokens(mass, head_size, forced)
    layers = KIND.fit_layers(target.config.to_dict(), num_layers)

    def fit_states(answer):
        with torch.no_grad():
            read = read_states(build_decoder(target, 64), answer.text, layers)
        return torch.stack(read, 1)

    origin = Origin(as_target(target), ids, answers, num_layers, 3, fit_states=fit_states)
    return KIND.initialise(origin)


def states(target, answers, num_layers):
    """RMS-normalised states after the last kept layer and final normalised states, [N, H] each."""
    early, final = [], []
    for answer in answers:
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[None]
        with torch.no_grad():
            out = target(ids[:, :-1], output_hidden_states=True)
        response = slice(len(answer.prompt_ids) - 1, None)
        hidden, eps = out.hidden_states[num_layers][0, response], target.config.rms_norm_eps
        early.append(F.rms_norm(hidden, (16,), eps=eps))
        final.append(out.hidden_states[-1][0, response])
    return torch.cat(early), torch.cat(final)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_the_fitted_head_is_the_least_squares_one(target, answers, eps):
    config = copy.deepcopy(target.config)
    config.rms_norm_eps = eps
    state, target = target.state_dict(), LlamaForCausalLM(config).eval()
    target.load_state_dict(state)
    draft = prune_and_fit(target, answers, 2, None, [0])
    x, y = states(target, answers, 2)
    fitted = torch.linalg.lstsq(x.double(), y.double()).solution
    want = x.double() @ fitted @ target.lm_head.weight.double().T
    with torch.no_grad():
        ids = torch.cat([answers[0].prompt_ids, answers[0].response_ids])[None]
        got = draft.model(ids[:, :-1]).logits[0, len(answers[0].prompt_ids) - 1 :]
    # fp32 sums, and a ridge of 1e-4 of the mean diagonal
    torch.testing.assert_close(got, want[: len(got)].float(), atol=3e-3, rtol=1e-2)
    assert draft.token_ids is None


def test_a_pruned_draft_is_the_targets_first_layers_on_its_embedding(target):
    pruned = build_pruned(target, 3, target.lm_head.weight.detach().clone())
    assert (
        pruned.get_input_embeddings().weight.data_ptr()
        == target.model.embed_tokens.weight.data_ptr()
    )
    for mine, theirs in zip(pruned.model.layers, target.model.layers, strict=False):
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)
            assert a.data_ptr() != b.data_ptr()  # training it must not touch the target
    assert len(pruned.model.layers) == 3
    assert pruned.config.num_hidden_layers == 3


def test_a_frozen_embedding_keeps_its_dtype_and_changes_no_number(target, answers):
    target = copy.deepcopy(target).to(torch.bfloat16)
    model = build_pruned(target, 2, target.lm_head.weight.detach().clone())
    plain = copy.deepcopy(model).float()
    weight = model.get_input_embeddings().weight.detach()
    model.set_input_embeddings(FrozenEmbedding(weight))
    model = model.float()
    kept = model.get_input_embeddings().weight
    assert kept.dtype == torch.bfloat16
    assert kept.data_ptr() == weight.data_ptr()  # the mapped file itself, not a copy of it
    assert not kept.requires_grad
    assert model.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    ids = torch.cat([answers[0].prompt_ids, answers[0].response_ids])[None]
    for one in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            one(input_ids=ids, labels=ids).loss.backward()
    theirs = dict(plain.named_parameters())
    for name, mine in model.named_parameters():
        if mine is not kept:
            assert torch.equal(mine.grad, theirs[name].grad), name


def test_the_target_is_left_as_it_was(target, answers):
    before = {name: weight.clone() for name, weight in target.state_dict().items()}
    config = target.config.to_dict()
    prune_and_fit(target, answers, 1, 30, [0])
    assert target.config.to_dict() == config
    assert all(torch.equal(weight, before[name]) for name, weight in target.state_dict().items())


def test_a_trimmed_head_keeps_the_domains_tokens_and_the_forced_ones(target, answers, tmp_path):
    mass = domain_mass(answers, VOCAB)
    assert float(mass.sum()) == pytest.approx(
        sum(float(a.top_logprobs.exp().sum()) for a in answers), rel=1e-5
    )
    rare = int(mass.argmin())
    draft = prune_and_fit(target, answers, 2, 20, [rare])
    whole = prune_and_fit(target, answers, 2, None, [rare])
    assert len(draft.token_ids) == 20
    assert rare in draft.token_ids.tolist()
    others = mass.clone()
    others[rare] = -1
    assert set(others.topk(19).indices.tolist()) < set(draft.token_ids.tolist())
    embedding = target.model.embed_tokens.weight.detach()
    KIND.save(tmp_path, draft, embedding, None)
    trimmed = KIND.load(tmp_path, embedding, None)
    assert torch.equal(trimmed.token_ids, draft.token_ids)
    assert torch.equal(trimmed.model.lm_head.weight, whole.model.lm_head.weight[draft.token_ids])


def test_head_rows_are_the_inverse_of_token_ids():
    ids = torch.tensor([2, 5, 9])
    rows = head_entries(ids, 12)
    assert rows[ids].tolist() == [0, 1, 2]
    assert int((rows == -1).sum()) == 9
    assert head_entries(None, 12) is None


def test_the_served_head_makes_the_trimmed_heads_greedy_choices(target, answers):
    target = copy.deepcopy(target)
    with torch.no_grad():  # states of real models share a component, along which to lower
        target.model.embed_tokens.weight[:, 0] = 0.2  # others: 0.02
    draft = prune_and_fit(target, answers, 2, 25, [0, 1])
    tuned = draft.model
    tuned.lm_head = linear(tuned.lm_head.weight.detach()[draft.token_ids])
    with torch.no_grad():  # training moves the states: the fitted rows outside would win now
        for parameter in tuned.model.layers.parameters():
            parameter.add_(0.3 * parameter.std().nan_to_num() * torch.randn_like(parameter))
    full = full_vocabulary(tuned, draft.token_ids, answers)
    assert full.config.vocab_size == full.lm_head.weight.shape[0] == VOCAB
    agreed = total = dropped = 0
    for answer in answers:
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[None]
        response = slice(len(answer.prompt_ids) - 1, None)
        with torch.no_grad():
            trimmed = draft.token_ids[tuned(ids[:, :-1]).logits[0, response].argmax(-1)]
            whole = full(ids[:, :-1]).logits[0, response]
        agreed += int((trimmed == whole.argmax(-1)).sum())
        kept = whole.softmax(-1)[:, draft.token_ids]
        dropped += float(1 - kept.double().sum(-1).mean()) * len(whole)
        total += len(answer.response_ids)
    assert agreed / total >= 0.999
    # what engines sample, and vLLM verifies, is the trimmed head's
    assert dropped / total <= 1e-4
    assert tuned.lm_head.weight.shape[0] == 25  # the trimmed one is left as it was


def test_trimmed_tokens_that_keep_probability_are_warned_of(target, answers, monkeypatch):
    """Here by nothing, so that they have the mean logit."""
    draft = prune_and_fit(target, answers, 2, 25, [0, 1])
    tuned = draft.model
    tuned.lm_head = linear(tuned.lm_head.weight.detach()[draft.token_ids])
    monkeypatch.setattr("distill.export.SUPPRESSION", 0.0)
    with pytest.warns(UserWarning, match="whole vocabulary"):
        full_vocabulary(tuned, draft.token_ids, answers)


@pytest.mark.parametrize("layers", [LAYERS, LAYERS + 1])
def test_a_number_of_layers_that_prunes_nothing_is_refused(target, layers):
    with pytest.raises(ValueError, match=f"num_draft_layers {layers} must be at least 1 and below"):
        check_prunable(target.config.to_dict(), layers)
    check_prunable(target.config.to_dict(), LAYERS - 1)


def test_a_family_that_cannot_be_pruned_names_the_way_out():
    with pytest.raises(ValueError, match=r"cannot be made .* type 'gemma', .* name a sibling"):
        check_prunable(GemmaConfig().to_dict(), 1)
