"""`--engine transformers`: its counts by hand and against our decoder, its text, its refusals."""

import json
import re

import pytest
import torch
from transformers import GenerationConfig

from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Sampling
from eval.engines.transformers_assisted import Assisted, log_steps, measure_assisted
from eval.prompts import Prompt, PromptSet
from eval.reporting.fields import read_report
from eval.reporting.page import render_page
from eval.reporting.warnings import find_warnings
from eval.run import main
from tests.byte_level import SHAPE, noisy, save

FEW = ("--max_new_tokens", "8")


@pytest.fixture(scope="module")
def others(tmp_path_factory, tiny_llama):
    """Drafts `wide` of more rows, `other` with other token ids, and `compact`, a trimmed one."""
    root = tmp_path_factory.mktemp("others")
    (root / "compact").mkdir()
    (root / "compact" / "compact.json").write_text("{}")
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


class Ids:
    """A tokenizer, as far as an engine needs one."""

    eos_token_id, decode = None, staticmethod(str)


def assisted(target, draft=None, gamma=3):
    engine = Assisted("tiny", target, Ids(), gamma)
    if draft is not None:
        about = {"relation": "identical", "strategy": "direct", "coverage": 1.0}
        engine.add("draft", "tiny", draft, about)
    return engine


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
    assert run.problem(blocks=True) is None
    assert run.tokens == [1, 2, 4, 5, 6, 7, 8, 2, 3, 9]
    assert (run.prefill_tokens, run.prefill_seconds) == (3, 1.0)
    assert run.block_seconds == pytest.approx([0.1, 0.2, 0.3])
    assert run.block_tokens == [4, 1, 2]
    assert run.drafted == [3, 3, drafted]
    assert run.accepted == [3, 0, accepted]
    assert run.whole_blocks == 3
    assert run.group == "doc"


@pytest.mark.parametrize(
    ("last", "max_new_tokens", "truncated"),
    [
        (([5], [5, 6]), 6, True),  # one token was drafted where three are due
        (([5], [9]), 6, True),  # the same, and rejected
        (([], [5]), 5, True),  # there was no room for any
        (([9], [9]), 7, False),  # the draft ended before the room did
        (([5, 6, 7], [5, 6, 7, 8]), 8, False),  # a full draft fits
    ],
)
def test_a_block_that_the_length_limit_can_cut_does_not_count(last, max_new_tokens, truncated):
    run = logged(([1, 1, 1], [2]), last, max_new_tokens=max_new_tokens)
    assert run.problem(blocks=True) is None
    assert run.last_truncated == truncated
    assert run.whole_blocks == (1 if truncated else 2)


def test_each_prompt_has_random_numbers_of_its_own(tiny_llama):
    engine, how = assisted(tiny_llama(spread=1)), Decoding(Sampling(1.0), frozenset(), 20)
    one, again, other = (engine.decode(None, Prompt(i), [5, 6, 7], how).tokens for i in "aab")
    assert one == again
    assert one != other


@pytest.mark.parametrize("noise", [0.0, 0.1, 10.0])
@pytest.mark.parametrize("gamma", [1, 4])
def test_lossless_in_fp32(tiny_llama, noise, gamma):
    engine = assisted(tiny_llama(spread=4), noisy(tiny_llama(spread=4), noise), gamma)
    how = Decoding(Sampling(), frozenset(), 30)
    plain, drafted = (engine.decode(way, Prompt("a"), [5, 6, 7], how) for way in (None, 0))
    assert drafted.tokens == plain.tokens
    assert len(plain.tokens) == 30
    assert plain.problem(blocks=True) is drafted.problem(blocks=True) is None
    if noise == 0:  # the target itself: every token is accepted
        assert drafted.drafted[0] == drafted.accepted[0] == gamma
        assert drafted.accepted == drafted.drafted
    # a stop amid the text ends both in the same place, in a block that counts
    stops = frozenset(plain.tokens[11:12])
    how = Decoding(Sampling(), stops, 30)
    runs = [engine.decode(way, Prompt("a"), [5, 6, 7], how) for way in (None, 0)]
    assert runs[0].tokens == runs[1].tokens == plain.tokens[: plain.tokens.index(*stops) + 1]
    assert runs[1].whole_blocks == len(runs[1].block_tokens)
    assert runs[1].problem(blocks=True) is None


def test_the_target_as_its_own_draft_is_accepted_when_sampled(tiny_llama):
    """At temperature 1: else transformers warps the draft's distribution twice."""
    engine = assisted(tiny_llama(spread=4), tiny_llama(spread=4))
    how = Decoding(Sampling(1.0), frozenset(), 40)
    run = engine.decode(0, Prompt("a"), [5, 6, 7], how)
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
    assert bad.by_context["below 512 tokens"].tau.n == 12
    assert {draft.lossless.identical for draft in (own, bad)} == {12}
    assert bad.memory == ours.drafts["bad"].memory
    assert bad.alpha is None
    assert "--engine torch" in {e.field: e.reason for e in bad.missing}["alpha"]
    assert (own.gamma, own.gamma_policy[:5]) == (3, "fixed")
    assert report.gain[0].tau.mean == pytest.approx(4 - bad.tau.mean)
    assert report.gain[0].alpha is None
    assert "transformers, cpu" in render_page(report)
    # the same texts as our decoder's
    tokens = {row.id: row.tokens for row in bad.per_prompt}
    assert tokens == {row.id: row.tokens for row in ours.drafts["bad"].per_prompt}


def test_an_interrupted_evaluation_goes_on(folder, tmp_path, monkeypatch, capsys):
    drafts = (*FEW, "--draft", f"bad={folder / 'draft'}", "--draft", f"self={folder / 'target'}")
    whole = report_of(folder, tmp_path / "whole", *drafts)
    calls, decode = [], Assisted.decode

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 3 + 2 * 3 + 2:  # the warm-up, two prompts, and within the third
            raise KeyboardInterrupt
        return decode(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Assisted, "decode", interrupted)
        assert run(folder, tmp_path / "cut", *drafts) == 130
    assert "speed at T=0 2" in capsys.readouterr().err
    resumed = report_of(folder, tmp_path / "cut", *drafts)
    assert resumed.provenance["resumed"]
    for name, draft in resumed.drafts.items():
        assert draft.tau == whole.drafts[name].tau
        assert draft.lossless == whole.drafts[name].lossless


def test_a_sampled_report(folder, tmp_path):
    report = report_of(
        folder, tmp_path, "--draft", str(folder / "draft"), "--temperature", "0.8", *FEW
    )
    assert report.decoding.verification == "rejection sampling"
    assert report.drafts["draft"].lossless.identical == 12  # measured greedily
    assert "lossy-rule" not in {warning.code for warning in find_warnings(report)}


def test_other_tokens_are_not_explained_away(tiny_llama, monkeypatch, journal):
    """A verification that mostly takes the draft's word is found out."""
    target = tiny_llama(spread=4)
    engine = assisted(target, noisy(tiny_llama(spread=4), 10.0), 2)
    honest = type(target)._get_candidate_generator

    def believed(self, *args, **given):
        given["generation_config"].assistant_ensemble_weight = 0.1
        return honest(self, *args, **given)

    monkeypatch.setattr(type(target), "_get_candidate_generator", believed)
    prompts = [Prompt(str(i), prompt="x") for i in range(3)]
    timed = PromptSet("made up", prompts, [[5, 6, i] for i in range(3)])
    how = Decoding(Sampling(), frozenset(), 20)
    report = measure_assisted(engine, timed, how, journal, {})
    assert report.drafts["draft"].lossless.unexplained == 3
    assert find_warnings(report)[0].code == "mismatch"


@pytest.mark.parametrize("in_fp32", [False, True])
def test_a_tie_is_one_only_where_fp32_agrees(tiny_llama, journal, in_fp32):
    """A target whose wide forwards have other last bits, in bf16 alone or in fp32 as well."""
    target = tiny_llama().bfloat16()
    engine = assisted(target, tiny_llama().bfloat16(), 4)

    def blur(model, args, output):
        logits = output.logits
        if logits.shape[1] > 1 and (in_fp32 or logits.dtype == torch.bfloat16):
            logits += 0.02 * torch.linspace(0, 1, logits.shape[-1])

    target.register_forward_hook(blur)
    prompts = [Prompt(str(i), prompt="x") for i in range(6)]
    timed = PromptSet("made up", prompts, [[5, 6, i] for i in range(6)])
    how = Decoding(Sampling(), frozenset(), 24)
    report = measure_assisted(engine, timed, how, journal, {"command": "test"})
    found = report.drafts["draft"].lossless
    ties, unexplained = found.tie_divergences, found.unexplained
    assert (ties == 0 < unexplained) if in_fp32 else (unexplained == 0 < ties)
    assert all(entry.gap <= 2 * entry.error for entry in found.divergences)


def test_the_report_of_a_run_is_not_replaced(folder, tmp_path, capsys):
    (tmp_path / "draft").mkdir()
    recipe = {"target": str(folder / "target"), "draft": None, "temperature": 0.0, "top_k": None}
    recipe |= {"top_p": 1.0, "max_new_tokens": 8, "dtype": "float32"}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    (tmp_path / "vocab_check.json").write_text("{}")
    with pytest.raises(SystemExit):
        main(["--engine", "transformers", "--run", str(tmp_path), "--gamma", "2"])
    assert "--output_dir" in capsys.readouterr().err


def test_a_checkpoint_s_own_generation_config_is_left_aside(folder, tmp_path, tiny_llama):
    model = tiny_llama(spread=4, vocab_size=257, eos_token_id=256)
    model.generation_config = GenerationConfig(repetition_penalty=5.0, eos_token_id=256)
    save(tmp_path / "target", model)
    how = Decoding(Sampling(), frozenset([256]), 24)
    texts = [
        Assisted.load(str(where), {}, 3, torch.float32, "cpu")
        .decode(None, Prompt("a"), [5, 6, 7], how)
        .tokens
        for where in (folder / "target", tmp_path / "target")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        ("other", "Draft 'other': its vocabulary is .*--engine torch"),
        ("compact", r"Draft 'compact': .*the folder above compact/"),
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
