"""A member of a blend proposes: it draws tokens from its own distribution and feeds them to itself (CoS PROPOSE)."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from cospec.draws import Draws, Purpose, race
from cospec.rounds.lines import Line, Proposal
from cospec.sampling import Block, History, laws, likeliest
from cospec.types import Sequence


@dataclass(frozen=True, slots=True)
class Author:
    """Who proposes: the index of a model, and the name that its tokens carry."""

    model: int
    name: str


def choose(author: Author, logits: Tensor, lines: Seq[tuple[Sequence, Line, Purpose]]) -> list[Proposal | None]:
    """One more token for each line, from its row of ``logits [len(lines), V]``; None where the row is no numbers.

    The noise is that of the request's rule: the draw's own stream, in which case q is kept, or the target's. The key
    is the frontier at the time of the draw, which no later draw for the same position shares: a proposal is dropped
    only when the frontier moves.
    """
    best = likeliest(logits)
    made = [None if token is None else Proposal(token, author.model, author.name) for token in best]
    drawing = [row for row, (sequence, _, _) in enumerate(lines) if best[row] is not None and not _plain(sequence)]
    if drawing:
        q = laws(logits[drawing], [_block(*lines[row][:2]) for row in drawing])
        streams = []
        for row in drawing:
            sequence, line, noise = lines[row]
            position = line.frontier + len(line.pending)
            streams.append(Draws(sequence.request.seed, line.frontier).stream(position, noise))
        for place, (row, token) in enumerate(zip(drawing, race(q, streams), strict=True)):
            kept = q[place] if lines[row][2] is Purpose.DRAFT else None
            made[row] = Proposal(token, author.model, author.name, kept)
    return made


def _plain(sequence: Sequence) -> bool:
    """Whether the likeliest token is what the author's own law picks."""
    params = sequence.request.sampling
    return params.greedy and not params.edits_logits


def _block(sequence: Sequence, line: Line) -> Block:
    ahead = [proposal.token for proposal in line.pending]
    return Block(sequence.request.sampling, History(sequence.tokens, sequence.prompt_len, [ahead]))
