"""Rounds that the native library runs as one call give what they give step by step: tokens, authors, counts, ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from cospec.acceptance.match import Match
from cospec.core.engine import Engine
from cospec.core.stats import StepTimes
from cospec.core.types import Event, Request, ScheduledRequest, SchedulerOutput, Speculation, StepOutput
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.execution.sequential import SHARED
from cospec.native import library
from cospec.native.multi_step import NativeMultiStep, why_not
from cospec.native.verifier import words_of
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.llamas import VOCAB, llama_engine, load, write_pair
from harness.methods import override

pytestmark = pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")

LENGTHS = (30, 41, 17, 30, 3)  # of outputs that end in different rounds
SHAPES = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.9),
    "seeded": SamplingParams(temperature=1.0, seed=5),
    "truncated": SamplingParams(temperature=0.8, top_k=12, top_p=0.9),
    "stopped": SamplingParams(temperature=1.0, stop_token_ids=tuple(range(0, VOCAB, 9))),
    "edited": SamplingParams(temperature=0.7, repetition_penalty=1.2),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    found = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    write_pair(*found)
    return found


def requests(params: SamplingParams, streams: bool) -> list[Request]:
    prompts = [[(11 * n + i * i * 5) % VOCAB for i in range(4 + 5 * n)] for n in range(len(LENGTHS))]
    made = [
        make_requests(f"r{n}", prompt, replace(params, max_tokens=length))[0]
        for n, (prompt, length) in enumerate(zip(prompts, LENGTHS, strict=True))
    ]
    return [replace(request, seed=100 + n, streams=streams) for n, request in enumerate(made)]


def uneven(asked: list[Request], longest: int) -> list[Request]:
    """With drafts of different lengths, for some of them none."""
    return [
        replace(request, speculation=Speculation(length=n % (longest + 1), enabled=n != 3))
        for n, request in enumerate(asked)
    ]


def engine_of(
    folders: tuple[Path, Path], acceptance_method: str, k: int, pages: int = 200, native: str = "auto"
) -> Engine:
    drafter = ModelDrafter(load(folders[1], pages=pages), native=native == "auto") if k else None
    target = load(folders[0], pages=pages)
    return llama_engine(target, drafter, k=k, acceptance_method=acceptance_method, native=native)


def readable(folders: tuple[Path, Path], acceptance_method: str, k: int, pages: int = 200) -> Engine:
    return engine_of(folders, acceptance_method, k, pages, "off")


def written(engine: Engine, asked: list[Request]) -> dict[str, list[Any]]:
    """What each output came to be; the times are left out."""
    for request in asked:
        engine.add(request)
    told: dict[str, list[Event]] = {}
    while engine.has_work:
        for event in engine.step():
            told.setdefault(event.id, []).append(event)
        engine.check_integrity()
    found: dict[str, list[Any]] = {}
    for id, events in told.items():
        stats = events[-1].stats
        assert stats is not None
        tokens = [token for event in events for token in event.tokens]
        sources = [name for event in events for name in event.sources]
        found[id] = [tokens, sources, events[-1].finish, events[-1].stop_reason, replace(stats, ttft=None, e2e=None)]
    return found


def calls(engine: Engine) -> list[tuple[int, int | None]]:
    """From now on: the rounds that each plan allows, and those that were run as one, None where step by step."""
    burst, noted = engine.execution_mode.components.burst, list[tuple[int, int | None]]()
    assert burst is not None
    supports, run = burst.supports, burst.run

    def planning(plan: SchedulerOutput) -> dict[str, str]:
        noted.append((plan.max_steps, None))
        return supports(plan)

    def running(entries: Sequence[ScheduledRequest], steps: int) -> tuple[list[StepOutput], StepTimes]:
        done = run(entries, steps)
        noted[-1] = noted[-1][0], done[1].steps
        return done

    override(burst, supports=planning, run=running)
    return noted


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(
    ("acceptance_method", "k", "streams"),
    [("auto", 0, False), ("match", 1, False), ("rejection", 3, True), ("rejection", 3, False), ("block", 4, False)],
)
def test_same_outputs(folders: tuple[Path, Path], acceptance_method: str, k: int, shape: str, streams: bool) -> None:
    asked = requests(SHAPES[shape], streams)
    whole, steps = engine_of(folders, acceptance_method, k), readable(folders, acceptance_method, k)
    noted = calls(whole)
    assert written(whole, asked) == written(steps, asked)
    first, second = whole.metrics(), steps.metrics()
    for name in ("rounds", "target_calls", "generation_tokens", "drafts", "draft_tokens", "accepted_tokens"):
        assert getattr(first, name) == getattr(second, name), name
    longest = max(rounds or 0 for _, rounds in noted)
    if shape == "edited":
        assert longest == 0
    elif shape != "truncated" or not k:  # drafts from a truncated law are made step by step
        assert longest > 1


@pytest.mark.parametrize("shape", ["greedy", "sampled"])
@pytest.mark.parametrize(("acceptance_method", "k"), [("match", 3), ("block", 4)])
def test_drafts_of_different_lengths(folders: tuple[Path, Path], acceptance_method: str, k: int, shape: str) -> None:
    asked = uneven(requests(SHAPES[shape], streams=False), k)
    whole, steps = engine_of(folders, acceptance_method, k), readable(folders, acceptance_method, k)
    noted = calls(whole)
    assert written(whole, asked) == written(steps, asked)
    assert max(rounds or 0 for _, rounds in noted) > 1


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("acceptance_method", ["match", "block"])
def test_drafts_that_somebody_else_made(folders: tuple[Path, Path], acceptance_method: str, shape: str) -> None:
    asked, calls = requests(SHAPES[shape], streams=False), list[Any]()
    steps, whole = (
        llama_engine(load(folders[0]), NgramDrafter(1, 3), k=3, acceptance_method=acceptance_method, native=native)
        for native in ("off", "auto")
    )
    burst = whole.execution_mode.components.burst
    assert burst is not None
    verify = burst.verify

    def noting(*given: Any) -> Any:
        calls.append(verify(*given))
        return calls[-1]

    override(burst, verify=noting)
    assert written(whole, asked) == written(steps, asked)
    assert any(calls) == (shape != "edited")


def test_drafts_with_what_they_were_drawn_from(folders: tuple[Path, Path]) -> None:
    asked = requests(SHAPES["truncated"], streams=False)  # a drafter draws from a truncated law step by step
    whole, steps = engine_of(folders, "block", 3), readable(folders, "block", 3)
    assert written(whole, asked) == written(steps, asked)
    burst = whole.execution_mode.components.burst
    assert isinstance(burst, NativeMultiStep) and burst.working > 0


def test_a_burst_keeps_to_its_time(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cospec.native.multi_step.SECONDS", 0.0)
    engine = engine_of(folders, "auto", 3)
    noted = calls(engine)
    written(engine, requests(SHAPES["greedy"], streams=False))
    assert {rounds for _, rounds in noted} <= {None, 1} and max(allowed for allowed, _ in noted) > 1


@pytest.mark.parametrize("shape", ["greedy", "seeded"])
def test_a_policy_that_learns(folders: tuple[Path, Path], shape: str) -> None:
    """Its plan lasts for several rounds, and whatever it decides the tokens are the same."""
    asked = requests(SHAPES[shape], streams=False)
    plain = engine_of(folders, "match", 0)
    whole = llama_engine(load(folders[0]), ModelDrafter(load(folders[1])), k="auto", acceptance_method="match")
    noted = calls(whole)
    found, expected = written(whole, asked), written(plain, asked)
    assert {id: rows[0] for id, rows in found.items()} == {id: rows[0] for id, rows in expected.items()}
    assert max(rounds or 0 for _, rounds in noted) > 1


def test_one_who_calls_does_not_wait_for_further_rounds(folders: tuple[Path, Path]) -> None:
    engine = engine_of(folders, "auto", 3)
    noted = calls(engine)
    readable, writable = os.pipe()
    engine.set_wakeup_fd(readable)
    os.write(writable, b"!")
    written(engine, requests(SHAPES["greedy"], streams=False))
    assert {rounds for _, rounds in noted} <= {None, 1} and max(allowed for allowed, _ in noted) > 1
    os.read(readable, 1)
    noted.clear()
    written(engine, requests(SHAPES["greedy"], streams=False))
    assert max(rounds or 0 for _, rounds in noted) > 1
    os.close(readable)
    os.close(writable)


def test_who_reads_along_hears_of_all_rounds_of_a_call_at_once(folders: tuple[Path, Path]) -> None:
    engine = engine_of(folders, "match", 2)
    noted = calls(engine)
    streamed, silent = requests(SHAPES["greedy"], streams=False)[:2]
    for request in (replace(streamed, streams=True), silent):
        engine.add(request)
    while engine.has_work:
        before = len(noted)
        events = engine.step()
        rounds = noted[-1][1] if len(noted) > before else None
        if rounds is not None and rounds > 1:
            assert [event.id for event in events].count(streamed.id) <= 1
            told = [event for event in events if event.id == streamed.id]
            assert not told or len(told[0].tokens) == len(told[0].sources) >= rounds
    assert max(rounds or 0 for _, rounds in noted) > 1


def test_little_room(folders: tuple[Path, Path]) -> None:
    asked = requests(SHAPES["sampled"], streams=False)
    whole, steps = engine_of(folders, "block", 3, pages=14), readable(folders, "block", 3, pages=14)
    found, expected = written(whole, asked), written(steps, asked)
    assert whole.scheduler.preempted > 0
    assert {id: len(rows[0]) for id, rows in found.items()} == {id: len(rows[0]) for id, rows in expected.items()}


def test_logits_that_are_no_numbers_end_the_request(folders: tuple[Path, Path]) -> None:
    ends = []
    for native in ("auto", "off"):
        target = load(folders[0])
        engine = llama_engine(target, ModelDrafter(load(folders[1]), native=native == "auto"), k=2, native=native)
        (request,) = requests(SHAPES["greedy"], streams=False)[:1]
        engine.add(request)
        engine.step()
        for layer in cast(Any, target).cache.layers:
            layer.values.fill_(torch.nan)
        events = [event for _ in range(3) for event in engine.step()]
        ends.append([(event.finish, event.error, event.tokens) for event in events])
    assert ends[0] == ends[1] and ends[0][0][1]


def test_a_target_without_a_native_forward(folders: tuple[Path, Path]) -> None:
    target = load(folders[0], fused="never")
    assert why_not(target) == "the target has no native forward"
    assert NativeMultiStep.of(target, lambda sequence: Match(), None, whole=True) is None


ODD = {
    "logprobs": {"logprobs": 2},
    "prompt_logprobs": {"prompt_logprobs": 1},
    "penalties, bias or min_tokens": {"presence_penalty": 1.0},
    "truncated sampling": {"top_k": 12},
}


@pytest.mark.parametrize("reason", list(ODD))
@pytest.mark.parametrize(("acceptance_method", "k"), [("match", 3), ("block", 4)])
def test_neighbours_of_a_readable_request(
    folders: tuple[Path, Path], acceptance_method: str, k: int, reason: str
) -> None:
    """They have the outputs that they have alone, in steps that share a forward, and run natively after that."""
    plain = requests(SHAPES["sampled"], streams=False)
    odd = replace(plain[0], id="odd", sampling=replace(plain[0].sampling, max_tokens=12, **cast(Any, ODD[reason])))
    engine, steps = engine_of(folders, acceptance_method, k), readable(folders, acceptance_method, k)
    found = written(engine, [odd, *plain])
    assert found == written(steps, [odd, *plain])
    alone = written(readable(folders, acceptance_method, k), plain)
    assert {id: row for id, row in found.items() if id != "odd"} == alone
    counted = engine.metrics()
    assert min(counted.readable_requests[reason], counted.readable_requests[SHARED], counted.native_requests) > 1
    assert steps.metrics().native_requests == 0 and set(steps.metrics().readable_requests) == {"native off"}


@pytest.mark.parametrize("shape", ["sampled", "truncated"])
def test_native_steps_with_other_draws_are_seen(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """The comparison of both ways can fail: here the library is given other seeds than the readable way has."""
    asked = requests(SHAPES[shape], streams=False)
    monkeypatch.setattr(
        "cospec.native.multi_step.words_of",
        lambda request, method: words_of(replace(request, seed=request.seed + 1), method),
    )
    found, expected = written(engine_of(folders, "block", 3), asked), written(readable(folders, "block", 3), asked)
    assert {id: row[0] for id, row in found.items()} != {id: row[0] for id, row in expected.items()}


def test_reasons_change_nothing(folders: tuple[Path, Path]) -> None:
    """Asking why requests cannot run reserves no page and moves no request."""
    engine = engine_of(folders, "block", 3)
    for request in requests(SHAPES["sampled"], streams=False):
        engine.add(request)
    for _ in range(4):
        engine.step()
    burst, drafter = engine.execution_mode.components.burst, engine.execution_mode.components.drafter
    assert burst is not None and isinstance(drafter, ModelDrafter)
    plan = engine.scheduler.plan()
    pages = [drafter.model.pages, engine.parts.model.pages]
    before = [(pool.usage, [list(cast(Any, pool).table(e.sequence.id)) for e in plan.entries]) for pool in pages]
    assert burst.supports(plan) == {} == burst.supports(plan)
    crowded = replace(plan, max_steps=1000)
    assert set(burst.supports(crowded).values()) == {"no room in the drafter's KV cache"}
    assert before == [
        (pool.usage, [list(cast(Any, pool).table(e.sequence.id)) for e in plan.entries]) for pool in pages
    ]
