"""Both ends of the protocol of drafter nodes, and a network between them that a test controls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from cospec.cluster.nodes.node_calls import PendingCall
from cospec.cluster.nodes.node_session import NodeSession
from cospec.cluster.nodes.service import NodeService
from cospec.cluster.nodes.wire import FrameCodec, NodeAnswer, NodeHello, ToVerifier, Welcome
from cospec.core.plugin_base import Drafter
from cospec.core.submitted_step import FinishedFuture
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.rng.random_streams import StreamKind
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.runtime.messages import DrafterInfo
from cospec.sampling_params import SamplingParams

VOCAB = 97
GREEDY = SamplingParams(temperature=0)


class Echo(Drafter):
    """Drafts tokens that depend on all known tokens, so that a draft shows which tokens its drafter read."""

    name, samples, drafts_ahead, reads_hidden_states, learns = "echo", False, True, False, False

    def __init__(self) -> None:
        self.freed: list[str] = []
        self.committed: list[Commit] = []

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        return [self._draft(context, budget.depth) for context, budget in zip(contexts, budgets, strict=True)]

    def commit(self, commits: Sequence[Commit]) -> None:
        self.committed += commits

    def free(self, ids: Sequence[str]) -> None:
        self.freed += ids

    def _draft(self, context: DraftContext, depth: int) -> Draft:
        tokens = echo(context.tokens, depth)
        return Draft(context.id, len(context.tokens), tokens, tuple(range(-1, depth - 1)), (self.name,) * depth)


def echo(tokens: Sequence[int], depth: int) -> tuple[int, ...]:
    """What ``Echo`` drafts after ``tokens``."""
    return tuple((hash(tuple(tokens)) + step) % VOCAB for step in range(depth))


def context(id: str, tokens: Sequence[int], assumed: int = 0, sampling: SamplingParams = GREEDY) -> DraftContext:
    """A context whose prompt is its first token."""
    return DraftContext(id, list(tokens), 1, sampling, 7, StreamKind.TARGET, assumed)


def drafts_of(call: PendingCall) -> list[Draft]:
    """The drafts that arrived."""
    return list((call.found or {}).values())


@dataclass
class Network:
    """A verifier's link to one node, and the frames on their way in both directions, oldest first."""

    drafter: Drafter = field(default_factory=Echo)
    vocab_size: int = VOCAB
    samples: bool = False
    now: float = 0.0
    to_node: list[bytes] = field(default_factory=list)
    to_verifier: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.hello = NodeHello("n", "echo", "echo", self.vocab_size)
        self.join()

    def join(self) -> None:
        """A new connection, as after a restart of the node: frames on their way are lost."""
        self.to_node.clear()
        self.to_verifier.clear()
        self.link = NodeSession(self.hello, self.vocab_size, self.samples, lambda: self.now)
        self.service = NodeService(self.drafter, self.hello, lambda: self.now)
        self.service.handle(FrameCodec(ToVerifier).encode(Welcome()))
        assert self.service.welcome

    def ask(self, contexts: Sequence[DraftContext], depth: int = 3) -> PendingCall:
        """Ask for chains; the frame waits in ``to_node``."""
        call, frame = self.link.ask(contexts, [DraftBudget(depth, depth)] * len(contexts))
        self.to_node.append(frame)
        return call

    def reach_node(self, place: int = 0) -> None:
        """Deliver a frame to the node."""
        answer = self.service.handle(self.to_node.pop(place))
        if answer is not None:
            self.to_verifier.append(answer)

    def reach_verifier(self, place: int = 0) -> None:
        """Deliver a frame to the verifier."""
        message = self.link.decode(self.to_verifier.pop(place))
        if isinstance(message, NodeAnswer):
            self.link.answer(message)

    def settle(self) -> None:
        """Deliver all frames in order."""
        while self.to_node:
            self.reach_node()
        while self.to_verifier:
            self.reach_verifier()


Fault = Callable[[DraftContext, Network], None]


def settle(context: DraftContext, network: Network) -> None:
    """No fault."""
    network.settle()


class NetworkExecutor:
    """Makes the calls of a drafter at the other end of the protocol.

    Args:
        fault: carries the messages of each call; gets the first context of the call.
    """

    parallel, busy, load, present = True, 0.0, 0.0, True

    def __init__(self, drafter: Drafter, vocab_size: int, fault: Fault = settle) -> None:
        self.network, self._fault = Network(drafter, vocab_size, samples=True), fault
        costly, scores = replace(drafter.capabilities, costless=False), drafter.scores_known_tokens
        self.info = DrafterInfo("away", True, True, False, False, costly, None, None, {}, scores, drafter.is_stepwise)
        self.weights = dict[str, float]()
        self.answers = 0

    def submit(self, method: str, *args: Any) -> FinishedFuture[Any]:
        """Send the call, and let ``fault`` carry the messages."""
        link = self.network.link
        if method in ("commit", "free"):
            frame = link.commit(*args) if method == "commit" else link.free(*args)
            if frame is not None:
                self.network.to_node.append(frame)
            return FinishedFuture(None)
        self.network.now += 1.0
        asks: dict[str, Callable[..., tuple[PendingCall, bytes]]] = {
            "propose": link.ask,
            "candidates": link.ask_steps,
            "score_known_tokens": link.ask_scores,
        }
        call, frame = asks[method](*args)
        self.network.to_node.append(frame)
        self._fault(args[0][0], self.network)
        assert not link.quarantine
        found = call.found or {}
        self.answers += len(found)
        return FinishedFuture(list(found.values()) if method == "propose" else found)

    def close(self) -> None: ...


def away(drafter: Drafter, vocab_size: int, fault: Fault = settle) -> tuple[DrafterProxy, NetworkExecutor]:
    """A drafter at the other end of the protocol, and its executor."""
    executor = NetworkExecutor(drafter, vocab_size, fault)
    return DrafterProxy(executor), executor


FAULTS = ("none", "lost call", "lost answer", "repetition", "late answer", "reversed order")


def every_fault(context: DraftContext, network: Network) -> None:
    """Another fault after each sequence of tokens, all but the last of ``FAULTS``."""
    carry(FAULTS[(len(context.tokens) + 2 * sum(context.tokens)) % 5], network)


def carry(fault: str, network: Network) -> None:
    """Carry the messages of a question under one of ``FAULTS``."""
    if fault == "lost call":
        network.to_node.pop()
    if fault == "repetition":
        network.to_node.append(network.to_node[-1])
    if fault == "reversed order":
        network.to_node.reverse()
    while network.to_node:
        network.reach_node()
    if fault == "lost answer" and network.to_verifier:
        network.to_verifier.pop()
    if fault == "repetition":
        network.to_verifier *= 2
    if fault == "reversed order":
        network.to_verifier.reverse()
    while network.to_verifier and fault != "late answer":
        network.reach_verifier()
