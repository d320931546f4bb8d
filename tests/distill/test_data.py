"""What is trained on: answers, fixed text, on-policy text, in one kind of cache."""

import dataclasses
import json
import random
import shutil

import pytest
import torch

from distill import budget, judged, train
from distill.answer_cache import FIXED_TEXT, CachedAnswer, CacheError, Rows
from distill.fixed_text import SHORTEST, fixed_rows
from distill.judged import (
    Writer,
    draft_that_writes,
    judge,
    similar,
    with_fixed_text,
    with_on_policy_text,
)
from distill.models import TargetOfRun, check_models
from distill.near_duplicates import NearDuplicates, without_near_duplicates
from distill.prompt_sets import collect_prompts
from distill.recipe import RecipeError, build_recipe
from distill.train import run
from eval.prompts import Prompt, PromptError, PromptSet

MIXED = {"answers": 0.5, "fixed": 0.25, "on_policy": 0.25}


@pytest.fixture(scope="module")
def text(folder, texts):
    """A file of fixed text, one of whose lines is an evaluation prompt with what follows it."""
    file = folder / "text.jsonl"
    words = sorted(set(texts[0].split()))
    lines = [" ".join(random.Random(i).choices(words, k=60)) for i in range(12)]
    lines.append(texts[12])
    file.write_text("\n".join(json.dumps({"text": line}) for line in lines))
    return str(file)


@pytest.fixture
def mixed(job, text, tmp_path):
    def make(name="run", **changes):
        keys = {"data": MIXED, "fixed_text": text, "draft": None, "num_draft_layers": 1}
        return job(tmp_path / name, **(keys | changes))

    return make


def loaded(recipe):
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    return pair, prompts, TargetOfRun(recipe, pair, prompts)


def test_rows_of_a_pass_are_those_of_one_text_alone(mixed):
    target = loaded(mixed())[2]
    texts = [(7, [3, 4, 5], [6, 8, 9, 10]), (2, [11], [12, 13]), (4, [14, 15], [16])]
    for answer, (index, before, taught) in zip(judge(target.decoder, texts, 6), texts, strict=True):
        ids = torch.tensor([before + taught])
        with torch.no_grad():
            logp = target.loaded.model(ids).logits[0, len(before) - 1 : -1].log_softmax(-1)
        assert (answer.index, answer.prompt_ids.tolist()) == (index, before)
        assert answer.response_ids.tolist() == taught
        torch.testing.assert_close(
            answer.top_logprobs, logp.topk(6).values, atol=1e-4, rtol=1e-4
        )  # fp32 sums in another order


def test_texts_are_read_with_others_of_their_length(monkeypatch):
    monkeypatch.setattr(judged, "POSITIONS", 20)
    texts = [(i, [1], [2] * length) for i, length in enumerate([3, 9, 30, 4, 8, 2])]
    groups = similar(texts)
    assert [[len(taught) for *_, taught in group] for group in groups] == [[30], [9, 8], [4, 3, 2]]


def test_caches_one_after_another_are_one_sequence():
    rows = [CachedAnswer(i, *torch.zeros(4, 1)) for i in range(5)]
    joined = Rows([rows[:2], [], rows[2:]])
    assert len(joined) == 5
    assert list(joined) == rows
    assert joined[1:4] == rows[1:4]
    with pytest.raises(IndexError):
        joined[5]


def test_a_mixed_run_trains_on_all_kinds_and_goes_on_without_the_target(mixed, monkeypatch):
    recipe = mixed()
    seen = []

    def distil(recipe, pair, prepared, rows, _):
        seen.append(list(rows))
        raise KeyboardInterrupt

    def nothing(*_):
        raise AssertionError("made again")

    monkeypatch.setattr(train, "distil_draft", distil)
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    monkeypatch.setattr(judged, "judge", nothing)
    monkeypatch.setattr(judged, "generate_batched", nothing)
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    first, again = seen
    assert len({row.index for row in first}) == len(first)
    # 11 prompts are answered, and 5.5 rows come on top of each other kind
    assert [len(row.prompt_ids) == 1 for row in first] == [False] * 11 + [True] * 6 + [False] * 6
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one.response_ids, other.response_ids)
        assert torch.equal(one.top_logprobs, other.top_logprobs)


@pytest.mark.parametrize(
    "changes",
    [
        {"data": {"fixed": 1.0}},
        {"data": {"on_policy": 1.0}, "draft": "sibling", "fixed_text": None},
    ],
)
def test_a_run_on_any_kind_ends_with_a_report(mixed, folder, changes):
    if changes.get("draft"):
        changes = changes | {"draft": str(folder / "moved")}
    recipe = mixed(**changes, max_steps=2)
    assert run(recipe) == 0
    report = json.loads((recipe.folder / "report" / "report.json").read_text())
    assert report["drafts"]["tuned"]["alpha"]["n"] == 6


def test_an_interrupted_pass_goes_on(mixed, monkeypatch):
    recipe = mixed(data={"fixed": 1.0})
    _, prompts, target = loaded(recipe)
    rows = fixed_rows(recipe, prompts)
    monkeypatch.setattr(judged, "POSITIONS", 70)
    monkeypatch.setattr(judged, "ANSWERS_PER_SHARD", 1)
    passes = []

    def counted(*args, judge=judged.judge):
        passes.append(args)
        if len(passes) == 4:
            raise KeyboardInterrupt
        return judge(*args)

    monkeypatch.setattr(judged, "judge", counted)
    with pytest.raises(KeyboardInterrupt):
        with_fixed_text(recipe, rows, target, None)
    whole = with_fixed_text(recipe, rows, target, None)
    assert [row.index - FIXED_TEXT for row in whole] == list(range(len(rows)))
    assert len(passes) == 1 + len(similar([(i, row[:1], row[1:]) for i, row in enumerate(rows)]))
    with pytest.raises(CacheError, match="made with another texts"):
        with_fixed_text(recipe, [row[:-1] for row in rows], target, None)


def test_text_of_another_draft_is_written_anew(mixed, folder):
    one, other = ({"draft": str(folder / name), "fixed_text": None} for name in ("moved", "target"))
    data = {"data": {"on_policy": 1.0}}
    texts = []
    for name, draft in (("one", one), ("other", other)):
        recipe = mixed(name, **draft, **data)
        pair, _, target = loaded(recipe)
        texts.append(with_on_policy_text(recipe, pair, target, []))
    for mine, theirs in zip(*texts, strict=True):
        assert torch.equal(mine.prompt_ids, theirs.prompt_ids)
    assert [a.response_ids.tolist() for a in texts[0]] != [
        a.response_ids.tolist() for a in texts[1]
    ]
    shutil.copytree(tmp := recipe.folder, tmp.parent / "copied")
    recipe = mixed("copied", **one, **data)
    pair, _, target = loaded(recipe)
    with pytest.raises(CacheError, match="made with another draft"):
        with_on_policy_text(recipe, pair, target, [])


def test_a_draft_writes_what_it_would_draft(mixed, folder):
    recipe = mixed(draft_vocab_size=270)
    pair, _, target = loaded(recipe)
    rows = [CachedAnswer(0, *torch.tensor([[5, 6, 7], [8, 9, 10]]), torch.arange(6).view(3, 2),
                         torch.full((3, 2), -1.0))]  # fmt: skip
    train.prepare_draft(recipe, pair, target, rows)
    drafter = draft_that_writes(str(recipe.folder / "prepared"), target.loaded, "direct")
    writer = Writer(drafter)
    logits = writer.forward(torch.tensor([[5, 6]]), 0, writer.new_cache(1, 2))
    assert logits.shape == (1, 2, 300)
    assert (logits > float("-inf")).sum() == 2 * 270
    own = drafter.decoder.forward(torch.tensor([[5, 6]]), 0, writer.new_cache(1, 2))
    assert torch.equal(logits.argmax(-1), drafter.token_ids[own.argmax(-1)])
    with pytest.raises(RecipeError, match="has ids of its own or no model of its own"):
        draft_that_writes("prompt-lookup", target.loaded, "direct")


# --- fixed text


def test_passages_that_are_held_out_are_cut_out():
    held_out = NearDuplicates(["one two three four five six seven eight"])
    text = "a b c d e\n\nf g h i j\n \nOne two, three four five six seven.\n\nk l m n o"
    assert list(without_near_duplicates(text, held_out)) == [
        "a b c d e\n\nf g h i j",
        "k l m n o",
    ]


def test_rows_leave_out_evaluation_tuning_and_held_out_prompts(mixed):
    recipe = mixed()
    _, prompts, target = loaded(recipe)
    rows = fixed_rows(recipe, prompts)
    first = target.tokenizer.decode(rows[0])
    followed = PromptSet("held out", [Prompt("a", prompt=first)], [[1]])
    prompts = dataclasses.replace(prompts, held_out=followed)
    rows = fixed_rows(recipe, prompts)
    parts = (prompts.evaluation, prompts.tuning, prompts.held_out)
    held_out = NearDuplicates(p.text for part in parts for p in part.prompts)
    assert len(rows) == recipe.rows(len(prompts.training.ids))["fixed"]
    longest = max(map(len, prompts.training.ids)) + recipe.answer_max_new_tokens
    for row in rows:
        assert SHORTEST <= len(row) <= longest
        assert not held_out.closest(target.tokenizer.decode(row))[0]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "x", "is no .txt, .jsonl or .jsonl.gz file"),
        ("a.jsonl", '{"text": "a b"}\n{"words": 1}', "line 2: write"),
        ("a.jsonl", "words", "line 1: not JSON"),
        ("a.txt", "short", "has 0 rows .* data asks for 6; lower its share"),
    ],
)
def test_text_that_cannot_be_used_is_refused_first(mixed, tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    recipe = mixed(fixed_text=str(tmp_path / name))
    with pytest.raises(PromptError, match=message):
        run(recipe)
    assert not recipe.folder.exists()


def test_a_text_file_is_cut_into_rows(mixed, tmp_path, texts):
    words = random.Random(3).choices(sorted(set(texts[0].split())), k=400)
    (tmp_path / "a.txt").write_text(
        "\n\n".join(" ".join(words[at : at + 20]) for at in range(0, 400, 20))
    )
    recipe = mixed(fixed_text=str(tmp_path / "a.txt"))
    assert len(fixed_rows(recipe, loaded(recipe)[1])) == 6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"answers": 0.5}}, "answers: 0.5, which sums to 0.5; fractions must sum to 1"),
        ({"data": {"anwsers": 1.0}}, "data is"),
        ({"data": {"answers": 1.5, "fixed": -0.5}}, "less than or equal to 1"),
        ({"fixed_text": "a.txt"}, "fixed_text is 'a.txt', but data has no fixed"),
        ({"on_policy_draft": "a"}, "on_policy_draft is 'a', but data has no on_policy"),
        ({"data": {"answers": 0.5, "fixed": 0.5}}, "fixed_text is null, and train_prompts is a"),
        ({"data": {"on_policy": 1.0}}, "on_policy alone, but draft is null"),
        ({"data": {"fixed": 1.0}, "fixed_text": "a.txt", "minutes": 5.0}, "without answers, but"),
        (
            {"data": {"answers": 0.5, "on_policy": 0.5}, "answers": "server"},
            "but answers is server, and other text",
        ),
    ],
)
def test_mixtures_that_make_no_sense_are_refused(changes, message):
    keys = {"target": "t", "train_prompts": "p.jsonl", "eval_prompts": "e.jsonl"}
    with pytest.raises(RecipeError, match=message):
        build_recipe(keys | changes)


def test_minutes_are_planned_with_the_rows_beside_the_answers(mixed, monkeypatch, capsys):
    recipe = mixed(minutes=5.0, max_steps=-1, num_train_epochs=2.0)

    def cut(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "make_draft", cut)
    monkeypatch.setattr(budget, "STARTED", budget.time.monotonic())
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    shown = capsys.readouterr().out
    assert "11 of 11 answers" in shown
    assert "12 rows of other text" in shown
    assert "11 steps" in shown  # of 4 rows: 22 rows, twice
