"""Simulated drafts after all outcomes of a verification, see ``DraftBudget.outcomes``.

A branch whose first token is wrong is never used, so such branches end with that token. They take time all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cospec.core.plugin_base import base_of
from cospec.core.types import Draft, DraftBudget, DraftContext

Guess = tuple[int, float]
"""A token, and the drafter's confidence in the token."""


def outcome_draft(
    context: DraftContext,
    budget: DraftBudget,
    name: str,
    output: Sequence[int],
    guesses: Callable[[int, int | None], Sequence[Guess]],
    chain: Callable[[int, int], Sequence[Guess]],
) -> Draft:
    """Return the draft of a drafter that knows the tokens of an output.

    Args:
        output: all tokens that the target will have written.
        guesses: guesses of the token after a number of output tokens, the given token first where there is one.
        chain: the chain after a number of right output tokens, and its length at most.
    """
    base = base_of(context, budget)
    place, given = base - context.prompt_len, context.tokens[base:]
    tokens, parents, confidence = list(given), list(range(-1, len(given) - 1)), [0.0] * len(given)
    for number in range(len(given) + 1):
        at = place + number
        if at >= len(output) or tuple(given[:number]) != tuple(output[place:at]):
            break
        for token, sure in guesses(at, given[number] if number < len(given) else None):
            if number < len(given) and token == given[number]:
                confidence[number] = sure
                continue
            below = chain(at + 1, budget.depth - 1) if token == output[at] else ()
            first = len(tokens)
            parents += [number - 1, *range(first, first + len(below))]
            tokens += [token, *[each for each, _ in below]]
            confidence += [sure, *[chance for _, chance in below]]
    return Draft(context.id, base, tuple(tokens), tuple(parents), (name,) * len(tokens), None, np.array(confidence))


def branches(context: DraftContext, budget: DraftBudget) -> int:
    """Return the branches that a drafter drafts at most, the continuation of the given tokens included."""
    given = len(context.tokens) - base_of(context, budget)
    return min((given + 1) * (budget.widths[0] if budget.widths else 1), -(-budget.max_nodes // budget.depth))
