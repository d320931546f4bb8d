"""A target whose text is what a head drafts: the head is right at every token, until it is broken.

Therefore the repair of a planted fault has acceptance 1, and it is the only one.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from align.checkpoint import Checkpoint
from eval import alive
from eval.decoding.build import build_decoder
from eval.decoding.drafters.causal_lm import teacher_forced_logits
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring.repairs import repairs
from eval.measuring.runs import Speculation
from eval.options import RunOptions
from eval.prompts import Prompt, PromptSet
from tests.eagle3 import PublishedEagle3
from tests.fake_vllm import FakeVllm

READ, TOKENS, PROMPTS = [1, 3, 4], 8, 24
IDS = torch.arange(3, 62, 2)


@pytest.fixture(scope="module")
def target(tiny_llama):
    model = tiny_llama(spread=4, vocab_size=96, num_hidden_layers=6)
    return Target(Checkpoint("org/target", Path()), model, build_decoder(model, 64), frozenset())


def head(folder, target, seed=0):
    config = target.model.config.to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size")
    names += ("num_attention_heads", "num_key_value_heads")
    sizes = {name: config[name] for name in names} | {"head_dim": 8, "rope_theta": 1e4}
    return PublishedEagle3("speculators", sizes, READ, IDS, seed).save(folder)


@pytest.fixture(scope="module")
def good(target, tmp_path_factory):
    return head(tmp_path_factory.mktemp("good") / "draft", target)


@pytest.fixture(scope="module")
def outputs(target, good):
    drafter, random = load_drafter(str(good), target), torch.Generator().manual_seed(0)
    written = alive.Outputs([], [], [])
    for number in range(PROMPTS):
        ids = torch.randint(96, (6,), generator=random).tolist()
        text = []
        for _ in range(TOKENS):
            states = dict.fromkeys(range(6))
            teacher_forced_logits(target.decoder, [*ids, *text], len(ids), states)
            q = drafter.teacher_forced(ids, [*text, 0], Sampling(), states)
            text.append(int(q[-1].argmax()))
        run = PromptRun.of(Prompt(str(number), "p"), len(ids), [1.0] * TOKENS, [[t] for t in text])
        written.ids.append(ids)
        written.runs.append(run)
        written.states.append(states)
    return written


@pytest.fixture
def broken(good, tmp_path):
    """A copy of the good head with a fault: broken(change of config.json, change of tensors)."""

    def make(about=None, tensors=None):
        config = json.loads((good / "config.json").read_text())
        weights = load_file(good / "model.safetensors")
        if about:
            about(config)
        if tensors:
            tensors(weights)
        folder = tmp_path / "broken"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        weights = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(weights, folder / "model.safetensors")
        return folder

    return make


def check(target, outputs, draft, monkeypatch, **options):
    prompts = PromptSet("p", [Prompt(run.prompt_id, "p") for run in outputs.runs], outputs.ids)
    monkeypatch.setattr(alive, "load", lambda _: (target, prompts, prompts))
    monkeypatch.setattr(alive, "read_outputs", lambda *_: outputs)
    arguments = [f"--{name}={value}" for name, value in options.items()]
    return alive.main(["org/target", str(draft), "--json", *arguments])


def shifted(config):
    config["eagle_aux_hidden_state_layer_ids"] = [i + 1 for i in READ]


def other_residual(config):
    config["norm_before_residual"] = False


def interleaved(weights):
    for name in ("q_proj", "k_proj"):
        key = f"layers.0.self_attn.{name}.weight"
        heads = weights[key].view(-1, 2, 4, 64)
        weights[key] = heads.transpose(1, 2).reshape(-1, 64)


def zero_centred(weights):
    for name in weights:
        if "norm" in name:
            weights[name] = weights[name] - 1


def absolute(weights):
    weights["d2t"] = IDS.clone()
    del weights["t2d"]


def beyond(weights):
    weights["d2t"] = weights["d2t"] + torch.arange(len(IDS)) * 2
    del weights["t2d"]


def one_off(weights):
    weights["d2t"] = weights["d2t"] + 1
    del weights["t2d"]


def one_entry_off(weights):
    weights["d2t"] = IDS.roll(1) - torch.arange(len(IDS))


def transposed(weights):
    weights["fc.weight"] = weights["fc.weight"].T.reshape(32, 96)


def blocks_transposed(weights):
    weights["fc.weight"] = torch.cat([block.T for block in weights["fc.weight"].split(32, 1)], 1)


def blocks_reversed(weights):
    weights["fc.weight"] = torch.cat(weights["fc.weight"].split(32, 1)[::-1], 1)


FAULTS = {
    "layer ids are +1": (shifted, None),
    "norm_before_residual": (other_residual, None),
    "rotary layout": (None, interleaved),
    "norms are -1": (None, zero_centred),
    "d2t has target ids": (None, absolute),
    "ids of d2t are +1": (None, one_off),
    "d2t is +1 entries": (None, one_entry_off),
    "fc is transposed": (None, transposed),
    "block of fc is transposed": (None, blocks_transposed),
    "opposite order": (None, blocks_reversed),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_by_its_repair(
    fault, target, outputs, broken, monkeypatch, capsys
):
    assert check(target, outputs, broken(*FAULTS[fault]), monkeypatch) == alive.DEAD
    result = json.loads(capsys.readouterr().out)
    assert result["acceptance"] < 0.9
    (named,) = result["faults"]
    assert fault in named
    assert "acceptance 1.00" in named


def test_a_repair_that_is_not_shown_is_a_note(target, outputs, broken, monkeypatch, capsys):
    monkeypatch.setattr(alive, "LEVEL", 0.0)
    check(target, outputs, broken(*FAULTS["layer ids are +1"]), monkeypatch)
    result = json.loads(capsys.readouterr().out)
    assert result["faults"] == []
    assert [note for note in result["notes"] if "layer ids are +1" in note]


def test_ids_that_the_target_lacks_are_refused(target, outputs, broken, monkeypatch, capsys):
    assert check(target, outputs, broken(None, beyond), monkeypatch) == alive.BAD_INPUT
    assert "TOK-015" in capsys.readouterr().err


def test_a_good_head_is_alive_and_has_no_fault(target, outputs, good, monkeypatch, capsys):
    assert check(target, outputs, good, monkeypatch) == alive.ALIVE
    result = json.loads(capsys.readouterr().out)
    assert (result["acceptance"], result["faults"], result["notes"]) == (1, [], [])
    assert result["chance"] < 0.6
    assert result["tokens"] == PROMPTS * TOKENS


def test_a_head_of_another_target_is_dead(target, outputs, tmp_path, monkeypatch, capsys):
    other = head(tmp_path / "other", target, seed=1)
    assert check(target, outputs, other, monkeypatch) == alive.DEAD
    assert json.loads(capsys.readouterr().out)["faults"] == []
    target.checkpoint.spec = "org/other"
    assert check(target, outputs, other, monkeypatch) == alive.DEAD
    target.checkpoint.spec = "org/target"
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "org/target" in note


@pytest.mark.parametrize("shares", [(1.0, 1.0), (0.3, 0.1)])
def test_a_server_that_accepts_less_is_named(shares, target, outputs, good, monkeypatch, capsys):
    steps = {"block_tokens": [3] * 7, "drafted": [4] * 7, "accepted": [2] * 7}
    outputs = replace(outputs, runs=[replace(run, **steps) for run in outputs.runs])
    counts = Speculation(200, 400, 200 * sum(shares), [200 * share for share in shares])
    monkeypatch.setattr(alive, "server_counts", lambda *_: counts)
    status = check(target, outputs, good, monkeypatch, base_url="http://server")
    result = json.loads(capsys.readouterr().out)
    assert result["served"] == list(shares)
    assert result["per_position"] == [1, 1, 0, 0]
    assert result["tokens_per_step"] == 3
    assert (status, len(result["faults"])) == ((0, 0) if shares[0] == 1 else (1, 1))


@pytest.mark.parametrize(("counts", "status"), [(True, 0), (False, 4)])
def test_a_server_without_counts_has_an_exit_status(
    counts, status, target, outputs, good, monkeypatch, capsys
):
    server = FakeVllm(step=3, counts=counts)
    assert check(target, outputs, good, monkeypatch, base_url=server.url) == status
    if counts:
        assert json.loads(capsys.readouterr().out)["served"] == [1, 1, 0]
    server.stop()


@pytest.mark.parametrize(("times", "status"), [(1.0, 0), (0.5, 1)])
def test_a_head_below_its_report_is_faulty(
    times, status, target, outputs, good, monkeypatch, capsys
):
    monkeypatch.setattr(alive, "reported", lambda *_: 0.9)
    right = alive.Outputs.accepted
    keep = torch.arange(PROMPTS * TOKENS) % 20 < 20 * times
    monkeypatch.setattr(
        alive.Outputs, "accepted", lambda *args, **more: right(*args, **more) & keep
    )
    monkeypatch.setattr(alive.AliveOptions, "asked", lambda *_: RunOptions())
    assert check(target, outputs, good, monkeypatch, run="run") == status
    assert len(json.loads(capsys.readouterr().out)["faults"]) == status


def test_a_head_without_attention_has_repairs_too(tmp_path):
    """As Medusa's."""
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4, "num_heads": 2}))
    save_file({"blocks.0.layers.0.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    assert list(repairs(tmp_path, {"vocab_size": 9}))


def test_few_tokens_tell_nothing(target, outputs, good, monkeypatch, capsys):
    few = alive.Outputs(outputs.ids[:7], outputs.runs[:7], outputs.states[:7])
    assert check(target, few, good, monkeypatch) == alive.INCONCLUSIVE
    assert json.loads(capsys.readouterr().out)["faults"] == []


def test_low_acceptance_may_be_of_another_domain(target, outputs, good, monkeypatch, capsys):
    right = alive.Outputs.accepted
    keep = torch.arange(PROMPTS * TOKENS) % 8 == 0
    monkeypatch.setattr(alive.Outputs, "chance", lambda *_: torch.zeros_like(keep))
    monkeypatch.setattr(alive.Outputs, "accepted", lambda *args: right(*args) & keep)
    monkeypatch.setattr(alive, "LEAST_ABOVE_CHANCE", 0.5)
    assert check(target, outputs, good, monkeypatch) == alive.INCONCLUSIVE
    assert json.loads(capsys.readouterr().out)["acceptance"] == 0.125
    assert check(target, outputs, good, monkeypatch, prompts="own.jsonl") == alive.DEAD


def test_outputs_are_decoded_with_the_draft(target, good):
    drafter, ids = load_drafter(str(good), target), [[1, 2, 3], [4, 5, 6]]
    prompts = PromptSet("p", [Prompt(str(n), "p") for n in range(2)], ids)
    outputs = alive.read_outputs(target, drafter, prompts, Decoding(Sampling(), frozenset(), 8))
    assert [len(run.tokens) for run in outputs.runs] == [8, 8]
    assert {len(states) for states in outputs.states} == {6}
    assert {x.shape[1] for states in outputs.states for x in states.values()} == {3 + 8 - 1}
    assert outputs.accepted(drafter).shape == (16,)
