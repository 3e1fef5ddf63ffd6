"""State of one sequence in one collaborative step: the accepted tokens and the proposals to verify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from cospec.core.interfaces import Blend
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.stats import TokenLogprobs
from cospec.core.types import Draft, RequestState, ScheduledRequest, StepOutput, VerifyResult
from cospec.ensemble.proposed_tokens import Proposal, ProposalChain
from cospec.rng.random_streams import StreamKind

DraftToVerify = tuple[ScheduledRequest, Draft | None]


@dataclass(slots=True)
class CollaborativeState:
    """Begins as an entry of the plan, ends as the output of the entry.

    Attributes:
        accepted: proposals that were accepted in this step.
        alternate: see ``FixedSchedule``.
        stopped: no model proposes any more, because logits were not numbers.
        output: set when the sequence gains no more tokens in this step.
    """

    entry: ScheduledRequest
    chain: ProposalChain
    blend: Blend
    alternate: bool = False
    accepted: list[Proposal] = field(default_factory=list)
    stopped: bool = False
    output: StepOutput | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    divergences: tuple[float, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.entry.sequence.id

    @property
    def room(self) -> int:
        """Number of tokens that may still be proposed."""
        used = self.chain.frontier + len(self.chain.pending) - len(self.entry.sequence.tokens)
        return 0 if self.stopped else self.entry.budget.depth - used

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether the request wants logits of known tokens."""
        sequence = self.entry.sequence
        return sequence.request.sampling.prompt_logprobs is not None and sequence.computed < sequence.prompt_len - 1

    @property
    def known_rows(self) -> int:
        """Number of positions from the frontier on that every member of the blend has scored."""
        return min(self.chain.scored(member) for member in self.blend.members)

    @property
    def verifiable(self) -> bool:
        """Whether a proposal can be verified, or a token can be drawn without proposals."""
        return self.known_rows > 0 and bool(self.chain.pending or not self.accepted or self.wants_bonus)

    @property
    def wants_bonus(self) -> bool:
        """Whether the token after an accepted proposal is drawn in the same step.

        A relaxed target is a target with its drafter (DSD 2.3), so the drafter scores its last token too. Other blends
        follow CoS, where the next step begins with a proposal.
        """
        return not self.blend.exact and not self.alternate

    @property
    def extended(self) -> RequestState:
        """The request with the tokens that were accepted in this step."""
        sequence = self.entry.sequence
        if not self.accepted:
            return sequence
        tokens = [*sequence.tokens, *(proposal.token for proposal in self.accepted)]
        return replace(sequence, tokens=tokens, computed=len(tokens) - 1)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return known, accepted and pending tokens from position ``start`` up to ``end``."""
        known = self.entry.sequence.tokens
        found = known[start:end]
        if end > len(known):
            ahead = [*self.accepted, *self.chain.pending]
            found += [proposal.token for proposal in ahead[max(0, start - len(known)) : end - len(known)]]
        return tuple(found)

    def stream_kind(self, acceptance_method: Callable[[RequestState], AcceptanceMethod]) -> StreamKind:
        """Return the random stream of the proposals."""
        stream_kind: StreamKind = acceptance_method(self.entry.sequence).stream_kind
        return stream_kind

    def count_calls(self, name: str, calls: int = 1) -> None:
        """Count calls of the model ``name`` for this sequence."""
        self.calls[name] = self.calls.get(name, 0) + calls

    def draft_to_verify(self) -> DraftToVerify:
        """Return the current entry and the proposals that all members have scored."""
        entry, base = self.entry, self.chain.frontier
        if self.accepted:
            entry = ScheduledRequest(self.extended, 1, entry.budget)
        return entry, draft_of(self.id, base, self.chain.pending[: self.known_rows])

    def apply_result(self, verified: StepOutput) -> int:
        """Apply a verification result to the first proposals of the chain; returns the number of accepted proposals."""
        if verified.error is not None or verified.result is None:
            self.output = verified._replace(entry=self.entry, draft=None, model_calls=self.calls)
            return 0
        result, chain = verified.result, self.chain
        accepted = len(result.path)
        seen = chain.pending[: len(verified.draft) if verified.draft else 0]
        self.accepted += seen[:accepted]
        self.logprobs += verified.logprobs
        self.divergences += verified.divergences
        chain.accept(accepted)
        if result.token is not None:
            chain.replace()
            self._set_output(verified, [*self.accepted, *seen[accepted:]], result)
        return accepted

    def finish(self) -> StepOutput:
        """Return the output; without a further token it holds the accepted proposals alone."""
        if self.output is None:
            path = tuple(range(len(self.accepted)))
            verified = StepOutput(self.entry, None, None)
            self._set_output(verified, self.accepted, VerifyResult(path, None, bonus=True))
        assert self.output is not None
        return self.output

    def _set_output(self, verified: StepOutput, proposals: list[Proposal], result: VerifyResult) -> None:
        draft = draft_of(self.id, len(self.entry.sequence.tokens), proposals)
        bonus = result.bonus or 0 < len(self.accepted) == len(proposals)
        whole = VerifyResult(tuple(range(len(self.accepted))), result.token, bonus)
        self.output = StepOutput(
            self.entry,
            draft,
            whole,
            self.logprobs,
            verified.prompt_logprobs,
            divergences=self.divergences,
            model_calls=self.calls,
        )


def draft_of(id: str, base: int, proposals: list[Proposal]) -> Draft | None:
    """Return the proposals as a chain after ``base`` tokens; None if there are none."""
    if not proposals:
        return None
    tokens = tuple(proposal.token for proposal in proposals)
    q = [proposal.q for proposal in proposals if proposal.q is not None]
    sources = tuple(proposal.source for proposal in proposals)
    parents = tuple(range(-1, len(tokens) - 1))
    return Draft(id, base, tokens, parents, sources, np.stack(q) if len(q) == len(proposals) else None)
