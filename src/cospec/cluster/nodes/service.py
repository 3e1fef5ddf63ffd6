"""A drafter as a node serves it: a state machine without sockets, from frames to frames."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from cospec.cluster.nodes.answer_checks import sparse_row
from cospec.cluster.nodes.request_copies import TokenCopies
from cospec.cluster.nodes.wire import (
    Answer,
    AskDrafts,
    AskScores,
    AskSteps,
    Call,
    DamagedFrame,
    FrameCodec,
    HelloRequest,
    NodeCommits,
    NodeDraft,
    NodeDrafts,
    NodeFree,
    NodeHello,
    NodeItem,
    NodeMessage,
    NodeScore,
    NodeScores,
    NodeStep,
    NodeSteps,
    Refused,
    ToNode,
    Welcome,
)
from cospec.core.interfaces import Clock
from cospec.core.plugin_base import Drafter, base_of
from cospec.core.types import Draft, DraftContext
from cospec.drafters.draft_subtrees import begun
from cospec.drafters.model import likeliest_of
from cospec.drafters.pool.candidates import distributions, top_candidates
from cospec.rng.random_streams import StreamKind
from cospec.runtime.codec import ProtocolError

MOST_PROBS = 256  # entries of a distribution for one token step; the verifier draws from these entries

log = logging.getLogger(__name__)


@dataclass(slots=True)
class NodeService:
    """Serves one drafter to one verifier. Repeated and late messages do nothing.

    Attributes:
        hello: what the node offers.
        welcome: the verifier accepted the offer.
        refused: why the verifier ignores the node; empty: the verifier does not.
        hello_at: the next time to send ``hello``.
    """

    drafter: Drafter
    hello: NodeHello
    clock: Clock
    welcome: bool = False
    refused: str = ""
    hello_at: float = 0.0
    _number: int = 0
    _copies: TokenCopies = field(default_factory=TokenCopies)
    _codec: FrameCodec = field(default_factory=lambda: FrameCodec(ToNode))

    def encode(self, message: NodeMessage) -> bytes:
        """The frame of a message of the node."""
        return self._codec.encode(message)

    def handle(self, frame: bytes, waiting: int = 0) -> bytes | None:
        """Act on a frame; returns the frame of the answer, if there is one.

        Args:
            waiting: frames that arrived after this frame.
        """
        try:
            message: ToNode = self._codec.decode(frame)
        except (DamagedFrame, ProtocolError) as error:
            log.warning("a message of the verifier is dropped: %s", error)
            return None
        match message:
            case Welcome():
                self.welcome, self.refused, self._number = True, "", 0
                self.forget_all()
            case Refused(reason, seconds):
                self.welcome, self.refused = False, reason
                self.hello_at = self.clock() + min(max(seconds, 1.0), 3600.0)
                log.error("the verifier refuses drafter %s: %s", self.hello.drafter, reason)
            case HelloRequest():
                self.welcome, self.hello_at = False, self.clock()
            case AskDrafts() | AskScores() | AskSteps() | NodeCommits() | NodeFree():
                return self._serve(message, waiting)
        return None

    def forget_all(self) -> None:
        """Free all requests of the verifier."""
        ids = self._copies.clear()
        if ids:
            self.drafter.free(ids)

    def _serve(self, message: Call | NodeCommits | NodeFree, waiting: int) -> bytes | None:
        if message.number <= self._number:
            return None
        self._number = message.number
        match message:
            case AskDrafts() if len(message.updates) != len(message.budgets):
                return self.encode(NodeDrafts(message.number, [], 0.0))
            case AskDrafts():
                return self._answer(message, waiting, NodeDrafts, lambda contexts: self._drafts(message, contexts))
            case AskScores():
                return self._answer(message, waiting, NodeScores, self._scores)
            case AskSteps(distributions=wanted):
                return self._answer(message, waiting, NodeSteps, lambda contexts: self._steps(contexts, wanted))
            case NodeCommits(_, commits):
                known = [commit for commit in commits if commit.id in self._copies]
                self._notify("commit", known, [commit.id for commit in known])
            case NodeFree(_, ids):
                self._copies.forget(ids)
                self._notify("free", ids, ids)
        return None

    def _answer(
        self,
        message: Call,
        waiting: int,
        kind: type[Answer],
        work: Callable[[list[DraftContext]], Sequence[NodeItem]],
    ) -> bytes:
        """Read the tokens, let the drafter work, and encode an answer of ``kind``."""
        started, contexts, resync = self.clock(), list[DraftContext](), list[str]()
        epochs: dict[str, int] = {}
        for update in message.updates:
            context, lost = self._copies.apply(update)
            if lost:
                resync.append(update.id)
                self._copies.forget([update.id])
            elif context is not None:
                contexts.append(context)
                epochs[context.id] = update.epoch
        replaced, self._copies.replaced = self._copies.replaced, []
        found, error = list[NodeItem](), ""
        try:
            if replaced or resync:
                self.drafter.free([*replaced, *resync])
            if contexts:
                found = [msgspec.structs.replace(part, epoch=epochs[part.id]) for part in work(contexts)]
        except Exception as raised:  # the drafter's state is undefined now
            log.exception("drafting failed for %d requests", len(contexts))
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())}"[:500]
            self.forget_all()
            resync = [update.id for update in message.updates]
        seconds = self.clock() - started
        try:
            return self.encode(kind(message.number, resync, seconds, waiting, error, found))  # type: ignore[arg-type]
        except ProtocolError as too_large:
            return self.encode(kind(message.number, [], seconds, waiting, str(too_large)))

    def _drafts(self, message: AskDrafts, contexts: Sequence[DraftContext]) -> list[NodeDraft]:
        budgets = {update.id: budget for update, budget in zip(message.updates, message.budgets, strict=True)}
        asked = {context.id: context for context in contexts if budgets[context.id].depth > 0}
        if not asked:
            return []
        if self.drafter.drafts_for_outcomes:
            drafts = self.drafter.propose(list(asked.values()), [budgets[id] for id in asked])
        else:
            found = self.drafter.propose(list(asked.values()), [replace(budgets[id], outcomes=False) for id in asked])
            given = {id: context.tokens[base_of(context, budgets[id]) :] for id, context in asked.items()}
            drafts = [begun(draft, given[draft.id]) if given[draft.id] else draft for draft in found]
        return [encode_draft(draft, asked[draft.id]) for draft in drafts if draft.tokens]

    def _scores(self, contexts: Sequence[DraftContext]) -> list[NodeScore]:
        known = {context.id: len(context.tokens) for context in contexts}
        scores = self.drafter.score_known_tokens(contexts)
        return [NodeScore(id, 0, known[id], *found) for id, found in scores.items()]

    def _steps(self, contexts: Sequence[DraftContext], wanted: bool) -> list[NodeStep]:
        """One candidate per context, as a pool reads a local drafter; assumed tokens are the path of the draft."""
        opening, by_id = self.drafter.next_logits(contexts), {context.id: context for context in contexts}
        taking = [by_id[id] for id in opening.ids]
        paths = [context.tokens[context.committed_len :] for context in taking]
        starts = [replace(each, tokens=each.tokens[: each.committed_len], assumed=0) for each in taking]
        found = list[NodeStep]()
        read = distributions if wanted else top_candidates
        for context, candidate in zip(taking, read(opening.logits, starts, paths), strict=True):
            if candidate is not None:
                q = None if candidate.q is None else sparse_row(likeliest_of(candidate.q[None], MOST_PROBS)[0])
                rest = candidate.token, candidate.confidence, candidate.second, q
                found.append(NodeStep(context.id, 0, len(context.tokens), *rest))
        return found

    def _notify(self, method: str, argument: Sequence[object], ids: Sequence[str]) -> None:
        """Call ``commit`` or ``free``; a drafter that raises forgets the requests."""
        if not argument:
            return
        try:
            getattr(self.drafter, method)(argument)
        except Exception:
            log.exception("the drafter forgets %d requests", len(ids))
            self._copies.forget(ids)
            self.drafter.free(ids)


def encode_draft(draft: Draft, context: DraftContext) -> NodeDraft:
    """A draft as it travels, without its epoch; q only where the acceptance method reads q."""
    confidence = None if draft.confidence is None else tuple(min(max(float(c), 0.0), 1.0) for c in draft.confidence)
    reads_q = context.stream_kind is StreamKind.DRAFT and not context.sampling.greedy
    q = tuple(sparse_row(row) for row in np.asarray(draft.q)) if reads_q and draft.q is not None else None
    return NodeDraft(draft.id, 0, len(context.tokens), draft.tokens, draft.parents, confidence, q)
