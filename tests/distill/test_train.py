import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import sys
import weakref

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import BloomConfig, Lfm2Config, LlamaConfig, LlamaForCausalLM, MambaConfig

from align.checkpoint import Checkpoint, weights_sha256
from align.errors import UserError
from align.files import atomic_file, read_json
from distill import models, train
from distill.models import check_models, open_models
from distill.recipe import dump
from distill.recipe_files import RecipeError
from distill.run_folder import only_start, refuse_another_run
from distill.teacher import store
from distill.teacher.store import Store
from distill.train import main, run
from eval.prompts import PromptError
from tests.dflash import save_published


def test_a_full_disk_ends_a_run_with_its_reason_alone(tmp_path, monkeypatch, capsys):
    def check(recipe, *_):
        with atomic_file(recipe.folder / "vocab_check.json"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train, "open_models", lambda recipe: (None, None))
    monkeypatch.setattr(train, "check_models", check)
    assert main(["--recipe", "code", "--output_dir", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert "The disk is full" in shown
    assert "Free some space" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize("place", ["file", "a" * 300, "/proc/run"])  # root may write to any folder
@pytest.mark.parametrize("cache", [False, True])
def test_what_cannot_be_written_is_refused_first(job, tmp_path, monkeypatch, cache, place):
    (tmp_path / "file").touch()
    if cache:
        monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / place))
    monkeypatch.setattr(train, "check_models", no_target)
    recipe = job(tmp_path / ("run" if cache else f"{place}/run"))
    if place == "/proc/run" and not cache:
        recipe = dataclasses.replace(recipe, output_dir=place)
    with pytest.raises(UserError, match="cannot be written"):
        run(recipe)


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_target_of_the_hub_is_there_before_its_outputs_are_looked_up(
    folder, job, tmp_path, monkeypatch, dry_run
):
    """They are stored by the hash of its weights, and a dry run fetches none."""

    def fetch(spec, revision=None):
        (tmp_path / "hub").mkdir(exist_ok=True)
        for path in (folder / "target").iterdir():
            if path.suffix != ".safetensors" or revision:
                shutil.copy(path, tmp_path / "hub")
        return tmp_path / "hub"

    monkeypatch.setattr("align.checkpoint.from_hub", fetch)
    recipe = job(tmp_path / "run", target="org/target", **PRUNED, dry_run=dry_run)
    found = check_models(recipe, *open_models(recipe)).target.sha256
    assert found == (None if dry_run else weights_sha256(folder / "target"))


def test_shards_of_an_older_checkpoint_are_not_read(folder, job, tmp_path):
    model = Checkpoint.open(folder / "target").load(torch.float32)
    shutil.copytree(folder / "target", tmp_path / "sharded")
    (tmp_path / "sharded" / "model.safetensors").unlink()
    model.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    expected = weights_sha256(tmp_path / "sharded")
    model.get_input_embeddings().weight.data.zero_()
    model.save_pretrained(tmp_path / "older")
    stale = tmp_path / "older" / "model.safetensors"
    stale.rename(tmp_path / "sharded" / "model-0.safetensors")
    recipe = job(tmp_path / "run", target=str(tmp_path / "sharded"), **PRUNED)
    pair = check_models(recipe, *open_models(recipe))
    assert pair.target_embedding(torch.float32).abs().sum() > 0
    assert weights_sha256(tmp_path / "sharded") == expected


@pytest.mark.parametrize("use_peft", [False, True])
def test_a_sibling_with_a_temperature_and_no_do_sample_is_trained_and_saved(
    folder, job, tmp_path, monkeypatch, use_peft
):
    sibling = shutil.copytree(folder / "draft", tmp_path / "sibling")
    changed = read_json(sibling / "generation_config.json") | {"temperature": 0.9, "top_p": 0.6}
    (sibling / "generation_config.json").write_text(json.dumps(changed))
    monkeypatch.setattr(train, "evaluate", lambda *_: None)
    recipe = job(tmp_path / "run", draft=str(sibling), max_steps=2, save_steps=1, use_peft=use_peft)
    assert run(recipe) == 0
    assert (recipe.folder / "draft" / "model.safetensors").is_file()


PRUNED = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 270}


def test_a_file_that_is_cut_short_is_named(job, tmp_path, followed, monkeypatch):
    recipe = job(tmp_path / "run", **PRUNED, max_steps=2)

    def cut(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(train, "distil_draft", cut)
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
    for name in (
        *("prepared/config.json", "prepared/model.safetensors", "prepared/token_ids.safetensors"),
        *(
            "prompts/held_out.jsonl",
            "prompts/ids.json",
            "answers.json",
            "models.json",
            "clock.json",
        ),
    ):
        path = recipe.folder / name
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(UserError, match=name.partition(".")[0]):
            run(recipe)
        path.write_bytes(whole)
    assert run(recipe) == 0


def no_target(*_, **__):
    raise AssertionError("the target was loaded")


SMALL = {"vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
STRANGE = {
    "mamba": MambaConfig(num_hidden_layers=1, hidden_size=8),
    "lfm2": Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
    "bloom": BloomConfig(),
    "short": LlamaForCausalLM(LlamaConfig(max_position_embeddings=32, **SMALL)),
    "hollow": LlamaConfig(vocab_size=300),
}


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (PRUNED | {"num_draft_layers": 40}, "num_draft_layers 40"),
        (PRUNED | {"draft_vocab_size": 9_999_999}, "draft_vocab_size 9999999"),
        (PRUNED | {"cache_top_k": 301}, "cache_top_k 301"),
        (PRUNED | {"draft_vocab_size": 256}, "at least 257"),
        ({"target": "mamba"}, "linear_attention"),
        ({"target": "lfm2"}, "conv"),
        ({"target": "bloom"}, "max_position_embeddings"),
        ({"draft": "mamba"}, "linear_attention"),  # it would be found out when it is trained
        ({"draft": "short"}, "32 positions"),
        ({"draft": "hollow"}, "model.safetensors"),
    ],
)
def test_what_the_files_refute_is_refused_first(
    folder, job, tmp_path, monkeypatch, dry_run, changes, named
):
    monkeypatch.setattr(models, "load_target", no_target)
    vocabulary = Checkpoint.open(folder / "target").vocabulary
    monkeypatch.setattr(Checkpoint, "vocabulary", vocabulary)  # of models without a tokenizer
    for key in changes.keys() & {"target", "draft"}:
        if changes[key] in STRANGE:
            STRANGE[changes[key]].save_pretrained(tmp_path / "model")
            (tmp_path / "model" / "model.safetensors").touch()
            changes = changes | {key: str(tmp_path / "model")}
    recipe = job(tmp_path / "run", **changes, dry_run=dry_run)
    with pytest.raises(ValueError, match=named):
        run(recipe)
    assert not recipe.folder.exists()


@pytest.mark.parametrize("positions", [32, 2048])
def test_a_published_draft_that_ends_before_the_texts_is_refused_first(
    folder, job, tmp_path, monkeypatch, positions
):
    monkeypatch.setattr(models, "load_target", no_target)
    config = Checkpoint.open(folder / "target").config
    shape = {"head_dim": config.hidden_size // config.num_attention_heads} | config.to_dict()
    path = save_published(tmp_path / "draft", shape, [0]) / "config.json"
    path.write_text(json.dumps(read_json(path) | {"max_position_embeddings": positions}))
    recipe = job(tmp_path / "run", draft=str(path.parent))
    reached = (UserError, "32 positions") if positions == 32 else (AssertionError, "was loaded")
    with pytest.raises(reached[0], match=reached[1]):
        run(recipe)


def test_a_smallest_head_holds_what_is_forced(folder, job, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_target", no_target)
    assert len(Checkpoint.open(folder / "target").tokenizer.all_special_ids) == 1
    recipe = job(tmp_path / "run", **(PRUNED | {"draft_vocab_size": 257}))  # bytes and the stop
    with pytest.raises(AssertionError, match="the target was loaded"):
        run(recipe)


def test_a_run_that_made_nothing_does_not_claim_its_folder(folder, job, tmp_path, monkeypatch):
    mistyped = job(tmp_path / "run", train_prompts=str(folder / "trian.jsonl"))
    with pytest.raises((PromptError, ValueError), match="trian"):
        run(mistyped)
    assert not mistyped.folder.exists()
    monkeypatch.setattr(models, "load_target", no_target)
    with pytest.raises(AssertionError, match="the target was loaded"):  # it went as far as that
        run(job(tmp_path / "run"))
    with pytest.raises(RecipeError, match=r"another recipe \(max_steps: 40 -> 41\).*--output_dir"):
        run(job(tmp_path / "run", max_steps=41))
    with pytest.raises(AssertionError, match="the target was loaded"):  # a tracker changes nothing
        run(job(tmp_path / "run", report_to="tensorboard"))


def altered_weights(path):
    tensors = load_file(path)
    next(iter(tensors.values())).neg_()
    save_file(tensors, path, {"format": "pt"})


def altered_template(path):
    path.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")


@pytest.mark.parametrize(
    ("file", "alter", "named"),
    [
        ("target/model.safetensors", altered_weights, "target weights"),
        ("target/chat_template.jinja", altered_template, "chat template"),
        ("draft/model.safetensors", altered_weights, "draft weights"),
    ],
)
def test_a_run_goes_on_with_the_models_it_began_with(
    folder, job, tmp_path, monkeypatch, file, alter, named
):
    for model in ("target", "draft"):
        shutil.copytree(folder / model, tmp_path / model)
    recipe = job(tmp_path / "run", target=str(tmp_path / "target"), draft=str(tmp_path / "draft"))
    monkeypatch.setattr(models, "load_target", no_target)
    for _ in range(2):
        with pytest.raises(AssertionError, match="the target was loaded"):
            run(recipe)
    alter(tmp_path / file)
    with pytest.raises(RecipeError, match=f"another {named} than"):
        run(recipe)
    (recipe.folder / "draft").mkdir()  # as in a finished run
    with pytest.raises(RecipeError, match=f"another {named} than"):
        run(recipe)


def test_a_run_that_is_started_twice_runs_once(job, tmp_path, monkeypatch):
    recipe = job(tmp_path / "runs" / "run")
    monkeypatch.setattr(models, "load_target", no_target)
    with only_start(recipe.folder), pytest.raises(UserError, match="Another process"):
        run(recipe)
    assert not recipe.folder.exists()
    with pytest.raises(AssertionError, match="the target was loaded"):  # the first one has ended
        run(recipe)


def test_who_answers_may_change_in_a_folder_and_what_is_asked_may_not(job, tmp_path):
    recipe = job(tmp_path / "run")
    recipe.folder.mkdir()
    (recipe.folder / "recipe.yaml").write_text(dump(recipe))
    refuse_another_run(job(tmp_path / "run", answers="vllm", logging_steps=3))
    smaller = job(tmp_path / "run", gradient_accumulation_steps=2)
    refuse_another_run(smaller)  # a checkpoint would be of steps of another size
    (recipe.folder / "draft").mkdir()
    with pytest.raises(RecipeError, match="gradient_accumulation_steps"):
        refuse_another_run(smaller)
    with pytest.raises(RecipeError, match=r"held_out_prompts: 32 -> 8\)"):
        refuse_another_run(job(tmp_path / "run", held_out_prompts=8))
    for damaged in ("", "target: a/b\n"):
        (recipe.folder / "recipe.yaml").write_text(damaged)
        with pytest.raises(RecipeError, match=r"another recipe|restore"):
            refuse_another_run(recipe)


def test_cached_outputs_that_a_lower_max_answers_leaves_out_are_counted(
    job, tmp_path, monkeypatch, capsys
):
    """A stopped run has the outputs of the longest prompts, not of the first ones."""
    append = Store.append

    def stopped(*given):
        append(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(store, "ANSWERS_PER_SHARD", 5)
        patch.setattr(Store, "append", stopped)
        with pytest.raises(KeyboardInterrupt):
            run(job(tmp_path / "stopped", answer_batch_size=5))
    capsys.readouterr()
    for status in (True, False):  # the second time all that is asked for is there
        recipe = job(tmp_path / f"fewer {status}", max_answers=5, coverage_curve=True)
        assert run(recipe) == 0
        shown = capsys.readouterr().out
        found = re.search(r"outputs: (\d) cached ones .* max_answers", shown)
        made = re.search(r"outputs: (\d) of 5 generated", shown)
        assert (found is not None) == status
        assert int(made[1]) == (int(found[1]) if found else 0)


@pytest.mark.parametrize("kind", [PRUNED, {}])
def test_the_target_is_gone_while_the_draft_trains_and_both_before_they_are_measured(
    job, tmp_path, monkeypatch, kind
):
    recipe = job(tmp_path / "run", **kind, max_steps=4)
    targets, drafts = [], []

    def load(*args, load=models.load_target):
        target = load(*args)
        targets.append(weakref.ref(target.model))
        return target

    def distil(*args, distil=train.distil_draft):
        assert [target() for target in targets] == [None]
        drafts.append(weakref.ref(args[2].model))
        drafts.append(weakref.ref(distil(*args)))
        return drafts[-1]()

    def measure(*args):
        assert [model() for model in (*targets, *drafts)] == [None, None, None]
        drafts.clear()
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "load_target", load)
    monkeypatch.setattr(train, "distil_draft", distil)
    monkeypatch.setattr(train, "evaluate", measure)
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    # taken up after the outputs, it trains without the target
    shutil.rmtree(recipe.folder / "draft")
    monkeypatch.setattr(models, "load_target", no_target)
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    assert (recipe.folder / "draft" / "config.json").exists()


def test_a_finished_run_keeps_what_is_needed_and_can_be_run_again(finished, tmp_path):
    folder = shutil.copytree(finished("trimmed").folder, tmp_path / "run")
    recipe = dataclasses.replace(finished("trimmed"), output_dir=str(folder))
    assert {path.name for path in folder.iterdir()} == {
        *("recipe.yaml", "repeat.yaml", "clock.json", "provenance.json", "vocab_check.json"),
        *("models.json", "prompts", "answers.json", "prepared", "checkpoint-40", "draft", "report"),
    }
    left = {path.name for path in (folder / "checkpoint-40").iterdir()}
    assert left == {"complete", "model.safetensors", "trainer_state.json"}
    assert not [p for p in folder.rglob("*") if p.suffix in (".pt", ".pth", ".bin")]  # pickles
    assert [p.parent.name for p in folder.rglob("README.md")] == ["draft"]  # our own card
    with safe_open(folder / "checkpoint-40" / "model.safetensors", "pt") as weights:
        assert "model.embed_tokens.weight" not in weights.keys()  # noqa: SIM118

    weights = folder / "draft" / "model.safetensors"
    tuned = weights.read_bytes()
    shutil.rmtree(folder / "draft")  # it is made again from the last checkpoint
    assert run(recipe) == 0
    assert weights.read_bytes() == tuned
    os.truncate(weights, 999)
    with pytest.raises(UserError, match=r"draft/model\.safetensors"):
        run(recipe)


def test_a_finished_run_makes_its_best_draft_again(job, tmp_path, followed):
    recipe = job(tmp_path / "run", max_steps=8)
    assert run(recipe) == 0
    kept = read_json(recipe.folder / "held_out" / "measurements.json")["kept"]
    assert kept > 0
    weights = recipe.folder / "draft" / "model.safetensors"
    distilled = weights.read_bytes()
    shutil.rmtree(recipe.folder / "draft")
    assert run(recipe) == 0
    assert weights.read_bytes() == distilled


@pytest.mark.real
def test_the_terminal_names_each_stage_and_shows_nothing_that_a_user_cannot_mend(job, tmp_path):
    """The script is run by its path from another folder, as a reader may do."""
    file = tmp_path / "recipe.yaml"
    changes = {"use_peft": True, "activation_checkpointing": True, "disable_tqdm": False}
    file.write_text(dump(job(tmp_path / "run", **changes, max_steps=4)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, train.__file__, "--recipe", str(file)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    stages = re.findall(r"^\[ *(\d+):(\d\d)\] (.+)$", done.stdout, flags=re.MULTILINE)
    assert [name for *_, name in stages] == [
        "Check the pair, collect prompts",
        "The target's outputs are generated",
        "Prepare the base draft",
        "Distil the draft",
        "Save the draft",
        "Measure the drafts",
        "Done",
    ]
    began = [60 * int(minutes) + int(seconds) for minutes, seconds, _ in stages]
    assert began == sorted(began)
    # bars only; what takes a moment has none (loading and writing these models)
    shown = {line for line in re.split(r"[\r\n]+", done.stderr) if line.strip()}
    assert all(re.match(r"([\w =.]+:)? *\d+%\|", line) for line in shown), shown
    assert not any(line.startswith(("Loading", "Writing")) for line in shown)


@pytest.mark.parametrize("gpu", [True, False])
def test_a_gpu_that_stays_idle_is_named(job, tmp_path, monkeypatch, capsys, gpu):
    monkeypatch.setattr(train, "run_stages", lambda *_: 0)
    monkeypatch.setattr(train, "use_machine", lambda *_: None)
    monkeypatch.setattr(train, "join_processes", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    recipe = job(tmp_path / "run")
    training = recipe.training | {"use_cpu": True}
    assert run(dataclasses.replace(recipe, training=training)) == 0
    assert ("--use_cpu false" in capsys.readouterr().out) == gpu
