"""What more different tokens would bring: a fit of held-out alpha over the first epoch.

In the first epoch every row is new, so alpha after n of its tokens is that of a run with n
different ones, seen once. Two curves are fitted to it: one towards a ceiling, c - b n^-k, and one
that rises with log n for ever. What each says of 3 and 10 times the tokens, less what it says of
all of them, is added to the alpha that the whole run reached: it is taken for granted that more
tokens lift what later epochs reach by as much as they lift the first.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from distill.held_out import HELD_OUT, best_of, read_followed
from eval.reporting.report import Forecast, HeldOutPoint, Share

FEWEST = 4  # points of the first epoch
DRAWS = 2000
POWERS = np.linspace(0.05, 1.0, 20)
METHOD = (
    "alpha of held-out prompts over the first epoch, in which all tokens are new, fitted by a "
    "power law towards a ceiling and by a line in log tokens; what they gain from 1x to 3x and "
    "10x, added to what the run reached. Mean: of both curves; interval: 95% of both, bootstrap "
    "over held-out prompts. Taken for granted: more tokens lift later epochs as much as the first."
)

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def forecast(folder: Path) -> Forecast | str:
    """The forecast of a run from what it has seen of its held-out prompts, or why there is none."""
    followed = read_followed(folder / HELD_OUT)
    seen, best = followed.seen, best_of(followed.seen)
    if best is None:
        return (
            "no prompts were held out and followed: too few training prompts or steps, answers "
            "from a server, or held_out_prompts 0"
        )
    tokens = seen[-1].tokens
    # until the tokens stop growing; the last of these is a whole epoch
    first = [one for i, one in enumerate(seen) if i == 0 or one.tokens > seen[i - 1].tokens]
    if len(first) < FEWEST:
        return (
            f"{len(first)} measurements in the first epoch, and {FEWEST} are needed: "
            "train for more steps"
        )
    sums = np.array([[row[:3] for row in one.sums] for one in [*first, best]])  # [P + 1, rows, 3]
    count = sums.shape[1]
    draws = np.random.default_rng(0).integers(count, size=(DRAWS, count))
    picked = np.concatenate([np.arange(count)[None], draws])  # the first is the sample itself
    alphas = sums[:, picked, 0].sum(-1) / sums[:, picked, 2].sum(-1)  # [P + 1, draws + 1]
    sizes = np.array([one.tokens for one in first], dtype=float)

    def of_draws(values: Array) -> Share:
        """values: of the sample, then of each draw [..., draws + 1]."""
        mean = float(values[..., 0].mean())
        low, high = np.quantile(values[..., 1:], [0.025, 0.975])
        return Share(mean=mean, ci95=(min(low, mean), max(high, mean)), n=count)

    def at(times: int) -> Share:
        both = np.stack([gain(sizes, alphas[:-1], times) for gain in (_to_ceiling, _in_log)])
        return of_draws(np.clip(alphas[-1] + both.clip(min=0), 0, 1))

    return Forecast(
        tokens=tokens,
        alpha=of_draws(alphas[-1]),
        trained_alpha=None,
        at_3x=at(3),
        at_10x=at(10),
        gamma=followed.gamma,
        curve=[HeldOutPoint(step=s.step, tokens=s.tokens, alpha=s.alpha, tau=s.tau) for s in seen],
        method=METHOD,
    )


def _in_log(sizes: Array, alphas: Array, times: int) -> Array:
    """b log(times) of a + b log n, fitted to alphas [P, D] at sizes [P] by least squares."""
    slope: Array = _fitted(np.log(sizes), alphas)[0][1]
    return slope * np.log(times)


def _to_ceiling(sizes: Array, alphas: Array, times: int) -> Array:
    """What c - b n^-k gains from the last size to so many times it, k the best of POWERS."""
    scaled = sizes / sizes[-1]
    fits = [_fitted(-(scaled**-power), alphas) for power in POWERS]
    best = np.argmin([error for _, error in fits], axis=0)
    slopes = np.choose(best, [slope for (_, slope), _ in fits])
    return slopes * (1 - times ** -POWERS[best])


def _fitted(x: Array, y: Array) -> tuple[tuple[Array, Array], Array]:
    """Intercepts and slopes [D] of lines through y [P, D] at x [P], and their squared errors."""
    centred = x - x.mean()
    slope = (centred[:, None] * y).sum(0) / (centred**2).sum()
    intercept = y.mean(0) - slope * x.mean()
    error = ((y - intercept - slope * x[:, None]) ** 2).sum(0)
    return (intercept, slope), error
