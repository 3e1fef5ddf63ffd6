"""Checks of a node's answers. A part that passes can be used like a local drafter's; a part that fails breaks the
protocol.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

import numpy as np

from cospec.cluster.nodes.wire import NodeDraft, NodeScore, NodeStep, SparseRow
from cospec.core.drafter_capabilities import TokenScores
from cospec.core.plugin_base import base_of
from cospec.core.tree import depths
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.draft_kv_cache import LOOKBACK
from cospec.drafters.pool.combiners.combiner import Candidate
from cospec.rng.random_streams import Floats, StreamKind
from cospec.runtime.codec import ProtocolError

MASS_ERROR = 1e-6  # allowed distance of a distribution's sum from 1


@dataclass(frozen=True, slots=True)
class AskedDraft:
    """The draft that a node was asked for.

    Attributes:
        wants_q: the acceptance method reads the distributions of the draft.
        given: number of assumed tokens that the draft begins with.
    """

    budget: DraftBudget
    wants_q: bool
    given: int = 0

    @classmethod
    def of(cls, context: DraftContext, budget: DraftBudget, samples: bool) -> AskedDraft:
        """Describe a call; ``samples``: the drafter draws its tokens."""
        wants_q = samples and context.stream_kind is StreamKind.DRAFT and not context.sampling.greedy
        return cls(budget, wants_q, len(context.tokens) - base_of(context, budget))


def check_draft(draft: NodeDraft, asked: AskedDraft, vocab_size: int, name: str) -> Draft:
    """The draft of ``name`` as the engine verifies drafts.

    Raises:
        ProtocolError: the draft is not of the shape that was asked for.
    """
    count, budget, given = len(draft.tokens), asked.budget, asked.given
    if not 0 < count <= max(budget.max_nodes, budget.depth) + given:
        raise ProtocolError(f"A draft has {count} tokens; at most {budget.max_nodes} tokens were asked for.")
    if any(not 0 <= token < vocab_size for token in draft.tokens):
        raise ProtocolError(f"A draft has a token outside of the vocabulary of {vocab_size} tokens.")
    _check_tree(draft, budget, given)
    confidence = None
    if draft.confidence is not None:
        if len(draft.confidence) != count or not all(isfinite(each) and 0 <= each <= 1 for each in draft.confidence):
            raise ProtocolError("A draft has confidences that are no probabilities of its tokens.")
        confidence = np.array(draft.confidence)
    q = None
    if asked.wants_q:
        if draft.q is None or len(draft.q) != count:
            raise ProtocolError("A draft has no distribution for each of its tokens; distributions were asked for.")
        q = np.stack([_dense(row, vocab_size) for row in draft.q])
        if not np.all(q[np.arange(count), list(draft.tokens)] > 0):
            raise ProtocolError("A draft has a token that its distribution excludes.")
    return Draft(draft.id, draft.base - given, draft.tokens, draft.parents, (name,) * count, q, confidence)


def check_score(score: NodeScore) -> TokenScores:
    """The score of known tokens.

    Raises:
        ProtocolError: no drafter scores so.
    """
    if not 0 <= score.tokens <= min(LOOKBACK, score.base - 1):
        raise ProtocolError(f"A score is about {score.tokens} tokens of {score.base}; allowed are {LOOKBACK} tokens.")
    if not (isfinite(score.chance) and 0 <= score.chance <= score.tokens + MASS_ERROR):
        raise ProtocolError("A score is no sum of probabilities of its tokens.")
    return TokenScores(score.chance, score.tokens)


def check_step(step: NodeStep, wants_q: bool, vocab_size: int) -> Candidate:
    """The candidate of one token step.

    Raises:
        ProtocolError: the candidate is not of the shape that was asked for.
    """
    pairs = [(step.token, step.confidence), *([step.second] if step.second is not None else [])]
    if not all(isfinite(chance) and 0 <= chance <= 1 for _, chance in pairs):
        raise ProtocolError("A candidate has a confidence that is no probability.")
    if not all(0 <= token < vocab_size for token, _ in pairs[wants_q and step.token == -1 :]):
        raise ProtocolError(f"A candidate is a token outside of the vocabulary of {vocab_size} tokens.")
    if wants_q != (step.q is not None):
        raise ProtocolError("A candidate has no distribution that was asked for, or has another distribution.")
    q = None if step.q is None else _dense(step.q, vocab_size)
    return Candidate(step.token, step.confidence, q, step.second)


def sparse_row(row: Floats) -> SparseRow:
    """A row ``[V]`` without its zeros. Nothing else is cut: a token was drawn from the row, or will be."""
    ids = np.flatnonzero(row)
    return SparseRow(ids.tolist(), row[ids].astype("<f8").tobytes())


def _check_tree(draft: NodeDraft, budget: DraftBudget, given: int) -> None:
    """Raise ``ProtocolError`` unless parents come first, siblings differ and paths are short enough."""
    if len(draft.parents) != len(draft.tokens):
        raise ProtocolError("A draft has another number of parents than of tokens.")
    if any(not -1 <= parent < node for node, parent in enumerate(draft.parents)):
        raise ProtocolError("A draft has a token before its parent.")
    if len(set(zip(draft.parents, draft.tokens, strict=True))) < len(draft.tokens):
        raise ProtocolError("A draft has the same token twice after one parent.")
    if budget.is_chain and draft.parents != tuple(range(-1, len(draft.tokens) - 1)):
        raise ProtocolError("A draft is a tree; a chain was asked for.")
    if max(depths(draft.parents)) > budget.depth + given:
        raise ProtocolError(f"A draft has a longer path than the {budget.depth} tokens that were asked for.")


def _dense(sparse: SparseRow, vocab_size: int) -> Floats:
    """The distribution ``[V]``."""
    try:
        row, ids = np.zeros(vocab_size), np.array(sparse.ids, dtype=np.int64)
    except OverflowError:
        raise ProtocolError("A distribution has a token of more than 64 bits.") from None
    if len(sparse.probs) != 8 * len(ids) or not len(ids) or ids[0] < 0 or ids[-1] >= vocab_size:
        raise ProtocolError("A distribution has tokens outside of the vocabulary, or too few probabilities.")
    probs = np.frombuffer(sparse.probs, "<f8")
    if not np.all(np.diff(ids) > 0) or not np.all(np.isfinite(probs)) or not np.all(probs > 0):
        raise ProtocolError("A distribution has repeated tokens, or probabilities that are not above 0.")
    if abs(float(probs.sum()) - 1) > MASS_ERROR:
        raise ProtocolError("A distribution does not sum to 1.")
    row[ids] = probs
    return row
