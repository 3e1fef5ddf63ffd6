"""A drafter as a node serves it: a state machine without sockets, from frames to frames."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from cospec.cluster.nodes.checks import sparse_rows
from cospec.cluster.nodes.request_copies import TokenCopies
from cospec.cluster.nodes.wire import (
    AskDrafts,
    DamagedFrame,
    FrameCodec,
    HelloAgain,
    NodeCommits,
    NodeDraft,
    NodeDrafts,
    NodeFree,
    NodeHello,
    NodeMessage,
    Refused,
    ToNode,
    Welcome,
)
from cospec.core.interfaces import Clock
from cospec.core.plugin_base import Drafter
from cospec.core.rng import StreamKind
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.runtime.codec import ProtocolError

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
                self._forget_all()
            case Refused(reason, seconds):
                self.welcome, self.refused = False, reason
                self.hello_at = self.clock() + min(max(seconds, 1.0), 3600.0)
                log.error("the verifier refuses drafter %s: %s", self.hello.drafter, reason)
            case HelloAgain():
                self.welcome, self.hello_at = False, self.clock()
            case AskDrafts() | NodeCommits() | NodeFree():
                return self._serve(message, waiting)
        return None

    def _serve(self, message: AskDrafts | NodeCommits | NodeFree, waiting: int) -> bytes | None:
        if message.number <= self._number:
            return None
        self._number = message.number
        match message:
            case AskDrafts(number, updates, budgets):
                answer = (
                    self._propose(message, waiting) if len(updates) == len(budgets) else NodeDrafts(number, [], [], 0)
                )
                try:
                    return self.encode(answer)
                except ProtocolError as error:  # larger than a frame
                    return self.encode(NodeDrafts(number, [], [], answer.seconds, waiting, str(error)))
            case NodeCommits(_, commits):
                known = [commit for commit in commits if commit.id in self._copies]
                self._notify("commit", known, [commit.id for commit in known])
            case NodeFree(_, ids):
                self._copies.forget(ids)
                self._notify("free", ids, ids)
        return None

    def _propose(self, message: AskDrafts, waiting: int) -> NodeDrafts:
        started, contexts, budgets = self.clock(), list[DraftContext](), list[DraftBudget]()
        resync, epochs = list[str](), dict[str, int]()
        for update, budget in zip(message.updates, message.budgets, strict=True):
            context, lost = self._copies.apply(update)
            if lost:
                resync.append(update.id)
                self._copies.forget([update.id])
            elif context is not None and budget.depth > 0:
                contexts.append(context)
                budgets.append(budget)
                epochs[context.id] = update.epoch
        replaced, self._copies.replaced = self._copies.replaced, []
        drafts, error = list[Draft](), ""
        try:
            if replaced or resync:
                self.drafter.free([*replaced, *resync])
            if contexts:
                drafts = self.drafter.propose(contexts, budgets)
        except Exception as raised:  # the drafter's state is undefined now
            log.exception("drafting failed for %d requests", len(contexts))
            error = f"{type(raised).__name__}: {' '.join(str(raised).split())}"[:500]
            self._forget_all()
            resync = [update.id for update in message.updates]
        asked = {context.id: context for context in contexts}
        found = [encode_draft(draft, epochs[draft.id], asked[draft.id]) for draft in drafts if draft.tokens]
        return NodeDrafts(message.number, found, resync, self.clock() - started, waiting, error)

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

    def _forget_all(self) -> None:
        ids = self._copies.clear()
        if ids:
            self.drafter.free(ids)


def encode_draft(draft: Draft, epoch: int, context: DraftContext) -> NodeDraft:
    """A draft as it travels; q only where the acceptance method reads q."""
    confidence = None if draft.confidence is None else tuple(min(max(float(c), 0.0), 1.0) for c in draft.confidence)
    reads_q = context.stream_kind is StreamKind.DRAFT and not context.sampling.greedy
    q = sparse_rows(draft.q) if reads_q and draft.q is not None else None
    return NodeDraft(draft.id, epoch, draft.base_len, draft.tokens, draft.parents, confidence, q)
