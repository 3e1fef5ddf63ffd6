"""Acceptance figures: counted as the paper's α, per position, with intervals over prompts."""

from __future__ import annotations

import pytest

from cospec.bench.acceptance import Tally, as_runs, ratio, summarise
from cospec.bench.step_recorder import recorded
from cospec.core.engine import Engine
from cospec.core.types import Commit
from cospec.drafters.synthetic import SyntheticDrafter
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.toys import make_request, run_all, toy_engine

V = 7


def commit(kept: int, drafted: int, rejected: bool) -> Commit:
    return Commit("s", 5, tuple(range(kept + 1)), tuple(range(kept)), 5 + kept, drafted, None, rejected)


def tally(*commits: Commit) -> Tally:
    made = Tally()
    for one in commits:
        made.add(one)
    return made


def test_the_rates_are_those_of_the_definitions() -> None:
    """Three drafts of 3: all accepted; refused at the second; refused at the first. And a round without a draft."""
    row = summarise(
        "d", "code", 0.0, [tally(commit(3, 3, False), commit(1, 3, True), commit(0, 3, True), commit(0, 0, False))]
    )
    assert row.alpha.value == pytest.approx(4 / 6)
    assert row.draft_acceptance_rate.value == pytest.approx(4 / 9)
    assert row.mean_acceptance_length.value == pytest.approx(1 + 4 / 3)
    assert row.calls_per_token.value == pytest.approx(4 / 8)
    assert [one.value for one in row.by_position] == [pytest.approx(2 / 3), pytest.approx(1 / 2), 1.0]


def test_a_draft_that_the_end_cut_short_refuses_nothing() -> None:
    row = summarise("d", "code", 0.0, [tally(commit(1, 4, False))])
    assert row.alpha.value == 1.0


def test_what_was_never_drafted_has_no_rate() -> None:
    row = summarise("off", "code", 0.0, [tally(commit(0, 0, False)), tally(commit(0, 0, False))])
    assert row.alpha.value is None
    assert row.by_position == ()
    assert row.calls_per_token.value == 1.0
    assert as_runs([row])[0]["speculation"]["acceptance_rate"] is None


def test_intervals_are_over_prompts_and_cover_the_value() -> None:
    tallies = [tally(*[commit(2, 3, True)] * n, commit(0, 3, True)) for n in range(1, 9)]
    found = ratio(tallies, lambda one: (sum(one.accepted), one.proposed))
    assert found.low is not None and found.high is not None and found.value is not None
    assert found.low < found.value < found.high
    one = ratio(tallies[:1], lambda one: (sum(one.accepted), one.proposed))
    assert (one.low, one.high) == (None, None)
    same = ratio([tallies[3]] * 5, lambda one: (sum(one.accepted), one.proposed))
    assert same.low == same.high == same.value


@pytest.mark.parametrize("rate", [0.3, 0.8])
def test_a_watched_engine_finds_the_acceptance_it_was_given(rate: float) -> None:
    parts, watch = recorded(toy_engine(ToyModel(V, order=3, seed=1), SyntheticDrafter([rate], 0.0, V), k=3).parts)
    engine = Engine(parts)
    params = SamplingParams(temperature=0, max_tokens=80)
    for turn in range(2):
        watch.clear()
        run_all(engine, [make_request(f"{turn}-{n}", (n % V, n // V, 2), params) for n in range(40)])
    tallies: dict[str, Tally] = {}
    for one in watch.commits:
        tallies.setdefault(one.id, Tally()).add(one)
    row = summarise("synthetic", "all", 0.0, list(tallies.values()))
    assert row.tokens == 40 * 80
    assert row.alpha.low is not None and row.alpha.high is not None
    assert row.alpha.low - 0.03 < rate < row.alpha.high + 0.03
    assert all(one.value is not None and abs(one.value - rate) < 0.12 for one in row.by_position)
    assert sum(stats.committed for stats in watch.steps) == row.tokens
