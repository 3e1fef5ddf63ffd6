"""Slices of drafts: what is below a path, some nodes alone, and a draft with known tokens before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cospec.core.tree import children
from cospec.core.types import Draft


def after(draft: Draft, tokens: Sequence[int]) -> Draft | None:
    """Return what follows ``tokens`` in a draft; None if the draft has other tokens, or ends with these."""
    top = -1
    for token in tokens:
        found = [child for child in children(draft.parents, top) if draft.tokens[child] == token]
        if not found:
            return None
        top = found[0]
    return below(draft, top, draft.base_len + len(tokens))


def below(draft: Draft, top: int, base: int) -> Draft | None:
    """Return the nodes below ``top`` as a draft after ``base`` tokens; None if there are none."""
    place = {top: -1}
    for node, parent in enumerate(draft.parents):
        if parent in place:
            place[node] = len(place) - 1
    del place[top]
    kept = list(place)
    return part(draft, kept, tuple(place.get(draft.parents[node], -1) for node in kept), base) if kept else None


def cut(draft: Draft, kept: Sequence[int]) -> Draft:
    """Return the nodes ``kept``, which are in order and closed under parents."""
    place = {-1: -1} | {node: at for at, node in enumerate(kept)}
    return part(draft, kept, tuple([place[draft.parents[node]] for node in kept]), draft.base_len)


def part(draft: Draft, kept: Sequence[int], parents: tuple[int, ...], base: int) -> Draft:
    """Return the nodes ``kept`` of a draft with their new ``parents``, after ``base`` tokens."""
    return replace(
        draft,
        base_len=base,
        tokens=tuple(draft.tokens[node] for node in kept),
        parents=parents,
        drafters=tuple(draft.drafters[node] for node in kept),
        q=None if draft.q is None else draft.q[list(kept)],
        confidence=None if draft.confidence is None else draft.confidence[list(kept)],
    )


def begun(draft: Draft, tokens: Sequence[int]) -> Draft:
    """Return a draft that begins with the ``tokens`` before it; for methods that do not read q."""
    count = len(tokens)
    return replace(
        draft,
        base_len=draft.base_len - count,
        tokens=(*tokens, *draft.tokens),
        parents=(*range(-1, count - 1), *[parent + count if parent >= 0 else count - 1 for parent in draft.parents]),
        drafters=(*draft.drafters[:1] * count, *draft.drafters),
        q=None,
        confidence=None if draft.confidence is None else np.concatenate([np.ones(count), draft.confidence]),
    )
