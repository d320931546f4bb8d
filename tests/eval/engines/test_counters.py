"""Reading vLLM's counts, as a vLLM 0.32 wrote them, and what only resembles them.

vllm-metrics.prom and vllm-answers.jsonl are of one server with --per-request-spec-decode-metrics
detailed and gamma 3, which had answered 60 prompts of HumanEval: the lines of its /metrics that
concern speculation, and its answers, all but the first two cut down to their counts.
vllm-metrics-legal.prom is the same server's after 60 licence clauses more.
"""

import pytest

from eval.engines.counters import CountersError, between, growth, read_series, total

TWO_ENGINES = """
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="m"} 2.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e+09
process_start_time_seconds 1.6e+09
vllm:spec_decode_num_draft_tokens 36
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 1.2e+01
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 8.0
"""


def page(engine, drafts, *accepted):
    label = f'engine="{engine}",model_name="target"'
    start = "vllm:spec_decode_num"
    return "\n".join(
        [
            f"{start}_drafts_total{{{label}}} {drafts}.0",
            f"{start}_draft_tokens_total{{{label}}} {drafts * len(accepted)}.0",
            f"{start}_accepted_tokens_total{{{label}}} {sum(accepted)}.0",
            *(
                f'{start}_accepted_tokens_per_pos_total{{{label},position="{i}"}} {count}.0'
                for i, count in enumerate(accepted)
            ),
            "",
        ]
    )


def test_counters_are_read_whatever_their_suffix_and_summed_over_engines():
    assert total(read_series(TWO_ENGINES)) == (12, 36, 12, [8, 4])
    assert total(read_series("vllm:num_requests_running 0.0\n")) is None


@pytest.mark.parametrize("prefix", ["ray_vllm:", "ray_vllm_", "vllm_"])
def test_counters_of_ray_and_of_collectors_are_the_same(prefix):
    assert total(read_series(TWO_ENGINES.replace("vllm:", prefix))) == (12, 36, 12, [8, 4])
    assert total(read_series(TWO_ENGINES.replace("vllm:", f"my_{prefix}"))) is None


OLD, NEW = "process_start_time_seconds 1.7e9\n", "process_start_time_seconds 1.8e9\n"


@pytest.mark.parametrize(
    ("before", "now", "counts"),
    [
        (page(0, 100, 60, 30), page(0, 150, 80, 45), (50, 100, 35, [20, 15])),
        ("", page(0, 150, 80, 45), (150, 300, 125, [80, 45])),
        # a counter fell, or is gone because the draft is shorter: the process was started again
        (page(0, 100, 60, 30), page(0, 150, 80, 20), (150, 300, 100, [80, 20])),
        (page(0, 100, 60, 30), page(0, 150, 80), (150, 150, 80, [80])),
        # idle, wholly or at a position: it was not
        (page(0, 100, 60, 0), page(0, 150, 80, 0), (50, 100, 20, [20, 0])),
        (page(0, 100, 60, 0), page(0, 100, 60, 0), (0, 0, 0, [0, 0])),
        # started again, and has drafted more than before
        (page(0, 1000, 600) + OLD, page(0, 1500, 700) + NEW, (1500, 1500, 700, [700])),
        (page(0, 1500, 700) + NEW, page(0, 1600, 720) + NEW, (100, 100, 20, [20])),
    ],
)
def test_counts_between_two_readings(before, now, counts):
    assert total(growth(read_series(before), read_series(now))) == counts


def test_another_replica_is_older():
    new, old = read_series(page(0, 1500, 700) + NEW), read_series(page(0, 1000, 600) + OLD)
    with pytest.raises(CountersError):
        growth(new, old)
    assert between(new, old) is None
