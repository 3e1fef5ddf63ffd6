"""A request whose engine is lost goes on in another engine with the same seed, and keeps its distribution."""

from __future__ import annotations

from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest

from cospec.core.types import SpeculationParams
from cospec.drafters.suffix import SuffixDrafter
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from cospec.text import input_processor
from harness.enumerated_draws import BranchTrace, enumerate_runs, total_variation
from harness.reference import joint_distribution_of
from harness.remembered_draws import Numbers, RememberedDraws, remembered
from harness.toys import make_request, run_all, tokens_of, toy_engine

EXACT, SEEN = 1e-12, 1e-3
LENGTH = 6


def target() -> ToyModel:
    return ToyModel(2, order=2, seed=1)


@dataclass(frozen=True)
class OldNumbers(Numbers):
    """The wrong numbers: those of a position do not depend on the tokens before the step."""

    def draws(self, seed: int, base: int) -> RememberedDraws:
        return RememberedDraws(self, seed, 0)


def error(acceptance_method: str, cut: int, kind: type[Numbers] = Numbers) -> float:
    """Total variation from the target's distribution; the first engine is lost once ``cut`` tokens are delivered."""
    request = make_request("r", (0, 1, 0), SamplingParams(max_tokens=LENGTH, seed=7))
    request = replace(request, speculation=SpeculationParams(acceptance_method=acceptance_method))
    shape = {"max_nodes": 3} if acceptance_method == "recursive" else {}

    def run(trace: BranchTrace) -> tuple[int, ...]:
        with remembered(kind(trace)):
            first, second = (toy_engine(target(), SuffixDrafter(), acceptance_method, k=3, **shape) for _ in range(2))
            delivered = list[int]()
            first.add(request)
            while len(delivered) < cut and first.has_work:
                delivered += [token for event in first.step() for token in event.tokens]
            if len(delivered) == LENGTH:
                return tuple(delivered)
            resumed = replace(request, resumed_output=tuple(delivered))
            return (*delivered, *tokens_of(run_all(second, [resumed]))["r"])

    return total_variation(
        enumerate_runs(run), joint_distribution_of(target(), request.sampling, request.prompt, LENGTH)
    )


@pytest.mark.parametrize("cut", [0, 1, 2, 3])
@pytest.mark.parametrize("acceptance_method", ["rejection", "block", "recursive", "match"])
def test_a_resumed_request_keeps_its_distribution(acceptance_method: str, cut: int) -> None:
    assert error(acceptance_method, cut) < EXACT


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_numbers_that_had_decided_about_delivered_tokens_would_be_seen(cut: int) -> None:
    """Block verification reads the numbers of a whole draft, although only its first tokens may be delivered."""
    with patch.object(input_processor, "own_seed", lambda request, number: request.seed):
        assert error("block", cut) < EXACT, "the same seed does no harm"
        assert error("block", cut, OldNumbers) > SEEN


def test_a_resumed_request_has_a_seed_of_its_own() -> None:
    request = make_request("r", (0, 1, 0), SamplingParams(max_tokens=LENGTH, seed=7))
    resumed = [replace(request, resumed_output=tokens) for tokens in ((), (1,), (1, 0), (0, 0))]
    assert len({input_processor.own_seed(each) for each in resumed}) == 4
