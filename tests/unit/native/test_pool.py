"""The native library's work for pools against the readable one: the same drafts, weights and lessons, bit for bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cospec.core.plugins import Drafter
from cospec.core.types import Draft, DraftBudget, DraftContext, Speculation
from cospec.drafters import calibration
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.pool.pool import PoolDrafter
from cospec.drafters.pool.reference import ReferencePool
from cospec.models.toy import ToyModel
from cospec.native import library
from cospec.native.pool import NativePool
from cospec.registry import COMBINERS, ROUTINGS
from cospec.sampling_params import SamplingParams
from harness.methods import override
from harness.pools import Ticks, pool_engine, pool_of
from harness.toys import ScriptedDrafter, make_request, run_all, tokens_of

V = 11  # one step of the kernels, and three tokens more
KINDS = (
    SamplingParams(temperature=0, max_tokens=16),
    SamplingParams(temperature=0.8, seed=3, max_tokens=16),
    SamplingParams(temperature=0.9, seed=4, max_tokens=16, top_p=0.9, repetition_penalty=1.1),
    SamplingParams(temperature=0.7, max_tokens=16),
)

pytestmark = pytest.mark.skipif(not library.available(), reason="the native kernels were not built")


class Narrow(ToyModel):
    """In single precision, which the library reads; now and then its logits are no numbers, or it breaks."""

    asked = 0

    def forward(self, batch: Any) -> torch.Tensor:
        self.asked += 1
        logits = super().forward(batch).float()
        if self.asked % 11 == 5:
            logits[0] = float("nan")
        if self.asked % 29 == 7:
            raise RuntimeError("out of memory")
        return logits


class Sure(ScriptedDrafter):
    """Says how sure it is, of some drafts."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        drafts = super().propose(contexts, budgets)
        sure = [np.linspace(0.9, 0.1, len(draft)) if len(contexts[0].tokens) % 2 else None for draft in drafts]
        return [replace(draft, confidence=own) for draft, own in zip(drafts, sure, strict=True)]


def members(combiner: str, every: bool) -> dict[str, Drafter]:
    """With ``every``, also a model whose logits the library does not read."""
    chain = [-1, 0, 1, 2]
    tree = [-1, -1, 0, 1] if combiner in ("union", "fuse") else chain
    models = {f"m{n}": ModelDrafter(Narrow(V, order=1, seed=n, sharpness=2.0)) for n in range(3)}
    wide = {"wide": ModelDrafter(ToyModel(V, order=2, seed=1, sharpness=1.0))} if every else {}
    return models | wide | {"tree": Sure([0, 1, 2, 3], tree), "copy": NgramDrafter(1, 3)}


def played(combiner: str, routing: str, params: SamplingParams, work: type, every: bool = True) -> tuple[Any, ...]:
    """Everything that a pool said and learned while it drafted for a few requests."""
    pool = pool_of(members(combiner, every), combiner, routing, V, Ticks())
    for member in pool.members[:-1]:
        member.free = False
    pool.work = work(pool.work.pool_config, pool.pool_stats)
    said: list[Draft] = []
    stood: list[dict[str, Any]] = []
    propose = pool.propose

    def kept(contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        stood.append({id: record.standing.numbers.copy() for id, record in pool.records.items()})
        some = [replace(b, threshold=0.05 * (n % 3), drafters=(None, 2, 3)[n % 3]) for n, b in enumerate(budgets)]
        drafts = propose(contexts, some)
        said.extend(drafts)
        return drafts

    override(pool, propose=kept)
    engine = pool_engine(ToyModel(V, order=2, seed=1, sharpness=2.0), pool, k=4, max_num_seqs=4)
    listed = [make_request(f"r{n}", (n, 1, 2, n), params) for n in range(5)]
    some = Speculation(drafters=("m0", "copy"))
    tokens = tokens_of(run_all(engine, [*listed, replace(listed[0], id="few", speculation=some)]))
    known = pool.pool_stats
    return tokens, said, pool.weights(), known.calibrations, known.prior.numbers, pool.left_out(), stood


@pytest.mark.parametrize("every", [True, False], ids=("some read in Python", "all read in the library"))
@pytest.mark.parametrize("params", KINDS, ids=("greedy", "seeded", "edited", "drawn"))
@pytest.mark.parametrize(("combiner", "routing"), list(itertools.product(COMBINERS, ROUTINGS)))
def test_the_library_does_what_the_readable_work_does(
    combiner: str, routing: str, params: SamplingParams, every: bool
) -> None:
    tokens, said, weights, cells, prior, left_out, stood = played(combiner, routing, params, NativePool, every)
    other = played(combiner, routing, params, ReferencePool, every)
    assert tokens == other[0]
    assert len(said) == len(other[1])
    assert said or (params is KINDS[3] and combiner != "mix")
    for ours, theirs in zip(said, other[1], strict=True):
        assert replace(ours, q=None, confidence=None) == replace(theirs, q=None, confidence=None)
        assert (ours.q is None) == (theirs.q is None)
        assert ours.q is None or np.array_equal(ours.q, theirs.q)
        assert np.array_equal(ours.confidence, theirs.confidence)
    assert weights == other[2]
    assert np.array_equal(cells, other[3])
    assert np.array_equal(prior, other[4])
    assert left_out == other[5]
    for ours, theirs in zip(stood, other[6], strict=True):
        assert ours.keys() == theirs.keys()
        assert all(np.array_equal(numbers, theirs[id]) for id, numbers in ours.items())


def test_what_the_library_knows_is_what_it_does() -> None:
    pool: PoolDrafter = pool_of(members("fuse", True), "fuse", "hedge", V)
    assert type(pool.work) is NativePool


def test_the_comparison_sees_other_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    """A control: with a constant that is a little different the readable work says something else."""
    ours = played("union", "hedge", KINDS[0], NativePool)
    monkeypatch.setattr(calibration, "PRIOR", 8.1)
    other = played("union", "hedge", KINDS[0], ReferencePool)
    assert any(not np.array_equal(one.confidence, two.confidence) for one, two in zip(ours[1], other[1], strict=False))
