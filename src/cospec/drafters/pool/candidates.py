"""From rows of logits to what a drafter would choose there, for many drafters and sequences in a few calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from cospec.core.rng import Floats, RandomStreams, Stream, StreamKind, exponential_sample
from cospec.core.sampling import History, RowBlock, edit, likeliest, softmax, target_probs
from cospec.core.types import DraftContext
from cospec.drafters.pool.combiners.combine import Candidate
from cospec.drafters.prompt_scoring import reads_natively
from cospec.native import library

HOPELESS = 1e-3  # a less likely token is not worth a place as next best; as in ``csrc/spec/candidates.cpp``


def top_candidates(
    logits: Tensor, contexts: Sequence[DraftContext], paths: Sequence[Sequence[int]]
) -> list[Candidate | None]:
    """The token that a drafter chooses behind each row and its probability, and the same of the next best one.

    Greedy requests take the likeliest token, with its probability at temperature 1; others race with the noise that
    their rule asks for, in which all drafters of a sequence see the same numbers. The next best one is who wins among
    the others that are not hopeless. One native call where no row has to be edited or truncated.

    Args:
        logits: ``[R, V]``.
        contexts: ``[R]``.
        paths: ``[R]``, the draft tokens before each row.

    Returns:
        ``[R]``; None for a row that is not made of numbers.
    """
    params = {id(context.sampling): context.sampling for context in contexts}  # requests mostly share them
    heats = {key: 0.0 if each.greedy else each.temperature for key, each in params.items()}
    plain = not any([each.edits_logits or (each.truncates and heats[key]) for key, each in params.items()])
    if plain and reads_natively(logits):
        heat = [heats[id(context.sampling)] for context in contexts]
        streams = [_stream(context, len(path)) for context, path in zip(contexts, paths, strict=True)]
        found = zip(*library.candidate_rows(logits, heat, streams), strict=True)
        return [_guess(tokens, chances) for tokens, chances in found]
    return _guesses(logits, contexts, paths)


def _guess(tokens: Sequence[int], chances: Sequence[float]) -> Candidate | None:
    if tokens[0] < 0:
        return None
    return Candidate(tokens[0], chances[0], second=None if tokens[1] < 0 else (tokens[1], chances[1]))


def _guesses(
    logits: Tensor, contexts: Sequence[DraftContext], paths: Sequence[Sequence[int]]
) -> list[Candidate | None]:
    """The same in numpy and torch, for rows of every kind."""
    found: list[Candidate | None] = [None] * len(contexts)
    for row, q in enumerate(_laws(logits, contexts, paths)):
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
        found[row] = _guess(tokens, [float(q[token]) for token in tokens])
    return found


def distributions(
    logits: Tensor, contexts: Sequence[DraftContext], paths: Sequence[Sequence[int]]
) -> list[Candidate | None]:
    """What a drafter would draw from behind each row: the request's law as the drafter sees it.

    That of a greedy request is a point mass, its likeliest token. Where the rule draws with the target's own noise the
    guess knows which token the drafter would draw, which tells afterwards how right it was; otherwise it has none. The
    confidence is the largest probability (at temperature 1 for greedy requests), known before anything is drawn.

    Args:
        logits: ``[R, V]``.
        contexts: ``[R]``.
        paths: ``[R]``, the draft tokens before each row.

    Returns:
        ``[R]``; None for a row that is not made of numbers.
    """
    found: list[Candidate | None] = [None] * len(contexts)
    for row, q in enumerate(_laws(logits, contexts, paths)):
        if q is None:
            continue
        context, best = contexts[row], int(q.argmax())
        if context.sampling.greedy:
            found[row] = Candidate(best, float(q[best]))
        else:
            drawn = draw(q[None], [context], [len(paths[row])])[0] if context.stream_kind is StreamKind.TARGET else -1
            found[row] = Candidate(drawn, float(q[best]), q)
    return found


def _laws(logits: Tensor, contexts: Sequence[DraftContext], paths: Sequence[Sequence[int]]) -> list[Floats | None]:
    """The drafter's law behind each row, ``[V]``, or its softmax at temperature 1 for greedy requests."""
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
            found[row] = weights if np.isfinite(weights[0]) else None  # parameters may leave no token
    return found


def draw(weights: Floats, contexts: Sequence[DraftContext], ahead: Sequence[int]) -> list[int]:
    """A token from each row of ``weights [R, V]``, with the noise of its sequence's rule ``ahead`` places from now."""
    return exponential_sample(
        weights, [_stream(context, places) for context, places in zip(contexts, ahead, strict=True)]
    )


def _stream(context: DraftContext, ahead: int) -> Stream:
    base = len(context.tokens)
    return RandomStreams(context.seed, base).stream(base + ahead, context.stream_kind)


def _block(context: DraftContext, path: Sequence[int]) -> RowBlock:
    return RowBlock(context.sampling, History(context.tokens, context.prompt_len, [path]))


def _take(logits: Tensor, rows: Sequence[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[list(rows)]


def _edited(logits: Tensor, contexts: Sequence[DraftContext], paths: Sequence[Sequence[int]]) -> Tensor:
    """The logits after penalties, bias and bans, where any request has some."""
    if not any(context.sampling.edits_logits for context in contexts):
        return logits
    blocks = [_block(context, path) for context, path in zip(contexts, paths, strict=True)]
    return torch.cat([edit(logits[row : row + 1], b.params, b.history) for row, b in enumerate(blocks)])
