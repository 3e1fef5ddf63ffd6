"""A drafter in a process of its own: it dies, hangs and raises, and only drafts are lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import cache
from typing import cast

import pytest

from cospec.core.types import Request
from cospec.errors import InvalidInput, ModelError
from cospec.execution.pipelined import Pipelined
from cospec.models.toy import ToyModel
from cospec.process_utils import others
from cospec.runtime import drafter_process_executor as module
from cospec.runtime.drafter_process_executor import ProcessExecutor
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.sampling_params import SamplingParams
from harness.overlap import under
from harness.remote_drafters import VOCAB, doomed, refusing, toy
from harness.toys import make_request, run_all, tokens_of, toy_engine

PARAMS = SamplingParams(temperature=0.9, max_tokens=60, seed=4)


def target() -> ToyModel:
    return ToyModel(VOCAB, order=2, seed=1, sharpness=2.0)


def requests() -> list[Request]:
    return [make_request(f"r{n}", (n % VOCAB, 1, 2, 1), PARAMS) for n in range(4)]


@cache
def plain() -> dict[str, tuple[int, ...]]:
    return tokens_of(run_all(toy_engine(target(), None), requests()))


def gone(pid: int) -> bool:
    """Whether a process ended, at once or within some seconds."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat", encoding="ascii") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.02)
    return False


def test_what_a_drafter_says_of_itself_and_how_long_it_worked() -> None:
    executor = ProcessExecutor(toy("itself"))
    drafter = DrafterProxy(executor)
    assert (drafter.name, drafter.samples, drafter.drafts_ahead) == ("draft_model", True, True)
    assert not drafter.reads_hidden_states and drafter.weights() == {}
    engine = under(toy_engine(target(), drafter), "sequential", "process")
    assert tokens_of(run_all(engine, requests())) == plain()
    assert sum(engine.metrics().accepted_tokens.values()) > 60 and executor.busy > 0
    pid = executor.pid
    executor.close()
    assert gone(pid)
    assert drafter.propose([], []) == [], "a closed one drafts nothing"


def test_a_pool_sends_weights_with_drafts_so_reads_send_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = ProcessExecutor(toy("pool"))
    drafter = DrafterProxy(executor)
    assert drafter.member_names is not None
    first = drafter.weights()
    assert first == pytest.approx(dict.fromkeys(drafter.member_names, 1 / len(drafter.member_names)))
    engine = under(toy_engine(target(), drafter), "sequential", "process")
    for request in requests():
        engine.add(request)
    end = time.monotonic() + 30
    while drafter.weights() == first and time.monotonic() < end:
        engine.step()
        if not engine.has_work:
            for request in requests():
                engine.add(request)

    def refuse(method: str, *args: object) -> None:
        raise AssertionError(f"{method} was sent")

    monkeypatch.setattr(executor, "submit", refuse)
    weights = engine.metrics().drafter_weights
    assert weights != first and sum(weights.values()) == pytest.approx(1.0)
    monkeypatch.undo()
    executor.close()
    assert drafter.weights() == weights, "what was sent last"


@pytest.mark.parametrize("execution_mode", ["sequential", "draft-ahead", "draft-for-outcomes"])
def test_a_drafter_that_is_killed_costs_its_drafts(execution_mode: str, caplog: pytest.LogCaptureFixture) -> None:
    executor = ProcessExecutor(toy("ngram"))
    first = executor.pid
    engine = under(toy_engine(target(), DrafterProxy(executor)), execution_mode, "process")
    found: dict[str, tuple[int, ...]] = {}
    for turn in range(2):
        for request in requests():
            engine.add(request)
        for step in range(1000):
            if step == 4 and turn == 0:
                os.kill(first, signal.SIGKILL)
            if not engine.has_work:
                break
            for event in engine.step():
                found[event.id] = found.get(event.id, ()) + event.tokens
            engine.check_integrity()
        assert found == plain()
        found.clear()
        drafted = sum(engine.metrics().draft_tokens.values())
        if turn == 0:
            assert "signal 9" in caplog.text
            executor.attend(60.0)  # until the new one is there
            assert executor.present and executor.pid != first and "is back" in caplog.text
            before = drafted
    assert drafted > before, "the second one drafts"
    executor.close()


@pytest.mark.parametrize(("end", "cause"), [("raise", "has ended with exit code 1"), ("hang", "did not answer for")])
def test_one_that_raises_or_hangs_is_replaced(
    end: str, cause: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STARTS", 2)
    executor = ProcessExecutor(doomed(3, end))
    engine = under(toy_engine(target(), DrafterProxy(executor)), "pipelined", "process")
    if end == "hang":  # the dispatcher waits as long as the executor, as with the default limits
        monkeypatch.setattr(module, "HUNG_SECONDS", 1.0)
        monkeypatch.setattr(cast(Pipelined, engine.execution_mode).dispatcher, "timeout", 1.0)
    assert tokens_of(run_all(engine, requests())) == plain()
    assert cause in caplog.text
    executor.attend(60.0)
    assert executor.present
    for _ in range(3):  # the second one ends like the first, and there is no third
        assert tokens_of(run_all(engine, requests())) == plain()
    assert not executor.present and "nothing is drafted any more" in caplog.text
    assert gone(executor.pid)


def test_without_a_drafter_no_sequence_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The half of the sequences that a pipelined round leaves out is left out for its drafts alone."""
    monkeypatch.setattr(module, "STARTS", 1)
    executor = ProcessExecutor(doomed(0, "kill"))
    engine = under(toy_engine(target(), DrafterProxy(executor)), "pipelined", "process")
    assert tokens_of(run_all(engine, requests())) == plain()
    assert engine.metrics().steps <= 60 + 4


def test_drafter_that_cannot_be_built() -> None:
    with pytest.raises(ModelError, match=r"^The drafter has no weights\.$"):
        ProcessExecutor(refusing)


SCRIPT = """
import os, signal, sys, time
from cospec.runtime.drafter_process_executor import ProcessExecutor
from harness.remote_drafters import doomed, toy
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore, and inherit
executor = ProcessExecutor(doomed(0, "hang") if sys.argv[1] == "busy" else toy("ngram"))
print(executor.pid, flush=True)
if sys.argv[1] == "raise":
    raise ZeroDivisionError
if sys.argv[1] != "end":
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["raise", "SIGKILL", "SIGINT"])
def test_no_process_is_left(how: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SCRIPT, how]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    ) as engine:
        assert engine.stdout is not None
        pid = int(engine.stdout.readline())
        if how == "SIGINT":
            os.killpg(engine.pid, signal.SIGINT)  # as a terminal does
        elif how.startswith("SIG"):
            engine.send_signal(getattr(signal, how))
        assert gone(pid)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not let a process choose its cores")
def test_a_drafter_keeps_to_its_cores() -> None:
    core = max(os.sched_getaffinity(0))
    executor = ProcessExecutor(toy("ngram"), {core})
    assert os.sched_getaffinity(executor.pid) == {core}
    executor.close()
    if len(os.sched_getaffinity(0)) > 1:
        assert core not in others({core})
    with pytest.raises(InvalidInput, match=r"drafter_cores is \[.*\].*the target needs one too"):
        others(os.sched_getaffinity(0))
    with pytest.raises(InvalidInput, match="drafter_cores"):
        others({10_000})


def test_a_system_without_a_choice_of_cores_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(InvalidInput, match=r"drafter_cores is \[1\]"):
        others({1})
