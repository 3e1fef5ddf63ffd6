"""A token tree under construction: scored nodes, equal tokens after the same parent merged, cut to a budget."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cospec.core.types import Draft, DraftContext


class TreeBuilder:
    """Nodes in insertion order, parents first.

    A node's ``score`` is its acceptance probability, or a weight; ``confidence`` is the probability given its parent.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.owners: list[int] = []
        self.scores: list[float] = []
        self.confidence: list[float] = []
        self._places: dict[tuple[int, int], int] = {}

    def put(self, parent: int, token: int, owner: int, score: float, confidence: float) -> int:
        """Return the node with this token after ``parent`` (-1: the root); add the node if it is new."""
        new = len(self.tokens)
        node = self._places.setdefault((parent, token), new)
        if node == new:
            self.tokens.append(token)
            self.parents.append(parent)
            self.owners.append(owner)
            self.scores.append(score)
            self.confidence.append(confidence)
        return node

    def best(self, count: int) -> list[int]:
        """Return the ``count`` nodes with the highest scores, in order; a node is never kept without its parent."""
        if len(self.tokens) <= count:
            return list(range(len(self.tokens)))
        scores: list[float] = []
        for parent, score in zip(self.parents, self.scores, strict=True):
            scores.append(score if parent < 0 else min(score, scores[parent]))
        return sorted(sorted(range(len(scores)), key=[-score for score in scores].__getitem__)[:count])

    def outranked(self, node: int) -> int:
        """Return the number of nodes with a higher score, or with the same score and an earlier position."""
        own = self.scores[node]
        elder = [score for score in self.scores[:node] if score >= own]
        return len(elder) + len([score for score in self.scores[node + 1 :] if score > own])

    def draft(self, context: DraftContext, nodes: Sequence[int], names: Sequence[str]) -> Draft | None:
        """Return the draft of ``nodes``, in order and closed under parents; None without nodes."""
        if not nodes:
            return None
        place = [-1] * (len(self.tokens) + 1)  # by node, and of the root at the end
        for number, node in enumerate(nodes):
            place[node] = number
        return Draft(
            context.id,
            len(context.tokens),
            tuple([self.tokens[node] for node in nodes]),
            tuple([place[self.parents[node]] for node in nodes]),
            tuple([names[self.owners[node]] for node in nodes]),
            confidence=np.array([self.confidence[node] for node in nodes]),
        )
