"""From rows of logits to what a drafter would choose there, for many drafters and sequences in a few calls."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from cospec.drafters.combiners.job import Guess
from cospec.draws import Draws, Floats, race
from cospec.sampling import Block, History, edit, laws, likeliest, softmax
from cospec.types import Context


def guesses(logits: Tensor, contexts: Seq[Context], paths: Seq[Seq[int]]) -> list[Guess | None]:
    """The token that a drafter chooses behind each row, and its probability.

    Greedy requests take the likeliest token, with its probability at temperature 1; others race with the noise that
    their rule asks for, in which all drafters of a sequence see the same numbers.

    Args:
        logits: ``[R, V]``.
        contexts: ``[R]``.
        paths: ``[R]``, the draft tokens before each row.

    Returns:
        ``[R]``; None for a row that is not made of numbers.
    """
    best = likeliest(logits)
    found: list[Guess | None] = [None] * len(best)
    rows = [row for row, token in enumerate(best) if token is not None]
    greedy = [row for row in rows if contexts[row].sampling.greedy]
    if greedy:
        edited = _edited(_take(logits, greedy), [contexts[row] for row in greedy], [paths[row] for row in greedy])
        top = edited.max(-1)
        confident = (top.values - edited.logsumexp(-1)).exp().tolist()
        for row, token, chance in zip(greedy, top.indices.tolist(), confident, strict=True):
            found[row] = Guess(token, chance)
    drawing = [row for row in rows if not contexts[row].sampling.greedy]
    if drawing:
        q = laws(_take(logits, drawing), [_block(contexts[row], paths[row]) for row in drawing])
        tokens = draw(q, [contexts[row] for row in drawing], [len(paths[row]) for row in drawing])
        for place, (row, token) in enumerate(zip(drawing, tokens, strict=True)):
            found[row] = Guess(token, float(q[place, token]))
    return found


def distributions(logits: Tensor, contexts: Seq[Context], paths: Seq[Seq[int]]) -> list[Guess | None]:
    """As ``guesses``, with the whole distribution behind each row as the guess's q, and nothing drawn.

    It is the request's law as the drafter sees it, or the softmax at temperature 1 for greedy requests. The token is
    the likeliest one and the confidence its probability, so both are known before anything is drawn.
    """
    best = likeliest(logits)
    found: list[Guess | None] = [None] * len(best)
    rows = [row for row, token in enumerate(best) if token is not None]
    for greedy in (True, False):
        own = [row for row in rows if contexts[row].sampling.greedy is greedy]
        if not own:
            continue
        chosen, paths_, taken = [contexts[row] for row in own], [paths[row] for row in own], _take(logits, own)
        if greedy:
            q = softmax(_edited(taken, chosen, paths_), [1.0] * len(own))
        else:
            q = laws(taken, [_block(context, path) for context, path in zip(chosen, paths_, strict=True)])
        for row, token, weights in zip(own, q.argmax(-1).tolist(), q, strict=True):
            found[row] = Guess(token, float(weights[token]), weights)
    return found


def draw(weights: Floats, contexts: Seq[Context], ahead: Seq[int]) -> list[int]:
    """A token from each row of ``weights [R, V]``, with the noise of its sequence's rule ``ahead`` places from now."""
    streams = []
    for context, places in zip(contexts, ahead, strict=True):
        base = len(context.tokens)
        streams.append(Draws(context.seed, base).stream(base + places, context.noise))
    return race(weights, streams)


def _block(context: Context, path: Seq[int]) -> Block:
    return Block(context.sampling, History(context.tokens, context.prompt_len, [path]))


def _take(logits: Tensor, rows: Seq[int]) -> Tensor:
    return logits if len(rows) == len(logits) else logits[list(rows)]


def _edited(logits: Tensor, contexts: Seq[Context], paths: Seq[Seq[int]]) -> Tensor:
    """The logits after penalties, bias and bans, where any request has some."""
    if not any(context.sampling.edits_logits for context in contexts):
        return logits
    blocks = [_block(context, path) for context, path in zip(contexts, paths, strict=True)]
    return torch.cat([edit(logits[row : row + 1], b.params, b.history) for row, b in enumerate(blocks)])
