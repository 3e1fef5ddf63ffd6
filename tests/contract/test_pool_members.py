"""A pool drafts the same tokens wherever its drafters run, and loses drafts alone when a drafter is lost."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import cospec
from cospec.core.plugin_base import Drafter
from cospec.core.types import DraftBudget, DraftContext, Request
from cospec.drafters.pool.pool import PoolDrafter
from cospec.errors import CospecError
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import StreamKind
from cospec.runtime.drafter_process_executor import ProcessExecutor
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.runtime.in_process_executors import ThreadExecutor
from cospec.sampling_params import SamplingParams
from harness.pools import pool_engine, pool_of
from harness.remote_drafters import VOCAB, doomed, toy
from harness.toys import make_request, run_all, tokens_of, toy_engine

GREEDY = SamplingParams(temperature=0, max_tokens=24)
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=24)
NAMES = ("itself", "other", "ngram")
PLACES: dict[str, Callable[[str], Drafter]] = {
    "inline": lambda name: toy(name)(),
    "thread": lambda name: DrafterProxy(ThreadExecutor(toy(name)())),
    "process": lambda name: DrafterProxy(ProcessExecutor(toy(name))),
}
COMMON: dict[str, Any] = {"threads": 1, "measure_at_start": False, "kv_cache_memory_bytes": 1 << 24}
MIXED = {"itself": "process", "other": "thread", "ngram": "inline"}


def target() -> ToyModel:
    return ToyModel(VOCAB, order=2, seed=1, sharpness=2.0)


def requests() -> list[Request]:
    params = (GREEDY, SEEDED)
    return [make_request(f"r{n}", (n % VOCAB, 1, 2, 1, 2), params[n % 2]) for n in range(6)]


@pytest.fixture(scope="module", params=[*PLACES, "mixed"])
def drafters(request: pytest.FixtureRequest) -> Iterator[dict[str, Drafter]]:
    made = {name: PLACES[MIXED[name] if request.param == "mixed" else request.param](name) for name in NAMES}
    yield made
    for drafter in made.values():
        drafter.close()


def noted(pool: PoolDrafter) -> list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[str, ...]]]:
    """The drafts of some steps, each committed as the target would continue."""
    texts = {f"d{n}": [n % VOCAB, 1, 2, 1, 2] for n in range(3)}
    found = []
    for _ in range(8):
        contexts = [
            DraftContext(id, tokens, 1, SEEDED, n, StreamKind.TARGET) for n, (id, tokens) in enumerate(texts.items())
        ]
        for draft in pool.propose(contexts, [DraftBudget(3, 8)] * len(contexts)):
            found.append((draft.id, draft.tokens, tuple(draft.parents), tuple(draft.drafters)))
        for tokens in texts.values():
            tokens.append(int(target().logits(tokens).argmax()))
    pool.free(list(texts))
    return found


@pytest.mark.parametrize("combiner", ["union", "vote"])
def test_drafts_equal_those_of_inline_drafters(combiner: str, drafters: dict[str, Drafter]) -> None:
    inline = {name: PLACES["inline"](name) for name in NAMES}
    wanted = noted(pool_of(inline, combiner, "all", VOCAB))
    assert wanted
    assert noted(pool_of(drafters, combiner, "all", VOCAB)) == wanted


@pytest.mark.parametrize("combiner", ["union", "vote", "fuse"])
def test_the_text_does_not_depend_on_places(combiner: str, drafters: dict[str, Drafter]) -> None:
    wanted = tokens_of(run_all(toy_engine(target(), None), requests()))
    engine = pool_engine(target(), pool_of(drafters, combiner, "all", VOCAB))
    assert tokens_of(run_all(engine, requests())) == wanted
    assert sum(engine.metrics().accepted_tokens.values()) > 0


@pytest.mark.parametrize("place", ["thread", "process"])
def test_members_elsewhere_score_the_prompt_while_the_target_works(place: str) -> None:
    contexts = [DraftContext("r", [1, 2, 1, 2, 0], 5, GREEDY, 0, StreamKind.TARGET)]
    budgets = [DraftBudget(2, 2, drafters=1)]
    inline, away = (
        pool_of({name: PLACES[where](name) for name in ("itself", "other")}, "vote", "hedge", VOCAB)
        for where in ("inline", place)
    )
    for pool in (inline, away):
        assert pool.propose(contexts, budgets)
    wanted, found = inline.records["r"].weights, away.records["r"].weights
    assert min(wanted.looked) == 4 and found.looked == [0, 0], "a step waits for no score"
    end = time.monotonic() + 20
    while not all(future.done() for member in away.members for future in member.scoring):
        assert time.monotonic() < end
        time.sleep(0.01)
    away.propose(contexts, budgets)
    assert found.looked == wanted.looked and found.chance == pytest.approx(wanted.chance)
    away.close()


def test_a_killed_member_costs_drafts_and_comes_back() -> None:
    executor = ProcessExecutor(toy("itself"))
    pool = pool_of({"away": DrafterProxy(executor), "copy": toy("ngram")()}, "union", "all", VOCAB)
    engine = pool_engine(target(), pool)
    long = SamplingParams(temperature=0, max_tokens=400)
    wanted = tokens_of(run_all(toy_engine(target(), None), [make_request("r", (1, 2), long)]))
    engine.add(make_request("r", (1, 2), long))
    tokens: list[int] = []
    for step in range(1000):
        if step == 5:
            os.kill(executor.pid, signal.SIGKILL)
            time.sleep(0.2)
        tokens += [token for event in engine.step() for token in event.tokens]
        if not engine.has_work:
            break
    assert tuple(tokens) == tuple(wanted["r"])
    end = time.monotonic() + 40
    while not executor.present and time.monotonic() < end:
        pool.free(["unknown"])
        time.sleep(0.02)
    before = engine.metrics().accepted_tokens.get("away", 0)
    for n in range(20):
        run_all(engine, [make_request(f"s{n}", (1, 2), GREEDY)])
    assert engine.metrics().accepted_tokens["away"] > before, "the drafter drafts again"
    engine.close()
    assert not executor.present


def test_a_failing_thread_is_excluded() -> None:
    before = set(threading.enumerate())
    away = DrafterProxy(ThreadExecutor(doomed(2, "raise")()))
    pool = pool_of({"away": away, "copy": toy("ngram")()}, "union", "all", VOCAB)
    engine = pool_engine(target(), pool)
    wanted = tokens_of(run_all(toy_engine(target(), None), requests()))
    assert tokens_of(run_all(engine, requests())) == wanted
    assert pool.left_out()["away"] > 0
    engine.close()
    assert not set(threading.enumerate()) - before


def listed(**place: object) -> dict[str, object]:
    drafter = {"name": "away", "method": "draft_model", "model": "zoo:drafter", **place}
    return {"method": "pool", "combiner": "vote", "drafters": [drafter, {"name": "copy", "method": "ngram"}]}


def test_configured_members_run_where_they_should() -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    prompts = ["def add(a, b):"]
    with cospec.LLM("zoo", {"method": "off"}, **COMMON) as llm:
        wanted = llm.generate(prompts, params)[0].outputs[0].token_ids
    for executor in ("thread", "process"):
        with cospec.LLM("zoo", listed(executor=executor), **COMMON) as llm:
            pool = llm.engine.execution_mode.components.drafter
            assert isinstance(pool, PoolDrafter)
            assert [member.later for member in pool.members] == [True, False]
            assert llm.generate(prompts, params)[0].outputs[0].token_ids == wanted
        remote = pool.members[0].drafter.executor
        assert remote is not None and not remote.present


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (listed(executor="cloud"), "executor"),
        (listed(cores=[0]), "absent unless executor is 'process'"),
        (listed(executor="process", cores=[-1]), "cores"),
        (listed(executor="process", cores=[0]) | {"combiner": "mix"}, "token by token inline"),
        (listed(executor="process") | {"drafter_executor": "process"}, "a process of its own"),
        (listed(executor="process", cores=[10_000]), "drafters[0] 'away': cores is [10000]"),
    ],
)
def test_places_that_cannot_work_are_refused(given: dict[str, object], sentence: str) -> None:
    if "mix" in given.values() and (os.cpu_count() or 1) < 2:
        pytest.skip("one processor")
    before = set(threading.enumerate())
    with pytest.raises(CospecError) as caught:
        cospec.LLM("zoo", given, **COMMON)
    assert sentence in str(caught.value)
    assert "drafters[0]" in str(caught.value)
    assert not set(threading.enumerate()) - before


def test_a_start_that_fails_after_the_drafter_ends_its_places() -> None:
    """The acceptance method needs distributions, and is refused when the parts are connected."""
    before = set(threading.enumerate())
    for drafter_executor in ("inline", "thread"):
        given = listed(executor="thread") | {"acceptance_method": "block", "drafter_executor": drafter_executor}
        with pytest.raises(CospecError, match="block"):
            cospec.LLM("zoo", given, **COMMON)
        assert not set(threading.enumerate()) - before


def test_a_pool_in_a_thread_has_members_in_processes() -> None:
    params = SamplingParams(temperature=0, max_tokens=16)
    prompts = ["def add(a, b):"]
    with cospec.LLM("zoo", {"method": "off"}, **COMMON) as llm:
        wanted = llm.generate(prompts, params)[0].outputs[0].token_ids
    given = listed(executor="process") | {"drafter_executor": "thread", "execution_mode": "pipelined"}
    before = set(threading.enumerate())
    with cospec.LLM("zoo", given, **COMMON) as llm:
        (found,) = llm.generate(prompts, params)
        assert found.outputs[0].token_ids == wanted
        pool = llm.engine.execution_mode.components.drafter
    assert isinstance(pool, PoolDrafter)
    assert pool.seconds.drafters > 0
    remote = pool.members[0].drafter.executor
    assert remote is not None and not remote.present
    assert not set(threading.enumerate()) - before
