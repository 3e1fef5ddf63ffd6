"""Tokens from drafts made ahead follow the target's distribution: a chi-square test of these tokens alone.

A window counts where a step verifies a draft that was made during the verification before. Executors hand over each
call and wait for its end. So the drafts made ahead are the same in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from cospec.core.interfaces import ModeComponents
from cospec.core.types import Draft, Request, ScheduledRequest, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.execution.draft_ahead import DraftAhead
from cospec.execution.draft_buffer import DraftBuffer, DraftRequest
from cospec.execution.draft_dispatcher import AHEAD_SEEDS, DraftDispatcher
from cospec.execution.draft_for_outcomes import DraftForOutcomes
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind, derive_seed, exponentials
from cospec.sampling_params import SamplingParams
from cospec.verify.controls import KeepsAll
from harness.overlap import Picky, under
from harness.reference import joint_distribution_of
from harness.statistics import fit
from harness.toys import drawing, make_request, run_all, tokens_of, toy_engine, verifier_of

LIKELY, IMPOSSIBLE = 1e-4, 1e-6
METHODS = ("match", "rejection", "block")
PROMPT, PARAMS = (0, 1), SamplingParams(max_tokens=80)
COUNT = 200  # requests
FEW = 50  # requests that show a gross mistake, or that two runs are the same
DEPTH = 2  # tokens of a draft, and of a window

Windows = dict[int, list[tuple[int, ...]]]
"""By the token before: the first tokens after the start of a step whose draft was made ahead."""


class NotingBuffer(DraftBuffer):
    """Notes the lengths of sequences at which drafts made ahead are taken."""

    def __init__(self) -> None:
        super().__init__()
        self.starts: dict[str, list[int]] = {}

    def take(self, entry: ScheduledRequest) -> Draft | None:
        before = sum(self.used.values())
        draft = super().take(entry)
        if sum(self.used.values()) > before:
            self.starts.setdefault(entry.sequence.id, []).append(len(entry.sequence.tokens))
        return draft


class Noted(DraftAhead):
    """``draft-ahead`` with a ``NotingBuffer``."""

    def __init__(self, components: ModeComponents) -> None:
        super().__init__(components)
        self.buffer = self.dispatcher.buffer = NotingBuffer()


class CountingDispatcher(DraftDispatcher):
    """Counts the drafts that continue all outcomes."""

    asked = 0

    def continue_outcomes(self, entry: ScheduledRequest, draft: Draft | None, nodes: int) -> DraftRequest | None:
        found = super().continue_outcomes(entry, draft, nodes)
        self.asked += found is not None
        return found


class NotedOutcomes(DraftForOutcomes):
    """``draft-for-outcomes`` with a ``NotingBuffer``."""

    def __init__(self, components: ModeComponents) -> None:
        super().__init__(components)
        self.dispatcher = self.counting = CountingDispatcher(components)
        self.buffer = self.dispatcher.buffer = NotingBuffer()


class KeepsDrawn(KeepsAll):
    """Wrong on purpose: keeps tokens drawn with the target's random numbers, as ``match`` lets drafters draw."""

    stream_kind = StreamKind.TARGET


class NotedPicky(Picky, Noted):
    """Wrong on purpose: keeps what was made ahead only where it likes the tokens."""


class OneStream(RandomStreams):
    """Wrong on purpose: tests tokens drafted ahead with the numbers that drew them.

    For other drafts these numbers are as good as any: nothing was drawn with them.
    """

    def uniforms(self, position: int, count: int, kind: StreamKind, branch: int = 0) -> Floats:
        verified = self.base - 1 - DEPTH  # tokens before the draft that was under verification
        seed = derive_seed(self.seed, AHEAD_SEEDS + verified)
        places = range(position, position + count)
        races = [exponentials((seed, StreamKind.DRAFT, 0, 0, place, self.base - 1), 2) for place in places]
        return np.array([race[0] / race.sum() for race in races])  # below q of the word 0 where that word was drawn


def unshifted(draft: Draft, kept: Sequence[int], parents: tuple[int, ...], base: int) -> Draft:
    """Wrong on purpose: the kept tokens come with q of the tokens before them."""
    assert draft.q is not None
    tokens, names = tuple(draft.tokens[node] for node in kept), tuple(draft.drafters[node] for node in kept)
    return replace(draft, base_len=base, tokens=tokens, parents=parents, drafters=names, q=draft.q[: len(kept)])


def target() -> ToyModel:
    return ToyModel(2, order=1, seed=1, sharpness=0.3)


def windows(
    acceptance_method: str,
    mode: type[Noted | NotedOutcomes] = Noted,
    executor: str = "inline",
    keeps_all: bool = False,
    count: int = COUNT,
) -> Windows:
    """The windows of all requests; those of one request do not overlap."""
    made = toy_engine(target(), ModelDrafter(ToyModel(2, order=1, seed=7)), acceptance_method, DEPTH)
    if keeps_all:
        rule = KeepsDrawn() if mode is NotedOutcomes else KeepsAll()
        verifier_of(made).acceptance_methods = {acceptance_method: rule}
    engine = under(made, "draft-ahead", executor, mode)
    found = tokens_of(run_all(engine, [_request(seed) for seed in range(count)], check=False))
    execution_mode = engine.execution_mode
    assert isinstance(execution_mode, Noted | NotedOutcomes)
    if isinstance(execution_mode, NotedOutcomes):
        assert execution_mode.counting.asked > count, "no draft continued the outcomes"
    windows: Windows = {}
    for id, starts in execution_mode.buffer.starts.items():
        tokens, free = [*PROMPT, *found[id]], 0
        for start in starts:
            if free <= start <= len(tokens) - DEPTH:
                free = start + DEPTH
                windows.setdefault(tokens[start - 1], []).append(tuple(tokens[start:free]))
    execution_mode.close()
    return windows


def _request(seed: int) -> Request:
    chosen = SpeculationParams(length=DEPTH)  # no policy decides by measured times
    return replace(make_request(f"r{seed}", PROMPT, PARAMS, speculation=chosen), seed=seed)


def p_value(found: Windows) -> float:
    """The least p-value over the tokens before."""
    wanted = {before: joint_distribution_of(target(), PARAMS, (before,), DEPTH) for before in found}
    return min(fit(each, wanted[before]) for before, each in found.items())


MODES = [*((Noted, method) for method in METHODS), (NotedOutcomes, "match")]  # others draft for no outcomes


@pytest.mark.parametrize(("mode", "acceptance_method"), MODES)
def test_tokens_drafted_ahead_follow_the_distribution(
    acceptance_method: str, mode: type[Noted | NotedOutcomes]
) -> None:
    found = windows(acceptance_method, mode)
    assert len(found) == 2 and all(len(each) > 200 for each in found.values()), "too few tokens were drafted ahead"
    assert p_value(found) > LIKELY


@pytest.mark.parametrize("acceptance_method", METHODS)
def test_a_thread_drafts_the_same_ahead(acceptance_method: str) -> None:
    assert windows(acceptance_method, executor="prompt worker", count=FEW) == windows(acceptance_method, count=FEW)


@pytest.mark.parametrize(("mode", "acceptance_method"), MODES)
def test_a_rule_that_keeps_everything_is_seen(acceptance_method: str, mode: type[Noted | NotedOutcomes]) -> None:
    assert p_value(windows(acceptance_method, mode, keeps_all=True, count=FEW)) < IMPOSSIBLE


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_choosing_drafts_made_ahead_by_their_tokens_is_seen(acceptance_method: str) -> None:
    assert p_value(windows(acceptance_method, NotedPicky)) < IMPOSSIBLE


MISTAKES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "one stream": lambda: drawing(OneStream),
    "q of the tokens before": lambda: patch("cospec.drafters.draft_subtrees.part", unshifted),
}


@pytest.mark.parametrize(
    ("acceptance_method", "mistake", "count"),
    [
        ("block", "one stream", COUNT),
        ("block", "q of the tokens before", FEW),
        ("rejection", "q of the tokens before", FEW),
    ],
)
def test_a_mistake_with_drafts_made_ahead_is_seen(acceptance_method: str, mistake: str, count: int) -> None:
    with MISTAKES[mistake]():
        assert p_value(windows(acceptance_method, count=count)) < IMPOSSIBLE
