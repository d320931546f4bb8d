import ast
import collections
import itertools
import json
import random
import re
import shutil
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest

from align.checkpoint import Checkpoint
from align.errors import SourceError
from distill.dry_run import print_example
from distill.prompt_sets import (
    EMBEDDED,
    collect_prompts,
    evaluation_prompts,
    hold_out,
    keep_prompts,
    training_prompts,
)
from distill.recipe_files import RECIPES, RecipeError
from eval.chat_template import split_task
from eval.near_duplicates import CONTAINED, NEAR_DUPLICATE, NearDuplicates, drop_overlap, shingles
from eval.prompts import Prompt, PromptError, load_prompts

STDLIB, LICENCES = EMBEDDED

HUMAN_EVAL_LIKE = (
    "from typing import List\n\n\ndef below_zero(operations: List[int]) -> bool:\n"
    '    """ You are given a list of deposit and withdrawal operations on a bank account that\n'
    "    starts with zero balance. Detect if at any point the balance falls below zero.\n"
    '    >>> below_zero([1, 2, -4, 5])\n    True\n    """\n'
)
WORDS = [f"word{i}" for i in range(400)]


def text_of(rng, count):
    return " ".join(rng.choices(WORDS, k=count))


def jaccard(a, b):
    return len(a & b) / len(a | b)


def leaks(training, evaluation):
    """Pairs that are near-duplicates, by comparing all of them: no index, no sketch."""
    held_out = [(prompt.id, shingles(prompt.text)) for prompt in evaluation]
    for prompt in training:
        ours = shingles(prompt.text)
        for name, theirs in held_out:
            share = len(ours & theirs) / min(len(ours), len(theirs))
            if jaccard(ours, theirs) >= NEAR_DUPLICATE or share >= CONTAINED:
                yield prompt.id, name


# --- overlap


def test_shingles_and_jaccard():
    assert shingles("A b, c: d e f") == {"a b c d e", "b c d e f"}
    assert shingles("Too short") == {"too short"}
    assert shingles("🙂🙂") != shingles("→←?!")  # texts without words
    assert jaccard(shingles("a b c d e f"), shingles("a b c d e g")) == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    "text",
    [
        "请写一份合同条款，说明乙方在十年之内不得把甲方提供的任何技术资料交给第三方使用。",
        "この契約では、甲は乙に対して十年間、提供された資料を第三者に渡さないことを求めています。",
        "ผู้ให้เช่าต้องแจ้งผู้เช่าล่วงหน้าสามสิบวันก่อนที่จะขึ้นค่าเช่าหรือยกเลิกสัญญาเช่าฉบับนี้",
    ],
)
def test_near_duplicates_in_scripts_without_spaces(text):
    changed = text.replace("十", "五").replace("สาม", "หก")
    index = NearDuplicates([text])
    assert changed != text
    assert index.repeats(changed)
    assert not index.repeats(text[::-1])


@pytest.mark.parametrize(
    ("text", "one", "other"),
    [
        ("What is the capital of India and how many people live there?", "India", "Nepal"),
        ("भारत की राजधानी क्या है और उसकी जनसंख्या कितनी है, विस्तार से बताइए?", "जनसंख्या", "सीमा"),
        ("ভারতের রাজধানী কী এবং সেখানে কত মানুষ বাস করে তা বিস্তারিত লিখুন?", "সেখানে", "এখানে"),
        ("இந்தியாவின் தலைநகரம் எது மற்றும் அங்கே எத்தனை மக்கள் வாழ்கிறார்கள்?", "எது", "எங்கே"),
        ("భారతదేశం యొక్క రాజధాని ఏది మరియు అక్కడ ఎంత మంది ప్రజలు ఉన్నారో చెప్పండి?", "మరియు", "లేదా"),
        ("ශ්‍රී ලංකාවේ අගනුවර කුමක්ද සහ එහි කොපමණ ජනතාවක් ජීවත් වෙනවාද කියන්න?", "සහ", "හෝ"),
        ("བོད་ཀྱི་རྒྱལ་ས་གང་ཡིན་ནམ་དེར་མི་གྲངས་ག་ཚོད་ཡོད་དམ།", "གང", "སུ"),
    ],
)
def test_vowel_signs_do_not_cut_words(text, one, other):
    """Mutant: a letter is a word, so that texts with one other word share most shingles."""
    words = [word for word in re.split("[ ,?་།]+", text.replace("\u200d", "")) if word]
    changed = text.replace(one, other)
    similarity = jaccard(shingles(text), shingles(changed))
    assert len(shingles(text)) == len(words) - 4
    place = next(i for i, word in enumerate(words) if word == one)
    shared = sum(place not in range(i, i + 5) for i in range(len(words) - 4))
    assert similarity == pytest.approx(shared / (2 * (len(words) - 4) - shared))
    assert not NearDuplicates([text]).repeats(changed)


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("اكتب بندا يمنع المستأجر من تأجير", "اُكْتُبْ بَنْدًا يَمْنَعُ المُسْتَأْجِرَ مِنْ تَأْجِيرِ"),
        (
            "Viết một điều khoản về bảo hành",
            unicodedata.normalize("NFD", "Viết một điều khoản về bảo hành"),
        ),
        ("契約データヲ渡サナイ", "契約ﾃﾞｰﾀｦ渡ｻﾅｲ"),
        ("σχετικά με την εγγύηση", "ΣΧΕΤΙΚΆ ΜΕ ΤΗΝ ΕΓΓΎΗΣΗ"),
        ("договор и ещё один", "до́говор и еще оди́н"),
        ("ספר לי על החוזה", "סַפֵּר לִי עַל הַחוֹזֶה"),
        ("𠀀𠀁𠀂𠀃𠀄𠀅𠀆𠀇𠀈𠀉𠀊𠀋", "𠀀𠀁𠀂𠀃𠀄𠀅𠀆𠀇𠀈𠀉𠀊𠀌"),
    ],
)
def test_near_duplicates_in_another_way_of_writing(text, other):
    assert text != other
    assert NearDuplicates([text]).repeats(other)


def test_near_duplicates_are_found_by_rare_shingles():
    """Parts of texts, with other text before them, so that shares lie around both limits."""
    rng, index = random.Random(3), NearDuplicates()
    words = [str(i) for i in range(400)]
    texts = [rng.choices(words, k=rng.randint(5, 90)) for _ in range(60)]
    for text in texts:
        index.add(" ".join(text))
    repeats = []
    for text in texts * 8:
        cut = rng.randint(0, len(text))
        part = " ".join([*rng.choices(words, k=rng.randint(0, 120)), *text[cut:]])
        repeats.append(index.repeats(part))
        others = [Prompt("b", " ".join(text)) for text in texts]
        assert repeats[-1] == any(leaks([Prompt("a", part)], others))
    assert 30 < sum(repeats) < 450
    shared = " ".join(words[:40])
    whole = [f"{shared} {' '.join(rng.sample(words, 40))}" for _ in range(9)]
    assert NearDuplicates(whole).candidates(shingles(shared)) == {*range(9)}
    assert all(NearDuplicates([shared]).repeats(text) for text in whole)


def test_planted_near_duplicates_are_dropped():
    evaluation = [Prompt("e", HUMAN_EVAL_LIKE)]
    renamed = HUMAN_EVAL_LIKE.replace("deposit", "payment").replace("Detect if", "Tell whether")
    question = f"Complete this function and explain every line of it:\n```\n{HUMAN_EVAL_LIKE}```"
    shown = f"{question}\n{text_of(random.Random(0), 200)}"
    planted = [
        Prompt("equal", HUMAN_EVAL_LIKE),
        Prompt("spaces", HUMAN_EVAL_LIKE.replace("    ", "\t").upper()),
        Prompt("renamed", renamed),
        Prompt("beginning", HUMAN_EVAL_LIKE[: len(HUMAN_EVAL_LIKE) // 2]),
        Prompt("quoted", None, [{"role": "user", "content": shown}]),
    ]
    other = Prompt(
        "other", "def add(a, b):\n    '''Return the sum of two numbers that are given'''\n"
    )
    kept, overlap = drop_overlap([*planted, other], evaluation)
    assert kept == [other]
    assert overlap.dropped == len(planted)


def test_no_pair_is_left_at_the_threshold_whatever_the_texts():
    rng = random.Random(0)
    evaluation = [Prompt(f"e{i}", text_of(rng, rng.randint(3, 60))) for i in range(40)]
    training = [Prompt(f"t{i}", text_of(rng, rng.randint(3, 60))) for i in range(40)]
    for i, prompt in enumerate(evaluation):  # from a copy to a distant relative of each
        words = prompt.text.split()
        for changed in (0, 1, 3, 8):
            for at in rng.choices(range(len(words)), k=changed):
                words[at] = rng.choice(WORDS)
            training.append(Prompt(f"near{i}-{changed}", " ".join(words)))
    kept, overlap = drop_overlap(training, evaluation)
    assert not [*leaks(kept, evaluation)]
    assert 40 <= overlap.dropped == len(training) - len(kept) < len(training)


def talk(name, *turns):
    """Turns of the user's and the assistant's in turn, after what all of them share."""
    shared = {"role": "system", "content": " ".join(WORDS[:300])}
    roles = itertools.cycle(("user", "assistant"))
    said = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=False)]
    return Prompt(name, None, [shared, *said])


def test_prompts_that_share_a_long_system_prompt_are_trained_on():
    rng = random.Random(2)
    training = [talk(f"t{i}", text_of(rng, 80)) for i in range(200)]
    evaluation = [talk(f"e{i}", text_of(rng, 80)) for i in range(20)]
    kept, overlap = drop_overlap([*training, evaluation[0]], evaluation)
    assert kept == training
    assert overlap.dropped == 1
    held_out, others = hold_out(training, 10)
    assert (len(held_out), len(others)) == (10, 190)


def test_what_a_conversation_asks_last_is_compared_and_all_of_it_is_what_differs():
    question, opening = HUMAN_EVAL_LIKE, text_of(random.Random(4), 80)
    evaluation = [talk("e", opening, "Yes.", question)]
    asked_before = talk("before", question, "Done.", opening)  # the last turn alone is answered
    asked_again = talk("again", "Good morning.", "Yes?", question)
    twice = [talk(name, opening, answer, "Thanks.") for name, answer in (("a", "x"), ("b", "y"))]
    kept, overlap = drop_overlap([asked_before, asked_again, *twice, twice[0]], evaluation)
    assert kept == [asked_before, *twice]
    assert overlap.dropped == 1


def test_a_short_last_turn_is_compared_with_what_was_asked_before_it():
    rng = random.Random(5)
    training = [talk(f"t{i}", text_of(rng, 30), "Yes.", "Continue") for i in range(45)]
    opening = text_of(rng, 30)
    evaluation = [talk("e", opening, "Yes.", "continue.")]
    kept, overlap = drop_overlap([*training, talk("again", opening, "No.", "continue")], evaluation)
    assert kept == training
    assert overlap.dropped == 1


# --- a user's own domain


@pytest.fixture
def sql(tmp_path):
    """A small domain: the paths of its training and evaluation prompts."""
    tables = "orders customers invoices parcels suppliers".split()
    ask = "-- {0} of the last {1} days with more than {2} entries, newest first\nSELECT * FROM {0}"

    def row(i):
        return {"prompt": ask.format(tables[i % 5], 3 * i, 7 * i), "category": tables[i % 5]}

    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    held_out.write_text("".join(json.dumps(row(i)) + "\n" for i in range(1, 9)))
    rows = [*map(row, range(5, 40)), row(20)]  # four stand in both files, one stands twice
    question = [{"role": "user", "content": "What does an outer join do?"}]
    train.write_text("".join(json.dumps(r) + "\n" for r in [*rows, {"messages": question}]))
    return str(train), str(held_out)


def test_a_users_own_domain(sql):
    train, held_out = sql
    evaluation = evaluation_prompts(held_out, None, 0)
    training, overlap = training_prompts(train, evaluation, None, 0)
    assert len(evaluation) == 8
    assert not [*leaks(training, evaluation)]
    assert (overlap.dropped >= 4, overlap.repeated) == (True, 1)
    assert len({p.text for p in training}) == len(training)
    assert {p.category for p in evaluation} <= {p.category for p in training}
    assert [p for p in training if p.messages]


def test_the_limit_and_the_seed_decide_which_prompts(sql):
    train, held_out = sql
    evaluation = evaluation_prompts(held_out, 3, 0)
    assert evaluation == evaluation_prompts(held_out, 3, 0)
    some, _ = training_prompts(train, evaluation, 10, 0)
    assert len(some) == 10
    assert some == training_prompts(train, evaluation, 10, 0)[0]
    assert some == training_prompts(train, evaluation, None, 0)[0][:10]
    assert some != training_prompts(train, evaluation, 10, 1)[0]


def test_of_a_data_set_only_what_is_wanted_is_read(monkeypatch):
    class Rows:
        read = 0

        def __len__(self):
            return 1000

        def __getitem__(self, i):
            self.read += 1
            return {"prompt": f"question {i % 40} of {i}" if i % 2 else "the same again"}

    rows = Rows()
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: rows)
    evaluation = [Prompt("e", "the same again")]
    kept, overlap = training_prompts("org/set", evaluation, 20, 0)
    assert len({prompt.text for prompt in kept}) == 20
    assert rows.read <= 20 + overlap.dropped + 1 < 100


def test_ids_that_stand_twice_among_training_prompts_are_refused(tmp_path):
    path = tmp_path / "train.jsonl"
    rows = [{"prompt": f"question {i}", "id": i // 2} for i in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(PromptError, match=r"train.jsonl': the id '\d'"):
        training_prompts(str(path), [], 20, 0)


def test_training_on_the_evaluation_prompts_is_refused(sql):
    _, held_out = sql
    with pytest.raises(PromptError, match=r"train.jsonl|eval.jsonl"):
        training_prompts(held_out, evaluation_prompts(held_out, None, 0), 10, 0)


def test_a_builder_without_a_held_out_part():
    with pytest.raises(PromptError, match="held-out"):
        evaluation_prompts(STDLIB, 1, 0)


# --- code


@pytest.fixture(scope="module")
def stdlib():
    return load_prompts(str(RECIPES / EMBEDDED[STDLIB]))


def test_the_standard_library_gives_thousands_of_prompts(stdlib):
    assert len(stdlib) > 2500
    assert len({p.id for p in stdlib}) == len({p.text for p in stdlib}) == len(stdlib)
    styles = collections.Counter(p.category for p in stdlib)
    assert styles["alone"] >= 0.9 * len(stdlib)
    assert styles["in context"] > 20
    assert all(split_task(p.prompt) for p in stdlib)


def test_they_look_like_human_eval(stdlib):
    raw = [p.prompt for p in stdlib if p.category == "alone"]
    selves = 0
    for text in raw:
        assert text.startswith(("\n", "from typing import List\n\n\ndef "))
        assert text.endswith('\n    """\n')
        assert "\ndef " in text
        assert text.count('"""') == 2
        [function] = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
        assert len(ast.get_docstring(function)) >= 50
        assert len(function.body) == 1  # the docstring: the body is for the target to write
        selves += "self" in [a.arg for a in function.args.args]
    assert selves < 0.01 * len(raw)  # a few functions have a parameter of that name
    assert sum(">>> " in text for text in raw) > 50
    assert sum(") -> " in text for text in raw) > 50


def test_a_prompt_in_context_has_a_whole_function_before_it(stdlib):
    for prompt in stdlib:
        if prompt.category == "in context":
            names = [n for n in ast.parse(prompt.prompt).body if isinstance(n, ast.FunctionDef)]
            assert len(names) == 2, prompt.id


def test_the_standard_library_is_drawn_the_same_way_every_time():
    evaluation = [Prompt("e", HUMAN_EVAL_LIKE)]
    once, _ = training_prompts(STDLIB, evaluation, 200, 5)
    again, _ = training_prompts(STDLIB, evaluation, 200, 5)
    assert once == again
    assert len(once) == 200


# --- legal


@pytest.fixture(scope="module")
def licences():
    evaluation = evaluation_prompts(LICENCES, None, 0)
    return training_prompts(LICENCES, evaluation, None, 0)[0], evaluation


def test_held_out_licences_share_no_document_and_no_clause_with_the_training_ones(licences):
    training, evaluation = licences
    assert len(training) == 3901  # of 3902: none is dropped as a near-duplicate
    assert len(evaluation) == 1077
    documents = [{p.id.partition(":")[0] for p in part} for part in licences]
    assert not documents[0] & documents[1]
    # what one document says is not independent: intervals are made over documents
    assert all(p.group == p.id.partition(":")[0] for part in licences for p in part)
    assert not [*leaks(training[::50], evaluation[::10])]


def test_clauses_are_whole_and_have_a_type(licences):
    training, evaluation = licences
    assert training_prompts(LICENCES, evaluation, 20, 0)[0] == training[:20]
    types = {"definitions", "warranty", "liability", "termination", "grant", "other"}
    for part in licences:
        assert {p.category for p in part} == types
    for prompt in training:
        heading, _, clause = prompt.prompt.rpartition("\n\n")
        assert 25 <= len(clause.split()) <= 150
        assert len(heading.split()) <= 8


# --- prompts of a recipe, as its target reads them


SWITCHED = (
    "{% for m in messages %}{{ m.content }}</s>\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}the{% else %}a{% endif %}"
)


@pytest.fixture
def chat(job, folder, tmp_path):
    """Makes a recipe for a target whose template has a switch, with prompts of several lengths."""
    target = tmp_path / "chat"
    shutil.copytree(folder / "target", target)
    train, held_out = tmp_path / "train.jsonl", tmp_path / "eval.jsonl"
    rng = random.Random(6)
    rows = [[{"role": "user", "content": text_of(rng, 3 + i)}] for i in range(15)]
    for path, part in ((held_out, rows[::3]), (train, rows[1::3] + rows[2::3])):
        path.write_text("\n".join(json.dumps({"messages": turns}) for turns in part))

    def make(template=SWITCHED, **changes):
        (target / "chat_template.jinja").write_text(template)
        prompts = {"train_prompts": str(train), "eval_prompts": str(held_out)}
        output = tmp_path / changes.get("name", "run")
        recipe = job(output, target=str(target), draft=None, **prompts, **changes)
        return recipe, Checkpoint.open(recipe.target)

    return make


def test_all_parts_are_asked_in_the_recipes_form(chat):
    off = collect_prompts(*chat(chat_template_kwargs={"enable_thinking": False}))
    on = collect_prompts(*chat())
    for part in ("training", "tuning", "evaluation"):
        ours, theirs = getattr(off, part), getattr(on, part)
        assert [p.id for p in ours.prompts] == [p.id for p in theirs.prompts]
        assert all(a != b for a, b in zip(ours.ids, theirs.ids, strict=True))


@pytest.mark.parametrize("held_out", [0, 2])
def test_a_run_keeps_the_prompts_with_which_it_began(chat, followed, held_out):
    changes = {"held_out_prompts": held_out, "chat_template_kwargs": {"enable_thinking": False}}
    recipe, target = chat(**changes)
    first = collect_prompts(recipe, target)
    assert len(first.held_out.ids) == held_out
    keep_prompts(recipe.folder, first)
    train, evaluation = Path(recipe.train_prompts), Path(recipe.eval_prompts)
    evaluation.write_text(train.read_text())  # a draft would be measured on what it has learnt
    train.unlink()
    assert collect_prompts(recipe, target) == first
    keep_prompts(recipe.folder, replace(first, tuning=first.training))
    assert collect_prompts(recipe, target) == first
    with pytest.raises(SourceError):  # a dry run is of the recipe, whatever the folder holds
        collect_prompts(replace(recipe, dry_run=True), target)


def test_a_template_with_the_time_is_rendered_when_a_run_begins(chat):
    recipe, target = chat("{{ strftime_now('%H:%M:%S.%f') }} " + SWITCHED)
    first = collect_prompts(recipe, target)
    assert collect_prompts(recipe, target) != first
    keep_prompts(recipe.folder, first)
    assert collect_prompts(recipe, target) == first


def test_raw_prompts_to_a_target_with_a_chat_template_are_noticed_first(chat, capsys):
    recipe, target = chat()
    collect_prompts(recipe, target)
    assert "are raw" not in capsys.readouterr().out
    rows = [json.dumps({"prompt": f"{i} of many plain prompts {i * i}"}) for i in range(12)]
    Path(recipe.train_prompts).write_text("\n".join(rows))
    collect_prompts(recipe, target)
    assert "Warning: 100% of the training prompts are raw" in capsys.readouterr().out


def test_a_dry_run_shows_a_prompt_as_the_target_reads_it(chat, monkeypatch, capsys):
    recipe, target = chat(chat_template_kwargs={"enable_thinking": False})
    prompts = collect_prompts(recipe, target)
    capsys.readouterr()
    print_example(prompts.training.ids[0], target.tokenizer)
    asked, count = prompts.training.prompts[0].text, len(prompts.training.ids[0])
    shown = capsys.readouterr().out
    assert shown == (
        f"the first training prompt as the target reads it, {count} tokens:\n"
        f"    {asked}</s>\n    the[the output begins here]\n"
    )
    monkeypatch.setattr("distill.dry_run.EXAMPLE", 5)
    print_example(prompts.training.ids[0], target.tokenizer)
    cut = len(f"{asked}</s>\nthe") - 10
    assert f"    {asked[:5]} [… {cut} characters …] >\n    the[" in capsys.readouterr().out


def test_a_cut_prompt_that_equals_an_evaluation_prompt_is_not_trained_on(chat):
    with pytest.raises(PromptError, match="0 different training prompts"):
        collect_prompts(*chat(max_prompt_length=2, long_prompts="truncate_left"))


def test_long_prompts_are_left_out_before_some_are_set_aside(chat):
    everything = collect_prompts(*chat())
    parts = [everything.training, everything.tuning, everything.evaluation]
    lengths = sorted(len(ids) for part in parts for ids in part.ids)
    limit = lengths[6]
    kept = collect_prompts(*chat(max_prompt_length=limit, long_prompts="drop", tuning_prompts=2))
    assert len(kept.tuning.ids) == 2  # as many as were asked for, of those that stay
    parts = [kept.training, kept.tuning, kept.evaluation]
    assert sum(len(part.ids) for part in parts) == sum(length <= limit for length in lengths)


def test_texts_that_share_an_instruction_are_compared_with_few_others():
    """Else the time would grow with the square of their number."""
    draws, index, compared = random.Random(0), NearDuplicates(), []
    for _ in range(300):
        question = " ".join(str(draws.randrange(10**6)) for _ in range(20))
        text = f"Answer the question about the contract in two sentences, please. {question}"
        compared.append(len(index.candidates(shingles(text))))
        assert not index.repeats(text)
        index.add(text)
    assert sum(compared) <= 300
    assert index.repeats(text)


def test_three_in_ten_prompts_are_old_ones(chat, tmp_path):
    rng = random.Random(9)
    turns = [[{"role": "user", "content": text_of(rng, 12)}] for _ in range(9)]
    (tmp_path / "old.jsonl").write_text("\n".join(json.dumps({"messages": t}) for t in turns))
    prompts = collect_prompts(*chat(old_prompts=str(tmp_path / "old.jsonl")))
    every = prompts.training.prompts + prompts.tuning.prompts
    old = [prompt.messages for prompt in every if prompt.category == "old"]
    assert (len(every), len(old)) == (14, 4)
    assert all(messages in turns for messages in old)
    with pytest.raises(RecipeError, match="old_prompts"):
        chat(old_prompts="old.jsonl", answers="logged")


@pytest.mark.parametrize(("draft", "held_out"), [("draft", 12), (None, 0)])
def test_more_prompts_are_held_out_for_a_draft_that_was_trained(
    job, folder, tmp_path, draft, held_out
):
    rng = random.Random(7)
    rows = [{"prompt": text_of(rng, 12)} for _ in range(61)]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    recipe = job(
        tmp_path / "run",
        draft=draft and str(folder / draft),
        train_prompts=str(tmp_path / "train.jsonl"),
    )
    prompts = collect_prompts(recipe, Checkpoint.open(recipe.target))
    assert len(prompts.held_out.prompts) == held_out
