"""The order in which contenders are compared: visits, each a list of tasks of one contender.

The order is fair on a machine that slows down steadily. Contenders that run at the same time take
turns at each prompt. Servers that are started one at a time decode all prompts in order, and then,
each started again, in the opposite order. The difference between a server's times on the same
prompts is what a start, or the time of the visit, changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from eval.engines.load import PASSES

TRIES = 2  # most starts of a server in a visit; the second one after a failure
OUTPUTS, JUDGE, TIMED = "outputs", "judge", "passes"
# A stage and a number: with n prompts, output n + i is that of prompt i after the second start.
# After JUDGE the baseline has explained the divergences of all drafts, and read sampled outputs.
Work = tuple[str, int]
# numbers of the prompts of each conversation
Conversations = Sequence[Sequence[int]]


class Visit(NamedTuple):
    """Tasks in one `running` context. tries: the most starts; 1: the engine runs already."""

    contender: int  # 0: the baseline
    tasks: list[Work]
    tries: int = 1


def take_turns(contenders: int, prompts: Conversations, passes: int) -> Iterator[Visit]:
    """Visits of contenders that run at the same time; the first one changes each time."""
    orders = [[*range(first, contenders), *range(first)] for first in range(contenders)]
    for i, conversation in enumerate(prompts):
        yield from (Visit(c, [(OUTPUTS, n) for n in conversation]) for c in orders[i % contenders])
    yield Visit(0, [(JUDGE, 0)])
    yield from (Visit(c, [(TIMED, i)]) for i in range(passes) for c in orders[i % contenders])


def there_and_back(
    contenders: int, prompts: Conversations, passes: int, starts: int = 2
) -> Iterator[Visit]:
    """The visits of contenders that run one at a time: A B C, C B A, A B C, and so on.

    All prompts are decoded in each visit of a contender, half of the passes in each of the first
    two. The baseline judges as soon as it runs again, because its machine's time may end.
    """
    count = sum(map(len, prompts))
    for start in range(starts):
        outputs = [(OUTPUTS, number) for number in range(start * count, (start + 1) * count)]
        timed = [(TIMED, i) for i in range(passes)[start::PASSES] if start < PASSES]
        for c in range(contenders) if start % 2 == 0 else reversed(range(contenders)):
            judged = [(JUDGE, 0)] * (c == 0 and start == 1)
            yield Visit(c, [*judged, *outputs, *timed], TRIES)
    if starts == 1:
        yield Visit(0, [(JUDGE, 0)], TRIES)
