"""Let a member of a blend propose: draw tokens from its own distribution and feed them back (CoS PROPOSE)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from cospec.core.model_io import RolloutOutput, RolloutParams
from cospec.core.sampling import History, RowBlock, likeliest, target_probs
from cospec.core.types import RequestState
from cospec.ensemble.proposed_tokens import Proposal, ProposalChain
from cospec.rng.random_streams import RandomStreams, StreamKey, StreamKind, exponential_sample


@dataclass(frozen=True, slots=True)
class Proposer:
    """A proposing model: its index, and its name as the source of its tokens."""

    model: int
    name: str


def draw_proposals(
    proposer: Proposer, logits: Tensor, chains: Sequence[tuple[RequestState, ProposalChain, StreamKind]]
) -> list[Proposal | None]:
    """Draw one more token for each chain from its row of ``logits [S, V]``; None where the row is not numbers.

    The acceptance method of the request selects the random stream: the draft stream, for which q is kept, or the
    target's. The frontier at the time of the draw is the key. No later draw for the same position shares this key,
    because a proposal is dropped only when the frontier moves.
    """
    best = likeliest(logits)
    made = [None if token is None else Proposal(token, proposer.model, proposer.name) for token in best]
    drawing = [row for row, (sequence, _, _) in enumerate(chains) if best[row] is not None and not _plain(sequence)]
    if drawing:
        q = target_probs(logits[drawing], [_block(*chains[row][:2]) for row in drawing])
        streams = [_stream(*chains[row]) for row in drawing]
        for place, (row, token) in enumerate(zip(drawing, exponential_sample(q, streams), strict=True)):
            if token < 0:  # the request's parameters exclude every token
                made[row] = None
                continue
            kept = q[place] if chains[row][2] is StreamKind.DRAFT else None
            made[row] = Proposal(token, proposer.model, proposer.name, kept)
    return made


def supports_rollout(sequence: RequestState) -> bool:
    """Return whether a rollout can draw for this request: only temperature changes the logits."""
    params = sequence.request.sampling
    return not params.edits_logits and (params.greedy or not params.truncates)


def rollout_params(sequence: RequestState, chain: ProposalChain, stream_kind: StreamKind, depth: int) -> RolloutParams:
    """Return parameters for a rollout that draws the tokens of ``draw_proposals``, and returns its logits."""
    params = sequence.request.sampling
    return RolloutParams(
        0.0 if params.greedy else params.temperature, _stream(sequence, chain, stream_kind), depth, logits=True
    )


def read_rollout(
    proposer: Proposer, rollout: RolloutOutput, place: int, chain: tuple[RequestState, StreamKind]
) -> tuple[list[Proposal], Tensor]:
    """Return the proposals of a rollout for the sequence at ``place``, and their logits.

    Both end where the logits are not numbers.
    """
    (sequence, stream_kind), tokens = chain, rollout.tokens[place]
    count = tokens.index(-1) if -1 in tokens else len(tokens)
    kept = rollout.q if stream_kind is StreamKind.DRAFT and not sequence.request.sampling.greedy else None
    proposals = [
        Proposal(token, proposer.model, proposer.name, None if kept is None else kept[place, step])
        for step, token in enumerate(tokens[:count])
    ]
    assert rollout.logits is not None, "the params asked for them"
    return proposals, rollout.logits[: count + 1, place]


def _stream(sequence: RequestState, chain: ProposalChain, stream_kind: StreamKind) -> StreamKey:
    """Return the random stream of the chain's next proposal."""
    return RandomStreams(sequence.request.seed, chain.frontier).stream(chain.frontier + len(chain.pending), stream_kind)


def _plain(sequence: RequestState) -> bool:
    """Return whether the request takes the most likely token of unedited logits."""
    params = sequence.request.sampling
    return params.greedy and not params.edits_logits


def _block(sequence: RequestState, chain: ProposalChain) -> RowBlock:
    ahead = [proposal.token for proposal in chain.pending]
    history = History(sequence.tokens, sequence.prompt_len, [ahead], sequence.processors)
    return RowBlock(sequence.request.sampling, history)
