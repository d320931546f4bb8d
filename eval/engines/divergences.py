"""Whether two servers' greedy outputs diverge at a tie, by the servers' own log-probabilities.

Servers give no fp32 to ask, and the one that drafts cannot be its own judge. So the server without
a draft judges: it writes its output again, a token a forward, and reads the same output in one
forward; what the two differ by at most is the error of its forwards. Then it reads the output with
the draft, as the server that wrote that output does.
"""

from __future__ import annotations

import math
from typing import Any

from eval.engines.server import UNPENALISED, Server, ServerError, token_ids

TOP = 5  # log-probabilities asked for at each token; every such server gives as many
# Nats, whatever the error is. bf16 logits of 32 to 64 stand 0.25 apart; in honest outputs gaps of
# up to three such steps were seen (docs/metrics.md).
WIDEST_TIE = 1.0

# Token id -> log-probability, of the likeliest tokens at a position and of the one that is there.
Logprobs = dict[int, float]


def explain(
    judge: Server,
    drafting: list[Logprobs] | str,
    prompt: list[int],
    outputs: tuple[list[int], list[int]],
    at: int,
) -> dict[str, Any]:
    """`{gap, error, tie, why}` of a `Divergence`, in nats: outputs diverge at token number `at`.

    judge: the server without a draft. drafting: `read_output` of the other one, for its own output.
    outputs: the judge's, and that one.

    A tie: both servers see the two tokens no further apart than twice the judge's error, and to the
    judge every token of the drafted output from there on is as near to the likeliest one. So a
    draft that is not verified is found even if the outputs diverge at a tie first, and nothing that
    `drafting` says can widen what passes.
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
    """At each token of an output, as one forward reads it after the prompt; or why not."""
    if not prompt:
        return "the server did not tell the prompt's token ids"
    try:
        return _read(server, prompt, output)
    except ServerError as failure:
        return str(failure)


def _read(server: Server, prompt: list[int], output: list[int]) -> list[Logprobs]:
    # the server must write one token after it, which is ignored
    tokens, logprobs = _asked(server, prompt + output, max_tokens=1, echo=True)
    positions = slice(len(prompt), len(prompt) + len(output))
    if tokens[positions] != output:
        raise ServerError(f"{server.url} echoes other tokens than it was sent")
    return logprobs[positions]


def _asked(server: Server, ids: list[int], **request: Any) -> tuple[list[int], list[Logprobs]]:
    """Tokens that the server writes after `ids`, with echo=True behind `ids`; and at each Logprobs.

    Raises ServerError where it has none for a token; for a prompt's first nobody has.
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
        raise ServerError("the server gave no log-probabilities")
    return tokens, logprobs
