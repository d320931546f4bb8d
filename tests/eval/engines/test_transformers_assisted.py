"""`--engine transformers`: its counts by hand and against our decoder, its text, its refusals."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, Lfm2Config

from align.checkpoint import Checkpoint
from align.errors import UserError
from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Sampling
from eval.engines.contender import Task
from eval.engines.transformers_assisted import (
    Assisted,
    Draft,
    kv_bytes,
    load_drafts,
    log_steps,
    measure_assisted,
)
from eval.prompts import Prompt, PromptSet
from eval.reporting.fields import read_report
from eval.reporting.page import render_page
from eval.reporting.warnings import find_warnings
from eval.run import main, parse
from tests.byte_level import SHAPE, noisy, save
from tests.mtp import mtp_config

FEW = ("--max_new_tokens", "8")


@pytest.fixture(scope="module")
def others(tmp_path_factory, tiny_llama):
    """Drafts `wide` of more rows, `other` with other token ids, and `shared` of another kind."""
    root = tmp_path_factory.mktemp("others")
    (root / "shared").mkdir()
    (root / "shared" / "compact.json").write_text("{}")
    save(root / "wide", tiny_llama(spread=4, **SHAPE | {"vocab_size": 264}))
    save(root / "other", tiny_llama(**SHAPE))
    path = root / "other" / "tokenizer.json"
    tokens = json.loads(path.read_text())
    vocabulary = tokens["model"]["vocab"]
    ids = list(vocabulary.values())
    tokens["model"]["vocab"] = dict(zip(vocabulary, [*reversed(ids[:256]), 256], strict=True))
    path.write_text(json.dumps(tokens))
    return root


def run(folder, out, *more, engine="transformers"):
    what = ["--target", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl")]
    short = ["--max_new_tokens", "24", "--dtype", "float32", "--device", "cpu", "--gamma", "3"]
    return main([*what, *short, "--engine", engine, "--output_dir", str(out), *more])


def report_of(folder, out, *more, engine="transformers"):
    assert run(folder, out, *more, engine=engine) == 0
    return read_report(out / "report" / "report.json")


def assisted(target, draft=None, gamma=3):
    return Assisted(target, {"a": [5, 6, 7], "b": [5, 6, 7]}, draft, 0 if draft is None else gamma)


def measured(target, draft, gamma, count, tokens):
    """The output check of a draft on so many prompts, and the report."""
    prompts = [Prompt(str(i), prompt="x") for i in range(count)]
    timed = PromptSet("made up", prompts, [[5, 6, i] for i in range(count)])
    how = Decoding(Sampling(), frozenset(), tokens)
    about = {"relation": "identical", "strategy": "direct", "coverage": 1.0}
    drafts = {"draft": Draft("tiny", draft, about)}
    report = measure_assisted("tiny", target, drafts, gamma, Task(timed, how), str)
    return report.drafts["draft"].lossless, report


PREFILL = ([1, 2, 3], [1, 2, 4])  # drafted and emitted by the first call: not of the decode phase


def logged(*calls, max_new_tokens, gamma=3):
    """The run of these calls: [(drafted, emitted), …]."""
    drafted, emitted = zip(PREFILL, *calls, strict=True)
    seconds = [1.0, *(0.1 * i for i in range(1, len(emitted)))]
    run = PromptRun.of(Prompt("a", group="doc"), 2, seconds, emitted)
    return log_steps(run, drafted, emitted, gamma, max_new_tokens)


@pytest.mark.parametrize(
    ("last", "drafted", "accepted"),
    [
        (([3, 9], [3, 9]), 2, 2),  # the text ends in the draft: the target's next token is lost
        (([3, 9, 4], [3, 9]), 2, 2),  # what was drafted beyond the end does not count
        (([3, 1, 1], [3, 9]), 3, 1),  # the target ends the text
    ],
)
def test_blocks_by_hand(last, drafted, accepted):
    """A last block counts, whoever ended the text in it."""
    run = logged(([5, 6, 7], [5, 6, 7, 8]), ([1, 1, 1], [2]), last, max_new_tokens=12)
    assert run.problem() is None
    assert run.tokens == [1, 2, 4, 5, 6, 7, 8, 2, 3, 9]
    assert (run.prefill_tokens, run.prefill_seconds) == (3, 1.0)
    assert run.block_seconds == pytest.approx([0.1, 0.2, 0.3])
    assert run.block_tokens == [4, 1, 2]
    assert run.drafted == [3, 3, drafted]
    assert run.accepted == [3, 0, accepted]
    assert run.whole_blocks == 3
    assert run.group == "doc"


@pytest.mark.parametrize(
    ("last", "max_new_tokens", "late"),
    [
        (([5], [5, 6]), 6, 2),  # one token was drafted where three are due
        (([5], [9]), 6, 2),  # the same, and rejected
        (([], [5]), 5, 2),  # there was no room for any
        (([9], [9]), 7, 1),  # the same, where the draft ends before the room does
        (([5, 6, 7], [5, 6, 7, 8]), 8, 0),  # a full draft fits
    ],
)
def test_a_block_that_the_length_limit_can_cut_does_not_count(last, max_new_tokens, late):
    run = logged(([1, 1, 1], [2]), last, max_new_tokens=max_new_tokens)
    assert run.problem() is None
    assert (run.late, run.whole_blocks) == (late, 2 - late)


def test_each_prompt_has_random_numbers_of_its_own(tiny_llama):
    engine, how = assisted(tiny_llama(spread=1)), Decoding(Sampling(1.0), frozenset(), 20)
    one, again, other = (engine.decode(Prompt(i), how).run.tokens for i in "aab")
    assert one == again
    assert one != other


@pytest.mark.parametrize("noise", [0.0, 0.1, 10.0])
@pytest.mark.parametrize("gamma", [1, 4])
def test_lossless_in_fp32(tiny_llama, noise, gamma):
    target, prompt = tiny_llama(spread=4), Prompt("a")
    engines = assisted(target), assisted(target, noisy(tiny_llama(spread=4), noise), gamma)
    how = Decoding(Sampling(), frozenset(), 30)
    plain, drafted = (engine.decode(prompt, how).run for engine in engines)
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens) == 30
    assert plain.problem() is drafted.problem() is None
    if noise == 0:  # the target itself: every token is accepted
        assert drafted.drafted[0] == drafted.accepted[0] == gamma
        assert drafted.accepted == drafted.drafted
    # a stop amid the text ends both in the same place, in a block that counts
    stops = frozenset(plain.tokens[11:12])
    how = Decoding(Sampling(), stops, 30)
    outputs = [engine.decode(prompt, how) for engine in engines]
    expected = plain.tokens[: plain.tokens.index(*stops) + 1]
    assert [output.run.tokens for output in outputs] == [expected, expected]
    assert all(output.ended for output in outputs)
    run = outputs[1].run
    assert run.whole_blocks == len(run.block_tokens)
    assert run.problem() is None


def test_the_target_as_its_own_draft_is_accepted_when_sampled(tiny_llama):
    """At temperature 1: else transformers warps the draft's distribution twice."""
    engine = assisted(tiny_llama(spread=4), tiny_llama(spread=4))
    run = engine.decode(Prompt("a"), Decoding(Sampling(1.0), frozenset(), 40)).run
    assert run.accepted == run.drafted
    assert run.drafted[:8] == [3] * 8


def test_one_report_of_two_drafts(folder, tmp_path):
    drafts = ("--draft", f"bad={folder / 'draft'}", "--draft", f"self={folder / 'target'}")
    report = report_of(folder, tmp_path / "a", *drafts)
    ours = report_of(folder, tmp_path / "b", *drafts, engine="torch")
    assert report.engine == "transformers"
    assert report.prompts.sha256 == ours.prompts.sha256
    own, bad = report.drafts["self"], report.drafts["bad"]
    assert own.tau.mean == 4
    assert own.accepted_over_drafted.mean == 1
    assert 1 <= bad.tau.mean < 4
    assert bad.tau.n == bad.speedup.n == 12
    assert bad.by_category["odd"].tau.n == 6
    assert {draft.lossless.identical for draft in (own, bad)} == {12}
    assert bad.memory == ours.drafts["bad"].memory
    assert bad.alpha is None
    assert "--engine torch" in {e.field: e.reason for e in bad.missing}["alpha"]
    assert (own.gamma, own.gamma_policy[:5]) == (3, "fixed")
    assert report.gain[0].tau.mean == pytest.approx(4 - bad.tau.mean)
    assert report.gain[0].alpha is None
    assert "measured in transformers" in render_page(report)
    # the same texts as our decoder's
    tokens = {row.id: row.tokens for row in bad.per_prompt}
    assert tokens == {row.id: row.tokens for row in ours.drafts["bad"].per_prompt}


def test_a_sampled_report(folder, tmp_path):
    report = report_of(
        folder, tmp_path, "--draft", str(folder / "draft"), "--temperature", "0.8", *FEW
    )
    how, draft = report.decoding, report.drafts["draft"]
    assert (how.verification, how.draft_sample_method) == ("rejection sampling", "probabilistic")
    assert draft.lossless.identical == 12  # measured greedily
    assert (draft.sampled_check.prompts, report.broken) == (12, [])
    assert all(row.logprob < 0 for row in draft.per_prompt)
    assert "lossy-rule" not in {warning.code for warning in find_warnings(report)}


def test_other_tokens_are_not_explained_away(tiny_llama, monkeypatch):
    """A verification that mostly takes the draft's word is found out."""
    target = tiny_llama(spread=4)
    honest = type(target)._get_candidate_generator

    def believed(self, *args, **given):
        given["generation_config"].assistant_ensemble_weight = 0.1
        return honest(self, *args, **given)

    monkeypatch.setattr(type(target), "_get_candidate_generator", believed)
    found, report = measured(target, noisy(tiny_llama(spread=4), 10.0), 2, 3, 20)
    assert found.unexplained == 3
    assert find_warnings(report)[0].code == "mismatch"


@pytest.mark.parametrize("in_fp32", [False, True])
def test_a_tie_is_one_only_where_fp32_agrees(tiny_llama, in_fp32):
    """A target whose wide forwards have other last bits, in bf16 alone or in fp32 as well."""
    target = tiny_llama().bfloat16()

    def blur(model, args, output):
        logits = output.logits
        if logits.shape[1] > 1 and (in_fp32 or logits.dtype == torch.bfloat16):
            logits += 0.02 * torch.linspace(0, 1, logits.shape[-1])

    target.register_forward_hook(blur)
    found, _ = measured(target, tiny_llama().bfloat16(), 4, 6, 24)
    ties, unexplained = found.tie_divergences, found.unexplained
    assert (ties == 0 < unexplained) if in_fp32 else (unexplained == 0 < ties)
    assert all(entry.gap <= 2 * entry.error for entry in found.divergences)


def test_the_report_of_a_run_is_not_replaced(folder, tmp_path, capsys):
    (tmp_path / "draft").mkdir()
    recipe = {"target": str(folder / "target"), "draft": None, "temperature": 0.0, "top_k": None}
    recipe |= {"top_p": 1.0, "max_new_tokens": 8, "dtype": "float32"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    (tmp_path / "vocab_check.json").write_text("{}")
    (tmp_path / "report").mkdir()
    report = tmp_path / "report" / "report.json"
    servers = ["--base_url", "http://h:1", "--baseline_url", "http://h:2"]
    for asked, name in (
        (["--engine", "transformers", "--gamma", "2"], "transformers"),
        (["--engine", "vllm", "--gamma", "2"], "vllm"),
        (["--engine", "vllm", *servers], "served"),
        (servers, "served"),
    ):
        run = ["--run", str(tmp_path), *asked]
        assert parse(run).output_dir == tmp_path.with_name(f"{tmp_path.name}-{name}")
        place = ["--output_dir", f"{tmp_path}/draft/.."]
        report.write_text('{"engine": "torch"}')
        with pytest.raises(SystemExit):
            main([*run, *place])
        assert "--output_dir" in capsys.readouterr().err
        report.write_text('{"engine": "vllm"}')  # that of a run whose target only servers compute
        assert parse([*run, *place]).output_dir.samefile(tmp_path)
    assert parse(["--run", str(tmp_path)]).output_dir == tmp_path


def test_a_checkpoint_s_own_generation_config_is_left_aside(tiny_llama):
    model = tiny_llama(spread=4)
    how = Decoding(Sampling(), frozenset(), 24)
    plain = assisted(model).decode(Prompt("a"), how).run.tokens
    model.generation_config = GenerationConfig(repetition_penalty=5.0)
    assert assisted(model).decode(Prompt("a"), how).run.tokens == plain


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("other", "Draft 'other': its vocabulary is .*--engine torch"),
        ("shared", r"Draft 'shared': .*--engine torch"),
        ("prompt-lookup", "Draft 'prompt-lookup': .*--engine torch"),
    ],
)
def test_drafts_that_cannot_assist(folder, others, tmp_path, capsys, draft, says):
    spec = draft if draft == "prompt-lookup" else str(others / draft)
    assert run(folder, tmp_path, "--draft", spec) == 2
    assert re.search(says, capsys.readouterr().err)


def test_a_draft_of_more_rows_is_cut(folder, others, tmp_path):
    report = report_of(folder, tmp_path, "--draft", str(others / "wide"), *FEW)
    block = report.drafts["wide"]
    assert block.vocabulary.strategy == "padded"
    assert block.lossless.identical == 12


def test_targets_with_linear_attention():
    """LFM2 has layers without keys and values; transformers drafts for no Qwen3-Next."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = Lfm2Config(**shape, **heads, layer_types=["conv", "full_attention"])
    assert kv_bytes(AutoModelForCausalLM.from_config(config)) == 2 * 2 * 8 * 4
    stateful = AutoModelForCausalLM.from_config(mtp_config("qwen3_next"))
    with pytest.raises(UserError, match="--engine torch"):
        load_drafts(Checkpoint("org/next", Path()), stateful, {"d": "no/draft"}, torch.float32)
