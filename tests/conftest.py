"""What tests share: processes and cores, a tiny Llama, and a small made-up evaluation."""

import functools
import gc
import os
import random

import pytest
import torch
from jinja2 import Environment
from transformers import LlamaConfig, LlamaForCausalLM

from align.cache import cache_folder
from align.fetch import from_hub
from align.machine import use_machine
from eval.decoding.prompt_run import PromptRun
from eval.engines.start_vllm import EngineMissing, vllm_python
from eval.measuring.cost import StepCosts
from eval.measuring.runs import Agreement, DraftLog, RunLog, TargetOutput
from eval.reporting import page
from eval.reporting.build import build_report

use_machine()  # as commands do: MKL's sums do not depend on where a tensor lies
WORKER = os.environ.get("PYTEST_XDIST_WORKER")  # gw0, gw1, …; None outside of pytest-xdist

if WORKER:  # a core for each worker and the processes that it starts: nobody disturbs a timed step
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):  # not on a Mac
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(WORKER[2:]) % len(cores)]})


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """If all tests are asked for, two processes share them, a file at a time, in their order."""
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not config.option.usepdb
    if whole and not WORKER and getattr(config.option, "numprocesses", 0) is None:
        config.option.numprocesses, config.option.dist = 2, "loadfile"
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """Long files first, real models and what belongs to no package: none runs alone at the end."""
    items.sort(key=lambda i: ("real" not in i.keywords, i.path.parent.name != "tests"))


def pytest_collection_finish():
    """What was imported for the tests stays: a run's `gc.collect()` need not go through it."""
    gc.freeze()


def assert_golden(path, text):
    """The text is the file's. UPDATE_GOLDEN=1 in the environment writes the file anew."""
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def cache_without_answers(folder):
    """The path of a new cache that shares with the machine's all but what targets have answered."""
    for name in ("files", "folders", "checkpoints", "engines"):
        (cache_folder() / name).mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(cache_folder() / name)
    return str(folder)


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """Runs of a whole module or session share their answers, and nobody else's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTSMITH_CACHE", cache_without_answers(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def spared():
    """No test waits for the disk; templates are read once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(os, "sync", lambda: None)
        patch.setattr(page, "_environment", functools.cache(page._environment))
        patch.setattr(Environment, "compile", functools.cache(Environment.compile))
        yield


@pytest.fixture(autouse=True)
def alone():
    """No test draws other numbers, or finds another's Hub, where other tests have run before it."""
    torch.manual_seed(0)
    from_hub.cache_clear()


@pytest.fixture(scope="session")
def installed():
    """The Python of vLLM's environment."""
    try:
        return vllm_python()
    except EngineMissing as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="session")
def tiny_llama():
    """Makes a Llama of a few kilobytes: tiny_llama(seed, spread, **config).

    spread: the weights are so many times what they start as. From 4 on the distributions are far
    from flat, so that greedy text does not just repeat.
    """

    def make(seed=0, spread=1, **config):
        shape = {
            "vocab_size": 61,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
        }
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**(shape | config))).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(spread if parameter.ndim > 1 else 1)
        return model

    return make


def made_up_run(rng, prompt_id, alpha, gamma, blocks=10):
    """Decoded with a draft whose every token is accepted with probability alpha; no overhead."""
    accepted = []
    for _ in range(blocks):
        run = 0
        while run < gamma and rng.random() < alpha:
            run += 1
        accepted.append(run)
    emitted = [a + 1 for a in accepted]
    seconds = 0.001 * gamma + 0.011 if gamma else 0.010
    return PromptRun(
        prompt_id=prompt_id,
        category="even" if int(prompt_id) % 2 == 0 else "odd",
        prompt_tokens=20,
        tokens=[rng.randrange(50_000) for _ in range(1 + sum(emitted))],
        prefill_seconds=0.03,
        block_seconds=[seconds] * blocks,
        block_tokens=emitted,
        drafted=[gamma] * blocks,
        accepted=accepted,
        late=0,
    )


TOKENS = 30  # of an output


def made_up_answers(prompts):
    return [TargetOutput(str(i), [1, 2], [*range(TOKENS)]) for i in range(prompts)]


def made_up_agreement(rng, prompt_id, alpha):
    """At temperature 0."""
    agreed = min(max(round(rng.gauss(alpha, 0.05) * TOKENS), 0), TOKENS)
    category = "even" if int(prompt_id) % 2 == 0 else "odd"
    return Agreement(prompt_id, category, float(agreed), TOKENS, prompt_tokens=20)


def made_up_measurement(name, alpha, prompts=40, **changes):
    rng = random.Random(name)
    log = {
        "agreement": [made_up_agreement(rng, str(i), alpha) for i in range(prompts + 10)],
        "runs": [made_up_run(rng, str(i), alpha, gamma=3) for i in range(prompts)],
        "baseline": [made_up_run(rng, str(i), 0, 0, blocks=30) for i in range(prompts)],
        "costs": StepCosts(1.0, 10.0, {1: 10.0, 2: 10.5, 3: 11.0, 4: 11.0, 5: 12.0}, 60),
        "missing": {},
    }
    about = {
        "path": f"outputs/code/{name}",
        "form": "full",
        "vocabulary": {"relation": "identical", "strategy": "none", "coverage": 1.0},
        "memory": {
            "target_bytes": 270_000_000,
            "draft_bytes": 27_000_000,
            "kv_bytes_per_token": {"target": 23_040, "draft": 1_536},
        },
        "gamma": 3,
        "gamma_policy": "fixed",
        "lossless": {
            "prompts": prompts,
            "divergences": [
                {"prompt": str(i), "position": 7 + i, "target": " value", "drafted": "|`<b>`"}
                | {"gap": 0.01, "error": 0.03, "tie": True}
                for i in range(2)
            ],
        },
    }
    for field, value in changes.items():
        (log if field in log else about)[field] = value
    return DraftLog(name, about, **log)


@pytest.fixture(scope="session")
def run_info():
    about = {
        "target": "org/target-135m",
        "engine": "draftsmith",
        "device": "2 CPU cores",
        "dtype": "bfloat16",
        "decoding": {
            "temperature": 0.0,
            "top_k": 0,
            "top_p": 1.0,
            "max_new_tokens": 64,
            "gamma": 3,
            "gamma_policy": "fixed",
            "verification": "greedy match",
            "stop_tokens": 2,
            "ended_by_stop": 0.4,
        },
        "prompts": {
            "source": "org/prompts",
            "n": 50,
            "sha256": "ab" * 32,
            "overlap_with_training": 0.0,
        },
        "provenance": {"command": "accelerate launch distill/train.py --recipe code", "seed": 0},
        "environment": {
            "engine": "draftsmith",
            "engine_version": "1.0",
            "hardware": "AMD EPYC 9B14",
            "cores": 2,
            "threads": 2,
            "date": "2026-11-25T21:31:07+00:00",
            "load_average": 0.1,
            "server_arguments": None,
        },
    }
    return RunLog(
        about,
        over_stock_generate={"mean": 1.1, "ci95": [1.05, 1.15], "n": 40},
        answers=made_up_answers(50),
    )


@pytest.fixture
def measurement():
    """Makes a `DraftLog`: measurement(name, alpha, prompts=40, **fields to change)."""
    return made_up_measurement


@pytest.fixture(scope="session")
def built_report(run_info):
    drafts = [made_up_measurement("untuned", 0.35), made_up_measurement("tuned", 0.6)]
    return build_report(run_info, drafts)


@pytest.fixture
def sample_report(built_report):
    """A report of the drafts `untuned` and `tuned`, to be changed at will."""
    return built_report.model_copy(deep=True)
