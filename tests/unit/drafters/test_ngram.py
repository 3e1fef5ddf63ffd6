"""Prompt lookup against a search through everything."""

from __future__ import annotations

import random

import pytest

from cospec.core.types import DraftBudget, DraftContext
from cospec.drafters.ngram import NgramDrafter, NgramOptions
from cospec.errors import InvalidInput
from cospec.plugin_options import parse
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams


def context(tokens: list[int], id: str = "s") -> DraftContext:
    return DraftContext(id, tokens, 1, SamplingParams(), 0, StreamKind.DRAFT)


def searched(tokens: list[int], shortest: int, longest: int, depth: int) -> tuple[int, ...]:
    """What followed the latest earlier occurrence of the longest suffix that occurred before, round at the end."""
    for size in range(longest, shortest - 1, -1):
        if size >= len(tokens):
            continue
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                grown = list(tokens)
                for place in range(depth):
                    grown.append(grown[start + size + place])
                return tuple(grown[len(tokens) :])
    return ()


@pytest.mark.parametrize(("shortest", "longest"), [(1, 1), (1, 3), (2, 4), (3, 3)])
@pytest.mark.parametrize("words", [1, 2, 5])
def test_the_longest_suffix_and_its_latest_occurrence(shortest: int, longest: int, words: int) -> None:
    """Asked at irregular times while the sequence grows, so that the index must catch up."""
    chance = random.Random(words * 10 + longest)
    drafter = NgramDrafter(shortest, longest)
    tokens = [chance.randrange(words)]
    found_any = False
    for _ in range(300):
        tokens += [chance.randrange(words) for _ in range(chance.choice([1, 1, 2, 5]))]
        if chance.random() < 0.6:
            depth = chance.randrange(0, 6)
            found = drafter.propose([context(tokens)], [DraftBudget(depth, depth)])
            wanted = searched(tokens, shortest, longest, depth)
            assert [draft.tokens for draft in found] == ([wanted] if wanted else [])
            for draft in found:
                found_any = True
                assert (draft.base_len, draft.q, draft.is_chain) == (len(tokens), None, True)
                assert draft.parents[0] == -1
    assert found_any


def test_periodic_text_is_drafted_as_far_as_asked() -> None:
    (draft,) = NgramDrafter(1, 3).propose([context([9, 1, 2, 1, 2, 1, 2])], [DraftBudget(7, 7)])
    assert draft.tokens == (1, 2, 1, 2, 1, 2, 1)


def test_sequences_do_not_see_each_other() -> None:
    drafter = NgramDrafter(1, 2)
    budgets = [DraftBudget(3, 3)] * 2
    found = drafter.propose([context([1, 2, 1], "a"), context([3, 4, 5], "b")], budgets)
    assert [(draft.id, draft.tokens) for draft in found] == [("a", (2, 1, 2))]
    drafter.free(["a", "unknown"])
    assert drafter.propose([context([1, 5], "a")], budgets[:1]) == []


def test_the_bounds_are_checked_together() -> None:
    with pytest.raises(InvalidInput, match=r"^prompt_lookup_min is 5; allowed is at most prompt_lookup_max, here 3\.$"):
        parse(NgramOptions, {"prompt_lookup_min": 5, "prompt_lookup_max": 3})
    with pytest.raises(InvalidInput, match=r"^prompt_lookup_min is 2; allowed is at most prompt_lookup_max, here 1\.$"):
        parse(NgramOptions, {"prompt_lookup_max": 1})
