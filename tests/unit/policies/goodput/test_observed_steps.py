"""Rounds that were run as one are the same rounds when they are taken apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cospec.core.stats import StepStats
from cospec.core.types import Commit
from cospec.policies.fixed import Fixed
from cospec.policies.goodput.observed_steps import split_steps
from harness.execution import CPU, World, as_one, steady


class Notes(Fixed):
    """A fixed length, and everything that the policy received about the rounds."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.seen: list[tuple[StepStats, list[Commit]]] = []

    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        self.seen.append((stats, list(commits)))


@pytest.mark.parametrize("length", [0, 3])
def test_each_round_by_itself(length: int) -> None:
    notes = Notes(length)
    World(CPU, steady(0.3, 0.9, 0.6), 3).play(notes, 5)
    stats, commits = as_one(notes.seen)
    assert stats.times.steps == 5 and len(commits) == 15
    found = list(split_steps(stats, commits))
    assert [own for _, own in found] == [own for _, own in notes.seen]
    for (one, _), (before, _) in zip(found, notes.seen, strict=True):
        assert one.total == pytest.approx(before.total)
        assert replace(one, step=before.step, total=before.total) == before


def test_one_round_stays_as_it_is() -> None:
    notes = Notes(2)
    World(CPU, steady(0.5), 1).play(notes, 1)
    assert list(split_steps(*notes.seen[0])) == notes.seen


def test_planning_comes_before_the_first() -> None:
    notes = Notes(2)
    World(CPU, steady(0.5, 0.5), 2).play(notes, 4)
    stats, commits = as_one(notes.seen)
    late = replace(stats, planning=1e-3, total=stats.total + 1e-3)
    found = [one for one, _ in split_steps(late, commits)]
    assert [one.planning for one in found] == [1e-3, 0.0, 0.0, 0.0]
    assert [one.working for one in found] == pytest.approx([one.total for one, _ in split_steps(stats, commits)])


def test_scoring_comes_before_the_first() -> None:
    """A pool scores known tokens before the call, so the first step takes the seconds; no time is lost."""
    notes = Notes(2)
    World(CPU, steady(0.5, 0.5), 2).play(notes, 4)
    stats, commits = as_one(notes.seen)
    scored = replace(stats.times, draft=stats.times.draft + 1e-3, scoring=1e-3)
    found = [one for one, _ in split_steps(replace(stats, times=scored, total=stats.total + 1e-3), commits)]
    assert [one.times.scoring for one in found] == [1e-3, 0.0, 0.0, 0.0]
    assert found[0].times.draft == pytest.approx(stats.times.each[0][0] + 1e-3)
    assert sum([one.total for one in found]) == pytest.approx(stats.total + 1e-3)
