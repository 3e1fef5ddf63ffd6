"""One drafter node as the verifier knows it: a state machine without sockets.

Drafts are a cache. A lost, late, repeated, damaged or wrong message costs drafts and nothing else. A node that breaks
the protocol is quarantined: the verifier neither asks the node nor reads its messages for some time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from cospec.cluster.nodes.answer_checks import AskedDraft, check_draft, check_score, check_step
from cospec.cluster.nodes.deadline import ResponseTimes, work_of
from cospec.cluster.nodes.node_calls import NodeCounts, PendingCall
from cospec.cluster.nodes.request_copies import TokenSender
from cospec.cluster.nodes.wire import (
    LONGEST_REASON,
    Answer,
    AskDrafts,
    AskScores,
    AskSteps,
    Call,
    DamagedFrame,
    FrameCodec,
    NodeCommits,
    NodeDrafts,
    NodeFree,
    NodeHello,
    NodeScores,
    NodeSteps,
    TokensUpdate,
    ToVerifier,
)
from cospec.core.interfaces import Clock
from cospec.core.types import Commit, DraftBudget, DraftContext
from cospec.drafters.draft_kv_cache import LOOKBACK
from cospec.runtime.codec import ProtocolError

MOST_DAMAGED = 8  # damaged frames before quarantine
MOST_OPEN = 32  # calls without an answer, after which a node is asked no more
MISSES = 3  # late answers in a row after which a node is asked no more, until the node answers a probe
PROBE_SECONDS = 1.0  # from the last of these late answers to the first probe, doubled each time
LONGEST_PAUSE = 60.0  # of the pauses before a probe
RECOVERY = 0.9  # factor of the next pause for each answer in time

log = logging.getLogger(__name__)


@dataclass(slots=True)
class NodeSession:
    """The verifier's side of one node.

    Attributes:
        hello: what the node offers.
        samples: the drafter draws its tokens.
        quarantine: why the node is ignored; empty: the node is in use.
        waiting: messages that waited at the node when the node last spoke.
        last_message: time of the latest message of the node.
        busy: seconds of the node's drafter so far.
        misses: late answers in a row.
        pause: seconds from the latest late answers to the first probe; 0: the node answered in time since.
    """

    hello: NodeHello
    vocab_size: int
    samples: bool
    clock: Clock
    times: ResponseTimes = field(default_factory=ResponseTimes)
    counts: NodeCounts = field(default_factory=NodeCounts)
    quarantine: str = ""
    gone: bool = False
    waiting: int = 0
    last_message: float = 0.0
    busy: float = 0.0
    misses: int = 0
    pause: float = 0.0
    _probe_at: float = 0.0
    _open: dict[int, PendingCall] = field(default_factory=dict)
    _number: int = 0
    _sender: TokenSender = field(default_factory=TokenSender)
    _codec: FrameCodec = field(default_factory=lambda: FrameCodec(ToVerifier))

    @property
    def usable(self) -> bool:
        """Whether the node can be asked now."""
        if self.gone or self.quarantine or self.misses >= MISSES:
            return False
        return self.unanswered < MOST_OPEN and self.load < self.times.most

    @property
    def load(self) -> float:
        """Predicted seconds of the calls without an answer."""
        return sum([self.times.predict(call.work) for call in self._open.values()])

    @property
    def unanswered(self) -> int:
        """Calls that wait for an answer, without those whose answers must have been lost."""
        return len(self._open) - len(self._expired())

    def knows(self, id: str) -> bool:
        """Whether the node has a copy of the request's tokens."""
        return id in self._sender

    def ask(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> tuple[PendingCall, bytes]:
        """The frame that asks for drafts, and where the answer will be.

        Raises:
            ProtocolError: the tokens do not fit into a frame.
        """
        pairs = zip(contexts, budgets, strict=True)
        asked = {context.id: AskedDraft.of(context, budget, self.samples) for context, budget in pairs}
        call, frame = self._ask(
            contexts,
            lambda number, updates: AskDrafts(number, updates, list(budgets)),
            work_of(budgets, 0),
            (NodeDrafts, lambda part: check_draft(part, asked[part.id], self.vocab_size, self.hello.drafter)),
        )
        if any(each.wants_q for each in asked.values()):  # time must not select among tokens that were drawn
            call.due = call.sent + self.times.most
        return call, frame

    def ask_scores(self, contexts: Sequence[DraftContext]) -> tuple[PendingCall, bytes]:
        """The same for the probability of the latest known tokens."""
        work = work_of((), LOOKBACK * len(contexts))
        call, frame = self._ask(contexts, AskScores, work, (NodeScores, check_score))
        call.due = inf  # no step waits for scores
        return call, frame

    def ask_steps(self, contexts: Sequence[DraftContext], distributions: bool) -> tuple[PendingCall, bytes]:
        """The same for one token after each request.

        The deadline may decide also where ``distributions`` are asked for: the verifier draws after the deadline.
        """
        wants_q = {context.id: distributions and not context.sampling.greedy for context in contexts}
        return self._ask(
            contexts,
            lambda number, updates: AskSteps(number, updates, distributions),
            work_of([DraftBudget(1, 1)], 0),
            (NodeSteps, lambda part: check_step(part, wants_q[part.id], self.vocab_size)),
        )

    def probe(self) -> bytes | None:
        """The frame of a call without requests, for a node that was late; None where no probe is due.

        No step waits for a probe. A node that answers is asked again, and stops being asked with the next late answer.
        """
        if self.misses < MISSES or self.unanswered or self.clock() < self._probe_at:
            return None
        call, frame = self._ask((), lambda number, _: AskDrafts(number, [], []), 0.0, (NodeDrafts, lambda _: None))
        call.late, self._probe_at = True, self.clock() + PROBE_SECONDS
        return frame

    def resume(self, pause: float) -> None:
        """Ask a node that was late in an earlier session only after a probe; ``pause`` is that of the session."""
        self.misses, self.pause, self._probe_at = MISSES, pause, self.clock() + pause

    def _ask(
        self,
        contexts: Sequence[DraftContext],
        message: Callable[[int, list[TokensUpdate]], Call],
        work: float,
        answer: tuple[type[Answer], Callable[[Any], Any]],
    ) -> tuple[PendingCall, bytes]:
        for number in self._expired():
            self.times.miss()
            self._give_up(number)
        updates = [self._sender.update(context) for context in contexts]
        self._number += 1
        frame = self._codec.encode(message(self._number, updates))
        now = self.clock()
        work += work_of((), sum([len(update.tokens) for update in updates])) - work_of((), 0)
        wait = min(self.times.deadline(work) + self.load, self.times.most)
        call = PendingCall(now, now + wait, work, {update.id: update for update in updates}, *answer)
        self._open[self._number] = call
        return call, frame

    def commit(self, commits: Iterable[Commit]) -> bytes | None:
        """The frame that reports commits of requests that the node knows; None without such requests."""
        known = [commit._replace(hidden_state=None) for commit in commits if commit.id in self._sender]
        if not known:
            return None
        return self._notice(lambda number: NodeCommits(number, known))

    def free(self, ids: Sequence[str]) -> bytes | None:
        """The frame that has the node forget requests; None where the node knows none of these requests."""
        known = self._sender.forget(ids)
        if not known:
            return None
        return self._notice(lambda number: NodeFree(number, known))

    def _notice(self, message: Callable[[int], NodeCommits | NodeFree]) -> bytes | None:
        """The frame of a message without an answer; None for a message that is too large, as if it were lost."""
        self._number += 1
        try:
            return self._codec.encode(message(self._number))
        except ProtocolError as error:
            log.warning("a message to node %s is dropped: %s", self.hello.node, error)
            return None

    def unsent(self) -> None:
        """The latest call did not leave: the node does not read, or is gone."""
        _, call = self._open.popitem()
        call.lost = True
        self.counts.lost += 1
        self._sender.forget(list(call.asked))

    def overdue(self, call: PendingCall) -> bool:
        """Whether the verifier goes on without the answer; counts each late call once."""
        if call.settled or self.clock() < call.due:
            return False
        if not call.late:
            call.late = True
            self.counts.late += 1
            self.misses += 1
            if self.misses == MISSES:
                log.warning("node %s is late %d times in a row", self.hello.node, MISSES)
                self.pause = min(max(2 * self.pause, PROBE_SECONDS), LONGEST_PAUSE)
                self._probe_at = self.clock() + self.pause
        return True

    def decode(self, frame: bytes) -> ToVerifier | None:
        """The message of a frame; None for a frame that is dropped. Quarantines a node that breaks the protocol."""
        if self.quarantine:
            return None
        try:
            message: ToVerifier = self._codec.decode(frame)
        except DamagedFrame as error:
            self.counts.damaged += 1
            if self.counts.damaged > MOST_DAMAGED:
                self.exclude(str(error))
            return None
        except ProtocolError as error:
            self.exclude(str(error))
            return None
        self.last_message = self.clock()
        return message

    def answer(self, message: Answer) -> float:
        """Take an answer; returns its seconds. An answer that breaks the protocol is dropped."""
        self.waiting = message.waiting
        if not 0 < message.number <= self._number or not 0 <= message.seconds < 1e6:
            self.exclude("The node answers a call that was never made.")
            return 0.0
        call = self._open.pop(message.number, None)
        if call is None:
            self.counts.ignored += 1
            return 0.0
        for number in [number for number in self._open if number < message.number]:
            self._give_up(number)  # answers come in the order of the calls
        self._learn(call)
        self.busy += message.seconds
        try:
            found = self._read(message, call)
        except Exception as error:  # whatever a check raises, the answer is wrong
            call.lost = True
            self.exclude(str(error))
            return 0.0
        if message.error:
            self.counts.errors += 1
            log.warning("the drafter of node %s failed: %.200r", self.hello.node, message.error)
            call.lost = True
        else:
            match message:
                case NodeDrafts():
                    self.counts.drafts += len(found)
                case NodeScores():
                    self.counts.scores += len(found)
                case NodeSteps():
                    self.counts.steps += len(found)
            call.found = found
        return message.seconds

    def exclude(self, reason: str) -> None:
        """Quarantine the node: the node broke the protocol."""
        self.quarantine = reason[:LONGEST_REASON] or "An answer cannot be read."
        log.warning("node %s is quarantined: %s", self.hello.node, self.quarantine)
        self.lose()

    def lose(self) -> None:
        """Nothing that the node was asked will be answered."""
        for call in self._open.values():
            call.lost = True
            self.counts.lost += 1
        self._open.clear()
        self._sender.clear()

    def _learn(self, call: PendingCall) -> None:
        """Learn from the time of an answer. Scores, which no step waits for, do not show that a node is in time.

        After ``MISSES`` late answers an answer to a probe alone allows the next call.
        """
        if not call.work:  # a probe
            self.misses = min(self.misses, MISSES - 1)
            return
        self.times.observe(call.work, self.clock() - call.sent)
        if not call.late and call.due < inf:
            self.misses, self.pause = 0, self.pause * RECOVERY
            if self.pause < PROBE_SECONDS:
                self.pause = 0.0

    def _expired(self) -> list[int]:
        """Calls whose answers must have been lost."""
        oldest = self.clock() - self.times.most
        return [number for number, call in self._open.items() if call.sent < oldest]

    def _give_up(self, number: int) -> None:
        self._open.pop(number).lost = True
        self.counts.lost += 1

    def _read(self, message: Answer, call: PendingCall) -> dict[str, Any]:
        """The valid parts of an answer, by request."""
        if type(message) is not call.kind:
            raise ProtocolError("The node answers another call than was made.")
        resync = self._sender.forget([id for id in message.resync if id in call.asked])
        self.counts.resyncs += len(resync)
        found: dict[str, Any] = {}
        for part in message.found:
            asked = call.asked.get(part.id)
            if asked is None or part.id in found:
                raise ProtocolError("An answer has a part that was not asked for.")
            if part.epoch != asked.epoch or part.base != asked.known:
                raise ProtocolError("An answer is about other tokens than asked.")
            found[part.id] = call.check(part)
        return found
