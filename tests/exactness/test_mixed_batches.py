"""Requests of all kinds share native steps: outputs are those of readable steps, and reasons concern one request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from cospec.core.types import Request, SpeculationParams
from cospec.drafters.ngram import NgramDrafter
from cospec.native import library
from cospec.native.acceptance import NO_METHOD
from cospec.native.native_drafter import TREE
from cospec.native.native_request import EDITED, PROMPT_LOGPROBS
from harness.llamas import llama_engine, load
from harness.native_steps import SHAPES, calls, engine_of, readable, requests, written

pytestmark = pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")


@pytest.fixture(autouse=True)
def no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls run as many steps on a busy machine."""
    monkeypatch.setattr("cospec.native.multi_step.SECONDS", 1e9)


ODD: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 2},
    "no top": {"logprobs": 0},
    PROMPT_LOGPROBS: {"prompt_logprobs": 1, "logprobs": 1},
    EDITED: {"presence_penalty": 1.0, "logprobs": 1},
    "bias": {"logit_bias": {3: 4.0, 5: -100.0}},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": tuple(range(0, 64, 3))},
    "truncated sampling": {"top_k": 12, "logprobs": 1},
}
NATIVE = ("logprobs", "no top")


def odd(like: Request, kind: str, **more: Any) -> Request:
    return replace(like, id=f"odd {kind}", sampling=replace(like.sampling, max_tokens=12, **{**ODD[kind], **more}))


def without_odd(found: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {id: row for id, row in found.items() if not id.startswith("odd")}


@pytest.fixture(scope="module")
def without_odd_requests(folders: tuple[Path, Path]) -> Callable[[str, int, str], dict[str, list[Any]]]:
    """What readable steps write for requests of a shape, among which none is odd."""

    @cache
    def outputs(acceptance_method: str, k: int, shape: str) -> dict[str, list[Any]]:
        return written(readable(folders, acceptance_method, k), requests(SHAPES[shape], streams=False))

    return outputs


@pytest.mark.parametrize("kind", list(ODD))
@pytest.mark.parametrize("shape", ["greedy", "sampled"])
@pytest.mark.parametrize(
    ("acceptance_method", "k"), [("auto", 0), ("match", 3), ("rejection", 2), ("block", 4), ("recursive", 2)]
)
def test_neighbours(
    folders: tuple[Path, Path],
    without_odd_requests: Callable[[str, int, str], dict[str, list[Any]]],
    acceptance_method: str,
    k: int,
    shape: str,
    kind: str,
) -> None:
    """Bit by bit what readable steps write; the neighbours run natively, also while the odd request is there."""
    plain = requests(SHAPES[shape], streams=False)
    asked = [odd(plain[0], kind), *plain]
    engine, steps = engine_of(folders, acceptance_method, k), readable(folders, acceptance_method, k)
    found = written(engine, asked)
    assert found == written(steps, asked)
    assert without_odd(found) == without_odd_requests(acceptance_method, k, shape)
    assert steps.metrics().native_requests == 0 and set(steps.metrics().python_path_requests) == {"native off"}
    if acceptance_method != "recursive" or not k:
        counted = engine.metrics()
        own = counted.python_path_requests
        alone = engine_of(folders, acceptance_method, k)
        written(alone, asked[:1])
        assert counted.native_requests > 1 and own == alone.metrics().python_path_requests
        assert bool(own) == (kind not in NATIVE and not (kind == "truncated sampling" and (not k or shape == "greedy")))


def test_all_kinds_at_once(folders: tuple[Path, Path]) -> None:
    """Every kind with every acceptance method, drafts or none, in one batch."""
    plain = requests(SHAPES["sampled"], streams=False)
    asked = list(plain)
    for number, method in enumerate(("match", "rejection", "block", "recursive", "typical")):
        for kind in ODD:
            like = odd(plain[number], kind, temperature=0.0 if (number + len(kind)) % 3 == 0 else 0.9)
            length = (number + len(kind)) % 4
            choice = SpeculationParams(acceptance_method=method, length=length, enabled=length > 0)
            asked.append(replace(like, id=f"{kind} {method}", speculation=choice, seed=7 * number + len(kind)))
    engine, steps = engine_of(folders, "block", 3, pages=900), readable(folders, "block", 3, pages=900)
    found = written(engine, asked)
    assert found == written(steps, asked) and len(found) == len(asked)
    assert {EDITED, PROMPT_LOGPROBS, "truncated sampling"} <= set(engine.metrics().python_path_requests)


@pytest.mark.parametrize("kind", [None, EDITED, "logprobs"])
@pytest.mark.parametrize("acceptance_method", ["match", "recursive"])
def test_trees(folders: tuple[Path, Path], acceptance_method: str, kind: str | None) -> None:
    """The native step verifies the trees of ``match``; other trees are verified by the rows that the step returns."""
    plain = requests(SHAPES["sampled"], streams=False)
    asked = plain if kind is None else [odd(plain[0], kind), *plain]
    engine, steps = (
        engine_of(folders, acceptance_method, 2, native=native, widths=(3, 2), max_nodes=9)
        for native in ("auto", "off")
    )
    assert written(engine, asked) == written(steps, asked)
    assert engine.metrics().python_path_requests[TREE if acceptance_method == "match" else NO_METHOD] > 1


def test_steps_with_log_probabilities_run_as_one(folders: tuple[Path, Path]) -> None:
    asked = [replace(r, sampling=replace(r.sampling, logprobs=1)) for r in requests(SHAPES["sampled"], streams=False)]
    engine = engine_of(folders, "block", 3)
    noted = calls(engine)
    found = written(engine, asked)
    assert found == written(readable(folders, "block", 3), asked)
    assert max(rounds for _, rounds in noted) > 1 and not engine.metrics().python_path_requests
    assert all(len(row[-1][0]) == len(row[0]) for row in found.values())


def test_handed_back_rows_are_bounded(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Little room for rows makes calls shorter, and changes no output."""
    monkeypatch.setattr("cospec.native.multi_step.MAX_LOGITS_BYTES", 1)
    asked = [replace(r, sampling=replace(r.sampling, logprobs=1)) for r in requests(SHAPES["greedy"], streams=False)]
    engine = engine_of(folders, "match", 2)
    noted = calls(engine)
    assert written(engine, asked) == written(readable(folders, "match", 2), asked)
    assert {rounds for _, rounds in noted} == {1}


def test_prompts_are_computed_in_steps_with_native_drafts(folders: tuple[Path, Path]) -> None:
    """A new request joins native steps at once, in pieces of its prompt."""
    asked = requests(SHAPES["sampled"], streams=False)
    late = replace(asked[2], id="late", prompt=tuple(n % 60 for n in range(60)))
    ways = []
    for native in ("auto", "off"):
        engine = engine_of(folders, "block", 3, native=native, max_num_batched_tokens=24)
        for request in asked[:2]:
            engine.add(request)
        events = [event for _ in range(4) for event in engine.step()]
        engine.add(late)
        while engine.has_work:
            events += engine.step()
        ways.append({event.id: event.tokens for event in events})
        if native == "auto":
            assert not engine.metrics().python_path_requests
    assert ways[0] == ways[1] and len(ways[0]) == 3


@pytest.mark.parametrize("kind", ["logprobs", EDITED])
def test_other_rows_are_seen(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """The comparison of both ways can fail: here the verifier reads rows that are moved by one."""
    from cospec.core.verifier import TargetVerifier

    plain = requests(SHAPES["sampled"], streams=False)
    asked = [odd(plain[0], kind), *plain]
    expected = written(readable(folders, "block", 3), asked)
    outcome, decide = TargetVerifier.output_of, TargetVerifier.decide
    monkeypatch.setattr(
        TargetVerifier, "output_of", lambda s, task, result, rows: outcome(s, task, result, rows.roll(1, 0))
    )
    monkeypatch.setattr(TargetVerifier, "decide", lambda s, tasks, rows: decide(s, tasks, rows.roll(1, 0)))
    found = written(engine_of(folders, "block", 3), asked)
    assert found[asked[0].id] != expected[asked[0].id]
    assert without_odd(found) == without_odd(expected)


def test_rows_that_are_no_numbers_end_the_request(folders: tuple[Path, Path]) -> None:
    ends = []
    for native in ("auto", "off"):
        engine = llama_engine(load(folders[0]), NgramDrafter(1, 3), k=2, native=native)
        engine.add(odd(requests(SHAPES["greedy"], streams=False)[0], EDITED))
        engine.step()
        for layer in cast(Any, engine.parts.model).cache.layers:
            layer.values.fill_(torch.nan)
        events = [event for _ in range(3) for event in engine.step()]
        ends.append([(event.finish, event.error, event.tokens) for event in events])
    assert ends[0] == ends[1] and ends[0][0][1]
