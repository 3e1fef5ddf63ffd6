"""Who is drafted and verified when, with back-pressure, and how a round is chosen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any

import pytest

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.types import BatchState, Draft, DraftBudget, DraftContext
from cospec.drafters.model import ModelDrafter
from cospec.errors import DrafterLost, InvalidInput
from cospec.execution.auto import Auto
from cospec.execution.draft_for_outcomes import DraftForOutcomes
from cospec.models.toy import ToyModel
from cospec.registry import EXECUTION_MODES as TABLE
from cospec.runtime.engine_client import EngineStatus
from cospec.runtime.in_process_executors import InlineExecutor, ThreadExecutor
from cospec.sampling_params import SamplingParams
from cospec.server.metrics import ServerMetrics
from harness.in_flight import with_steps_in_flight
from harness.methods import override
from harness.overlap import MODES, PARAMS, Recording, engine_under, under
from harness.toys import ScriptedDrafter, make_request, run_all, tokens_of, toy_engine, with_pool


class Assuming(ScriptedDrafter):
    """Writes down after how many assumed tokens each draft follows."""

    def __init__(self) -> None:
        super().__init__([0, 1])
        self.assumed: list[int] = []

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        self.assumed += [context.assumed for context in contexts]
        return super().propose(contexts, budgets)


@pytest.mark.parametrize(("steps", "requests", "ahead"), [(4, 1, True), (4, 2, False), (4, 6, False), (1, 2, True)])
def test_drafts_of_ready_requests_come_before_drafts_ahead(steps: int, requests: int, ahead: bool) -> None:
    """With several steps in flight, other requests need the drafter during a verification."""
    drafter = Assuming()
    made = with_steps_in_flight(engine_under("draft-ahead", drafter, requests), steps)
    while made.metrics().requests_running + made.metrics().requests_waiting == requests:
        made.step()
        assert ahead or not any(drafter.assumed)
    assert len(drafter.assumed) > 10
    assert any(drafter.assumed) is ahead
    made.close()


def test_a_single_sequence_is_not_starved() -> None:
    for execution_mode in ("pipelined", "draft-ahead", "draft-for-outcomes", "auto"):
        events = run_all(
            under(toy_engine(ToyModel(4), Recording(), k=2), execution_mode), [make_request("r", (0, 1), PARAMS)]
        )
        assert set(events) == {"r"}, "it ended"


@pytest.mark.parametrize("error", [ZeroDivisionError, TimeoutError])
@pytest.mark.parametrize("round_name", ["sequential", "pipelined"])
def test_a_drafter_that_raises_over_commits_begins_anew(
    round_name: str, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """The error is logged, no output changes, and the drafter forgets what raised."""
    freed: list[str] = []

    class Broken(Recording):
        def commit(self, commits: Any) -> None:
            raise error

        def free(self, ids: Any) -> None:
            freed.extend(ids)
            super().free(ids)

    made = toy_engine(ToyModel(4), Broken(), k=2)
    if round_name != "sequential":
        components = made.execution_mode.components
        made = under(made, round_name, "worker")
        assert isinstance(components.executor, ThreadExecutor)
    wanted = tokens_of(run_all(toy_engine(ToyModel(4), None), [make_request("r", (0, 1), PARAMS)]))
    assert tokens_of(run_all(made, [make_request("r", (0, 1), PARAMS)])) == wanted
    assert error.__name__ in caplog.text
    assert "a step of" not in caplog.text, "no step failed"
    assert len(freed) > 1


@pytest.mark.parametrize("error", [DrafterLost("The drafter ended."), TimeoutError()], ids=type)
@pytest.mark.parametrize("execution_mode", ["pipelined", "draft-ahead", "draft-for-outcomes"])
def test_a_drafter_lost_while_a_batch_is_repeated_costs_drafts_only(
    execution_mode: str, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    errors: list[Exception] = [ZeroDivisionError(), error]

    class Losing(Recording):
        def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
            if errors:
                raise errors.pop(0)
            return super().propose(contexts, budgets)

    requests = [make_request(f"r{n}", (n, 1), PARAMS) for n in range(3)]
    wanted = tokens_of(run_all(toy_engine(ToyModel(4), None), requests))
    made = under(toy_engine(ToyModel(4), Losing(), k=2), execution_mode, "worker")
    assert tokens_of(run_all(made, requests)) == wanted
    assert not errors
    assert caplog.text.count("the drafter gave no answer") == 1


class Ticking:
    """A clock that a drafter and a judge move on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run_auto(made: Engine, clock: Ticking, parallel: bool, window: int) -> Auto:
    """Have the engine choose its execution mode by ``clock``, with a drafter that counts as parallel or not."""
    components = made.execution_mode.components
    assert components.drafter is not None
    executor = InlineExecutor(components.drafter, clock)
    executor.parallel = parallel
    made.execution_mode = mode = Auto(replace(components, clock=clock, executor=executor), window=window)
    return mode


def auto(parallel: bool, overlap_seconds: float) -> tuple[Engine, Auto]:
    """An engine that drafts in 2 s and verifies in 4 s; overlapped, each takes ``overlap_seconds``."""
    clock = Ticking()
    made = toy_engine(ToyModel(4, order=2, seed=1), ModelDrafter(ToyModel(4, order=2, seed=1)), k=2)
    components = made.execution_mode.components
    verifier, drafter = components.verifier, components.drafter
    assert drafter is not None
    propose, submit = drafter.propose, verifier.submit
    chosen: list[Auto] = []

    def slow_propose(*args: Any) -> Any:
        clock.now += 2.0 if not chosen or chosen[0].info.name == "sequential" else 0.0
        return propose(*args)

    def slow_submit(*args: Any) -> Any:
        clock.now += 4.0 if not chosen or chosen[0].info.name == "sequential" else overlap_seconds
        return submit(*args)

    override(drafter, propose=slow_propose)
    override(verifier, submit=slow_submit)
    execution_mode = run_auto(made, clock, parallel, window=8)
    chosen.append(execution_mode)
    return made, execution_mode


def test_auto_counts_the_time_of_refuted_windows() -> None:
    """Each overlapped submission takes 4 s. A third of the drafts is wrong and refutes the windows in flight.

    Without refuted windows, ``draft-ahead`` would seem faster than ``sequential`` with its 6 s per step.
    """
    clock = Ticking()
    made = toy_engine(ToyModel(4, order=2, seed=1), ModelDrafter(ToyModel(4, order=2, seed=1)), k=2)
    components = with_steps_in_flight(made, 4).execution_mode.components
    verifier, drafter = components.verifier, components.drafter
    assert drafter is not None
    propose, submit, proposals = drafter.propose, verifier.submit, count(1)

    def often_wrong(*args: Any) -> Any:
        clock.now += 2.0 if execution_mode.info.name == "sequential" else 0.0
        wrong = next(proposals) % 3 == 0
        return [replace(each, tokens=tuple((token + wrong) % 4 for token in each.tokens)) for each in propose(*args)]

    def slow_submit(*args: Any) -> Any:
        clock.now += 4.0
        return submit(*args)

    override(drafter, propose=often_wrong)
    override(verifier, submit=slow_submit)
    execution_mode = run_auto(made, clock, parallel=True, window=32)
    run_all(made, [make_request("r", (0, 1), SamplingParams(temperature=0, max_tokens=600))])
    assert made.metrics().cancelled_steps > 10
    assert execution_mode.info.name == "sequential" and "draft-ahead had 0." in execution_mode.info.reason


@pytest.fixture
def load() -> Iterator[list[Any]]:
    yield [make_request(f"r{n}", (n % 4, 1), SamplingParams(temperature=0, max_tokens=200)) for n in range(2)]


@pytest.mark.parametrize(
    ("parallel", "overlap_seconds", "name", "why"),
    [
        (False, 4.0, "sequential", "33%"),
        (True, 4.0, "draft-ahead", "measured 1."),
        (True, 16.0, "sequential", "draft-ahead"),
    ],
)
def test_auto_measures_before_it_chooses(
    load: list[Any], parallel: bool, overlap_seconds: float, name: str, why: str
) -> None:
    made, execution_mode = auto(parallel, overlap_seconds)
    assert "not measured" in execution_mode.info.reason
    run_all(made, load)
    assert execution_mode.info.name == name
    assert why in execution_mode.info.reason


def test_a_trial_ends_although_the_policy_drafts_for_no_request_in_the_tried_mode(load: list[Any]) -> None:
    made, execution_mode = auto(True, 4.0)
    policy = made.scheduler.policy
    plan = policy.plan

    def only_in_turn(load: BatchState) -> list[DraftBudget]:
        budgets = plan(load)
        return budgets if execution_mode.info.name == "sequential" else [DraftBudget()] * len(budgets)

    override(policy, plan=only_in_turn)
    run_all(made, load)
    assert execution_mode.info.name == "sequential" and "times the speed" in execution_mode.info.reason
    assert "alternates" not in execution_mode.info.reason


@pytest.mark.parametrize(("acceptance_method", "name"), [("match", "draft-for-outcomes"), ("block", "sequential")])
def test_auto_drafts_after_outcomes_where_the_drafter_is_often_wrong(acceptance_method: str, name: str) -> None:
    """Other methods than ``match`` allow no draft after another outcome."""
    execution_mode = auto_with_a_weak_drafter(acceptance_method)
    assert execution_mode.info.name == name, execution_mode.info.reason
    if name == "draft-for-outcomes":
        current = execution_mode.current
        assert isinstance(current, DraftForOutcomes)
        current.wait.waited(30.0)
        current.wait.waited(30.0)
        assert not current.wait.pays(3, 1), "the time of steps is known"


def test_auto_remembers_outcomes_where_it_decides_at_a_step_without_drafts() -> None:
    info = auto_with_a_weak_drafter("match", gaps=True).info
    assert "draft-for-outcomes" in f"{info.name} {info.reason}"


def auto_with_a_weak_drafter(acceptance_method: str, gaps: bool = False) -> Auto:
    """The mode after a run where drafting takes 3 s and a step 4 s.

    Args:
        gaps: every second step has no drafts, so each decision is made at such a step.
    """
    clock = Ticking()
    drafter = ModelDrafter(with_pool(ToyModel(6, order=1, seed=3), 256, 4))
    made = toy_engine(with_pool(ToyModel(6, order=2, seed=1, sharpness=2.0), 256, 4), drafter, acceptance_method, k=2)
    components = made.execution_mode.components
    propose, submit = drafter.propose, components.verifier.submit

    def slow_propose(*args: Any) -> Any:
        clock.now += 3.0 if execution_mode.info.name == "sequential" else 0.0
        return propose(*args)

    def slow_submit(*args: Any) -> Any:
        clock.now += 4.0
        return submit(*args)

    override(drafter, propose=slow_propose)
    override(components.verifier, submit=slow_submit)
    plan, plans = made.scheduler.policy.plan, count()

    def every_second(load: BatchState) -> list[DraftBudget]:
        budgets = plan(load)
        return [DraftBudget()] * len(budgets) if next(plans) % 2 else budgets

    if gaps:
        override(made.scheduler.policy, plan=every_second)
    execution_mode = run_auto(made, clock, parallel=True, window=8)
    run_all(made, [make_request(f"r{n}", (n, 1), SamplingParams(max_tokens=150)) for n in range(4)])
    return execution_mode


@pytest.mark.parametrize("overlap_seconds", [4.0, 16.0])
def test_another_load_is_measured_anew(
    load: list[Any], overlap_seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    made, execution_mode = auto(True, overlap_seconds)
    run_all(made, load)
    first = execution_mode.info
    assert "measured again" not in caplog.text
    run_all(made, [make_request(f"m{n}", (n % 4, 1), SamplingParams(temperature=0, max_tokens=300)) for n in range(8)])
    assert "measured again" in caplog.text
    assert execution_mode.info.name == first.name and "times" in execution_mode.info.reason


def test_the_round_and_its_reason_are_in_the_metrics() -> None:
    made = engine_under("auto", Recording(), 1)
    text = ServerMetrics("toy").render(asdict(made.metrics()), EngineStatus(True, 0, 0, 0)).decode()
    (line,) = [line for line in text.splitlines() if line.startswith("cospec:execution_mode_info")]
    assert 'execution_mode="sequential"' in line and "not measured yet" in line and line.endswith(" 1.0")


@pytest.mark.parametrize("execution_mode", ["auto", "sequential", "pipelined", "draft-ahead", "draft-for-outcomes"])
def test_a_round_is_chosen_by_name(execution_mode: str) -> None:
    speculative = SpeculativeConfig(num_speculative_tokens=2, execution_mode=execution_mode)
    parts = assemble(ToyModel(4), Recording(), speculative, EngineConfig(), TextInfo())
    assert type(parts.execution_mode) is MODES[execution_mode]
    with pytest.raises(InvalidInput, match="execution_mode is 'sideways'"):
        TABLE.load("sideways")
