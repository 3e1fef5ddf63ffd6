"""Spines that are led by the library as one call against those that are led position by position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.pool.reference import ReferencePool
from cospec.native import library, pool_lockstep
from cospec.native.pool import NativePool
from cospec.sampling_params import SamplingParams
from harness.llamas import VOCAB, load, write_pair
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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    write_pair(folder / "target", folder / "drafter")
    return folder / "target", folder / "drafter"


def played(
    folders: tuple[Path, Path], combiner: str, listed: Sequence[SamplingParams], work: type = NativePool, **how: Any
) -> tuple[Mapping[str, Any], list[Draft], Any]:
    """What a pool of two Llamas and a look-up wrote, drafted and learned; ``pages`` of one of them, and a deadline."""
    target, near, like = load(folders[0]), load(folders[1]), load(folders[0], pages=how.get("pages", 200))
    drafters = {"near": ModelDrafter(near), "like": ModelDrafter(like)}
    pool = pool_of(drafters | {"copy": NgramDrafter(1, 3)}, combiner, "all", VOCAB, deadline=how.get("deadline"))
    pool.work = work(pool.work.pool_config, pool.pool_stats)
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
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the library led, for each time that it was asked to."""
    found: list[bool] = []
    lead = pool_lockstep.lead

    def noted(*given: Any) -> bool:
        found.append(lead(*given))
        return found[-1]

    monkeypatch.setattr(pool_lockstep, "lead", noted)
    return found


@pytest.mark.parametrize(
    ("combiner", "listed"),
    [("fuse", (GREEDY,)), ("fuse", (GREEDY, SEEDED)), ("mix", (GREEDY,)), ("mix", (GREEDY, SEEDED, DRAWN))],
)
def test_one_call_leads_as_position_by_position_does(
    folders: tuple[Path, Path], combiner: str, listed: Sequence[SamplingParams], calls: list[bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    ours = played(folders, combiner, listed)
    assert calls
    assert all(calls)
    same(ours, played(folders, combiner, listed, ReferencePool))
    monkeypatch.setattr(pool_lockstep, "lead", lambda *_: False)
    same(ours, played(folders, combiner, listed))


@pytest.mark.parametrize("combiner", ["fuse", "mix"])
def test_where_there_is_no_room_drafters_are_led_position_by_position(
    folders: tuple[Path, Path], combiner: str, calls: list[bool]
) -> None:
    ours = played(folders, combiner, [GREEDY, SEEDED], pages=10)
    assert True in calls
    assert False in calls
    same(ours, played(folders, combiner, [GREEDY, SEEDED], ReferencePool, pages=10))


def test_edited_rows_and_drafters_that_may_be_late_are_not_led_by_the_library(
    folders: tuple[Path, Path], calls: list[bool]
) -> None:
    played(folders, "fuse", [CUT])
    played(folders, "fuse", [GREEDY], deadline=5.0)
    assert True not in calls
