"""Rounds that the native library runs as one call give what they give step by step: tokens, authors, counts, ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from cospec.core.engine import Engine
from cospec.drafters.lookup import LookupDrafter
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.suffix import SuffixDrafter
from cospec.native import library
from cospec.native.acceptance import words_of
from cospec.native.multi_step import NativeMultiStep, why_not
from harness.llamas import llama_engine, load
from harness.methods import override
from harness.native_steps import SHAPES, calls, engine_of, readable, requests, uneven, written

pytestmark = [
    pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels"),
    pytest.mark.usefixtures("no_time_limit"),
]

LOOKUPS: dict[str, Callable[[bool], LookupDrafter]] = {
    "ngram": lambda native: NgramDrafter(1, 3, native=native),
    "suffix": lambda native: SuffixDrafter(native=native),
}


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
    for name in ("steps", "target_calls", "generation_tokens", "drafts", "draft_tokens", "accepted_tokens"):
        assert getattr(first, name) == getattr(second, name), name
    longest = max(rounds for _, rounds in noted)
    if shape == "edited":
        assert longest == 1
    elif shape != "truncated" or not k:  # drafts from a truncated distribution are made step by step
        assert longest > 1


@pytest.mark.parametrize("shape", ["greedy", "sampled"])
@pytest.mark.parametrize(("acceptance_method", "k"), [("match", 3), ("block", 4)])
def test_drafts_of_different_lengths(folders: tuple[Path, Path], acceptance_method: str, k: int, shape: str) -> None:
    asked = uneven(requests(SHAPES[shape], streams=False), k)
    whole, steps = engine_of(folders, acceptance_method, k), readable(folders, acceptance_method, k)
    noted = calls(whole)
    assert written(whole, asked) == written(steps, asked)
    assert max(rounds for _, rounds in noted) > 1


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("acceptance_method", ["match", "block"])
def test_drafts_that_somebody_else_made(folders: tuple[Path, Path], acceptance_method: str, shape: str) -> None:
    asked, calls = requests(SHAPES[shape], streams=False), list[Any]()
    steps, whole = (
        llama_engine(load(folders[0]), NgramDrafter(1, 3), k=3, acceptance_method=acceptance_method, native=native)
        for native in ("off", "auto")
    )
    runner = whole.execution_mode.components.multi_step
    assert runner is not None
    run = runner.run

    def noting(entries: Any, rounds: int, drafts: Any) -> Any:
        calls.append(drafts)
        return run(entries, rounds, drafts)

    override(runner, run=noting)
    assert written(whole, asked) == written(steps, asked)
    assert any([any(drafts.values()) for drafts in calls])


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize("acceptance_method", ["match", "rejection", "block"])
@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_that_the_call_looks_up(
    folders: tuple[Path, Path], acceptance_method: str, shape: str, method: str
) -> None:
    asked = requests(SHAPES[shape], streams=False)
    asked += [replace(request, id=f"again {request.id}") for request in asked]  # responses of others help

    def engine(native: str) -> Engine:
        drafter = LOOKUPS[method](native == "auto")
        return llama_engine(load(folders[0]), drafter, k=3, acceptance_method=acceptance_method, native=native)

    steps, whole = engine("off"), engine("auto")
    noted = calls(whole)
    assert written(whole, asked[:5]) == written(steps, asked[:5])
    assert written(whole, asked[5:]) == written(steps, asked[5:])
    first, second = whole.metrics(), steps.metrics()
    for name in ("steps", "target_calls", "generation_tokens", "drafts", "draft_tokens", "accepted_tokens"):
        assert getattr(first, name) == getattr(second, name), name
    assert first.draft_tokens
    if shape != "edited":
        assert max(ran for _, ran in noted) > 1 and not first.python_path_requests


@pytest.mark.parametrize("method", ["ngram", "suffix", "model"])
@pytest.mark.parametrize("k", [9, 16])
def test_a_limit_of_nodes_also_limits_the_depth(folders: tuple[Path, Path], method: str, k: int) -> None:
    """The scheduler reserves pages for so many nodes and no more."""
    asked = requests(SHAPES["greedy"], streams=False)

    def engine(native: str) -> Engine:
        on = native == "auto"
        drafter = LOOKUPS[method](on) if method in LOOKUPS else ModelDrafter(load(folders[1]), native=on)
        return llama_engine(load(folders[0], pages=40), drafter, k=k, native=native, max_nodes=3, max_num_seqs=2)

    steps, whole = engine("off"), engine("auto")
    assert written(whole, asked) == written(steps, asked)
    first, second = whole.metrics(), steps.metrics()
    assert first.draft_tokens == second.draft_tokens and first.num_preemptions == second.num_preemptions
    assert first.draft_tokens


def test_drafts_with_what_they_were_drawn_from(folders: tuple[Path, Path]) -> None:
    asked = requests(SHAPES["truncated"], streams=False)  # a drafter draws from a truncated distribution step by step
    whole, steps = engine_of(folders, "block", 3), readable(folders, "block", 3)
    assert written(whole, asked) == written(steps, asked)
    runner = whole.execution_mode.components.multi_step
    assert isinstance(runner, NativeMultiStep) and runner.working > 0


def test_a_burst_keeps_to_its_time(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cospec.native.multi_step.SECONDS", 0.0)
    engine = engine_of(folders, "auto", 3)
    noted = calls(engine)
    written(engine, requests(SHAPES["greedy"], streams=False))
    assert {rounds for _, rounds in noted} == {1} and max(allowed for allowed, _ in noted) > 1


@pytest.mark.parametrize("shape", ["greedy", "seeded"])
def test_a_policy_that_learns(folders: tuple[Path, Path], shape: str) -> None:
    """Its plan lasts for several rounds, and whatever it decides the tokens are the same."""
    asked = requests(SHAPES[shape], streams=False)
    plain = engine_of(folders, "match", 0)
    whole = llama_engine(load(folders[0]), ModelDrafter(load(folders[1])), k="auto", acceptance_method="match")
    noted = calls(whole)
    found, expected = written(whole, asked), written(plain, asked)
    assert {id: rows[0] for id, rows in found.items()} == {id: rows[0] for id, rows in expected.items()}
    assert max(rounds for _, rounds in noted) > 1


def test_one_who_calls_does_not_wait_for_further_rounds(folders: tuple[Path, Path]) -> None:
    engine = engine_of(folders, "auto", 3)
    noted = calls(engine)
    readable, writable = os.pipe()
    engine.set_wakeup_fd(readable)
    os.write(writable, b"!")
    written(engine, requests(SHAPES["greedy"], streams=False))
    assert {rounds for _, rounds in noted} == {1} and max(allowed for allowed, _ in noted) > 1
    os.read(readable, 1)
    noted.clear()
    written(engine, requests(SHAPES["greedy"], streams=False))
    assert max(rounds for _, rounds in noted) > 1
    os.close(readable)
    os.close(writable)


def test_a_stream_receives_all_rounds_of_a_call_at_once(folders: tuple[Path, Path]) -> None:
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
            received = [event for event in events if event.id == streamed.id]
            assert not received or len(received[0].tokens) == len(received[0].sources) >= rounds
    assert max(rounds for _, rounds in noted) > 1


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


@pytest.mark.parametrize("shape", ["sampled", "truncated"])
def test_native_steps_with_other_draws_are_seen(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    """The comparison of both ways can fail: here the library is given other seeds than the Python path has."""
    asked = requests(SHAPES[shape], streams=False)
    monkeypatch.setattr(
        "cospec.native.native_request.words_of",
        lambda request, method: words_of(replace(request, seed=request.seed + 1), method),
    )
    found, expected = written(engine_of(folders, "block", 3), asked), written(readable(folders, "block", 3), asked)
    assert {id: row[0] for id, row in found.items()} != {id: row[0] for id, row in expected.items()}


def test_reasons_change_nothing(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking why requests cannot run reserves no page and moves no request."""
    engine = engine_of(folders, "block", 3)
    for request in requests(SHAPES["sampled"], streams=False):
        engine.add(request)
    for _ in range(4):
        engine.step()
    runner, drafter = engine.execution_mode.components.multi_step, engine.execution_mode.components.drafter
    assert runner is not None and isinstance(drafter, ModelDrafter)
    plan = engine.scheduler.plan()
    pages = [drafter.model.pages, engine.parts.model.pages]
    before = [(pool.usage, [list(cast(Any, pool).table(e.sequence.id)) for e in plan.entries]) for pool in pages]
    assert runner.supports(plan) == {} == runner.supports(plan)
    with monkeypatch.context() as near:
        near.setattr(drafter.model, "max_len", max(len(entry.sequence.tokens) for entry in plan.entries))
        assert set(runner.supports(plan).values()) == {"the request is near the drafter's context limit"}
    assert runner.supports(replace(plan, max_steps=1000)) == {}, "no call goes beyond the end of a request"
    with monkeypatch.context() as full:
        full.setattr(type(drafter.model.pages), "can_allocate", lambda *given: False)
        assert set(runner.supports(plan).values()) == {"no room in the drafter's KV cache"}
    assert before == [
        (pool.usage, [list(cast(Any, pool).table(e.sequence.id)) for e in plan.entries]) for pool in pages
    ]
