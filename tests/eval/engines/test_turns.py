"""The order of servers' tasks, whether they run at once or one at a time."""

from contextlib import contextmanager
from functools import partial

import pytest

from eval.engines.server import ServerError
from eval.engines.turns import Task, Turns


class Made:
    """Turns of three servers, which are letters, and what happened, in order.

    The last of the tasks are those that come behind the look at what was made.
    """

    def __init__(self, count=4, more=2, fails=()):
        self.said, self.running, self.most, self.fails = [], set(), 0, list(fails)
        tasks = [Task(partial(self.do, place), f"at {place}") for place in range(count + more)]
        starts = [partial(self.start, name) for name in "ABC"]
        self.turns = Turns(starts, tasks, count, self.check, self.end)

    @contextmanager
    def start(self, name):
        self.running.add(name)
        self.most = max(self.most, len(self.running))
        yield name
        self.running.remove(name)

    def check(self, number, server):
        assert "ABC"[number] == server
        self.said.append(f"{server}?")

    def end(self, number, server):
        assert "ABC"[number] == server
        self.said.append(f"{server}!")

    def do(self, place, server):
        assert server in self.running
        self.said.append(f"{server}{place}")
        if (server, place) in self.fails:
            raise ServerError("gone")
        return f"{server}{place}"


def whole(count):
    return [[f"{server}{place}" for server in "ABC"] for place in range(count)]


def test_servers_that_run_at_once_take_turns():
    made = Made()
    made.turns.together()
    assert " ".join(made.said) == (
        "A? B? C? A0 B0 C0 B1 C1 A1 C2 A2 B2 A3 B3 C3 B! C! A! B4 C4 A4 C5 A5 B5"
    )
    assert made.most == 3
    assert made.turns.made == whole(6)
    assert (made.turns.whole, made.turns.failure) == ([0, 1, 2, 3, 4, 5], "")


def test_servers_that_run_one_at_a_time_go_there_and_back():
    made = Made()
    made.turns.one_after_another()
    assert " ".join(made.said) == (
        "A? A0 A2 A4 B? B0 B2 B! B4 C? C0 C2 C1 C3 C! C4 C5 B? B1 B3 B! B5 A? A1 A3 A! A5"
    )
    assert made.most == 1
    assert made.turns.made == whole(6)


@pytest.mark.parametrize(
    ("order", "fails", "left"),
    [
        ("together", [("B", 2)], [0, 1]),
        ("together", [("A", 5)], [0, 1, 2, 3]),
        ("together", [("B", 0)], []),
        ("one_after_another", [("B", 2)], [0, 1, 3]),
        ("one_after_another", [("B", 1)], [0, 2]),
        ("one_after_another", [("A", 1)], [0, 2]),
        ("one_after_another", [("C", 5)], [0, 1, 2, 3]),
        ("one_after_another", [("C", 0), ("A", 1)], []),
    ],
)
def test_what_a_failure_leaves(order, fails, left):
    made = Made(fails=fails)
    getattr(made.turns, order)()
    (_, first), *_ = fails
    assert made.turns.failure == f"at {first}: gone"
    assert [place for place in made.turns.whole if place < 4] == left
    assert "A!" in made.said  # what is left is looked at
    assert not made.running


@pytest.mark.parametrize("order", ["together", "one_after_another"])
def test_a_server_that_does_not_start_is_an_error(order):
    made = Made()

    def refused(number, server):
        raise ServerError("refused")

    made.turns.check = refused
    with pytest.raises(ServerError, match="refused"):
        getattr(made.turns, order)()


@pytest.mark.parametrize("server", ["A", "B"])
def test_one_that_does_not_start_for_its_other_half_leaves_the_first(server):
    made = Made()

    def once(number, started):
        if started == server and f"{server}?" in made.said:
            raise ServerError("no memory")
        made.said.append(f"{started}?")

    made.turns.check = once
    made.turns.one_after_another()
    assert (made.turns.whole, made.turns.failure) == ([0, 2, 4], "no memory")
    assert ("A!" in made.said) == (server == "B")
