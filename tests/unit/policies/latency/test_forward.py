"""The time model: fits with and without knees, correction while rounds are measured, and a new fit when it is wrong."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.stats import StepStats, StepTimes
from cospec.errors import InvalidInput
from cospec.policies.latency.forward import ForwardLatency, LatencySample, fit, nonnegative_least_squares
from cospec.policies.latency.online_fit import WINDOW
from cospec.policies.latency.step import LatencyModels, StepLatency

TRUE = ForwardLatency(context=1e-7, slopes=(2e-5, 1.5e-4), knees=(32.0,), sequence=1e-5, fixed=1.2e-3)
GRID = list(product((0, 512, 4096), (1, 4, 8, 16, 32, 64, 128, 256), (1, 4, 16)))


def samples(cost: ForwardLatency, stream_kind: float = 0.0) -> list[LatencySample]:
    chance = np.random.default_rng(0)
    return [
        LatencySample(c, max(t, s), s, cost.seconds(c, max(t, s), s) * np.exp(stream_kind * chance.standard_normal()))
        for c, t, s in GRID
    ]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"slopes": (1e-5,), "knees": (8, 16)}, "slopes is (1e-05,); allowed is one more than the knees, here 3."),
        ({"slopes": ()}, "slopes is (); allowed is one more than the knees, here 1."),
        ({"slopes": (0.0, 1.0, 2.0), "knees": (9, 8)}, "knees is (9, 8); allowed is numbers of tokens that rise."),
        ({"fixed": float("inf")}, "fixed is inf; allowed is finite."),
        ({"slopes": (float("nan"),)}, "slopes is (nan,); allowed is finite."),
    ],
)
def test_coefficients_that_make_no_time_model_are_refused(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        ForwardLatency(**given)
    assert str(caught.value) == sentence


def test_a_knee_is_found() -> None:
    found = fit(samples(TRUE))
    assert found.knees == (32.0,)
    assert found.errors(samples(TRUE)).max() < 1e-6
    assert fit(samples(TRUE), knees=()).errors(samples(TRUE)).max() > 0.1, "a straight line is no fit here"


def test_no_knee_where_there_is_none_and_nothing_negative() -> None:
    line = ForwardLatency(0.0, (1e-4,), (), 0.0, 5e-3)
    found = fit(samples(line, stream_kind=0.02))
    assert found.knees == ()
    assert min(found.context, *found.slopes, found.sequence, found.fixed) >= 0
    assert np.median(found.errors(samples(line))) < 0.02
    with pytest.raises(ValueError, match="no samples"):
        fit([])


def test_held_out_points_under_noise() -> None:
    measured = samples(TRUE, stream_kind=0.05)
    found = fit(measured[::2])
    assert np.median(found.errors(measured[1::2])) < 0.1


def test_the_table_and_json_say_the_same() -> None:
    table = TRUE.table(100)
    assert table == pytest.approx([TRUE.tokens(n) for n in range(101)])
    assert ForwardLatency.from_json(TRUE.to_json()) == TRUE
    assert TRUE.scaled(2.0).seconds(7, 40, 3) == pytest.approx(2 * TRUE.seconds(7, 40, 3))


def stats(cost: ForwardLatency, tokens: int, sequences: int = 8, rest: float = 0.0) -> StepStats:
    target = cost.seconds(2000, tokens, sequences)
    return StepStats(0, sequences, tokens, 2000, 0, 0, 0, sequences, StepTimes(0.0, target), target + rest)


def test_a_slower_machine_is_followed() -> None:
    cost = StepLatency(LatencyModels(TRUE, TRUE))
    for n in range(200):
        cost.observe(stats(TRUE.scaled(1.6), 8 + n % 40, rest=3e-4))
    assert cost.target.fixed == pytest.approx(1.6 * TRUE.fixed, rel=0.06)
    cost.learn()
    assert cost.gauges()["prediction_error"] < 0.1
    assert {type(value) for value in cost.gauges().values()} == {float}, "they are sent to another process"
    assert cost.rest.seconds(0, 0, 8) == pytest.approx(3e-4, rel=0.05)
    assert cost.changed > 0


def test_a_wrong_shape_is_learned() -> None:
    wrong, chance = ForwardLatency(0.0, (1e-3,), (), 0.0, 1e-5), np.random.default_rng(0)
    cost = StepLatency(LatencyModels(wrong, wrong))
    for _ in range(4 * WINDOW):
        cost.observe(stats(TRUE, int(chance.integers(8, 200))))
    cost.learn()
    assert cost.gauges()["prediction_error"] < 0.1


def test_a_fit_that_stays_wrong_is_made_anew_and_said() -> None:
    """Sixty times as slow at once, as where a laptop falls asleep: too far to follow step by step."""
    cost, chance = StepLatency(LatencyModels(TRUE, TRUE)), np.random.default_rng(0)
    for n in range(12 * WINDOW):
        cost.observe(stats(TRUE.scaled(1.0 if n < 2 * WINDOW else 60.0), int(chance.integers(8, 200))))
    cost.learn()
    assert cost.gauges()["time_model_refits"] >= 1
    assert cost.gauges()["prediction_error"] < 0.1
    right = StepLatency(LatencyModels(TRUE, TRUE))
    for _ in range(4 * WINDOW):
        right.observe(stats(TRUE, int(chance.integers(8, 200))))
    right.learn()
    assert right.gauges()["time_model_refits"] == 0


def test_overlap_shows_in_the_rounds() -> None:
    cost = StepLatency(LatencyModels(TRUE, TRUE))
    assert not cost.overlaps(alone=False)
    for _ in range(60):
        cost.observe(StepStats(0, 8, 40, 2000, 4, 32, 8, 16, StepTimes(2e-3, 3e-3), 3.1e-3))
    cost.learn()
    assert cost.overlaps(alone=False)
    for _ in range(60):
        cost.observe(StepStats(0, 8, 40, 2000, 4, 32, 8, 16, StepTimes(2e-3, 3e-3), 5.1e-3))
    cost.learn()
    assert not cost.overlaps(alone=False)


@pytest.mark.parametrize("planned", [1, 2], ids=["alone", "control: two sequences"])
def test_a_sequence_alone_says_nothing_about_the_overlap_of_others(planned: int) -> None:
    """Where a step verifies one of two groups, one sequence waits for its draft; later sequences do not."""
    cost, times = StepLatency(LatencyModels(TRUE, TRUE)), StepTimes(2e-3, 3e-3)
    for _ in range(60):
        cost.observe(StepStats(0, 4, 20, 1000, 4, 16, 4, 8, times, 3.1e-3, groups=2, planned_sequences=8))
    cost.learn()
    for _ in range(60):
        cost.observe(StepStats(0, 1, 5, 250, 4, 4, 1, 2, times, 5.1e-3, groups=2, planned_sequences=planned))
    cost.learn()
    assert not cost.overlaps(alone=True)
    assert cost.overlaps(alone=False) == (planned == 1)


def test_steps_without_drafts_say_nothing_about_overlap() -> None:
    """The drafter's other calls take microseconds, and end before or after the target."""
    cost = StepLatency(LatencyModels(TRUE, TRUE))
    for _ in range(60):
        cost.observe(StepStats(0, 8, 40, 2000, 4, 32, 8, 16, StepTimes(2e-3, 3e-3), 3.1e-3))
        cost.observe(StepStats(0, 8, 8, 2000, 0, 0, 0, 8, StepTimes(1e-6, 3e-3), 3.1e-3))
    cost.learn()
    assert cost.overlaps(alone=False)


def test_steps_that_overlap_correct_no_draft_alone() -> None:
    """A contended step of two halves is slower than predicted; one sequence alone has no contention."""
    cost = StepLatency(LatencyModels(TRUE, TRUE))
    for number in range(480):
        depth = 4 if number % 24 < 12 else 0
        times, total = (StepTimes(2e-3, 3e-3), 3.5e-3) if depth else (StepTimes(0.0, 2e-3), 2e-3)
        step = StepStats(0, 1, 1 + depth, 250, depth, depth, 0, 1, times, total, groups=2, planned_sequences=2)
        cost.observe(step)
    cost.learn()
    assert cost.overlaps(alone=False) and not cost.correction.excess(1).any()


@pytest.mark.parametrize("groups", [2, 1], ids=["another mode", "control: the same mode"])
def test_another_execution_mode_overlaps_until_its_steps_say_otherwise(groups: int) -> None:
    cost = StepLatency(LatencyModels(TRUE, TRUE))
    for _ in range(60):
        cost.observe(StepStats(0, 8, 40, 2000, 4, 32, 8, 16, StepTimes(2e-3, 3e-3), 5.1e-3))
    cost.observe(StepStats(0, 8, 8, 2000, 0, 0, 0, 8, StepTimes(0.0, 3e-3), 3.1e-3, groups=groups))
    cost.learn()
    assert cost.overlaps(alone=False) == (groups == 2)


def test_what_drafting_costs_depends_on_the_drafter() -> None:
    usual, heads, lookup = (
        StepLatency(LatencyModels(TRUE, TRUE), capabilities)
        for capabilities in (
            DrafterCapabilities(),
            DrafterCapabilities(single_pass=True),
            DrafterCapabilities(costless=True),
        )
    )
    assert usual.drafting(4, 8, 100, 2) == pytest.approx(TRUE.seconds(100, 2, 2, 4))
    assert heads.drafting(4, 8, 100, 2) == heads.drafting(1, 8, 100, 2) > 0
    assert lookup.drafting(4, 8, 100, 2) == usual.drafting(0, 0, 0, 0) == 0


def test_planning_is_no_part_of_a_round() -> None:
    calm, busy = (StepLatency(LatencyModels(TRUE, TRUE)) for _ in range(2))
    for made, planning in ((calm, 0.0), (busy, 5e-3)):
        for _ in range(60):
            times = StepTimes(0.0, TRUE.seconds(2000, 8, 8))
            total = times.target + 1e-4 + planning
            made.observe(StepStats(0, 8, 8, 2000, 0, 0, 0, 8, times, total, planning=planning))
        made.learn()
    assert calm.rest.coefficients == pytest.approx(busy.rest.coefficients)
    assert calm.predicted == pytest.approx(busy.predicted)


def test_what_reading_a_new_text_takes_is_learned() -> None:
    cost = StepLatency(LatencyModels(TRUE, TRUE))
    assert cost.feeding == cost.draft.slopes[-1]
    step, target = cost.drafting(2, 8, 2000, 4), TRUE.seconds(2000, 16, 8)
    for n in range(120):
        fed = 100 * (n % 4 == 0)
        times = StepTimes(step + 7e-6 * fed, target)
        cost.observe(StepStats(0, 8, 16, 2000, 2, 8, 4, 12, times, times.draft + target + 1e-4, 4), fed)
    cost.learn()
    assert cost.feeding == pytest.approx(7e-6, rel=0.1)


@given(st.integers(0, 2**32 - 1), st.integers(1, 60), st.integers(1, 9), st.sampled_from([1e-6, 1.0, 1e6]))
def test_least_squares_are_as_good_as_those_of_scipy(seed: int, samples: int, coefficients: int, size: float) -> None:
    generator = np.random.default_rng(seed)
    matrix = generator.random((samples, coefficients)) - generator.integers(2) / 4
    chosen, other = generator.integers(coefficients, size=2)
    matrix[:, chosen] = matrix[:, other] * generator.integers(2)  # the samples do not determine one coefficient
    target = matrix @ np.maximum(0.0, generator.normal(size=coefficients)) + 0.1 * generator.normal(size=samples)
    found, residual = nonnegative_least_squares(matrix, size * target)
    assert (found >= 0.0).all()
    assert residual == pytest.approx(float(np.linalg.norm(matrix @ found - size * target)))
    assert residual == pytest.approx(size * nnls(matrix, target)[1], abs=1e-8 * size)


def test_a_fit_imports_no_solver() -> None:
    code = (
        "import sys; from cospec.policies.latency.forward import LatencySample, fit;"
        "fit([LatencySample(n, n, 1, 1e-3 * n) for n in range(1, 20)]); sys.exit('scipy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
