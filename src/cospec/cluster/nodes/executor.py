"""The executor of a drafter on nodes: any number of nodes serve one drafter of the configuration.

A request stays with the node that has its tokens, unless another node has much less to do. Without a node there are no
drafts, and requests go on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from cospec.cluster.nodes.hub import NodeHub, OfferedSlot
from cospec.cluster.nodes.node_calls import PendingCall
from cospec.cluster.nodes.node_session import NodeSession
from cospec.cluster.nodes.wire import NodeHello
from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.plugin_base import Drafter
from cospec.core.submitted_step import FinishedFuture, Future
from cospec.core.types import Commit, DraftBudget, DraftContext
from cospec.errors import DrafterLost, InvalidInput, words
from cospec.registry import DRAFTERS
from cospec.rng.random_streams import StreamKind
from cospec.runtime.codec import ProtocolError
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.runtime.executor_base import DrafterExecutor, DrafterRecipe
from cospec.runtime.messages import DrafterInfo

if TYPE_CHECKING:
    from cospec.cluster.nodes.hub_options import NodesOptions

MOVE_GAIN = 2.0  # a request moves to another node where the load is smaller by this factor
WAIT_SLICE = 0.5  # seconds of one wait at the socket

Part = tuple[NodeSession, PendingCall]
Ask = Callable[[NodeSession, list[int]], tuple[PendingCall, bytes]]
"""Asks a node about the contexts with these numbers."""


class NodeFuture:
    """The answer to one call, from one or several nodes.

    Args:
        optional: a call that no node answers has an empty result.
    """

    def __init__(self, hub: NodeHub, parts: Sequence[Part], optional: bool = False) -> None:
        self._hub, self._parts, self._optional = hub, parts, optional

    def done(self) -> bool:
        """Whether ``result`` returns without waiting: all answers came, or it is too late for the others."""
        with self._hub.lock:
            if not self._over():
                self._hub.attend(0.0)
            return self._over()

    def result(self, timeout: float | None = None) -> Any:
        """What arrived by the deadlines of the nodes, by request.

        Raises:
            TimeoutError: ``timeout`` seconds have passed before the deadlines.
            DrafterLost: no node answers.
        """
        clock = self._hub.clock
        end = None if timeout is None else clock() + timeout
        while not self.done():
            # the hub's thread may settle the last call in the meantime
            due = max([call.due for _, call in self._parts if not call.settled], default=0.0)
            left = due - clock()
            if end is not None:
                if clock() >= end:
                    raise TimeoutError
                left = min(left, end - clock())
            self._hub.attend(min(max(left, 0.0), WAIT_SLICE))
        if all(call.lost for _, call in self._parts) and not self._optional:
            raise DrafterLost("No drafter node answers.")
        return self._gather()

    def _gather(self) -> Any:
        return {id: part for _, call in self._parts for id, part in (call.found or {}).items()}

    def _over(self) -> bool:
        return all([call.settled or link.overdue(call) for link, call in self._parts])


class NodeDraftsFuture(NodeFuture):
    """The drafts of one proposal."""

    def _gather(self) -> Any:
        return [draft for _, call in self._parts for draft in (call.found or {}).values()]


class NodeExecutor(DrafterExecutor):
    """Makes the calls of one drafter at nodes. Used by one thread, as an engine is.

    Attributes:
        weights: empty; a drafter on a node is no pool.
    """

    name: ClassVar[str] = "node"
    builds_inline: ClassVar[bool] = False
    takes_cores: ClassVar[bool] = False
    same_machine: ClassVar[bool] = False
    parallel = True

    def __init__(self, hub: NodeHub, slot: OfferedSlot, info: DrafterInfo) -> None:
        self.weights = dict[str, float]()
        self._info, self._hub, self._slot, self._closed = info, hub, slot, False
        self._homes: dict[str, NodeSession] = {}  # the node that has the tokens of a request
        self.busy = 0.0

    @classmethod
    def place(cls, recipe: DrafterRecipe) -> Drafter:
        """Let nodes offer the drafter.

        Raises:
            InvalidInput: the drafter cannot be on a node.
        """
        hub = recipe.nodes
        if hub is None:
            raise InvalidInput("executor", "node", "another executor in a drafter's own process")
        info = node_info(recipe, hub.options)
        return DrafterProxy(cls(hub, hub.add(recipe.name, recipe.method, info.samples), info))

    @property
    def info(self) -> DrafterInfo:
        """The declared attributes of the drafter's class. Whether the drafter scores depends on the present nodes."""
        with self._hub.lock:
            scores = any([link.usable and link.hello.scores for link in self._slot.links.values()])
        return msgspec.structs.replace(self._info, scores_known_tokens=scores)

    @property
    def present(self) -> bool:
        """Whether a node can be asked now."""
        with self._hub.lock:
            return not self._closed and any([link.usable for link in self._slot.links.values()])

    @property
    def load(self) -> float:
        """Proposals that wait for an answer of the least loaded node; 0 without a node."""
        with self._hub.lock:
            return float(min([link.unanswered for link in self._slot.links.values() if link.usable], default=0))

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Send a call; ``commit`` and ``free`` count as done when they are sent.

        ``candidates`` asks for one token after each context, see ``NodeSession.ask_steps``.
        """
        with self._hub.lock:
            return self._submit(method, *args)

    def _submit(self, method: str, *args: Any) -> Future[Any]:
        self.busy = self._slot.busy
        match method:
            case "propose":
                return self._propose(*args)
            case "score_known_tokens":
                return self._score_known_tokens(*args)
            case "candidates":
                return self._candidates(*args)
            case "commit":
                self._commit(*args)
            case "free":
                self._free(*args)
            case _:
                raise ValueError(f"a drafter on a node has no method {method}")
        return FinishedFuture(None)

    def close(self) -> None:
        """Nodes may not offer the drafter any more."""
        self._closed = True
        self._hub.remove(self._slot)

    def _propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> NodeFuture:
        return NodeDraftsFuture(self._hub, self._ask(contexts, _proposal(contexts, budgets), lambda hello: True))

    def _score_known_tokens(self, contexts: Sequence[DraftContext]) -> NodeFuture:
        def ask(link: NodeSession, rows: list[int]) -> tuple[PendingCall, bytes]:
            return link.ask_scores([contexts[row] for row in rows])

        return NodeFuture(self._hub, self._ask(contexts, ask, lambda hello: hello.scores), optional=True)

    def _candidates(self, contexts: Sequence[DraftContext], distributions: bool) -> NodeFuture:
        def ask(link: NodeSession, rows: list[int]) -> tuple[PendingCall, bytes]:
            return link.ask_steps([contexts[row] for row in rows], distributions)

        return NodeFuture(self._hub, self._ask(contexts, ask, lambda hello: hello.steps))

    def _ask(self, contexts: Sequence[DraftContext], ask: Ask, able: Callable[[NodeHello], bool]) -> list[Part]:
        """Send one node call to each node that has some of the requests."""
        self._hub.attend(0.0)
        shares: dict[bytes, list[int]] = {}
        usable = {
            identity: link
            for identity, link in list(self._slot.links.items())
            if link.usable and able(link.hello) and not self._closed
        }
        loads = {identity: link.load for identity, link in usable.items()}
        for row, context in enumerate(contexts if usable else ()):
            identity = self._choose(context.id, usable, loads)
            loads[identity] += usable[identity].times.predict(1.0)
            shares.setdefault(identity, []).append(row)
        return self._send(usable, shares, ask)

    def _send(self, links: Mapping[bytes, NodeSession], shares: Mapping[bytes, list[int]], ask: Ask) -> list[Part]:
        parts: list[Part] = []
        for identity, rows in shares.items():
            link = links[identity]
            try:
                call, frame = ask(link, rows)
            except ProtocolError:  # more tokens than a frame may hold
                continue
            if not self._hub.send(identity, frame) and not call.lost:
                link.unsent()
            parts.append((link, call))
        return parts

    def _choose(self, id: str, usable: Mapping[bytes, NodeSession], loads: Mapping[bytes, float]) -> bytes:
        """The node for a request: the node that has its tokens, or the node with the least predicted time."""
        best = min(usable, key=lambda identity: loads[identity] + usable[identity].times.predict(1.0))
        home = self._homes.get(id)
        for identity, link in usable.items():
            if link is home:
                slow = loads[identity] + link.times.predict(1.0)
                if slow <= MOVE_GAIN * (loads[best] + usable[best].times.predict(1.0)):
                    return identity
        self._homes[id] = usable[best]
        return best

    def _commit(self, commits: Sequence[Commit]) -> None:
        for identity, link in list(self._slot.links.items()):
            frame = None if link.quarantine else link.commit(commits)
            if frame is not None:
                self._hub.send(identity, frame)

    def _free(self, ids: Sequence[str]) -> None:
        for id in ids:
            self._homes.pop(id, None)
        for identity, link in list(self._slot.links.items()):
            frame = link.free(ids)
            if frame is not None:
                self._hub.send(identity, frame)


def _proposal(contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> Ask:
    """Asks for drafts."""
    return lambda link, rows: link.ask([contexts[row] for row in rows], [budgets[row] for row in rows])


def node_info(recipe: DrafterRecipe, options: NodesOptions) -> DrafterInfo:
    """What a drafter on nodes declares before any node is there.

    Raises:
        InvalidInput: nodes cannot run the drafter, or keys are given that a node's command line sets.
    """
    cls = DRAFTERS.load(recipe.method)
    if cls.reads_hidden_states or cls.is_pool:
        why = "reads hidden states of the target" if cls.reads_hidden_states else "is a pool"
        raise InvalidInput("executor", words(f"'node' for {recipe.method!r}, which {why}"), "another executor")
    own = [key for key in recipe.options if key in cls.Options.model_fields and recipe.options[key] is not None]
    if own:
        raise InvalidInput(
            own[0], recipe.options[own[0]], "absent with executor 'node': cospec node join sets the option"
        )
    capabilities = replace(cls.capabilities, costless=False) if cls.capabilities else DrafterCapabilities()
    streams = cls.stream_kinds
    if cls.samples and not options.trusted:
        streams = frozenset({StreamKind.TARGET})
    declared = recipe.name, cls.samples, cls.drafts_ahead, False, cls.learns, capabilities, streams
    return DrafterInfo(
        *declared,
        member_names=None,
        weights={},
        is_stepwise=cls.is_stepwise,
        drafts_for_outcomes=cls.drafts_for_outcomes,
        trusted=options.trusted,
    )
