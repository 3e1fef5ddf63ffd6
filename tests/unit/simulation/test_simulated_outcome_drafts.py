"""Simulated drafts after outcomes: branches after right tokens alone, and the time of all branches."""

from __future__ import annotations

import pytest

from cospec.core.types import DraftBudget, DraftContext
from cospec.plugin_options import parse
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from cospec.simulation.run import simulate
from cospec.simulation.scenario import Scenario
from cospec.simulation.simulated_outcome_drafts import Guess, branches, outcome_draft

OUTPUT = (5, 6, 7, 8, 9, 10)
BUDGET = DraftBudget(3, 40, (2,), outcomes=True)


def known(*given: int) -> DraftContext:
    """A request with one output token, and given tokens."""
    return DraftContext("s", [1, 2, 5, *given], 2, SamplingParams(), 0, StreamKind.TARGET, assumed=len(given))


def guesses(place: int, given: int | None) -> list[Guess]:
    return [(OUTPUT[place], 0.7), (99, 0.2)]


def chain(place: int, most: int) -> list[Guess]:
    return [(token, 0.5) for token in OUTPUT[place : place + most]]


def test_branches_follow_the_tokens_that_are_right() -> None:
    draft = outcome_draft(known(6, 3, 8), BUDGET, "d", OUTPUT, guesses, chain)
    assert draft.base_len == 3 and draft.confidence is not None
    assert draft.tokens == (6, 3, 8, 99, 7, 8, 9, 99)
    assert draft.parents == (-1, 0, 1, -1, 0, 4, 5, 0), "6 is right and 3 is wrong, so no branch follows 3"
    assert draft.confidence.tolist() == [0.7, 0.0, 0.0, 0.2, 0.7, 0.5, 0.5, 0.2]


def test_a_draft_without_given_tokens_guesses_the_next_one() -> None:
    draft = outcome_draft(known(), BUDGET, "d", OUTPUT, guesses, chain)
    assert (draft.tokens, draft.parents) == ((6, 7, 8, 99), (-1, 0, 1, -1))


def test_the_number_of_branches() -> None:
    assert branches(known(6, 3, 8), BUDGET) == 8
    assert branches(known(6, 3, 8), DraftBudget(3, 9, (2,), outcomes=True)) == 3


@pytest.mark.parametrize("rate", [0.5, 0.8])
def test_drafts_after_outcomes_hide_the_time_of_drafting(rate: float) -> None:
    """A target of 50 ms, a drafter of 8 ms a token on a machine of its own, and chains of four tokens."""
    given = {
        "requests": 24, "max_num_seqs": 4, "target": {"cost": {"slopes": [1e-5], "fixed": 0.05}},
        "drafting": {"cost": {"slopes": [1e-6], "fixed": 0.008}},
        "domains": [{"acceptance": rate, "output": {"mean": 60}, "prompt": {"mean": 8}}],
        "arrivals": {"kind": "closed", "concurrency": [4]},
        "variants": [
            {"name": mode, "num_speculative_tokens": 4, "execution_mode": mode}
            for mode in ("sequential", "draft-ahead", "draft-for-outcomes")
        ],
    }  # fmt: skip
    runs = simulate(parse(Scenario, given))["runs"]
    found = {run["variant"]: run["throughput"] for run in runs}
    assert found["draft-for-outcomes"] > 1.15 * max(found["sequential"], found["draft-ahead"]), found
