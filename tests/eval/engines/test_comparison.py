"""The order in which contenders do their work, and what is left when one of them fails."""

import itertools
import zlib
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest

from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.comparison import Comparison
from eval.engines.contender import Contender, Task, runs_already
from eval.engines.load import WARM_UP, passes, timed_pass
from eval.engines.server import ServerError
from eval.engines.visits import take_turns, there_and_back
from eval.engines.vllm import VllmServer
from eval.prompts import Prompt, PromptSet
from eval.reporting.fields import Load
from tests.fake_vllm import TEXT, Constant

PROMPTS = PromptSet("made up", [Prompt(str(i), prompt=f"say {i}") for i in range(4)], [])
GREEDY = Decoding(Sampling(), frozenset(), 20)


def told(visits):
    """Visits as text: contender and numbers of outputs, ! where it judges, passes after a bar."""
    marks = {"outputs": "{}", "judge": "!", "passes": "|{}"}
    return " ".join(
        "ABC"[visit.contender] + "".join(marks[stage].format(i) for stage, i in visit.tasks)
        for visit in visits
    )


def test_servers_that_run_at_once_take_turns():
    assert told(take_turns(3, [[0], [1], [2], [3]], 2)) == (
        "A0 B0 C0 B1 C1 A1 C2 A2 B2 A3 B3 C3 A! A|0 B|0 C|0 B|1 C|1 A|1"
    )


def test_servers_that_run_one_at_a_time_go_there_and_back():
    assert told(there_and_back(3, [[0], [1, 2]], 2)) == (
        "A012|0 B012|0 C012|0 C345|1 B345|1 A!345|1"
    )
    assert told(there_and_back(2, [[0, 1]], 2, starts=3)) == "A01|0 B01|0 B23|1 A!23|1 A45 B45"
    assert told(there_and_back(2, [[0]], 0, starts=1)) == "A0 B0 A!"


def compared(servers, order=take_turns, loads=(), running=None):
    clients = [VllmServer(server.url) for server in servers]
    running = running or [runs_already(client) for client in clients]
    comparison = Comparison(
        [Contender(context, str(i)) for i, context in enumerate(running)],
        Task(PROMPTS, GREEDY, loads=[Load(concurrency=n) for n in loads]),
    )
    comparison.run(order)
    return comparison


def pairs(comparison):
    return [comparison.pairs(draft) for draft in comparison.drafting]


@pytest.mark.parametrize(("order", "times"), [(take_turns, 1), (there_and_back, 2)])
def test_each_start_decodes_all_prompts_and_its_passes(fake, order, times):
    servers = [fake(1), fake(2), fake(3)]
    comparison = compared(servers, order, [2])
    assert pairs(comparison) == [[0, 1, 2, 3]] * 2
    for server in servers:
        lengths = [body["max_tokens"] for body in server.streamed]
        assert lengths.count(20) == 4 * times + 2 * (2 + 10 + 2)  # 2 passes
        at_load = lengths[lengths.index(WARM_UP) :]
        assert at_load[:6] == [WARM_UP] * 2 + [20] * 4  # a server's first batches compile kernels
    expected = dict(enumerate(passes(Load(concurrency=2), PROMPTS.prompts, GREEDY.seed)))
    for contender in comparison.contenders:
        assert {i: done.asked for i, done in contender.passes.items()} == expected
    for length, draft in enumerate(comparison.drafting, 2):
        assert comparison.failures(draft) == []
        assert comparison.divergent(draft) == []
        ((point,), overloads, reason) = comparison.by_load(draft)
        assert (point["concurrency"], point["requests"], reason) == (2, 20, "")
        assert overloads == []
        assert point["mean_acceptance_length"].mean == length


@pytest.mark.parametrize(
    ("seconds", "grouped", "count"),
    [(None, 1, 20), (4, 1, 11), (12, 1, 13), (400, 1, 20), (4, 2, 20)],
)
def test_all_decode_as_many_prompts_as_the_first_visit_has_time_for(
    fake, monkeypatch, seconds, grouped, count
):
    """A visit has a quarter of the seconds. Once there is an interval, each prompt takes one."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks))
    monkeypatch.setattr("eval.engines.comparison.time", clock)
    prompts = [Prompt(str(i), prompt=f"say {i}", group=str(i // grouped)) for i in range(20)]
    many = PromptSet("made up", prompts, [])
    servers = [fake(1), fake(2)]
    facts = {"path": "D", "form": "", "vocabulary": {}, "gamma": 2, "gamma_policy": ""}
    contenders = [
        Contender(runs_already(VllmServer(server.url)), str(i), facts | {"missing": {}})
        for i, server in enumerate(servers)
    ]
    comparison = Comparison(contenders, Task(many, GREEDY, seconds=seconds))
    comparison.run(there_and_back)
    assert pairs(comparison) == [[*range(count)]]
    assert [len(server.streamed) for server in servers] == [2 * count] * 2
    log = comparison.log(comparison.drafting[0])
    assert len(log.runs) == len(log.again) == count
    assert "prompts" not in log.missing


@pytest.mark.parametrize(("order", "times"), [(take_turns, 1), (there_and_back, 2)])
def test_each_turn_follows_the_servers_own_outputs(fake, order, times):
    """After a divergence the prompts of a later turn differ, so its output is not compared."""
    servers = [fake(1), fake(3), fake(3, model=Constant([7, *TEXT]))]
    turns = [{"role": "user", "content": text} for text in ("Hi.", "Why?", "Oh.")]
    prompts = [Prompt(str(i), messages=turns[:1], follow_ups=["Why?", "Oh."]) for i in range(2)]
    for server in servers:
        server.model.ids = lambda body: [zlib.crc32(str(body["messages"]).encode())]
    facts = {"path": "D", "form": "", "vocabulary": {}, "gamma": None, "gamma_policy": ""}
    contenders = [
        Contender(runs_already(VllmServer(server.url)), str(i), facts | {"missing": {}})
        for i, server in enumerate(servers)
    ]
    comparison = Comparison(contenders, Task(PromptSet("made up", prompts, []), GREEDY))
    comparison.run(order)
    for server in servers:
        words = {"role": "assistant", "content": "".join(map(chr, server.model.text[:20]))}
        asked = [body["messages"] for body in server.streamed]
        for sent in ([0], [0, words, 1], [0, words, 1, words, 2]):
            messages = [turns[turn] if isinstance(turn, int) else turn for turn in sent]
            assert asked.count(messages) == 2 * times
    assert pairs(comparison) == [[*range(6)]] * 2
    same, other = (comparison.log(draft).about["lossless"] for draft in comparison.drafting)
    assert (same["prompts"], same["divergences"]) == (6, [])
    assert (other["prompts"], len(other["divergences"])) == (2, 2)


@pytest.mark.parametrize(
    ("order", "failing", "responses", "left"),
    [
        (take_turns, 1, 2, [[0, 1], [0, 1, 2, 3]]),  # a draft's failure is its own
        (take_turns, 0, 2, [[0, 1], [0, 1]]),  # without the baseline nothing is compared
        (there_and_back, 1, 1, [[0], [0, 1, 2, 3]]),
        (there_and_back, 1, 2, [[0, 1], [0, 1, 2, 3]]),  # at the last two
        (there_and_back, 0, 1, [[0], [0]]),
        (there_and_back, 0, 3, [[0, 1, 2], [0, 1, 2]]),
        (there_and_back, 0, 6, [[0, 1, 2, 3], [0, 1, 2, 3]]),  # its second start
    ],
)
def test_outputs_from_before_a_failure_and_those_of_others_stay(
    fake, order, failing, responses, left
):
    servers = [fake(1), fake(2), fake(3)]
    servers[failing].refuses_after = responses
    comparison = compared(servers, order)
    assert pairs(comparison) == left
    failing_one = [comparison.baseline, *comparison.drafting][failing]
    if responses == 3:  # one prompt of four
        assert [*comparison.left_out] == [3]
    else:
        failure = comparison.failures(failing_one)[0]
        assert f"after {responses % 4} of 4 prompts" in failure
        assert "answered 400" in failure
        assert comparison.left_out == {}
    if order is there_and_back and failing == 0:
        assert len(servers[2].streamed) == 2 * len(left[1])  # no vain work


@pytest.mark.parametrize("order", [take_turns, there_and_back])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("alive", [True, False])
def test_a_failure_at_a_load_costs_this_load_alone(fake, monkeypatch, order, failing, alive):
    """Also if the server has to be started again."""
    servers = [fake(1), fake(3), fake(2)]
    clients = [VllmServer(server.url) for server in servers]
    started = [0, 0, 0]

    @contextmanager
    def running(number):
        started[number] += 1
        down[number] = False
        yield clients[number]

    def failing_pass(engine, asked, decoding):
        if asked.load.concurrency == 4 and engine is clients[failing]:
            down[failing] = not alive
            raise ServerError("broke off")
        return timed_pass(engine, asked, decoding)

    down = [False] * 3
    for number, client in enumerate(clients):
        monkeypatch.setattr(client, "is_up", lambda number=number: not down[number])
    monkeypatch.setattr("eval.engines.comparison.timed_pass", failing_pass)
    contexts = [partial(running, i) for i in range(3)]
    comparison = compared(servers, order, [1, 4, 8], contexts)
    assert pairs(comparison) == [[0, 1, 2, 3]] * 2
    ends_here = order is take_turns and not alive  # a running server is not started again
    measured = [[p["concurrency"] for p in comparison.by_load(d)[0]] for d in comparison.drafting]
    of_failing = [1] if ends_here else [1, 8]
    assert measured == [of_failing, of_failing if failing == 0 else [1, 4, 8]]
    reason = comparison.by_load(comparison.drafting[0])[2]
    assert reason.startswith("at 4 requests at a time: broke off")
    if order is there_and_back:
        assert started[failing] == (2 if alive else 3)


@pytest.mark.parametrize("order", [take_turns, there_and_back])
@pytest.mark.parametrize("refusing", [0, 1])
def test_a_refused_prompt_leaves_all_contenders(fake, order, refusing):
    servers = [fake(1), fake(3), fake(2)]
    servers[refusing].refused = "say 2"
    comparison = compared(servers, order, [2] if refusing == 0 or order is take_turns else [])
    assert pairs(comparison) == [[0, 1, 3]] * 2
    assert [*comparison.left_out] == [2]
    assert "answered 400" in comparison.left_out[2]
    for contender in (comparison.baseline, *comparison.drafting):
        assert comparison.failures(contender) == []
        prompts = [prompt.id for each in contender.passes.values() for prompt in each.asked.prompts]
        assert "2" not in prompts
    if refusing == 0 and order is there_and_back:
        assert not any(body["prompt"] == "say 2" for body in servers[1].streamed)


@pytest.mark.parametrize(
    ("failing", "first", "last", "left"),
    [
        (1, 1, 2, []),  # its first visit
        (1, 2, 3, [0, 1, 2, 3]),  # its second visit
        (0, 2, 3, [0, 1, 2, 3]),
        (0, 1, 2, []),
        (1, 1, 1, [0, 1, 2, 3]),  # once
        (0, 2, 2, [0, 1, 2, 3]),
    ],
)
def test_a_server_that_does_not_start(fake, failing, first, last, left):
    """A start that failed is tried once more. first, last: starts that fail."""
    servers, started = [fake(1), fake(3), fake(3)], [0, 0, 0]

    @contextmanager
    def start(number):
        started[number] += 1
        if number == failing and first <= started[number] <= last:
            raise ServerError("no memory")
        yield VllmServer(servers[number].url)

    comparison = compared(servers, there_and_back, (), [partial(start, i) for i in range(3)])
    assert pairs(comparison) == [left, [0, 1, 2, 3] if failing else left]
    failed = comparison.failures([comparison.baseline, *comparison.drafting][failing])
    assert failed == (["no memory"] if first < last else [])
    assert started[2] == (0 if failing == 0 and first == 1 < last else 2)


def test_prompts_that_an_engine_renders_otherwise_are_named(fake):
    """As llama-server's templates do: each fake reads 1, 2, 3."""
    for ids, other in ([[1, 2, 3]] * 2, []), ([[1, 2, 3], [1, 2]], ["b"]), ([[0], [0, 0]], None):
        prompts = [Prompt(name, prompt="x") for name in "ab"]
        contenders = [
            Contender(runs_already(VllmServer(fake(step).url)), name)
            for step, name in ((1, ""), (3, "draft"))
        ]
        comparison = Comparison(contenders, Task(PromptSet("", prompts, ids), GREEDY))
        comparison.run(take_turns)
        assert comparison.other_ids() == other
