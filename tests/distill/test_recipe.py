import re
import typing
from pathlib import Path

import pytest
import torch
from ruamel.yaml import YAML
from transformers import TrainingArguments

from align import machine
from align.errors import UserError
from distill.recipe import OWN, TRAINING, Recipe, build_recipe, dump, load_recipe
from distill.recipe_files import (
    RECIPES,
    RecipeError,
    find_recipe,
    read_yaml,
    recipe_files,
    yaml_text,
)
from distill.training_setup import training_config

ALL = sorted(p for p in RECIPES.rglob("*.yaml") if p.parent != RECIPES / "accelerate")
SHORT = "target: org/target\ntrain_prompts: train.jsonl\neval_prompts: eval.jsonl\n"


@pytest.fixture
def loaded(tmp_path):
    """Loads a recipe with the lines that are given and the keys that every one needs."""

    def load(lines="", *arguments):
        path = tmp_path / "mine.yaml"
        path.write_text(SHORT + lines, encoding="utf-8")
        return load_recipe(["--recipe", str(path), *arguments])

    return load


def test_every_recipe_file_is_found():
    assert sorted(recipe_files().values()) == ALL
    assert {"code", "code/lora", "legal"} <= {*recipe_files()}


@pytest.mark.parametrize("path", ALL, ids=lambda p: str(p.relative_to(RECIPES)))
def test_every_recipe_parses_and_dumps_to_itself(path, tmp_path):
    recipe = load_recipe(["--recipe", str(path)])
    again = tmp_path / "recipe.yaml"
    again.write_text(dump(recipe), encoding="utf-8")
    assert load_recipe(["--recipe", str(again)]) == recipe
    # other programs read recipe.yaml with the library alone
    assert build_recipe(YAML(typ="safe", pure=True).load(again)) == recipe


def test_embedded_recipes_need_no_hub_and_no_gpu():
    for name in ("code", "code/long", "code/pruned", "code/lora", "legal", "legal/lora"):
        recipe = load_recipe(["--recipe", name])
        assert recipe.target.startswith("pypi:")
        assert "#sha256=" in recipe.target
        assert recipe.draft is None
        assert recipe.train_prompts.startswith("embedded:")
        assert recipe.eval_prompts.startswith(("embedded:", "pypi:"))
        assert recipe.training["use_cpu"] is True
        assert recipe.temperature == 0


def test_the_hub_id_goes_with_the_target_it_names():
    model = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert load_recipe(["--recipe", "code"]).target_hub_id == model
    other = ["--recipe", "code", "--target", "other.gguf"]
    assert load_recipe(other).target_hub_id is None
    assert load_recipe([*other, "--target_hub_id", "org/other"]).target_hub_id == "org/other"


@pytest.mark.parametrize("answers", ["vllm", "logged"])
def test_other_outputs_than_the_recipe_s_have_no_distributions_within_prompts(answers):
    asked = ["--recipe", "code/pruned", "--answers", answers]
    assert load_recipe(asked[:2]).train_on_prompts
    assert not load_recipe(asked).train_on_prompts
    with pytest.raises(RecipeError, match="train_on_prompts"):
        load_recipe([*asked, "--train_on_prompts", "true"])


def test_hub_recipes_are_marked_as_not_measured():
    for name in recipe_files():
        if "/" in load_recipe(["--recipe", name]).target.partition(":")[0]:  # of the Hub
            assert "Not yet measured" in find_recipe(name).read_text(encoding="utf-8")


def test_names_paths_and_overrides(tmp_path, monkeypatch):
    assert find_recipe("code") == RECIPES / "code" / "default.yaml"
    assert find_recipe("code/lora") == RECIPES / "code" / "lora.yaml"
    monkeypatch.chdir(tmp_path)  # recipes are found from any folder
    recipe = load_recipe(["--recipe", "code", "--learning_rate", "1e-4", "--num_draft_layers=3"])
    assert recipe.training["learning_rate"] == 1e-4
    assert recipe.num_draft_layers == 3
    (tmp_path / "sql.yaml").write_text(SHORT)
    assert load_recipe(["--recipe=sql.yaml"]).name == "sql"
    assert load_recipe(["--recipe", "sql.yaml"]).folder == Path("outputs/sql")
    assert load_recipe(["--recipe", "sql.yaml", "--output_dir", "there"]).folder == Path("there")


def test_command_line_values_take_the_type_of_their_key(loaded):
    recipe = loaded("", "--name", "7", "--max_steps", "-1")
    assert recipe.name == "7"
    assert recipe.training == {"max_steps": -1}
    assert loaded("draft: org/draft\n", "--draft", "null").draft is None
    assert loaded("learning_rate: 1.0e-4\n", "--learning_rate", "null").training == {}
    assert loaded("", "--report_to", "[tensorboard]").training["report_to"] == ["tensorboard"]
    thinking = loaded("", "--chat_template_kwargs", '{"enable_thinking": false}')
    assert thinking.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("text", ["Write it. # no prose", "two\nlines", "{prompt}", '"so"', "- a"])
def test_a_text_is_taken_as_written(loaded, text):
    assert loaded("", "--instruction", text).instruction == text
    assert loaded("", f"--output_dir=out/{text}").output_dir == f"out/{text}"


def test_a_boolean_key_without_a_value_is_true(loaded):
    recipe = loaded("", "--use_peft", "--seed", "1", "--use_cpu")
    assert recipe.use_peft
    assert recipe.training == {"seed": 1, "use_cpu": True}


def test_values_are_read_as_in_yaml_1_2(loaded):
    recipe = loaded(
        "learning_rate: 1e-3\nsave_strategy: no\nweight_decay: 0\nwarmup_steps: .1\nlora_r: 010\n"
    )
    assert recipe.lora_r == 10  # neither octal nor text
    assert recipe.training["learning_rate"] == 1e-3
    assert recipe.training["save_strategy"] == "no"
    assert recipe.training["warmup_steps"] == 0.1


def test_text_that_looks_like_something_else_survives_the_dump(loaded):
    for text in ("1e-3", "no", "null", "010", "1_000", "true", "é", "2024-01-01"):
        recipe = loaded(f'domain: "{text}"\n')
        assert recipe.domain == text
        again = dump(recipe).partition("\nname")[2]
        assert loaded("name" + again) == recipe


@pytest.mark.parametrize("end", ["\x85", "\u2028", "\u2029", "\v", "\f", "\x1c", "\r", "\r\n"])
def test_a_line_separator_of_unicode_survives_the_dump(end, tmp_path):
    values = {"instruction": f"Write it.{end}{{prompt}}", "domain": f"{end}a\n" * 30}
    (tmp_path / "recipe.yaml").write_text(yaml_text(values), encoding="utf-8", newline="")
    assert read_yaml(tmp_path / "recipe.yaml") == values


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--recipe", "cod"], "'code'"),
        (["--recipe", "accelerate/cpu"], "accelerate/cpu"),
        (["--recipe", "code", "--lerning_rate", "1"], "'learning_rate'"),
        (["--recipe", "code", "--learning-rate", "1"], "'learning_rate'"),
        (["--recipe", "code", "--qqqqqq", "8"], "--help"),
        (["--recipe", "code", "--push_to_hub", "8"], "--help"),  # the run decides it
    ],
)
def test_mistakes_on_the_command_line_name_the_remedy(arguments, named):
    with pytest.raises(RecipeError, match=re.escape(named)):
        load_recipe(arguments)


@pytest.mark.parametrize(
    "arguments", [["--recipe", "code", "--seed"], ["--recipe"], ["--seed", "1"], ["code"]]
)
def test_a_value_that_is_missing_ends_with_status_2(arguments):
    with pytest.raises(SystemExit) as ended:
        load_recipe(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("lora_r: 16.5", "16.5"),
        ("lora_r: '64'", "'64' (str)"),
        ("learning_rate: true", "true"),
        ("learning_rate: .nan", ".nan"),
        ("learning_rate: -0.1", "-0.1"),
        ("max_steps: -2", "-2"),
        ("seed: 4294967296", "4294967296"),
        ("num_train_epochs: 0", "0"),
        ("tokens_per_step: 0", "0"),
        ("use_peft: 1", "1"),
        ("dtype: int8", "int8"),
        ("lr_scheduler_type: linaer", "linaer"),
        ("chat_template_kwargs: enable_thinking", "enable_thinking"),
        ("target_hub_id: other", "other"),
        ("max_train_prompts: null", "null"),
        ("top_p: 1.5", "1.5"),
        ("adam_beta2: 1", "1"),
        ("domain: ''", "''"),
    ],
)
def test_ill_typed_values_are_refused(loaded, line, value):
    key = line.partition(":")[0]
    with pytest.raises(RecipeError, match=re.escape(f"{key} is {value}")) as refused:
        loaded(line)
    if "'" not in line:
        with pytest.raises(RecipeError) as told:
            loaded("", f"--{key}", line.partition(": ")[2])
        assert str(told.value) == str(refused.value)


@pytest.mark.parametrize(
    ("lines", "keys"),
    [
        ("gamma: 9", "gamma max_gamma"),
        ("top_k: 20", "top_k temperature"),
        ("name: ../elsewhere", "name"),
        ("answers_per_prompt: 2", "answers_per_prompt answer_temperature"),
        ("answers: vllm\ntrain_on_prompts: true", "train_on_prompts answers"),
        ("answers: server", "answers answer_url"),
        ("answers: server\nanswer_url: http://a:1", "answer_url drafter"),
        ("answers: logged\nanswer_url: http://a:1", "answer_url drafter"),
        ("answers: logged\ntrain_on_prompts: true", "answers train_on_prompts"),
        (
            "answers: logged\nanswers_per_prompt: 2\nanswer_temperature: 1",
            "answers answers_per_prompt",
        ),
        ("answer_url: http://a:1", "answer_url answers"),
        ("drafter: eagle3\nuse_peft: true", "use_peft drafter"),
        ("drafter: eagle3\nstrategy: remap", "strategy drafter"),
        ("drafter: none", "drafter"),
        ("strategy: string", "strategy"),
        ("drafter: sibling", "drafter draft"),
        ("drafter: pruned\ndraft: org/draft", "drafter draft"),
    ],
)
def test_keys_that_contradict_each_other_are_both_named(loaded, lines, keys):
    with pytest.raises(RecipeError) as refused:
        loaded(lines)
    assert all(key in str(refused.value) for key in keys.split())


def test_a_password_in_an_address_is_refused_and_not_shown(loaded):
    with pytest.raises(UserError, match="host:1") as refused:
        loaded("answer_url: http://me:secret@host:1")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "text", [b"", b"just words", b"- a\n- b", b"1: 2", b"seed: 1\nseed: 2", b"name: \xff\xfe"]
)
def test_a_file_that_is_no_recipe(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_bytes(text)
    with pytest.raises(RecipeError, match=re.escape(str(path))):
        load_recipe(["--recipe", str(path)])


def test_what_a_run_cannot_do_without():
    with pytest.raises(RecipeError, match="train_prompts, eval_prompts"):
        build_recipe({"target": "org/target"})


def test_the_fields_that_may_be_set_exist_and_are_not_ours():
    assert set(TRAINING) <= set(typing.get_type_hints(TrainingArguments))
    assert not set(OWN) & set(TRAINING)


def test_every_key_is_explained_in_help(capsys):
    with pytest.raises(SystemExit):
        load_recipe(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    needed = {"target", "train_prompts", "eval_prompts"}
    for key, own in OWN.items():
        default = "required" if key in needed else yaml_text(own.default)
        assert f"({default}) {own.metadata['help']}" in shown
    assert ", ".join(TRAINING) in shown


@pytest.mark.parametrize(
    ("flags", "line", "dtype", "bf16"),
    [
        ("avx2", "use_cpu: true\n", "float32", False),
        ("avx2", "", "bfloat16", None),  # which is refused without a GPU
        ("avx2", "use_cpu: true\nanswers: vllm\n", "bfloat16", False),  # on the GPU
        ("avx2", "use_cpu: true\ndtype: bfloat16\n", "bfloat16", False),
        ("avx512f amx_bf16", "use_cpu: true\n", "bfloat16", True),
        (None, "use_cpu: true\n", "bfloat16", True),  # not Linux
    ],
)
def test_a_cpu_without_bf16_instructions_computes_in_fp32(
    loaded, monkeypatch, flags, line, dtype, bf16
):
    monkeypatch.setattr(machine, "_read", lambda path: f"flags : {flags}\n" if flags else "")
    a_gpu(monkeypatch, with_bf16=True)
    recipe = loaded(line)
    assert recipe.dtype == dtype
    if bf16 is not None:
        assert training_config(recipe).bf16 == bf16


def a_gpu(monkeypatch, with_bf16):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    supported = lambda including_emulation: including_emulation or with_bf16  # noqa: E731
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("", "float16"),
        ("use_cpu: true\nanswers: vllm\n", "float16"),
        ("use_cpu: true\n", "bfloat16"),
        ("dtype: bfloat16\n", "bfloat16"),
    ],
)
def test_a_gpu_without_bf16_computes_in_fp16(loaded, monkeypatch, line, dtype):
    monkeypatch.setattr(machine, "_read", lambda path: "flags : avx512_bf16\n")
    a_gpu(monkeypatch, with_bf16=False)
    assert loaded(line).dtype == dtype


def test_a_run_goes_on_in_its_dtype(loaded, monkeypatch, tmp_path):
    place, dtypes = ("--use_cpu", "--output_dir", str(tmp_path)), []
    for flags in ("avx2", "avx512_bf16"):
        monkeypatch.setattr(machine, "_read", lambda path, flags=flags: flags)
        dtypes.append(loaded("", *place).dtype)
        (tmp_path / "recipe.yaml").write_text(dump(loaded("", *place)))
    assert dtypes == ["float32", "float32"]
    assert loaded("", *place, "--dtype", "float16").dtype == "float16"


def test_the_seed_is_one_for_everything(loaded):
    assert loaded().seed == Recipe("t", "a", "b").seed == 42
    assert loaded("seed: 7").seed == 7
