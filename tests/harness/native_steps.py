"""Engines with and without native steps, and what they write."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cospec.core.engine import Engine
from cospec.core.stats import StepTimes
from cospec.core.types import Draft, Event, Request, ScheduledRequest, SchedulerOutput, SpeculationParams, StepOutput
from cospec.drafters.model import ModelDrafter
from cospec.native.library import PLAIN, NativeBlend
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.llamas import VOCAB, llama_engine, load
from harness.methods import override

LENGTHS = (30, 41, 17, 30, 3)  # of outputs that end in different rounds
SHAPES = {
    "greedy": SamplingParams(temperature=0),
    "sampled": SamplingParams(temperature=0.9),
    "seeded": SamplingParams(temperature=1.0, seed=5),
    "truncated": SamplingParams(temperature=0.8, top_k=12, top_p=0.9),
    "stopped": SamplingParams(temperature=1.0, stop_token_ids=tuple(range(0, VOCAB, 9))),
    "edited": SamplingParams(temperature=0.7, repetition_penalty=1.2),
}


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
        replace(request, speculation=SpeculationParams(length=n % (longest + 1), enabled=n != 3))
        for n, request in enumerate(asked)
    ]


def engine_of(
    folders: tuple[Path, Path], acceptance_method: str, k: int, pages: int = 200, native: str = "auto", **config: Any
) -> Engine:
    """An engine without text, with a drafter if ``k`` is not 0; ``config`` as for ``llama_engine``."""
    drafter = ModelDrafter(load(folders[1], pages=pages), native=native == "auto") if k else None
    target = load(folders[0], pages=pages)
    return llama_engine(target, drafter, k=k, acceptance_method=acceptance_method, native=native, **config)


def readable(folders: tuple[Path, Path], acceptance_method: str, k: int, pages: int = 200) -> Engine:
    return engine_of(folders, acceptance_method, k, pages, "off")


def written(engine: Engine, asked: list[Request], gap: int = 0) -> dict[str, list[Any]]:
    """What each output came to be; the times are left out. ``gap``: steps from one arrival to the next."""
    by_request: dict[str, list[Event]] = {}
    waiting, steps = list(asked), 0
    while waiting or engine.has_work:
        while waiting and (not gap or steps % gap == 0):
            engine.add(waiting.pop(0))
            if gap:
                break
        steps += 1
        for event in engine.step():
            by_request.setdefault(event.id, []).append(event)
        engine.check_integrity()
    found: dict[str, list[Any]] = {}
    for id, events in by_request.items():
        stats = events[-1].stats
        assert stats is not None
        tokens = [token for event in events for token in event.tokens]
        sources = [name for event in events for name in event.sources]
        probs = [row for event in events for row in event.logprobs], events[0].prompt_logprobs
        stats = replace(stats, ttft=None, e2e=None)
        found[id] = [tokens, sources, events[-1].finish, events[-1].stop_reason, events[-1].error, stats, probs]
    return found


def calls(engine: Engine) -> list[tuple[int, int]]:
    """Note the steps that each plan allows and those that the call ran, from now on."""
    runner, noted = engine.execution_mode.components.multi_step, list[tuple[int, int]]()
    assert runner is not None
    supports, run = runner.supports, runner.run

    def planning(plan: SchedulerOutput) -> dict[str, str]:
        noted.append((plan.max_steps, 0))
        return supports(plan)

    def running(
        entries: Sequence[ScheduledRequest],
        steps: int,
        drafts: Mapping[str, Draft | None],
        blend: NativeBlend = PLAIN,
    ) -> tuple[list[StepOutput], StepTimes]:
        done = run(entries, steps, drafts, blend)
        noted[-1] = noted[-1][0], done[1].steps
        return done

    override(runner, supports=planning, run=running)
    return noted
