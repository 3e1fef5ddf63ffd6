"""Drafting beside verification: asks go out to the drafter's handle, answers come back into the draft pool."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from cospec.core.interfaces import Executor, Future, StepContext
from cospec.core.rng import StreamKind, derive_seed
from cospec.core.stats import StepTimes
from cospec.core.types import (
    Commit,
    Draft,
    DraftBudget,
    DraftContext,
    RequestState,
    ScheduledRequest,
    StepOutput,
)
from cospec.errors import DrafterLost
from cospec.execution.draft_buffer import DraftBuffer, DraftRequest
from cospec.execution.draft_errors import propose_one_by_one, with_failures
from cospec.runtime.executors import InlineExecutor

PATIENCE = 10.0  # seconds that a target with nothing else to do waits for drafts
AHEAD = 1 << 32  # numbers of derived seeds from here on belong to drafts made ahead

log = logging.getLogger(__name__)


class DraftDispatcher:
    """What the rounds that draft beside verification have in common."""

    def __init__(self, components: StepContext, patience: float = PATIENCE) -> None:
        self.components, self.patience = components, patience
        self.pool = DraftBuffer()
        self.lost = 0  # times that a drafter was given up on
        self.executor: Executor | None = components.executor
        if components.executor is None and components.drafter is not None:
            self.executor = InlineExecutor(components.drafter, components.clock)
        self._jobs: deque[tuple[Future, Sequence[DraftRequest]]] = deque()
        self._told: deque[tuple[Future, Sequence[str]]] = deque()
        self._failures: dict[str, str] = {}  # why requests could not be drafted for
        self._busy = 0.0

    @property
    def attended(self) -> bool:
        """Whether there is a drafter that can be asked now."""
        return self.executor is not None and self.executor.present

    @property
    def drafts_ahead(self) -> bool:
        """Whether the drafter can continue what is being verified."""
        return self.attended and self.components.drafter is not None and self.components.drafter.drafts_ahead

    def ask(self, asks: Sequence[DraftRequest]) -> None:
        """Have all of them drafted for as one batch."""
        if asks and self.executor is not None:
            self.pool.expect(asks)
            contexts, budgets = [ask.context for ask in asks], [ask.budget for ask in asks]
            self._jobs.append((self.executor.submit("propose", contexts, budgets), asks))

    def open(self, entries: Sequence[ScheduledRequest]) -> None:
        """Begin a round: let go of what the policy releases, take in what is there, drop what was overtaken."""
        released = [entry.sequence.id for entry in entries if entry.budget.release]
        if released:
            self.pool.drop(released)
            self._tell("free", released, released)
        self.collect()
        for entry in entries:
            self.pool.review(entry)

    def collect(self) -> None:
        """Take in every answer that is there, without waiting."""
        while self._told and self._told[0][0].done():
            self._hear()
        while self._jobs and self._jobs[0][0].done():
            self.wait()

    def wait(self) -> None:
        """Take in the oldest answer; a drafter that is gone or too slow has answered that it has no drafts."""
        future, asks = self._jobs.popleft()
        try:
            drafts: Sequence[Draft] = future.result(self.patience)
        except (DrafterLost, TimeoutError):
            self.lost += 1
            drafts = ()
        except Exception:  # which request raised is not known yet
            log.exception("a batch could not be drafted for; its requests are tried one by one")
            contexts, budgets = [ask.context for ask in asks], [ask.budget for ask in asks]
            drafts, failures = propose_one_by_one(self._call, contexts, budgets)
            self._failures |= failures
        self.pool.deliver(asks, drafts)

    def waits_for(self, entry: ScheduledRequest) -> bool:
        """Whether the sequence is to be verified with a draft that is not there yet."""
        id = entry.sequence.id
        return self.attended and entry.budget.depth > 0 and id not in self.pool.ready

    def needs(self, entry: ScheduledRequest) -> bool:
        """Whether the sequence waits for a draft that nobody makes."""
        return self.waits_for(entry) and entry.sequence.id not in self.pool.asked

    def verify(
        self, batch: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]
    ) -> tuple[list[StepOutput], StepTimes]:
        """Let the target work, whatever the drafter does meanwhile."""
        started = self.components.clock()
        failures, self._failures = self._failures, {}
        sound = [entry for entry in batch if entry.sequence.id not in failures] if failures else batch
        outcomes = self.components.verifier.verify(sound, drafts) if sound else []
        if failures:
            outcomes = with_failures(batch, outcomes, failures)
            self._failures = {id: why for id, why in failures.items() if id not in {e.sequence.id for e in batch}}
        target = self.components.clock() - started
        busy = self.executor.busy if self.executor else 0.0
        times = StepTimes(busy - self._busy, target)
        self._busy = busy
        return outcomes, times

    def drafts_of(self, batch: Sequence[ScheduledRequest]) -> dict[str, Draft]:
        """The finished drafts of a batch, as far as they are worth verifying."""
        taken = [draft for entry in batch if (draft := self.pool.take(entry)) is not None]
        return {draft.id: draft for draft in self.components.policy.trim(taken)}

    def commit(self, commits: Sequence[Commit]) -> None:
        """Target first; the drafter hears of it when it has done what it was asked before."""
        self.components.verifier.commit(commits)
        self._tell("commit", commits, [commit.id for commit in commits])

    def free(self, ids: Sequence[str]) -> None:
        """Target first, then the drafter."""
        self.components.verifier.free(ids)
        self.pool.drop(ids)
        for id in ids:
            self._failures.pop(id, None)
        self._tell("free", ids, ids)

    def fresh(self, entry: ScheduledRequest) -> DraftRequest:
        """A draft that continues the committed tokens."""
        sequence = entry.sequence
        stream_kind = self.components.verifier.acceptance_method(sequence).stream_kind
        return DraftRequest(_context(sequence, list(sequence.tokens), sequence.request.seed, stream_kind), entry.budget)

    def ahead(self, entry: ScheduledRequest, draft: Draft) -> DraftRequest | None:
        """A draft that continues ``draft``, a chain under verification, as if all of it were accepted.

        Its first token has to be the one that the target puts behind the draft, so it is one longer than the budget.
        It is drawn with a seed of its own for every round: a sequence may come to the same length in another way, and
        no number may serve twice. Under the target's noise there is nothing to keep apart: the token of a position is
        drawn with one number, whoever draws it. None where the output ends before such a draft could be of use.
        """
        sequence, base = entry.sequence, draft.base_len
        stream_kind = self.components.verifier.acceptance_method(sequence).stream_kind
        seed = (
            sequence.request.seed
            if stream_kind is StreamKind.TARGET
            else derive_seed(sequence.request.seed, AHEAD + base)
        )
        most = sequence.request.sampling.max_tokens
        room = entry.budget.depth + 1 if most is None else most - sequence.output_len - len(draft) - 1
        depth = min(entry.budget.depth + 1, room)  # the last token of an output is the target's own
        if depth < 2:
            return None
        budget = DraftBudget(depth, depth, threshold=entry.budget.threshold)
        return DraftRequest(
            _context(sequence, [*sequence.tokens, *draft.tokens], seed, stream_kind, len(draft)), budget
        )

    def close(self) -> None:
        """Let the drafter finish what it was asked for, and forget the answers."""
        while self._jobs:
            self.wait()
        while self._told:
            self._hear()
        self.pool.drop([*self.pool.asked, *self.pool.ready])

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a sequence is expected from nobody, or the pool has lost one."""
        self.pool.check_integrity()
        coming = {id(ask) for _, asks in self._jobs for ask in asks}
        assert all(id(ask) in coming for ask in self.pool.asked.values()), "a draft is expected that nobody makes"

    def _tell(self, method: str, told: Sequence[Commit] | Sequence[str], ids: Sequence[str]) -> None:
        if self.executor is not None:
            self._told.append((self.executor.submit(method, told), ids))

    def _hear(self) -> None:
        """Wait for the oldest word to the drafter; where that raised, the drafter begins these sequences anew."""
        future, ids = self._told.popleft()
        try:
            future.result(self.patience)
        except (DrafterLost, TimeoutError):
            raise
        except Exception:
            log.exception("the drafter forgets %d requests", len(ids))
            self._call("free", ids)

    def _call(self, method: str, *args: Any) -> Any:
        assert self.executor is not None, "only a drafter that was asked can raise"
        return self.executor.submit(method, *args).result(self.patience)


def _context(
    sequence: RequestState, tokens: list[int], seed: int, stream_kind: StreamKind, assumed: int = 0
) -> DraftContext:
    request = sequence.request
    chosen = request.speculation.drafters
    return DraftContext(sequence.id, tokens, sequence.prompt_len, request.sampling, seed, stream_kind, assumed, chosen)
