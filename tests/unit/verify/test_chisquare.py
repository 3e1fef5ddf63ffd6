"""When sampled outputs count as wrong: low p-values, fresh samples, tokens at the border of the top k."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cospec.verify.chisquare import FALSE_ALARM, FRESH, LIKELY, fit, p_value
from cospec.verify.joint_distribution import BORDER, JointDistribution, Truncation, joint_distribution

COUNT = 400
MASSES: dict[tuple[int, ...], float] = {(0,): 0.4, (1,): 0.3, (2,): 0.2, (3,): 0.1}
WANTED = JointDistribution(MASSES)
LOGITS = torch.tensor([3.0, 2.0, 1.0, 0.99, -1.0])  # with a top k of three, tokens 2 and 3 are at the border


def drawn(seeds: range, bias: float = 0.0) -> list[tuple[int, ...]]:
    """Outcomes of the wanted probabilities, or moved by ``bias`` from the first to the last."""
    masses = np.array(list(MASSES.values())) + bias * np.array([-1, 0, 0, 1])
    found = np.random.default_rng(seeds.start).choice(len(MASSES), len(seeds), p=masses)
    return [(int(token),) for token in found]


class Sampler:
    """Gives the samples of some numbers with a bias, the others as wanted, and notes the seeds."""

    def __init__(self, *biased: int, bias: float = 0.2) -> None:
        self.seeds: list[range] = []
        self._biased, self._bias = biased, bias

    def __call__(self, seeds: range) -> list[tuple[int, ...]]:
        self.seeds.append(seeds)
        return drawn(seeds, self._bias if len(self.seeds) - 1 in self._biased else 0.0)


def test_a_sample_that_fits_is_enough() -> None:
    sampler = Sampler()
    assert fit(WANTED, sampler, COUNT).good
    assert sampler.seeds == [range(COUNT)]


def test_a_low_p_value_alone_is_no_failure() -> None:
    """A larger sample with fresh seeds decides."""
    sampler = Sampler(0)
    found = fit(WANTED, sampler, COUNT)
    assert found.p_values[0] < LIKELY < found.p_values[1]
    assert found.good
    first, fresh = sampler.seeds
    assert len(fresh) == FRESH * len(first)
    assert not set(first) & set(fresh)


def test_two_low_p_values_are_a_failure() -> None:
    found = fit(WANTED, Sampler(0, 1), COUNT)
    assert not found.good
    assert max(found.p_values) < LIKELY


def test_an_impossible_outcome_is_a_failure_when_it_comes_again() -> None:
    found = fit(WANTED, lambda seeds: [*drawn(seeds)[1:], (7,)], COUNT)
    assert not found.good
    assert found.impossible == ((7,),)


def test_exact_samples_fail_as_rarely_as_said() -> None:
    """The first stage alone, in 20,000 samples: at most twice the nominal rate, which the false alarm takes squared."""
    masses = np.array(list(MASSES.values()))
    counts = np.random.default_rng(1).multinomial(COUNT, masses, 20_000)
    statistic = ((counts - COUNT * masses) ** 2 / (COUNT * masses)).sum(1)
    low = (torch.special.gammaincc(torch.tensor(1.5), torch.tensor(statistic / 2)) < LIKELY).double().mean()
    assert low < 10 * LIKELY
    assert pytest.approx((2 * LIKELY) ** 2) == FALSE_ALARM


def test_many_rare_outcomes_are_seen_by_their_first_tokens() -> None:
    """Each outcome has less than five expected samples; the sample's second token is too often 0."""
    words = range(8)
    flat = JointDistribution({(a, b, c): 8.0**-3 for a in words for b in words for c in words})
    fair = np.random.default_rng(2).integers(0, 8, (600, 3))
    biased = fair.copy()
    biased[:150, 1] = 0
    assert p_value(flat, [(a, b, c) for a, b, c in fair.tolist()]) > 0.01
    assert p_value(flat, [(a, b, c) for a, b, c in biased.tolist()]) < LIKELY


def joint(logits: torch.Tensor, tolerance: float, length: int = 1) -> JointDistribution:
    return joint_distribution(lambda texts: logits.repeat(len(texts), 1), (0,), Truncation(length, 3, tolerance))


def test_a_token_at_the_border_is_not_impossible() -> None:
    """Reference and engine disagree about the third of three tokens by less than the tolerance."""
    engine = [(0,)] * 66 + [(1,)] * 24 + [(3,)] * 10
    assert p_value(joint(LOGITS, 0.0), engine) == 0.0
    assert joint(LOGITS, 0.0).impossible(engine) == {(3,)}
    assert p_value(joint(LOGITS, 0.1), engine) > 0.01
    assert joint(LOGITS, 0.1).impossible([*engine, (4,)]) == {(4,)}


def test_what_is_at_the_border_is_one_outcome() -> None:
    found = joint(LOGITS, 0.1, length=2)
    assert sum(found.masses.values()) == pytest.approx(1.0)
    assert found.border[()] == {2, 3}
    assert found.outcome_of((0, 3)) == found.outcome_of((0, 2)) == (0, BORDER)
    assert found.outcome_of((2, 0)) == (BORDER,), "what follows a token at the border is not looked at"
    assert found.outcome_of((1, 0)) == (1, 0)


def test_a_wide_border_hides_nothing_else() -> None:
    """Without a near-tie the tolerance changes nothing."""
    clear = torch.tensor([3.0, 2.0, 1.0, -2.0, -3.0])
    assert joint(clear, 0.25, 2).masses == joint(clear, 0.0, 2).masses
    assert (0,) not in joint(clear, 0.25).border


def test_the_likeliest_tokens_of_a_place() -> None:
    assert joint(LOGITS, 0.0, 2).likeliest(1, 2) == (0, 1)
