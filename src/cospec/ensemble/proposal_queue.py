"""What several models have computed of a sequence: how far each is, what it said, what is proposed and not yet judged.

CoS section 3.4. The *frontier* of a sequence is the position behind its last verified token. Ahead of it stands a chain
of proposed tokens, each with its author. For every model a line holds ``fed``, the tokens in its cache, and a queue of
the logits from the frontier on::

    tokens   t t t t t | x x x y y
    fed[0]   ─────────────────┘         logits of 5 positions: the frontier's and those behind x x x y
    fed[1]   ───────────┘               logits of 2 positions
                        └ frontier

A token that every member of the blend has scored can be judged. When it is rejected, the caches are cut back to it and
the queues emptied: of this line, and of no other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cospec.core.rng import Floats


@dataclass(frozen=True, slots=True)
class Proposal:
    """One proposed token.

    Attributes:
        author: the index of the model that drew it.
        q: ``[V]``, what it was drawn from: the author's distribution, whoever scores it; None for a point mass.
    """

    token: int
    author: int
    source: str
    q: Floats | None = None


@dataclass(slots=True)
class ProposalQueue:
    """One sequence. ``frontier`` counts verified tokens; committed ones, and within a round those just accepted."""

    frontier: int
    fed: list[int]
    rows: list[Tensor | None]  # [R, V], the last row speaks of position ``fed``
    pending: list[Proposal] = field(default_factory=list)

    def scored(self, model: int) -> int:
        """Positions from the frontier on that the model has logits of."""
        return max(0, self.fed[model] - self.frontier + 1) if self.rows[model] is not None else 0

    def advance(self, model: int, fed: int, rows: Tensor) -> None:
        """The model's cache holds ``fed`` tokens now; ``rows`` are the logits of the newest positions."""
        old, kept = self.rows[model], self.scored(model)
        self.rows[model] = torch.cat([old[len(old) - kept :], rows]) if old is not None and kept else rows
        self.fed[model] = fed

    def queue(self, model: int, count: int) -> Tensor:
        """``[count, V]``: the model's logits of the first ``count`` positions from the frontier on."""
        rows = self.rows[model]
        assert rows is not None and count <= self.scored(model), "the model has not scored that far"
        first = len(rows) - self.scored(model)
        return rows[first : first + count]

    def last(self, model: int) -> Tensor:
        """``[V]``: the logits of the position behind everything that the model was fed."""
        rows = self.rows[model]
        assert rows is not None
        return rows[-1]

    def accept(self, count: int) -> None:
        """The first ``count`` proposals are verified."""
        self.frontier += count
        del self.pending[:count]

    def replace(self) -> None:
        """The token at the frontier is verified and no model was fed it: drop all that stood ahead."""
        for model, fed in enumerate(self.fed):
            self.fed[model] = min(fed, self.frontier)
        self.rows = [None] * len(self.rows)
        self.pending.clear()
        self.frontier += 1


class ProposalQueues:
    """The lines of all sequences that have room in the caches."""

    def __init__(self, models: int) -> None:
        self._models = models
        self._lines: dict[str, ProposalQueue] = {}

    def open(self, id: str, frontier: int, computed: int) -> ProposalQueue:
        """The line of a sequence, a new one where there is none: of ``computed`` tokens in every cache."""
        line = self._lines.get(id)
        if line is None:
            line = self._lines[id] = ProposalQueue(frontier, [computed] * self._models, [None] * self._models)
        return line

    def fed(self, id: str, model: int) -> int:
        """Tokens of the sequence in the model's cache."""
        line = self._lines.get(id)
        return line.fed[model] if line is not None else 0

    def drop(self, ids: Iterable[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        for id in ids:
            self._lines.pop(id, None)
