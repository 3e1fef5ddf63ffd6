"""Tokens that an ensemble's members proposed for one request, not yet verified, with logits (CoS section 3.4).

The *frontier* of a sequence is the position after its last verified token. A chain of proposed tokens follows the
frontier; each token has a proposer. For every model a chain holds ``fed``, the number of tokens in the model's cache,
and the logits from the frontier on::

    tokens   t t t t t | x x x y y
    fed[0]   ─────────────────┘         logits of 5 positions: the frontier's and those after x x x y
    fed[1]   ───────────┘               logits of 2 positions
                        └ frontier

A token can be verified once every member of the blend has scored it. A rejection truncates the caches to the rejected
token and empties the chain of this sequence; other sequences keep their chains. CoS algorithms 1 and 2 are for one
sequence and leave out the caches, so a rejection clears everything there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cospec.rng.random_streams import Floats


@dataclass(frozen=True, slots=True)
class Proposal:
    """One proposed token.

    Attributes:
        proposer: the index of the model that drew the token.
        q: ``[V]``, the proposer's distribution that the token was drawn from; None for a point mass.
    """

    token: int
    proposer: int
    source: str
    q: Floats | None = None


@dataclass(slots=True)
class ProposalChain:
    """One sequence. ``frontier`` counts verified tokens: the committed ones and those accepted in this step."""

    frontier: int
    fed: list[int]
    rows: list[Tensor | None]  # [R, V] per model; the last row follows position ``fed``
    pending: list[Proposal] = field(default_factory=list)

    def scored(self, model: int) -> int:
        """Return the number of positions from the frontier on for which the model has logits."""
        return max(0, self.fed[model] - self.frontier + 1) if self.rows[model] is not None else 0

    def advance(self, model: int, fed: int, rows: Tensor) -> None:
        """Record that the model's cache holds ``fed`` tokens; ``rows [R, V]`` are the logits of the newest
        positions."""
        old, kept = self.rows[model], self.scored(model)
        self.rows[model] = torch.cat([old[len(old) - kept :], rows]) if old is not None and kept else rows
        self.fed[model] = fed

    def logits(self, model: int, count: int) -> Tensor:
        """Return the model's logits of the first ``count`` positions from the frontier on, ``[count, V]``."""
        rows = self.rows[model]
        assert rows is not None and count <= self.scored(model), "the model has not scored that far"
        first = len(rows) - self.scored(model)
        return rows[first : first + count]

    def last(self, model: int) -> Tensor:
        """Return the logits after the last token that the model was fed, ``[V]``."""
        rows = self.rows[model]
        assert rows is not None
        return rows[-1]

    def accept(self, count: int) -> None:
        """Mark the first ``count`` proposals as verified."""
        self.frontier += count
        del self.pending[:count]

    def replace(self) -> None:
        """Commit a token at the frontier that no model was fed, and drop all pending proposals."""
        for model, fed in enumerate(self.fed):
            self.fed[model] = min(fed, self.frontier)
        self.rows = [None] * len(self.rows)
        self.pending.clear()
        self.frontier += 1


class ProposalChains:
    """The chains of all sequences that have room in the caches."""

    def __init__(self, models: int) -> None:
        self._models = models
        self._chains: dict[str, ProposalChain] = {}

    def open(self, id: str, frontier: int, computed: int) -> ProposalChain:
        """Return the chain of a sequence; a new chain starts with ``computed`` tokens in every cache."""
        chain = self._chains.get(id)
        if chain is None:
            chain = self._chains[id] = ProposalChain(frontier, [computed] * self._models, [None] * self._models)
        return chain

    def fed(self, id: str, model: int) -> int:
        """Return the number of the sequence's tokens in the model's cache."""
        chain = self._chains.get(id)
        return chain.fed[model] if chain is not None else 0

    def set_fed(self, id: str, model: int, fed: int) -> None:
        """Record the number of the sequence's tokens in the model's cache; a native call wrote them."""
        self._chains[id].fed[model] = fed

    def move_to(self, id: str, frontier: int, scorer: int) -> None:
        """Record that a native call verified all tokens before ``frontier``; the scorer was not fed the last one."""
        chain = self._chains[id]
        chain.frontier, chain.fed[scorer], chain.rows = frontier, frontier - 1, [None] * len(chain.rows)

    def drop(self, ids: Iterable[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        for id in ids:
            self._chains.pop(id, None)
