"""Drafts that read the target's hidden states: cached, prepared, trained over several steps."""

import copy
import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from align.sources import read_json
from distill import train
from distill.drafters import eagle3
from distill.drafters.kind import kinds
from distill.drafters.medusa import Medusa
from distill.dry_run import price_run
from distill.loss_forward import give_loss_forward
from distill.losses import forward_kl
from distill.models import TargetOfRun, check_models
from distill.prepare import prepare_draft
from distill.prompt_sets import collect_prompts
from distill.teacher.answers import USED
from distill.teacher.store import Answers, Store, names_of
from distill.train import run
from distill.trainer import distil_draft
from eval.decoding.drafters import formats
from eval.decoding.drafters import medusa as inference
from eval.decoding.drafters.drafter import Texts
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.verification import Sampling
from eval.reporting.report import read_report

KINDS = ["eagle3", "medusa"]
MADE = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 270}


@pytest.fixture(scope="module", params=KINDS)
def finished(request, job, tmp_path_factory):
    """A finished run of each kind."""
    dtype = "float32" if request.param == "medusa" else "bfloat16"
    folder = tmp_path_factory.mktemp("run") / "run"
    recipe = job(folder, **MADE, drafter=request.param, dtype=dtype)
    assert run(recipe) == 0
    return recipe


class Stopped(Exception):
    pass


@pytest.fixture(scope="module")
def stopped(job, tmp_path_factory):
    """A run of each kind that was stopped once the states were cached, and what it had printed."""

    def stop(*_):
        raise Stopped

    recipes = {}
    for kind in KINDS:
        recipes[kind] = job(tmp_path_factory.mktemp("stopped") / "run", **MADE, drafter=kind)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(train, "prepare_draft", stop)
            with pytest.raises(Stopped):
                run(recipes[kind])
    return recipes


@pytest.fixture
def answered(stopped, tmp_path):
    """Makes a copy of such a run of a kind: its parts."""

    def make(kind):
        folder = tmp_path / "run"
        shutil.copytree(stopped[kind].folder, folder)
        return parts(dataclasses.replace(stopped[kind], output_dir=str(folder)))

    return make


def test_a_spread_target_is_for_one_process(stopped, monkeypatch):
    recipe = dataclasses.replace(stopped["medusa"], device_map="auto")
    check_models(recipe)
    monkeypatch.setattr("distill.models.PartialState", lambda: SimpleNamespace(num_processes=2))
    with pytest.raises(ValueError, match=r"2 processes were started, .*--num_processes 1"):
        check_models(recipe)


def parts(recipe):
    pair = check_models(recipe)
    target = TargetOfRun(recipe, pair, collect_prompts(recipe, pair.target))
    store = Store(Path(read_json(recipe.folder / USED)["store"]))
    return recipe, pair, target, Answers(store, names_of(target.prompts.training.ids))


def test_a_finished_run_is_lossless(finished):
    folder = finished.folder
    report = read_report(folder / "report" / "report.json")
    for draft in report.drafts.values():
        assert draft.lossless.unexplained == 0
        assert draft.lossless.identical + draft.lossless.tie_divergences == 3
    again = load_drafter(str(folder / "draft"), parts(finished)[2].loaded)
    assert again.layers == finished.kind.target_layers({"num_hidden_layers": 2})


@pytest.mark.parametrize("finished", ["eagle3"], indirect=True)
def test_a_draft_that_reads_layers_the_target_lacks_is_refused(finished):
    folder = finished.folder
    compact = folder / "draft" / "compact.json"
    about = compact.read_text()
    compact.write_text(json.dumps(json.loads(about) | {"layers": [1, 9]}))
    with pytest.raises(ValueError, match=r"of layers \[1, 9\], but this target has 2 layers"):
        load_drafter(str(folder / "draft"), parts(finished)[2].loaded)
    compact.write_text(about)


@pytest.mark.parametrize("finished", ["eagle3"], indirect=True)
def test_an_exported_eagle3_has_the_names_that_engines_load(finished):
    config = read_json(finished.folder / "draft" / "config.json")
    tensors = load_file(finished.folder / "draft" / "model.safetensors")
    assert config["speculators_model_type"] == "eagle3"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1]
    assert config["draft_vocab_size"] == len(tensors["d2t"]) == 270
    assert config["transformer_layer_config"]["model_type"] == "llama"
    size = config["transformer_layer_config"]["hidden_size"]
    assert tensors["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * size
    assert {"fc.weight", "norm.weight", "lm_head.weight", "t2d"} <= tensors.keys()
    assert {"layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"} <= tensors.keys()
    assert not any("embed" in name for name in tensors)
    assert int(tensors["t2d"].sum()) == 270
    ids = tensors["d2t"] + torch.arange(270)
    assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])


def batch_of(vocab_size, positions, states):
    """Made up: one row, the target's most likely token at each position."""
    torch.manual_seed(3)
    count = len(positions)
    return {
        "input_ids": torch.randint(vocab_size, (1, states.shape[1])),
        "positions": torch.tensor(positions),
        "top_ids": torch.randint(200, (count, 3)),
        "top_logprobs": torch.full((count, 3), -1.5),
        "states": states,
        "seeds": torch.tensor([0]),
    }


def test_training_reads_what_is_known_when_a_token_is_drafted(answered):
    """The first step at token t reads the states up to t - 1, the later ones fewer."""
    recipe, pair, target, answers = answered("eagle3")
    prepared = prepare_draft(recipe, pair, target, answers)
    model = prepared.model.float()
    with torch.no_grad():  # where a fit leaves nothing, nothing could be seen
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in name:
                weight.copy_(torch.randn(weight.shape) * 0.2)
    give_loss_forward(model, recipe.kind, forward_kl)
    layers = len(recipe.kind.target_layers(pair.target.config))
    states = torch.randn(1, 12, layers, model.config.hidden_size, requires_grad=True)

    def read(positions):
        (gradient,) = torch.autograd.grad(
            model(**batch_of(pair.vocab_size, positions, states)).loss, states
        )
        return [at for at in range(12) if gradient[0, at].abs().sum() > 0]

    # of a draft that begins at 5 or 7 nobody reads what the target makes of that token itself
    assert read([5])[-1] == 4
    assert read([7])[-1] == 6
    assert 5 not in read([5])
    # a draft that cannot have begun earlier has one step only
    assert len(batch_of(pair.vocab_size, [5, 7], states)["positions"]) == 2
    one, two = (model(**batch_of(pair.vocab_size, p, states)).loss for p in ([5], [5, 7]))
    assert one != two


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_of_a_row_hangs_neither_on_its_padding_nor_on_what_is_beside_it(answered, kind):
    """Else another number of processes would take other steps."""
    recipe, pair, target, answers = answered(kind)
    model = prepare_draft(recipe, pair, target, answers).model.float()
    give_loss_forward(model, recipe.kind, forward_kl)
    layers = len(recipe.kind.target_layers(pair.target.config))
    states = torch.randn(2, 13, layers, model.config.hidden_size)
    short = batch_of(pair.vocab_size, [3, 4, 5, 6, 7], states[:1, :9])
    long = batch_of(pair.vocab_size, [2, 3, 4, 5, 6, 8, 9, 10, 11], states[1:])
    short["seeds"], long["seeds"] = torch.tensor([7]), torch.tensor([2**31 + 4])
    both = {name: torch.cat([short[name], long[name]]) for name in ("top_ids", "top_logprobs")}
    both["input_ids"] = torch.cat([F.pad(short["input_ids"], (0, 4)), long["input_ids"]])
    both["states"] = torch.cat([F.pad(short["states"], (0, 0, 0, 0, 0, 4)), long["states"]])
    both["seeds"] = torch.cat([short["seeds"], long["seeds"]])
    both["positions"] = torch.cat([short["positions"], 13 + long["positions"]])
    with torch.no_grad():
        apart = model(**short).loss + model(**long).loss
        torch.testing.assert_close(model(**both).loss, apart)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_in_small_batches_is_that_of_a_large_one(answered, tmp_path, kind):
    recipe, pair, target, answers = answered(kind)
    weights = []
    for rows, together in ((4, 1), (1, 4)):
        keys = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": together}
        keys |= {"max_steps": 2, "save_strategy": "no"}
        other = dataclasses.replace(recipe, training=recipe.training | keys)
        prepared = prepare_draft(other, pair, target, answers)
        draft = distil_draft(other, pair, prepared, answers, other.training["max_steps"])
        weights.append({name: w.detach() for name, w in draft.named_parameters()})
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("norm_before_residual", [False, True])
def test_steps_of_an_eagle3_draft_are_those_of_its_session(answered, norm_before_residual):
    """What training makes of the later steps is what decoding does with them."""
    recipe, pair, target, answers = answered("eagle3")
    prepared = prepare_draft(recipe, pair, target, answers)
    model, loaded = prepared.model, target.loaded
    model.config.norm_before_residual = norm_before_residual
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1 and "embed" not in name and "lm_head" not in name:
                weight.normal_(std=0.3)
    draft = formats.formats()["eagle3"].drafter(copy.deepcopy(model), prepared.token_ids, loaded)
    text, gamma, seen = answers[0].prompt_ids.tolist(), 3, set()
    for end in range(4, len(text)):
        known = dict.fromkeys(draft.layers)
        cache = loaded.decoder.new_cache(1, 64)
        loaded.decoder.forward(torch.tensor([text[: end - 1]]), 0, cache, states=known)
        texts = Texts([text[:end]], 64, Sampling(), torch.Generator(), [known])
        got = draft.start(texts).propose(gamma, 0.0).tokens[0].tolist()
        states = torch.stack([known[k] for k in draft.layers], 2)
        states = torch.nn.functional.pad(states, (0, 0, 0, 0, 0, gamma))
        states = states * model.sizes[:, None]  # the stand-in's states are not divided
        with torch.no_grad():
            whole = torch.tensor([[*text[:end], *got[:-1]]])
            steps = eagle3.unrolled(model, whole, states, gamma)
            rows = [model.lm_head(y[0, end - 1 + g]).argmax() for g, y in enumerate(steps)]
        assert got == prepared.token_ids[torch.stack(rows)].tolist()
        seen.update(got)
    assert len(seen) > 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_dry_run_prices_it(job, tmp_path, kind, capsys):
    recipe = job(tmp_path / "run", **MADE, drafter=kind, dry_run=True)
    price_run(recipe)
    out = capsys.readouterr().out
    assert "training: 40 steps" in out


class OneHead(Medusa):
    """A kind that the toolkit does not know: the first of Medusa's heads alone."""

    def start(self, start):
        return super().start(dataclasses.replace(start, max_gamma=1))

    name = "one_head"


def test_a_new_kind_is_trained_saved_and_measured_by_its_file_alone(job, tmp_path, monkeypatch):
    monkeypatch.setitem(kinds(), "one_head", OneHead())  # as a file beside the others is found
    monkeypatch.setitem(formats.formats(), "one_head", inference.FORMAT)
    recipe = job(tmp_path / "run", **MADE, drafter="one_head")
    assert run(recipe) == 0
    report = read_report(tmp_path / "run" / "report" / "report.json")
    assert report.drafts["tuned"].lossless.unexplained == 0
    assert report.drafts["tuned"].gamma == 1
    assert report.drafts["tuned"].alpha.mean >= report.drafts["untuned"].alpha.mean
