"""Does what you serve still accept the draft as its report says?

    python -m eval.drift report.json --metrics http://localhost:8000
    python -m eval.drift report.json --metrics http://localhost:8000 --since last.prom
    python -m eval.drift report.json --metrics answers.jsonl
    python -m eval.drift report.json --prompts new.jsonl

Counters are vLLM's: a server's /metrics or a file of it, or its answers with their own counts, one
a line (docs/serving.md). Exit status: 0 as measured; 1 moved away; 2 for input that cannot be used,
and for too few drafts to tell.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
from tempfile import TemporaryDirectory

import numpy as np
import torch

from align.atomic import atomic_file
from align.process import use_machine
from eval.decoding.build import build_decoder
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.engines.counters import growth, read_requests, read_series, total
from eval.engines.vllm import VllmServer
from eval.measuring import metrics
from eval.measuring.agreement import measure_agreement, target_texts
from eval.measuring.cost import best_gamma
from eval.measuring.evaluation import context_length
from eval.measuring.intervals import Measured
from eval.measuring.journal import Journal
from eval.measuring.traffic import (
    FEW_PROMPTS,
    Acceptance,
    Difference,
    NotComparable,
    answered_acceptance,
    compare,
    compare_alpha,
    counted_acceptance,
    drafts_lacking,
    measured_acceptance,
)
from eval.prompts import PromptSet, load_prompts, render_all
from eval.reporting.report import DraftReport, Report, ReportError, read_report

PRICED_PROMPTS = 40
REMEDY = (
    "Draft and report no longer fit what is served: --prompts, on recent ones, says what training "
    "could bring."
)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.drift", description=__doc__.split("\n")[0]
    )
    parser.add_argument("report", type=Path, metavar="REPORT", help="a report.json")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--metrics",
        metavar="URL|FILE",
        help="a vLLM server, what its /metrics said, or its answers with their counts, one a line",
    )
    what.add_argument(
        "--prompts", help="of new texts: alpha on these, and what an adapter for them could bring"
    )
    parser.add_argument(
        "--since",
        type=Path,
        metavar="FILE",
        help="what /metrics said before: only what came since counts. With a URL the file is kept "
        "up to date, and made where there is none",
    )
    parser.add_argument("--draft", help="of the report; default: tuned, or its last")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(argv)
    if args.since is not None and args.metrics is None:
        parser.error("--since goes with --metrics")
    return args


# --- Counters ---


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read as text: {error}") from None


def _traffic(source: str, since: Path | None, report: Acceptance) -> Acceptance:
    """What a server or a file has counted."""
    is_server = source.startswith(("http://", "https://"))
    if is_server:
        text = VllmServer(source.rstrip("/").removesuffix("/metrics")).text("/metrics")
    else:
        text = _read(Path(source))
        if text.lstrip().startswith("{"):
            if since is not None:
                raise NotComparable("--since is for counters; answers count by themselves.")
            answers = [(of, np.array(row, dtype=np.float64)) for of, row in read_requests(text)]
            return answered_acceptance(answers, report)
    series = read_series(text)
    if total(series) is None:
        raise NotComparable(
            f"{source} has no counters vllm:spec_decode_*: the server has no draft, "
            f"--disable-log-stats is set, or it is no vLLM."
        )
    if since is not None and (since.exists() or not is_server):
        series = growth(read_series(_read(since)), series)
    counts = total(series)
    assert counts is not None
    traffic = counted_acceptance(counts, report)
    # few drafts stay in the next reading: where little is served, hours add up
    if is_server and since is not None and not drafts_lacking(report, traffic):
        with atomic_file(since) as file:
            file.writelines(f"{line}\n" for line in text.splitlines() if "spec_decode" in line)
    return traffic


def _line(difference: Difference) -> str:
    parts = (
        f"{difference.name:24} report {difference.report.mean:.3f}",
        f"traffic {difference.traffic.mean:.3f}",
        f"{difference.by:+.3f} ± {difference.chance:.3f}",
        "MOVED" if difference.moved else "as measured",
    )
    return "   ".join(parts)


def check_traffic(draft: DraftReport, report: Report, source: str, since: Path | None) -> int:
    """Compare, print, and return the exit status. Raises ValueError for input of no use."""
    promised = measured_acceptance(draft, report.engine)
    traffic = _traffic(source, since, promised)
    differences = compare(promised, traffic)
    for difference in differences:
        print(_line(difference))
    # bare counters know no categories
    apart = promised.categories.keys() ^ traffic.categories.keys() if traffic.categories else ()
    for name in sorted(apart):
        where = "report" if name in traffic.categories else "traffic"
        print(f"category {name}: not compared, fewer than {FEW_PROMPTS} prompts in the {where}")
    drafts = f"{promised.positions[0].drafts:,.0f} and {traffic.positions[0].drafts:,.0f} drafts"
    if moved := [difference for difference in differences if difference.moved]:
        way = "less" if moved[0].by < 0 else "more"
        print(
            f"\nmoved away ({drafts}): {way} is accepted than measured at "
            f"{', '.join(difference.name for difference in moved)}. {REMEDY}"
        )
        return 1
    if lacking := drafts_lacking(promised, traffic):
        raise NotComparable(
            f"too few drafts to tell ({drafts}): no change shows, but one that the report "
            f"could tell may hide. About {lacking:,} more are needed."
        )
    print(f"\nas measured ({drafts})")
    return 0


# --- New prompts ---


def _alpha_on(spec: str, path: str, report: Report, device: str) -> Measured:
    """alpha of a draft on other prompts, decoded as the report's were."""
    use_machine()
    how = report.decoding
    target = load_target(report.target, getattr(torch, report.dtype), device, 64)
    prompts = load_prompts(spec, PRICED_PROMPTS)
    if len(prompts) < FEW_PROMPTS:
        raise NotComparable(f"{spec} has {len(prompts)} prompts; give {FEW_PROMPTS} at least.")
    room = target.model.config.get_text_config().max_position_embeddings
    ids = render_all(prompts, target.tokenizer, room, how.max_new_tokens)
    target.decoder = build_decoder(target.model, context_length(ids, how.max_new_tokens, 0))
    sampling = Sampling(how.temperature, how.top_k, how.top_p)
    decoding = Decoding(sampling, target.stops, how.max_new_tokens)
    drafters = {path: load_drafter(path, target)}
    with torch.inference_mode():
        texts = target_texts(target, ids, decoding)
    with TemporaryDirectory() as folder, Journal(Path(folder) / "journal") as journal:
        prompt_set = PromptSet(spec, prompts, ids)
        by_draft, _ = measure_agreement(target, drafters, prompt_set, texts, decoding, journal)
    return metrics.alpha(by_draft[path])


def price(draft: DraftReport, report: Report, prompts: str, device: str) -> int:
    """Print what an adapter for the prompts could bring, and return the exit status."""
    if draft.alpha is None or draft.costs is None:
        raise NotComparable(
            f"the report of {report.engine} has no alpha to compare with: give a report of engine "
            f"torch, as a training run writes it."
        )
    there = _alpha_on(prompts, draft.path, report, device)
    difference = compare_alpha(draft.alpha, there)
    print(_line(difference))
    costs = draft.costs.steps()
    now, then = (best_gamma(mean, costs)[1] for mean in (there.mean, draft.alpha.mean))
    print(f"expected speed-up {then:.2f}x at the report's alpha, {now:.2f}x here")
    if not difference.moved:
        print("\nas measured")
        return 0
    if there.mean < draft.alpha.mean:
        print(
            f"\nmoved away. An adapter trained on such prompts is worth {then - now:.2f}x more, if "
            f"it comes as far there as this draft did on its own prompts."
        )
    else:
        print("\nmoved away, to texts that are easier to draft: no adapter is needed.")
    return 1


def main(argv: list[str]) -> int:
    try:
        args = parse(argv)
        report = read_report(args.report)
        name = args.draft or report.tuned[0]
        if name not in report.drafts:
            raise ReportError(
                f"no draft {name!r} in this report; it has {', '.join(report.drafts)}"
            )
        draft = report.drafts[name]
        if args.prompts is not None:
            return price(draft, report, args.prompts, args.device)
        return check_traffic(draft, report, args.metrics, args.since)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
