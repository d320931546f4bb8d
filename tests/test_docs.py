"""Every command in the documents is accepted by its own parser, and every link has a target.

A command stops before it loads anything; a recipe goes through all its checks.
tests/distill/test_pages.py runs the commands on models of a few kilobytes.
"""

import argparse
import configparser
import functools
import importlib
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from ruamel.yaml import YAML

from distill.cli import COMMANDS
from distill.gate import NOTHING
from distill.recipe import build_recipe, load_recipe
from eval.prompts import load_prompts

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES.append(ROOT / "findings" / "README.md")
# their commands are of their day
HISTORY = [ROOT / "CHANGELOG.md", ROOT / "docs" / "lab-notes.md"]
OPENING = re.compile(r"^```(.*)\n((?:.*\n)*?)```$", flags=re.MULTILINE)
# in a sentence or a table, where required options may be left out; those with an … are only a part
INLINE = re.compile(
    r"`((?:accelerate launch [^`]*distill/train|python -m|python tests|draftsmith \w|pytest"
    r"|pip install) ?[^`…\[\]]+)`"
)


def blocks(page):
    """(language, text) of every fenced block."""
    return [match.groups() for match in OPENING.finditer(page.read_text(encoding="utf-8"))]


def commands(script):
    """The commands of a shell script as lists of words; here-documents are left out."""
    script = re.sub(r"<<'?(\w+)'?.*?^\1$", "", script, flags=re.MULTILINE | re.DOTALL)
    for line in script.replace("\\\n", " ").splitlines():
        words = shlex.shlex(line, posix=True, punctuation_chars="&|;<>")
        words.whitespace_split = True
        for separator, group in itertools.groupby(words, lambda word: set(word) <= set("&|;<>")):
            # assignments of variables before the program are passed over
            command = list(itertools.dropwhile(re.compile(r"\w+=").match, group))
            if command and not separator:
                yield [command[0].rpartition("/bin/")[2], *command[1:]]


def all_commands():
    """Every bash block, and every command in a sentence, with whether it is a whole one."""
    for page in PAGES:
        if page in HISTORY:
            continue
        text = page.read_text(encoding="utf-8")
        scripts = [(body, True) for language, body in blocks(page) if language == "bash"]
        inline = INLINE.findall(OPENING.sub("", text).replace("\n", " "))
        for script, whole in dict.fromkeys([*scripts, *((part, False) for part in inline)]):
            shown = " ".join(script.split())[:60]
            yield pytest.param(script, whole, id=f"{page.name}: {shown}")


# --- programs


class ParsedError(Exception):
    """The arguments were understood; nothing has been loaded yet."""


parse_args = argparse.ArgumentParser.parse_args


def check_module(name, arguments, whole):
    def parse_and_stop(parser, arguments=None, namespace=None):
        for action in [] if whole else [*parser._actions, *parser._mutually_exclusive_groups]:
            action.required = False
        parse_args(parser, arguments, namespace)
        raise ParsedError

    main = importlib.import_module(name).main
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        try:
            status = main(arguments)
        except ParsedError:
            return
        except SystemExit as ended:
            status = ended.code
    assert status == 0, f"python -m {name} does not take {arguments}"
    assert "--help" in arguments, f"python -m {name} parses no arguments"


def check_python(words, whole=True):
    match words:
        case ["-m", "venv", _] | ["make_prompts.py" | "ask.py"]:  # blocks of docs/tutorial.md
            pass
        case ["-m", "vllm.entrypoints.openai.api_server", *arguments]:
            check_vllm(["serve", *arguments])
        case ["-m", name, *arguments]:
            check_module(name, arguments, whole)
        case ["-c", code, *_]:
            compile(code, "-c", "exec")
        case [script, *_]:
            compile((ROOT / script).read_text(encoding="utf-8"), script, "exec")


def check_accelerate(words):
    assert words[0] == "launch", words
    args = launch_command_parser().parse_args(words[1:])
    if args.config_file is not None:
        load_config_from_file(str(ROOT / args.config_file))
    assert (ROOT / args.training_script).is_file()
    assert args.training_script == "distill/train.py"
    arguments = args.training_script_args
    # where the reader's own recipe stands (or none, in a sentence) a shipped one does
    if "--recipe" not in arguments:
        arguments = ["--recipe", "code", *arguments]
    at = arguments.index("--recipe") + 1
    own = "NAME", "sql.yaml", "outputs/sql/recipe.yaml", "outputs/explain/recipe.yaml"
    if arguments[at] in own:
        arguments[at] = "code/pruned"
    load_recipe(arguments)


# the options of vLLM 0.33 that our pages have
VLLM_OPTIONS = {"model", "served-model-name", "port", "dtype", "max-model-len"}
VLLM_OPTIONS |= {"max-num-seqs", "tensor-parallel-size", "speculative-config", "enforce-eager"}
VLLM_OPTIONS |= {"gpu-memory-utilization"}
SPECULATION = {"method", "model", "num_speculative_tokens", "num_speculative_tokens_per_batch_size"}
SPECULATION |= {"parallel_drafting", "prompt_lookup_min", "prompt_lookup_max"}
SPECULATION |= {"draft_sample_method"}


def check_draftsmith(words):
    name, *arguments = words
    if name == "train":
        check_accelerate(["launch", "distill/train.py", *arguments])
    elif name != "--help":
        check_module(COMMANDS[name], arguments, whole=True)


def check_vllm(words):
    assert words[0] == "serve", words
    assert {word[2:].partition("=")[0] for word in words if word.startswith("--")} <= VLLM_OPTIONS
    for option, value in itertools.pairwise(words):
        if option == "--speculative-config":
            given = set(json.loads(value))
            assert "num_speculative_tokens" in given
            assert given <= SPECULATION
            assert "model" in given or json.loads(value)["method"] in ("ngram", "mtp")


# other programs are not checked
CHECKS = {
    "python": check_python,
    "accelerate": check_accelerate,
    "draftsmith": check_draftsmith,
    "vllm": check_vllm,
}


@pytest.mark.parametrize(("script", "whole"), list(all_commands()))
def test_every_command_is_taken_by_its_own_parser(script, whole, monkeypatch):
    monkeypatch.chdir(ROOT)
    for program, *words in commands(script):
        if program == "python":
            check_python(words, whole)
        elif program in CHECKS:
            CHECKS[program](words)
        for word in words:
            assert not word.startswith("tests/") or Path(word).exists(), word


@pytest.mark.parametrize(
    "script",
    [
        "python -m eval.run --target T --drafts D --prompt",
        "draftsmith eval --target T --drafts D --prompt",
        "draftsmith train --recipe code --lerning_rate 1",
        "accelerate launch distill/train.py --recipe code --lerning_rate 1",
        "accelerate launch --config_file recipes/accelerate/no.yaml distill/train.py --recipe code",
        "vllm serve T --speculative-config '{\"gamma\": 3}'",
        "vllm serve T --tensor-parallel 2",
        'vllm serve T --speculative-config \'{"model": "D", "num_speculative_tokens": 3, "k": 1}\'',
    ],
)
def test_commands_that_nobody_would_take_are_found(script):
    ((program, *words),) = commands(script)
    with pytest.raises((AssertionError, ValueError, OSError, pytest.fail.Exception)):
        CHECKS[program](words)


def test_the_pages_hold_commands_at_all():
    """So that no change of a regular expression empties the tests above."""
    assert len(list(all_commands())) > 30


# --- blocks


LANGUAGES = {"bash", "yaml", "json", "jsonl", "text", "python", "promql"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_parses(page, tmp_path):
    for language, body in blocks(page):
        assert language in LANGUAGES, f"a block opens with ```{language}"
        if language == "yaml":
            values = YAML(typ="safe", pure=True).load(body)
            if "target" in values:
                build_recipe({"train_prompts": "a", "eval_prompts": "b"} | values)
        elif language == "json":
            json.loads(body)
        elif language == "jsonl":
            (tmp_path / "prompts.jsonl").write_text(body, encoding="utf-8")
            assert load_prompts(str(tmp_path / "prompts.jsonl"))
        elif language == "python":
            compile(body, page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_is_whole(page):
    text = OPENING.sub("", page.read_text(encoding="utf-8"))
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert set(table.splitlines()[1]) == set("| -"), table


# --- links


def slug(heading):
    """The anchor that GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return kept.replace(" ", "-")


@functools.cache
def anchors(page):
    text = OPENING.sub("", page.read_text(encoding="utf-8"))
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page):
    text = OPENING.sub("", page.read_text(encoding="utf-8"))
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(there), f"{page.name} links to {link}"
    if page.name == "CHANGELOG.md":
        return
    for name in re.findall(r"`((?:docs|tests|recipes|distill|eval|align)/[\w./-]+\.\w+)`", text):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


def test_every_page_is_reached_from_the_readme():
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in reached:
            continue
        reached.add(page)
        for link in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text(encoding="utf-8")):
            left.append((page.parent / link).resolve())
    assert {page for page in PAGES if page.name != "CHANGELOG.md"} <= reached


def test_each_finding_has_its_line():
    page = (ROOT / "findings" / "README.md").read_text(encoding="utf-8")
    scripts = {path.name for path in (ROOT / "findings").glob("*.sh")}
    assert scripts == set(re.findall(r"\]\((\w+\.sh)\)", page))


def test_troubleshooting_quotes_messages_that_exist():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)`", page, flags=re.MULTILINE)
    assert len(quoted) > 3
    sources = [
        path for room in ("align", "distill", "eval") for path in (ROOT / room).rglob("*.py")
    ]
    # a message may stand in several strings, and hold values
    code = "".join(re.sub(r'"\s*f?"', "", path.read_text(encoding="utf-8")) for path in sources)
    lacking = [words for words in quoted if not all(part in code for part in words.split(" … "))]
    assert not lacking


# --- what is served

SERVING = ROOT / "docs" / "serving"


def test_units_call_the_loop_and_take_its_ordinary_ends():
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str
    assert unit.read(SERVING / "draftsmith-adapt.service")
    python, *words = shlex.split(unit["Service"]["ExecStart"])
    assert python.endswith("/bin/python")
    check_python(words)
    assert re.compile(words[words.index("--redact") + 1]).search("mail jane@example.org")
    assert int(unit["Service"]["SuccessExitStatus"]) == NOTHING
    assert unit.read(SERVING / "draftsmith-adapt.timer")  # of the same name
    assert unit["Install"]["WantedBy"] == "timers.target"


def test_patterns_drop_what_the_page_says():
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+)` \| `(.+)` \| `(.+)` \|$", page, flags=re.MULTILINE)
    assert len(rows) == 4
    for pattern, dropped, kept in rows:
        found = re.compile(pattern.replace("\\|", "|")).search
        assert found(dropped)
        assert not found(kept)


def test_manifests_serve_the_pair_that_they_fetch():
    documents = YAML(typ="safe", pure=True).load_all(SERVING / "kubernetes.yaml")
    kinds = {document["kind"]: document for document in documents}
    assert set(kinds) == {"PersistentVolumeClaim", "Deployment", "Service"}
    pod = kinds["Deployment"]["spec"]["template"]
    labels = pod["metadata"]["labels"]
    assert kinds["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert kinds["Service"]["spec"]["selector"].items() <= labels.items()
    (engine,), (fetch,) = pod["spec"]["containers"], pod["spec"]["initContainers"]
    assert engine["command"] == ["vllm"]
    check_vllm(engine["args"])
    served = engine["args"][engine["args"].index("--speculative-config") + 1]
    assert json.loads(served)["model"] in fetch["args"][0]
    assert engine["args"][1] in fetch["args"][0]
    claim = kinds["PersistentVolumeClaim"]["metadata"]["name"]
    volume = {"name": "models", "persistentVolumeClaim": {"claimName": claim}}
    assert volume in pod["spec"]["volumes"]
    ports = {port["name"] for port in engine["ports"]}
    assert {port["targetPort"] for port in kinds["Service"]["spec"]["ports"]} <= ports
    assert all(engine[probe]["httpGet"]["port"] in ports for probe in engine if "Probe" in probe)
