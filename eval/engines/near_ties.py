"""Whether two servers' greedy outputs diverge at a near-tie, by the servers' log-probabilities.

A server cannot be asked for fp32 logits, and the server with a draft is not trusted to judge its
own output. So the server without a draft is the judge. It generates its output again, one token per
forward, and reads the same output in one forward; the largest difference of the two is the error of
its forwards. Then both servers read the output with the draft.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, Protocol

from eval.engines.server import ServerError

TOP = 5  # log-probabilities that are requested at each token; all such servers return 5
# The largest gap of a near-tie in nats, for any error. bf16 logits between 32 and 64 are 0.25
# apart; gaps of up to three such steps were seen in verified outputs.
WIDEST_TIE = 1.0

# Token id -> log-probability, of the likeliest tokens at a position and of its actual token.
Logprobs = dict[int, float]


class Judge(Protocol):
    """A server without a draft that judges. Methods raise ServerError if they have no Logprobs."""

    @abstractmethod
    def written(self, prompt: list[int], count: int) -> tuple[list[int], list[Logprobs]]:
        """Its greedy output of `count` tokens, one a forward, and the Logprobs at each."""

    @abstractmethod
    def read_wide(self, prompt: list[int], output: list[int]) -> list[Logprobs]:
        """The Logprobs at tokens of an output, from forwards of several tokens; {}: not read."""

    @abstractmethod
    def read_from(self, prompt: list[int], output: list[int], at: int) -> list[Logprobs]:
        """The Logprobs at each token of an output; tokens before `at` may have none."""


def explain(
    judge: Judge,
    drafting: list[Logprobs] | str | None,
    prompt: list[int],
    outputs: tuple[list[int], list[int]],
    at: int,
) -> dict[str, Any]:
    """Fields of a `Divergence`, in nats. at: index of the first other token.

    drafting: Logprobs of the server with the draft for its own output; a text: why there are none;
    None: its engine has none. outputs: the judge's output, then the other server's.

    Near-tie: for both servers, the gap between the two tokens is at most twice the judge's error
    and at most WIDEST_TIE; for the judge, every later token of the drafted output is as close to
    the likeliest token. So an output that was not verified is found even if it diverges at a
    near-tie first. `drafting` cannot make the bounds wider. A token that is not among the TOP
    likeliest is no near-tie. A divergence is not judged if a server gives no log-probabilities,
    or if the output is too short to measure the error.
    """
    try:
        written, single = judge.written(prompt, len(outputs[0]))
        again = judge.read_wide(prompt, written)
        read = judge.read_from(prompt, outputs[1], at)
    except ServerError as failure:
        return not_judged(str(failure))
    errors = [
        abs(first[token] - second[token])
        for first, second in zip(single, again, strict=True)
        for token in first.keys() & second.keys()
    ]
    error = max(errors, default=None)
    target, drafted = outputs[0][at], outputs[1][at]
    readings = [read[at], *([drafting[at]] if isinstance(drafting, list) else [])]
    if not all({target, drafted} <= seen.keys() for seen in readings):
        return {"error": error, "why": f"not both tokens are among the {TOP} likeliest"}
    gap = max(abs(seen[target] - seen[drafted]) for seen in readings)
    behind = {
        i: max(read[i].values()) - read[i].get(token, -math.inf)
        for i, token in enumerate(outputs[1])
        if i >= at
    }
    worst = max(behind, key=behind.__getitem__)
    if error is None and max(gap, behind[worst]) <= WIDEST_TIE:
        return {"gap": gap} | not_judged("the output is too short to measure the error of forwards")
    bound = math.inf if error is None else 2 * error
    widest = min(bound, WIDEST_TIE)
    why = ""
    if widest < gap <= bound:
        why = f"a gap over {WIDEST_TIE} is more than rounding"
    elif gap <= widest < behind[worst]:
        why = f"its token {worst} lies {behind[worst]:.2g} nats behind the target's choice"
        if math.isinf(behind[worst]):
            why = f"its token {worst} is not among the {TOP} likeliest"
    tie = max(gap, behind[worst]) <= widest
    if tie and isinstance(drafting, str):
        return {"gap": gap, "error": error} | not_judged(drafting)
    return {"gap": gap, "error": error, "tie": tie, "why": why}


def not_judged(reason: str) -> dict[str, Any]:
    """Fields of a `Divergence` that could not be judged."""
    return {"judged": False, "why": f"not judged: {reason}"}
