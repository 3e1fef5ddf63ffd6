"""What the prompts of earlier requests say about drafters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cospec.core.types import DraftContext
from cospec.drafters.pool.routing.drafter_weights import DrafterWeights, WeightPrior
from cospec.drafters.pool.routing.prompt_prior import AUDITS, FIRST, MEMORY, MOST_GAIN, READ, PromptPrior
from cospec.drafters.pool.state import PoolRequestState, PoolStats
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams

ALL = [True, True, True]  # drafters score
CODE, MATH, NEW = range(0, 60), range(50, 110), range(105, 200)  # tokens of subjects; some have two


def subjects(tokens: range, count: int, seed: int = 0) -> list[frozenset[int]]:
    draws = np.random.default_rng(seed)
    return [frozenset(draws.choice(tokens, 30, replace=False).tolist()) for _ in range(count)]


def taught(*weights: tuple[range, list[float]], count: int = 20) -> PromptPrior:
    """A model of requests of some subjects, which were asked about before each was learned."""
    prior = PromptPrior(3)
    for turn in zip(*[subjects(tokens, count, seed) for seed, (tokens, _) in enumerate(weights)], strict=True):
        for subject, (_, own) in zip(turn, weights, strict=True):
            prior.gains(subject)
            prior.learn(subject, own, ALL)
    return prior


def test_prompts_with_the_tokens_of_a_drafters_requests_have_this_drafter() -> None:
    prior = taught((CODE, [0.9, 0.05, 0.05]), (MATH, [0.05, 0.9, 0.05]))
    for best, tokens in enumerate((CODE, MATH)):
        found = [gains for subject in subjects(tokens, 20, 9) if (gains := prior.gains(subject))]
        assert len(found) > 12, "a prompt of a known subject is mostly not scored"
        assert [gains[best] for gains in found].count(0.0) >= 0.9 * len(found)
        assert np.mean([sorted(gains)[1] for gains in found]) < -1.0, "a clear lead"
        assert all(min(gains) >= -MOST_GAIN for gains in found)


def test_a_new_subject_is_not_known() -> None:
    prior = taught((CODE, [0.9, 0.05, 0.05]), (MATH, [0.05, 0.9, 0.05]))
    assert not any(prior.gains(subject) for subject in subjects(NEW, 8, 9))


def test_a_drafter_that_was_never_best_is_not_preferred() -> None:
    """Nor a drafter of one odd request, whose share of a token is large by chance."""
    prior = taught((CODE, [1.0, 0.0, 0.0]), count=40)
    prior.learn(subjects(CODE, 1, 5)[0], [0.0, 1.0, 0.0], ALL)
    for subject in subjects(CODE, 40, 9):
        gains = prior.gains(subject)
        assert not gains or gains[0] == 0.0


def test_some_requests_of_a_known_subject_are_scored() -> None:
    """Of each subject of several in turn."""
    prior, turns = PromptPrior(3), [subjects(CODE, 1, seed)[0] for seed in range(4)]
    for turn in range(3 * FIRST):
        prior.gains(turns[turn % 4])
        prior.learn(turns[turn % 4], [0.8, 0.1, 0.1], ALL)
    asked = np.array([[bool(prior.gains(subject)) for subject in turns] for _ in range(400)])
    assert (1 - asked.mean(axis=0)).tolist() == pytest.approx([AUDITS] * 4, abs=0.04)


def test_a_model_that_is_not_right_says_nothing() -> None:
    """The best drafter has nothing to do with the prompt."""
    draws, prior, said = np.random.default_rng(3), PromptPrior(3), 0
    for subject in subjects(CODE, 600):
        said += bool(prior.gains(subject))
        prior.learn(subject, np.roll([0.9, 0.05, 0.05], draws.integers(3)).tolist(), ALL)
    assert said < 6


def test_drafters_that_cannot_score_lose_nothing() -> None:
    """A drafter that scores no more is one of these."""
    prior = PromptPrior(3)
    for scored, count in ((ALL, 3 * FIRST), ([True, True, False], 4 * FIRST)):
        for subject in subjects(CODE, count):
            prior.gains(subject)
            prior.learn(subject, [0.5, 0.0, 0.5] if scored == ALL else [0.8, 0.1, 0.1], scored)
        for subject in subjects(CODE, 40, 9):
            gains = prior.gains(subject)
            assert not gains or (gains[1] < 0 and (scored == ALL or gains[2] == 0.0))
    assert any(prior.gains(subject) for subject in subjects(CODE, 40, 9))


def test_the_model_says_nothing_at_first() -> None:
    prior = taught((CODE, [0.9, 0.05, 0.05]), count=FIRST - 1)
    assert prior.gains(subjects(CODE, 1, 9)[0]) == []


def test_old_requests_count_less() -> None:
    prior, (subject,) = PromptPrior(2), subjects(CODE, 1)
    for _ in range(MEMORY):
        prior.learn(subject, [1.0, 0.0], [True, True])
    for _ in range(MEMORY):
        prior.learn(subject, [0.0, 1.0], [True, True])
    found = [gains for _ in range(4 * FIRST) if (gains := prior.gains(subject))]
    assert found and all(gains[1] == 0.0 and gains[0] < -0.5 for gains in found)


def test_weights_stay_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is forgotten by dividing all weights changes no answer."""
    answers = []
    for largest in (1e6, 1.001):
        monkeypatch.setattr("cospec.drafters.pool.routing.prompt_prior.LARGEST", largest)
        prior = taught((CODE, [0.9, 0.05, 0.05]), (MATH, [0.05, 0.9, 0.05]))
        answers.append([prior.gains(subject) for subject in subjects(MATH, 20, 9)])
    assert any(answers[0])
    for plain, divided in zip(*answers, strict=True):
        assert divided == pytest.approx(plain)


def test_prompts_without_known_tokens_say_nothing() -> None:
    """Also where no prompt has a token of another one, so that no known token is usual."""
    prior = PromptPrior(2)
    for start in range(0, 4000, 10):
        subject = frozenset(range(start, start + 10))
        assert prior.gains(subject) == [] and prior.gains(frozenset()) == []
        prior.learn(subject, [0.5, 0.5], [True, True])


def test_the_end_of_a_prompt_is_read() -> None:
    prompt = [*range(1000), *range(READ)]
    assert PromptPrior.subject(prompt) == frozenset(range(READ))


def test_gains_of_prompts_and_of_scores_add_up() -> None:
    prior = WeightPrior([0.5] * 3)
    weights = DrafterWeights(3, [0.0, -1.0, -2.0])
    assert weights.weights(prior) == pytest.approx(np.exp([0, -1, -2]) / np.exp([0, -1, -2]).sum())
    assert weights.evidence(prior) == pytest.approx([1 / 3] * 3), "nothing was seen of this request"
    plain = DrafterWeights(3)
    for each in (weights, plain):
        each.score_known_tokens([(8.0, 16), (8.5, 16), None])
    assert weights.evidence(prior) == pytest.approx(plain.weights(prior))
    product = np.array(plain.weights(prior)) * np.exp([0, -1, -2])
    assert weights.weights(prior) == pytest.approx(product / product.sum())


def test_only_scored_requests_teach() -> None:
    """The drafts of one drafter say nothing about the others."""
    stats = PoolStats(2)
    context = DraftContext("s", [1, 2, 3, 4], 3, SamplingParams(temperature=0), 0, StreamKind.TARGET)
    foreseen: dict[bool, list[PoolRequestState]] = {False: [], True: []}
    for scored in foreseen:
        for _ in range(3 * FIRST):
            state = stats.start(context)
            if state.weights.is_foreseen:
                foreseen[scored].append(state)
            state.weights.count(0, 3, 4)
            if scored:
                state.weights.score_known_tokens([(12.0, 16), (4.0, 16)])
            stats.learn(state)
    assert not foreseen[False] and len(foreseen[True]) >= FIRST - 1
    state = foreseen[True][0]
    assert state.subject == frozenset({1, 2, 3}), "outputs are no part of a prompt"
    assert state.weights.weights(stats.prior)[0] > 0.5
    named = stats.start(replace(context, drafters=("first",)))
    assert named.subject is None and not named.weights.is_foreseen
