"""Show one prompt answered by the target of a finished run, without and with the distilled draft.

    python -m eval.demo outputs/code                    a held-out prompt
    python -m eval.demo outputs/code --seed 1           another one
    python -m eval.demo outputs/code --prompt "TEXT"    your prompt
    python -m eval.demo outputs/code --prompts P        a prompt of a file or a data set

The reference decoder prints each token as soon as it is decoded, greedily. In a terminal, drafted
tokens that the target accepted are green, unless NO_COLOR is set.

Exit status: 0; 2 for input that cannot be used; 130 if interrupted.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import codecs
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory

from align import command_line
from align.command_line import AtLeastNone, Options, option
from eval.chat_template import PLACE
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import decode
from eval.decoding.prompt_run import PromptRun
from eval.measuring.evaluation import spelling
from eval.measuring.timing import WARM_UP_TOKENS, Contender, decode_undisturbed
from eval.options import RunOptions
from eval.prompts import Prompt, write_prompts
from eval.reporting.fields import read_report
from eval.reporting.verdict import basis_of, times
from eval.run import decoding_of, load, parse

GREEN, PLAIN = "\033[32m", "\033[0m"


@dataclass(frozen=True)
class DemoOptions(Options):
    run: Path = option("output folder of a training run", positional=True, metavar="RUN")
    prompt: str | None = option("text; a message if the target has a chat template", None)
    prompts: str | None = option("Hub data set, pypi: file or .jsonl; one is drawn", None)
    seed: AtLeastNone = option("draws the prompt", 42)

    def refusals(self) -> Iterator[str]:
        if self.prompt is not None and self.prompts is not None:
            yield "--prompt and --prompts exclude each other; omit one of them"


def main(argv: list[str]) -> int:
    demo = command_line.parse(DemoOptions, "python -m eval.demo", __doc__, argv)
    return command_line.exit_status(lambda: _demonstrate(demo))


def _demonstrate(demo: DemoOptions) -> None:
    report = read_report(demo.run)
    draft = report.tuned[1]
    gamma, speedup = draft.gamma or 3, report.stated_speedup(draft)
    options = ["--run", str(demo.run), "--gamma", str(gamma), "--temperature", "0"]
    options += ["--max_prompts", "1", "--seed", str(demo.seed)]
    with TemporaryDirectory() as folder:
        prompts = demo.prompts
        if demo.prompt is not None:
            prompts = f"{folder}/prompt.jsonl"
            write_prompts(prompts, [Prompt("yours", demo.prompt)])
            options += ["--instruction", PLACE]
        if prompts is not None:
            options += ["--prompts", prompts]
        show(parse(options), demo.run / "draft")
    mean = f"{times(speedup)} over {speedup.n} prompts, {basis_of(report)}"
    print(f"One prompt is an example; the report has {mean}.")


def show(args: RunOptions, folder: Path) -> None:
    """Decode one prompt without and with the draft of a folder. args: of eval.run."""
    target, prompts, _ = load(args)
    drafter = load_drafter(str(folder), target, args.strategy)
    (prompt,), (ids,) = prompts.prompts, prompts.ids
    decoding = decoding_of(args, target.stops)
    sides = [Contender(None, 0, decoding), Contender(drafter, args.gamma[0], decoding)]

    # On a GPU the warm-up is a whole output, because it has to record all CUDA graphs.
    short = min(WARM_UP_TOKENS, decoding.max_new_tokens)
    warm_up = decoding if args.device != "cpu" else replace(decoding, max_new_tokens=short)
    for side in sides:
        decode_undisturbed(target.decoder, side._replace(decoding=warm_up), prompt, ids)

    print(f"--- Prompt {prompt.id}\n{prompt.text}")
    spell, special = spelling(target)
    runs = []
    for draft, length, _ in sides:
        print("\n--- The target alone" if draft is None else "\n--- With the draft")
        on_step = printer(lambda token: b"" if token in special else spell(token))
        runs.append(decode(target.decoder, draft, prompt, ids, decoding, length, on_step))
        print()
    print_figures(*runs)


def printer(spell: Callable[[int], bytes]) -> Callable[[PromptRun], None]:
    """A function that prints the tokens of the newest speculation step, accepted ones in green."""
    colour = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    characters = codecs.getincrementaldecoder("utf-8")("replace")  # some have several tokens

    def on_step(run: PromptRun) -> None:
        emitted = run.block_tokens[-1] if run.block_tokens else run.prefill_tokens
        accepted = run.accepted[-1] if run.accepted else 0
        for number, token in enumerate(run.tokens[-emitted:]):
            text = characters.decode(spell(token))
            print(f"{GREEN}{text}{PLAIN}" if colour and number < accepted else text, end="")
        sys.stdout.flush()

    return on_step


def print_figures(alone: PromptRun, drafted: PromptRun) -> None:
    """Print tokens and seconds of both outputs, and what became of the drafted tokens."""
    print(f"\n{'':16}{'tokens':>8}{'seconds':>9}{'tokens per step':>17}")
    for name, run in (("target alone", alone), ("with the draft", drafted)):
        per_step = sum(run.block_tokens) / max(1, len(run.block_tokens))
        print(f"{name:16}{len(run.tokens):8}{run.seconds:9.2f}{per_step:17.2f}")
    speedup = alone.seconds / len(alone.tokens) / (drafted.seconds / len(drafted.tokens))
    accepted = sum(drafted.accepted)
    rejected = sum(drafted.drafted) - accepted
    same = "yes" if alone.tokens == drafted.tokens else "no"
    print(f"Speed-up {speedup:.2f}x; drafted tokens: {accepted} accepted, {rejected} rejected")
    print(f"Outputs token-identical: {same}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
