"""A report's numbers under the names, and by the definitions, of other tools.

    python -m eval.convert report.json --to vllm
    python -m eval.convert outputs/code/report/report.json --to spec-bench --draft untuned

Prints JSON. Each tool counts in another way (docs/metrics.md has the table); where our log cannot
give a tool's number exactly, `differs` says why.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import json
from typing import Any

from eval.reporting.report import ReportError, read_report

CUT = "cut last blocks are not counted here; the tool counts them, as far as they were accepted"


def _timed(draft: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of the prompts that were decoded, with their target calls."""
    rows = [row for row in draft["per_prompt"] if "calls" in row]
    if not rows:
        raise ReportError(
            "this report holds no log of target calls (an engine behind a server does not tell "
            "them); convert a report of engine torch, or use --to vllm for a server's counters"
        )
    return rows


def to_vllm(draft: dict[str, Any]) -> dict[str, Any]:
    """The counters of vLLM's /metrics, and what its log makes of them.

    acceptance_per_position is a share of all drafts, of those too that were shorter.
    """
    if counters := draft["counters"]:
        drafts, drafted = counters["num_drafts"], counters["num_draft_tokens"]
        accepted, differs = counters["num_accepted_tokens"], []
        per_position = counters["acceptance_per_position"]
    else:
        rows = _timed(draft)
        drafts = draft["per_position"][0]["drafts"]
        drafted, accepted = (sum(row[key] for row in rows) for key in ("drafted", "accepted"))
        per_position = [
            place["marginal"]["mean"] * place["drafts"] / drafts for place in draft["per_position"]
        ]
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
        "output_throughput": draft["tokens_per_s"]["speculative"]["mean"],
        "mean_ttft_ms": draft["ttft_ms"]["speculative"]["mean"],
        "differs": differs,
    }


def to_sglang(draft: dict[str, Any]) -> dict[str, Any]:
    """SGLang's meta_info of each request, and their totals.

    spec_accept_length is completion_tokens / spec_verify_ct: the prefill token and cut blocks are
    in. spec_accept_rate is accepted over drafted tokens, without the bonus token.
    """
    rows = _timed(draft)

    def meta(part: list[dict[str, Any]]) -> dict[str, Any]:
        tokens, calls, drafted, accepted = (
            sum(row[key] for row in part) for key in ("tokens", "calls", "drafted", "accepted")
        )
        return {
            "completion_tokens": tokens,
            "spec_verify_ct": calls,
            "spec_accept_length": tokens / calls if calls else None,
            "spec_accept_rate": accepted / drafted if drafted else None,
            "spec_accept_token_num": accepted,
            "spec_draft_token_num": drafted,
        }

    return {
        **meta(rows),
        "requests": [{"id": row["id"], **meta([row])} for row in rows],
        "differs": [f"spec_accept_rate, spec_accept_token_num, spec_draft_token_num: {CUT}"],
    }


def to_spec_bench(draft: dict[str, Any]) -> dict[str, Any]:
    """Spec-Bench's answer rows and its summary.

    Mean accepted tokens has the bonus token in (plain decoding is 1.00); tokens a second are means
    over the questions of each one's own, and the speed-up their ratio.
    """
    rows = _timed(draft)

    def speed(tokens: str, seconds: str) -> float:
        return sum(row[tokens] / row[seconds] for row in rows) / len(rows)

    speculative, baseline = speed("tokens", "seconds"), speed("baseline_tokens", "baseline_seconds")
    return {
        "#Mean accepted tokens": sum(row["block_tokens"] for row in rows)
        / sum(row["blocks"] for row in rows),
        "Tokens per second": speculative,
        "Tokens per second for the baseline": baseline,
        "Speedup ratio": speculative / baseline,
        "answers": [
            {
                "question_id": row["id"],
                "category": row["category"],
                "choices": [
                    {
                        "decoding_steps": [row["calls"]],
                        "new_tokens": [row["tokens"]],
                        "wall_time": [row["seconds"]],
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
    parser.add_argument("report", type=Path, metavar="REPORT", help="a report.json")
    parser.add_argument("--to", choices=sorted(TOOLS), required=True)
    parser.add_argument("--draft", help="default: the last draft of the report")
    args = parser.parse_args(argv)
    try:
        drafts = read_report(args.report)["drafts"]
        name = args.draft or list(drafts)[-1]
        if name not in drafts:
            raise ReportError(f"no draft {name!r} in this report; it has {', '.join(drafts)}")
        converted = TOOLS[args.to](drafts[name])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"draft": name, **converted}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
