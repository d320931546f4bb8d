"""The order of servers' tasks, whether they run at once or one at a time."""

from contextlib import contextmanager
from functools import partial

import pytest

from eval.engines.server import ServerError
from eval.engines.turns import Task, Turns


class Made:
    """Turns of three servers, which are letters, and what happened, in order."""

    def __init__(self, count=4, fails=()):
        self.said, self.running, self.most = [], set(), 0
        tasks = [Task(partial(self.do, place, fails), f"at {place}") for place in range(count)]
        self.turns = Turns(
            [partial(self.start, name) for name in "ABC"], tasks, self.check, self.end
        )

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

    def do(self, place, fails, server):
        assert server in self.running
        self.said.append(f"{server}{place}")
        if (server, place) in fails:
            raise ServerError("gone")
        return f"{server}{place}"


def test_servers_that_run_at_once_take_turns():
    made = Made()
    made.turns.together()
    assert " ".join(made.said) == "A? B? C? A0 B0 C0 B1 C1 A1 C2 A2 B2 A3 B3 C3 B! C! A!"
    assert made.most == 3
    assert made.turns.made == [[f"{server}{place}" for server in "ABC"] for place in range(4)]
    assert (made.turns.reached, made.turns.failure) == (4, "")


def test_one_server_at_a_time_stands_between_halves_of_the_baseline():
    made = Made()
    made.turns.one_after_another()
    assert " ".join(made.said) == ("A? A0 A2 B? B0 B1 B2 B3 B! C? C0 C1 C2 C3 C! A? A1 A3 A!")
    assert made.most == 1
    assert made.turns.made == [[f"{server}{place}" for server in "ABC"] for place in range(4)]


@pytest.mark.parametrize("order", ["together", "one_after_another"])
@pytest.mark.parametrize(
    ("fails", "reached"), [([("B", 2)], 2), ([("C", 3), ("C", 1)], 1), ([("A", 2)], 2)]
)
def test_what_was_made_before_a_failure_is_whole(order, fails, reached):
    made = Made(fails=fails)
    getattr(made.turns, order)()
    assert (made.turns.reached, made.turns.failure) == (reached, f"at {reached}: gone")
    assert all(None not in row for row in made.turns.made[:reached])
    assert made.said[-1] == "A!"  # and is looked at
    assert not made.running


@pytest.mark.parametrize("order", ["together", "one_after_another"])
def test_a_first_task_that_fails_leaves_nothing(order):
    with pytest.raises(ServerError, match="at 0: gone"):
        getattr(Made(fails=[("B", 0)]).turns, order)()


def test_a_single_task_needs_the_baseline_once_more():
    made = Made(count=1)
    made.turns.one_after_another()
    assert " ".join(made.said) == "A? A0 B? B0 B! C? C0 C! A? A!"
