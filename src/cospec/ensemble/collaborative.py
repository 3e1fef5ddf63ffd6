"""Collaborative decoding with several models: each member scores proposals and proposes (CoS section 3, appendix B).

In a step each model has one turn at a time, in the order of the schedule. A turn serves all sequences that wait for
the model; these sequences may be at different stages. In a turn the model

1. is fed the known and proposed tokens that it has not seen, and so scores the proposals;
2. verifies the proposals that all members of the blend have scored, with r the blend and q the *proposer's*
   distribution;
3. proposes, if the schedule asks for proposals: its next token is the first of ``gamma`` proposals. This token is
   never committed as a bonus, because it follows the proposer's distribution, not the blend's.

The model with the fewest scored positions has the next turn with a sequence (CoS algorithm 2). After a rejection the
default proposer begins again, as in the text of CoS section 3.3. In algorithm 2 the model that scored goes on to
propose. Algorithm 1 sets all proposals to the resampled token, and so loses the accepted ones before it. Proposals that
were not verified outlive the step. Without proposals this is standard collaborative decoding. With a blend of the
scorer alone (lambda = 0) it is plain speculative decoding. In this case the distribution after the last proposal is
known, so the bonus token is correct. Of a relaxed target (``adaptive``) the proposer scores its last proposal where all
were accepted, and a bonus token follows as well.

Requests whose target is one model, or relaxed towards its proposer, run as native calls (``native_steps.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from cospec.core.interfaces import Blend, ModeComponents, WindowsAhead
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.stats import ExecutionInfo, StepTimes
from cospec.core.submitted_step import FinishedFuture, StepResult, SubmittedStep
from cospec.core.types import Commit, ScheduledRequest, SchedulerOutput, StepOutput
from cospec.ensemble.ensemble import ProposingEnsemble
from cospec.ensemble.native_steps import NativeMemberSteps
from cospec.ensemble.proposer import Proposer, draw_proposals, read_rollout, rollout_params, supports_rollout
from cospec.ensemble.state import CollaborativeState
from cospec.policies.latency.call_latency import ModelCall


class Collaborative:
    """The execution mode of ``members`` that propose to each other. Implements ``core.interfaces.ExecutionMode``."""

    learns: ClassVar[bool] = False
    windows_ahead: WindowsAhead | None = None

    def __init__(self, members: ProposingEnsemble, components: ModeComponents) -> None:
        self.members, self.components = members, components
        self.info = ExecutionInfo("collaborative")
        self.calls: dict[str, int] = {}  # forward passes of each model so far, regardless of their batch sizes
        self._proposing = self._turning = 0.0  # seconds of this step: of proposals, and of all turns
        self._native = NativeMemberSteps(members, components)
        self._turns = 0
        self._rows = self._passes = 0  # of the current turn

    def submit(self, plan: SchedulerOutput) -> SubmittedStep:
        """Run one step, or several natively, with one output per entry and step; the result is there at once."""
        with self.members.limit_torch_threads():
            return self._run(plan)

    def collect(self, step: SubmittedStep) -> StepResult:
        """Return what the step produced."""
        return step.collect(self.components.clock)

    def _run(self, plan: SchedulerOutput) -> SubmittedStep:
        started = self.components.clock()
        self._proposing, self._turning, self._turns = 0.0, 0.0, 0
        outputs, times, python_path = self._native.run(plan)
        for name, calls in self._native.calls.items():
            self.calls[name] = self.calls.get(name, 0) + calls
        own = [entry for entry in plan.entries if entry.sequence.id in python_path]
        if own:
            outputs = outputs + self._run_turns(own)
            seconds = self.components.clock() - started
            times = StepTimes(times.draft + self._proposing, seconds - times.draft - self._proposing)
        return SubmittedStep(plan.entries, FinishedFuture(outputs), times, python_path)

    def _run_turns(self, entries: Sequence[ScheduledRequest]) -> list[StepOutput]:
        """Run one step of the entries in turns of the models; returns one output per entry."""
        members, started = self.members, self.components.clock()
        alternate = members.policy.proposer_schedule.alternate
        states = [
            CollaborativeState(entry, members.proposal_chain(entry.sequence), members.blend(entry.sequence), alternate)
            for entry in entries
        ]
        self._compute_prompts([state for state in states if not state.entry.samples_token or state.wants_prompt_rows])
        waiting = [state for state in states if state.output is None]
        members.score_in_parallel(
            lambda model: self._feed(model, [state for state in waiting if model in state.blend.members])
        )
        while waiting:
            for model in members.policy.proposer_schedule.order:
                group = [state for state in waiting if state.output is None and self._next_model(state) == model]
                if group:
                    self._turn(model, group)
            waiting = [state for state in waiting if state.output is None and (state.wants_bonus or not state.accepted)]
        members.policy.observe_step(self._turns, self.components.clock() - started - self._turning)
        return [state.finish() for state in states]

    def commit(self, commits: Sequence[Commit]) -> None:
        """Do nothing: verification wrote the proposals, and a chain leaves no cache entries to move."""

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences in all members. Unknown ids are ignored."""
        self.members.free(ids)
        if self.components.multi_step is not None:
            self.components.multi_step.free(ids)

    def close(self) -> None:
        """Do nothing: nothing runs between two steps."""

    # ---- next turn

    def _next_model(self, state: CollaborativeState) -> int | None:
        """Return the model that has the next turn with a sequence; None if the sequence waits for the next step."""
        chain, proposer_schedule = state.chain, self.members.policy.proposer_schedule
        if not chain.pending and state.accepted and not state.wants_bonus:
            return None
        if not chain.pending and not state.accepted and state.room > 0 and proposer_schedule.proposes:
            return proposer_schedule.order[0]
        turns = [model for model in proposer_schedule.order if model in state.blend.members]
        return min(turns, key=chain.scored)

    def _should_propose(self, state: CollaborativeState, model: int) -> bool:
        """Return whether the model proposes in this turn."""
        proposer_schedule = self.members.policy.proposer_schedule
        if state.output is not None or state.room <= 0 or not proposer_schedule.gammas[model]:
            return False
        return proposer_schedule.alternate or (
            model == proposer_schedule.order[0] and not state.chain.pending and not state.accepted
        )

    # ---- one turn

    def _turn(self, model: int, group: Sequence[CollaborativeState]) -> None:
        started, self._rows, self._passes = self.components.clock(), 0, 0
        draft_only = all(self._can_draft_only(state, model) for state in group)  # otherwise one call scores for all
        drafted = self._feed_and_propose(model, group) if draft_only else set[str]()
        scoring = self.components.clock()
        others = [state for state in group if state.id not in drafted]
        self._feed(model, others)
        self._verify([state for state in others if state.verifiable])
        scored = self.components.clock()
        self._propose(model, [state for state in others if self._should_propose(state, model)])
        ended = self.components.clock()
        self._proposing += scoring - started + ended - scored
        self._turns, self._turning = self._turns + 1, self._turning + ended - started
        if self._passes:
            first = self._rows - (self._passes - 1) * len(group)  # later passes read one token of each sequence
            self.members.policy.observe_turn(
                model, ModelCall(max(first, len(group)), len(group), self._passes), ended - started
            )

    def _feed(self, model: int, group: Sequence[CollaborativeState]) -> None:
        """Feed the model the tokens it has not seen; extends its logits up to the last fed token."""
        alternate = self.members.policy.proposer_schedule.alternate
        slices, fed = [], []
        for state in group:
            chain, end = state.chain, state.chain.frontier + len(state.chain.pending)
            if chain.pending and not (alternate or state.wants_bonus):
                end -= chain.pending[-1].proposer in state.blend.members  # no model reads the row: this one has none
            start = chain.fed[model]
            if start < end:
                tokens = state.tokens(start, end)
                slices.append(SequenceSlice(state.id, start, tokens, logits_from=max(0, chain.frontier - start - 1)))
                fed.append(state)
        if slices:
            self._advance(model, fed, slices)

    def _advance(self, model: int, states: Sequence[CollaborativeState], slices: Sequence[SequenceSlice]) -> None:
        """Score slices with the model and append the logits to the chains."""
        logits = self._forward(model, slices)
        first = 0
        for state, part in zip(states, slices, strict=True):
            last = first + len(part.tokens) - part.logits_from
            state.chain.advance(model, part.start + len(part.tokens), logits[first:last])
            state.count_calls(self.members.names[model])
            first = last

    def _forward(self, model: int, slices: Sequence[SequenceSlice]) -> Tensor:
        members = self.members
        started = self.components.clock()
        logits = members.models[model].forward(TokenBatch(tuple(slices)))
        self._record_call(model, slices, 1, started)
        return logits

    def _record_call(self, model: int, slices: Sequence[SequenceSlice], passes: int, started: float) -> None:
        name, seconds = self.members.names[model], self.components.clock() - started
        self.calls[name] = self.calls.get(name, 0) + passes
        call = ModelCall(sum(len(part.tokens) for part in slices), len(slices), passes)
        self._rows, self._passes = self._rows + call.rows + (passes - 1) * len(slices), self._passes + passes
        self.members.policy.observe_call(model, call, seconds)

    # ---- proposals

    def _can_draft_only(self, state: CollaborativeState, model: int) -> bool:
        """Return whether the model has nothing to verify in this turn, so that its whole proposal is one call."""
        chain, others = state.chain, [member for member in state.blend.members if member != model]
        known = all(chain.scored(other) for other in others)  # then a distribution to draw from exists at the frontier
        return (
            not chain.pending and not known and chain.fed[model] < chain.frontier and self._should_propose(state, model)
        )

    def _feed_and_propose(self, model: int, group: Sequence[CollaborativeState]) -> set[str]:
        """Feed the model its unseen tokens and draft after them; returns the ids of the sequences that were drafted."""
        slices = {}
        for state in group:
            tokens = state.tokens(state.chain.fed[model], state.chain.frontier)
            slices[state.id] = SequenceSlice(state.id, state.chain.fed[model], tokens, logits_from=len(tokens) - 1)
        gamma = self.members.policy.proposer_schedule.gammas[model]
        return self._rollout(model, group, slices, {state.id: min(gamma, state.room) for state in group})

    def _propose(self, model: int, group: Sequence[CollaborativeState]) -> None:
        """Extend each chain by the model's proposal; the first token needs no further call."""
        members = self.members
        proposer, gamma = Proposer(model, members.names[model]), members.policy.proposer_schedule.gammas[model]
        left = {state.id: min(gamma, state.room) for state in group}
        while group:
            chains = [(state.extended, state.chain, state.stream_kind(members.acceptance_method)) for state in group]
            chosen = draw_proposals(proposer, torch.stack([state.chain.last(model) for state in group]), chains)
            slices = {}
            for state, proposal in zip(group, chosen, strict=True):
                if proposal is None:
                    state.stopped = True  # the blend's own rows decide whether this is an error
                    continue
                state.chain.pending.append(proposal)
                left[state.id] -= 1
                if left[state.id] > 0:
                    end = state.chain.frontier + len(state.chain.pending)
                    slices[state.id] = SequenceSlice(state.id, end - 1, (proposal.token,))
            group = [state for state in group if state.id in slices]
            rollout = self._rollout(model, group, slices, left)
            group = [state for state in group if state.id not in rollout]
            if group:
                self._advance(model, group, [slices[state.id] for state in group])

    def _rollout(
        self,
        model: int,
        group: Sequence[CollaborativeState],
        slices: Mapping[str, SequenceSlice],
        depths: Mapping[str, int],
    ) -> set[str]:
        """Feed slices and let the model draft in rollouts, one per depth; returns the ids that were drafted."""
        members, done = self.members, set[str]()
        proposer = Proposer(model, members.names[model])
        runs_rollouts = members.rollouts and members.models[model].has_rollout
        able = [state for state in group if runs_rollouts and supports_rollout(state.extended)]
        for depth in {depths[state.id] for state in able}:
            states = [state for state in able if depths[state.id] == depth]
            params = [
                rollout_params(state.extended, state.chain, state.stream_kind(members.acceptance_method), depth)
                for state in states
            ]
            fed, started = [slices[state.id] for state in states], self.components.clock()
            rollout = members.models[model].rollout(TokenBatch(tuple(fed)), params)
            self._record_call(model, fed, depth, started)
            for place, (state, part) in enumerate(zip(states, fed, strict=True)):
                proposals, rows = read_rollout(
                    proposer, rollout, place, (state.extended, state.stream_kind(members.acceptance_method))
                )
                state.chain.advance(model, part.start + len(part.tokens) + len(rows) - 1, rows)
                state.chain.pending += proposals
                state.stopped = state.stopped or len(proposals) < depth
                state.count_calls(proposer.name, depth)
                done.add(state.id)
        return done

    # ---- verification

    def _verify(self, states: Sequence[CollaborativeState]) -> None:
        """Verify what all members have scored; states of one blend are verified together."""
        blends = {id(state.blend): state.blend for state in states}
        for key, blend in blends.items():
            self._verify_by(blend, [state for state in states if id(state.blend) == key])

    def _verify_by(self, blend: Blend, states: Sequence[CollaborativeState]) -> None:
        members = self.members
        cases = [state.draft_to_verify() for state in states]
        counts = [_rows(state, len(draft) if draft else 0) for state, (_, draft) in zip(states, cases, strict=True)]
        member_logits = [
            torch.cat([state.chain.logits(member, count) for state, count in zip(states, counts, strict=True)])
            for member in blend.members
        ]
        for state, output in zip(states, members.decide(blend, cases, counts, member_logits), strict=True):
            proposed = state.chain.pending[: len(output.draft) if output.draft else 0]
            accepted = state.apply_result(output)
            for place, proposal in enumerate(proposed[: accepted + 1] if output.result else ()):
                members.policy.observe_acceptance(proposal.proposer, place < accepted)

    # ---- known tokens

    def _compute_prompts(self, states: Sequence[CollaborativeState]) -> None:
        """Compute known tokens without a draw after them, and known tokens whose log-probabilities the request
        wants."""
        if not states:
            return
        members = self.members
        rows: dict[str, list[Tensor]] = {state.id: [] for state in states}
        for model in range(len(members.models)):
            lagging = [state for state in states if state.chain.fed[model] < _computed_end(state)]
            slices = []
            for state in lagging:
                tokens = state.tokens(state.chain.fed[model], _computed_end(state))
                first = 0 if state.wants_prompt_rows else len(tokens)
                slices.append(SequenceSlice(state.id, state.chain.fed[model], tokens, logits_from=first))
                state.chain.fed[model], state.chain.rows[model] = _computed_end(state), None
                state.count_calls(members.names[model])
            if not slices:
                continue
            groups = self._forward(model, slices).split([len(s.tokens) - s.logits_from for s in slices])
            for state, group in zip(lagging, groups, strict=True):
                if model in state.blend.members:
                    rows[state.id].append(group)
        for state in states:
            count = int(state.entry.samples_token)
            output = StepOutput(state.entry, None, None)
            if state.wants_prompt_rows:
                (output,) = members.decide(state.blend, [(state.entry, None)], [count], rows[state.id])
            state.apply_result(output)


def _rows(state: CollaborativeState, proposals: int) -> int:
    """Return the number of rows that verify the proposals: one more if the distribution after the last is known."""
    return proposals + (state.known_rows > proposals)


def _computed_end(state: CollaborativeState) -> int:
    """Return the number of known tokens that are computed after this step."""
    return state.entry.sequence.computed + state.entry.num_tokens
