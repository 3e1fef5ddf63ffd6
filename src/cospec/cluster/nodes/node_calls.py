"""Calls of the verifier to one node, and what became of them. One call of a drafter makes a node call per node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cospec.cluster.nodes.wire import Answer, TokensUpdate


@dataclass(slots=True)
class NodeCounts:
    """What happened to the answers of a node.

    Attributes:
        drafts: drafts that arrived.
        scores: scores of known tokens that arrived, of one request each.
        steps: candidates of token steps that arrived.
        late: calls whose answer came after the deadline, or not at all.
        lost: calls that ended without an answer: the node left, was restarted or was quarantined.
        ignored: answers to no open call: repeated or late.
        damaged: frames with a wrong checksum, and messages that cause an exception.
        resyncs: new epochs that the node asked for.
        errors: answers with an error of the drafter.
        ended: connections that ended: the node left, died, fell silent or was excluded.
    """

    drafts: int = 0
    scores: int = 0
    steps: int = 0
    late: int = 0
    lost: int = 0
    ignored: int = 0
    damaged: int = 0
    resyncs: int = 0
    errors: int = 0
    ended: int = 0


@dataclass(slots=True)
class PendingCall:
    """A call to a node, about several requests.

    Attributes:
        due: the time after which the verifier goes on without the answer.
        asked: the tokens of each request, as the call has them.
        kind: the type of the answer.
        check: makes a draft, scores or a candidate of a part of the answer; raises ``ProtocolError``.
        found: the checked answer by request; None: no answer yet.
        lost: no answer will come, or the drafter raised.
    """

    sent: float
    due: float
    work: float
    asked: dict[str, TokensUpdate]
    kind: type[Answer]
    check: Callable[[Any], Any]
    found: dict[str, Any] | None = None
    lost: bool = False
    late: bool = False

    @property
    def settled(self) -> bool:
        """Whether nothing more can come."""
        return self.lost or self.found is not None
