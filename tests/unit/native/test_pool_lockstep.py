"""Lockstep drafting as one native call, against lockstep drafting position by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cospec.core.plugin_base import Drafter
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.native import library, pool_lockstep
from cospec.sampling_params import SamplingParams
from harness.llamas import VOCAB, load
from harness.methods import override
from harness.pools import pool_engine, pool_of
from harness.toys import make_request, run_all, tokens_of

GREEDY, SEEDED, DRAWN, CUT = (
    SamplingParams(temperature=0, max_tokens=20),
    SamplingParams(temperature=0.8, seed=3, max_tokens=20),
    SamplingParams(temperature=0.7, max_tokens=20),
    SamplingParams(temperature=0.9, seed=4, max_tokens=20, top_p=0.9),
)

pytestmark = pytest.mark.skipif(not library.available(), reason="the native kernels were not built")


def played(
    folders: tuple[Path, Path], combiner: str, listed: Sequence[SamplingParams], native: bool = True, **how: Any
) -> tuple[Mapping[str, Any], list[Draft], Any]:
    """Return what a pool of two Llamas and a look-up wrote, drafted and learned; ``how``: pages of one, a deadline."""
    target, near, like = load(folders[0]), load(folders[1]), load(folders[0], pages=how.get("pages", 200))
    drafters: dict[str, Drafter] = {"near": ModelDrafter(near), "like": ModelDrafter(like)}
    drafters |= {"copy": NgramDrafter(1, 3)}
    pool = pool_of(drafters, combiner, "all", VOCAB, deadline=how.get("deadline"))
    pool.setting = replace(pool.setting, native=native)
    said: list[Draft] = []
    propose = pool.propose

    def kept(contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        drafts = propose(contexts, [replace(b, threshold=0.05 * (n % 3)) for n, b in enumerate(budgets)])
        said.extend(drafts)
        return drafts

    override(pool, propose=kept)
    engine = pool_engine(target, pool, k=4, max_num_seqs=4)
    requests = [make_request(f"r{n}", (n, 1, 2, n, 9), params) for n, params in enumerate([*listed, *listed])]
    return tokens_of(run_all(engine, requests)), said, pool.pool_stats.calibrations


def same(one: tuple[Any, ...], two: tuple[Any, ...]) -> None:
    assert one[0] == two[0]
    assert one[1]
    for ours, theirs in zip(one[1], two[1], strict=True):
        assert replace(ours, q=None, confidence=None) == replace(theirs, q=None, confidence=None)
        assert (ours.q is None) == (theirs.q is None)
        assert ours.q is None or np.array_equal(ours.q, theirs.q)
        assert np.array_equal(ours.confidence, theirs.confidence)
    assert np.array_equal(one[2], two[2])


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reason of each step that the library did not run; empty for a step that ran natively."""
    found: list[str] = []
    why_not = pool_lockstep.why_not

    def noted(*given: Any) -> str:
        found.append(why_not(*given))
        return found[-1]

    monkeypatch.setattr(pool_lockstep, "why_not", noted)
    return found


@pytest.mark.parametrize(
    ("combiner", "listed"),
    [("fuse", (GREEDY,)), ("fuse", (GREEDY, SEEDED)), ("mix", (GREEDY,)), ("mix", (GREEDY, SEEDED, DRAWN))],
)
@pytest.mark.parametrize("pages", [200, 10])
def test_one_call_equals_one_call_for_each_position(
    folders: tuple[Path, Path], combiner: str, listed: Sequence[SamplingParams], pages: int, calls: list[str]
) -> None:
    """Also where a drafter has no room for some sequences."""
    ours = played(folders, combiner, listed, pages=pages)
    assert calls and not any(calls)
    same(ours, played(folders, combiner, listed, native=False, pages=pages))
    assert set(calls) == {"", "native off"}


def test_the_reasons_against_one_call_are_known_in_advance(folders: tuple[Path, Path], calls: list[str]) -> None:
    played(folders, "fuse", [CUT])
    assert set(calls) == {"edited logits"}
    calls.clear()
    played(folders, "fuse", [GREEDY], deadline=5.0)
    assert set(calls) == {"a deadline"}


def test_the_comparison_sees_other_constants(folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: the library calibrates with another constant."""
    ours = played(folders, "fuse", [GREEDY], native=False)
    monkeypatch.setattr(pool_lockstep, "PRIOR", 8.1)
    other = played(folders, "fuse", [GREEDY])
    assert [str(each.confidence) for each in ours[1]] != [str(each.confidence) for each in other[1]]
