"""Distil a draft for a target on one domain, and report what it is worth.

    accelerate launch distill/train.py --recipe code              embedded models, CPU, no Hub
    accelerate launch distill/train.py --recipe code --dry_run true    check and price, then stop
    accelerate launch distill/train.py --recipe legal --num_train_epochs 8

Run again after an interruption, the same command goes on where it stopped.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from accelerate import PartialState

from align.atomic import DiskFullError
from distill.dry_run import price_run
from distill.pipeline import Run
from distill.recipe import help_text, load_recipe
from eval.measuring.journal import INTERRUPTED
from eval.reporting.text import print_summary


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return 0
    try:
        run = Run(load_recipe(argv))
        run.check_vocabularies()
        run.collect_prompts()
        if run.recipe.dry_run:
            return price_run(run)
        # one process answers and prepares, the others wait and read what it left on disk
        with PartialState().main_process_first():
            run.answer_prompts()
            if run.recipe.coverage_curve:
                run.print_coverage()
                return 0
            run.prepare_draft()
        run.distil_draft()
        if PartialState().is_main_process:
            run.export_draft()
            print_summary(run.evaluate())
            print(
                f"\nDraft: {run.folder / 'draft'}\nReport: {run.folder / 'report' / 'report.html'}"
            )
    except (ValueError, DiskFullError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on.", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
