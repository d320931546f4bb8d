"""Whether two servers' greedy texts part at a tie, by the servers' own log-probabilities.

Servers give no fp32 to ask, and the one that drafts cannot be its own judge. So the server without
a draft judges: it writes its text again, a token a forward, and reads the same text in one forward;
what the two differ by at most is the error of its forwards. Then it reads the text with the draft,
as the server that wrote that text does.
"""

from __future__ import annotations

import math
from typing import Any

from eval.engines.server import UNPENALISED, Server, ServerError, token_ids

TOP = 5  # log-probabilities asked for at each token; every such server gives as many
# Nats, whatever the error is. bf16 logits of 32 to 64 stand 0.25 apart; in honest texts gaps of up
# to three such steps were seen (docs/metrics.md).
WIDEST_TIE = 1.0

# Token id -> log-probability, of the likeliest tokens at a place and of the one that stands there.
Row = dict[int, float]


def explain(
    judge: Server,
    drafting: list[Row] | str,
    prompt: list[int],
    texts: tuple[list[int], list[int]],
    at: int,
) -> dict[str, Any]:
    """`{gap, error, tie, why}` of a `Divergence`, in nats: texts part at their token number `at`.

    judge: the server without a draft. drafting: `read_text` of the other one, for its own text.
    texts: the judge's, and that one.

    A tie: both servers see the two tokens no further apart than twice the judge's error, and to the
    judge every token of the drafted text from there on is as near to the likeliest one. So a draft
    that is not verified is found even if the texts part at a tie first, and nothing that `drafting`
    says can widen what passes.
    """
    if isinstance(drafting, str):
        return {"why": f"not explained: {drafting}"}
    try:
        written, single = _asked(judge, prompt, max_tokens=len(texts[0]))
        again = _read(judge, prompt, written)
        read = _read(judge, prompt, texts[1])
    except ServerError as failure:
        return {"why": f"not explained: {failure}"}
    error = max(
        abs(row[token] - other[token])
        for row, other in zip(single, again, strict=True)
        for token in row.keys() & other.keys()
    )
    pair, rows = (texts[0][at], texts[1][at]), (read[at], drafting[at])
    if not all(token in row for row in rows for token in pair):
        return {"error": error, "why": f"not both tokens are among the {TOP} likeliest"}
    gap = max(abs(row[pair[0]] - row[pair[1]]) for row in rows)
    behind = [max(row.values()) - row[token] for row, token in zip(read, texts[1], strict=True)]
    worst = max(range(at, len(behind)), key=behind.__getitem__)
    widest = min(2 * error, WIDEST_TIE)
    why = ""
    if widest < gap <= 2 * error:
        why = f"a gap over {WIDEST_TIE} is more than rounding"
    elif gap <= widest < behind[worst]:
        why = f"its token {worst} lies {behind[worst]:.2g} nats behind the target's choice"
    return {"gap": gap, "error": error, "tie": max(gap, behind[worst]) <= widest, "why": why}


def read_text(server: Server, prompt: list[int], text: list[int]) -> list[Row] | str:
    """A row for each token of a text, as one forward reads it after the prompt; or why not."""
    if not prompt:
        return "the server did not tell the prompt's token ids"
    try:
        return _read(server, prompt, text)
    except ServerError as failure:
        return str(failure)


def _read(server: Server, prompt: list[int], text: list[int]) -> list[Row]:
    # the token that the server writes after it is of no use
    tokens, rows = _asked(server, prompt + text, max_tokens=1, echo=True)
    place = slice(len(prompt), len(prompt) + len(text))
    if tokens[place] != text:
        raise ServerError(f"{server.url} echoes other tokens than it was sent")
    return rows[place]


def _asked(server: Server, ids: list[int], **request: Any) -> tuple[list[int], list[Row]]:
    """Tokens that the server writes after `ids`, with echo=True behind `ids`; a row for each.

    Raises ServerError where it has none for a token; for a prompt's first nobody has.
    """
    body = {"model": server.model, "prompt": ids, "temperature": 0.0, **UNPENALISED, **request}
    asked = {"logprobs": TOP, "return_tokens_as_token_ids": True}
    answer = server.ask("/v1/completions", body | asked)
    try:
        logprobs = answer["choices"][0]["logprobs"]
        tokens = token_ids(logprobs["tokens"])
        tops = [top or {} for top in logprobs["top_logprobs"]]
        rows = [dict(zip(token_ids(top), map(float, top.values()), strict=True)) for top in tops]
        told = [
            token in row and all(map(math.isfinite, row.values()))
            for token, row in zip(tokens, rows, strict=True)
            if row
        ]
    except (LookupError, TypeError, AttributeError, ValueError):
        told = []
    if not told or not all(told) or len(told) < len(tokens) - request.get("echo", False):
        raise ServerError("the server gave no log-probabilities")
    return tokens, rows
