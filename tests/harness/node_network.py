"""Both ends of the protocol of drafter nodes, and a network between them that a test controls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cospec.cluster.nodes.node_state import NodeLink, PendingProposal
from cospec.cluster.nodes.service import NodeService
from cospec.cluster.nodes.wire import FrameCodec, NodeDrafts, NodeHello, ToVerifier, Welcome
from cospec.core.plugin_base import Drafter
from cospec.core.rng import StreamKind
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.sampling_params import SamplingParams

VOCAB = 97
GREEDY = SamplingParams(temperature=0)


class Echo(Drafter):
    """Drafts tokens that depend on all known tokens, so that a draft shows which tokens its drafter read."""

    name, samples, drafts_ahead, reads_states, learns = "echo", False, True, False, False

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
        self.link = NodeLink(self.hello, self.vocab_size, self.samples, lambda: self.now)
        self.service = NodeService(self.drafter, self.hello, lambda: self.now)
        self.service.handle(FrameCodec(ToVerifier).encode(Welcome()))
        assert self.service.welcome

    def ask(self, contexts: Sequence[DraftContext], depth: int = 3) -> PendingProposal:
        """Ask for chains; the frame waits in ``to_node``."""
        question, frame = self.link.ask(contexts, [DraftBudget(depth, depth)] * len(contexts))
        self.to_node.append(frame)
        return question

    def reach_node(self, place: int = 0) -> None:
        """Deliver a frame to the node."""
        answer = self.service.handle(self.to_node.pop(place))
        if answer is not None:
            self.to_verifier.append(answer)

    def reach_verifier(self, place: int = 0) -> None:
        """Deliver a frame to the verifier."""
        message = self.link.decode(self.to_verifier.pop(place))
        if isinstance(message, NodeDrafts):
            self.link.answer(message)

    def settle(self) -> None:
        """Deliver all frames in order."""
        while self.to_node:
            self.reach_node()
        while self.to_verifier:
            self.reach_verifier()
