"""Several models speak as one (CoS section 3, appendix B): each scores what others propose, and proposes by itself.

In a round every model has one turn, in the order of the casting, for all sequences that wait for it at once; they may
stand at different stages. In its turn a model

1. is fed what it has not seen of each sequence, known and proposed tokens alike, and so scores the proposals;
2. proposals that all members of the blend have scored are judged, with r the blend and q their *author's* distribution;
3. where it is its part to propose, its next token becomes the first of a proposal of its own, which it goes on to the
   length of the casting. It is never committed as a bonus: it follows the author's distribution, not the blend's.

The model whose queue is shortest has the next turn with a sequence, as in CoS's Algorithm 2; behind a rejection the
default proposer begins anew. Proposals that were not judged outlive the round. When nobody proposes this is standard
collaborative decoding. With a blend of the scorer alone (lambda = 0) it is plain speculative decoding: the law behind
the last proposal is known, so the bonus token is legitimate there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from cospec.core.interfaces import Blend, Ensemble, StepContext
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.stats import ExecutionInfo, ModelCall, StepTimes
from cospec.core.types import Commit, SchedulerOutput, StepOutput
from cospec.ensemble.proposer import Proposer, choose, pick, rolls, taken
from cospec.ensemble.state import CollaborativeState


class Collaborative:
    """Implements ``protocols.Round`` over ``components.members``."""

    learns: ClassVar[bool] = False

    def __init__(self, components: StepContext) -> None:
        self.components = components
        self.times = StepTimes()
        self.info = ExecutionInfo("collaborative")
        self.readable: Mapping[str, str] = {}
        self.calls: dict[str, int] = {}  # forward passes of each model so far, whatever their batch
        self._proposing = self._turning = 0.0  # seconds of this run: for proposals, and of all turns
        self._turns = 0
        self._rows = self._passes = 0  # of the present turn

    def run(self, plan: SchedulerOutput) -> list[StepOutput]:
        """One outcome per entry, in order."""
        with self._members.working():
            return self._run(plan)

    def _run(self, plan: SchedulerOutput) -> list[StepOutput]:
        started = self.components.clock()
        self._proposing, self._turning, self._turns = 0.0, 0.0, 0
        members = self._members
        works = [
            CollaborativeState(entry, members.line(entry.sequence), members.blend(entry.sequence))
            for entry in plan.entries
        ]
        self._compute_prompts([work for work in works if not work.entry.reaches_end or work.wants_prompt_rows])
        waiting = [work for work in works if work.outcome is None]
        members.at_once(lambda model: self._feed(model, [work for work in waiting if model in work.blend.members]))
        while waiting:
            for model in members.policy.proposer_schedule.order:
                group = [work for work in waiting if work.outcome is None and self._next(work) == model]
                if group:
                    self._turn(model, group)
            waiting = [work for work in waiting if work.outcome is None and not work.kept]
        outcomes = [work.finish() for work in works]
        self.readable = dict.fromkeys([outcome.entry.sequence.id for outcome in outcomes], "several models")
        seconds = self.components.clock() - started
        members.policy.ran(self._turns, seconds - self._turning)
        self.times = StepTimes(self._proposing, seconds - self._proposing)
        return outcomes

    def commit(self, commits: Sequence[Commit]) -> None:
        """The lines were written when the proposals were judged; chains leave nothing to move in a cache."""

    def free(self, ids: Sequence[str]) -> None:
        """The members'."""
        self._members.free(ids)

    def close(self) -> None:
        """Nothing is at work between two rounds."""

    @property
    def _members(self) -> Ensemble:
        assert self.components.members is not None, "a collaborative round is built over several models"
        return self.components.members

    # ---- who is next

    def _next(self, work: CollaborativeState) -> int | None:
        """The model that has the next turn with a sequence; None when it has to wait for the next round."""
        line, proposer_schedule = work.line, self._members.policy.proposer_schedule
        if not line.pending and work.kept:
            return None
        if not line.pending and work.room > 0 and proposer_schedule.proposes:
            return proposer_schedule.order[0]
        turns = [model for model in proposer_schedule.order if model in work.blend.members]
        return min(turns, key=line.scored)

    def _goes_on(self, work: CollaborativeState, model: int) -> bool:
        """Whether the model proposes in this turn."""
        proposer_schedule = self._members.policy.proposer_schedule
        if work.outcome is not None or work.room <= 0 or not proposer_schedule.gammas[model]:
            return False
        return proposer_schedule.alternate or (
            model == proposer_schedule.order[0] and not work.line.pending and not work.kept
        )

    # ---- one turn

    def _turn(self, model: int, group: Sequence[CollaborativeState]) -> None:
        started, self._rows, self._passes = self.components.clock(), 0, 0
        beginning = all(self._may_begin(work, model) for work in group)  # otherwise one call scores for everybody
        begun = self._begin(model, group) if beginning else set[str]()
        scoring = self.components.clock()
        others = [work for work in group if work.id not in begun]
        self._feed(model, others)
        self._judge([work for work in others if work.judgeable])
        scored = self.components.clock()
        self._propose(model, [work for work in others if self._goes_on(work, model)])
        ended = self.components.clock()
        self._proposing += scoring - started + ended - scored
        self._turns, self._turning = self._turns + 1, self._turning + ended - started
        if self._passes:
            first = self._rows - (self._passes - 1) * len(group)  # later passes are over one token of each sequence
            self._members.policy.turned(
                model, ModelCall(max(first, len(group)), len(group), self._passes), ended - started
            )

    def _feed(self, model: int, group: Sequence[CollaborativeState]) -> None:
        """Feed what the model has not seen of each sequence; its queues grow up to the last fed token's row."""
        alternate = self._members.policy.proposer_schedule.alternate
        segments, fed = [], []
        for work in group:
            line, end = work.line, work.line.frontier + len(work.line.pending)
            if line.pending and not alternate and line.pending[-1].author in work.blend.members:
                end -= 1  # nobody will look behind the last proposal: its author has not
            start = line.fed[model]
            if start < end:
                tokens = work.tokens(start, end)
                segments.append(SequenceSlice(work.id, start, tokens, logits_from=max(0, line.frontier - start - 1)))
                fed.append(work)
        if segments:
            self._advance(model, fed, segments)

    def _advance(self, model: int, works: Sequence[CollaborativeState], segments: Sequence[SequenceSlice]) -> None:
        """Score segments with the model and write the rows into the lines."""
        logits = self._forward(model, segments)
        first = 0
        for work, segment in zip(works, segments, strict=True):
            last = first + len(segment.tokens) - segment.logits_from
            work.line.advance(model, segment.start + len(segment.tokens), logits[first:last])
            work.count(self._members.names[model])
            first = last

    def _forward(self, model: int, segments: Sequence[SequenceSlice]) -> Tensor:
        members = self._members
        started = self.components.clock()
        logits = members.models[model].forward(TokenBatch(tuple(segments)))
        self._called(model, segments, 1, started)
        return logits

    def _called(self, model: int, segments: Sequence[SequenceSlice], passes: int, started: float) -> None:
        name, seconds = self._members.names[model], self.components.clock() - started
        self.calls[name] = self.calls.get(name, 0) + passes
        call = ModelCall(sum(len(segment.tokens) for segment in segments), len(segments), passes)
        self._rows, self._passes = self._rows + call.rows + (passes - 1) * len(segments), self._passes + passes
        self._members.policy.timed(model, call, seconds)

    # ---- proposing

    def _may_begin(self, work: CollaborativeState, model: int) -> bool:
        """Whether the model has nothing to judge in this turn, so that all of its proposal is one call."""
        line, others = work.line, [member for member in work.blend.members if member != model]
        known = all(line.scored(other) for other in others)  # then there is a law at the frontier to draw from
        return not line.pending and not known and line.fed[model] < line.frontier and self._goes_on(work, model)

    def _begin(self, model: int, group: Sequence[CollaborativeState]) -> set[str]:
        """Feed what the model has not seen and let it propose behind that; returns the sequences that it could do."""
        segments = {}
        for work in group:
            tokens = work.tokens(work.line.fed[model], work.line.frontier)
            segments[work.id] = SequenceSlice(work.id, work.line.fed[model], tokens, logits_from=len(tokens) - 1)
        gamma = self._members.policy.proposer_schedule.gammas[model]
        return self._roll(model, group, segments, {work.id: min(gamma, work.room) for work in group})

    def _propose(self, model: int, group: Sequence[CollaborativeState]) -> None:
        """Extend each line by the model's own proposal, whose first token it knows without another call."""
        members = self._members
        author, gamma = Proposer(model, members.names[model]), members.policy.proposer_schedule.gammas[model]
        left = {work.id: min(gamma, work.room) for work in group}
        while group:
            lines = [(work.text, work.line, work.stream_kind(members.acceptance_method)) for work in group]
            chosen = choose(author, torch.stack([work.line.last(model) for work in group]), lines)
            segments = {}
            for work, proposal in zip(group, chosen, strict=True):
                if proposal is None:
                    work.muted = True  # the blend's own rows decide whether that is an error
                    continue
                work.line.pending.append(proposal)
                left[work.id] -= 1
                if left[work.id] > 0:
                    end = work.line.frontier + len(work.line.pending)
                    segments[work.id] = SequenceSlice(work.id, end - 1, (proposal.token,))
            group = [work for work in group if work.id in segments]
            rolled = self._roll(model, group, segments, left)
            group = [work for work in group if work.id not in rolled]
            if group:
                self._advance(model, group, [segments[work.id] for work in group])

    def _roll(
        self,
        model: int,
        group: Sequence[CollaborativeState],
        segments: Mapping[str, SequenceSlice],
        depths: Mapping[str, int],
    ) -> set[str]:
        """Feed segments and let the model write on, all of one depth in one call, where it can; who is done."""
        members, done = self._members, set[str]()
        author = Proposer(model, members.names[model])
        rolls_here = self.components.native and members.models[model].has_rollout
        able = [work for work in group if rolls_here and rolls(work.text)]
        for depth in {depths[work.id] for work in able}:
            works = [work for work in able if depths[work.id] == depth]
            picks = [pick(work.text, work.line, work.stream_kind(members.acceptance_method), depth) for work in works]
            fed, started = [segments[work.id] for work in works], self.components.clock()
            rolled = members.models[model].rollout(TokenBatch(tuple(fed)), picks)
            self._called(model, fed, depth, started)
            for place, (work, segment) in enumerate(zip(works, fed, strict=True)):
                proposals, rows = taken(author, rolled, place, (work.text, work.stream_kind(members.acceptance_method)))
                work.line.advance(model, segment.start + len(segment.tokens) + len(rows) - 1, rows)
                work.line.pending += proposals
                work.muted = work.muted or len(proposals) < depth
                work.count(author.name, depth)
                done.add(work.id)
        return done

    # ---- judging

    def _judge(self, works: Sequence[CollaborativeState]) -> None:
        """Judge what all members have scored, the works of one blend together."""
        blends = {id(work.blend): work.blend for work in works}
        for key, blend in blends.items():
            self._judge_by(blend, [work for work in works if id(work.blend) == key])

    def _judge_by(self, blend: Blend, works: Sequence[CollaborativeState]) -> None:
        members = self._members
        cases = [work.case() for work in works]
        counts = [_rows(work, len(draft) if draft else 0) for work, (_, draft) in zip(works, cases, strict=True)]
        queues = [
            torch.cat([work.line.queue(member, count) for work, count in zip(works, counts, strict=True)])
            for member in blend.members
        ]
        for work, outcome in zip(works, members.decide(blend, cases, counts, queues), strict=True):
            proposed = work.line.pending[: len(outcome.draft) if outcome.draft else 0]
            accepted = work.apply_result(outcome)
            for place, proposal in enumerate(proposed[: accepted + 1] if outcome.verdict else ()):
                members.policy.judged(proposal.author, place < accepted)

    # ---- known tokens

    def _compute_prompts(self, works: Sequence[CollaborativeState]) -> None:
        """Known tokens behind which nothing is drawn yet, and those whose own log-probabilities are asked for."""
        if not works:
            return
        members = self._members
        rows: dict[str, list[Tensor]] = {work.id: [] for work in works}
        for model in range(len(members.models)):
            behind = [work for work in works if work.line.fed[model] < _end(work)]
            segments = []
            for work in behind:
                tokens = work.tokens(work.line.fed[model], _end(work))
                first = 0 if work.wants_prompt_rows else len(tokens)
                segments.append(SequenceSlice(work.id, work.line.fed[model], tokens, logits_from=first))
                work.line.fed[model], work.line.rows[model] = _end(work), None
                work.count(members.names[model])
            if not segments:
                continue
            parts = self._forward(model, segments).split([len(s.tokens) - s.logits_from for s in segments])
            for work, part in zip(behind, parts, strict=True):
                if model in work.blend.members:
                    rows[work.id].append(part)
        for work in works:
            count = int(work.entry.reaches_end)
            outcome = StepOutput(work.entry, None, None)
            if work.wants_prompt_rows:
                (outcome,) = members.decide(work.blend, [(work.entry, None)], [count], rows[work.id])
            work.apply_result(outcome)


def _rows(work: CollaborativeState, proposals: int) -> int:
    """Rows that the proposals are judged by: one more than those where the law behind the last one is known."""
    return proposals + (work.known_rows > proposals)


def _end(work: CollaborativeState) -> int:
    """The known tokens that this round computes."""
    return work.entry.sequence.computed + work.entry.tokens
