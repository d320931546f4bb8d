import errno
import json
import random
import re
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from safetensors import safe_open
from transformers import BloomConfig, Lfm2Config, MambaConfig

from align.files import atomic_file
from align.sources import cache_folder, load_tokenizer
from distill import models, train
from distill.recipe import RecipeError, dump
from distill.run_folder import refuse_another_run
from distill.train import main, run
from eval.prompts import PromptError
from tests.distill.conftest import WORDS


def test_a_full_disk_ends_a_run_with_its_reason_alone(tmp_path, monkeypatch, capsys):
    def check(recipe):
        with atomic_file(recipe.folder / "vocab_check.json"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train, "check_models", check)
    assert main(["--recipe", "code", "--output_dir", str(tmp_path)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ")
    assert "The disk is full" in shown
    assert "Free some space" in shown
    assert "Traceback" not in shown


def test_what_is_not_foreseen_keeps_its_traceback(tmp_path, monkeypatch):
    def check(recipe):
        raise PermissionError("vocab_check.json")

    monkeypatch.setattr(train, "check_models", check)
    with pytest.raises(PermissionError):
        main(["--recipe", "code", "--output_dir", str(tmp_path)])


PRUNED = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 270}


def no_target(*_, **__):
    raise AssertionError("the target was loaded")


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_draft_layers": 40}, "num_draft_layers 40 must be .* below the target's 2 layers"),
        ({"draft_vocab_size": 9_999_999}, "draft_vocab_size 9999999 must be .* at most 300"),
        ({"cache_top_k": 301}, "cache_top_k 301 is more than the 300 tokens"),
        ({"draft_vocab_size": 256}, "draft_vocab_size 256 must be at least 257 "),
    ],
)
def test_what_the_targets_files_refute_is_refused_first(
    job, tmp_path, monkeypatch, dry_run, changes, message
):
    monkeypatch.setattr(models, "load_target", no_target)
    recipe = job(tmp_path / "run", **(PRUNED | changes), dry_run=dry_run)
    with pytest.raises(ValueError, match=message):
        run(recipe)
    assert not recipe.folder.exists()


def test_a_smallest_head_holds_what_is_forced(folder, job, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load_target", no_target)
    assert len(load_tokenizer(str(folder / "target")).all_special_ids) == 1
    recipe = job(tmp_path / "run", **(PRUNED | {"draft_vocab_size": 257}))  # bytes and the stop
    with pytest.raises(AssertionError, match="the target was loaded"):
        run(recipe)


@pytest.mark.parametrize("key", ["target", "draft"])
@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MambaConfig(num_hidden_layers=1, hidden_size=8), "linear_attention layers keep a state"),
        (
            Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
            "conv layers keep",
        ),
        (BloomConfig(), "its configuration does not say how many positions it has"),
    ],
)
def test_a_family_that_cannot_be_decoded_is_refused_first(
    folder, job, tmp_path, monkeypatch, key, dry_run, config, message
):
    """The draft's as well: it would be found out when the answers are made and it is trained."""
    monkeypatch.setattr(models, "load_target", no_target)
    monkeypatch.setattr(
        models,
        "read_vocabulary",
        lambda spec, read=models.read_vocabulary: read(str(folder / "target")),
    )
    config.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").touch()
    recipe = job(tmp_path / "run", **{key: str(tmp_path / "model")}, dry_run=dry_run)
    with pytest.raises(ValueError, match=f"cannot be decoded here: {message}"):
        run(recipe)
    assert not recipe.folder.exists()


def test_a_draft_that_reads_fewer_positions_is_refused_first(
    folder, job, tmp_path, monkeypatch, tiny_llama
):
    monkeypatch.setattr(models, "load_target", no_target)
    short = shutil.copytree(folder / "target", tmp_path / "short")
    tiny_llama(1, vocab_size=300, max_position_embeddings=32).save_pretrained(short)
    recipe = job(tmp_path / "run", draft=str(short))
    with pytest.raises(ValueError, match=r"short', which reads 32 positions, .* take 3\d; lower"):
        run(recipe)
    assert not recipe.folder.exists()


def test_a_run_that_made_nothing_does_not_claim_its_folder(folder, job, tmp_path, monkeypatch):
    mistyped = job(tmp_path / "run", train_prompts=str(folder / "trian.jsonl"))
    with pytest.raises((PromptError, ValueError), match="trian"):
        run(mistyped)
    assert not mistyped.folder.exists()
    monkeypatch.setattr(train, "answer_prompts", no_target)
    with pytest.raises(AssertionError, match="the target was loaded"):  # it went as far as that
        run(job(tmp_path / "run"))
    with pytest.raises(RecipeError, match=r"another recipe \(max_steps: 40 -> 41\)"):
        run(job(tmp_path / "run", max_steps=41))
    with pytest.raises(AssertionError, match="the target was loaded"):  # a tracker changes nothing
        run(job(tmp_path / "run", report_to="tensorboard"))
    with pytest.raises(RecipeError, match=r"\(long_prompts: 'error' -> 'drop'\)"):
        run(job(tmp_path / "run", long_prompts="drop"))


def test_another_run_uses_the_answers_that_are_there(job, tmp_path, capsys):
    rng, prompts = random.Random(3), tmp_path / "train.jsonl"
    rows = [json.dumps({"prompt": " ".join(rng.choices(WORDS.split(), k=9))}) for _ in range(201)]
    prompts.write_text("\n".join(rows))

    def made(name, **changes):
        """How many answers are made, of how many: the held-out prompts' first, where there are."""
        keys = {"coverage_curve": True, "max_train_prompts": 100, "train_prompts": str(prompts)}
        assert run(job(tmp_path / name, name=name, **keys | changes)) == 0
        return re.findall(r"(\d+) of (\d+) answers made", capsys.readouterr().out)

    assert made("first") == [("100", "100")]
    assert made("rate", learning_rate=1.0) == [("0", "100")]
    assert made("rows", per_device_train_batch_size=2) == [("0", "100")]
    assert made("trained", loss="tv", num_train_epochs=3.0) == [("0", "100")]
    assert made("batched", answer_batch_size=3) == [("0", "100")]
    assert made("pruned", **PRUNED) == [("0", "100")]
    assert made("more", max_train_prompts=200) == [("0", "10"), ("100", "190")]
    assert made("again", max_train_prompts=200) == [("0", "10"), ("0", "190")]


def test_another_recipe_does_not_go_on_in_a_folder(job, tmp_path):
    recipe = job(tmp_path / "run")
    recipe.folder.mkdir()
    (recipe.folder / "recipe.yaml").write_text(dump(recipe))
    refuse_another_run(recipe)
    refuse_another_run(job(tmp_path / "run", answers="vllm", logging_steps=3))
    with pytest.raises(RecipeError, match=r"held_out_prompts: 32 -> 8\)"):
        refuse_another_run(job(tmp_path / "run", held_out_prompts=8))


@pytest.mark.parametrize("kind", [PRUNED, {}])
def test_the_target_is_gone_while_the_draft_trains(job, tmp_path, monkeypatch, kind):
    recipe = job(tmp_path / "run", **kind)
    loaded, drafts = [], []

    def load(*args, load=models.load_target):
        target = load(*args)
        loaded.append(weakref.ref(target.model))
        return target

    def distil(recipe, pair, prepared, *_):
        drafts.append(weakref.ref(prepared.model))
        assert [target() for target in loaded] == [None]
        raise KeyboardInterrupt

    def measure(*args, measure=train.evaluate):
        assert [target() is None for target in loaded] == [True, False]
        assert all(draft() is None for draft in drafts)
        return measure(*args)

    monkeypatch.setattr(models, "load_target", load)
    with monkeypatch.context() as patch:
        patch.setattr(train, "distil_draft", distil)
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
    # taken up after the answers, it trains without the target
    with monkeypatch.context() as patch:
        patch.setattr(models, "load_target", no_target)
        with pytest.raises(AssertionError, match="the target was loaded"):
            run(recipe)
    assert (recipe.folder / "draft" / "config.json").exists()
    monkeypatch.setattr(train, "evaluate", measure)
    assert run(recipe) == 0


def test_a_run_with_another_learning_rate_trains_on_the_first_ones_answers_at_once(
    job, tmp_path, monkeypatch
):
    trained_on = []

    def distil(recipe, pair, prepared, answers, steps):
        trained_on.append([answer.text.tolist() for answer in answers])
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "distil_draft", distil)
    for name, rate in (("first", 5e-3), ("second", 1e-3)):
        with pytest.raises(KeyboardInterrupt):
            run(job(tmp_path / name, learning_rate=rate))
        monkeypatch.setattr(models, "load_target", no_target)  # from the first run on
    assert trained_on[0] == trained_on[1]
    used = [
        json.loads((tmp_path / name / "answers.json").read_text()) for name in ("first", "second")
    ]
    assert used[0] == used[1]
    with pytest.raises(RecipeError, match=r"learning_rate: .* a --name of its own; answers that"):
        run(job(tmp_path / "first", learning_rate=1e-3))


def test_a_run_in_one_go_holds_no_draft_while_it_measures(job, tmp_path, monkeypatch):
    drafts = []

    def distil(*args, distil=train.distil_draft):
        drafts.append(weakref.ref(args[2].model))
        drafts.append(weakref.ref(distil(*args)))
        return drafts[-1]()

    def measure(*args):
        assert [draft() for draft in drafts] == [None, None]
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "distil_draft", distil)
    monkeypatch.setattr(train, "evaluate", measure)
    with pytest.raises(KeyboardInterrupt):
        run(job(tmp_path / "run", **PRUNED))
    assert len(drafts) == 2


def test_a_finished_run_keeps_what_is_needed_and_can_be_run_again(job, tmp_path, monkeypatch):
    recipe = job(tmp_path / "run", **PRUNED, save_steps=10)
    assert run(recipe) == 0
    folder = recipe.folder
    assert {path.name for path in folder.iterdir()} == {
        *(
            "recipe.yaml",
            "repeat.yaml",
            "clock.json",
            "provenance.json",
            "vocab_check.json",
            "prompts",
            "answers.json",
            "prepared",
        ),
        *("checkpoint-40", "draft", "report"),
    }
    left = {path.name for path in (folder / "checkpoint-40").iterdir()}
    assert {"complete", "model.safetensors", "trainer_state.json"} <= left
    pickles = [p for p in folder.rglob("*") if p.suffix in (".pt", ".pth", ".bin")]
    assert not pickles
    assert not (folder / "prepared" / "full_head.safetensors").exists()
    assert [p.parent.name for p in folder.rglob("README.md")] == ["draft"]  # our own card
    with safe_open(folder / "checkpoint-40" / "model.safetensors", "pt") as weights:
        assert "model.embed_tokens.weight" not in weights.keys()  # noqa: SIM118

    before = {p: p.stat().st_mtime_ns for p in folder.glob("draft/*.safetensors")}
    report = json.loads((folder / "report" / "report.json").read_text())
    (folder / "report" / "report.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(train, "distil_draft", no_target)  # trains nothing again
        assert run(recipe) == 0
    again = json.loads((folder / "report" / "report.json").read_text())
    assert again["drafts"]["tuned"]["alpha"] == report["drafts"]["tuned"]["alpha"]
    assert again["provenance"]["hashes"] == report["provenance"]["hashes"]
    assert again["provenance"]["lost_mass"] == report["provenance"]["lost_mass"] > 0
    assert before == {p: p.stat().st_mtime_ns for p in folder.glob("draft/*.safetensors")}

    shutil.rmtree(cache_folder() / "teacher")  # what is measured again needs no answers
    with monkeypatch.context() as patch:
        patch.setattr(train, "answer_prompts", no_target)
        assert run(recipe) == 0
    weights = folder / "draft" / "compact" / "model.safetensors"
    tuned = weights.read_bytes()
    shutil.rmtree(folder / "draft")  # it is made again from the last checkpoint
    assert run(recipe) == 0
    assert weights.read_bytes() == tuned


def test_the_terminal_names_each_stage_and_shows_nothing_that_a_user_cannot_mend(
    job, tmp_path, one_core
):
    file = tmp_path / "recipe.yaml"
    changes = {"use_peft": True, "activation_checkpointing": True, "disable_tqdm": False}
    file.write_text(dump(job(tmp_path / "run", **changes, max_steps=4)), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "distill/train.py", "--recipe", str(file)],
        cwd=Path(train.__file__).parents[1],
        preexec_fn=one_core,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    stages = re.findall(r"^\[ *(\d+):(\d\d)\] (.+)$", done.stdout, flags=re.MULTILINE)
    assert [name for *_, name in stages] == [
        "Check the pair, collect prompts",
        "The target answers the training prompts",
        "Prepare the draft",
        "Distil the draft",
        "Save the draft",
        "Measure the drafts",
        "Done",
    ]
    began = [60 * int(minutes) + int(seconds) for minutes, seconds, _ in stages]
    assert began == sorted(began)
    # bars only, each named; what takes a moment has none (loading and writing these models)
    shown = {line for line in re.split(r"[\r\n]+", done.stderr) if line.strip()}
    assert all(re.match(r"[\w =.]+: +\d+%\|", line) for line in shown), shown
    assert not any(line.startswith(("Loading", "Writing")) for line in shown)
