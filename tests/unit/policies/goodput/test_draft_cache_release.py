"""Which requests hold a draft KV cache: requests that ended or were aborted are forgotten."""

from __future__ import annotations

from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import Commit, DraftBudget, FinishReason, Request, RequestState
from cospec.policies.goodput.controller import Goodput, GoodputOptions
from cospec.policies.goodput.draft_cache_release import FORGET_AFTER, DraftCacheRelease
from cospec.policies.policy_build_context import PolicyContext
from cospec.sampling_params import SamplingParams
from harness.execution import CPU, World, steady


def test_finished_sequences_are_forgotten() -> None:
    made = Goodput.build(GoodputOptions(), PolicyContext(costs=CPU))
    World(CPU, steady(0.5, 0.5), 2).play(made, 10)
    ends = [Commit(f"s{n}", 200, (1,), (), 200, finish=FinishReason.STOP) for n in range(2)]
    made.observe(StepStats(0, 2, 2, 400, 0, 0, 0, 2, StepTimes(), 1e-3), ends)
    made.learn()
    assert made.draft_caches.tracked == made.acceptance.tracked == 0


def test_aborted_requests_are_forgotten() -> None:
    draft_caches = DraftCacheRelease(0.9)
    for n in range(3 * FORGET_AFTER):
        draft_caches.settle([f"aborted {n}", "goes on"], [DraftBudget(2, 2)] * 2, n + 1)
    assert draft_caches.tracked <= 2 * FORGET_AFTER
    draft_caches.observe([Commit("goes on", 8, (1, 1), (0,), 8, 2)])
    assert draft_caches.unseen([RequestState(Request("goes on", (1,) * 8, SamplingParams(), 0), [1] * 9)]) == [0], (
        "it stays"
    )
