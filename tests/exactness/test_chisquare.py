"""Statistics with the real generator: what enumeration takes for granted, that the draws are uniform and independent.

Seeds are fixed, so the p-values never change; a negative control shows that each test can fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chi2_contingency, kstest

from cospec.acceptance.rejection import Rejection
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import Draft, TargetProbs, VerifyResult
from cospec.drafters.model import ModelDrafter
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind, random_words, to_unit_interval
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.reference import joint_distribution_of
from harness.statistics import fit, transition_fit
from harness.toys import drawing, run_all, tokens_of, toy_engine, verifier_of

LIKELY, IMPOSSIBLE = 1e-4, 1e-6
RULES = ["match", "rejection", "block"]
PROMPT = (0, 1)


def outputs(
    acceptance_method: str, count: int, length: int, k: int = 3, mutant: AcceptanceMethod | None = None
) -> list[tuple[int, ...]]:
    """Seeded outputs of a target of two words that is unsure, with a drafter that is sure of other things."""
    engine = toy_engine(target(), ModelDrafter(ToyModel(2, order=1, seed=2, sharpness=3.0)), acceptance_method, k)
    if mutant is not None:
        verifier_of(engine).acceptance_methods = {acceptance_method: mutant}
    params = SamplingParams(max_tokens=length)
    requests = [make_requests(f"r{seed}", PROMPT, params)[0] for seed in range(count)]
    seeded = [replace(request, seed=seed) for seed, request in enumerate(requests)]
    return list(tokens_of(run_all(engine, seeded, check=False)).values())


def target() -> ToyModel:
    return ToyModel(2, order=1, seed=1, sharpness=0.3)


class KeepsAll(Rejection):
    """Accepts whatever was drafted."""

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        n = len(draft)
        return VerifyResult(
            tuple(range(n)), draws.token(target.distribution[n], draft.base_len + n, StreamKind.TARGET), True
        )


@pytest.mark.parametrize("acceptance_method", RULES)
def test_the_first_tokens_follow_the_distribution(acceptance_method: str) -> None:
    found = [output[:3] for output in outputs(acceptance_method, count=600, length=5)]
    assert fit(found, joint_distribution_of(target(), SamplingParams(), PROMPT, 3)) > LIKELY


def test_a_rule_that_keeps_everything_is_seen() -> None:
    found = [output[:3] for output in outputs("rejection", count=600, length=5, mutant=KeepsAll())]
    assert fit(found, joint_distribution_of(target(), SamplingParams(), PROMPT, 3)) < IMPOSSIBLE


@pytest.mark.parametrize("acceptance_method", RULES)
def test_long_outputs_follow_the_distribution(acceptance_method: str) -> None:
    assert transition_fit(target(), SamplingParams(), PROMPT, outputs(acceptance_method, count=100, length=80)) > LIKELY


def test_noise_that_serves_two_rounds_is_seen() -> None:
    """The same numbers at the same position whatever the round: right for ``rejection``, wrong for ``block``."""

    def forgetful(seed: int, base: int) -> RandomStreams:
        return RandomStreams(seed, 0)

    with drawing(forgetful):
        found = outputs("block", count=100, length=80)
    assert transition_fit(target(), SamplingParams(), PROMPT, found) < IMPOSSIBLE


class OneStream(RandomStreams):
    """Tests a token with the very numbers that drew it."""

    def uniforms(self, position: int, count: int, kind: StreamKind, branch: int = 0) -> Floats:
        places = range(position, position + count)
        return np.array(
            [
                to_unit_interval(random_words(self.seed, StreamKind.DRAFT, (0, 0, place, self.base), 1))[0]
                for place in places
            ]
        )


@pytest.mark.parametrize(("draws", "right"), [(RandomStreams, True), (OneStream, False)])
def test_drafting_and_accepting_with_one_stream_is_seen(draws: type[RandomStreams], right: bool) -> None:
    p, q = np.array([0.5, 0.5]), np.array([0.8, 0.2])
    found = []
    for seed in range(3000):
        drawn = draws(seed, 3)
        token = drawn.token(q, 3, StreamKind.DRAFT)
        result = Rejection().verify(
            Draft("s", 3, (token,), (-1,), ("d",), q[None]), TargetProbs(probs=np.stack([p, p])), drawn
        )
        found.append(token if result.path else result.token)
    p_value = fit(found, {0: 0.5, 1: 0.5})
    assert p_value > LIKELY if right else p_value < IMPOSSIBLE


@pytest.mark.parametrize("kind", list(StreamKind))
def test_the_race_follows_its_weights(kind: StreamKind) -> None:
    weights = np.array([0.1, 0.0, 2.0, 0.4, 1.5])
    found = [RandomStreams(seed, 9).token(weights, position, kind) for seed in range(20) for position in range(1, 101)]
    probs = {token: float(w / weights.sum()) for token, w in enumerate(weights) if w > 0}
    assert fit(found, probs) > LIKELY
    probs[0], probs[2] = probs[2], probs[0]
    assert fit(found, probs) < IMPOSSIBLE


@pytest.mark.parametrize("kind", list(StreamKind))
def test_uniforms_are_uniform(kind: StreamKind) -> None:
    drawn = np.concatenate([RandomStreams(seed, 4).uniforms(4, 64, kind) for seed in range(40)])
    assert ((drawn > 0) & (drawn < 1)).all()
    assert kstest(drawn, "uniform").pvalue > LIKELY


def cells(draw: Callable[[int], float], other: Callable[[int], float], count: int = 1500) -> float:
    """The p-value of independence of two numbers between 0 and 1, in quarters."""
    table = np.zeros((4, 4))
    for seed in range(count):
        table[int(draw(seed) * 4), int(other(seed) * 4)] += 1
    return float(chi2_contingency(table).pvalue)


def uniform(position: int, base: int, kind: StreamKind, shift: int = 0) -> Callable[[int], float]:
    return lambda seed: float(RandomStreams(seed + shift, base).uniforms(position, 1, kind)[0])


FIRST = uniform(5, 5, StreamKind.ACCEPT)


@pytest.mark.parametrize(
    "other",
    [
        uniform(6, 5, StreamKind.ACCEPT),
        uniform(5, 6, StreamKind.ACCEPT),
        uniform(5, 5, StreamKind.DRAFT),
        uniform(5, 5, StreamKind.RECOVER),
        uniform(5, 5, StreamKind.TARGET),
        uniform(5, 5, StreamKind.ACCEPT, shift=1),
    ],
    ids=["position", "round", "draft", "recover", "target", "seed"],
)
def test_draws_with_different_keys_are_independent(other: Callable[[int], float]) -> None:
    assert cells(FIRST, other) > LIKELY


def test_dependence_is_seen() -> None:
    assert cells(FIRST, FIRST) < IMPOSSIBLE


def test_token_and_acceptance_are_independent() -> None:
    """Which token is drafted says nothing about the number that it is tested with."""
    weights = np.full(4, 0.25)
    assert cells(lambda seed: RandomStreams(seed, 5).token(weights, 5, StreamKind.DRAFT) / 4, FIRST) > LIKELY
    assert cells(lambda seed: RandomStreams(seed, 5).token(weights, 5, StreamKind.RECOVER) / 4, FIRST) > LIKELY
