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
from harness.enumerated_draws import BranchTrace, OutputDistribution, enumerate_runs, total_variation
from harness.reference import joint_distribution_of
from harness.remembered_draws import Numbers, RememberedDraws, remembered
from harness.toys import make_request, run_all, tokens_of, toy_engine

EXACT, SEEN = 1e-12, 1e-3
LENGTH, STOP = 5, 2


def target() -> ToyModel:
    return ToyModel(3, order=2, seed=1)


@dataclass(frozen=True)
class OldNumbers(Numbers):
    """The wrong numbers: those of a position do not depend on the tokens before the step."""

    def draws(self, seed: int, base: int) -> RememberedDraws:
        return RememberedDraws(self, seed, 0)


def error(acceptance_method: str, steps: int, kind: type[Numbers] = Numbers, restart: bool = False) -> float:
    """Total variation from the target's distribution; the first engine is lost after ``steps``.

    Args:
        restart: the wrong way: an output that has not ended begins again.
    """
    params = SamplingParams(max_tokens=LENGTH, seed=7, stop_token_ids=(STOP,))
    request = make_request("r", (0, 1, 0), params)
    request = replace(request, speculation=SpeculationParams(acceptance_method=acceptance_method))
    shape = {"max_nodes": 3} if acceptance_method == "recursive" else {}

    def run(trace: BranchTrace) -> tuple[int, ...]:
        with remembered(kind(trace)):
            first, second = (toy_engine(target(), SuffixDrafter(), acceptance_method, k=3, **shape) for _ in range(2))
            delivered = list[int]()
            first.add(request)
            for _ in range(steps):
                delivered += [token for event in first.step() for token in event.tokens]
            if delivered and not first.has_work:
                return tuple(delivered)
            kept = () if restart else tuple(delivered)
            return (*kept, *tokens_of(run_all(second, [replace(request, resumed_output=kept)]))["r"])

    found: OutputDistribution = enumerate_runs(run)
    return total_variation(found, joint_distribution_of(target(), params, request.prompt, LENGTH))


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("acceptance_method", ["rejection", "block", "recursive", "match"])
def test_a_resumed_request_keeps_its_distribution(acceptance_method: str, steps: int) -> None:
    assert error(acceptance_method, steps) < EXACT


def test_numbers_that_had_decided_about_delivered_tokens_would_be_seen() -> None:
    """Block verification reads the numbers of a whole draft, although only its first tokens may be delivered."""
    with patch.object(input_processor, "own_seed", lambda request, number: request.seed):
        assert error("block", 3) < EXACT, "the same seed does no harm"
        assert error("block", 3, OldNumbers) > SEEN


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_outputs_that_begin_again_would_be_seen(acceptance_method: str, steps: int) -> None:
    """Those that had ended stay, so short outputs would be more frequent."""
    assert error(acceptance_method, steps, restart=True) > SEEN


def test_a_resumed_request_has_a_seed_of_its_own() -> None:
    request = make_request("r", (0, 1, 0), SamplingParams(max_tokens=LENGTH, seed=7))
    resumed = [replace(request, resumed_output=tokens) for tokens in (None, (), (1,), (1, 0), (0, 0))]
    assert len({input_processor.own_seed(each) for each in resumed}) == 5
