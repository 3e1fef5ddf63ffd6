"""Submit draft requests to the drafter's executor, and collect drafts into the draft buffer."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from cospec.core.interfaces import Executor, ModeComponents
from cospec.core.stats import StepTimes
from cospec.core.submitted_step import CancellableFuture, FinishedFuture, Future, SubmittedStep
from cospec.core.tree import MAX_NODES
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
from cospec.execution.acceptance_rate import AcceptanceRate
from cospec.execution.draft_buffer import DraftBuffer, DraftRequest, best_path
from cospec.execution.draft_errors import failed_outputs, propose_one_by_one
from cospec.rng.random_streams import StreamKind, derive_seed
from cospec.runtime.executor_base import DRAFT_TIMEOUT
from cospec.runtime.in_process_executors import InlineExecutor

GUESSES = 4  # of the target's own token, after each number of accepted tokens
AHEAD_SEEDS = 1 << 32  # derived seeds from this number on belong to drafts made ahead

log = logging.getLogger(__name__)


class DraftDispatcher:
    """Asynchronous drafting for the overlapped execution modes.

    Args:
        timeout: seconds to wait for one answer of the drafter.
    """

    def __init__(self, components: ModeComponents, timeout: float = DRAFT_TIMEOUT) -> None:
        self.components, self.timeout = components, timeout
        self.buffer, self.rate = DraftBuffer(), AcceptanceRate()
        self.lost = 0  # batches and notifications that the drafter lost or answered too late
        self.executor: Executor | None = components.executor
        if components.executor is None and components.drafter is not None:
            self.executor = InlineExecutor(components.drafter, components.clock)
        self._jobs: deque[tuple[Future[Any], Sequence[DraftRequest]]] = deque()
        self._notifications: deque[tuple[Future[Any], Sequence[str]]] = deque()
        self._failures: dict[str, str] = {}  # errors of requests whose drafting failed, by id
        self._busy = 0.0

    @property
    def available(self) -> bool:
        """Whether a drafter can be called now."""
        return self.executor is not None and self.executor.present

    @property
    def drafts_ahead(self) -> bool:
        """Whether the drafter can continue a draft under verification."""
        return self.available and self.components.drafter is not None and self.components.drafter.drafts_ahead

    def submit_drafts(self, requests: Sequence[DraftRequest]) -> None:
        """Submit draft requests as one batch."""
        if requests and self.executor is not None:
            self.buffer.add(requests)
            self._jobs.append((self.executor.submit("propose", *_arguments(requests)), requests))

    def open(self, entries: Sequence[ScheduledRequest]) -> None:
        """Begin a step: free what the policy releases, collect finished drafts, drop stale drafts."""
        released = [entry.sequence.id for entry in entries if entry.budget.release]
        if released:
            self.buffer.drop(released)
            self._notify("free", released, released)
        self.collect()
        for entry in entries:
            self.buffer.drop_stale(entry)

    def collect(self) -> None:
        """Collect every finished answer, without waiting."""
        while self._notifications and self._notifications[0][0].done():
            self._finish_notification()
        while self._jobs and self._jobs[0][0].done():
            self.wait()

    def wait(self, seconds: float | None = None) -> None:
        """Collect the oldest answer; a lost or late drafter counts as an answer without drafts.

        Args:
            seconds: stop waiting after this time without an answer; None waits for the dispatcher's timeout.
        """
        future, requests = self._jobs[0]
        drafts: Sequence[Draft] = ()
        try:
            drafts = self._drafts(future, requests, self.timeout if seconds is None else seconds)
        except (DrafterLost, TimeoutError):
            if seconds is not None and not future.done():
                return
            if not self.lost:
                log.warning("the drafter gave no answer; sequences go on without its drafts")
            self.lost += 1
        self._jobs.popleft()
        self.buffer.deliver(requests, drafts)

    def _drafts(self, future: Future[Any], requests: Sequence[DraftRequest], seconds: float) -> Sequence[Draft]:
        try:
            found: Sequence[Draft] = future.result(seconds)
        except (DrafterLost, TimeoutError):
            raise
        except Exception:  # the failing request is not known yet
            log.exception("drafting failed for a batch; its requests are retried one by one")
            found, failures = propose_one_by_one(self._call, *_arguments(requests))
            self._failures |= failures
        return found

    def wait_for_pending(self, entries: Sequence[ScheduledRequest]) -> None:
        """Wait for the drafts of these sequences that were requested."""
        while any(entry.budget.depth > 0 and entry.sequence.id in self.buffer.pending for entry in entries):
            self.wait()
            for entry in entries:
                self.buffer.drop_stale(entry)

    def draft_missing(self, entries: Sequence[ScheduledRequest]) -> None:
        """Wait until every sequence that is to have a draft has one, or its drafter has answered without."""
        while any(map(self.waits_for_draft, entries)):
            self.submit_drafts([self.continue_committed(entry) for entry in entries if self.needs_draft(entry)])
            self.wait()
            for entry in entries:
                self.buffer.drop_stale(entry)

    def waits_for_draft(self, entry: ScheduledRequest) -> bool:
        """Return whether the sequence is to be verified with a draft that is not finished yet."""
        id = entry.sequence.id
        return self.available and entry.budget.depth > 0 and id not in self.buffer.ready

    def needs_draft(self, entry: ScheduledRequest) -> bool:
        """Return whether the sequence needs a draft that was not requested yet."""
        return self.waits_for_draft(entry) and entry.sequence.id not in self.buffer.pending

    def submit(self, batch: Sequence[ScheduledRequest], drafts: Mapping[str, Draft], python_path: str) -> SubmittedStep:
        """Submit a batch to the verifier; ``python_path`` is the reason for the Python path."""
        started = self.components.clock()
        busy = self.executor.busy if self.executor else 0.0  # a verifier may verify now, while the drafter goes on
        ids = [entry.sequence.id for entry in batch]
        failures = {id: self._failures.pop(id) for id in ids if id in self._failures}
        sound = [entry for entry in batch if entry.sequence.id not in failures]
        future: CancellableFuture[list[StepOutput]] = FinishedFuture([])
        if sound:
            future = self.components.verifier.submit(sound, drafts)
        times = StepTimes(busy - self._busy, self.components.clock() - started)
        self._busy = busy
        return SubmittedStep(batch, future, times, dict.fromkeys(ids, python_path), failed_outputs(batch, failures))

    def drafts_of(self, batch: Sequence[ScheduledRequest]) -> dict[str, Draft]:
        """Return the finished drafts of a batch, trimmed by the policy."""
        return self.trimmed([draft for entry in batch if (draft := self.buffer.take(entry)) is not None])

    def trimmed(self, drafts: list[Draft]) -> dict[str, Draft]:
        """Return drafts by id, trimmed by the policy."""
        return {draft.id: draft for draft in self.components.policy.trim(drafts)}

    def commit(self, commits: Sequence[Commit]) -> None:
        """Commit in the target first; the drafter commits after its pending calls."""
        self.components.verifier.commit(commits)
        self.rate.learn(commits)
        self._notify("commit", commits, [commit.id for commit in commits])

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences in the target first, then in the drafter. Unknown ids are ignored."""
        self.components.verifier.free(ids)
        self.buffer.drop(ids)
        for id in ids:
            self._failures.pop(id, None)
        self._notify("free", ids, ids)

    def continue_committed(self, entry: ScheduledRequest) -> DraftRequest:
        """Return a request for a draft after the committed tokens."""
        sequence = entry.sequence
        stream_kind = self.components.verifier.acceptance_method(sequence).stream_kind
        return DraftRequest(_context(sequence, list(sequence.tokens), sequence.request.seed, stream_kind), entry.budget)

    def continue_draft(self, entry: ScheduledRequest, draft: Draft) -> DraftRequest | None:
        """Return a request for a draft after ``draft``, as if its likeliest path were accepted.

        The first token must match the target's token after ``draft``, so the draft is one token longer than the budget.
        Each window gives the draft a seed of its own: a sequence may reach the same length on another path, and no
        random number may serve twice. Under the target's random stream the seed stays, because one number draws the
        token of each position. Under this stream alone a tree is continued: no draft can select among drawn tokens.
        None if the output ends too early for such a draft.
        """
        sequence, base = entry.sequence, draft.base_len
        own = [draft.tokens[node] for node in best_path(draft)]
        path = [*(() if entry.assumed is None else entry.assumed.tokens), *own]
        stream_kind, seed = self.components.verifier.acceptance_method(sequence).stream_kind, sequence.request.seed
        if stream_kind is not StreamKind.TARGET and not draft.is_chain:
            return None
        if stream_kind is not StreamKind.TARGET:
            # A refuted window and a later window may have the same base, and the later one follows more target calls.
            calls = 0 if entry.assumed is None else 1 + sequence.stats.target_calls
            seed = derive_seed(seed, AHEAD_SEEDS * (1 + calls) + base)
        depth = _depth_after(entry, len(path))
        if depth < 2:
            return None
        budget = DraftBudget(depth, depth, threshold=entry.budget.threshold)
        return DraftRequest(_context(sequence, [*sequence.tokens, *path], seed, stream_kind, len(path)), budget)

    def drafts_for_outcomes(self, entry: ScheduledRequest) -> bool:
        """Return whether a draft of the sequence may continue all outcomes of a verification.

        Only the target's random stream allows that: whether a draft arrives and is kept then cannot select among drawn
        tokens.
        """
        drafter = self.components.drafter
        kind = self.components.verifier.acceptance_method(entry.sequence).stream_kind
        return self.drafts_ahead and drafter is not None and drafter.drafts_for_outcomes and kind is StreamKind.TARGET

    def continue_outcomes(self, entry: ScheduledRequest, draft: Draft | None, nodes: int) -> DraftRequest | None:
        """Return a request for a draft that continues the outcomes of the verification in flight.

        The draft begins with the likeliest path of ``draft``, and branches after each of its tokens: the target's token
        is looked for among the first tokens of the branches (SSD, 2603.03251). None if the output ends too early.

        Args:
            nodes: of the draft at most.
        """
        sequence, budget = entry.sequence, entry.budget
        depth = _depth_after(entry, 0)
        if depth < 2 or not budget.depth:
            return None
        path = [] if draft is None else [draft.tokens[node] for node in best_path(draft)]
        kind = self.components.verifier.acceptance_method(sequence).stream_kind
        context = _context(sequence, [*sequence.tokens, *path], sequence.request.seed, kind, len(path))
        count = max(depth, min(nodes, MAX_NODES) - len(path))
        shape = DraftBudget(depth, count, (GUESSES,), budget.drafters, confident=True, outcomes=True)
        return DraftRequest(context, shape)

    def close(self) -> None:
        """Wait for all pending calls of the drafter, and discard the results."""
        while self._jobs:
            self.wait()
        while self._notifications:
            self._finish_notification()
        self.buffer.drop([*self.buffer.pending, *self.buffer.ready])

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if no drafter makes a pending draft, or the buffer is inconsistent."""
        self.buffer.check_integrity()
        coming = {id(request) for _, requests in self._jobs for request in requests}
        assert all(id(request) in coming for request in self.buffer.pending.values()), (
            "no drafter makes a pending draft"
        )

    def _notify(self, method: str, message: Sequence[Commit] | Sequence[str], ids: Sequence[str]) -> None:
        if self.executor is not None:
            self._notifications.append((self.executor.submit(method, message), ids))

    def _finish_notification(self) -> None:
        """Wait for the oldest notification; if the drafter raised, the drafter forgets these sequences."""
        future, ids = self._notifications.popleft()
        try:
            future.result(self.timeout)
        except Exception as error:
            if isinstance(error, DrafterLost) or not future.done():
                self.lost += 1  # the drafter has nothing to forget, or has not come to these sequences
                return
            log.exception("the drafter forgets %d requests", len(ids))
            with suppress(DrafterLost, TimeoutError):
                self._call("free", ids)

    def _call(self, method: str, *args: Any) -> Any:
        assert self.executor is not None, "only a drafter can raise"
        return self.executor.submit(method, *args).result(self.timeout)


def _arguments(requests: Sequence[DraftRequest]) -> tuple[list[DraftContext], list[DraftBudget]]:
    return [request.context for request in requests], [request.budget for request in requests]


def _depth_after(entry: ScheduledRequest, accepted: int) -> int:
    """The depth of a draft after ``accepted`` tokens of a draft; one more than the budget, for the next token."""
    most, room = entry.sequence.request.sampling.max_tokens, entry.budget.depth + 1
    if most is not None:
        room = min(room, most - entry.sequence.output_len - accepted - 1)  # the target makes the last token
    return room


def _context(
    sequence: RequestState, tokens: list[int], seed: int, stream_kind: StreamKind, assumed: int = 0
) -> DraftContext:
    request = sequence.request
    rest = assumed, request.speculation.drafters, sequence.processors
    return DraftContext(sequence.id, tokens, sequence.prompt_len, request.sampling, seed, stream_kind, *rest)
