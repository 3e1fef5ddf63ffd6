"""Plans how many tokens each request computes in the next step. No I/O, no tensors.

First come, first served, over one queue ordered by age: a priority class is worth ``AGEING_SECONDS`` of waiting, so
every request becomes the most urgent request in time. Known tokens are computed in pieces that fit the step's token
budget (chunked prefill). When the KV cache is full, the least urgent running sequence gives its pages back and waits.
Its tokens stay known and are computed again later (preemption by recomputation).

Where the verifier takes several steps at a time, each plan is a microbatch of sequences that are not in flight. All
limits hold for the steps in flight together. A microbatch gets an equal share of the sequences, so that every stage of
a pipelined target works (DSD, CoSine).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace

from cospec.core.interfaces import BlockManager
from cospec.core.plugin_base import Policy
from cospec.core.tree import level_nodes
from cospec.core.types import (
    BatchState,
    Commit,
    DraftBudget,
    RequestState,
    RequestStatus,
    ScheduledRequest,
    SchedulerOutput,
)

AGEING_SECONDS = 10.0
MAX_FAILURES = 3  # failed steps since a request's latest token, after which the request ends
NO_DRAFT = DraftBudget()


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Bounds of a step: sequences at once, tokens computed, and tokens of one sequence.

    Attributes:
        chain_methods: names of the acceptance methods for chains only; their requests get no trees.
        max_steps: steps that one native call may run, at most.
        multi_step_drafts: whether such a call may include drafts.
        max_in_flight: steps that the verifier takes at a time.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_len: int
    chain_methods: Container[str] = frozenset()
    max_steps: int = 1
    multi_step_drafts: bool = True
    max_in_flight: int = 1


def queue_key(sequence: RequestState) -> tuple[float, str, int]:
    """Return the sort key, smallest first: arrival plus priority; outputs of one request stay together in order."""
    request = sequence.request
    return request.arrival + request.priority * AGEING_SECONDS, request.parent, request.index


class Scheduler:
    """Holds every unfinished sequence. Only the scheduler admits, preempts and reserves pages of the target's cache."""

    def __init__(self, pages: BlockManager, policy: Policy, limits: SchedulerLimits) -> None:
        self.pages, self.policy, self.limits = pages, policy, limits
        self.waiting: list[RequestState] = []
        self.running: list[RequestState] = []
        self.preempted = 0
        self._step = 0
        self._latest: dict[str, int] = {}  # latest step of each sequence, by id
        self._in_flight: dict[str, list[ScheduledRequest]] = {}  # windows of the sequences in flight, oldest first
        self._steps_in_flight = 0
        self._failures: dict[str, int] = {}  # failed steps since the latest token, by id

    def add(self, sequence: RequestState) -> None:
        """Queue a new sequence."""
        insort(self.waiting, sequence, key=queue_key)

    def remove(self, ids: Iterable[str]) -> None:
        """Drop waiting and running sequences that are not in flight, and their cache."""
        removed = set(ids)
        self.waiting = [sequence for sequence in self.waiting if sequence.id not in removed]
        self.running = [sequence for sequence in self.running if sequence.id not in removed]
        for id in removed:
            self.pages.free(id)
            self._failures.pop(id, None)
            self._in_flight.pop(id, None)
            self._latest.pop(id, None)

    def start_step(self, entries: Sequence[ScheduledRequest]) -> None:
        """Mark the sequences of a submitted step as in flight; plans leave them out."""
        self._steps_in_flight += 1
        for entry in entries:
            self._in_flight.setdefault(entry.sequence.request.id, []).append(entry)
            self._latest[entry.sequence.request.id] = self._step

    def clear_in_flight(self, entries: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """Mark the windows of the oldest step as no longer in flight: the outputs arrived, or the step failed.

        Returns the entries whose outputs count. The others were refuted, or their sequence was removed.
        """
        self._steps_in_flight -= 1
        current, in_flight = [], self._in_flight
        for entry in entries:
            id = entry.sequence.request.id
            windows = in_flight.get(id)
            if windows and windows[0] is entry:
                current.append(entry)
                if len(windows) == 1:
                    del in_flight[id]
                else:
                    windows.pop(0)
        return current

    @property
    def windows_in_flight(self) -> int:
        """Number of submitted windows whose outputs count."""
        return sum(map(len, self._in_flight.values()))

    @property
    def alone_in_flight(self) -> RequestState | None:
        """The sequence in flight where no other sequence runs; None where the sequence was aborted."""
        alone = self.running[0] if len(self.running) == 1 == len(self._in_flight) else None
        return alone if alone is not None and alone.finish is None else None

    def is_in_flight(self, id: str) -> bool:
        """Whether a sequence is in a submitted step."""
        return id in self._in_flight

    def is_current(self, entry: ScheduledRequest) -> bool:
        """Whether the outputs of a submitted window count: it is in flight and was not refuted."""
        return any([each is entry for each in self._in_flight.get(entry.sequence.request.id, ())])

    def drop_refuted(self, sequences: Iterable[RequestState]) -> None:
        """Forget the windows in flight of sequences whose latest tokens are not the next window's assumed tokens.

        Later windows continue this window, so all are refuted.
        """
        for sequence in sequences:
            windows = self._in_flight.get(sequence.request.id)
            if windows and not windows[0].holds:
                del self._in_flight[sequence.request.id]

    def retry(self, sequences: Iterable[RequestState]) -> list[RequestState]:
        """Queue sequences whose step failed, to compute all known tokens again.

        Returns the sequences that have failed ``MAX_FAILURES`` times since their latest token; these are not queued.
        """
        given_up = []
        for sequence in sequences:
            self._in_flight.pop(sequence.id, None)
            failures = self._failures[sequence.id] = self._failures.get(sequence.id, 0) + 1
            if failures < MAX_FAILURES:
                self._requeue(sequence)
            else:
                given_up.append(sequence)
        return given_up

    def lose_cache(self) -> list[RequestState]:
        """Compute every running sequence again: the contents of the KV cache are lost. No sequence is in flight.

        Returns the sequences, whose caches all components must free.
        """
        lost = list(self.running)
        for sequence in lost:
            self._requeue(sequence)
        self.pages.forget_contents()
        return lost

    def apply_commits(self, commits: Sequence[Commit], sequences: Sequence[RequestState]) -> list[RequestState]:
        """Offer computed prefixes for reuse after a step; mark and return the sequences that ended."""
        ended = []
        for commit, sequence in zip(commits, sequences, strict=True):
            self.pages.cache_blocks(commit.id, sequence.tokens, sequence.computed)
            if commit.finish is not None:
                sequence.status = RequestStatus.FINISHED
                ended.append(sequence)
        for commit in commits if self._failures else ():
            if commit.tokens:
                self._failures.pop(commit.id, None)
        return ended

    def plan(self) -> SchedulerOutput:
        """Divide the token budget: running sequences first, then waiting ones; another step may still be in flight."""
        if self._failures and self._in_flight:  # a sequence that failed runs alone: another loss is its own
            return SchedulerOutput(self._step, (), 1)
        ready = self.running
        if self._in_flight:
            ready = [sequence for sequence in ready if sequence.request.id not in self._in_flight]
        count, tokens = self._share()
        entries = self._plan_retry(ready, tokens) if self._failures else []
        if not entries:
            if self._failures:
                ready = [sequence for sequence in ready if sequence.id not in self._failures]
            if len(ready) > count:  # longest ago first: the policy may leave out sequences of each microbatch
                ready = sorted(ready, key=lambda sequence: self._latest.get(sequence.id, 0))
            entries = self._plan_batch(ready[:count], tokens, count)
        self._step += 1
        return SchedulerOutput(self._step - 1, tuple(entries), self._max_steps(entries))

    def plan_window(self, length: int) -> SchedulerOutput:
        """Plan one more window for the only sequence in flight, with the budget of its latest window.

        The window fills a step that would otherwise stay empty. A window gets no room that would preempt a sequence.

        Args:
            length: number of tokens, known or assumed, before the window and its first token.
        """
        [(id, windows)] = self._in_flight.items()
        latest, (_, left) = windows[-1], self._share()
        tokens = 1 + latest.budget.max_nodes
        fits = length + tokens < self.limits.max_len and tokens <= left and not self._failures
        if not fits or not self.pages.allocate(id, length + tokens):
            return SchedulerOutput(self._step, (), 1)
        self._step += 1
        return SchedulerOutput(self._step - 1, (ScheduledRequest(latest.sequence, 1, latest.budget),), 1)

    def _share(self) -> tuple[int, int]:
        """Return the sequences and tokens of one microbatch: equal parts of the limits."""
        limits = self.limits
        if limits.max_in_flight == 1:
            return limits.max_num_seqs, limits.max_num_batched_tokens
        free = limits.max_in_flight - self._steps_in_flight
        total = min(limits.max_num_seqs, len(self.running) + len(self.waiting))
        left = limits.max_num_batched_tokens - sum(
            [entry.num_tokens + entry.budget.max_nodes for windows in self._in_flight.values() for entry in windows]
        )
        count = min(_divided(total, limits.max_in_flight), _divided(total - len(self._in_flight), free))
        return count, _divided(left, free)

    def _plan_retry(self, ready: Sequence[RequestState], tokens: int) -> list[ScheduledRequest]:
        """Plan one sequence whose latest step failed, alone, so that the sequence cannot fail others."""
        failed = [sequence for sequence in ready if sequence.id in self._failures]
        if failed:
            return self._plan_batch(failed[:1], tokens, 1)
        return self._admit(tokens, 1, failed=True)

    def _plan_batch(self, ready: Sequence[RequestState], tokens: int, count: int) -> list[ScheduledRequest]:
        """Entries of ready sequences, then of waiting ones: at most ``count``, with at most so many ``tokens``."""
        entries: list[ScheduledRequest] = []
        left, preempted, full = tokens, self.preempted, False
        budgets = self._budgets(ready, tokens, count)
        for sequence in tuple(ready):
            budget = budgets.get(sequence.id, NO_DRAFT)
            if left > 0 and sequence.status is RequestStatus.RUNNING and not budget.skip_step:
                entry = self._fit(sequence, left, budget)
                if entry is None:
                    full = True
                else:
                    entries.append(entry)
                    left -= entry.num_tokens + entry.budget.max_nodes
        if preempted != self.preempted:  # entries of preempted sequences do not count, and no request is admitted
            entries, full = [each for each in entries if each.sequence.status is RequestStatus.RUNNING], True
        if self.waiting and not full:
            entries += self._admit(left, count - len(entries))
        return entries

    def _budgets(self, sequences: Sequence[RequestState], tokens: int, count: int) -> dict[str, DraftBudget]:
        """Draft budgets of the sequences that have one token left to compute, within what each may still write."""
        ready, uncomputed = [], 0
        for sequence in sequences:
            left = len(sequence.tokens) - sequence.computed
            if left > 1:
                uncomputed += left
            elif sequence.request.speculation.enabled:
                ready.append(sequence)
        if not ready:
            return {}
        places = min(count - len(sequences), self.limits.max_num_seqs - len(self.running))
        coming = sum(len(s.tokens) for s in self.waiting[:places])
        free_tokens = int(self.pages.capacity * (1.0 - self.pages.usage))
        load = BatchState(ready, min(uncomputed + coming, tokens), len(self.waiting), tokens, free_tokens)
        budgets = {}
        for sequence, budget in zip(ready, self.policy.plan(load), strict=True):
            asked = sequence.request.speculation.length
            if asked is not None:
                budget = _as_asked(budget, asked)
            room = _room(sequence, self.limits.max_len) - 1  # the sampled token uses the last slot
            depth = min(budget.depth, budget.max_nodes, room)
            if depth > 0:
                chain = budget.is_chain or sequence.request.speculation.acceptance_method in self.limits.chain_methods
                widths = () if chain else budget.widths[:depth]
                most = depth if chain else level_nodes(widths, depth) if widths else budget.max_nodes
                nodes = min(budget.max_nodes, most)
                if (depth, nodes, widths) != (budget.depth, budget.max_nodes, budget.widths):
                    budget = replace(budget, depth=depth, max_nodes=nodes, widths=widths)
                budgets[sequence.id] = budget
            elif budget.release or budget.skip_step:
                budgets[sequence.id] = budget
        # A step needs a sequence: where the policy leaves out all, the first one runs.
        if all(budgets.get(sequence.id, NO_DRAFT).skip_step for sequence in sequences):
            first = sequences[0].id
            budgets[first] = replace(budgets[first], skip_step=False)
        return budgets

    def _max_steps(self, entries: Sequence[ScheduledRequest]) -> int:
        """Steps that one native call may run: as many as all have room for, if no request waits."""
        steps = 1 if self.limits.max_in_flight > 1 else min(self.limits.max_steps, self.policy.horizon)
        if steps == 1 or self.waiting or len(entries) < len(self.running):
            return 1
        for entry in entries:
            if entry.num_tokens > 1 or entry.sequence.request.sampling.stop:
                return 1
            if entry.budget.depth and not self.limits.multi_step_drafts:
                return 1
        while steps > 1:
            lengths = [_after(entry, steps, self.limits.max_len) for entry in entries]
            if self.pages.can_allocate(lengths) and all([self.pages.allocate(*each) for each in lengths]):
                return steps
            steps //= 2
        return 1

    def _fit(self, sequence: RequestState, left: int, budget: DraftBudget) -> ScheduledRequest | None:
        """Return the sequence's share after reserving pages; None if the sequence is preempted or must wait."""
        tokens = min(len(sequence.tokens) - sequence.computed, left)
        end = sequence.computed + tokens
        if budget.max_nodes <= left - tokens and self.pages.allocate(sequence.id, end + budget.max_nodes):
            return ScheduledRequest(sequence, tokens, budget)
        while not self.pages.allocate(sequence.id, end):
            least = next(other for other in reversed(self.running) if other.id not in self._in_flight)
            if least is not sequence:
                self._preempt(least)
                continue
            if sequence is self.running[-1]:
                self._preempt(sequence)
            return None
        return ScheduledRequest(sequence, tokens, NO_DRAFT)

    def _preempt(self, sequence: RequestState) -> None:
        sequence.stats.preemptions += 1
        self.preempted += 1
        self._requeue(sequence)

    def _requeue(self, sequence: RequestState) -> None:
        """Move a running sequence to the waiting queue, and free its pages."""
        self.running.remove(sequence)
        self.pages.free(sequence.id)
        sequence.status, sequence.computed = RequestStatus.WAITING, 0
        insort(self.waiting, sequence, key=queue_key)

    def _prompt_is_coming(self, sequence: RequestState) -> bool:
        """Whether another output of the same request is computing the prompt, and no output has computed the prompt."""
        parent = sequence.request.parent
        running = [other for other in self.running if other.request.parent == parent != ""]
        return bool(running) and all(other.computed < other.prompt_len - 1 for other in running)

    def _admit(self, left: int, count: int, failed: bool = False) -> list[ScheduledRequest]:
        """Start waiting sequences in order while token budget, batch and cache have room for the known tokens.

        Args:
            failed: start sequences whose latest step failed, and no others.
        """
        entries: list[ScheduledRequest] = []
        while self.waiting and left > 0 and len(entries) < count and len(self.running) < self.limits.max_num_seqs:
            sequence = self.waiting[0]
            if self._prompt_is_coming(sequence) or (sequence.id in self._failures) is not failed:
                break
            wants_rows = sequence.request.sampling.prompt_logprobs is not None
            computed = self.pages.open_sequence(sequence.id, () if wants_rows else sequence.tokens)
            if not self.pages.allocate(sequence.id, len(sequence.tokens)):
                self.pages.free(sequence.id)
                break
            self.waiting.pop(0)
            insort(self.running, sequence, key=queue_key)
            sequence.status, sequence.computed = RequestStatus.RUNNING, computed
            cached = min(computed, sequence.prompt_len)
            sequence.stats.cached_prompt_tokens = max(sequence.stats.cached_prompt_tokens, cached)
            tokens = min(len(sequence.tokens) - computed, left)
            entries.append(ScheduledRequest(sequence, tokens, NO_DRAFT))
            left -= tokens
        return entries


def _as_asked(budget: DraftBudget, depth: int) -> DraftBudget:
    """The policy's budget at the depth that a request asks for: a chain of that length, a tree of the same shape.

    A sequence that the policy leaves out still waits. Only without a draft ``release`` is kept: drafts need the cache.
    """
    nodes, release = depth if budget.is_chain else max(budget.max_nodes, depth), budget.release and not depth
    return DraftBudget(depth, nodes, budget.widths, budget.drafters, release=release, skip_step=budget.skip_step)


def _divided(number: int, parts: int) -> int:
    """One part of a number, rounded up."""
    return -(-number // parts)


def _after(entry: ScheduledRequest, steps: int, max_len: int) -> tuple[str, int]:
    """Return the id and the most tokens of a sequence after so many steps."""
    sequence, more = entry.sequence, steps * (1 + entry.budget.max_nodes)
    return sequence.id, len(sequence.tokens) + min(more, _room(sequence, max_len))


def _room(sequence: RequestState, max_len: int) -> int:
    """Tokens that the sequence may still write."""
    most = sequence.request.sampling.max_tokens
    allowed = max_len - sequence.prompt_len if most is None else most
    return min(allowed - sequence.output_len, max_len - len(sequence.tokens))
