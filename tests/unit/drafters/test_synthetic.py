"""The drafter that replays outputs with mistakes: its rates, its exactness, what it refuses to guess."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cospec.core.engine import Engine
from cospec.core.types import SpeculationParams
from cospec.drafters.synthetic import SyntheticDrafter, SyntheticOptions
from cospec.errors import InvalidInput
from cospec.models.toy import ToyModel
from cospec.plugin_options import parse
from cospec.sampling_params import SamplingParams
from harness.toys import make_request, run_all, tokens_of, toy_engine

GREEDY = SamplingParams(temperature=0, max_tokens=60)
V = 7


def engine(rates: list[float], k: int = 3, acceptance_method: str = "auto") -> Engine:
    return toy_engine(ToyModel(V, order=3, seed=1), SyntheticDrafter(rates, 0.0, V), acceptance_method, k)


def twice(made: Engine, params: SamplingParams, count: int = 12) -> tuple[dict[str, Any], dict[str, Any]]:
    """Outputs of the first time and of the second."""
    found = []
    for turn in range(2):
        requests = [make_request(f"{turn}-{n}", (n % V, n // V, 2), params) for n in range(count)]
        tokens = tokens_of(run_all(made, requests))
        found.append({id.partition("-")[2]: words for id, words in tokens.items()})
    return found[0], found[1]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=1.0, seed=5, max_tokens=60)])
def test_outputs_do_not_change_and_the_first_time_has_no_drafts(params: SamplingParams) -> None:
    made = engine([0.6])
    plain = toy_engine(ToyModel(V, order=3, seed=1), None)
    wanted = tokens_of(run_all(plain, [make_request(str(n), (n % V, n // V, 2), params) for n in range(12)]))
    first, second = twice(made, params)
    assert first == second == wanted
    assert made.metrics().draft_tokens["synthetic"] > 0


def test_nothing_is_drafted_before_a_request_is_known() -> None:
    made = engine([1.0])
    run_all(made, [make_request("a", (1, 2), GREEDY)])
    assert made.metrics().drafts == {}


@pytest.mark.parametrize("rates", [[1.0], [0.0], [0.7], [0.9, 0.5, 0.2]])
def test_each_position_is_accepted_at_its_rate(rates: list[float]) -> None:
    made = engine(rates)
    twice(made, GREEDY, count=49)
    metrics = made.metrics()
    reached = float(metrics.drafts["synthetic"])
    accepted = metrics.accepted_per_pos.get("synthetic", [])
    for place in range(3):
        rate = rates[min(place, len(rates) - 1)]
        kept = accepted[place] if place < len(accepted) else 0
        spread = (rate * (1 - rate) * reached) ** 0.5
        # Drafts are shorter where an output ends, so that as many as there are outputs did not reach the position.
        assert rate * (reached - 49) - 4 * spread <= kept <= rate * reached + 4 * spread, (place, kept, reached)
        reached = float(kept)


def test_rates_that_are_not_asked_for_would_be_seen() -> None:
    made = engine([0.5], k=1)
    twice(made, GREEDY, count=49)
    metrics = made.metrics()
    share = metrics.accepted_tokens["synthetic"] / metrics.draft_tokens["synthetic"]
    assert 0.42 < share < 0.58


def test_other_rules_and_other_seeds_are_not_guessed() -> None:
    for acceptance_method, seeds in (("block", (3, 3)), ("match", (3, 4))):
        made = engine([1.0])
        for turn, seed in enumerate(seeds):
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=20)
            run_all(
                made,
                [
                    make_request(
                        str(turn), (1, 2), params, speculation=SpeculationParams(acceptance_method=acceptance_method)
                    )
                ],
            )
        assert made.metrics().drafts == {}, acceptance_method


def test_an_aborted_output_is_not_remembered() -> None:
    made = engine([1.0])
    made.add(make_request("a", (1, 2), GREEDY))
    for _ in range(5):
        made.step()
    made.abort(["a"])
    run_all(made, [make_request("b", (1, 2), GREEDY)])
    assert made.metrics().drafts == {}


@pytest.mark.parametrize("given", [{"acceptance": 1.2}, {"acceptance": [0.5, -0.1]}, {"acceptance": []}, {"rate": 1}])
def test_wrong_options_are_refused_by_name(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match=r"speculative_config\.(acceptance|rate)"):
        options = parse(SyntheticOptions, given, "speculative_config.")
        SyntheticDrafter.build(options, cast(Any, SimpleNamespace(target=ToyModel(V))))
