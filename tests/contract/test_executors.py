"""The contract of ``interfaces.Executor``, which every executor has to keep."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from cospec.cluster.nodes.executor import NodeExecutor
from cospec.core.interfaces import Executor
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.errors import DrafterLost
from cospec.registry import EXECUTORS
from cospec.rng.random_streams import StreamKind
from cospec.runtime.drafter_process_executor import ProcessExecutor
from cospec.runtime.in_process_executors import InlineExecutor
from cospec.runtime.messages import DrafterInfo
from cospec.sampling_params import SamplingParams
from harness.nodes import hub_for_tests, thread_node
from harness.remote_drafters import Recording, TcpWorker, recipe_of
from harness.waiting import until


def placed(name: str, log: Path) -> Executor:
    """The executor of that name around a recording drafter."""
    drafter = EXECUTORS.load(name).place(recipe_of(partial(Recording, log)))
    return drafter.executor or InlineExecutor(drafter)


MADE: dict[str, Callable[[Path], Executor]] = {
    **{name: partial(placed, name) for name in EXECUTORS if name != "node"},
    "node": lambda log: NodeWithThread(log),
    "tcp": lambda log: ProcessExecutor(partial(Recording, log), launch=TcpWorker),
}
CONCURRENT = [name for name in MADE if name != "inline"]
PARAMS = SamplingParams(temperature=0)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A file with a line for each call that a drafter got."""
    return tmp_path / "calls"


class NodeWithThread(NodeExecutor):
    """The executor of a drafter on a node, which runs in a thread of this process."""

    def __init__(self, log: Path) -> None:
        hub = hub_for_tests(16)
        slot = hub.add("toy", "draft_model", samples=False)
        super().__init__(hub, slot, DrafterInfo.of(Recording(log)))
        self._ending = ExitStack()
        self._ending.enter_context(thread_node(hub, [("toy", Recording(log))], 16))
        until(lambda: self.present)

    def close(self) -> None:
        super().close()
        self._ending.close()


@pytest.fixture
def executor(request: pytest.FixtureRequest, log: Path) -> Iterator[Executor]:
    made = MADE[request.param](log)
    yield made
    made.close()


each = pytest.mark.parametrize("executor", MADE, indirect=True)
concurrent = pytest.mark.parametrize("executor", CONCURRENT, indirect=True)


def context(id: str, *tokens: int, assumed: int = 0) -> DraftContext:
    return DraftContext(id, list(tokens), 1, PARAMS, 0, StreamKind.TARGET, assumed)


def drafts(executor: Executor, *contexts: DraftContext, timeout: float = 60.0) -> list[Draft]:
    found: list[Draft] = executor.submit("propose", contexts, [DraftBudget(8, 8)] * len(contexts)).result(timeout)
    return found


def present(executor: Executor) -> bool:
    """Whether the executor can be asked, now or after a restart."""
    end = time.monotonic() + 60
    while not executor.present and time.monotonic() < end:
        executor.submit("free", ["unknown"])
        time.sleep(0.02)
    return executor.present


@each
def test_calls_are_made_in_the_order_of_submission(executor: Executor, log: Path) -> None:
    assert executor.present and executor.busy == 0 and executor.load == 0
    futures = []
    for number in range(20):
        futures.append(executor.submit("propose", [context(f"r{number}", 1)], [DraftBudget(1, 1)]))
        executor.submit("commit", [Commit(f"r{number}", 1, (2,), (), 1)])
        executor.submit("free", [f"r{number}"])
    assert [future.result(60)[0].id for future in futures] == [f"r{number}" for number in range(20)]
    assert all(future.done() for future in futures)
    drafts(executor, context("last", 1))
    calls = [line for number in range(20) for line in (f"propose r{number}", "commit", f"free r{number}")]
    assert log.read_text().splitlines() == [*calls, "propose last"]
    assert executor.busy > 0


@each
def test_a_drafter_sees_the_tokens_of_each_context(executor: Executor) -> None:
    """Also where a context shrinks to other tokens, and where an id is used again."""
    seen = [
        context("a", 1, 2),
        context("a", 1, 2, 3, 4, assumed=2),
        context("a", 1, 2, 5),
        context("a", 1, 2, 5, 6, 7, 8),
    ]
    for one in seen:
        assert drafts(executor, one)[0].tokens == tuple(one.tokens)
    executor.submit("free", ["a"])
    assert drafts(executor, context("a", 9), context("b", 8))[0].tokens == (9,)


@each
def test_an_exception_ends_its_call_and_no_later_one(executor: Executor) -> None:
    with pytest.raises((ZeroDivisionError, DrafterLost)):
        drafts(executor, context("raise", 1))
    assert present(executor)
    assert drafts(executor, context("a", 1, 2))[0].tokens == (1, 2)


@concurrent
def test_a_call_that_is_late_times_out_and_is_answered_later(executor: Executor) -> None:
    late = executor.submit("propose", [context("sleep", 1)], [DraftBudget(1, 1)])
    with pytest.raises(TimeoutError):
        late.result(0.05)
    assert not late.done() and executor.load == 1
    assert drafts(executor, context("next", 2))[0].id == "next", "an answer belongs to its own call"
    assert late.done() and late.result(0)[0].id == "sleep"
    assert executor.load == 0


@each
def test_a_closed_executor_loses_what_it_is_asked(executor: Executor) -> None:
    drafts(executor, context("a", 1))
    executor.close()
    executor.close()
    assert not executor.present
    with pytest.raises(DrafterLost):
        drafts(executor, context("a", 1))


@concurrent
def test_an_executor_is_closed_while_it_is_busy(executor: Executor, log: Path) -> None:
    work = executor.submit("propose", [context("sleep", 1)], [DraftBudget(1, 1)])
    until(lambda: log.exists() and "propose sleep" in log.read_text())
    later = executor.submit("propose", [context("later", 1)], [DraftBudget(1, 1)])
    started = time.monotonic()
    executor.close()
    assert time.monotonic() - started < 10
    with pytest.raises(DrafterLost):
        later.result(1)
    try:  # a thread finishes its call, a process is ended
        assert work.result(1)[0].id == "sleep"
    except DrafterLost:
        assert isinstance(executor, ProcessExecutor | NodeExecutor)
    assert "later" not in log.read_text()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("cospec-drafter")]


@pytest.mark.parametrize("executor", ["process", "tcp"], indirect=True)
def test_a_killed_process_loses_its_calls_and_a_new_one_serves(executor: Executor) -> None:
    assert isinstance(executor, ProcessExecutor)
    drafts(executor, context("a", 1, 2))
    first = executor.pid
    stale = executor.submit("propose", [context("sleep", 1)], [DraftBudget(1, 1)])
    os.kill(first, signal.SIGKILL)
    with pytest.raises(DrafterLost):
        stale.result(30)
    assert present(executor) and executor.pid != first
    assert drafts(executor, context("a", 1, 2, 3))[0].tokens == (1, 2, 3), "the new process knows nothing of before"
    with pytest.raises(DrafterLost):
        stale.result(0)
