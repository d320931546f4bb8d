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

import json
import os
import re
import shlex
import shutil
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any

from filelock import FileLock, Timeout
from pydantic import BeforeValidator

from align import command_line
from align.checkpoint import Checkpoint, weights_sha256
from align.command_line import INTERRUPTED, BelowOne, NotNegative, Options, Positive, option
from align.errors import UserError
from align.files import (
    atomic_folder,
    atomic_link,
    disk_cap,
    read_json,
    remove,
    write_errors_explained,
    write_json,
)
from distill import train
from distill.card import Publication, derived_licence, draft_weights
from distill.gate import FAILED, NOTHING, PUBLISHED, REFUSED, gained, judged, undecided
from distill.models import too_large
from distill.publish import check_files, copy_draft, unmet_conditions
from distill.recipe import Recipe, build_recipe, load_recipe
from distill.recipe_files import read_yaml, yaml_text
from distill.teacher.store import TEACHER
from distill.traffic import (
    DAY,
    Split,
    forget_rows,
    read_traffic,
    rows_of,
    split,
    stored_rows,
    usable,
    write_rows,
)
from distill.training_setup import continued_rate, usual_rate
from eval import run as evaluation
from eval.decoding.drafters.formats import published_format
from eval.measuring.journal import JOURNAL
from eval.prompts import load_prompts
from eval.reporting.fields import Report, read_report
from eval.reporting.files import write_report

VERDICTS = ("published", "refused", "failed", "nothing to gain")
HOME, STATE = "adapt", "state.json"  # the loop's folder in a run's folder, and its state
FIRST = "run"  # name of the run's own draft
EVALUATED = 200  # most new prompts on which acceptance is measured, unless the recipe has a number
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


Words = Annotated[Sequence[str], BeforeValidator(shlex.split)]


@dataclass(frozen=True)
class AdaptOptions(Options):
    run: Path = option("output folder of a finished training run", positional=True, metavar="RUN")
    traffic: str = option(
        "logged rows: .jsonl or .jsonl.gz, or a folder", "", one_of="one of these"
    )
    rollback: bool = option("serve the draft again that was served before the last", False)
    resume: bool = option("let drafts be published again after --rollback", False)
    delete: bool = option("delete all that is stored: rows, reports and drafts", False)
    redact: Sequence[re.Pattern[str]] = option(
        "regular expression; rows in which it is found are dropped; repeatable",
        (),
        group="the loop",
    )
    days: NotNegative = option("rows and reports are kept that long", 30)
    old_share: BelowOne = option("share of rows that earlier drafts were trained on", 0.3)
    margin: float = option("share of the speed-up on the run's prompts that may be lost", 0.1)
    disk_gib: Positive = option("most GiB of RUN/adapt", 50)
    train: Words = option('recipe keys, as "--minutes 15 --learning_rate 1e-4"', ())
    gate: Words = option('options of eval.run for the gate, as "--engine vllm --gamma 4"', ())
    check: bool = option("read rows and options, store nothing, and stop", False)
    json: bool = option("print the result as a JSON object in the last line", False)

    def refusals(self) -> Iterator[str]:
        if not self.run.is_dir():
            yield f"{self.run} is not a folder; give the output folder of a finished run"


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
            shutil.copytree(run / "draft", folder, symlinks=True, dirs_exist_ok=True)
        atomic_link(current, f"drafts/{FIRST}")
    return current.resolve()


def tidy(home: Path, oldest: float) -> None:
    """Delete what a killed call has left, and drafts and expired reports that no link names."""
    linked = {(home / link).resolve().name for link in ("current", "previous")}
    drafts = [path for path in home.glob("drafts/*") if path.name not in linked]
    old = (path for path in home.glob("reports/*") if path.stat().st_mtime < oldest)
    reports = [path for path in old if path.name not in linked]
    for path in (*drafts, *reports):
        remove(path)
    clear(home)
    forget_rows(home / "rows.jsonl", oldest)


def clear(home: Path) -> None:
    """Delete a call's folder, and outputs of measurements that have failed: reports have none."""
    for path in (home / "work", *home.glob(f"reports/*/*/report/{JOURNAL}")):
        remove(path)


def adapt(args: AdaptOptions, about: dict[str, Any]) -> tuple[int, str]:
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
        clear(home)
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
    args: AdaptOptions, state: State, served: str, now: float, about: dict[str, Any]
) -> Split:
    """The rows of this call. The rows of the last days are kept in `rows.jsonl`."""
    path = args.run / HOME / "rows.jsonl"
    rows, left_out = read_traffic(Path(args.traffic))
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


def training_recipe(args: AdaptOptions, served: Path, work: Path) -> Recipe:
    """The recipe of the run in `work` that continues from the served draft."""
    run = read_yaml(args.run / "recipe.yaml")
    values = {key: run[key] for key in KEPT if key in run}
    earlier = build_recipe(run)
    if not earlier.starts_trained:  # the run's learning rate was for new weights
        width = Checkpoint.open(run["target"]).text_config.hidden_size
        rate = run.get("learning_rate")
        rate = usual_rate(earlier, width) if rate is None else rate
        values["learning_rate"] = continued_rate(earlier.kind, rate)
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
        "engine": None,  # the gate decides by the reference decoder, or by --gate
    }
    work.mkdir()
    path = work / "recipe.yaml"
    path.write_text(yaml_text(values), encoding="utf-8")
    recipe = load_recipe(["--recipe", str(path), *args.train])
    refuse_uncomputed(recipe, served, bool(args.gate))
    return recipe


def refuse_gate(args: AdaptOptions, recipe: Recipe, served: Path) -> None:
    """Raise UserError for options of --gate that fail, or judge something else, after training."""
    options = gate_options(args, recipe, args.run, served, served)
    try:
        gate = evaluation.parse([*options, "--output_dir", str(args.run / HOME / "reports")])
    except SystemExit:
        raise UserError("eval.run does not take these options of --gate; see above.") from None
    if gate.engine in evaluation.STARTED:
        evaluation.STARTED[gate.engine].program()
    refused = {
        "gamma": len(gate.gamma) > 1,
        "draft": len(gate.draft) > 2,
        "base_url": gate.running,
        "fail_under_alpha": gate.fail_under_alpha is not None,
        "fail_under_speedup": gate.fail_under_speedup is not None,
    }
    if wrong := [f"--{option}" for option, clashes in refused.items() if clashes]:
        raise UserError(
            f"--gate has {', '.join(wrong)}, but it compares two drafts at one draft length, in "
            "engines that are started here; leave these options out, or give one --gamma."
        )


def gate_options(
    args: AdaptOptions, recipe: Recipe, run: Path, served: Path, new: Path
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
    if not recipe.remote_target:
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
    if not (recipe.remote_target and in_engine):
        raise UserError(
            f"{engine_only}, so logged outputs and drafts cannot be checked in this process. Name "
            'the target\'s server and an engine, as --train "--answer_url http://HOST:PORT" --gate '
            '"--engine vllm --gamma 4".'
        )


def gated(
    args: AdaptOptions, recipe: Recipe, served: Path, reports: Path, place: Path
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


def main(argv: list[str]) -> int:
    args = command_line.parse(AdaptOptions, "python -m distill.adapt", __doc__, argv)
    home, about = args.run / HOME, dict[str, Any]()
    try:
        with FileLock(args.run / ".adapt.lock", blocking=False):
            status, reason = PUBLISHED, "as asked"
            if args.traffic:
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
