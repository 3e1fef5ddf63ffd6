"""Confidences of draft tokens: each token has the drafter's probability and the target's own decision."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import cospec
from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import Commit, Draft
from cospec.registry import POLICIES

ROOT = Path(__file__).resolve().parents[3]
STEP = StepStats(0, 1, 4, 5, 3, 3, 0, 1, StepTimes(), 0.1)


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """Other tests must not see the policy that the benchmark registers."""
    yield
    POLICIES.unregister("recorder")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.confidences")


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.draft_recorder")


def draft(tokens: tuple[int, ...], **more: Any) -> Draft:
    return Draft("3", 5, tokens, tuple(range(-1, len(tokens) - 1)), ("d",) * len(tokens), **more)


def commit(kept: int, drafted: int, rejected: bool) -> Commit:
    return Commit("3", 5, tuple(range(kept + 1)), tuple(range(kept)), 5 + kept, drafted, None, rejected)


def test_a_drawn_token_has_its_own_probability_and_not_the_largest(recorder: ModuleType) -> None:
    q = np.array([[0.1, 0.2, 0.7], [0.5, 0.25, 0.25]])
    assert recorder.confidences(draft((0, 2), q=q, confidence=q.max(1))).tolist() == [0.1, 0.25]
    assert recorder.confidences(draft((0, 2), confidence=np.array([0.4, 0.6]))).tolist() == [0.4, 0.6]
    with pytest.raises(ValueError, match="request 3"):
        recorder.confidences(draft((0, 2)))


@pytest.mark.parametrize(
    ("given", "decisions"),
    [
        (commit(1, 3, True), [True, False, None]),
        (commit(3, 3, False), [True, True, True]),
        (commit(1, 3, False), [True, None, None]),  # the output ended
        (commit(0, 2, True), [False, None]),  # the third token was not verified
        (commit(0, 0, False), []),
    ],
)
def test_tokens_after_a_rejection_or_an_end_are_not_judged(
    recorder: ModuleType, given: Commit, decisions: list[bool | None]
) -> None:
    policy = recorder.DraftRecorder(3)
    policy.trim([draft((1, 2, 0), confidence=np.array([0.9, 0.5, 0.2]))])
    policy.observe(STEP, [given])
    assert [token.accepted for token in policy.tokens] == decisions
    assert [token.confidence for token in policy.tokens] == [0.9, 0.5, 0.2][: len(decisions)]
    policy.observe(STEP, [given])
    assert len(policy.tokens) == len(decisions), "a draft counts once"


def drawn(figures: ModuleType, slope: float, prompts: int = 30, each: int = 100) -> list[Any]:
    """Tokens of uniform confidence c that are accepted with probability 0.5 + slope (c - 0.5)."""
    chance = np.random.default_rng(4)
    values = chance.random((prompts, each))
    accepted = chance.random(values.shape) < 0.5 + slope * (values - 0.5)
    return [
        figures.Token(prompt, place % 4, float(values[prompt, place]), bool(accepted[prompt, place]))
        for prompt in range(prompts)
        for place in range(each)
    ]


def test_informative_and_random_confidences(figures: ModuleType) -> None:
    informative, random = (figures.by_confidence(drawn(figures, slope)) for slope in (1.0, 0.0))
    # with P(accepted | c) = c: the top tenth has 0.95 over 0.5, and accepted tokens are above with 5/6 in the limit
    assert informative["top_over_all"]["value"] == pytest.approx(1.9, abs=0.1)
    assert informative["accepted_above_rejected"]["value"] == pytest.approx(5 / 6, abs=0.02)
    tenths = [each["acceptance"]["value"] for each in informative["tenths"]]
    assert tenths == pytest.approx(np.arange(0.05, 1, 0.1), abs=0.08)
    assert informative["accepted"]["quartiles"][1] > 0.6 > 0.4 > informative["rejected"]["quartiles"][1]
    for name, neutral in (("top_over_all", 1.0), ("accepted_above_rejected", 0.5)):
        assert random[name]["low"] < neutral < random[name]["high"]
        assert informative[name]["low"] < informative[name]["value"] < informative[name]["high"]


def test_tokens_without_a_decision_count_as_drafted_alone(figures: ModuleType) -> None:
    tokens = [figures.Token(n, 0, 0.5, n % 2 == 0) for n in range(10)]
    tokens += [figures.Token(n, 1, 0.5, None) for n in range(10)]
    found = figures.acceptance(tokens)
    assert (found["drafted_tokens"], found["judged_tokens"]) == (20, 10)
    assert found["accepted_over_judged"]["value"] == 0.5
    assert found["accepted_over_drafted"]["value"] == 0.25


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_engine_accepts_what_it_records(figures: ModuleType, recorder: ModuleType, temperature: float) -> None:
    """Recorded acceptances are those that the engine counts, and the drafts have the length that was asked for."""
    engine, policy = recorder.recording_engine(figures.config_of(Namespace(model="zoo", batch=4), "generic"))
    texts = [engine.tokenizer.encode(text) for text in ("The sum of two and", "def add(a, b):")]
    params = cospec.SamplingParams(temperature=temperature, max_tokens=24, ignore_eos=True)
    tokens = figures.run(engine, policy, 3, texts, params)
    counted = engine.metrics()
    assert sum(bool(token.accepted) for token in tokens) == sum(counted.accepted_tokens.values())
    assert len(tokens) == sum(counted.draft_tokens.values())
    assert {token.prompt for token in tokens} == {0, 1} and max(token.position for token in tokens) == 2
    assert all(0 < token.confidence <= 1 for token in tokens)
