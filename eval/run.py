"""Measure drafts for a target with the full speculative decoder, and write the report.

    python -m eval.run --target T --draft D --prompts P --output_dir DIR
    python -m eval.run --target T --draft a=PATH --draft b=PATH --prompts P --output_dir DIR
    python -m eval.run --target T --draft prompt-lookup --draft D …   compare with n-grams
    python -m eval.run --target T --draft lookup-first:D …            n-grams, then draft D
    python -m eval.run --run DIR                                      the drafts of a training run
    python -m eval.run --engine vllm --gamma 4 --target T --draft D --prompts P
    python -m eval.run --base_url URL --baseline_url URL --prompts P   running servers, also SGLang
    python -m eval.run --engine llama.cpp … --concurrency 1,4,8       at steady loads
    python -m eval.run --engine vllm --forecast …                     before training: the most gain
    python -m eval.run --engine transformers --gamma 3 --target T --draft D --prompts P

Exit status: 0; 1 if the lower bound of the last draft's 95% interval is below --fail_under_alpha or
--fail_under_speedup; 2 for input that cannot be used, and for a server that failed midway (earlier
results are in the report); 130 if interrupted. If an evaluation ended early, the same command
continues it (not with engine transformers).
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import math
import os
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from ruamel.yaml import YAML, YAMLError

from align.check import Strategy
from align.checkpoint import Checkpoint
from align.errors import SourceError, UserError
from align.files import read_json, refuse_unwritable, write_json
from align.from_gguf import value_of
from align.machine import use_machine
from eval.chat_template import LongPrompts, in_chat_form, refuse_without_template, render_set
from eval.decoding.build import build_decoder, longest_context
from eval.decoding.drafters import LOOKUP
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding
from eval.decoding.target import Target, load_target
from eval.decoding.verification import SampleMethod, Sampling
from eval.engines.contender import Task
from eval.engines.conversation import refuse_server_only
from eval.engines.engine_server import EngineServer, Servers
from eval.engines.forecast import forecast_gains, print_gains
from eval.engines.llama_cpp import LlamaServers
from eval.engines.load import GOODPUT, PASSES
from eval.engines.local_vllm import VllmServers
from eval.engines.served import CLIENTS, client_of, measure_servers, measure_started
from eval.engines.transformers_assisted import load_drafts, measure_assisted
from eval.measuring.environment import made_by
from eval.measuring.evaluation import Plan, context_length, evaluate
from eval.measuring.intervals import FEWEST_CLUSTERS
from eval.measuring.journal import INTERRUPTED, JOURNAL, Journal
from eval.near_duplicates import drop_overlap
from eval.prompts import Prompt, PromptSet, load_prompts
from eval.reporting.build import build_report
from eval.reporting.fields import Load, Report
from eval.reporting.files import write_report
from eval.reporting.text import print_summary

TEMPLATE = 512  # most tokens that a chat template adds to a prompt
SERVED: dict[str, type[Servers]] = {"vllm": VllmServers, "llama.cpp": LlamaServers}


def parse(argv: list[str]) -> argparse.Namespace:
    about, examples, *_ = __doc__.split("\n\n")
    parser = argparse.ArgumentParser(prog="python -m eval.run", description=about, epilog=examples)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument_group("target, drafts, prompts").add_argument
    add("--target", help="Hub id, folder, GGUF or pypi: file")
    of_draft = "[NAME=]SPEC, repeatable; prompt-lookup needs no model; with --base_url NAME=URL: "
    add("--draft", action="append", help=of_draft + "what this server drafts with, by your word")
    add("--prompts", help="Hub data set, pypi: file or .jsonl")
    add("--instruction", help="user message; {prompt} stands for the prompt")
    kwargs = 'arguments of the chat template, as {"enable_thinking": false}'
    add("--chat_template_kwargs", type=_object, metavar="JSON", help=kwargs)
    add("--max_prompt_length", type=int, help="most tokens of a prompt; default: what fits")
    add("--long_prompts", choices=get_args(LongPrompts), default="error", help="longer prompts")
    add("--run", type=Path, help="output folder of a training run: the defaults are its settings")
    place = "folder of the report; default with --run: RUN, RUN-ENGINE or RUN-served"
    add("--output_dir", type=Path, default=Path("outputs/eval"), help=place)
    add("--max_prompts", type=int, help="most prompts; the seed draws them")
    add("--seed", type=int, default=42, help="seed of prompts and samples; default: %(default)s")
    add = parser.add_argument_group("decoding").add_argument
    add("--temperature", type=float, default=0.0, help="default: 0, greedy")
    add("--top_k", type=int, help="likeliest tokens that are sampled from; default: all")
    add("--top_p", type=float, default=1.0, help="their probability; default: 1, all tokens")
    verification = "verify the sampled tokens of a draft as one block, or token by token"
    add("--verification", choices=["block", "token"], default="block", help=verification)
    add(
        "--draft_sample_method",
        choices=get_args(SampleMethod),
        help="draft the most likely token, or a sample (default; vLLM's is greedy), where tokens "
        "are sampled; with --base_url: the servers' method",
    )
    add("--max_new_tokens", type=int, default=128, help="most tokens of an output; default: 128")
    add(
        "--gamma",
        type=partial(_listed, int, "2,4"),
        metavar="N",
        help="draft length; default: chosen on prompts that are not evaluated; servers take "
        "several, as 2,4; with --base_url: the draft length of the servers",
    )
    ngram = "draft length of n-gram speculation in vLLM; default: --gamma"
    add("--ngram_gamma", type=partial(_above_zero, int), metavar="N", help=ngram)
    add("--max_gamma", type=int, default=6, help="longest draft length that is tried")
    add("--speed_prompts", type=int, default=40, help="most prompts that are timed")
    add("--tuning_prompts", type=int, default=8, help="prompts to choose the length on")
    add("--strategy", default="auto", choices=["auto", *get_args(Strategy)], help="vocabulary map")
    dtypes = ["bfloat16", "float16", "float32"]
    add("--dtype", choices=dtypes, default=dtypes[0], help="dtype of target and drafts")
    device = "device of all models; auto: the target's layers over all GPUs, the draft on the first"
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help=device)
    add = parser.add_argument_group("engine").add_argument
    engines = ["torch", "transformers", *(client.engine for client in CLIENTS)]
    add("--engine", choices=engines, help="decoder; default: torch, or the running server's")
    running = "a running server with a draft, repeatable; default: servers start here"
    add("--base_url", action="append", metavar="[NAME=]URL", help=running)
    add("--baseline_url", help="a running server of the same target without a draft")
    arguments = 'arguments for each server started here, as "--tensor-parallel-size 2"'
    time = "time of the measurement in servers started here: fewer prompts are timed"
    add("--minutes", type=partial(_above_zero, float), help=time)
    starts = "starts of each server here, with all prompts each time; default: 2"
    add("--starts", type=partial(_above_zero, int), metavar="N", help=starts)
    add("--server_args", type=shlex.split, metavar="ARGS", help=arguments)
    forecast = "only time steps in servers started here, and say what drafts can gain at most; "
    add("--forecast", action="store_true", help=forecast + "default --draft: prompt-lookup")
    add = parser.add_argument_group("loads, of servers").add_argument
    at_a_time = "also measure with N requests at a time, as 1,4,8,32"
    sizes, rates = partial(_listed, int, "1,2,4,8"), partial(_listed, float, "0.5,2,8")
    add("--concurrency", type=sizes, metavar="N,N,…", help=at_a_time)
    at_a_rate = "also measure with N new requests per second, at random times"
    add("--request_rate", type=rates, metavar="N,N,…", help=at_a_rate)
    limits = "limits of a good request, as ttft:500,tpot:50,e2el:3000"
    add("--goodput", type=_limits, metavar="NAME:MS,…", help=limits)
    add = parser.add_argument_group("gates").add_argument
    for gate in ("--fail_under_alpha", "--fail_under_speedup"):
        add(gate, type=float, help="exit status 1 if the last draft's lower bound is below")
    lists = ("gamma", "base_url", "server_args", "concurrency", "request_rate")
    parser.set_defaults(**{name: [] for name in lists}, tuning=None, overlap=None, training=None)
    args = parser.parse_args(argv)
    if args.run is not None:
        given = parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(vars(args))))
        parser.set_defaults(**_of_run(args.run, given))
        args = parser.parse_args(argv)
    args.served = bool(args.base_url or args.baseline_url)
    args.engine = args.engine or (None if args.served else "torch")
    args.loads = [Load(concurrency=n) for n in args.concurrency]
    args.loads += [Load(rate=rate) for rate in args.request_rate]
    if args.forecast and not args.draft:
        args.draft = [LOOKUP]
    args.draft_length = args.gamma[0] if args.gamma else None
    for reason in _refusals(args):
        parser.error(reason)
    return args


def _refusals(args: argparse.Namespace) -> Iterator[str]:
    """The reasons why the options cannot be used together."""
    engine, serves = args.engine, args.served or args.engine in SERVED
    measured = "a running server" if args.served else f"engine {engine}"
    if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
        yield f"one process measures, not {processes} at once; start it with python -m eval.run"
    if engine == "sglang" and not args.served:
        yield "engine sglang is not started here; give --base_url and --baseline_url"
    measures, started = not args.forecast, serves and not args.served
    applies = {
        "concurrency": serves,
        "request_rate": serves and measures,
        "server_args": started,
        "goodput": serves and measures,
        "minutes": started and measures,
        "starts": started and measures,
        "ngram_gamma": engine == "vllm" and started and measures,
        "forecast": started,
        "fail_under_alpha": measures,
        "fail_under_speedup": measures,
        "draft_sample_method": args.served or engine in ("torch", "vllm"),
        "strategy": engine == "torch" or args.run is not None,
        "max_prompt_length": not args.served or args.run is not None,
    }
    for option, applied in applies.items():
        if not applied and getattr(args, option) not in (None, [], "auto", False):
            yield f"--{option} has no effect with {measured}; omit it"
    for option in args.server_args if engine == "vllm" else ():
        if option.replace("_", "-").startswith(("--spec-", "--speculative-", "-sc")):
            yield f"{option} sets the target alone to draft, too, or to verify with loss; omit it"
    if serves and args.long_prompts == "truncate_left":
        yield f"{measured} renders whole prompts; give --long_prompts drop, or other --prompts"
    if args.loads and args.starts and args.starts < PASSES:
        yield f"a load needs {PASSES} starts; omit --starts {args.starts}"
    if len(args.gamma) > 1 and (args.served or not serves):
        yield f"{measured} takes one --gamma, not {args.gamma}"
    if args.goodput and not args.loads:
        yield "--goodput needs a load; give --concurrency or --request_rate"
    own = args.output_dir / "report" / "report.json"
    in_run = args.run is not None and args.output_dir.resolve() == args.run.resolve()
    if engine != "torch" and in_run and own.exists() and read_json(own).get("engine") == "torch":
        yield f"{measured} needs another --output_dir: the run's has the reference decoder's report"
    if args.served:
        if not (args.base_url and args.baseline_url and args.prompts):
            yield "running servers need --base_url, --baseline_url and --prompts"
        if engine in ("torch", "transformers"):
            yield f"--base_url has no effect with engine {engine}; omit one of them"
        if args.instruction and not args.target:
            yield "--instruction is for chat templates; give --target, whose tokenizer may have one"
        return
    if not (args.target and args.draft and args.prompts):
        yield "give --target, --draft and --prompts, or --run DIR"
    if engine != "torch" and not args.gamma:
        yield f"engine {engine} needs --gamma, because it does not choose a draft length"


def _above_zero(kind: type[int] | type[float], text: str) -> float:
    """The finite number above 0. Raises ValueError for another text."""
    if not 0 < (number := kind(text)) < math.inf:
        raise ValueError(text)
    return number


def _listed(kind: type[int] | type[float], example: str, text: str) -> list[Any]:
    """The numbers above 0 of a list, sorted, each once."""
    try:
        return sorted({_above_zero(kind, part) for part in text.split(",")})
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} should be numbers above 0, as {example}"
        ) from None


def _limits(text: str) -> dict[str, float]:
    parts = [part.partition(":") for part in text.split(",")]
    with suppress(ValueError):
        limits = {name: _above_zero(float, limit) for name, _, limit in parts}
        if limits.keys() <= {*GOODPUT}:
            return limits
    raise argparse.ArgumentTypeError(
        f"{text!r} should be limits in ms of {', '.join(GOODPUT)}, as ttft:500,tpot:50"
    )


def _object(text: str) -> dict[str, Any]:
    with suppress(json.JSONDecodeError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise argparse.ArgumentTypeError(
        f'{text!r} should be a JSON object, as {{"enable_thinking": false}}'
    )


def _of_run(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """The defaults from a finished training run. given: the command's options; others are None."""
    try:
        recipe = YAML(typ="safe", pure=True).load(folder / "recipe.yaml")
    except (OSError, YAMLError, UnicodeDecodeError):
        recipe = None
    if not isinstance(recipe, dict) or "draft" not in recipe or not (folder / "draft").is_dir():
        raise UserError(
            f"{folder} is not the folder of a finished training run, because recipe.yaml or draft/ "
            "is missing or damaged; finish the run, or give --target, --draft and --prompts."
        )
    keys = ["target", "temperature", "top_k", "top_p", "max_new_tokens", "dtype", "instruction"]
    keys += ["chat_template_kwargs", "max_prompt_length", "long_prompts"]
    defaults = {key: recipe[key] for key in keys if recipe.get(key) is not None}
    defaults |= {"output_dir": folder, "tuning": folder / "prompts" / "tuning.jsonl"}
    measured = "served" if given.base_url or given.baseline_url else given.engine
    if measured not in (None, "torch"):
        defaults["output_dir"] = Path(f"{os.path.abspath(folder)}-{measured}")
    if given.draft is None:
        tuned = folder / "draft"
        drafts = [f"tuned={tuned}"]
        if recipe["draft"]:  # nobody serves a base draft that was made from the target
            drafts.insert(0, f"untuned={recipe['draft']}")
        if given.engine != "transformers":  # that engine is measured with checkpoints only
            drafts.insert(-1, "lookup=prompt-lookup")
        if given.engine in (None, "torch", "llama.cpp"):  # others put no n-grams before a draft
            drafts.append(f"tuned+lookup=lookup-first:{tuned}")
        defaults["draft"] = drafts
    if given.prompts is None:
        for option in ("instruction", "chat_template_kwargs"):
            if getattr(given, option) is not None:
                raise UserError(
                    f"--{option} does nothing to the prompts of {folder}, because they are stored "
                    "with their instruction; give --prompts, or omit the option."
                )
        defaults["overlap"] = 0  # the run dropped training prompts that overlap
        defaults["prompts"] = str(folder / "prompts" / "eval.jsonl")
    else:
        defaults["training"] = folder / "prompts" / "train.jsonl"
    defaults["strategy"] = read_json(folder / "vocab_check.json").get("used", "auto")
    return defaults


def _overlap(args: argparse.Namespace, prompts: list[Prompt]) -> int | None:
    """How many training prompts of --run nearly repeat a prompt; None: not known."""
    if args.training is None or not args.training.is_file():  # a user may have deleted it
        return args.overlap
    return drop_overlap(load_prompts(str(args.training)), prompts)[1].dropped


def _prompt_sets(args: argparse.Namespace, target: Checkpoint) -> tuple[PromptSet, PromptSet]:
    """Prompts to evaluate, and other prompts to choose gamma on."""
    lengths = args.max_prompt_length, args.long_prompts
    text, tokenizer = target.text_config, target.tokenizer
    room, rows = longest_context(text) - args.max_gamma - 1, text.vocab_size

    def rendered(part: list[Prompt]) -> PromptSet:
        asked = in_chat_form(
            part, args.instruction, tokenizer.chat_template, args.chat_template_kwargs
        )
        return render_set(args.prompts, asked, tokenizer, room, args.max_new_tokens, *lengths, rows)

    loaded = load_prompts(args.prompts, args.max_prompts, args.seed)
    if args.engine not in SERVED:
        refuse_server_only(loaded)
    prompts = rendered(loaded)
    prompts = replace(prompts, overlap=_overlap(args, loaded))
    if args.tuning is not None:
        return prompts, rendered(load_prompts(str(args.tuning)))
    # without a training run's tuning prompts, some prompts choose the draft length and are not
    # evaluated, nor are others of their groups; they are drawn, as a file may be sorted by category
    if args.gamma:
        return prompts, prompts.first(0)
    drawn = prompts.drawn(len(prompts.prompts), args.seed)
    groups: dict[str | tuple[str], set[str]] = {}
    for prompt in drawn.prompts:
        groups.setdefault(prompt.group or (prompt.id,), set()).add(prompt.id)
    aside = min(args.tuning_prompts, len(drawn.prompts) - max(map(len, groups.values())))
    if aside < 1:
        raise UserError(
            "One prompt or group cannot both choose gamma and be evaluated; give --gamma."
        )
    tuning: set[str] = set()
    for ids in groups.values():
        if len(tuning) < aside:
            tuning |= ids
    evaluated = {prompt.id for prompt in drawn.prompts} - tuning
    return drawn.of_ids(evaluated), drawn.of_ids(tuning).first(aside)


def _prompts_of_gguf(args: argparse.Namespace, file: Path, error: SourceError) -> PromptSet:
    """The prompts for a GGUF target that only llama.cpp reads; it tokenizes them.

    The token ids are zeros, one for each byte of a prompt and TEMPLATE more, because a prompt has
    no more tokens. error: why the target cannot be read here; raised if it is no GGUF file.
    """
    try:
        template = value_of(file, "tokenizer.chat_template")
    except Exception:  # the parser of a broken file raises many types
        raise error from None
    if args.max_prompt_length is not None or args.long_prompts != "error":
        raise UserError(f"{error} Without a tokenizer omit --max_prompt_length and --long_prompts.")
    prompts = load_prompts(args.prompts, args.max_prompts, args.seed)
    prompts = in_chat_form(prompts, args.instruction, template, args.chat_template_kwargs)
    for prompt in prompts:
        refuse_without_template(prompt, template)
    ids = [[0] * (_bytes_read(prompt) + TEMPLATE) for prompt in prompts]
    return PromptSet(args.prompts, prompts, ids, _overlap(args, prompts), bool(template))


def _bytes_read(prompt: Prompt) -> int:
    """The bytes of what a server reads of a prompt, without the text of its chat template."""
    turns = prompt.messages or []
    said = "".join([prompt.prompt or "", *(turn.get("content") or "" for turn in turns)])
    # most templates render the other fields as JSON
    rest = [turn | {"content": ""} for turn in turns], prompt.tools, prompt.chat_template_kwargs
    return len((said + json.dumps(rest, ensure_ascii=False)).encode())


def _named(text: str, default: str | None = None) -> tuple[str, str]:
    """Name and value of [NAME=]SPEC or [NAME=]URL. default: the name if none is given."""
    name, equals, value = text.partition("=")
    # a pypi: spec contains ==, and an address may contain =
    if not equals or value.startswith("=") or "://" in name:
        return default or Path(text.partition("#sha256=")[0]).name, text
    return name, value


def _by_name(texts: list[str], default: str | None = None) -> dict[str, str]:
    """The spec or address by name. Raises UserError for a name that occurs twice."""
    by_name: dict[str, str] = {}
    for name, value in (_named(text, default) for text in texts):
        if name in by_name:
            raise UserError(f"Two drafts are called {name!r}; give one a name, as NAME=SPEC.")
        by_name[name] = value
    return by_name


def decoding_of(args: argparse.Namespace, stops: frozenset[int] = frozenset()) -> Decoding:
    """How the options ask for text to be decoded."""
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    method: SampleMethod | None = args.draft_sample_method
    if method is None and not args.served and args.engine != "llama.cpp":
        method = "probabilistic"
    return Decoding(sampling, stops, args.max_new_tokens, args.seed, args.verification, method)


def load(args: argparse.Namespace) -> tuple[Target, PromptSet, PromptSet]:
    """The target, prompts to evaluate, and other prompts to choose gamma on.

    The target's context has room for each prompt, its output and a draft.
    """
    use_machine()
    model = Checkpoint.open(args.target)
    target = load_target(model, getattr(torch, args.dtype), args.device, 64)
    evaluation, tuning = _prompt_sets(args, model)
    longest = max(args.max_gamma, args.draft_length or 0)
    length = context_length(evaluation.ids + tuning.ids, args.max_new_tokens, longest)
    target.decoder = build_decoder(target.model, length)
    return target, evaluation, tuning


def _measure(args: argparse.Namespace, journal: Journal) -> Report:
    """The report of the reference decoder."""
    target, evaluation, tuning = load(args)
    drafts = _by_name(args.draft)
    logs = evaluate(
        target,
        {name: load_drafter(spec, target, args.strategy) for name, spec in drafts.items()},
        evaluation,
        tuning,
        decoding_of(args, target.stops),
        Plan(args.draft_length, args.max_gamma, args.speed_prompts),
        journal,
        _made_by(args),
    )
    return build_report(*logs)


def _of_engine(args: argparse.Namespace) -> tuple[Checkpoint, Any, PromptSet]:
    """The target, its tokenizer, None where only llama.cpp reads it, and the timed prompts."""
    use_machine()
    tokenizer: Any = None
    if args.engine in SERVED:
        SERVED[args.engine].program()  # missing? before the target is read
    target = Checkpoint.open(args.target)
    try:
        tokenizer = target.tokenizer
    except SourceError as error:
        if args.engine != "llama.cpp":
            raise
        evaluation = _prompts_of_gguf(args, target.source, error)
    else:
        evaluation, _ = _prompt_sets(args, target)
    # as the reference decoder draws them
    return target, tokenizer, evaluation.drawn(args.speed_prompts, args.seed)


def _forecast(args: argparse.Namespace) -> None:
    """Print and write what drafts can gain in servers that are started here."""
    target, tokenizer, prompts = _of_engine(args)
    path = args.output_dir / "forecast.json"
    refuse_unwritable(path.parent)
    forecast = forecast_gains(
        SERVED[args.engine],
        target,
        _by_name(args.draft),
        args.gamma,
        prompts,
        tokenizer and (lambda ids: str(tokenizer.decode(ids))),
        decoding_of(args),
        args.loads or [Load(concurrency=1)],
        args.server_args,
    )
    print_gains(forecast.gains)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, forecast.model_dump(mode="json"))
    print(f"\nForecast: {path}")


def _measure_in_engine(args: argparse.Namespace, journal: Journal) -> Report:
    """The report of transformers, or of servers that are started here."""
    target, tokenizer, prompts = _of_engine(args)
    drafts, provenance = _by_name(args.draft), _made_by(args)
    if args.engine in SERVED:
        seconds = args.minutes and 60 * args.minutes
        asked = prompts, decoding_of(args), provenance, args.loads, args.goodput, journal, seconds
        task = Task(*asked, args.starts or 2)
        engine, own = SERVED[args.engine], args.server_args
        given = engine, target, drafts, args.gamma, task, own, args.ngram_gamma
        return measure_started(*given)
    dtype = getattr(torch, args.dtype)
    model = target.load(dtype, args.device)
    decoding = decoding_of(args, target.stops)
    loaded = load_drafts(target, model, drafts, dtype)
    return measure_assisted(
        args.target,
        model,
        loaded,
        args.draft_length,
        Task(prompts, decoding, provenance),
        lambda ids: str(tokenizer.decode(ids)),
    )


def _measure_servers(args: argparse.Namespace, journal: Journal) -> Report:
    """The report of the servers at --base_url, compared with --baseline_url."""

    def client(url: str) -> EngineServer:
        return client_of(url, args.engine)(url)

    prompts = load_prompts(args.prompts, args.max_prompts or args.speed_prompts, args.seed)
    raw = any(prompt.prompt is not None for prompt in prompts)  # a run's prompts have it already
    template: Any = None
    if args.instruction and raw:
        template = Checkpoint.open(args.target).tokenizer.chat_template
    prompts = in_chat_form(prompts, args.instruction, template, args.chat_template_kwargs)
    asked = PromptSet(args.prompts, prompts, [], _overlap(args, prompts))
    task = Task(asked, decoding_of(args), _made_by(args), args.loads, args.goodput, journal)
    urls, specs = _by_name(args.base_url, "served"), _by_name(args.draft or [])
    if args.run is None and (nameless := specs.keys() - urls.keys()):
        raise UserError(
            f"No server is named {', '.join(sorted(nameless))}; give --base_url NAME=URL with the "
            "name of --draft NAME=SPEC."
        )
    servers = {name: client(url) for name, url in urls.items()}
    return measure_servers(servers, client(args.baseline_url), task, args.draft_length, specs)


def _made_by(args: argparse.Namespace) -> dict[str, Any]:
    return made_by(args.seed) | {"output_dir": str(args.output_dir)}


def main(argv: list[str], summary: bool = True) -> int:
    """Returns an exit status. summary: whether the results are printed, and where they are."""
    try:
        args = parse(argv)
        if args.forecast:
            _forecast(args)
            return 0
        folder = args.output_dir / "report"
        refuse_unwritable(folder)
        with Journal(folder / JOURNAL) as journal:
            if args.served:
                report = _measure_servers(args, journal)
            elif args.engine == "torch":
                report = _measure(args, journal)
            else:
                report = _measure_in_engine(args, journal)
            write_report(folder, report)
            if summary:
                print_summary(report)
                print(f"\nReport: {folder / 'report.html'}")
            if failures := report.provenance.get("failures"):
                raise UserError(f"only a part was measured, {failures}")
    except (UserError, PermissionError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return gate(report, args.fail_under_alpha, args.fail_under_speedup)


def gate(report: Report, alpha: float | None, speedup: float | None) -> int:
    """1 if the lower bound of a 95% interval of the last draft is below its limit or unknown.

    Else 0. The speed-up is the stated one.
    """
    status, (_, draft) = 0, report.last
    for name, measured, floor in (
        ("alpha", draft.alpha, alpha),
        ("speedup", report.stated_speedup(draft), speedup),
    ):
        if floor is None or (measured and measured.ci95 and measured.ci95[0] >= floor):
            continue
        if measured is None:
            reason = f"{name} was not measured, so it is not shown to be {floor} or more"
        elif measured.ci95 is None:
            reason = (
                f"{name} has no interval, because {measured.clusters} prompts (or groups) are too "
                f"few; measure at least {FEWEST_CLUSTERS}"
            )
        else:
            reason = f"the lower bound of {name} is {measured.ci95[0]:.3f}, below {floor}"
        print(f"FAIL: {reason}", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
