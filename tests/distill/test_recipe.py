import re
import typing
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from distill.recipe import (
    ALSO_CALLED,
    FIXED,
    GONE,
    GONE_LOSSES,
    OWN,
    RECIPES,
    Recipe,
    RecipeError,
    build_recipe,
    comments,
    dump,
    find_recipe,
    help_text,
    load_recipe,
    recipe_files,
    yaml_text,
)

ALL = sorted(p for p in RECIPES.rglob("*.yaml") if p.parent != RECIPES / "accelerate")
DOCS = Path(__file__).resolve().parents[2] / "docs" / "recipes.md"
SHORT = "target: org/target\ntrain_prompts: train.jsonl\neval_prompts: eval.jsonl\n"
SERVED = "answers: server\nanswer_url: http://a:1\ndraft: org/draft"


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
    assert len(ALL) >= 6
    assert sorted(recipe_files()) == sorted(set(recipe_files()))


@pytest.mark.parametrize("path", ALL, ids=lambda p: str(p.relative_to(RECIPES)))
def test_every_recipe_parses_and_dumps_to_itself(path, tmp_path):
    recipe = load_recipe(["--recipe", str(path)])
    again = tmp_path / "recipe.yaml"
    again.write_text(dump(recipe), encoding="utf-8")
    assert load_recipe(["--recipe", str(again)]) == recipe
    # other programs read recipe.yaml with the library alone
    assert build_recipe(YAML(typ="safe", pure=True).load(again)) == recipe


def test_embedded_recipes_need_no_hub_and_no_gpu():
    for name in ("base", "code", "code/long", "code/lora", "legal", "legal/lora"):
        recipe = load_recipe(["--recipe", name])
        assert recipe.target.startswith("pypi:")
        assert "#sha256=" in recipe.target
        assert recipe.draft is None
        assert recipe.train_prompts.startswith("embedded:")
        assert recipe.eval_prompts.startswith(("embedded:", "pypi:"))
        assert recipe.training["use_cpu"] is True
        assert recipe.temperature == 0
    for name in ("code/lora", "legal/lora"):
        recipe = load_recipe(["--recipe", name])
        assert recipe.use_peft
        assert recipe.base == str(load_recipe(["--recipe", "base"]).folder)


def test_the_hub_id_goes_with_the_target_it_names(tmp_path):
    model = "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert load_recipe(["--recipe", "code"]).target_hub_id == model
    other = ["--recipe", "code", "--target", "other.gguf"]
    assert load_recipe(other).target_hub_id is None
    assert load_recipe([*other, "--target_hub_id", "org/other"]).target_hub_id == "org/other"
    with pytest.raises(RecipeError, match=r"target_hub_id is other.*pattern"):
        load_recipe([*other, "--target_hub_id", "other"])


def test_hub_recipes_are_marked_as_not_measured():
    for name in recipe_files():
        if "/" in load_recipe(["--recipe", name]).target.partition(":")[0]:  # of the Hub
            assert "Not yet measured" in find_recipe(name).read_text(encoding="utf-8")


def test_the_accelerate_configurations_are_ones():
    from accelerate.commands.config.config_args import load_config_from_file

    files = sorted((RECIPES / "accelerate").glob("*.yaml"))
    loaded = {path.stem: load_config_from_file(str(path)) for path in files}
    assert loaded["cpu"].use_cpu
    assert loaded["cpu"].num_processes == 1
    assert loaded["multi_gpu"].distributed_type.value == "MULTI_GPU"
    assert loaded["multi_gpu"].num_processes > 1


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
    recipe = loaded("", "--name", "7", "--max_steps", "-1", "--lr_scheduler_kwargs", "{a: 1}")
    assert recipe.name == "7"
    assert recipe.training == {"max_steps": -1, "lr_scheduler_kwargs": {"a": 1}}
    assert loaded("draft: org/draft\n", "--draft", "null").draft is None
    assert loaded("", "--report_to", "[tensorboard]").training["report_to"] == ["tensorboard"]


def test_a_boolean_key_without_a_value_is_true(loaded):
    recipe = loaded("", "--use_peft", "--seed", "1", "--use_cpu")
    assert recipe.use_peft
    assert recipe.training == {"seed": 1, "use_cpu": True}


def test_names_of_other_programs_lead_to_keys_that_exist():
    from trl import SFTConfig

    keys = {*OWN, *typing.get_type_hints(SFTConfig)} - {*FIXED}
    assert {key for meant in ALSO_CALLED.values() for key in meant} <= keys
    assert not {*ALSO_CALLED} & {*keys, *FIXED, *GONE}


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipe", "cod"], "Did you mean 'code'.*legal"),
        (["--recipe", "accelerate/cpu"], "No recipe"),
        (["--recipe", "code", "--lerning_rate", "1"], "'lerning_rate'.*'learning_rate'"),
        (["--recipe", "code", "--learning-rate", "1"], "'learning_rate'"),
        (["--recipe", "code", "--lora_rank", "8"], "Did you mean 'lora_"),
        (["--recipe", "code", "--lr", "1"], "Did you mean 'learning_rate'"),
        (["--recipe", "code", "--batch-size", "1"], "'per_device_train_batch_size'"),
        (["--recipe", "code", "--num_speculative_token", "1"], "mean 'gamma' or 'max_gamma'"),
        (["--recipe", "code", "--lora"], "Did you mean 'use_peft'"),
        (["--recipe", "code", "--data", "x.jsonl"], "answers to train_prompts"),
        (["--recipe", "code", "--max_length", "9"], "max_prompt_length"),
        (["--recipe", "code", "--qqqqqq", "8"], "docs/recipes.md"),
        (["--recipe", "code", "--seed"], "--seed has no value"),
        (["--recipe"], "--recipe has no value"),
        (["--recipe", "code", "--push_to_hub"], "distill.publish"),
        (["--recipe", "code", "learning_rate", "1"], "'learning_rate' is not a key"),
        ([], "No recipe was given.*code"),
    ],
)
def test_mistakes_on_the_command_line(arguments, message):
    with pytest.raises(RecipeError, match=message):
        load_recipe(arguments)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lora_r: 16.5", "lora_r is 16.5 .*must be a valid integer"),
        ("lora_r: 64.0", "must be a valid integer"),
        ("lora_r: '64'", r"lora_r is '64' \(str\), but must be a valid integer"),
        ("learning_rate: true", r"learning_rate is true .*must be a valid number"),
        ("learning_rate: '1e-3'", r"'1e-3' \(str\), but must be a valid number"),
        ("learning_rate: .nan", "must be a finite number"),
        ("learning_rate: -0.1", "greater than or equal to 0"),
        ("max_steps: many", "max_steps is many .*must be -1 or must be a valid integer"),
        ("max_steps: -2", "must be -1 or must be greater than or equal to 0"),
        ("max_steps: 0\nuse_peft: true", "max_steps is 0, which trains nothing"),
        ("num_train_epochs: 0", "greater than 0"),
        ("per_device_train_batch_size: 0", "greater than or equal to 1"),
        ("use_peft: 1", "must be a valid boolean"),
        ("use_peft: yes", r"yes \(str\), but must be a valid boolean"),
        ("bf16: 1", "must be a valid boolean"),
        ("dtype: int8", "must be 'bfloat16', 'float16' or 'float32'"),
        ("strategy: best", "must be 'auto', 'direct', .*or 'intersection'"),
        ("lr_scheduler_type: linaer", "must be 'linear', 'cosine'"),
        ("report_to: [1]", "report_to"),
        ("max_train_prompts: null", "is null .*valid integer"),
        ("max_train_prompts: -5", "greater than or equal to 1"),
        ("speed_prompts: 0", "greater than or equal to 1"),
        ("gamma: 0", "greater than or equal to 1"),
        ("gamma: 9", "max_gamma"),
        ("temperature: -1", "greater than or equal to 0"),
        ("top_p: 1.5", "less than or equal to 1"),
        ("top_k: 20", "temperature 0"),
        ("lora_dropout: 1", "less than 1"),
        ("lora_target_modules: q_proj,lm_head", "tied"),
        ("name: ../elsewhere", "names a folder"),
        ("domain: ''", "at least 1 character"),
        ("teacher_temperature: 0", "greater than 0"),
        ("held_out_prompts: -1", "greater than or equal to 0"),
        ("early_stopping_patience: 0", "greater than or equal to 1"),
        ("teacher_temperature: 1.5", "at most 1: above 1 .* cannot be known"),
        ("answers: remote", "must be 'auto', 'local', 'vllm' or 'server'"),
        ("answers: vllm\ntrain_on_prompts: true", "answers is vllm, which is asked for distrib"),
        ("answers: server", "answer_url is null; give the address"),
        ("answers: server\nanswer_url: http://a:1", "takes the target's own weights.*--draft"),
        ("answer_url: http://a:1", "answers is auto.*set answers to server, or remove it"),
        ("speculative_url: http://a:1", "speculative_url is 'http://a:1', but answers is auto"),
        (f"{SERVED}\nspeculative_url: http://a:1", "one speculates and the other must not"),
        (f"{SERVED}\ndevice_map: auto", "device_map is auto, but answers is server"),
        ("device_map: auto\nuse_cpu: true", "over GPUs, but use_cpu is true; set it to false"),
        ("device_map: balanced", "device_map is balanced .* must be 'auto'"),
        ("seed: 1\nseed: 2", r"duplicate key \"seed\".*; correct it"),
        ("packing: true", "packing cannot be set: .*cached"),
        ("max_length: 512", "lengths are set by max_prompt_length"),
        ("hub_token: secret", "distill.publish"),
        ("training: {}", "Unknown key 'training'"),
        ("- a list", "cannot be read as YAML"),
    ],
)
def test_mistakes_in_a_file_say_value_reason_and_remedy(loaded, line, message):
    with pytest.raises(RecipeError, match=message):
        loaded(line)


@pytest.mark.parametrize("text", ["", "just words", "- a\n- b", "1: 2"])
def test_a_file_that_is_no_recipe(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError, match="is not a recipe"):
        load_recipe(["--recipe", str(path)])


def test_a_file_that_is_not_utf_8(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(RecipeError, match="cannot be read"):
        load_recipe(["--recipe", str(path)])


def test_what_a_run_cannot_do_without():
    with pytest.raises(RecipeError, match="train_prompts, eval_prompts"):
        build_recipe({"target": "org/target"})


def test_the_fields_that_are_fixed_exist_and_are_not_ours():
    from trl import SFTConfig

    assert set(FIXED) <= set(typing.get_type_hints(SFTConfig))
    assert not set(OWN) & set(FIXED)


@pytest.mark.parametrize(
    ("line", "remedy"),
    [(f"{key}: null", sentence) for key, sentence in GONE.items() if key not in OWN]
    + [(f"loss: {name}", sentence) for name, sentence in GONE_LOSSES.items()],
)
def test_what_is_gone_says_what_to_use_instead(loaded, line, remedy):
    with pytest.raises(RecipeError, match=re.escape(remedy)):
        loaded(line)


def test_every_key_is_explained_in_help_and_docs():
    assert [*comments()] == [*OWN]
    shown = help_text()
    written = DOCS.read_text(encoding="utf-8")
    needed = {"target", "train_prompts", "eval_prompts"}
    for key, comment in comments().items():
        default = yaml_text(OWN[key].default) if key not in needed else "required"
        assert f"  --{key} ({default})  {comment}" in shown
        cell = "required" if key in needed else f"`{default}`"
        assert f"| `{key}` | {cell} | {comment} |\n" in written
    documented = re.findall(r"^\| `(\w+)` \| (?:`|required)", written, flags=re.MULTILINE)
    assert documented == [*OWN]


def test_docs_name_every_field_that_is_refused():
    written = DOCS.read_text(encoding="utf-8").partition("| refused |")[2]
    assert set(re.findall(r"`(\w+)`", written)) == set(FIXED)


def test_what_a_chat_template_reads_is_a_mapping(loaded):
    off = {"enable_thinking": False}
    assert loaded("chat_template_kwargs: {enable_thinking: false}").chat_template_kwargs == off
    options = ["--recipe", "code", "--chat_template_kwargs", '{"enable_thinking": false}']
    assert load_recipe(options).chat_template_kwargs == off
    assert load_recipe(["--recipe", "code"]).chat_template_kwargs is None
    with pytest.raises(RecipeError, match="chat_template_kwargs is enable_thinking"):
        loaded("chat_template_kwargs: enable_thinking")


def test_prompts_are_cut_to_a_length_that_is_given_and_where_this_run_renders_them(loaded):
    with pytest.raises(RecipeError, match="max_prompt_length is null; say how many tokens are k"):
        loaded("long_prompts: truncate_left")
    assert loaded("long_prompts: truncate_left\nmax_prompt_length: 9").max_prompt_length == 9
    with pytest.raises(RecipeError, match="long_prompts is cut"):
        loaded("long_prompts: cut")
    served = "answers: server\nanswer_url: http://a:1\nspeculative_url: http://a:2\ndraft: org/d"
    with pytest.raises(RecipeError, match=r"servers of speculative_url .* set it to drop"):
        loaded(f"long_prompts: truncate_left\nmax_prompt_length: 9\n{served}")


def test_the_seed_is_one_for_everything(loaded):
    assert loaded().seed == Recipe("t", "a", "b").seed == 42
    assert loaded("seed: 7").seed == 7
