"""A step's time model: the time of drafts besides drafting."""

from __future__ import annotations

import pytest

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.stats import StepStats, StepTimes
from cospec.policies.latency.forward import ForwardLatency
from cospec.policies.latency.step import LatencyModels, StepLatency

COSTS = LatencyModels(ForwardLatency(slopes=(1e-4,), fixed=5e-3), ForwardLatency(slopes=(1e-5,), fixed=1e-3))
SCORING, EVERY = 8e-3, 16


def learned(scoring: float, known: bool) -> StepLatency:
    """A model after many steps, of which every sixteenth scores; ``known``: the engine measures scoring apart."""
    made = StepLatency(COSTS)
    for number in range(40 * EVERY):
        depth = 0 if number % 8 == 7 else 3
        more = scoring if number % EVERY == 0 else 0.0
        draft, target = made_of(depth) + more, 5e-3 + 1e-4 * (1 + depth)
        times = StepTimes(draft, target, scoring=more if known else 0.0)
        made.observe(StepStats(number, 1, 1 + depth, 100, depth, depth, 0, 1, times, draft + target, int(depth > 0)))
    made.learn()
    return made


def made_of(depth: int) -> float:
    return depth * 1e-3 + depth * 1e-5


def step(depth: int) -> StepStats:
    return StepStats(0, 1, 1 + depth, 100, depth, depth, 0, 1, StepTimes(), 0.0, int(depth > 0))


def test_scoring_of_known_tokens_counts_for_each_draft() -> None:
    """Seven of eight steps draft, so a draft bears 8/7 of the mean of a step; forwards stay unchanged."""
    made, mean = learned(SCORING, known=True), SCORING / EVERY * 8 / 7
    assert made.scoring == pytest.approx(mean, rel=0.25)
    assert made.drafting(3, 3, 100, 1) == pytest.approx(made_of(3) + mean, rel=0.06)
    assert made.predict(step(0)) == pytest.approx(5.1e-3, rel=0.03)
    assert made.draft.seconds(0, 1, 1, 3) == pytest.approx(made_of(3), rel=0.02)


def test_without_the_measurement_it_would_be_missed() -> None:
    assert learned(0.0, known=True).scoring == 0.0
    missed, whole = learned(SCORING, known=False), learned(SCORING, known=True)
    assert missed.drafting(3, 3, 100, 1) < whole.drafting(3, 3, 100, 1) - 0.5 * SCORING / EVERY


def test_scores_of_a_new_text_are_part_of_feeding() -> None:
    made = StepLatency(COSTS)
    times = StepTimes(made_of(3) + 1e-2, 5.4e-3, scoring=1e-2)
    for number in range(8):
        made.observe(StepStats(number, 1, 4, 100, 3, 3, 0, 1, times, times.draft + times.target, 1), fed=100)
    made.learn()
    assert made.scoring == 0.0
    assert made.feeding == pytest.approx(1e-4, rel=0.05)


def test_a_number_of_drafters_without_drafts_takes_a_proportional_time() -> None:
    """Until that number has drafted; a guess of before any draft may be far from the machine's speed."""
    made = StepLatency(LatencyModels(COSTS.target), DrafterCapabilities(num_drafters=4))

    def draft(drafters: int, seconds: float) -> None:
        made.drafters = drafters
        for number in range(40):
            times = StepTimes(3 * seconds, 5.4e-3)
            made.observe(StepStats(number, 1, 4, 100, 3, 3, 0, 1, times, times.draft + times.target, 1))
        made.learn()

    draft(4, 0.1)
    assert made.draft.seconds(0, 1, 1, 3) == pytest.approx(0.3, rel=0.05)
    made.drafters = 3
    assert made.draft.seconds(0, 1, 1, 3) == pytest.approx(0.3 * 3 / 4, rel=0.05)
    draft(2, 0.1)
    assert made.draft.seconds(0, 1, 1, 3) == pytest.approx(0.3, rel=0.05), "two take as long as four"
    made.drafters = 1
    assert made.draft.seconds(0, 1, 1, 3) == pytest.approx(0.15, rel=0.05)
