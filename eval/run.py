"""Measure drafts for a target with the full speculative decoder, and write the report.

    python -m eval.run --target T --draft D --prompts P --output_dir DIR
    python -m eval.run --target T --draft a=PATH --draft b=PATH --prompts P --output_dir DIR
    python -m eval.run --target T --draft prompt-lookup --draft D …   a rival without a model
    python -m eval.run --target T --draft lookup-first:D …   D where nothing can be looked up
    python -m eval.run --run DIR          a training run again, from what its folder holds
    python -m eval.run --engine vllm --gamma 4 --target T --draft D --prompts P
    python -m eval.run --engine vllm --base_url URL --baseline_url URL --prompts P
    python -m eval.run --engine vllm … --concurrency 1,4,8     at several requests at a time, too
    python -m eval.run --engine transformers --gamma 3 --target T --draft D --prompts P

Exit status: 0; 1 when --fail_under_alpha or --fail_under_speedup is not met by the lower bound of
the last draft's 95% interval; 2 for input that cannot be used, and for a server that failed midway
(what was measured by then is in the report); 130 when interrupted. Whatever ended an evaluation
early, the same command goes on from what it had measured (not with engine vllm).
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from ruamel.yaml import YAML
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from align.check import Strategy
from align.files import DiskFullError, refuse_unwritable
from align.machine import use_machine
from align.sources import load_config, load_tokenizer, read_json
from eval.decoding.build import build_decoder, longest_context
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.engines.environment import vllm_python
from eval.engines.served import measure_servers, measure_started
from eval.engines.transformers_assisted import Assisted, measure_assisted
from eval.engines.vllm import VllmServer
from eval.measuring.evaluation import Plan, context_length, evaluate
from eval.measuring.intervals import FEWEST_CLUSTERS
from eval.measuring.journal import INTERRUPTED, JOURNAL, Journal
from eval.prompts import (
    LongPrompts,
    Prompt,
    PromptSet,
    in_chat_form,
    load_prompts,
    render_set,
)
from eval.reporting.build import build_report
from eval.reporting.fields import DraftReport, Report
from eval.reporting.files import write_report
from eval.reporting.text import print_summary

# of a run's recipe where --run is given, else these
DEFAULTS: dict[str, Any] = {
    "temperature": 0.0,
    "top_k": None,
    "top_p": 1.0,
    "max_new_tokens": 128,
    "dtype": "bfloat16",
    "instruction": None,
    "chat_template_kwargs": None,
    "max_prompt_length": None,
    "long_prompts": "error",
}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m eval.run", description=__doc__.split("\n")[0])
    parser.add_argument("--target", help="Hub id, folder, GGUF or pypi: file")
    parser.add_argument(
        "--draft",
        action="append",
        default=[],
        help="[NAME=]SPEC, repeatable; SPEC prompt-lookup needs no model",
    )
    parser.add_argument("--prompts", help="Hub data set, pypi: file or .jsonl")
    parser.add_argument(
        "--instruction", help="how an Instruct target is asked a prompt, which is put at {prompt}"
    )
    parser.add_argument(
        "--chat_template_kwargs",
        type=_object,
        metavar="JSON",
        help="for the target's chat template, as {\"enable_thinking\": false}; a prompt's win",
    )
    parser.add_argument(
        "--max_prompt_length", type=int, help="tokens of a prompt; default: what the context leaves"
    )
    parser.add_argument(
        "--long_prompts", choices=get_args(LongPrompts), help="of longer ones; default: error"
    )
    parser.add_argument("--run", type=Path, help="output folder of a training run")
    parser.add_argument("--output_dir", type=Path, help="default: the run's, or outputs/eval")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--top_k", type=int)
    parser.add_argument("--top_p", type=float)
    parser.add_argument(
        "--verification",
        choices=["block", "token"],
        default="block",
        help="where tokens are sampled: drafts judged as one block, or token by token",
    )
    parser.add_argument("--max_new_tokens", type=int)
    parser.add_argument(
        "--gamma",
        type=_sizes,
        default=[],
        metavar="N",
        help="draft length; default: chosen on prompts set aside; engine vllm takes several, as "
        "2,4; with --base_url: the one that its server was started with",
    )
    parser.add_argument("--max_gamma", type=int, default=6)
    parser.add_argument("--max_prompts", type=int, help="draw so many of the prompts")
    parser.add_argument("--speed_prompts", type=int, default=40)
    parser.add_argument("--tuning_prompts", type=int, default=8, help="set aside to choose gamma")
    parser.add_argument("--engine", choices=["torch", "transformers", "vllm"], default="torch")
    parser.add_argument(
        "--base_url",
        action="append",
        default=[],
        metavar="[NAME=]URL",
        help="engine vllm: a server that speculates, repeatable; without one they are started here",
    )
    parser.add_argument("--baseline_url", help="engine vllm: the same target without a draft")
    parser.add_argument(
        "--concurrency",
        type=_sizes,
        default=[],
        metavar="N,N,…",
        help="engine vllm: measure also with so many requests at a time, as 1,4,8,32",
    )
    parser.add_argument(
        "--strategy",
        default="auto",
        choices=["auto", *get_args(Strategy)],
        help="how vocabularies are bridged (docs/vocabulary.md)",
    )
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="of both models; auto: the target's layers over all GPUs, the draft on the first",
    )
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--fail_under_alpha", type=float)
    parser.add_argument("--fail_under_speedup", type=float)
    args = parser.parse_args(argv)
    args.tuning = args.overlap = None
    by_length = args.max_prompt_length is not None or args.long_prompts is not None
    if args.run is not None:
        _take_from_run(args)
    for key, value in DEFAULTS.items():
        if getattr(args, key) is None:
            setattr(args, key, value)
    args.served = args.engine == "vllm" and bool(args.base_url or args.baseline_url)
    for reason in _refusals(args, by_length):
        parser.error(reason)
    args.draft_length = args.gamma[0] if args.gamma else None
    return args


def _refusals(args: argparse.Namespace, by_length: bool) -> Iterator[str]:
    """Why the options cannot be used together. by_length: the command limits prompts' lengths."""
    engine, length, several = args.engine, args.max_prompt_length, len(args.gamma) > 1
    if length is not None and length < 1:
        yield f"--max_prompt_length is {length}, but must be 1 or more"
    if args.long_prompts == "truncate_left" and length is None:
        yield "--long_prompts truncate_left needs --max_prompt_length: how much is kept"
    if engine == "vllm" and (by_length or args.long_prompts == "truncate_left"):
        yield (
            "engine vllm renders the prompts itself, whole; leave --max_prompt_length and "
            "--long_prompts out, or give --prompts that are short enough"
        )
    if engine != "vllm" and several:
        yield f"engine {engine} takes one --gamma, not {args.gamma}"
    if engine != "vllm" and args.concurrency:
        yield f"--concurrency is of engine vllm; leave it out with engine {engine}"
    if args.served:
        if not (args.base_url and args.baseline_url and args.prompts):
            yield "engine vllm needs --base_url, --baseline_url and --prompts"
        if several:
            yield f"--base_url takes one --gamma, not {args.gamma}: a server has one"
        return
    if not (args.target and args.draft and args.prompts):
        yield "give --target, --draft and --prompts, or --run DIR"
    if engine == "torch":
        return
    if not args.gamma:
        yield f"engine {engine} needs --gamma, 1 or more: it chooses no draft length"
    if args.run is not None and args.output_dir == args.run:
        yield f"engine {engine} needs --output_dir, or it would replace the run's own report"
    if args.strategy != "auto" and args.run is None:
        yield f"--strategy is of engine torch: {engine} bridges no vocabularies"


def _sizes(text: str) -> list[int]:
    if not all(part.isdecimal() and int(part) for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} should be whole numbers, 1 or more, as 1,2,4,8")
    return sorted({int(part) for part in text.split(",")})


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(
            f'{text!r} should be a JSON object, as {{"enable_thinking": false}}'
        )
    return value


def _take_from_run(args: argparse.Namespace) -> None:
    """Target, drafts, prompts and sampling of a finished training run, where not given anew."""
    if not (args.run / "recipe.yaml").is_file() or not (args.run / "draft").is_dir():
        raise ValueError(
            f"{args.run} is not the folder of a finished training run (no recipe.yaml or no "
            "draft/); finish the run, or give --target, --draft and --prompts."
        )
    recipe = YAML(typ="safe", pure=True).load(args.run / "recipe.yaml")
    args.target = args.target or recipe["target"]
    untuned = recipe["draft"] or args.run / "prepared"
    tuned = args.run / "draft"
    drafts = [f"untuned={untuned}", "lookup=prompt-lookup", f"tuned={tuned}"]
    if args.engine == "torch":  # no engine here drafts by n-grams first, then by a model
        drafts.append(f"tuned+lookup=lookup-first:{tuned}")
    elif args.engine == "transformers":  # it assists by checkpoints only
        drafts.remove("lookup=prompt-lookup")
    args.draft = args.draft or drafts
    for option in ("instruction", "chat_template_kwargs"):
        if getattr(args, option) is not None and args.prompts is None:
            raise ValueError(
                f"--{option} does nothing to the prompts of {args.run}, which are kept as they "
                "were asked; give --prompts, or leave it out."
            )
    made_by = args.run / "provenance.json"
    if args.prompts is None and made_by.is_file() and "overlap" in read_json(made_by):
        args.overlap = 0  # the run has dropped what overlapped
    args.prompts = args.prompts or str(args.run / "prompts" / "eval.jsonl")
    args.tuning = args.run / "prompts" / "tuning.jsonl"
    if args.strategy == "auto":
        args.strategy = read_json(args.run / "vocab_check.json").get("used", "auto")
    args.output_dir = args.output_dir or args.run
    for key in DEFAULTS:
        if getattr(args, key) is None:
            setattr(args, key, recipe.get(key))


def _prompt_sets(
    args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> tuple[PromptSet, PromptSet]:
    """Prompts to evaluate and prompts to choose gamma on, which are never the same."""
    lengths = args.max_prompt_length, args.long_prompts
    room = longest_context(config.get_text_config()) - args.max_gamma - 1

    def rendered(part: list[Prompt]) -> PromptSet:
        asked = in_chat_form(
            part, args.instruction, tokenizer.chat_template, args.chat_template_kwargs
        )
        return render_set(args.prompts, asked, tokenizer, room, args.max_new_tokens, *lengths)

    prompts = rendered(load_prompts(args.prompts, args.max_prompts, args.seed))
    prompts = replace(prompts, overlap=args.overlap)
    if args.tuning is not None:
        return prompts, rendered(load_prompts(str(args.tuning)))
    # without a training run's own, some prompts choose the draft length and are not evaluated; they
    # are drawn, since a file may be sorted by category
    aside = 0 if args.gamma else min(args.tuning_prompts, len(prompts.prompts) - 1)
    if not args.gamma and aside < 1:
        raise ValueError("One prompt cannot both choose gamma and be evaluated; give --gamma.")
    drawn = prompts.drawn(len(prompts.prompts), args.seed) if aside else prompts
    return drawn.after(aside), drawn.first(aside)


def _named(text: str, default: str | None = None) -> tuple[str, str]:
    """Name and value of a [NAME=]SPEC or [NAME=]URL. default: the name of an unnamed one."""
    name, equals, value = text.partition("=")
    # a pypi: spec has == of its own, and an address may have =
    if not equals or value.startswith("=") or "://" in name:
        return default or Path(text).name, text
    return name, value


def _by_name(texts: list[str], default: str | None = None) -> dict[str, str]:
    """The spec or address of each name. Raises ValueError for a name that is given twice."""
    by_name: dict[str, str] = {}
    for name, value in (_named(text, default) for text in texts):
        if name in by_name:
            raise ValueError(f"Two drafts are called {name!r}; name them: NAME={value}.")
        by_name[name] = value
    return by_name


def _decoding(args: argparse.Namespace, stops: frozenset[int] = frozenset()) -> Decoding:
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    return Decoding(sampling, stops, args.max_new_tokens, args.seed, args.verification)


def _measure(args: argparse.Namespace, journal: Journal) -> Report:
    """The report of the reference decoder."""
    use_machine()
    target = load_target(args.target, getattr(torch, args.dtype), args.device, 64)
    evaluation, tuning = _prompt_sets(args, target.tokenizer, target.model.config)
    longest = max(args.max_gamma, args.draft_length or 0)
    length = context_length(evaluation.ids + tuning.ids, args.max_new_tokens, longest)
    target.decoder = build_decoder(target.model, length)
    logs = evaluate(
        target,
        {
            name: load_drafter(spec, target, args.strategy)
            for name, spec in _by_name(args.draft).items()
        },
        evaluation,
        tuning,
        _decoding(args, target.stops),
        Plan(args.draft_length, args.max_gamma, args.speed_prompts),
        journal,
        {"command": sys.argv, "torch": torch.__version__, "seed": args.seed},
    )
    return build_report(*logs)


def _measure_in_engine(args: argparse.Namespace, journal: Journal) -> Report:
    """The report of transformers, or of vLLM servers that are started here."""
    use_machine()
    if args.engine == "vllm":
        vllm_python()
    evaluation, _ = _prompt_sets(args, load_tokenizer(args.target), load_config(args.target))
    prompts = evaluation.drawn(args.speed_prompts, args.seed)  # as the reference decoder times
    drafts, made_by = _by_name(args.draft), {"command": sys.argv, "seed": args.seed}
    if args.engine == "vllm":
        lengths, decoding = args.gamma, _decoding(args)
        return measure_started(
            args.target, drafts, lengths, prompts, decoding, made_by, args.concurrency
        )
    dtype = getattr(torch, args.dtype)
    engine = Assisted.load(args.target, drafts, args.draft_length, dtype, args.device)
    return measure_assisted(engine, prompts, _decoding(args, engine.stops), journal, made_by)


def _measure_servers(args: argparse.Namespace) -> Report:
    """The report of vLLM behind each --base_url, against --baseline_url."""
    prompts = load_prompts(args.prompts, args.max_prompts or args.speed_prompts, args.seed)
    # an instruction is for Instruct models alone: which template they have, the server knows
    prompts = in_chat_form(
        prompts, args.instruction, chat_template=True, template_kwargs=args.chat_template_kwargs
    )
    connections = max([1, *args.concurrency])
    return measure_servers(
        {
            name: VllmServer(url, connections=connections)
            for name, url in _by_name(args.base_url, "served").items()
        },
        VllmServer(args.baseline_url, connections=connections),
        PromptSet(args.prompts, prompts, [], args.overlap),
        _decoding(args),
        {"command": sys.argv, "seed": args.seed},
        gamma=args.draft_length,
        loads=args.concurrency,
    )


def main(argv: list[str]) -> int:
    try:
        args = parse(argv)
        folder = (args.output_dir or Path("outputs/eval")) / "report"
        refuse_unwritable(folder)
        with Journal(folder / JOURNAL) as journal:
            if args.served:
                report = _measure_servers(args)
            elif args.engine == "torch":
                report = _measure(args, journal)
            else:
                report = _measure_in_engine(args, journal)
            write_report(folder, report)
    except (ValueError, DiskFullError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    print_summary(report)
    print(f"\nReport: {folder / 'report.html'}")
    if failures := report.provenance.get("failures"):
        print(f"error: measured in part only, {failures}", file=sys.stderr)
        return 2
    return gate(report.last[1], args.fail_under_alpha, args.fail_under_speedup)


def gate(draft: DraftReport, alpha: float | None, speedup: float | None) -> int:
    """1 when a lower bound of the draft's 95% intervals is under its floor, or unknown; else 0."""
    status = 0
    for name, measured, floor in (
        ("alpha", draft.alpha, alpha),
        ("speedup", draft.speedup, speedup),
    ):
        if floor is None:
            continue
        if measured is None:
            reason = f"{name} was not measured, so it cannot be {floor}"
        elif measured.ci95 is None:
            reason = (
                f"{name} rests on {measured.clusters} prompts (documents where they share one), "
                f"too few for an interval: give {FEWEST_CLUSTERS} at least"
            )
        elif measured.ci95[0] < floor:
            reason = f"lower bound of {name} is {measured.ci95[0]:.3f}, under {floor}"
        else:
            continue
        print(f"FAIL: {reason}", file=sys.stderr)
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
