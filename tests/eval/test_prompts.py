import gzip
import json
import re
from dataclasses import replace
from importlib import resources
from typing import get_args

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from align.errors import SourceError
from eval.chat_template import LongPrompts, in_chat_form, render, render_output, render_set
from eval.engines.conversation import after, chat_request, refuse_server_only, turns_of
from eval.prompts import (
    Prompt,
    PromptError,
    PromptSet,
    draw,
    load_prompts,
    prompts_sha256,
    write_prompts,
)
from tests.byte_level import tokenizer_of_bytes

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}"
    "{{ raise_exception('no such role here') }}{% endif %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% if enable_thinking is defined and "
    "enable_thinking is false %}: : {% endif %}{% endif %}"
)
WORDS = "<s> <unk> user assistant system select name from t : ?".split()


@pytest.fixture
def tokenizer():
    """Words by white space; <s> comes first unless special tokens are left out."""
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>")
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def written(tmp_path):
    """Writes prompts.jsonl (bytes, or rows) and gives its path."""

    def write(content, name="prompts.jsonl"):
        path = tmp_path / name
        if not isinstance(content, bytes):
            content = "".join(json.dumps(row) + "\n" for row in content).encode()
        path.write_bytes(content)
        return str(path)

    return write


def test_a_users_own_file(written):
    rows = [
        {"prompt": "select", "category": "report", "answer": "ignored"},
        {"id": 7, "messages": [{"role": "user", "content": "select ?"}], "prompt": None},
        {"prompt": "select", "category": "other", "image": None, "system": ""},
        {"task_id": "HumanEval/0", "prompt": "\n def f():\n", "entry_point": "f"},
        {"prompt": "name ?", "input": "", "history": [], "text": "### name ?\n### it"},  # a copy
        {"messages": [{"role": "user", "content": "t"}], "query": "a label"},
    ]
    assert load_prompts(written(rows)) == [
        Prompt("1", "select", None, "report", "1"),  # a prompt that occurs twice is one sample
        Prompt("7", None, [{"role": "user", "content": "select ?"}]),
        Prompt("3", "select", None, "other", "1"),
        Prompt("HumanEval/0", "\n def f():\n"),
        Prompt("5", "name ?"),
        Prompt("6", None, [{"role": "user", "content": "t"}]),
    ]


def test_gzip_blank_lines_byte_order_mark_and_line_separators(written):
    text = '\ufeff{"prompt": "a\u2028b\x85c"}\r\n\r\n{"prompt": "d"}'
    plain = load_prompts(written(text.encode()))
    assert [p.prompt for p in plain] == ["a\u2028b\x85c", "d"]
    assert [p.id for p in plain] == ["1", "3"]
    assert load_prompts(written(gzip.compress(text.encode()), "p.jsonl.gz")) == plain


def test_conversations_in_the_forms_of_other_data_sets(written):
    turns = [
        {"role": "system", "content": "t"},
        {"role": "user", "content": "select ?"},
        {"role": "assistant", "content": "name"},
    ]
    speakers = zip(("system", "human", "gpt"), turns, strict=True)
    rows = [
        {"conversations": [{"from": name, "value": turn["content"]} for name, turn in speakers]},
        {"conversations": turns, "question": "select ?"},
        {"prompt": turns, "chosen": turns[2:], "rejected": turns[2:]},
        {"prompt": "select ?", "prompt_id": "5f", "messages": turns},  # UltraChat
    ]
    prompts = load_prompts(written(rows))
    assert [prompt.messages for prompt in prompts] == [turns[:2]] * 4
    assert {prompt.prompt for prompt in prompts} == {None}


def test_an_empty_list_of_calls_is_none(written):
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [], "refusal": None, "name": None},
        {"role": "user", "content": "c", "tool_calls": None},
    ]
    (prompt,) = load_prompts(written([{"messages": turns}]))
    assert [turn.keys() for turn in prompt.messages] == [{"role", "content"}] * 3
    for nothing in ({}, {"arguments": None}, {"arguments": "null"}, {"arguments": ""}):
        calling = {"role": "assistant", "tool_calls": [{"function": {"name": "f"} | nothing}]}
        (prompt,) = load_prompts(written([{"messages": [*turns[:1], calling, *turns[2:]]}]))
        assert prompt.messages[1]["tool_calls"][0]["function"]["arguments"] == {}


def test_conversations_of_several_turns_and_functions(written):
    """MT-bench and BFCL, as their packages have them."""
    function = {"name": "f", "parameters": {"type": "dict", "properties": {}}}
    first, second = ({"role": "user", "content": text} for text in ("Hi.", "Why?"))
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Hi.", "Why?"]},
        {"id": "a", "question": [[{"role": "system", "content": "Be brief."}, first], [second]]},
        {"id": "b", "question": [[first]], "function": [function]},
        {"messages": [first], "response_format": {"type": "json_object"}},
    ]
    bench, several, calls, formatted = prompts = load_prompts(written(rows))
    assert (bench.id, bench.messages, bench.follow_ups) == ("81", [first], ["Why?"])
    assert (several.messages[0]["role"], several.follow_ups) == ("system", ["Why?"])
    assert (calls.follow_ups, calls.tools) == (None, [{"type": "function", "function": function}])
    assert chat_request(formatted)["response_format"] == {"type": "json_object"}
    turns = turns_of(bench)
    assert [turn.id for turn in turns] == ["81", "81, turn 2"]
    assert [turn.group for turn in turns] == ["81", "81"]
    said = after(turns[1], turns[0], "Hello.")
    assert said.messages == [first, {"role": "assistant", "content": "Hello."}, second]
    assert turns_of(calls) == [calls]
    for prompt in prompts:
        if prompt is not calls:
            with pytest.raises(PromptError, match="only a server"):
                refuse_server_only([prompt])
    refuse_server_only([calls])


def talk(*turns, **fields):
    return json.dumps({"messages": turns} | fields).encode()


UNFINISHED = {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}
HALF_A_CHARACTER = {"tool_calls": [{"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}]}
NESTED = {"tool_calls": [{"function": {"name": "f", "arguments": "[" * 9999}}]}
NAMELESS = {"tool_calls": [{"name": "f"}]}
ASKED = {"role": "user", "content": "a"}
CALLED = {"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"", "holds no prompt"),
        (b'{"prompt": "a"}\n{"prompt": "b\xff"}\n', "line 2"),
        (b'\xef\xbb\xbf{"prompt": "a"}\n\xff', "line 2"),
        (b'{"prompt": "a"}\n\n{"prompt": "b"', "line 3"),
        (b'["a"]\n', "line 1"),
        (b'{"question": "How many?", "answer": "3"}', "`question`"),
        (b'{"turns": "How many?"}', "`turns`"),
        (b'{"question": []}', "`question`"),
        (json.dumps({"question": [[ASKED]], "function": {"name": "f"}}).encode(), "`function`"),
        (json.dumps({"question": [[ASKED], [ASKED, ASKED]]}).encode(), "`question`"),
        (b'{"text": "a"}\n', "neither of `prompt` and `messages`"),
        (talk({"role": "user", "content": "b"}, prompt="a"), "both of `prompt` and `messages`"),
        (b'{"prompt": "  "}', "line 1 `prompt`"),
        (b'{"prompt": 3}', "line 1 `prompt`"),
        (b'{"prompt": "\\ud800"}', "line 1"),
        (b'{"prompt": ["a"]}', "`messages` `0`"),
        (b'{"prompt": "a", "category": ["x"]}', "`category`"),
        (b'{"prompt": "a", "id": true}', "`id`"),
        (b'{"prompt": "a", "id": "x"}\n{"prompt": "b", "id": "x"}', "'x'"),
        (b'{"messages": "hello"}', "`messages`"),
        (talk({"role": "user", "content": ["part"]}), "`messages` `0` `content`"),
        (talk({"role": "user", "content": " "}), "line 1"),
        (talk({"role": "assistant", "content": "a"}), "line 1"),
        (talk({"role": "system", "content": "a"}), "line 1"),
        (talk({"role": "assistant"} | NAMELESS), "`messages` `0`"),
        (talk({"role": "assistant"} | UNFINISHED), "`messages` `0`"),
        (talk(tools="f"), "`tools`"),
        (talk({"role": "assistant"} | HALF_A_CHARACTER), "`messages` `0`"),
        (b'{"prompt": "What is this?", "image_files": ["a.png"]}', "`image_files`"),
        (b'{"prompt": "What is this?", "input_audio": "a.wav"}', "`input_audio`"),
        (b'{"prompt": "What is this?", "multi_modal_data": {"image": "a"}}', "`multi_modal_data`"),
        (b'{"prompt": "def f(", "suffix": "return 3"}', "`suffix`"),
        (b'{"prompt": "Sum it up.", "input": "A town."}', "`input`"),
        (b'{"prompt": "Which town?", "context": "A town."}', "`context`"),
        (b'{"prompt": "Which town?", "passages": ["A town."]}', "`passages`"),
        (b'{"prompt": "Which town?", "history": [["a", "b"]]}', "`history`"),
        (talk(ASKED, enable_thinking=False), "`enable_thinking`"),
        (talk(ASKED | {"images": ["a.png"]}), "`messages` `0`: `images`"),
        (talk(ASKED, CALLED), "`messages` `1`: `function_call`"),
        (talk(ASKED | {"role": "User"}), "line 1"),
        (talk(ASKED, tools='[{"a": "\\ud800"}]'), "line 1 `tools`"),
        ('{"prompt": "a"}'.encode("utf-16"), "UTF-8"),
        (b'\n{"prompt": "a",}', "line 2: Invalid JSON: trailing comma at column 16"),
        (talk({"role": "assistant"} | NESTED), "`messages` `0`"),
        (b'{"conversations": [{"from": ["human"], "value": "a"}]}', "`from`"),
        (talk(chat_template_kwargs="x"), "`chat_template_kwargs`"),
        (b'{"conversations": [{"from": "bing", "value": "a"}]}', "'bing'"),
        (b'{"conversations": [{"from": "human"}]}', "`messages` `0`"),
    ],
)
def test_mistakes_name_file_line_and_field(written, content, place):
    spec = written(content)
    with pytest.raises(PromptError, match=re.escape(place)) as raised:
        load_prompts(spec)
    assert spec in str(raised.value)


@pytest.mark.parametrize("damage", [slice(0, 20), slice(5, None)])
def test_a_damaged_archive(written, damage):
    whole = gzip.compress(b'{"prompt": "a"}\n' * 50)
    with pytest.raises(PromptError, match="cannot be read"):
        load_prompts(written(whole[damage], "p.jsonl.gz"))


def test_a_file_that_is_missing_or_a_folder(tmp_path):
    for path in (tmp_path / "absent.jsonl", tmp_path):
        with pytest.raises(SourceError, match=path.name):
            load_prompts(str(path))


def test_a_data_set_of_the_hub(monkeypatch):
    from datasets import Dataset

    rows = Dataset.from_list([{"prompt": f"p{i}", "task_id": f"t{i}"} for i in range(20)])
    asked = []

    def load(name, config, split, revision):
        asked.append((name, config, split, revision))
        return rows

    monkeypatch.setattr("datasets.load_dataset", load)
    everything = load_prompts("org/set:test")
    assert everything == [Prompt(f"t{i}", f"p{i}") for i in range(20)]
    assert load_prompts("org/set", limit=5, seed=1) == draw(everything, 5, 1)
    for spec in (
        "set@v1.0",
        "org/set:main:test",
        "org/set@refs/pr/1:20231101.de:train[:10%]+test",
        "org/set:train[10:20]",
    ):
        load_prompts(spec)
    assert asked == [
        ("org/set", None, "test", None),
        ("org/set", None, "train", None),
        ("set", None, "train", "v1.0"),
        ("org/set", "main", "test", None),
        ("org/set", "20231101.de", "train[:10%]+test", "refs/pr/1"),
        ("org/set", None, "train[10:20]", None),
    ]


@pytest.mark.parametrize("spec", ["org/set", "org/set:a:b:c", "x y"])
def test_a_data_set_that_cannot_be_loaded(monkeypatch, spec):
    def offline(*args, **kwargs):
        raise ConnectionError("no route to the Hub")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(PromptError, match=rf"{spec}.*no route to the Hub.*NAME:CONFIG:SPLIT"):
        load_prompts(spec)


def test_a_limit_draws_with_the_seed_and_keeps_the_order(written):
    spec = written([{"prompt": f"p{i}"} for i in range(50)])
    drawn = load_prompts(spec, limit=10, seed=3)
    numbers = [int(p.id) for p in drawn]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) == 10
    assert drawn == load_prompts(spec, limit=10, seed=3)
    assert drawn != load_prompts(spec, limit=10, seed=4)
    assert len(load_prompts(spec, limit=99)) == len(load_prompts(spec)) == 50


def test_written_prompts_are_read_back(tmp_path):
    prompts = [
        Prompt("a/1", "é\u2028\n", None, "x"),
        Prompt("2", None, [{"role": "system", "content": ""}, {"role": "user", "content": "?"}]),
    ]
    path = tmp_path / "out" / "prompts.jsonl"
    write_prompts(path, prompts)
    assert load_prompts(str(path)) == prompts
    assert prompts_sha256(load_prompts(str(path))) == prompts_sha256(prompts)


def test_the_hash_sees_every_change():
    a, b = Prompt("1", "a"), Prompt("2", "b")
    others = [[a], [a, Prompt("2", "c")], [a, Prompt("3", "b")], [a, Prompt("2", "b", None, "x")]]
    hashes = {prompts_sha256(prompts) for prompts in [[a, b], *others]}
    assert len(hashes) == 1 + len(others)
    assert prompts_sha256([a, b]) == prompts_sha256([b, a])
    assert prompts_sha256([a, b]) == prompts_sha256([Prompt("1", "a"), Prompt("2", "b")])


def test_a_prompt_is_completed_raw_and_messages_get_the_template_and_one_bos(tokenizer):
    ids = render(Prompt("1", "select name"), tokenizer)
    assert [WORDS[i] for i in ids] == ["<s>", "select", "name"]
    ids = render(Prompt("1", None, [{"role": "user", "content": "select ?"}]), tokenizer)
    assert [WORDS[i] for i in ids] == ["<s>", "user", "select", "?", "assistant"]


def test_an_instruct_model_is_asked_and_a_base_model_completes(tokenizer):
    bare = Prompt("1", "select name", None, "x", "g")
    asking = Prompt("2", None, [{"role": "user", "content": "t"}])
    asked = in_chat_form([bare, asking], "name ? {prompt} :", tokenizer.chat_template)
    assert asked[1] == asking
    assert asked[0].messages == [{"role": "user", "content": "name ? select name :"}]
    assert (asked[0].prompt, asked[0].category, asked[0].group) == (None, "x", "g")
    assert in_chat_form([bare], "name ? {prompt}", None) == [bare]
    assert in_chat_form([bare], None, tokenizer.chat_template) == [bare]
    assert PromptSet("made up", [*asked, bare], [[]] * 3).in_chat_form == pytest.approx(2 / 3)
    with pytest.raises(PromptError, match="Complete it"):
        in_chat_form([bare], "Complete it", tokenizer.chat_template)


def test_a_function_to_write_is_asked_for_by_its_code_and_its_docstring(tokenizer):
    code = 'import re\n\n\ndef f(a):\n    """Say {code}\n    twice.\n    """\n'
    (asked,) = in_chat_form([Prompt("1", code)], "{docstring}\n\n{code}", tokenizer.chat_template)
    assert asked.messages[0]["content"] == "Say {code}\ntwice.\n\nimport re\n\n\ndef f(a):"
    # a form feed ends no line, nor does U+2028
    inner = '\f\nX = "\u2028"\ndef f(a):\n    import math\n    """Say it."""\n'
    (asked,) = in_chat_form([Prompt("1", inner)], "{docstring} {code}", tokenizer.chat_template)
    assert asked.messages[0]["content"] == 'Say it. \f\nX = "\u2028"\ndef f(a):\n    import math'
    for no_task in (
        "select name",
        "def f(a):\n    return a\n",
        code + "    return a\n",
        "def f(a):\n    3\n",
    ):
        with pytest.raises(PromptError, match="Prompt '1' is not a Python function"):
            in_chat_form([Prompt("1", no_task)], "{docstring} {code}", tokenizer.chat_template)


def test_what_the_template_has_a_switch_for_comes_from_the_recipe_or_the_prompt(tokenizer, written):
    turns = [{"role": "user", "content": "t"}]
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    rows = [{"messages": turns}, {"messages": turns, "chat_template_kwargs": on}, {"prompt": "t"}]
    prompts = load_prompts(written(rows))
    asked = in_chat_form(prompts, None, tokenizer.chat_template, off | {"bos_token": "t"})
    assert [prompt.chat_template_kwargs for prompt in asked] == [
        off | {"bos_token": "t"},
        on | {"bos_token": "t"},
        None,
    ]
    asked = in_chat_form(prompts, "{prompt}", tokenizer.chat_template, off)
    words = [" ".join(WORDS[i] for i in render(prompt, tokenizer)) for prompt in asked]
    closed = "<s> user t assistant : :"
    assert words == [closed, "<s> user t assistant", closed]
    for prompt, kwargs in zip(asked, (off, on, off), strict=True):
        by_transformers = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_dict=False, **kwargs
        )
        assert render(prompt, tokenizer) == by_transformers
    assert PromptSet("made up", asked, [[]] * 3).chat_template_kwargs == [off, on]
    assert PromptSet("made up", prompts, [[]] * 3).chat_template_kwargs == [{}, on]
    assert len({prompts_sha256([p]) for p in (prompts[0], asked[0])}) == 2
    path = written([])
    write_prompts(path, asked)
    # so a run's own prompts are asked as they were
    assert [prompt.content for prompt in load_prompts(path)] == [p.content for p in asked]
    for template in (tokenizer.chat_template, None):
        with pytest.raises(PromptError, match="chat_template_kwargs"):
            in_chat_form(prompts[2:], None, template, off)


CALLING = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QWEN3, DEEPSEEK = (
    (resources.files("trl") / f"chat_templates/{name}.jinja").read_text("utf-8")
    for name in ("qwen3", "deepseek_r1_distill")
)
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}


def call(arguments):
    function = {"name": "weather", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": function}],
    }


def talk_with_tools(arguments):
    return [
        {"role": "user", "content": "Is it warm in Turin?"},
        call(arguments),
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "31 °C"},
    ]


@pytest.fixture
def letters():
    """A tokenizer whose ids give the whole text back."""
    made = tokenizer_of_bytes()
    made.chat_template = CALLING
    return made


@pytest.mark.parametrize("template", [CALLING, QWEN3])
@pytest.mark.parametrize("as_text", [False, True])
def test_tools_calls_and_results_are_rendered_as_transformers_does(
    letters, written, as_text, template
):
    letters.chat_template = template
    arguments, turns = {"town": "Turin"}, talk_with_tools({"town": "Turin"})
    row = {"messages": talk_with_tools(json.dumps(arguments) if as_text else arguments)}
    row["tools"] = json.dumps([TOOL]) if as_text else [TOOL]
    (prompt,) = load_prompts(written([row]))
    expected = letters.apply_chat_template(
        turns, tools=[TOOL], add_generation_prompt=True, tokenize=False
    )
    assert letters.decode(render(prompt, letters)) == expected
    assert '{"town": "Turin"}' in expected
    assert prompt.text == "Is it warm in Turin?"
    sent = chat_request(prompt)
    assert sent["messages"] == talk_with_tools(json.dumps(arguments))  # as OpenAI's API has it
    assert (sent["tools"], sent["tool_choice"]) == ([TOOL], "none")
    write_prompts(written([]), [prompt])
    assert load_prompts(written([row])) == [prompt]
    assert prompts_sha256([prompt]) != prompts_sha256([replace(prompt, tools=None)])


CALL = '<tool_call>\n{"name": "weather", "arguments": {"town": "Turin"}}\n</tool_call>'


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"content": "Yes"}, "<think>\n\n</think>\n\nYes"),
        ({"content": "Yes", "reasoning_content": "Hm"}, "<think>\nHm\n</think>\n\nYes"),
        (call({"town": "Turin"}), f"<think>\n\n</think>\n\n{CALL}"),
    ],
)
def test_a_logged_output_is_rendered_up_to_its_stop_token(letters, message, expected, cut):
    letters.chat_template, end = QWEN3, "<|im_end|>"
    letters.add_tokens([end])
    output = {"message": {"role": "assistant"} | message, "cut": cut}
    earlier = {"role": "assistant", "content": "No", "reasoning_content": "once thought"}
    prompt = Prompt("1", messages=[*ASKING, earlier, *ASKING], tools=[TOOL], logged_output=output)
    stops = {letters.convert_tokens_to_ids(end)}
    ids = render_output(prompt, letters, stops)
    assert letters.decode(ids) == expected + ("" if cut else end)
    assert "once thought" not in letters.decode(render(prompt, letters))
    letters.chat_template = DEEPSEEK  # it has no thoughts after its own "<think>"
    assert render_output(prompt, letters, stops) is None


def test_sentencepiece_puts_no_space_before_an_output():
    """Alone it does, and the target did not."""
    model = models.BPE({"<unk>": 0, "\u2581": 1, "H": 2, "i": 3, "?": 4, "\n": 5}, [])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.add_special_tokens(["<|user|>", "<|assistant|>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    prompt = Prompt(
        "1",
        messages=[{"role": "user", "content": "Hi?"}],
        logged_output={"message": {"role": "assistant", "content": "Hi"}},
    )
    end = tokenizer.eos_token_id
    assert tokenizer("\nHi", add_special_tokens=False)["input_ids"] == [1, 5, 2, 3]
    assert render_output(prompt, tokenizer, {end}) == [5, 2, 3, end]


# as GLM's: no turn has an end, and a thought is shown only after the last turn of the user
GLM = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|assistant|>"
    "{% if loop.last and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}"
    "{% else %}{{ '<|observation|>' if m.role == 'tool' else '<|user|>' }}{{ m.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("message", "end"),
    [
        ({"content": "Yes"}, "<|user|>"),
        ({"content": "Yes", "reasoning_content": "Hm"}, "<|user|>"),
        (call({"town": "Turin"}), "<|observation|>"),
    ],
)
def test_an_output_ends_with_the_role_of_the_next_turn_in_glm(letters, message, end):
    letters.chat_template = GLM
    letters.add_tokens(["<|user|>", "<|observation|>", "<|assistant|>"])
    stops = {letters.convert_tokens_to_ids(token) for token in ("<|user|>", "<|observation|>")}
    output = {"message": {"role": "assistant"} | message}
    prompt = Prompt("1", messages=ASKING, logged_output=output)
    ids = render_output(prompt, letters, stops)
    assert ids[-1] == letters.convert_tokens_to_ids(end)
    assert not stops & {*ids[:-1]}
    cut = replace(prompt, logged_output=output | {"cut": True})
    assert render_output(cut, letters, stops) == ids[:-1]
    assert render_output(prompt, letters, {0}) == ids[:-1]  # a role that is no stop


def test_what_a_data_set_gives_a_row_because_others_have_it_is_left_out(letters, monkeypatch):
    from datasets import Dataset

    other = TOOL["function"] | {"parameters": {"properties": {"n": {"type": "integer"}}}}
    rows = [
        {"messages": talk_with_tools({"town": "Turin"}), "tools": [TOOL]},
        {"messages": talk_with_tools({"n": "3"}), "tools": [TOOL | {"function": other}]},
    ]
    monkeypatch.setattr("datasets.load_dataset", lambda *args, **kwargs: Dataset.from_list(rows))
    prompts = load_prompts("org/set")
    assert [prompt.tools for prompt in prompts] == [row["tools"] for row in rows]
    for prompt, row in zip(prompts, rows, strict=True):
        expected = letters.apply_chat_template(
            row["messages"], tools=row["tools"], add_generation_prompt=True, tokenize=False
        )
        assert letters.decode(render(prompt, letters)) == expected


DIVIDING, SEARCHING = "{{ 1 // 0 }}", "{{ 'a'.index('b') }}"
ADDING = "{% for m in messages %}{{ m.content + m.tool_calls }}{% endfor %}"
ASKING = [{"role": "user", "content": "t"}]


@pytest.mark.parametrize(
    ("prompt", "template", "named"),
    [
        (Prompt("q7", None, ASKING), None, "`messages`"),
        (Prompt("q7", None, [{"role": "tool", "content": "t"}]), TEMPLATE, "no such role here"),
        (Prompt("q7", None, [call({})]), ADDING, "`messages`"),
        (Prompt("q7", None, ASKING), DIVIDING, "`messages`"),
        (Prompt("q7", None, ASKING), SEARCHING, "`messages`"),
        (Prompt("q7", None, ASKING, tools=[TOOL]), TEMPLATE, "'tools'"),
        (Prompt("q7", None, talk_with_tools({})), TEMPLATE, "'tool_calls'"),
        (Prompt("q7", "t", tools=[TOOL]), CALLING, "`tools`"),
        (
            Prompt("q7", None, ASKING, chat_template_kwargs={"enable_thinkin": False}),
            TEMPLATE,
            "'enable_thinkin'",
        ),
        (Prompt("q7", None, ASKING, chat_template_kwargs={"messages": []}), TEMPLATE, "'messages'"),
    ],
)
def test_what_a_template_refuses_or_leaves_out_is_refused(letters, prompt, template, named):
    letters.chat_template = template
    with pytest.raises(PromptError, match=f"'q7'.*{named}"):
        render(prompt, letters)


def test_templates_by_name_without_a_default_are_named(tokenizer):
    tokenizer.chat_template = {"rag": TEMPLATE, "tool_use": CALLING}
    with pytest.raises(PromptError, match=r"'q7'.*rag, tool_use"):
        render(Prompt("q7", None, ASKING), tokenizer)
    assert render(Prompt("q7", None, ASKING, tools=[TOOL]), tokenizer)


def test_a_text_that_was_rendered_before_has_one_bos(tokenizer):
    """Mutant: the tokenizer puts another one before it."""
    prompts = [Prompt("a", "<s> user select"), Prompt("b", "user select")]
    rendered = render_set("made up", prompts, tokenizer, 20, 4)
    assert rendered.ids == [[0, 2, 5]] * 2
    assert [prompt.prompt for prompt in rendered.prompts] == [" user select", "user select"]
    tokenizer.bos_token = None
    assert render_set("made up", prompts, tokenizer, 20, 4).ids == [[0, 0, 2, 5], [0, 2, 5]]


def test_the_first_of_drawn_prompts_are_drawn_too():
    prompts = [Prompt(str(i), "x") for i in range(50)]
    every = PromptSet("made up", prompts, [[i] for i in range(50)])
    ten, twenty = every.drawn(10, 3), every.drawn(20, 3)
    assert twenty.first(10) == ten
    assert every.drawn(10, 4) != ten
    assert ten.ids != sorted(ten.ids)
    assert [[int(p.id)] for p in twenty.prompts] == twenty.ids
    assert len(every.drawn(99, 3).ids) == len(every.first(99).ids) == 50


SWITCH = (  # as SmolLM3's template: thinking is the default
    "{% set s = messages[0].content if messages[0].role == 'system' else '' %}"
    "system: {{ s.replace('/no_think', '').replace('/think', '').strip() }}\n"
    "{% for m in messages if m.role != 'system' %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if '/no_think' in s %}no thought{% endif %}"
)


@pytest.mark.parametrize("role", ["developer", "wizard"])
def test_a_turn_that_the_template_would_leave_out_is_refused(letters, role):
    letters.chat_template = QWEN3
    turns = [{"role": role, "content": " Be brief.\n"}, {"role": "user", "content": "Why?"}]
    with pytest.raises(PromptError, match=f"'q7': .*{role}"):
        render(Prompt("q7", None, turns), letters)


@pytest.mark.parametrize("said", ["/think", "/no_think", "/no_think\nBe brief."])
def test_a_turn_that_only_sets_a_switch_may_change_nothing(letters, said):
    letters.chat_template = SWITCH
    turns = [{"role": "system", "content": said}, {"role": "user", "content": "Why?"}]
    text = letters.decode(render(Prompt("q7", None, turns), letters))
    brief = "Be brief." * ("Be" in said)
    assert text == f"system: {brief}\nuser: Why?\n" + "no thought" * ("no" in said)


def test_long_prompts_are_refused_dropped_or_cut_and_counted(tokenizer, capsys):
    prompts = [Prompt("short", "select"), Prompt("long", "select name from t ?")]

    def rendered(tokens, long_prompts, context=10):
        sets = render_set("made up", prompts, tokenizer, context, 4, tokens, long_prompts)
        both = zip(sets.prompts, sets.ids, strict=True)
        return [(p.id, " ".join(WORDS[i] for i in ids)) for p, ids in both]

    whole = [("short", "<s> select"), ("long", "<s> select name from t ?")]
    for long_prompts in get_args(LongPrompts):
        assert rendered(6, long_prompts) == whole
    assert rendered(None, "error") == whole
    assert capsys.readouterr().out == ""
    assert rendered(3, "drop") == whole[:1]
    assert rendered(None, "drop", context=9) == whole[:1]
    assert capsys.readouterr().out.count("made up: 1 of 2 prompts longer than") == 2
    assert rendered(3, "truncate_left") == [whole[0], ("long", "<s> t ?")]
    assert "made up: 1 of 2 prompts longer than 3 tokens" in capsys.readouterr().out
    for tokens, long_prompts, context, named in (
        (3, "error", 10, "'long' has 6 tokens.* 3 "),
        (None, "error", 9, "'long' has 6 tokens.* 5 "),
        (1, "drop", 10, "All 2 prompts"),
        (7, "drop", 10, "max_prompt_length is 7"),
    ):
        with pytest.raises(PromptError, match=named):
            rendered(tokens, long_prompts, context)


def test_a_prompt_without_a_token_or_with_one_that_has_no_entry(tokenizer):
    with pytest.raises(PromptError, match="'odd' has the token 'select'"):
        render_set("", [Prompt("odd", "select")], tokenizer, 10, 4, vocab_size=1)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="$A")
    with pytest.raises(PromptError, match="'odd' renders to no token"):
        render_set("", [Prompt("odd", "\n")], tokenizer, 10, 4)
