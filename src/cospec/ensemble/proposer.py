"""A member of a blend proposes: it draws tokens from its own distribution and feeds them to itself (CoS PROPOSE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cospec.core.model_io import RolloutOutput, RolloutParams
from cospec.core.rng import RandomStreams, Stream, StreamKind, exponential_sample
from cospec.core.sampling import History, RowBlock, likeliest, target_probs
from cospec.core.types import RequestState
from cospec.ensemble.proposal_queue import Proposal, ProposalQueue


@dataclass(frozen=True, slots=True)
class Proposer:
    """Who proposes: the index of a model, and the name that its tokens carry."""

    model: int
    name: str


def choose(
    author: Proposer, logits: Tensor, lines: Sequence[tuple[RequestState, ProposalQueue, StreamKind]]
) -> list[Proposal | None]:
    """One more token for each line, from its row of ``logits [len(lines), V]``; None where the row is no numbers.

    The noise is that of the request's rule: the draw's own stream, in which case q is kept, or the target's. The key
    is the frontier at the time of the draw, which no later draw for the same position shares: a proposal is dropped
    only when the frontier moves.
    """
    best = likeliest(logits)
    made = [None if token is None else Proposal(token, author.model, author.name) for token in best]
    drawing = [row for row, (sequence, _, _) in enumerate(lines) if best[row] is not None and not _plain(sequence)]
    if drawing:
        q = target_probs(logits[drawing], [_block(*lines[row][:2]) for row in drawing])
        streams = [_stream(*lines[row]) for row in drawing]
        for place, (row, token) in enumerate(zip(drawing, exponential_sample(q, streams), strict=True)):
            if token < 0:  # the request's parameters leave no token
                made[row] = None
                continue
            kept = q[place] if lines[row][2] is StreamKind.DRAFT else None
            made[row] = Proposal(token, author.model, author.name, kept)
    return made


def rolls(sequence: RequestState) -> bool:
    """Whether a model's own loop draws as the request asks for: by temperature alone."""
    params = sequence.request.sampling
    return not params.edits_logits and (params.greedy or not params.truncates)


def pick(sequence: RequestState, line: ProposalQueue, stream_kind: StreamKind, depth: int) -> RolloutParams:
    """How a model's own loop chooses what ``choose`` would; its logits are the others' to read."""
    params = sequence.request.sampling
    return RolloutParams(
        0.0 if params.greedy else params.temperature, _stream(sequence, line, stream_kind), depth, logits=True
    )


def taken(
    author: Proposer, rolled: RolloutOutput, place: int, line: tuple[RequestState, StreamKind]
) -> tuple[list[Proposal], Tensor]:
    """What a loop chose for the sequence at ``place``, up to where its logits were no numbers, and those logits."""
    (sequence, stream_kind), tokens = line, rolled.tokens[place]
    count = tokens.index(-1) if -1 in tokens else len(tokens)
    kept = rolled.q if stream_kind is StreamKind.DRAFT and not sequence.request.sampling.greedy else None
    proposals = [
        Proposal(token, author.model, author.name, None if kept is None else kept[place, step])
        for step, token in enumerate(tokens[:count])
    ]
    assert rolled.logits is not None, "the picks asked for them"
    return proposals, torch.from_numpy(rolled.logits[: count + 1, place])


def _stream(sequence: RequestState, line: ProposalQueue, stream_kind: StreamKind) -> Stream:
    """What the next proposal of a line is drawn with."""
    return RandomStreams(sequence.request.seed, line.frontier).stream(line.frontier + len(line.pending), stream_kind)


def _plain(sequence: RequestState) -> bool:
    """Whether the likeliest token is what the author's own law picks."""
    params = sequence.request.sampling
    return params.greedy and not params.edits_logits


def _block(sequence: RequestState, line: ProposalQueue) -> RowBlock:
    ahead = [proposal.token for proposal in line.pending]
    return RowBlock(sequence.request.sampling, History(sequence.tokens, sequence.prompt_len, [ahead]))
