"""One sequence in one collaborative round: what it gained so far, and what of its line may be judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from cospec.core.interfaces import Blend
from cospec.core.plugins import AcceptanceMethod
from cospec.core.rng import StreamKind
from cospec.core.stats import TokenLogprobs
from cospec.core.types import Draft, RequestState, ScheduledRequest, StepOutput, VerifyResult
from cospec.ensemble.proposal_queue import Proposal, ProposalQueue


@dataclass(slots=True)
class CollaborativeState:
    """Begins as a plan's entry, ends as its outcome.

    Attributes:
        kept: proposals that were accepted in this round.
        muted: nobody proposes any more, because there were no numbers to choose by.
        outcome: set when the sequence gains no more in this round.
    """

    entry: ScheduledRequest
    line: ProposalQueue
    blend: Blend
    kept: list[Proposal] = field(default_factory=list)
    muted: bool = False
    outcome: StepOutput | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    calls: dict[str, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return self.entry.sequence.id

    @property
    def room(self) -> int:
        """How many tokens may still be proposed."""
        used = self.line.frontier + len(self.line.pending) - len(self.entry.sequence.tokens)
        return 0 if self.muted else self.entry.budget.depth - used

    @property
    def wants_prompt_rows(self) -> bool:
        """Whether the logits of known tokens are asked for."""
        sequence = self.entry.sequence
        return sequence.request.sampling.prompt_logprobs is not None and sequence.computed < sequence.prompt_len - 1

    @property
    def known_rows(self) -> int:
        """Positions from the frontier on whose law is known: every member of the blend has scored them."""
        return min(self.line.scored(member) for member in self.blend.members)

    @property
    def judgeable(self) -> bool:
        """Whether a proposal can be judged, or a token drawn where nobody proposes."""
        return self.known_rows > 0 and bool(self.line.pending or not self.kept)

    @property
    def text(self) -> RequestState:
        """The sequence with the tokens that were accepted in this round."""
        sequence = self.entry.sequence
        if not self.kept:
            return sequence
        tokens = [*sequence.tokens, *(proposal.token for proposal in self.kept)]
        return replace(sequence, tokens=tokens, computed=len(tokens) - 1)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Of the sequence as it is proposed, from position ``start`` up to ``end``."""
        known = self.entry.sequence.tokens
        found = known[start:end]
        if end > len(known):
            ahead = [*self.kept, *self.line.pending]
            found += [proposal.token for proposal in ahead[max(0, start - len(known)) : end - len(known)]]
        return tuple(found)

    def stream_kind(self, acceptance_method: Callable[[RequestState], AcceptanceMethod]) -> StreamKind:
        """The stream that proposals are drawn with."""
        stream_kind: StreamKind = acceptance_method(self.entry.sequence).stream_kind
        return stream_kind

    def count(self, name: str, calls: int = 1) -> None:
        """A model was called for this sequence."""
        self.calls[name] = self.calls.get(name, 0) + calls

    def case(self) -> tuple[ScheduledRequest, Draft | None]:
        """What is to be judged: the entry as it stands now, and the proposals that all members have scored."""
        entry, base = self.entry, self.line.frontier
        if self.kept:
            entry = ScheduledRequest(self.text, 1, entry.budget)
        return entry, draft_of(self.id, base, self.line.pending[: self.known_rows])

    def apply_result(self, judged: StepOutput) -> int:
        """Take a verdict on the line's first proposals; returns how many were accepted."""
        if judged.error is not None or judged.verdict is None:
            self.outcome = replace(judged, entry=self.entry, draft=None, model_calls=self.calls)
            return 0
        verdict, line = judged.verdict, self.line
        accepted = len(verdict.path)
        seen = line.pending[: len(judged.draft) if judged.draft else 0]
        self.kept += seen[:accepted]
        self.logprobs += judged.logprobs
        line.accept(accepted)
        if verdict.token is not None:
            line.replace()
            self._close(judged, [*self.kept, *seen[accepted:]], verdict)
        return accepted

    def finish(self) -> StepOutput:
        """The outcome; accepted proposals without a token behind them where nothing else came."""
        if self.outcome is None:
            path = tuple(range(len(self.kept)))
            judged = StepOutput(self.entry, None, None)
            self._close(judged, self.kept, VerifyResult(path, None, bonus=True))
        assert self.outcome is not None
        return self.outcome

    def _close(self, judged: StepOutput, shown: list[Proposal], verdict: VerifyResult) -> None:
        draft = draft_of(self.id, len(self.entry.sequence.tokens), shown)
        whole = VerifyResult(tuple(range(len(self.kept))), verdict.token, verdict.bonus)
        self.outcome = StepOutput(
            self.entry, draft, whole, self.logprobs, judged.prompt_logprobs, model_calls=self.calls
        )


def draft_of(id: str, base: int, proposals: list[Proposal]) -> Draft | None:
    """The proposals as a chain behind ``base`` tokens; None of none."""
    if not proposals:
        return None
    tokens = tuple(proposal.token for proposal in proposals)
    q = [proposal.q for proposal in proposals if proposal.q is not None]
    sources = tuple(proposal.source for proposal in proposals)
    parents = tuple(range(-1, len(tokens) - 1))
    return Draft(id, base, tokens, parents, sources, np.stack(q) if len(q) == len(proposals) else None)
