"""A report's numbers under the names, and by the definitions, of other tools.

    python -m eval.convert report.json --to vllm
    python -m eval.convert outputs/code/report/report.json --to spec-bench --draft untuned
    python -m eval.convert --schema > report.schema.json

Prints JSON, with --schema the JSON Schema of a report. Each tool counts in another way
(docs/metrics.md has the table); where our log cannot give a number exactly, `differs` says why.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
from typing import Any

from eval.reporting.report import DraftReport, PromptSums, ReportError, read_report, report_schema

CUT = "cut last blocks are not counted here; the tool counts them, as far as they were accepted"


def _decoded(draft: DraftReport) -> list[PromptSums]:
    """The rows of the prompts that were decoded, with their target calls."""
    rows = [row for row in draft.per_prompt if row.calls is not None]
    if not rows:
        raise ReportError(
            "this report holds no log of target calls (an engine behind a server does not tell "
            "them); convert a report of engine torch, or use --to vllm for a server's counters"
        )
    return rows


def _sums(rows: list[PromptSums], fields: str) -> list[Any]:
    return [sum(getattr(row, field) for row in rows) for field in fields.split()]


def to_vllm(draft: DraftReport) -> dict[str, Any]:
    """The counters of vLLM's /metrics, and what its log makes of them.

    acceptance_per_position is a share of all drafts, of those too that were shorter.
    """
    if counters := draft.counters:
        drafts, drafted = counters.num_drafts, counters.num_draft_tokens
        accepted, differs = counters.num_accepted_tokens, []
        per_position = counters.acceptance_per_position
    else:
        drafted, accepted = _sums(_decoded(draft), "drafted accepted")
        places = draft.per_position
        if not places:
            raise ReportError("this draft drafted nothing, so vLLM would have no counters of it")
        drafts = places[0].drafts
        per_position = [place.marginal.mean * place.drafts / drafts for place in places]
        differs = [CUT]
    return {
        "vllm:spec_decode_num_drafts_total": drafts,
        "vllm:spec_decode_num_draft_tokens_total": drafted,
        "vllm:spec_decode_num_accepted_tokens_total": accepted,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": [
            round(share * drafts) for share in per_position
        ],
        "draft_acceptance_rate": accepted / drafted,
        "mean_acceptance_length": 1 + accepted / drafts,
        "acceptance_per_position": per_position,
        "output_throughput": draft.tokens_per_s.speculative.mean,
        "mean_ttft_ms": draft.ttft_ms.speculative.mean,
        "differs": differs,
    }


def to_sglang(draft: DraftReport) -> dict[str, Any]:
    """SGLang's meta_info of each request, and their totals.

    spec_accept_length is completion_tokens / spec_verify_ct: the prefill token and cut blocks are
    in. spec_accept_rate is accepted over drafted tokens, without the bonus token.
    """

    def meta(part: list[PromptSums]) -> dict[str, Any]:
        tokens, calls, drafted, accepted = _sums(part, "tokens calls drafted accepted")
        return {
            "completion_tokens": tokens,
            "spec_verify_ct": calls,
            "spec_accept_length": tokens / calls if calls else None,
            "spec_accept_rate": accepted / drafted if drafted else None,
            "spec_accept_token_num": accepted,
            "spec_draft_token_num": drafted,
        }

    rows = _decoded(draft)
    return {
        **meta(rows),
        "requests": [{"id": row.id, **meta([row])} for row in rows],
        "differs": [f"spec_accept_rate, spec_accept_token_num, spec_draft_token_num: {CUT}"],
    }


def to_spec_bench(draft: DraftReport) -> dict[str, Any]:
    """Spec-Bench's answer rows and its summary.

    Mean accepted tokens has the bonus token in (plain decoding is 1.00); tokens a second are means
    over the questions of each one's own, and the speed-up their ratio.
    """
    rows = _decoded(draft)
    speculative, baseline = (
        sum(getattr(row, tokens) / getattr(row, seconds) for row in rows) / len(rows)
        for tokens, seconds in (("tokens", "seconds"), ("baseline_tokens", "baseline_seconds"))
    )
    emitted, blocks = _sums(rows, "block_tokens blocks")
    return {
        "#Mean accepted tokens": emitted / blocks,
        "Tokens per second": speculative,
        "Tokens per second for the baseline": baseline,
        "Speedup ratio": speculative / baseline,
        "answers": [
            {
                "question_id": row.id,
                "category": row.category,
                "choices": [
                    {
                        "decoding_steps": [row.calls],
                        "new_tokens": [row.tokens],
                        "wall_time": [row.seconds],
                    }
                ],
            }
            for row in rows
        ],
        "differs": [
            f"#Mean accepted tokens: {CUT}",
            "tokens are the decoder's own; Spec-Bench counts the baseline's again from its text",
        ],
    }


TOOLS = {"vllm": to_vllm, "sglang": to_sglang, "spec-bench": to_spec_bench}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.convert", description="A report's numbers as another tool has them."
    )
    parser.add_argument("report", type=Path, nargs="?", metavar="REPORT", help="a report.json")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--to", choices=sorted(TOOLS))
    what.add_argument("--schema", action="store_true", help="print the JSON Schema of a report")
    parser.add_argument("--draft", help="default: the last draft of the report")
    args = parser.parse_args(argv)
    if args.schema:
        print(json.dumps(report_schema(), indent=1))
        return 0
    if args.report is None:
        parser.error("--to needs the report.json to convert")
    try:
        report = read_report(args.report)
        name = args.draft or report.last[0]
        if name not in report.drafts:
            raise ReportError(
                f"no draft {name!r} in this report; it has {', '.join(report.drafts)}"
            )
        if report.engine == "transformers":
            raise ReportError(
                "this report holds no log of target calls as other tools have it: assisted "
                "generation drafts for the prefill, too; convert a report of engine torch"
            )
        converted = TOOLS[args.to](report.drafts[name])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"draft": name, **converted}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
