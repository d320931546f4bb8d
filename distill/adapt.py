"""From logged traffic to a better draft: train, compare with the served draft, publish if faster.

    python -m distill.adapt outputs/code --traffic logs        train on new rows, publish if faster
    python -m distill.adapt outputs/code --traffic logs --check         read rows and gate, and stop
    python -m distill.adapt outputs/code --rollback            serve the earlier draft again
    python -m distill.adapt outputs/code --resume              publish again after a rollback
    python -m distill.adapt outputs/code --delete              delete rows, reports and drafts

Serve `outputs/code/adapt/current`, a link to the published draft (docs/serving.md). Exit status: 0
published; 1 refused, because the new draft is faster on new traffic and has a fault; 2 for bad
input and for a step that failed; 3 nothing to gain: no gain is shown, there are too few new rows,
a rollback holds the draft, or another job runs; 130 interrupted. `current` is unchanged unless the
status is 0.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time
import traceback
from _thread import interrupt_main
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from filelock import FileLock, Timeout
from scipy.special import stdtrit

from align.checkpoint import Checkpoint, weights_sha256
from align.errors import UserError
from align.files import (
    atomic_folder,
    atomic_link,
    read_json,
    remove,
    write_errors_explained,
    write_json,
)
from distill import train
from distill.card import Publication, derived_licence, draft_weights
from distill.models import too_large
from distill.publish import check_files, copy_draft, unmet_conditions
from distill.recipe import Recipe, build_recipe, load_recipe, read_yaml, yaml_text
from distill.teacher.store import TEACHER
from distill.traffic import (
    DAY,
    Split,
    read_traffic,
    rows_of,
    split,
    stored_rows,
    usable,
    write_rows,
)
from distill.training_config import CONTINUED, usual_rate
from eval import run as evaluation
from eval.decoding.drafters.formats import published_format
from eval.measuring.journal import INTERRUPTED
from eval.prompts import load_prompts
from eval.reporting.fields import ONE_AT_A_TIME, REFERENCE, Load, Report, read_report
from eval.reporting.files import write_report
from eval.reporting.traffic import Estimate

PUBLISHED, REFUSED, FAILED, NOTHING = range(4)  # exit statuses
VERDICTS = ("published", "refused", "failed", "nothing to gain")
HOME, STATE = "adapt", "state.json"  # the loop's folder in a run's folder, and its state
FIRST = "run"  # name of the run's own draft
# Share of calls that may publish a draft that is not faster: 1 in 100 series of 20 weekly calls
FALSE_PUBLICATIONS = 0.01 / 20
# Share of a speed-up by which a server start may change it (docs/lab-notes.md), if the intervals
# do not cover starts.
SERVER_START = 0.05
EVALUATED = 200  # most new prompts on which acceptance is measured, unless the recipe has a number
WATCHED_EVERY = 5.0  # seconds between two measurements of the disk space
# Recipe keys that go over from the run; the others are about its data, its length or its base draft
KEPT = """
    target target_hub_id name domain minutes chat_template_kwargs max_prompt_length max_eval_prompts
    device_map answer_url answer_model answer_max_new_tokens answer_batch_size cache_top_k loss
    held_out_prompts early_stopping_patience teacher_temperature ttt_steps activation_checkpointing
    use_peft lora_r lora_alpha temperature top_k top_p max_new_tokens gamma max_gamma speed_prompts
    tuning_prompts dtype tokens_per_step gradient_accumulation_steps ddp_timeout seed learning_rate
    weight_decay max_grad_norm num_train_epochs logging_steps save_steps save_total_limit
    save_strategy adam_epsilon adam_beta1 adam_beta2 optim lr_scheduler_type use_cpu bf16 fp16 tf32
    disable_tqdm report_to
""".split()


@contextmanager
def disk_cap(folder: Path, gib: float) -> Iterator[None]:
    """Interrupt the block if `folder` becomes larger than `gib` GiB, and then raise UserError."""
    ended, over = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.is_set() and not ended.wait(WATCHED_EVERY):
            used = subprocess.run(["du", "-sk", folder], capture_output=True, text=True)
            if int(used.stdout.split()[0]) > gib * 2**20:  # KiB
                over.set()
                interrupt_main()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        if over.is_set():
            raise UserError(
                f"{folder} has become larger than {gib:g} GiB, so the call was ended. Raise "
                "--disk_gib, or lower --days, max_train_prompts or save_total_limit."
            )


def lower_bound(recent: Sequence[Report]) -> float:
    """The speed-up of the new draft minus that of the served one, at least.

    recent: of evaluations on the same prompts, which differ by their servers' starts. One-sided, at
    the level FALSE_PUBLICATIONS, as `measure` adds half-widths over prompts and over starts. Raises
    NotComparable if a report has too few prompts for an interval.
    """
    speedups = [report.stated_speedup(report.gain[0]) for report in recent]
    freedom, starts = Estimate.of(speedups[0], 0).freedom, recent[0].starts
    over_starts = [speedup.over_starts or 0.0 for speedup in speedups]
    # the same prompts again leave the error over prompts as it is
    over_prompts = fmean(
        math.sqrt(max((speedup.bounds[1] - speedup.mean) ** 2 - half**2, 0.0))
        for speedup, half in zip(speedups, over_starts, strict=True)
    )
    parts = [(over_prompts, freedom, 1)]
    if starts:
        parts.append((math.hypot(*over_starts) / len(recent), starts.freedom, len(recent)))
    halves = [
        half * float(stdtrit(freedom * times, FALSE_PUBLICATIONS) / stdtrit(freedom, 0.975))
        for half, freedom, times in parts
    ]
    return fmean(speedup.mean for speedup in speedups) - math.hypot(*halves) - start(recent[0])


def undecided(recent: Report) -> bool:
    """Whether further starts of the servers may show the gain.

    Two starts leave so few degrees of freedom that a gain of 0.2 is shown in 1 of 10 calls if a
    server's speed differs by 3% between starts, and with four in 7 of 10. A draft that is not
    faster is still published in 1 of 2,000 calls at most (docs/lab-notes.md).
    """
    shown = recent.stated_speedup(recent.gain[0]).bounds[0] > 0
    return recent.starts is not None and shown and lower_bound([recent]) <= 0


def start(report: Report) -> float:
    """What a server start may change in the served draft's speed-up, besides the intervals."""
    if report.engine == REFERENCE or report.starts:
        return 0.0
    return SERVER_START * report.stated_speedup(report.drafts[report.gain[0].over]).mean


def gained(recent: Sequence[Report]) -> tuple[bool, str]:
    """Whether the new draft is shown to be faster on the newest day, and its gain as text.

    recent: as in `judged`. Raises NotComparable for too few prompts.
    """
    newest, low = recent[-1], lower_bound(recent)
    gain = newest.gain[0]
    more = newest.stated_speedup(gain)
    new = newest.stated_speedup(newest.drafts[gain.draft])
    text = f"speed-up {more:+.2f} to {new:.2f} on the newest day, at least {low:+.2f}"
    return low > 0, text


def judged(recent: Sequence[Report], earlier: Report | None, margin: float) -> tuple[int, str]:
    """The gate: an exit status and its reason.

    recent, earlier: the first `gain` of each is the new draft over the served one, on the newest
    day of traffic (of one or two evaluations) and on the run's evaluation prompts, which are
    measured if the new draft has `gained`. margin: share of the served draft's speed-up that may
    be lost on the earlier prompts. Raises NotComparable for too few prompts.
    """
    faster, shown = gained(recent)
    if not faster or earlier is None:
        return NOTHING, f"no gain is shown: {shown}."
    gain = recent[-1].gain[0]
    new = recent[-1].stated_speedup(recent[-1].drafts[gain.draft])
    on_recent = [(report, "the newest day") for report in recent]
    for report, prompts in (*on_recent, (earlier, "the earlier prompts")):
        if gain.draft in report.broken:
            return REFUSED, f"the new draft changes the target's outputs on {prompts}."
        for load, loss in losses(report).items():
            if loss > margin and (load != ONE_AT_A_TIME or report is earlier):
                return REFUSED, (
                    f"on {prompts}, with {load}, the new draft may lose {loss:.0%} of the served "
                    f"draft's speed-up, more than --margin {margin:g} allows ({shown})."
                )
    change = earlier.stated_speedup(earlier.gain[0])
    slower = "" if new.bounds[0] > 1 else " There no draft is shown to be faster than none."
    return PUBLISHED, f"{shown}; on the earlier prompts {change:+.2f}.{slower}"


def losses(report: Report) -> dict[Load, float]:
    """The share of the served draft's speed-up that the new one may lose, at most, by load.

    One request at a time is compared prompt by prompt. At other loads the two intervals are added
    as if they were independent, which is too wide, because the requests are the same.
    """
    gain = report.gain[0]
    new, served = (report.speedups(name) for name in (gain.draft, gain.over))
    most = {
        load: served[load].mean
        - new[load].mean
        + math.hypot(
            new[load].mean - new[load].bounds[0], served[load].bounds[1] - served[load].mean
        )
        for load in new
    }
    most[ONE_AT_A_TIME] = -report.stated_speedup(gain).bounds[0]
    return {load: (start(report) + loss) / served[load].mean for load, loss in most.items()}


@dataclass
class State:
    """What the loop must know at its next call.

    until: Unix time of the newest row that a finished call has tested on. trained: digests of the
    rows that a draft was trained on, by the draft's name. held: a rollback holds the served draft.
    """

    until: float = 0.0
    trained: dict[str, list[str]] = field(default_factory=dict)
    held: bool = False

    @classmethod
    def read(cls, home: Path) -> State:
        return cls(**read_json(home / STATE)) if (home / STATE).exists() else cls()

    def write(self, home: Path) -> None:
        write_json(home / STATE, asdict(self))


def when(seconds: float) -> str:
    """A Unix time in UTC, as it stands in names of folders."""
    return time.strftime("%Y-%m-%dT%H-%M-%SZ", time.gmtime(seconds))


def served_draft(run: Path) -> Path:
    """The folder of the served draft. The first call makes `current`: the run's own draft.

    Raises UserError for a run without a draft.
    """
    current = run / HOME / "current"
    if not current.is_symlink():
        check_files(run)
        with atomic_folder(run / HOME / "drafts" / FIRST) as folder:
            shutil.copytree(run / "draft", folder, dirs_exist_ok=True)
        atomic_link(current, f"drafts/{FIRST}")
    return current.resolve()


def tidy(home: Path, oldest: float) -> None:
    """Delete what a killed call has left, and drafts and expired reports that no link names."""
    linked = {(home / link).resolve().name for link in ("current", "previous")}
    drafts = [path for path in home.glob("drafts/*") if path.name not in linked]
    reports = [
        path
        for path in home.glob("reports/*")
        if path.name not in linked and path.stat().st_mtime < oldest
    ]
    for path in (home / "work", *drafts, *reports):
        remove(path)


def adapt(args: argparse.Namespace, about: dict[str, Any]) -> tuple[int, str]:
    """One call of the loop; the caller holds the lock. Returns an exit status and its reason.

    about: gets the counts of rows and the name of the served draft.
    """
    home, now = args.run / HOME, time.time()
    served = served_draft(args.run)
    about["served"] = served.name
    tidy(home, now - DAY * args.days)
    state = State.read(home)
    if state.until > now:
        raise UserError(
            f"{home / STATE} has rows of {when(state.until)}, but the clock of this machine shows "
            f"{when(now)}. Correct the clock; if the file's time is wrong, delete the file."
        )
    if state.held:
        return NOTHING, "--rollback holds the served draft; --resume lets others be published."
    work, name = home / "work", when(now)
    try:
        with write_errors_explained(home), disk_cap(home, args.disk_gib):
            recipe = training_recipe(args, served, work)
            refuse_gate(args, recipe, served)
            rows = select(args, state, served.name, now, about)
            if rows.lacking or args.check:
                return NOTHING, rows.lacking or "--check ends before the training."
            write_rows(work / "train.jsonl", rows.train)
            write_rows(work / "test.jsonl", rows.test)
            recipe = replace(recipe, max_train_prompts=len(rows.train))
            # texts of users stay in this folder: none is stored in the cache that all runs share
            (recipe.folder / TEACHER).mkdir(parents=True)
            train.run(recipe, measured=not args.gate, summary=False)
            reports = home / "reports" / name
            status, reason = gated(args, recipe, served, reports, home / "drafts" / name)
    finally:
        remove(work)
    state.until = rows.newest
    if status == PUBLISHED:
        of_served = {served.name: state.trained.get(served.name, [])}  # for a rollback
        state.trained = of_served | {name: rows.trained}
        about["served"] = name
    state.write(home)  # before the links: no row is tested on again after a kill
    if status == PUBLISHED:
        atomic_link(home / "previous", os.readlink(home / "current"))
        atomic_link(home / "current", f"drafts/{name}")
    if reports.exists():  # the drafts were compared
        print(f"Reports: {reports}")
    return status, reason


def select(
    args: argparse.Namespace, state: State, served: str, now: float, about: dict[str, Any]
) -> Split:
    """The rows of this call. The rows of the last days are kept in `rows.jsonl`."""
    path = args.run / HOME / "rows.jsonl"
    rows, left_out = read_traffic(args.traffic)
    evaluated = load_prompts(str(args.run / "prompts" / "eval.jsonl"))
    limit = read_yaml(args.run / "recipe.yaml")["max_train_prompts"]
    rows += stored_rows(path)
    kept = usable(rows, evaluated, now, args.days, args.redact, limit, left_out)
    if not args.check:
        write_rows(path, kept)
    about |= {"rows": len(kept), "left_out": +left_out.counts}
    about["newest_row"] = kept[0]["time"] if kept else None
    trained = state.trained.get(served, [])
    return split(kept, rows_of(args.run), state.until, trained, args.old_share)


def training_recipe(args: argparse.Namespace, served: Path, work: Path) -> Recipe:
    """The recipe of the run in `work` that continues from the served draft."""
    run = read_yaml(args.run / "recipe.yaml")
    values = {key: run[key] for key in KEPT if key in run}
    if run["draft"] is None:  # the run's learning rate was for new weights
        rate = run.get("learning_rate")
        if rate is None:
            width = Checkpoint.open(run["target"]).text_config.hidden_size
            rate = usual_rate(build_recipe(run), width)
        values["learning_rate"] = CONTINUED * rate
    if run.get("dtype") == "bfloat16":
        values.pop("dtype")  # this machine's CPU may be slow in it (`usual_dtype`)
    values |= {
        "output_dir": str(work / "run"),
        "draft": str(served),
        "answers": "logged",
        "answer_temperature": run["temperature"],  # of rows without one
        "warmup_steps": 0.1,  # share of the steps, which are few
        "train_prompts": str(work / "train.jsonl"),
        "eval_prompts": str(work / "test.jsonl"),
        "max_eval_prompts": run["max_eval_prompts"] or EVALUATED,
        "long_prompts": "drop",
    }
    work.mkdir()
    path = work / "recipe.yaml"
    path.write_text(yaml_text(values), encoding="utf-8")
    recipe = load_recipe(["--recipe", str(path), *args.train])
    refuse_uncomputed(recipe, served, bool(args.gate))
    return recipe


def refuse_gate(args: argparse.Namespace, recipe: Recipe, served: Path) -> None:
    """Raise UserError for options of --gate that fail, or judge something else, after training."""
    options = gate_options(args, recipe, args.run, served, served)
    try:
        gate = evaluation.parse([*options, "--output_dir", str(args.run / HOME / "reports")])
    except SystemExit:
        raise UserError("eval.run does not take these options of --gate; see above.") from None
    if gate.engine in evaluation.SERVED:
        evaluation.SERVED[gate.engine].program()
    refused = {
        "gamma": len(gate.gamma) > 1,
        "draft": len(gate.draft) > 2,
        "base_url": gate.served,
        "fail_under_alpha": gate.fail_under_alpha is not None,
        "fail_under_speedup": gate.fail_under_speedup is not None,
    }
    if wrong := [f"--{option}" for option, clashes in refused.items() if clashes]:
        raise UserError(
            f"--gate has {', '.join(wrong)}, but it compares two drafts at one draft length, in "
            "engines that are started here; leave these options out, or give one --gamma."
        )


def gate_options(
    args: argparse.Namespace, recipe: Recipe, run: Path, served: Path, new: Path
) -> list[str]:
    """The options of eval.run for the settings of a run, to compare the new draft."""
    options = ["--run", str(run), "--draft", f"untuned={served}", "--draft", f"tuned={new}"]
    options += ["--speed_prompts", str(recipe.speed_prompts)]
    if recipe.gamma is not None:
        options += ["--gamma", str(recipe.gamma)]
    return [*options, *args.gate]


def refuse_uncomputed(recipe: Recipe, served: Path, in_engine: bool) -> None:
    """Raise UserError if only an engine computes the target, and this is not enough.

    The errors of a training run advise keys that `training_recipe` sets. in_engine: whether the
    drafts are compared in an engine.
    """
    if not recipe.served:
        target = Checkpoint.open(recipe.target)
        target.fetch()
        if not target.quantisation and not too_large(recipe, target):
            return
    engine_only = f"Only an engine computes {recipe.target!r} (quantised, too large or on a server)"
    if form := published_format(served):
        raise UserError(
            f"{engine_only}, but the hidden states that a draft of kind {form.name!r} reads are "
            "not requested for logged outputs. Train another draft with distill/train.py."
        )
    if not (recipe.served and in_engine):
        raise UserError(
            f"{engine_only}, so logged outputs and drafts cannot be checked in this process. Name "
            'the target\'s server and an engine, as --train "--answer_url http://HOST:PORT" --gate '
            '"--engine vllm --gamma 4".'
        )


def gated(
    args: argparse.Namespace, recipe: Recipe, served: Path, reports: Path, place: Path
) -> tuple[int, str]:
    """Compare the run's draft with the served one; copy it to `place` if it passes the gate.

    Returns an exit status and its reason. `reports` gets the reports of both sets of prompts, or
    of the newest day if this shows no gain. The run has measured the newest day in the reference
    decoder; --gate measures it in an engine. Raises UserError if a measurement fails.
    """
    run = recipe.folder
    if weights_sha256(served) in draft_weights(run):
        return NOTHING, "no gain over the served draft is shown."
    options = gate_options(args, recipe, run, served, run / "draft")
    if args.gate:
        recent = {"recent": measured(options, reports / "recent")}
        if undecided(recent["recent"]):
            recent["repeated"] = measured(options, reports / "repeated")
    else:
        recent = {"recent": read_report(run)}
    reported, on_recent = dict(recent), list(recent.values())
    if gained(on_recent)[0]:
        prompts = ["--prompts", str(args.run / "prompts" / "eval.jsonl")]
        reported["earlier"] = measured([*options, *prompts], reports / "earlier")
    for part, report in reported.items():
        report.provenance["removed"] = str(run)  # so no command may name it
        write_report(reports / part / "report", report)
    status, reason = judged(on_recent, reported.get("earlier"), args.margin)
    if status != PUBLISHED:
        return status, reason
    # the draft stays on this machine, so a licence that is not known is no obstacle
    original = read_yaml(args.run / "recipe.yaml")
    licence, source = derived_licence([original["target"], *filter(None, [original["draft"]])])
    about = Publication(place.name, licence or "other", source)
    if unmet := unmet_conditions(run, on_recent, draft_weights(run), about.licence, source):
        return REFUSED, unmet[0]
    check_files(run)
    copy_draft(run, place, on_recent[-1:], about)
    return PUBLISHED, reason


def measured(options: list[str], folder: Path) -> Report:
    """The report of eval.run with these options, in `folder`. Raises UserError if it fails."""
    command = [*options, "--output_dir", str(folder)]
    status = evaluation.main(command, summary=False)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        raise UserError(
            f"The drafts cannot be compared on {folder.name} prompts, because eval.run ended with "
            f"status {status}; its message above has the cause."
        )
    return read_report(folder)


def rollback(home: Path) -> str:
    """Make `current` the draft that was served before, and hold it; returns what is served.

    Raises UserError if there is none.
    """
    links = (home / "previous", home / "current")
    names = [os.readlink(link) for link in links if link.is_symlink()]
    if len(set(names)) < 2:
        raise UserError(
            f"{home} has no earlier draft to serve; only a call that publishes a draft keeps one."
        )
    hold(home, True)
    atomic_link(home / "current", names[0])
    return f"served again: {names[0]}; restart the servers, which keep the draft in memory"


def hold(home: Path, held: bool) -> None:
    """Whether later calls leave the served draft as it is."""
    replace(State.read(home), held=held).write(home)


def parse(argv: list[str]) -> argparse.Namespace:
    about = __doc__.split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m distill.adapt", description=about)
    add, task = parser.add_argument, parser.add_mutually_exclusive_group(required=True)
    add("run", type=Path, metavar="RUN", help="output folder of a finished training run")
    rows = "logged rows (docs/serving.md): a .jsonl or .jsonl.gz file, or a folder of them"
    task.add_argument("--traffic", type=Path, metavar="PATH", help=rows)
    earlier = "serve the draft again that was served before the last publication"
    task.add_argument("--rollback", action="store_true", help=earlier)
    further = "let drafts be published again after --rollback"
    task.add_argument("--resume", action="store_true", help=further)
    everything = "delete all that this command has stored: rows, reports and drafts"
    task.add_argument("--delete", action="store_true", help=everything)
    hit = "regular expression; rows in which it is found are dropped; repeatable"
    add("--redact", type=_pattern, action="append", default=[], metavar="REGEX", help=hit)
    add("--days", type=float, default=30, help="rows and reports are kept that long (%(default)s)")
    share = "share of rows that earlier drafts were trained on, against forgetting (%(default)s)"
    add("--old_share", type=float, default=0.3, help=share)
    loss = "share of the speed-up on the run's prompts that may be lost (%(default)s)"
    add("--margin", type=float, default=0.1, help=loss)
    add("--disk_gib", type=float, default=50, help="most GiB of RUN/adapt (%(default)s)")
    keys = 'recipe keys of the training, as "--minutes 15 --learning_rate 1e-4"'
    add("--train", type=shlex.split, default=[], metavar="ARGS", help=keys)
    options = 'options of eval.run for the gate, as "--engine vllm --gamma 4"'
    add("--gate", type=shlex.split, default=[], metavar="ARGS", help=options)
    add("--check", action="store_true", help="read rows and options, store nothing, and stop")
    add("--json", action="store_true", help="print the result as a JSON object in the last line")
    args = parser.parse_args(argv)
    if not 0 <= args.old_share < 1:
        parser.error(f"--old_share is {args.old_share}; give a share below 1")
    if not args.run.is_dir():
        parser.error(f"{args.run} is not a folder; give the output folder of a finished run")
    return args


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression ({error})") from None


def main(argv: list[str]) -> int:
    args = parse(argv)
    home, about = args.run / HOME, dict[str, Any]()
    try:
        with FileLock(args.run / ".adapt.lock", blocking=False):
            status, reason = PUBLISHED, "as asked"
            if args.traffic is not None:
                status, reason = adapt(args, about)
            elif args.rollback:
                reason = rollback(home)
            elif args.resume:
                hold(home, False)
            else:
                remove(home)
    except Timeout:
        status, reason = NOTHING, f"another call works on {args.run}"
    except (UserError, PermissionError) as error:
        status, reason = FAILED, str(error)
    except KeyboardInterrupt:
        status, reason = INTERRUPTED, "by a signal"
    except Exception as error:  # Python's own status would be that of a refused draft
        traceback.print_exc()
        status, reason = FAILED, f"{type(error).__name__}: {error}"
    verdict = VERDICTS[status] if status != INTERRUPTED else "interrupted"
    if status in (FAILED, INTERRUPTED):
        print(f"error: {reason}" if status == FAILED else verdict, file=sys.stderr)
    else:
        print(f"{verdict if args.traffic else 'done'}: {reason}")
    if args.json:
        print(json.dumps({"verdict": verdict, "exit_status": status, "reason": reason} | about))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
