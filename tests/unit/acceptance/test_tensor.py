"""The tensor forms decide as the readable methods do, case by case, with the same words of the generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cospec.acceptance import python_verification
from cospec.acceptance.python_verification import VerifyTask
from cospec.acceptance.rejection import Rejection
from cospec.acceptance.tensor.verify import supports, verify_drafts
from cospec.core.types import VerifyResult
from cospec.registry import ACCEPTANCE_METHODS
from cospec.rng import torch_draws
from cospec.rng.random_streams import RandomStreams, StreamKind, exponential_sample, random_words, to_unit_interval
from cospec.sampling_params import SamplingParams
from harness.verification import CASE, Round, parameters

METHODS = ("match", "rejection", "block", "recursive", "typical")
WORD = st.integers(0, 2**64 - 1)


def tensor(*values: int) -> torch.Tensor:
    return torch.tensor([torch_draws.signed(value) for value in values])


@settings(max_examples=60, derandomize=True)
@given(seed=WORD, stream=WORD, counter=st.tuples(st.integers(0, 2**63), WORD, WORD, WORD))
def test_words_are_those_of_the_generator(seed: int, stream: int, counter: tuple[int, int, int, int]) -> None:
    places = [tensor(counter[0] + 1, counter[0] + 2), *(tensor(word) for word in counter[1:])]
    found = torch.stack(
        torch_draws.philox((tensor(seed), tensor(stream)), (places[0], places[1], places[2], places[3])), -1
    )
    wanted = random_words(seed, stream, counter, 8).view(np.int64)
    assert found.flatten().tolist() == wanted.tolist()


@settings(max_examples=40, derandomize=True)
@given(seed=WORD, base=st.integers(0, 10**6), ahead=st.integers(0, 64), vocab=WORD)
def test_draws_are_those_of_the_streams(seed: int, base: int, ahead: int, vocab: int) -> None:
    draws, position, vocab = RandomStreams(seed, base), base + ahead, 1 + vocab % 300
    weights = np.random.default_rng(vocab).random((2, vocab)) * (np.arange(2) > 0)[:, None]
    for kind, own in ((StreamKind.TARGET, 0), (StreamKind.RECOVER, base)):
        stream = tensor(seed, seed), tensor(kind, kind), tensor(position, position), tensor(own, own)
        winners = torch_draws.exponential_sample(torch.from_numpy(weights), *stream)
        assert winners.tolist() == exponential_sample(weights, [draws.stream(position, kind)] * 2)


def test_the_first_of_equal_values_wins() -> None:
    rows = torch.randint(0, 3, (50, 700), generator=torch.Generator().manual_seed(2)).double()
    assert torch_draws.first_largest(rows).tolist() == [row.index(max(row)) for row in rows.tolist()]
    assert torch_draws.signed(2**64 - 1) == -1 and torch_draws.signed(5) == 5
    words = np.array([0, 2**64 - 1, 2**63], dtype=np.uint64)
    assert to_unit_interval(words).min() > 0


@settings(max_examples=120, derandomize=True)
@given(
    vocab=st.sampled_from([5, 33, 64, 300]),
    seed=st.integers(0, 10**9),
    cases=st.lists(st.tuples(parameters(), st.sampled_from(METHODS), CASE), min_size=1, max_size=6),
)
def test_tensors_decide_as_the_methods_do(
    vocab: int, seed: int, cases: list[tuple[SamplingParams, str, tuple[int, float, bool, bool]]]
) -> None:
    made = Round(vocab, np.random.default_rng(seed))
    for params, acceptance_method, case in cases:
        made.add(params, acceptance_method, *case)
    before = made.rows.clone()
    found = verify_drafts(made.tasks, made.acceptance_methods, made.rows)
    assert found == python_verification.verify_drafts(made.tasks, made.acceptance_methods, made.rows)
    assert torch.equal(made.rows, before)


@pytest.mark.parametrize("acceptance_method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_many_drafts_of_every_length(acceptance_method: str, temperature: float) -> None:
    made = Round(60, np.random.default_rng(3))
    for seed in range(200):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=9)
        made.add(params, acceptance_method, seed % 6, 0.97, seed % 2 == 0, seed % 3 == 0)
    found = verify_drafts(made.tasks, made.acceptance_methods, made.rows)
    assert found == python_verification.verify_drafts(made.tasks, made.acceptance_methods, made.rows)
    assert {len(each.path) for each in found if isinstance(each, VerifyResult)} >= {0, 1, 2, 3}


@pytest.mark.parametrize("acceptance_method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_rows_with_nan_count_where_the_result_depends_on_them(
    acceptance_method: str, temperature: float, odd: float
) -> None:
    made = Round(50, np.random.default_rng(4))
    for seed in range(60):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=9)
        made.add(params, acceptance_method, 3, 0.7, True, False)
    rows = made.rows.clone()
    for number, task in enumerate(made.tasks):
        rows[task.first + number % (task.last - task.first), 7] = odd
    found = verify_drafts(made.tasks, made.acceptance_methods, rows)
    wanted = python_verification.verify_drafts(made.tasks, made.acceptance_methods, rows)
    assert [isinstance(each, str) for each in found] == [isinstance(each, str) for each in wanted]
    assert 0 < sum(isinstance(each, str) for each in found) < len(found)


def test_rows_may_be_missing() -> None:
    """A last row without logits, and a task that only computes known tokens."""
    made = Round(30, np.random.default_rng(5))
    for seed in range(60):
        params = SamplingParams(temperature=0.9 * (seed % 4 > 0), seed=seed, max_tokens=9)
        made.add(params, METHODS[seed % 5], 2, 1.0, True, False)
    short = [VerifyTask(t.entry, t.draft, t.first, t.last - 1, t.count - 1) for t in made.tasks]
    short[7] = VerifyTask(short[7].entry, None, short[7].first, short[7].last, 0)
    found = verify_drafts(short, made.acceptance_methods, made.rows)
    assert found == python_verification.verify_drafts(short, made.acceptance_methods, made.rows)
    assert any(isinstance(each, VerifyResult) and each.token is None for each in found)
    assert found[7] == VerifyResult((), None, bonus=False)


def test_a_method_declares_its_form() -> None:
    class Own(Rejection):
        """Another method, which does not inherit the form."""

    assert [supports(ACCEPTANCE_METHODS.load(name)()) for name in METHODS] == [None] * len(METHODS)
    assert supports(Own()) == "the acceptance method has no tensor form"
