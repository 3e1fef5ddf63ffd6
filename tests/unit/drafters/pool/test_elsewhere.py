"""Pools whose drafters work in other processes: overlap with the target, and drafts after outcomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from cospec.core.plugin_base import Drafter
from cospec.core.tree import path_to
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import StreamKind
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.runtime.in_process_executors import ThreadExecutor
from cospec.sampling_params import SamplingParams
from harness.pools import pool_of

V = 5


def target() -> ToyModel:
    return ToyModel(V, order=2, seed=1, sharpness=2.0)


def elsewhere(drafter: Drafter) -> DrafterProxy:
    """A drafter of another process."""
    executor = ThreadExecutor(drafter)
    executor.parallel = True
    return DrafterProxy(executor)


@pytest.mark.parametrize(
    ("members", "parallel"),
    [
        (("there", "there"), True),
        (("there", "lookup"), True),
        (("there", "here"), False),
        (("lookup",), False),
    ],
)
def test_a_pool_overlaps_the_target_if_its_drafters_work_elsewhere(members: Sequence[str], parallel: bool) -> None:
    made: dict[str, Callable[[], Drafter]] = {
        "there": lambda: elsewhere(ModelDrafter(target())),
        "here": lambda: ModelDrafter(target()),
        "lookup": lambda: NgramDrafter(1, 3),
    }
    pool = pool_of({f"{kind}{n}": made[kind]() for n, kind in enumerate(members)}, "union", "all", V)
    assert pool.works_elsewhere is parallel
    assert ThreadExecutor.of(pool, torch.device("cpu")).parallel is parallel
    pool.close()


def paths_of(draft: Draft) -> set[tuple[int, ...]]:
    return {tuple(draft.tokens[node] for node in path_to(draft.parents, end)) for end in range(len(draft))}


@pytest.mark.parametrize("combiner", ["fuse", "union", "vote"])
def test_a_pool_merges_drafts_after_outcomes(combiner: str) -> None:
    """The given tokens come first and once; each drafter's guesses follow each number of them."""
    drafters = {"near": ToyModel(V, order=2, seed=1, sharpness=1.0), "far": ToyModel(V, order=1, seed=7)}
    pool = pool_of({name: elsewhere(ModelDrafter(model)) for name, model in drafters.items()}, combiner, "all", V)
    budget, known = (
        DraftBudget(3, 40, (2,), outcomes=True),
        DraftContext("s", [0, 1, 3, 2], 1, SamplingParams(temperature=0), 0, StreamKind.TARGET, 2),
    )
    (draft,) = pool.propose([known], [budget])
    assert draft.base_len == 2 and draft.tokens[:2] == (3, 2) and draft.parents[:2] == (-1, 0)
    assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft)
    assert set(draft.drafters) == {"near", "far"}
    own = [ModelDrafter(model).propose([known], [budget])[0] for model in drafters.values()]
    assert paths_of(draft) == paths_of(own[0]) | paths_of(own[1])
    pool.close()
