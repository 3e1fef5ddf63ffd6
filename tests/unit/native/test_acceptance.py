"""The compiled judge decides what the rules decide, case by case and bit by bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cospec.acceptance import python_verification
from cospec.acceptance.python_verification import VerifiedDraft, VerifyTask
from cospec.acceptance.rejection import Rejection
from cospec.core.types import VerifyResult
from cospec.ensemble.blends.registry import build_blend
from cospec.native import library
from cospec.native.acceptance import NativeAcceptance, supports
from cospec.native.library import Source
from cospec.registry import ACCEPTANCE_METHODS
from cospec.sampling_params import SamplingParams
from harness.verification import Round, parameters

pytestmark = pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")
KNOWN = ("match", "rejection", "block")


def compiled(
    made: Round, tasks: list[VerifyTask], rows: torch.Tensor, verifier: NativeAcceptance | None = None
) -> list[VerifiedDraft]:
    """What the library decides."""
    return (verifier or NativeAcceptance()).verify(tasks, made.acceptance_method, rows)


@settings(max_examples=40, derandomize=True)
@given(
    vocab=st.sampled_from([5, 33, 64, 300]),
    seed=st.integers(0, 10**9),
    cases=st.lists(
        st.tuples(
            parameters(),
            st.sampled_from(KNOWN),
            st.integers(0, 6),
            st.sampled_from([0.0, 0.9, 1.0]),
            st.booleans(),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
)
def test_the_compiled_judge_decides_as_the_rules_do(
    vocab: int, seed: int, cases: list[tuple[SamplingParams, str, int, float, bool, bool]]
) -> None:
    made = Round(vocab, np.random.default_rng(seed))
    for params, acceptance_method, nodes, agreeing, drawn, tree in cases:
        made.add(params, acceptance_method, nodes, agreeing, drawn, tree)
    before = made.rows.clone()
    found = compiled(made, made.tasks, made.rows)
    assert found == python_verification.verify_drafts(made.tasks, made.acceptance_methods, made.rows)
    assert torch.equal(made.rows, before)


@pytest.mark.parametrize("acceptance_method", KNOWN)
@pytest.mark.parametrize("isa", library.ISAS)
def test_every_path_is_taken(acceptance_method: str, isa: str) -> None:
    """Drafts near the target distribution: every accepted length occurs, with every instruction set, as in Python."""
    best = library.isa()
    if isa not in library.offered():
        pytest.skip(f"this processor has no {isa}")
    made = Round(200, np.random.default_rng(3))
    for seed in range(150):
        made.add(
            SamplingParams(temperature=0.8, seed=seed, max_tokens=9), acceptance_method, 3, 0.97, seed % 2 == 0, False
        )
    library.set_isa(isa)
    try:
        found = compiled(made, made.tasks, made.rows)
    finally:
        library.set_isa(best)
    assert found == python_verification.verify_drafts(made.tasks, made.acceptance_methods, made.rows)
    assert {len(verdict.path) for verdict in found if isinstance(verdict, VerifyResult)} == {0, 1, 2, 3}


@pytest.mark.parametrize("acceptance_method", KNOWN)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_rows_with_nan_count_where_the_verdict_depends_on_them(
    acceptance_method: str, temperature: float, odd: float
) -> None:
    made = Round(50, np.random.default_rng(4))
    for seed in range(60):
        made.add(
            SamplingParams(temperature=temperature, seed=seed, max_tokens=9), acceptance_method, 3, 0.7, True, False
        )
    rows = made.rows.clone()
    for number, task in enumerate(made.tasks):
        rows[task.first + number % (task.last - task.first), 7] = odd
    found = compiled(made, made.tasks, rows)
    wanted = python_verification.verify_drafts(made.tasks, made.acceptance_methods, rows)
    assert [isinstance(verdict, str) for verdict in found] == [isinstance(verdict, str) for verdict in wanted]
    assert 0 < sum(isinstance(verdict, str) for verdict in found) < len(found)


def test_a_last_row_may_be_missing() -> None:
    made = Round(30, np.random.default_rng(5))
    for seed in range(40):
        made.add(SamplingParams(temperature=0.9, seed=seed, max_tokens=9), KNOWN[seed % 3], 2, 1.0, True, False)
    short = [VerifyTask(t.entry, t.draft, t.first, t.last - 1, t.count - 1) for t in made.tasks]
    found = compiled(made, short, made.rows)
    assert found == python_verification.verify_drafts(short, made.acceptance_methods, made.rows)
    assert any(isinstance(verdict, VerifyResult) and verdict.token is None for verdict in found)


BLENDS = [
    ({"method": "weighted"}, 3),
    ({"method": "weighted", "lambda": 0.3}, 2),
    ({"method": "contrastive", "mu": 0.4}, 2),
    ({"method": "contrastive", "mu": 0.4, "plausibility": 0.1}, 2),
    ({"method": "contrastive", "mu": 0, "plausibility": 0.1}, 2),
    ({"method": "realign", "lambda": 1.3}, 2),
    ({"method": "adaptive", "max_divergence": 0.05, "lambda3": 0.0}, 2),
]


@pytest.mark.parametrize(("distribution", "count"), BLENDS, ids=str)
@pytest.mark.parametrize("acceptance_method", KNOWN)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_blend_is_judged_as_its_rows_are(
    distribution: dict[str, Any], count: int, acceptance_method: str, temperature: float
) -> None:
    """Rows that are computed where a verdict looks give the verdicts of all rows, and odd ones count where they did."""
    blend = build_blend(distribution, count)
    made = Round(60, np.random.default_rng(6))
    for seed in range(60):
        made.add(
            SamplingParams(temperature=temperature, seed=seed, max_tokens=9),
            acceptance_method,
            3,
            0.9,
            seed % 2 == 0,
            False,
        )
    generator = torch.Generator().manual_seed(1)
    queues = [made.rows + 0.3 * torch.randn(made.rows.shape, generator=generator) for _ in blend.members]
    for number, task in enumerate(made.tasks[::5]):
        queues[-1][task.verified_rows.start + number % task.count, 7] = float("nan")
    assert blend.recipe is not None
    found = NativeAcceptance().verify_by(made.tasks, made.acceptance_method, Source(queues, blend.recipe))
    assert found == python_verification.verify_drafts(made.tasks, made.acceptance_methods, blend.combine(queues))
    assert any(isinstance(verdict, str) for verdict in found)
    assert {len(verdict.path) for verdict in found if isinstance(verdict, VerifyResult)} == {0, 1, 2, 3}
    assert len(queues) == 1 or found != compiled(made, made.tasks, queues[0])


@pytest.mark.parametrize("acceptance_method", KNOWN)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_masks_are_applied_to_every_row(acceptance_method: str, temperature: float) -> None:
    """Excluded tokens that are no numbers do not count, in rows of one model and in blended rows."""
    made = Round(70, np.random.default_rng(8))
    masked = SamplingParams(
        temperature=temperature, max_tokens=9, min_tokens=4, stop_token_ids=(0, 1), bad_words_token_ids=((7,), (8, 9))
    )
    for seed in range(80):
        made.add(replace(masked, seed=seed), acceptance_method, 3, 0.9, seed % 2 == 0, seed % 3 == 0)
    rows = made.rows.clone()
    rows[:, 7] = float("nan")
    for task in made.tasks:
        rows[task.first : task.verified_rows.start, 7] = 0.0  # rows of the prompt have no mask
    found = compiled(made, made.tasks, rows)
    assert found == python_verification.verify_drafts(made.tasks, made.acceptance_methods, rows)
    assert {len(verdict.path) for verdict in found if isinstance(verdict, VerifyResult)} == {0, 1, 2, 3}
    tokens = {verdict.token for verdict in found if isinstance(verdict, VerifyResult)}
    assert not tokens & {0, 1, 7}
    blend = build_blend({"method": "weighted", "lambda": 0.3}, 2)
    queues = [made.rows, made.rows.flip(0)]
    assert blend.recipe is not None
    blended = NativeAcceptance().verify_by(made.tasks, made.acceptance_method, Source(queues, blend.recipe))
    assert blended == python_verification.verify_drafts(made.tasks, made.acceptance_methods, blend.combine(queues))


def test_the_library_refuses_methods_without_native_code() -> None:
    class Own(Rejection):
        """A subclass of another package without native code."""

    assert [supports(ACCEPTANCE_METHODS.load(name)()) for name in KNOWN] == [None] * len(KNOWN)
    for other in (Own(), ACCEPTANCE_METHODS.load("typical")()):
        assert supports(other) == "the acceptance method has no native code"


def test_stored_data_is_not_used_for_a_request_of_the_same_name() -> None:
    verifier = NativeAcceptance()
    for seed in range(20):
        made = Round(40, np.random.default_rng(seed))
        made.add(
            SamplingParams(temperature=0.5 + seed / 9, seed=seed, max_tokens=9), KNOWN[seed % 3], 2, 0.8, True, False
        )
        assert compiled(made, made.tasks, made.rows, verifier) == python_verification.verify_drafts(
            made.tasks, made.acceptance_methods, made.rows
        )
        assert compiled(made, made.tasks, made.rows, verifier) == python_verification.verify_drafts(
            made.tasks, made.acceptance_methods, made.rows
        )


LAW = (0.5, 0.25, 0.125, 0.0625, 0.0625)
BORDERS: list[tuple[dict[str, Any], set[int]]] = [
    ({"top_p": 0.495}, {0}),
    ({"top_p": 0.505}, {0, 1}),
    ({"top_p": 0.745}, {0, 1}),
    ({"top_p": 0.755}, {0, 1, 2}),
    ({"top_p": 0.9}, {0, 1, 2, 3, 4}),
    ({"top_k": 1}, {0}),
    ({"top_k": 3}, {0, 1, 2}),
    ({"top_k": 4}, {0, 1, 2, 3, 4}),
    ({"min_p": 0.51}, {0}),
    ({"min_p": 0.49}, {0, 1}),
    ({"top_k": 2, "top_p": 0.66}, {0}),
]


@pytest.mark.parametrize(("truncation", "kept"), BORDERS, ids=str)
def test_where_truncations_end(truncation: dict[str, Any], kept: set[int]) -> None:
    """Up to the token that reaches the border, with every token that ties with that token; none beyond."""
    made = Round(len(LAW), np.random.default_rng(0))
    for seed in range(150):
        made.add(SamplingParams(seed=seed, max_tokens=9, **truncation), "match", 0, 1.0, False, False)
    rows = torch.tensor(LAW).log().repeat(len(made.rows), 1)
    found = compiled(made, made.tasks, rows)
    assert found == python_verification.verify_drafts(made.tasks, made.acceptance_methods, rows)
    assert {verdict.token for verdict in found if isinstance(verdict, VerifyResult)} == kept
