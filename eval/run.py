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

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from align import command_line
from align.checkpoint import Checkpoint
from align.errors import SourceError, UserError
from align.files import refuse_unwritable, write_json
from align.from_gguf import value_of
from align.machine import use_machine
from eval.chat_template import in_chat_form, refuse_without_template, render_set
from eval.decoding.build import build_decoder, longest_context
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding
from eval.decoding.target import Target, load_target
from eval.decoding.verification import SampleMethod, Sampling
from eval.engines.contender import Task
from eval.engines.conversation import refuse_server_only
from eval.engines.engine_server import EngineServer
from eval.engines.forecast import forecast_gains, print_gains
from eval.engines.measure import client_of, measure_servers, measure_started
from eval.engines.transformers_assisted import load_drafts, measure_assisted
from eval.measuring.environment import made_by
from eval.measuring.evaluation import Plan, context_length, evaluate
from eval.measuring.intervals import FEWEST_CLUSTERS
from eval.measuring.journal import JOURNAL, Journal
from eval.near_duplicates import drop_overlap
from eval.options import STARTED, RunOptions, defaults
from eval.prompts import Prompt, PromptSet, load_prompts
from eval.reporting.build import build_report
from eval.reporting.fields import Load, Report
from eval.reporting.files import write_report
from eval.reporting.text import print_summary

TEMPLATE = 512  # most tokens that a chat template adds to a prompt


def parse(argv: Sequence[str]) -> RunOptions:
    return command_line.parse(RunOptions, "python -m eval.run", __doc__, argv, defaults)


def _overlap(args: RunOptions, prompts: list[Prompt]) -> int | None:
    """How many training prompts of --run nearly repeat a prompt; None: not known."""
    if args.training is None or not args.training.is_file():  # a user may have deleted it
        return args.overlap
    return drop_overlap(load_prompts(str(args.training)), prompts)[1].dropped


def _prompt_sets(args: RunOptions, target: Checkpoint) -> tuple[PromptSet, PromptSet]:
    """Prompts to evaluate, and other prompts to choose the draft length on."""
    lengths = args.max_prompt_length, args.long_prompts
    text, tokenizer = target.text_config, target.tokenizer
    room, rows = longest_context(text) - args.max_gamma - 1, text.vocab_size

    def rendered(part: list[Prompt]) -> PromptSet:
        asked = in_chat_form(
            part, args.instruction, tokenizer.chat_template, args.chat_template_kwargs
        )
        return render_set(args.prompts, asked, tokenizer, room, args.max_new_tokens, *lengths, rows)

    loaded = load_prompts(args.prompts, args.max_prompts, args.seed)
    if args.engine not in STARTED:
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
            "One prompt or group cannot both choose the draft length and be measured; give --gamma."
        )
    tuning: set[str] = set()
    for ids in groups.values():
        if len(tuning) < aside:
            tuning |= ids
    evaluated = {prompt.id for prompt in drawn.prompts} - tuning
    return drawn.of_ids(evaluated), drawn.of_ids(tuning).first(aside)


def _prompts_of_gguf(args: RunOptions, file: Path, error: SourceError) -> PromptSet:
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


def _by_name(texts: Sequence[str], default: str | None = None) -> dict[str, str]:
    """The spec or address by name. Raises UserError for a name that occurs twice."""
    by_name: dict[str, str] = {}
    for name, value in (_named(text, default) for text in texts):
        if name in by_name:
            raise UserError(f"Two drafts are called {name!r}; give one a name, as NAME=SPEC.")
        by_name[name] = value
    return by_name


def decoding_of(args: RunOptions, stops: frozenset[int] = frozenset()) -> Decoding:
    """How the options ask for text to be decoded."""
    sampling = Sampling(args.temperature, args.top_k, args.top_p)
    method: SampleMethod | None = args.draft_sample_method
    if method is None and not args.running and args.engine != "llama.cpp":
        method = "probabilistic"
    return Decoding(sampling, stops, args.max_new_tokens, args.seed, args.verification, method)


def load(args: RunOptions) -> tuple[Target, PromptSet, PromptSet]:
    """The target, prompts to evaluate, and other prompts to choose the draft length on.

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


def _measure(args: RunOptions, journal: Journal) -> Report:
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


def _of_engine(args: RunOptions) -> tuple[Checkpoint, Any, PromptSet]:
    """The target, its tokenizer, None where only llama.cpp reads it, and the timed prompts."""
    use_machine()
    tokenizer: Any = None
    if args.engine in STARTED:
        STARTED[args.engine].program()  # missing? before the target is read
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


def _forecast(args: RunOptions) -> None:
    """Print and write what drafts can gain in servers that are started here."""
    target, tokenizer, prompts = _of_engine(args)
    path = args.output_dir / "forecast.json"
    refuse_unwritable(path.parent)
    forecast = forecast_gains(
        STARTED[args.engine],
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


def _measure_in_engine(args: RunOptions, journal: Journal) -> Report:
    """The report of transformers, or of servers that are started here."""
    target, tokenizer, prompts = _of_engine(args)
    drafts, provenance = _by_name(args.draft), _made_by(args)
    if args.engine in STARTED:
        seconds = args.minutes and 60 * args.minutes
        asked = prompts, decoding_of(args), provenance, args.loads, args.goodput, journal, seconds
        task = Task(*asked, args.starts or 2)
        engine, server_args = STARTED[args.engine], args.server_args
        arguments = engine, target, drafts, args.gamma, task, server_args, args.ngram_gamma
        return measure_started(*arguments)
    dtype = getattr(torch, args.dtype)
    model = target.load(dtype, args.device)
    decoding = decoding_of(args, target.stops)
    loaded = load_drafts(target, model, drafts, dtype)
    return measure_assisted(
        args.target,
        model,
        loaded,
        args.gamma[0],
        Task(prompts, decoding, provenance),
        lambda ids: str(tokenizer.decode(ids)),
    )


def _measure_servers(args: RunOptions, journal: Journal) -> Report:
    """The report of the servers at --base_url, compared with --baseline_url."""

    def client(url: str) -> EngineServer:
        return client_of(url, args.engine or None)(url)

    prompts = load_prompts(args.prompts, args.max_prompts or args.speed_prompts, args.seed)
    raw = any(prompt.prompt is not None for prompt in prompts)  # a run's prompts have it already
    template: Any = None
    if args.instruction and raw:
        template = Checkpoint.open(args.target).tokenizer.chat_template
    prompts = in_chat_form(prompts, args.instruction, template, args.chat_template_kwargs)
    asked = PromptSet(args.prompts, prompts, [], _overlap(args, prompts))
    task = Task(asked, decoding_of(args), _made_by(args), args.loads, args.goodput, journal)
    urls, specs = _by_name(args.base_url, "served"), _by_name(args.draft)
    if args.run is None and (nameless := specs.keys() - urls.keys()):
        raise UserError(
            f"No server is named {', '.join(sorted(nameless))}; give --base_url NAME=URL with the "
            "name of --draft NAME=SPEC."
        )
    servers = {name: client(url) for name, url in urls.items()}
    return measure_servers(servers, client(args.baseline_url), task, args.draft_length, specs)


def _made_by(args: RunOptions) -> dict[str, Any]:
    return made_by(args.seed) | {"output_dir": str(args.output_dir)}


def main(argv: list[str], summary: bool = True) -> int:
    """Returns an exit status. summary: whether the results are printed, and where they are."""
    return command_line.exit_status(lambda: _run(parse(argv), summary))


def _run(args: RunOptions, summary: bool) -> int:
    if args.forecast:
        _forecast(args)
        return 0
    folder = args.output_dir / "report"
    refuse_unwritable(folder)
    with Journal(folder / JOURNAL) as journal:
        if args.running:
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
