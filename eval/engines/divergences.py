"""Whether two servers' greedy outputs diverge at a near-tie, by the servers' log-probabilities.

A server cannot be asked for fp32 logits, and the server with a draft is not trusted to judge its
own output. So the server without a draft is the judge. It generates its output again, one token per
forward, and reads the same output in one forward; the largest difference of the two is the error of
its forwards. Then both servers read the output with the draft.
"""

from __future__ import annotations

import math
from typing import Any

from eval.engines.server import UNPENALISED, Server, ServerError, token_ids

TOP = 5  # log-probabilities that are requested at each token; all such servers return 5
# The largest gap of a near-tie in nats, for any error. bf16 logits between 32 and 64 are 0.25
# apart; gaps of up to three such steps were seen in verified outputs (docs/metrics.md).
WIDEST_TIE = 1.0

# Token id -> log-probability, of the likeliest tokens at a position and of its actual token.
Logprobs = dict[int, float]


def explain(
    judge: Server,
    drafting: list[Logprobs] | str,
    prompt: list[int],
    outputs: tuple[list[int], list[int]],
    at: int,
) -> dict[str, Any]:
    """`{gap, error, tie, why}` of a `Divergence`, in nats. at: index of the first other token.

    judge: the server without a draft. drafting: `read_output` of the server with the draft, for its
    own output. outputs: the judge's output, then the other server's.

    Near-tie: for both servers, the gap between the two tokens is at most twice the judge's error
    and at most WIDEST_TIE; for the judge, every later token of the drafted output is as close to
    the likeliest token. So an output that was not verified is found even if it diverges at a
    near-tie first. `drafting` cannot make the bounds wider.
    """
    if isinstance(drafting, str):
        return {"why": f"not explained: {drafting}"}
    try:
        written, single = _asked(judge, prompt, max_tokens=len(outputs[0]))
        again = _read(judge, prompt, written)
        read = _read(judge, prompt, outputs[1])
    except ServerError as failure:
        return {"why": f"not explained: {failure}"}
    error = max(
        abs(one[token] - other[token])
        for one, other in zip(single, again, strict=True)
        for token in one.keys() & other.keys()
    )
    target, drafted = outputs[0][at], outputs[1][at]
    if not all({target, drafted} <= seen.keys() for seen in (read[at], drafting[at])):
        return {"error": error, "why": f"not both tokens are among the {TOP} likeliest"}
    gap = max(abs(seen[target] - seen[drafted]) for seen in (read[at], drafting[at]))
    behind = [max(seen.values()) - seen[i] for seen, i in zip(read, outputs[1], strict=True)]
    worst = max(range(at, len(behind)), key=behind.__getitem__)
    widest = min(2 * error, WIDEST_TIE)
    why = ""
    if widest < gap <= 2 * error:
        why = f"a gap over {WIDEST_TIE} is more than rounding"
    elif gap <= widest < behind[worst]:
        why = f"its token {worst} lies {behind[worst]:.2g} nats behind the target's choice"
    return {"gap": gap, "error": error, "tie": max(gap, behind[worst]) <= widest, "why": why}


def read_output(server: Server, prompt: list[int], output: list[int]) -> list[Logprobs] | str:
    """The Logprobs at each token of an output, from one forward after the prompt; or why not."""
    if not prompt:
        return "the server did not return the prompt's token ids"
    try:
        return _read(server, prompt, output)
    except ServerError as failure:
        return str(failure)


def _read(server: Server, prompt: list[int], output: list[int]) -> list[Logprobs]:
    # max_tokens=1, because servers generate at least one token; it is ignored
    tokens, logprobs = _asked(server, prompt + output, max_tokens=1, echo=True)
    positions = slice(len(prompt), len(prompt) + len(output))
    if tokens[positions] != output:
        raise ServerError(f"{server.url} returned other tokens than the request had")
    return logprobs[positions]


def _asked(server: Server, ids: list[int], **request: Any) -> tuple[list[int], list[Logprobs]]:
    """The tokens that the server generates after `ids` (echo=True: `ids` first), and Logprobs each.

    Raises ServerError if a token has none; only the first token of a prompt may have none.
    """
    body = {"model": server.model, "prompt": ids, "temperature": 0.0, **UNPENALISED, **request}
    asked = {"logprobs": TOP, "return_tokens_as_token_ids": True}
    answer = server.ask("/v1/completions", body | asked)
    try:
        sent = answer["choices"][0]["logprobs"]
        tokens = token_ids(sent["tokens"])
        tops = [top or {} for top in sent["top_logprobs"]]
        logprobs = [
            dict(zip(token_ids(top), map(float, top.values()), strict=True)) for top in tops
        ]
        told = [
            token in seen and all(map(math.isfinite, seen.values()))
            for token, seen in zip(tokens, logprobs, strict=True)
            if seen
        ]
    except (LookupError, TypeError, AttributeError, ValueError):
        told = []
    if not told or not all(told) or len(told) < len(tokens) - request.get("echo", False):
        raise ServerError("the server returned no log-probabilities")
    return tokens, logprobs
