"""The pool itself: configuration, failing and late drafters, restriction, provenance, what it remembers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import cospec
from cospec.core.interfaces import Executor
from cospec.core.model_io import TokenBatch
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, SpeculationParams
from cospec.drafters.draft_kv_cache import LOOKBACK
from cospec.drafters.model import ModelDrafter
from cospec.drafters.pool.coordinator import Coordinator
from cospec.drafters.pool.members import Member
from cospec.drafters.pool.pool import PoolDrafter
from cospec.drafters.stepwise import ModelStepwiseDrafter
from cospec.errors import InvalidInput
from cospec.models.toy import ToyModel
from cospec.registry import COMBINERS
from cospec.rng.random_streams import StreamKind
from cospec.runtime.in_process_executors import InlineExecutor
from cospec.sampling_params import SamplingParams
from cospec.server.metrics import families
from harness.methods import override
from harness.pools import Ticks, pool_engine, pool_of, toy_drafters
from harness.toys import ScriptedDrafter, make_request, run_all, tokens_of, toy_engine

V = 5
GREEDY = SamplingParams(temperature=0, max_tokens=24)


def target() -> ToyModel:
    return ToyModel(V, order=2, seed=1, sharpness=2.0)


def context(tokens: Sequence[int], id: str = "s", **more: Any) -> DraftContext:
    return DraftContext(id, tokens, 1, GREEDY, 0, StreamKind.TARGET, **more)


class Failing(ScriptedDrafter):
    """Raises in chosen calls, or takes its time."""

    def __init__(self, clock: Ticks, fails: Sequence[int] = (), takes: float = 0.0) -> None:
        super().__init__([0, 1, 2])
        self.clock, self.fails, self.takes = clock, set(fails), takes
        self.calls, self.freed = 0, list[str]()

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        self.calls += 1
        self.clock.now += self.takes
        if self.calls in self.fails:
            raise RuntimeError("the node is gone")
        return super().propose(contexts, budgets)

    def free(self, ids: Sequence[str]) -> None:
        self.freed += ids


def rounds(pool: PoolDrafter, count: int) -> list[set[str]]:
    """Who is in the draft, round by round."""
    tokens, found = [3, 4, 3, 4], []
    for _ in range(count):
        drafts = pool.propose([context(tokens)], [DraftBudget(3, 8)])
        found.append({name for draft in drafts for name in draft.drafters})
        pool.commit([Commit("s", len(tokens), (3,), (), len(tokens))])
        tokens.append(3)
    return found


@pytest.mark.parametrize("combiner", ["union", "fuse"])
def test_a_drafter_that_raises_is_left_out_longer_each_time(combiner: str) -> None:
    clock = Ticks()
    failing = Failing(clock, fails=(2, 3))
    drafters = {"sound": ScriptedDrafter([4, 4]), "failing": failing}
    pool = pool_of(drafters, combiner, "all", V, clock)
    seen = ["failing" in names for names in rounds(pool, 8)]
    #               raises, rests 1, raises, rests 2
    assert seen == [True, False, False, False, False, False, True, True]
    assert pool.left_out() == {"sound": 0, "failing": 2}
    assert failing.freed == ["s", "s"]


def test_a_late_drafter_is_left_out_of_the_rounds_after() -> None:
    clock = Ticks()
    slow = Failing(clock, takes=0.5)
    pool = pool_of({"sound": ScriptedDrafter([4, 4]), "slow": slow}, "union", "all", V, clock, deadline=0.1)
    assert ["slow" in names for names in rounds(pool, 3)] == [True, False, True]
    assert pool.left_out()["slow"] == 2


class Elsewhere(ScriptedDrafter):
    """Its calls run in a handle."""

    def __init__(self, tokens: Sequence[int], handle: Callable[[Drafter], Executor]) -> None:
        super().__init__(tokens)
        self._handle = handle(self)

    @property
    def executor(self) -> Executor:
        return self._handle


class Waiting(InlineExecutor):
    """Answers while ``ready`` is set."""

    ready = True

    def submit(self, method: str, *args: Any) -> Future[Any]:
        return super().submit(method, *args) if self.ready else Future()


def test_deadline_of_drafters_elsewhere() -> None:
    elsewhere = Elsewhere([0, 1, 2], Waiting)
    pool = pool_of({"sound": ScriptedDrafter([4]), "away": elsewhere}, "union", "all", V, deadline=0.01)
    assert "away" in rounds(pool, 1)[0]
    elsewhere.executor.ready = False  # type: ignore[attr-defined]
    assert rounds(pool, 1) == [{"sound"}]
    assert pool.left_out()["away"] == 1


class Loaded(InlineExecutor):
    """Has proposals of earlier steps to answer."""

    waiting = 0.0

    @property
    def load(self) -> float:
        return self.waiting


def test_a_drafter_with_open_proposals_is_chosen_less() -> None:
    elsewhere = Elsewhere([4, 4], Loaded)
    pool = pool_of({"loaded": elsewhere, "free": ScriptedDrafter([4, 4])}, "union", "hedge", V)
    executor, chosen = elsewhere.executor, []
    assert isinstance(executor, Loaded)
    for waiting in (0.0, 1.0, 0.0):
        executor.waiting = waiting
        (draft,) = pool.propose([context([1, 2])], [DraftBudget(2, 8, drafters=1)])
        chosen.append(set(draft.drafters))
    assert chosen == [{"loaded"}, {"free"}, {"loaded"}]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("combiner", ["union", "fuse"])
def test_failing_or_late_drafter_rests_and_returns(combiner: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left out of 1, 2 and 4 more rounds, as it fails three times; the text is that without any drafter."""
    listed = [{"name": name, "method": "draft_model", "model": f"zoo:{name}"} for name in ("code", "math")]
    spec = {"method": "pool", "combiner": combiner, "routing": "all", "policy": "fixed", "drafters": listed}
    llm = cospec.LLM("zoo", spec | {"deadline": 1.0}, threads=1)
    params = SamplingParams(temperature=0, max_tokens=72, ignore_eos=True)
    wanted = llm.generate(["def add(a, b):"], params, SpeculationParams(enabled=False))
    pool = llm.engine.execution_mode.components.drafter
    assert isinstance(pool, PoolDrafter)
    member, clock, failed = pool.members[1], Ticks(), [0]
    member.clock = clock
    resting: list[bool] = []

    def breaks(self: Member, failing: Any, verb: Any, *arguments: Any) -> Any:
        if self is member and not self.rest and verb.__name__ in ("propose", "feed") and failed[0] < 3:
            failed[0] += 1
            return called(self, failing, partial(slow, verb) if late else broken, *arguments)
        return called(self, failing, verb, *arguments)

    def slow(verb: Any, *arguments: Any) -> Any:
        clock.now += 2.0
        return verb(*arguments)

    def broken(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    def counted(self: Member) -> None:
        begun(self)
        if self is member:
            resting.append(self.rest > 0)

    called, begun = Member.call, Member.begin_step
    monkeypatch.setattr(Member, "call", breaks)
    monkeypatch.setattr(Member, "begin_step", counted)
    found = llm.generate(["def add(a, b):"], params)
    assert found[0].outputs[0].token_ids == wanted[0].outputs[0].token_ids
    assert pool.left_out() == {"code": 0, "math": 3}
    #                       fails, 1 round, fails, 2 rounds, fails, 4 rounds, works
    assert resting[:11] == [False, True, False, True, True, False, True, True, True, True, False]
    assert not any(resting[10:])


class Promise(Future[list[Draft]]):
    """Takes its time to be kept."""

    def __init__(self, clock: Ticks) -> None:
        super().__init__()
        self.clock = clock

    def result(self, timeout: float | None = None) -> list[Draft]:
        self.clock.now += 0.5
        return []


def test_waiting_for_an_answer_is_no_work_of_the_pool_s_own() -> None:
    clock = Ticks()

    class Away(InlineExecutor):
        def submit(self, method: str, *args: Any) -> Future[Any]:
            return Promise(clock)

    pool = pool_of({"away": Elsewhere([1], Away)}, "union", "all", V, clock)
    pool.propose([context([1, 2])], [DraftBudget(2, 2)])
    assert (pool.seconds.drafters, pool.seconds.own) == (0.5, 0.0)


class Breaks(ToyModel):
    """Its forward raises while ``broken`` is set."""

    broken = False

    def forward(self, batch: TokenBatch) -> Tensor:
        if self.broken:
            raise RuntimeError("out of memory")
        return super().forward(batch)


def test_drafter_that_breaks_in_lock_step() -> None:
    model = Breaks(V, order=1, seed=5)
    pool = pool_of({"led": ModelDrafter(model), **toy_drafters(V, ("second", "copy"))}, "fuse", "all", V)
    engine, found = pool_engine(target(), pool), dict[str, tuple[int, ...]]()
    wanted = [make_request(f"r{n}", (n, 1, 2), GREEDY) for n in range(4)]
    for request in wanted:
        engine.add(request)
    for step in range(100):
        model.broken = step % 5 == 2
        for event in engine.step():
            found[event.id] = found.get(event.id, ()) + event.tokens
    assert found == tokens_of(run_all(toy_engine(target(), None), wanted))
    assert pool.left_out()["led"] > 0
    model.pages.check_integrity()
    assert model.pages.usage == 0


def test_a_request_may_choose_its_drafters() -> None:
    drafters = {"four": ScriptedDrafter([4, 4]), "zero": ScriptedDrafter([0, 0])}
    pool = pool_of(drafters, "union", "all", V)
    (draft,) = pool.propose([context([1, 2], drafters=("zero",))], [DraftBudget(2, 8)])
    assert set(draft.drafters) == {"zero"}
    engine = pool_engine(target(), pool)
    request = make_request("r", (1, 2), GREEDY)
    events = run_all(engine, [replace(request, speculation=SpeculationParams(drafters=("four",)))])
    assert set(engine.metrics().draft_tokens) == {"four"}
    assert {source for event in events["r"] for source in event.sources} <= {"four", "target", "bonus"}
    with pytest.raises(InvalidInput, match=r"speculation\.drafters is 'five'"):
        engine.add(replace(request, speculation=SpeculationParams(drafters=("zero", "five"))))
    with pytest.raises(InvalidInput, match="there is no pool"):
        toy_engine(target(), drafters["four"]).add(replace(request, speculation=SpeculationParams(drafters=("four",))))


def test_the_policy_says_how_many_take_part() -> None:
    models = {f"m{n}": ModelDrafter(ToyModel(V, order=1, seed=n)) for n in range(4)}
    for combiner in COMBINERS:
        pool = pool_of(models, combiner, "all", V)
        for count in (1, 2, 4):
            pool.propose([context([1, 2, 3], f"s{count}")], [DraftBudget(2, 8, drafters=count)])
            assert pool.records[f"s{count}"].weights.idle.count(0) == count, combiner


def weights_of_the_right_one(combiner: str) -> tuple[float, float]:
    """Of two drafters, one the target itself: its weight in the midst of a request, and a new one's after twenty."""
    drafters = {"wrong": ModelDrafter(ToyModel(V, order=1, seed=9)), "right": ModelDrafter(target())}
    pool = pool_of(drafters, combiner, "hedge", V)
    assert pool.weights() == pytest.approx({"wrong": 0.5, "right": 0.5})
    engine = pool_engine(target(), pool)
    engine.add(make_request("first", (1, 2), GREEDY))
    for _ in range(4):
        engine.step()
    within = pool.weights()["right"]
    while engine.has_work:
        engine.step()
    run_all(engine, [make_request(f"a{n}", (n % V, 2), GREEDY) for n in range(20)])
    metrics = engine.metrics()
    assert metrics.accepted_tokens["right"] > 5 * metrics.accepted_tokens.get("wrong", 0)
    return within, pool.weights()["right"]


def test_weights_follow_the_accepted_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    for combiner in COMBINERS:
        within, fresh = weights_of_the_right_one(combiner)
        assert within > 0.65, combiner
        assert fresh > 0.525, combiner
    # Weights that do not learn from guesses stay where they were, so what is asked above is not theirs by chance.
    monkeypatch.setattr(Coordinator, "learn", lambda *_: None)
    for combiner in ("fuse", "mix"):
        within, fresh = weights_of_the_right_one(combiner)
        assert within < 0.5, "by what it makes of a prompt of two tokens alone"
        assert fresh == pytest.approx(0.5)


@pytest.mark.parametrize("led", [True, False])
def test_a_drafter_looks_at_known_tokens_and_has_caught_up(led: bool) -> None:
    """How likely it finds each of the latest ones, by hand; afterwards it drafts as if it had been asked all along."""
    model = target()
    drafter: ModelStepwiseDrafter | ModelDrafter = ModelStepwiseDrafter(model) if led else ModelDrafter(model)
    tokens = [0, 1, 4, 2, 2, 3]
    for _ in range(2):
        found = drafter.score_known_tokens([context(tokens)])["s"]
        rows = [torch.softmax(model.logits(tokens[:n]), -1) for n in range(1, len(tokens))]
        wanted = [float(row[token]) for row, token in zip(rows, tokens[1:], strict=True)]
        assert found.num_tokens == min(LOOKBACK, len(wanted))
        assert found.probability_sum == pytest.approx(sum(wanted[-LOOKBACK:]))
        tokens += [1, 3, 0] * 15
    tokens = tokens[:-45]
    if isinstance(drafter, ModelStepwiseDrafter):
        opening = drafter.open([context(tokens)], [1])
        assert opening.logits[0].tolist() == model.logits(tokens).tolist()
    else:
        (draft,) = drafter.propose([context(tokens)], [DraftBudget(1, 1)])
        assert draft.tokens == (int(model.logits(tokens).argmax()),)


def asked_by(pool: PoolDrafter) -> list[list[int]]:
    """How deep each drafter is asked to draft, sequence by sequence; grows with each proposal."""
    asked, choose = list[list[int]](), pool.coordinator.choose

    def kept(*arguments: Any) -> list[list[int]]:
        depths = choose(*arguments)
        asked.extend([list(own) for own in zip(*depths, strict=True)])
        return depths

    override(pool.coordinator, choose=kept)
    return asked


def test_hedge_scores_the_prompt_first() -> None:
    drafters = {"wrong": ModelDrafter(ToyModel(V, order=1, seed=9)), "right": ModelDrafter(target())}
    tokens = [0, 1]
    for _ in range(30):
        tokens.append(int(target().logits(tokens).argmax()))
    for combiner in COMBINERS:
        for routing, wanted in (("hedge", {"right"}), ("all", {"wrong", "right"})):
            pool = pool_of(drafters, combiner, routing, V)
            asked = asked_by(pool)
            pool.propose([context(tokens)], [DraftBudget(2, 2)])
            assert {name for name, depth in zip(pool.member_names, asked[0], strict=True) if depth} == wanted, combiner


def test_a_led_model_continues_from_what_it_is_fed() -> None:
    model = target()
    stepper, tokens = ModelStepwiseDrafter(model), [0, 1, 2]
    stepper.open([context(tokens)], [3])
    assert stepper.feed(["s"], [4])[0].tolist() == model.logits([*tokens, 4]).tolist()
    assert stepper.feed(["s"], [2])[0].tolist() == model.logits([*tokens, 4, 2]).tolist()
    stepper.commit([Commit("s", 3, (4, 0), (0,), 4)])
    tokens += [4, 0]
    opening = stepper.open([context(tokens)], [2])
    assert opening.logits[0].tolist() == model.logits(tokens).tolist()
    stepper.free(["s"])
    assert model.pages.usage == 0


def test_weights_are_in_the_metrics() -> None:
    pool = pool_of(toy_drafters(V), "fuse", "all", V)
    engine = pool_engine(target(), pool)
    assert engine.metrics().drafter_weights == pytest.approx({"first": 1 / 3, "second": 1 / 3, "copy": 1 / 3})
    text = "".join(str(family) for family in families(asdict(engine.metrics()), "m"))
    assert "cospec:drafter_weight" in text
    assert toy_engine(target(), None).metrics().drafter_weights == {}


def test_a_drafter_with_another_vocabulary_is_tried_unscored() -> None:
    pool, contexts = pool_of(toy_drafters(3, ("first", "foreign")), "vote", "hedge", 3), [context([1, 2, 1, 2])]
    idle = []
    for _ in range(3):
        pool.propose(contexts, [DraftBudget(2, 2, drafters=1)])
        idle.append(pool.records[contexts[0].id].weights.idle[1])
    looked = pool.records[contexts[0].id].weights.looked
    assert idle == [0, 1, 2] and looked[0] > 0 == looked[1]
