"""Steps that run as one call are timed as such calls, and leave no sequence in the caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import pytest

from cospec.acceptance.match import Match
from cospec.core.interfaces import Model
from cospec.core.types import Draft, DraftContext, ScheduledRequest, SchedulerOutput
from cospec.core.verifier import TargetVerifier
from cospec.drafters.model import ModelDrafter
from cospec.ensemble.blends.weighted import Single
from cospec.native import library
from cospec.native.multi_step import NativeMultiStep
from cospec.profiling.measure import STEPS_PER_CALL, MeasurementGrid, MultiStepTimer, measure_multi_steps
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from harness.llamas import VOCAB, load

pytestmark = pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine ends no call early."""
    monkeypatch.setattr("cospec.native.multi_step.SECONDS", 60.0)


def runner_of(target: Model, drafter: ModelDrafter) -> NativeMultiStep:
    assert target.native_forward is not None
    verifier = TargetVerifier(target, Single(), {"match": Match()})
    return NativeMultiStep.of(target.native_forward, verifier, drafter, True)


class Noted:
    """A runner that notes what was run, and gives a reason against steps of some numbers of sequences."""

    def __init__(self, runner: NativeMultiStep, but: int = 0) -> None:
        assert runner.drafts
        self._runner, self._but = runner, but
        self.found: list[tuple[int, int, int]] = []  # sequences, draft length, rounds

    def supports(self, plan: SchedulerOutput) -> dict[str, str]:
        return {"": "left out"} if len(plan.entries) == self._but else self._runner.supports(plan)

    def run(self, entries: Sequence[ScheduledRequest], steps: int, drafts: Mapping[str, Draft | None]) -> object:
        done = self._runner.run(entries, steps, drafts)
        self.found.append((len(entries), entries[0].budget.depth, done[1].steps))
        return done


@pytest.mark.parametrize("but", [0, 4])
def test_points_are_rounds_that_run_as_one(folders: tuple[Path, Path], but: int) -> None:
    target, drafter = load(folders[0], pages=400), ModelDrafter(load(folders[1], pages=400))
    noted = Noted(runner_of(target, drafter), but)
    grid = MeasurementGrid((8, 24), (1, 4), (1, 3), (16,))
    forwards, drafts = measure_multi_steps(target, drafter, grid, 1.0, cast(NativeMultiStep, noted))
    assert sorted((s.sequences, s.tokens / s.sequences) for s in forwards) == sorted(
        [(n, t) for _ in grid.contexts for n in (1, 4) for t in (1, 3)] + [(1, 16)]
    )
    for s in forwards:
        ahead = min((s.context / s.sequences - c for c in grid.contexts), key=abs)
        stepped = s.sequences == but or s.tokens in grid.chunks
        assert ahead == 0 if stepped else 0 < ahead < STEPS_PER_CALL * s.tokens / s.sequences
    assert {(s.sequences, s.passes) for s in drafts} == {(1, 2), (4, 2)}
    assert {(n, depth) for n, depth, _ in noted.found} == {(n, depth) for n in {1, 4} - {but} for depth in (0, 2)}
    assert target.pages.usage == drafter.model.pages.usage == 0
    drafter.model.pages.check_integrity()


def test_every_call_begins_at_the_same_place(folders: tuple[Path, Path]) -> None:
    target, drafter = load(folders[0], pages=400), ModelDrafter(load(folders[1], pages=400))
    text = [(7 * n) % VOCAB for n in range(20)]
    greedy = SamplingParams(temperature=0.0)
    contexts = [DraftContext(f"r{n}", text, 1, greedy, n, StreamKind.TARGET) for n in range(2)]
    for context in contexts:
        target.pages.open_sequence(context.id, ())
        assert target.pages.allocate(context.id, 100)
    timer = MultiStepTimer(runner_of(target, drafter))
    _, first, second = (timer.time_steps(contexts, 2) for _ in range(3))  # the first has to read the texts
    assert len(first) == STEPS_PER_CALL - 1 and [known for known, *_ in first] == [known for known, *_ in second]
    assert 2 * 19 < first[0][0] <= 2 * 19 + 2 * 3, "the first step is left out, and wrote something"
    assert all(draft > 0 and target > 0 for _, draft, target in first)
