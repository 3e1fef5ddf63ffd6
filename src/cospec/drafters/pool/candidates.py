"""From logits to the tokens that a drafter would choose, for many drafters and sequences in a few calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cospec.core.sampling import History, RowBlock, edit, likeliest, softmax, target_probs
from cospec.core.types import DraftContext
from cospec.drafters.known_token_scores import reads_natively
from cospec.drafters.pool.combiners.combiner import Candidate
from cospec.native import library
from cospec.rng.random_streams import Floats, RandomStreams, StreamKey, StreamKind, exponential_sample

_UNUSED: StreamKey = (0, 0, 0, 0, 0, 0)
HOPELESS = 1e-3  # minimum probability of a second choice


def top_candidates(
    logits: Tensor, contexts: Sequence[DraftContext], paths: Sequence[Sequence[int]]
) -> list[Candidate | None]:
    """Return each row's chosen token with its probability, and the same of the second choice.

    Greedy requests take the most probable token, with its probability at temperature 1. Others sample with the random
    stream of their acceptance method; all drafters of a sequence see the same numbers. The second choice is sampled
    from the other tokens above ``HOPELESS``. One native call runs if no row is edited or truncated.

    Args:
        logits: ``[R, V]``.
        contexts: ``[R]``.
        paths: ``[R]``, the draft tokens before each row.

    Returns:
        ``[R]``; None for a row that is not finite.
    """
    params = {id(context.sampling): context.sampling for context in contexts}  # requests mostly share parameters
    temperatures = {key: 0.0 if each.greedy else each.temperature for key, each in params.items()}
    plain = not any([each.edits_logits or (each.truncates and temperatures[key]) for key, each in params.items()])
    if plain and reads_natively(logits):
        chosen = [temperatures[id(context.sampling)] for context in contexts]
        found = zip(*library.candidate_rows(logits, chosen, _streams(contexts, paths, chosen), HOPELESS), strict=True)
        return [_candidate(tokens, chances) for tokens, chances in found]
    return _reference_candidates(logits, contexts, paths)


def _streams(
    contexts: Sequence[DraftContext], paths: Sequence[Sequence[int]], temperatures: Sequence[float]
) -> list[StreamKey]:
    """Return the random stream of each row that is sampled; all drafters of a sequence share one."""
    found: dict[int, StreamKey] = {}
    for context, path, temperature in zip(contexts, paths, temperatures, strict=True):
        if temperature and id(context) not in found:
            found[id(context)] = _stream(context, len(path))
    return [found.get(id(context), _UNUSED) for context in contexts]


def _candidate(tokens: Sequence[int], chances: Sequence[float]) -> Candidate | None:
    if tokens[0] < 0:
        return None
    return Candidate(tokens[0], chances[0], second=None if tokens[1] < 0 else (tokens[1], chances[1]))


def _reference_candidates(
    logits: Tensor, contexts: Sequence[DraftContext], paths: Sequence[Sequence[int]]
) -> list[Candidate | None]:
    """Return the same in numpy and torch, for rows of every kind."""
    found: list[Candidate | None] = [None] * len(contexts)
    for row, q in enumerate(_distributions(logits, contexts, paths)):
        if q is None:
            continue
        rest, tokens = q.copy(), [int(q.argmax())]
        if not contexts[row].sampling.greedy:
            tokens = draw(rest[None], [contexts[row]], [len(paths[row])])
        rest[tokens[0]] = 0.0
        if contexts[row].sampling.greedy:
            tokens.append(int(rest.argmax()))
        else:
            rest[rest < HOPELESS] = 0.0
            tokens += draw(rest[None], [contexts[row]], [len(paths[row])]) if rest.any() else [-1]
        if not rest.any():
            tokens[1] = -1
        found[row] = _candidate(tokens, [float(q[token]) for token in tokens])
    return found


def distributions(
    logits: Tensor, contexts: Sequence[DraftContext], paths: Sequence[Sequence[int]]
) -> list[Candidate | None]:
    """Return the distribution that a drafter would draw from after each row.

    A greedy request's distribution is a point mass on the most probable token. Under ``match`` the candidate holds
    the token that the drafter would draw, which later shows whether the drafter was right; otherwise the candidate
    holds no token. The confidence is the largest probability (at temperature 1 for greedy requests), known before any
    draw.

    Args:
        logits: ``[R, V]``.
        contexts: ``[R]``.
        paths: ``[R]``, the draft tokens before each row.

    Returns:
        ``[R]``; None for a row that is not finite.
    """
    found: list[Candidate | None] = [None] * len(contexts)
    for row, q in enumerate(_distributions(logits, contexts, paths)):
        if q is None:
            continue
        context, best = contexts[row], int(q.argmax())
        if context.sampling.greedy:
            found[row] = Candidate(best, float(q[best]))
        else:
            drawn = draw(q[None], [context], [len(paths[row])])[0] if context.stream_kind is StreamKind.TARGET else -1
            found[row] = Candidate(drawn, float(q[best]), q)
    return found


def _distributions(
    logits: Tensor, contexts: Sequence[DraftContext], paths: Sequence[Sequence[int]]
) -> list[Floats | None]:
    """Return the drafter's distribution after each row, ``[V]``; softmax at temperature 1 for greedy requests."""
    found: list[Floats | None] = [None] * len(contexts)
    rows = [row for row, token in enumerate(likeliest(logits)) if token is not None]
    for greedy in (True, False):
        own = [row for row in rows if contexts[row].sampling.greedy is greedy]
        if not own:
            continue
        chosen, paths_, taken = [contexts[row] for row in own], [paths[row] for row in own], _take(logits, own)
        if greedy:
            q = softmax(_edited(taken, chosen, paths_), [1.0] * len(own))
        else:
            q = target_probs(taken, [_block(context, path) for context, path in zip(chosen, paths_, strict=True)])
        for row, weights in zip(own, q, strict=True):
            found[row] = weights if np.isfinite(weights[0]) else None  # parameters may exclude every token
    return found


def draw(weights: Floats, contexts: Sequence[DraftContext], ahead: Sequence[int]) -> list[int]:
    """Sample a token from each row of ``weights [R, V]``, for the position ``ahead`` tokens after the committed
    ones."""
    return exponential_sample(
        weights, [_stream(context, places) for context, places in zip(contexts, ahead, strict=True)]
    )


def _stream(context: DraftContext, ahead: int) -> StreamKey:
    base = len(context.tokens)
    return RandomStreams(context.seed, base).stream(base + ahead, context.stream_kind)


def _block(context: DraftContext, path: Sequence[int]) -> RowBlock:
    return RowBlock(context.sampling, History.of_context(context, [path]))


def _take(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[list(rows)]


def _edited(logits: Tensor, contexts: Sequence[DraftContext], paths: Sequence[Sequence[int]]) -> Tensor:
    """Return the logits after penalties, bias and bans of the requests."""
    if not any(context.sampling.edits_logits for context in contexts):
        return logits
    blocks = [_block(context, path) for context, path in zip(contexts, paths, strict=True)]
    return torch.cat([edit(logits[row : row + 1], b.params, b.history) for row, b in enumerate(blocks)])
