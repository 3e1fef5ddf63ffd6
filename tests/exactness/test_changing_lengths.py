"""Draft lengths and turns that follow what was accepted leave the distribution, in every execution mode.

By enumeration of the output of one request. ``goodput`` was taught by earlier requests, has rates per position, and
reviews its lengths in each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from cospec.acceptance.rejection import Rejection
from cospec.core.engine import Engine
from cospec.core.submitted_step import SubmittedStep
from cospec.core.types import Draft, DraftBudget, ScheduledRequest, SchedulerOutput, TargetProbs, VerifyResult
from cospec.execution.draft_ahead import DraftAhead
from cospec.execution.draft_buffer import rebase
from cospec.execution.overlapped_base import OverlappedMode
from cospec.execution.pipelined import Pipelined
from cospec.policies.goodput.controller import GoodputOptions
from cospec.rng.random_streams import RandomStreams, StreamKind
from harness.overlap import under
from harness.policies import CROWDED, Case, Noted, NotedAndCut, costs
from harness.toys import verifier_of

EXACT, SEEN = 1e-12, 1e-3
METHODS = ("rejection", "block")
LENGTHS = GoodputOptions(per_position=True)
TURNS = GoodputOptions(per_position=True, choose_batch=True, probe_share=0.0)
# Mode, executor, requests in company, and seconds of a drafter's forward with which lengths change within an output.
MODES = {
    "sequential": ("sequential", "inline", 0, 0.14),
    "process": ("sequential", "wired", 0, 0.14),
    "pipelined": ("pipelined", "inline", 1, 0.08),
    "pipelined process": ("pipelined", "wired", 1, 0.08),
    "draft-ahead": ("draft-ahead", "inline", 0, 0.15),
    "draft-ahead process": ("draft-ahead", "wired", 0, 0.15),
}
INLINE = tuple(mode for mode, (_, executor, *_) in MODES.items() if executor == "inline")
# A drafter's process sees the same calls, so one method and no control suffice there.
EACH = [(mode, method) for mode in MODES for method in METHODS if mode in INLINE or method == "rejection"]


def lengths(mode: str, acceptance_method: str) -> Case:
    """Lengths change; a pipelined engine needs other requests to verify while it drafts.

    These have no drafts: forwards of any size take as long here, so drafts for halves of the batch would not pay.
    """
    execution_mode, executor, company, seconds = MODES[mode]
    return Case(costs(seconds), LENGTHS, acceptance_method, execution_mode, executor, company, company_drafts=False)


def turns(mode: str, acceptance_method: str) -> Case:
    """Steps leave sequences out."""
    execution_mode, executor, *_ = MODES[mode]
    return Case(CROWDED, TURNS, acceptance_method, execution_mode, executor, 1)


def differ(paths: Sequence[Sequence[DraftBudget]]) -> bool:
    """Whether a step has other budgets on some paths than on others."""
    longest = max(map(len, paths))
    return any(len({path[step] for path in paths if len(path) > step}) > 1 for step in range(longest))


@pytest.mark.parametrize(("mode", "acceptance_method"), EACH)
def test_lengths_follow_what_was_accepted(mode: str, acceptance_method: str) -> None:
    """Of five tokens, because lengths differ from the second draft on."""
    distance, budgets = replace(lengths(mode, acceptance_method), length=5).distance(Noted)
    assert distance < EXACT
    assert differ(budgets), "lengths follow what the path accepted"


@pytest.mark.parametrize("mode", INLINE)
def test_steps_leave_out_sequences(mode: str) -> None:
    distance, budgets = turns(mode, "rejection").distance(Noted)
    assert distance < EXACT
    assert any(budget.skip_step for path in budgets for budget in path)
    assert any(budget.depth for path in budgets for budget in path)


@pytest.mark.parametrize("mode", INLINE)
def test_a_cut_by_the_cut_token_is_caught(mode: str) -> None:
    for case in (lengths, turns):
        assert case(mode, "rejection").distance(NotedAndCut)[0] > SEEN


class CutsInFlight(OverlappedMode):
    """Wrong on purpose: cuts a finished draft that waits for its verification, by its last token."""

    def submit(self, plan: SchedulerOutput) -> SubmittedStep:
        self.dispatcher.collect()
        return super().submit(replace(plan, entries=tuple(self._cut(entry) for entry in plan.entries)))

    def _cut(self, entry: ScheduledRequest) -> ScheduledRequest:
        request, draft = self.dispatcher.buffer.ready.get(entry.sequence.id, (None, None))
        kept = rebase(request, draft, entry.sequence.tokens) if request and draft else None
        if kept is None or kept.tokens[-1] == 0:
            return entry
        return replace(entry, budget=DraftBudget(len(kept) - 1, len(kept) - 1))


class CutsPipelined(CutsInFlight, Pipelined):
    """``pipelined`` with the mistake."""


class CutsAhead(CutsInFlight, DraftAhead):
    """``draft-ahead`` with the mistake."""


@pytest.mark.parametrize(("mode", "cls"), [("pipelined", CutsPipelined), ("draft-ahead", CutsAhead)])
def test_a_cut_by_tokens_in_flight_is_caught(mode: str, cls: type[CutsInFlight]) -> None:
    case = replace(lengths(mode, "rejection"), spoil=lambda made: under(made, mode, cls=cls))
    assert case.distance(Noted)[0] > SEEN


class Hindsight(Rejection):
    """Wrong on purpose: cuts the last token of a draft once it is rejected, as if the draft ended before."""

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        found, last = super().verify(draft, target, draws), len(draft) - 1
        if len(found.path) != last:
            return found
        token = draws.token(target.distribution[last], draft.base_len + last, StreamKind.TARGET)
        return VerifyResult(found.path, token, bonus=True)


@pytest.mark.parametrize("mode", ["sequential", "pipelined"])  # other controls cover ``draft-ahead``
def test_a_cut_after_the_rejection_is_caught(mode: str) -> None:
    def spoilt(made: Engine) -> Engine:
        verifier_of(made).acceptance_methods = {"rejection": Hindsight()}
        return made

    assert replace(lengths(mode, "rejection"), spoil=spoilt).distance(Noted)[0] > SEEN
