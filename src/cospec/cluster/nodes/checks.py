"""Checks of a node's drafts. A draft that passes can be verified; a draft that fails breaks the protocol."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from cospec.cluster.nodes.wire import NodeDraft, SparseRow
from cospec.core.rng import Floats, StreamKind
from cospec.core.tree import depths
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.runtime.codec import ProtocolError

MASS_ERROR = 1e-6  # allowed distance of a distribution's sum from 1


@dataclass(frozen=True, slots=True)
class AskedDraft:
    """What a node was asked for one request.

    Attributes:
        base: known tokens, the assumed tokens included.
        wants_q: the acceptance method reads the distributions of the draft.
    """

    epoch: int
    base: int
    budget: DraftBudget
    wants_q: bool

    @classmethod
    def of(cls, context: DraftContext, budget: DraftBudget, epoch: int, samples: bool) -> AskedDraft:
        """Describe a question; ``samples``: the drafter draws its tokens."""
        wants_q = samples and context.stream_kind is StreamKind.DRAFT and not context.sampling.greedy
        return cls(epoch, len(context.tokens), budget, wants_q)


def check_draft(draft: NodeDraft, asked: AskedDraft, vocab_size: int, name: str) -> Draft:
    """The draft of ``name`` as the engine verifies drafts.

    Raises:
        ProtocolError: the draft is not of the shape that was asked for.
    """
    count, budget = len(draft.tokens), asked.budget
    if not 0 < count <= max(budget.max_nodes, budget.depth):
        raise ProtocolError(f"A draft has {count} tokens; at most {budget.max_nodes} tokens were asked for.")
    if any(not 0 <= token < vocab_size for token in draft.tokens):
        raise ProtocolError(f"A draft has a token outside of the vocabulary of {vocab_size} tokens.")
    _check_tree(draft, budget)
    confidence = None
    if draft.confidence is not None:
        if len(draft.confidence) != count or not all(isfinite(each) and 0 <= each <= 1 for each in draft.confidence):
            raise ProtocolError("A draft has confidences that are no probabilities of its tokens.")
        confidence = np.array(draft.confidence)
    q = None
    if asked.wants_q:
        if draft.q is None or len(draft.q) != count:
            raise ProtocolError("A draft has no distribution for each of its tokens; distributions were asked for.")
        q = _dense(draft.q, draft.tokens, vocab_size)
    return Draft(draft.id, draft.base, draft.tokens, draft.parents, (name,) * count, q, confidence)


def sparse_rows(q: Floats) -> tuple[SparseRow, ...]:
    """The rows ``[N, V]`` without their zeros. Nothing else is cut: the tokens were drawn from these rows."""
    rows = []
    for row in q:
        ids = np.flatnonzero(row)
        rows.append(SparseRow(ids.tolist(), row[ids].astype("<f8").tobytes()))
    return tuple(rows)


def _check_tree(draft: NodeDraft, budget: DraftBudget) -> None:
    """Raise ``ProtocolError`` unless parents come first, siblings differ and paths are short enough."""
    if len(draft.parents) != len(draft.tokens):
        raise ProtocolError("A draft has another number of parents than of tokens.")
    if any(not -1 <= parent < node for node, parent in enumerate(draft.parents)):
        raise ProtocolError("A draft has a token before its parent.")
    if len(set(zip(draft.parents, draft.tokens, strict=True))) < len(draft.tokens):
        raise ProtocolError("A draft has the same token twice after one parent.")
    if budget.is_chain and draft.parents != tuple(range(-1, len(draft.tokens) - 1)):
        raise ProtocolError("A draft is a tree; a chain was asked for.")
    if max(depths(draft.parents)) > budget.depth:
        raise ProtocolError(f"A draft has a longer path than the {budget.depth} tokens that were asked for.")


def _dense(rows: Sequence[SparseRow], tokens: Sequence[int], vocab_size: int) -> Floats:
    q = np.zeros((len(rows), vocab_size))
    for row, (token, sparse) in enumerate(zip(tokens, rows, strict=True)):
        ids = np.array(sparse.ids, dtype=np.int64)
        if len(sparse.probs) != 8 * len(ids) or not len(ids) or ids[0] < 0 or ids[-1] >= vocab_size:
            raise ProtocolError("A distribution has tokens outside of the vocabulary, or too few probabilities.")
        probs = np.frombuffer(sparse.probs, "<f8")
        if not np.all(np.diff(ids) > 0) or not np.all(np.isfinite(probs)) or not np.all(probs > 0):
            raise ProtocolError("A distribution has repeated tokens, or probabilities that are not above 0.")
        if abs(float(probs.sum()) - 1) > MASS_ERROR:
            raise ProtocolError("A distribution does not sum to 1.")
        q[row, ids] = probs
        if q[row, token] <= 0:
            raise ProtocolError("A draft has a token that its distribution excludes.")
    return q
