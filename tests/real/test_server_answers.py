"""A real vLLM answers the code prompts: tokens and log-probabilities are ours, no weights needed.

It needs a Python with vLLM (docs/engines.md); else this is skipped.
"""

import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from align.checkpoint import Checkpoint
from distill.drafters.pruned import build_pruned
from distill.models import check_models, open_models
from distill.prompt_sets import collect_prompts
from distill.recipe import load_recipe
from distill.teacher.answers import top_logprobs
from distill.teacher.vllm_target import answering_target
from eval.decoding.target import load_target
from eval.reporting.fields import read_report
from tests.real.conftest import words_of

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
TIE = 1e-4  # logits: the same sum in fp32, in another order, is off by less
SHORT = {
    "minutes": "null",
    "train_on_prompts": "false",
    "max_train_prompts": 40,
    "answer_max_new_tokens": 32,
    "answer_temperature": 0.0,
    "max_eval_prompts": 12,
    "speed_prompts": 4,
    "tuning_prompts": 2,
    "max_new_tokens": 32,
    "max_steps": 10,
    "warmup_steps": 2,
    "gamma": 3,
}


@pytest.fixture(scope="module")
def weights():
    return Checkpoint.open(load_recipe(["--recipe", "code"]).target).folder


@pytest.fixture(scope="module")
def bare(weights, tmp_path_factory):
    """The target's folder without its weights: whoever wants them fails."""
    folder = tmp_path_factory.mktemp("bare") / "target"
    folder.mkdir()
    for file in weights.iterdir():
        if file.suffix != ".safetensors":
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def sibling(weights, tmp_path_factory):
    """The first two layers of the target under its own head."""
    target = Checkpoint.open(weights).load(torch.bfloat16)
    folder = tmp_path_factory.mktemp("sibling")
    head = target.get_output_embeddings().weight.detach().clone()
    build_pruned(target, 2, head).save_pretrained(folder)
    Checkpoint.open(weights).tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def address(vllm, weights):
    return vllm(weights)


@pytest.fixture(scope="module")
def arguments(bare, sibling, address, tmp_path_factory):
    """A short run of the recipe `code/pruned` with the target behind the server."""
    keys = SHORT | {"target": bare, "draft": sibling, "dtype": "float32"}
    keys |= {"answers": "server", "answer_url": address}
    keys |= {"output_dir": tmp_path_factory.mktemp("run") / "code"}
    return ["--recipe", "code/pruned", *words_of(keys)]


def test_greedy_tokens_are_ours_and_log_probabilities_within_a_thousandth(arguments, weights):
    recipe = load_recipe(arguments)
    pair = check_models(recipe, *open_models(recipe))
    served = answering_target(recipe, pair, collect_prompts(recipe, pair.target), None)
    served.check()
    request = served.request()
    with ThreadPoolExecutor(8) as pool:  # many in flight: before they are rounded to fp16
        answers = list(pool.map(lambda prompt: served.ask(prompt, request), served.prompts))
    target = load_target(Checkpoint.open(weights), torch.float32, "cpu", 1024)
    tokens = ties = 0
    worst = 0.0
    for answer in answers:
        prompt = answer.prompt_ids.tolist()
        text = torch.tensor([prompt + answer.response_ids.tolist()])
        with torch.inference_mode():
            logits = target.model(text).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        ours = logits.argmax(-1)
        parted = (ours != answer.response_ids).nonzero()
        assert (best[parted, 0] - best[parted, 1] < TIE).all()
        ties += len(parted)
        _, logprobs = top_logprobs(logits, recipe.cache_top_k)
        worst = max(worst, float((logprobs - answer.top_logprobs).abs().max()))
        named = logits.log_softmax(-1).gather(1, answer.top_ids)
        worst = max(worst, float((named - answer.top_logprobs).abs().max()))
        stopped = [int(token) in target.stops for token in answer.response_ids]
        assert not any(stopped[:-1])
        assert stopped[-1] or len(stopped) == recipe.answer_max_new_tokens
        tokens += len(stopped)
    print(f"{tokens} greedy tokens, {ties} at a tie; log-probabilities off by {worst:.1e} at most")
    assert worst < 1e-3
    for answer in answers[:4]:  # read as a logged output
        said = answer.prompt_ids.tolist(), answer.response_ids.tolist()
        sent = served.server.ask("/v1/completions", request.body_of_text(said[0] + said[1]))
        read = request.read_text(sent, *said)
        assert (read.top_logprobs - answer.top_logprobs).abs().max() < 1e-3


def python(*words):
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_run_ends_in_a_draft_and_then_in_a_report_without_the_weights(
    arguments, weights, bare, vllm
):
    assert not list(bare.glob("*.safetensors"))
    folder = load_recipe(arguments).folder
    shown = python("distill/train.py", *arguments)
    assert (folder / "draft" / "model.safetensors").is_file()
    (command,) = re.findall("^ +(vllm serve .*)$", shown, re.MULTILINE)
    verb, serve, target, *options = shlex.split(command)
    assert [verb, serve, target] == ["vllm", "serve", str(bare)]
    assert options[:2] == ["--served-model-name", "target"]
    speculative = vllm(weights, *options[2:])
    (command,) = re.findall("^ +python (-m eval.run .*)$", shown, re.MULTILINE)
    words = shlex.split(command.replace("http://HOST:PORT", speculative))
    python(*words, "--speed_prompts", str(SHORT["speed_prompts"]))
    report = read_report(folder / "report" / "report.json")
    draft = report.drafts["tuned"]
    assert draft.lossless.prompts == draft.speedup.n == SHORT["speed_prompts"]
    assert draft.lossless.unexplained == 0
    assert draft.gamma == SHORT["gamma"]
    assert draft.counters.num_accepted_tokens > 0
    hashes = json.loads((folder / "provenance.json").read_text())["hashes"]
    assert hashes["target weights"] == f"served as target, root {weights}"
