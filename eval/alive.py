"""Is a head alive on this target? One minute, in the reference decoder and in a running server.

    python -m eval.alive TARGET DRAFT                     eight prompts of this file
    python -m eval.alive TARGET DRAFT --run outputs/code  the run's prompts, against its report
    python -m eval.alive TARGET DRAFT --base_url URL      also in the server of this pair

A fault is named if the head accepts more after a change of its files (eval/measuring/repairs.py).

Exit status: 0 alive; 1 dead, or with a named fault; 2 bad input, or a head of another target; 3 not
known, because there are few tokens, or little acceptance on this file's prompts: give --prompts of
the head's domain; 4 the server does not answer, or counts no drafts.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from scipy.special import bdtr, bdtrc
from torch import Tensor

from align import command_line
from align.checkpoint import Checkpoint
from align.checks import Comparison
from align.command_line import Options, option
from align.errors import UserError
from align.files import read_json
from eval.chat_template import PLACE
from eval.decoding.drafters.causal_lm import teacher_forced_logits
from eval.decoding.drafters.compact import weights_of
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.forward import HiddenStates
from eval.decoding.loop import Decoding, decode
from eval.decoding.prompt_run import PromptRun
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.engines.measure import client_of
from eval.engines.server import ServerError
from eval.measuring.repairs import repairs, rotary_base
from eval.measuring.runs import Speculation
from eval.options import RunOptions, defaults
from eval.prompts import Prompt, PromptSet, write_prompts
from eval.reporting.fields import read_report
from eval.run import decoding_of, load

ALIVE, DEAD, BAD_INPUT, INCONCLUSIVE, NO_COUNTERS = range(5)  # exit statuses
QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a lighthouse keeper.",
    "List five tips for better sleep.",
    "What is 17 times 24? Show your steps.",
    "Write a polite email that asks for a refund.",
    "Write an SQL query that counts the orders of each customer.",
    "Summarize the causes of the First World War.",
)
QUANTISED = "quantization_config"
LENGTH = 4  # drafted tokens of a step
DECODED = {"gamma": (LENGTH,), "max_prompts": len(QUESTIONS), "max_new_tokens": 48}
FEWEST = 64  # tokens that tell 0.1 and 0.3 apart
LEAST_ABOVE_CHANCE = 0.1  # least acceptance above chance of a living head in its domain
GAIN, LEVEL = 0.03, 1e-4  # least difference that is named, and its rate of false alarms
CARD = re.compile(r"Acceptance rate in the reference decoder.*?distilled draft (0\.\d+)")


@dataclass(frozen=True)
class AliveOptions(Options):
    target: str = option("Hub id, folder, GGUF or pypi: file", positional=True, metavar="TARGET")
    draft: str = option("Hub id or folder of the head", positional=True, metavar="DRAFT")
    run: Path | None = option("a run with a report of the draft: its prompts are asked", None)
    prompts: str = option("Hub data set, pypi: file or .jsonl; default: eight questions", "")
    instruction: str | None = option("user message; {prompt} stands for the prompt", None)
    base_url: str = option("a running server of this pair", "")
    dtype: Literal["bfloat16", "float16", "float32"] = option("dtype of both models", "bfloat16")
    device: str = option("device of both models", RunOptions.device)
    json: bool = option("print one JSON object", False)

    def asked(self, folder: Path) -> RunOptions:
        """The options of the evaluation. folder: where own questions are written."""
        named = {"run": self.run, "prompts": self.prompts, "instruction": self.instruction}
        settings: dict[str, Any] = {name: value for name, value in named.items() if value}
        if not (self.run or self.prompts):
            path = folder / "prompts.jsonl"
            write_prompts(path, [Prompt(text, text) for text in QUESTIONS])
            settings = {"prompts": str(path), "instruction": PLACE} | settings
        settings = defaults(settings) | settings | {"target": self.target, "draft": (self.draft,)}
        models = {"dtype": self.dtype, "device": self.device, "temperature": 0.0}
        return RunOptions(**settings | models | DECODED)


def parse(argv: Sequence[str]) -> AliveOptions:
    return command_line.parse(AliveOptions, "python -m eval.alive", __doc__, argv)


@dataclass
class Outputs:
    """The target's greedy outputs `runs` to prompts of token ids `ids`, made with the draft.

    states: of all layers, at all tokens of prompt and output except the last.
    """

    ids: Sequence[list[int]]
    runs: list[PromptRun]
    states: list[HiddenStates]

    def accepted(self, drafter: Drafter, misplaced: bool = False) -> Tensor:
        """Whether the first drafted token would be accepted, at each token of the outputs [N].

        misplaced: the draft reads the target's states of other tokens.
        """
        parts = list[Tensor]()
        for ids, run, states in zip(self.ids, self.runs, self.states, strict=True):
            if misplaced:
                states = {k: x.roll(x.shape[1] // 2, 1) for k, x in states.items()}  # type: ignore[union-attr]
            q = drafter.teacher_forced(ids, run.tokens, Sampling(), states).cpu()
            parts.append(q.gather(-1, torch.tensor(run.tokens)[:, None])[:, 0] > 0)
        return torch.cat(parts)

    def chance(self, drafter: Drafter) -> Tensor:
        """`accepted` of a draft that knows nothing of the text: the better one of the draft on
        misplaced states, and the most frequent token at each position.
        """
        tokens = torch.tensor([token for run in self.runs for token in run.tokens])
        constant = tokens == tokens.mode().values
        if not drafter.layers:
            return constant
        misplaced = self.accepted(drafter, misplaced=True)
        return misplaced if misplaced.sum() > constant.sum() else constant


def read_outputs(
    target: Target, drafter: Drafter, prompts: PromptSet, decoding: Decoding
) -> Outputs:
    """Decode each prompt with the draft, then read the target's states at its output."""
    layers = {*range(target.model.config.get_text_config().num_hidden_layers), *drafter.layers}
    outputs = Outputs(prompts.ids, [], [])
    length = min(LENGTH, drafter.most or LENGTH)
    for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True):
        run = decode(target.decoder, drafter, prompt, ids, decoding, length)
        states: HiddenStates = dict.fromkeys(layers)
        teacher_forced_logits(target.decoder, [*ids, *run.tokens[:-1]], len(ids), states)
        outputs.runs.append(run)
        outputs.states.append(states)
    return outputs


def fewer(accepted: float, drafted: float, rate: float) -> bool:
    """Whether a rate below this one is shown by the tokens: an exact binomial test."""
    low = accepted / drafted < rate - GAIN
    return low and bool(bdtr(accepted, int(drafted), rate) < LEVEL)


def more(accepted: Tensor, other: Tensor) -> bool:
    """Whether `accepted` [N] is true more often than `other` [N]: an exact sign test."""
    gained, lost = int((accepted & ~other).sum()), int((other & ~accepted).sum())
    above = gained - lost > GAIN * len(accepted)
    return above and bool(bdtrc(gained - 1, gained + lost, 0.5) < LEVEL)


def best_repair(
    target: Target, folder: Path, outputs: Outputs, accepted: Tensor
) -> tuple[str, float, bool] | None:
    """The fault that the best change of the head undoes, the acceptance after it, and whether the
    tokens show a gain.

    accepted: of the unchanged head. None if no change raises it by GAIN.
    """
    best, unchanged = None, float(accepted.float().mean())
    config = target.model.config.get_text_config().to_dict()
    with TemporaryDirectory() as scratch:
        for number, repair in enumerate(repairs(folder, config)):
            changed = Path(scratch) / str(number)
            repair.write(folder, changed)
            try:
                repaired = outputs.accepted(load_drafter(str(changed), target))
            except UserError:  # layers that the target does not have: this is not the repair
                continue
            rate = float(repaired.float().mean())
            if rate > unchanged + GAIN and (best is None or rate > best[1]):
                best = repair.cause, rate, more(repaired, accepted)
    return best


def notes(target: Target, folder: Path) -> Iterator[str]:
    """What the files of a head show that may lower its acceptance."""
    about, config = read_json(folder / "config.json"), target.model.config.get_text_config()
    verifier = (about.get("speculators_config") or {}).get("verifier") or {}
    spec = target.checkpoint.spec.partition("#")[0]
    named = (verifier.get("name_or_path") or spec).partition("#")[0]
    if Path(named).name != Path(spec).name:
        yield f"its config.json names another target, {named}"
        if kind := target.checkpoint.gguf_kind or target.model.config.to_dict().get(QUANTISED):
            yield f"this target is quantised ({kind})"
    bases = rotary_base(about), rotary_base(config.to_dict())
    if None not in bases and bases[0] != bases[1]:
        yield f"its rotary base is {bases[0]:g}, the target's {bases[1]:g}"
    if (folder / "tokenizer.json").is_file():
        pair = Comparison(target.checkpoint.vocabulary, Checkpoint.open(folder).vocabulary)
        if pair.differing:
            yield f"its tokenizer has other tokens at {len(pair.differing)} of the target's ids"
    for name, tensor in weights_of(folder, "cpu").items():
        if name.endswith("norm.weight") and bool((tensor == tensor[0]).all()):
            yield f"{name} is {float(tensor[0]):g} everywhere, as before a training"


def reported(run: Path, outputs: Outputs) -> float:
    """The acceptance rate by a run's report on the same prompts. Raises UserError without one."""
    rows = {row.id: row for row in read_report(run).tuned[1].per_prompt if row.positions}
    rated = [rows[run.prompt_id] for run in outputs.runs if run.prompt_id in rows]
    if not rated:
        raise UserError(f"The report of {run} has no acceptance rate on these prompts; omit --run.")
    return sum(row.alpha_sum or 0 for row in rated) / sum(row.positions or 0 for row in rated)


def server_counts(url: str, prompts: Sequence[Prompt], decoding: Decoding) -> Speculation:
    """The server's counts of speculation for the prompts. Raises ServerError without any."""
    server = client_of(url, None)(url)
    counts = [server.decode(prompt, decoding).counters for prompt in prompts]
    drafting = [count for count in counts if count and count.drafts and count.accepted_at]
    if not drafting:
        raise ServerError(f"{url} counts no drafts; start it with the draft, and with counters.")
    return Speculation.sum(drafting)


def check(args: AliveOptions) -> dict[str, Any]:
    """The result, as --json prints it. Raises UserError for input that cannot be used."""
    own_prompts = bool(args.run or args.prompts)
    with TemporaryDirectory() as scratch:
        asked = args.asked(Path(scratch))
        target, prompts, _ = load(asked)
    drafter, decoding = load_drafter(args.draft, target), decoding_of(asked, target.stops)
    outputs = read_outputs(target, drafter, prompts, decoding)

    # 1. Tokens a step and acceptance by position, as decoded, and the first token at each position.
    steps = [
        (run.accepted[step], run.block_tokens[step])
        for run in outputs.runs
        for step in range(run.whole_blocks)
    ]
    accepted, by_chance = outputs.accepted(drafter), outputs.chance(drafter)
    rate, by_luck = float(accepted.float().mean()), float(by_chance.float().mean())
    by_position = [sum(n > i for n, _ in steps) / max(1, len(steps)) for i in range(LENGTH)]
    result: dict[str, Any] = {
        "acceptance": rate,
        "chance": by_luck,
        "tokens": len(accepted),
        "tokens_per_step": sum(emitted for _, emitted in steps) / max(1, len(steps)),
        "per_position": by_position,
    }

    # 2. Comparison with what is stated, and with the server.
    faults, remarks = list[str](), list[str]()
    weak, few = rate - by_luck < LEAST_ABOVE_CHANCE, len(accepted) < FEWEST
    shown = more(accepted, by_chance)
    # few tokens that show no life show no death: acceptance must be shown to be below
    below = fewer(float(accepted.sum()), len(accepted), min(1.0, by_luck + LEAST_ABOVE_CHANCE))
    dead = not few and below and (own_prompts or not shown)
    if args.run:
        stated = reported(args.run, outputs)
        remarks.append(f"its report has acceptance {stated:.2f} on these prompts")
        if fewer(float(accepted.sum()), len(accepted), stated):
            faults.append("it accepts less than its report says: another target, or other weights")
    if args.base_url:
        counts = server_counts(args.base_url, prompts.prompts, decoding)
        result["served"] = [count / counts.drafts for count in counts.accepted_at]
        if fewer(counts.accepted_at[0], counts.drafts, by_position[0]):
            faults.append("the server accepts less: its target, dtype or draft is another")

    # 3. Causes.
    if drafter.layers:
        folder = Checkpoint.open(args.draft).folder
        if repair := best_repair(target, folder, outputs, accepted):
            cause, repaired, shown = repair
            after = f"acceptance {repaired:.2f} after this change"
            if shown:
                faults.append(f"{cause} ({after})")
            else:
                remarks.append(f"perhaps {cause} ({after}, which so few tokens do not show)")
        remarks += notes(target, folder)
        card = folder / "README.md"
        if card.is_file() and (found := CARD.search(card.read_text(encoding="utf-8"))):
            remarks.append(f"its card has acceptance {found[1]} on other prompts")
    status, verdict = ALIVE, "alive"
    if dead or faults:
        status, verdict = DEAD, "dead" if dead else "faulty"
    elif few or weak or not shown:
        status, verdict = INCONCLUSIVE, "not known; give --prompts of its domain"
    return result | {"verdict": verdict, "exit_status": status, "faults": faults, "notes": remarks}


def as_text(result: dict[str, Any]) -> str:
    positions = " ".join(f"{share:.2f}" for share in result["per_position"])
    lines = [
        f"{result['verdict']}: acceptance rate {result['acceptance']:.2f}, by chance "
        f"{result['chance']:.2f} ({result['tokens']} tokens)",
        f"{result['tokens_per_step']:.2f} tokens a step; accepted up to position: {positions}",
    ]
    if "served" in result:
        shares = " ".join(f"{share:.2f}" for share in result["served"])
        lines.append(f"in the server, accepted up to position: {shares}")
    lines += [f"fault: {fault}" for fault in result["faults"]]
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])


def main(argv: list[str]) -> int:
    args = parse(argv)
    try:
        result = check(args)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_COUNTERS if isinstance(error, ServerError) else BAD_INPUT
    print(json.dumps(result) if args.json else as_text(result))
    return int(result["exit_status"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
