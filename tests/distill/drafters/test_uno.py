"""Uno: a PEFT folder, trained on what it reads when it drafts, on a target that stays as it is."""

import dataclasses

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, DynamicCache

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import read_json
from distill.drafters.kind import Origin
from distill.drafters.uno import KIND, random_ids, read_noise
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
from distill.models import with_published_kind
from distill.recipe_files import RecipeError
from distill.run_report import in_engine
from eval.decoding.drafters import uno
from eval.decoding.drafters.drafter import Text
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.lookup import lookup_first
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.engines.server import ServerError
from eval.engines.start_vllm import speculation
from eval.prompts import Prompt
from eval.reporting.fields import read_report
from tests.distill.drafters.batches import batch_of, planned

TEXT = [5, 7, 9, 11, 3, 250, 8, 14, 15, 50, 44]


@pytest.fixture(scope="module")
def run(finished):
    return finished("uno")


@pytest.fixture(scope="module")
def target(run):
    return load_target(Checkpoint.open(run.target), torch.float32, "cpu", 64)


@pytest.fixture(scope="module")
def served(run):
    """The target with the folder's adapter, as PEFT itself loads it."""
    base = AutoModelForCausalLM.from_pretrained(run.target)
    return PeftModel.from_pretrained(base, str(run.folder / "draft")).eval()


def drafted(served, text, noise):
    """PEFT's logits at the newest token, by the target alone, and at the random tokens after it."""
    cache = DynamicCache()
    with torch.no_grad():
        with served.disable_adapter():
            own = served(torch.tensor([text]), past_key_values=cache).logits[0, -1:]
        if noise:
            by_adapter = served(torch.tensor([noise]), past_key_values=cache).logits[0]
            own = torch.cat([own, by_adapter])
    return own


def test_a_run_ends_in_a_folder_that_peft_and_the_decoder_read_alike(run, target, served):
    draft = run.folder / "draft"
    about = read_json(draft / "adapter_config.json")
    # what SGLang 0.5.23 reads
    kept = {key: about[key] for key in ("peft_type", "r", "lora_alpha", "use_dora", "use_rslora")}
    assert list(kept.values()) == ["LORA", 4, 16, False, False]
    assert about["base_model_name_or_path"] == run.target
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(about["target_modules"]) == names
    assert {file.name for file in draft.glob("*.safetensors")} == {uno.WEIGHTS}
    assert not (draft / "added_tokens.json").exists()
    drafter = load_drafter(str(draft), target)
    assert drafter.most == 3
    assert drafter.kv_bytes_per_token == 0
    assert drafter.draft_at_once(20, Sampling(), 3) is not None
    cache = target.decoder.new_cache(1, 60)
    target.decoder.forward(torch.tensor([TEXT[:5]]), 0, cache)
    given = Text(TEXT[:6], 60, Sampling(), torch.Generator(), {}, 3, cache)
    session = drafter.start(given)
    for end, step in ((6, 2), (8, 1), (9, 2)):
        noise = drafter.noise[end : end + 2].tolist()
        expected = drafted(served, TEXT[:end], noise)
        tokens = session.propose(3).tokens
        assert tokens.tolist() == expected.argmax(-1).tolist()
        target.decoder.forward(torch.tensor([TEXT[end - 1 : end + step]]), end - 1, cache)
        session.commit(TEXT[end : end + step], step - 1, {})


def test_the_first_token_is_the_targets_own_and_others_are_learned(run, target):
    """The run's report: two tokens a step at least, and more by training."""
    draft = read_report(run.folder / "report" / "report.json").drafts["tuned"]
    assert draft.lossless.unexplained == 0
    assert draft.per_position[0].conditional.mean == 1
    base = load_drafter(str(run.folder / "prepared"), target)
    tuned = load_drafter(str(run.folder / "draft"), target)
    decoding = Decoding(Sampling(), frozenset(), 24)
    drafters = (None, base, tuned, lookup_first(tuned, frozenset()))
    runs = [
        decode(target.decoder, drafter, Prompt("p", prompt=""), TEXT, decoding, 3)
        for drafter in drafters
    ]
    assert all(each.tokens == runs[0].tokens for each in runs)
    assert sum(runs[1].accepted) < sum(runs[2].accepted)


def test_the_targets_weights_keep_their_bits(run):
    model = Checkpoint.open(run.target).load(torch.float32)
    embedding = model.get_input_embeddings().weight.detach()
    draft = KIND.load(run.folder / "prepared", embedding, lambda: None)
    before = {name: weight.clone() for name, weight in draft.model.state_dict().items()}
    names = {name for name, weight in draft.model.named_parameters() if weight.requires_grad}
    assert {name.split(".")[-3] for name in names} == {"lora_A", "lora_B"}
    give_loss_forward(draft.model, KIND, forward_kl)
    trained = draft.model.train()
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], 1e-2)
    batch = batch_of([TEXT, TEXT[::-1]], (3, 4), top=4)
    for _ in range(2):
        trained(**planned(batch, KIND, trained)._asdict()).loss.backward()
        optimizer.step()
    changed = {n for n, w in trained.state_dict().items() if not torch.equal(w, before[n])}
    assert changed == names


@torch.no_grad()
def test_training_reads_what_drafting_reads(run, served):
    """Each random token's state is that of PEFT behind the text up to where its row begins."""
    embedding = served.get_input_embeddings().weight.detach()
    model = KIND.load(run.folder / "draft", embedding, lambda: None).model
    give_loss_forward(model, KIND, forward_kl)
    texts, prompts = [TEXT, TEXT[3:]], (5, 2)
    for training in (True, False):
        batch = planned(batch_of(texts, prompts), KIND, model, training)
        states, (rows, depths, taken, learned, counts) = read_noise(model, batch), batch.plan
        assert sum(counts) == len(states)
        place = batch.positions[rows.clamp_min(0)]
        before = batch.position_ids.flatten()[place] - 1
        of_text = batch.texts.flatten()[place]
        noise = random_ids(batch.seeds[of_text], before, depths, len(embedding)).flatten()
        if not training:  # a measurement takes the first random token at all positions
            assert learned[: len(batch.positions)].tolist() == [*range(len(batch.positions))]
        depths, before, of_text, rows = (x.flatten() for x in (depths, before, of_text, rows))
        for state, slot, goal in zip(states, taken.tolist(), learned.tolist(), strict=True):
            row, depth = int(rows[slot]), int(depths[slot])
            assert row + depth - 1 == goal
            same = [
                int(((rows == row) & (depths == d)).nonzero()[0, 0]) for d in range(1, depth + 1)
            ]
            text = texts[int(of_text[slot])][: int(before[slot]) + 1]
            assert int(batch.numbers[goal]) == len(text) - 1 + depth
            expected = drafted(served, text, noise[same].tolist())[-1]
            torch.testing.assert_close(model.lm_head(state), expected, rtol=1e-4, atol=1e-4)


def test_random_ids_are_uniform_and_differ_by_text_and_place():
    place = torch.arange(4000)
    found = [
        random_ids(torch.tensor(seed), place, torch.tensor(d), 50)
        for seed in (7, 2**31 + 4)
        for d in (1, 2)
    ]
    for ids in found:
        assert ids.bincount(minlength=50).min() >= 50
        assert ids.bincount(minlength=50).max() <= 115
    agreeing = [(a == b).float().mean() for a in found for b in found if a is not b]
    assert max(agreeing) < 0.035


def test_another_draft_begins_where_one_ended(run, target):
    origin = Origin(target, None, [], 1, 3, published=run.folder / "draft")
    tensors, _ = uno.read_adapter(run.folder / "draft", target.decoder.embedding)
    named = dict(KIND.initialise(origin).model.named_parameters())
    for name, tensor in tensors.items():
        stem, _, end = name.removeprefix("base_model.model.").rpartition(".")
        assert torch.equal(named[f"{stem}.default.{end}"], tensor)


def test_it_is_refused_where_it_does_not_fit(run, job, folder, tmp_path, monkeypatch):
    draft = run.folder / "draft"
    roomy = load_target(Checkpoint.open(folder / "roomy"), torch.float32, "cpu", 64)
    with pytest.raises(UserError, match="embedding"):
        load_drafter(str(draft), roomy)
    with pytest.raises(UserError, match="TOK-013"):  # no model, although it has a config.json
        load_target(Checkpoint.open(draft), torch.float32, "cpu", 64)
    with pytest.raises(ServerError, match="SGLang"):
        speculation(str(draft), 3)
    models = Checkpoint.open(run.target), Checkpoint.open(draft)
    again = with_published_kind(job(tmp_path, draft=str(draft)), *models)  # trained from it
    assert (again.kind_name, again.sibling, again.draft_vocab_size) == ("uno", None, None)
    for key in ({"max_gamma": 1}, {"engine": "vllm"}, {"draft_vocab_size": 200}):
        with pytest.raises(RecipeError, match=next(iter(key))):
            job(tmp_path, draft=None, drafter="uno", **key)
    monkeypatch.setattr("distill.run_report.vllm_python", lambda: "python")
    assert not in_engine(dataclasses.replace(run, engine="auto"))
    card = (draft / "README.md").read_text()
    assert "--speculative-algorithm UNO" in card
    assert "vllm" not in card.lower()
