"""Texts in the native library draft as the readable ones do: the same nodes and the same confidences."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, FinishReason
from cospec.drafters.lookup import LookupDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.suffix import SuffixDrafter
from cospec.native import library
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")
DRAFTERS: dict[str, Callable[[bool], LookupDrafter]] = {
    "ngram": lambda native: NgramDrafter(2, 4, native=native),
    "any n-gram": lambda native: NgramDrafter(1, 32, native=native),
    "suffix": lambda native: SuffixDrafter(400, 1, native=native),
    "long suffix": lambda native: SuffixDrafter(60, 3, native=native),
}
BUDGETS = (
    DraftBudget(4, 4),
    DraftBudget(9, 3),
    DraftBudget(3, 30),
    DraftBudget(4, 12, widths=(3, 2, 1, 1)),
    DraftBudget(3, 60, threshold=0.2),
    DraftBudget(2, 80, widths=(40, 40)),
    DraftBudget(0, 0),
)


def context(id: str, tokens: list[int], assumed: Sequence[int] = ()) -> DraftContext:
    known = [*tokens, *assumed]
    return DraftContext(id, known, 3, SamplingParams(), 0, StreamKind.TARGET, assumed=len(assumed))


def read(drafts: Sequence[Draft]) -> list[tuple[object, ...]]:
    shares = [None if draft.confidence is None else draft.confidence.tolist() for draft in drafts]
    return [
        (draft.id, draft.base_len, draft.tokens, draft.parents, draft.drafters, own)
        for draft, own in zip(drafts, shares, strict=True)
    ]


@pytest.mark.parametrize("name", list(DRAFTERS))
@pytest.mark.parametrize("words", [1, 3, 40, 1 << 40])
def test_drafts_are_those_of_the_readable_texts(name: str, words: int) -> None:
    """Sequences grow, end and begin; some commits are longer than a text has read."""
    chance = random.Random(words)
    one, other = DRAFTERS[name](False), DRAFTERS[name](True)
    texts, drafted = dict[str, list[int]](), 0
    for turn in range(400):
        id = f"s{turn % 3} {turn // 120}"
        tokens = texts.setdefault(id, [])
        new = [chance.randrange(words) for _ in range(chance.choice([1, 1, 2, 5]))]
        if tokens and chance.random() < 0.5:
            begin = chance.randrange(len(tokens))
            new = tokens[begin : begin + len(new) + 3]
        ended = turn % 120 > 116
        finish = FinishReason.LENGTH if ended else None
        commit = Commit(id, len(tokens), tuple(new), (), len(tokens) + len(new) - 1, finish=finish)
        tokens += new
        for drafter in (one, other):
            drafter.commit([commit])
        if ended:
            for drafter in (one, other):
                drafter.free([id])
            continue
        assumed = new[:1] if name.endswith("gram") and turn % 5 == 0 else ()
        asked = [context(id, tokens, assumed)]
        budget = BUDGETS[turn % len(BUDGETS)]
        expected, found = one.propose(asked, [budget]), other.propose(asked, [budget])
        assert read(found) == read(expected)
        drafted += len(found)
    assert drafted > 50
    assert one.native_lookups is None and other.native_lookups is other


def test_a_subclass_that_drafts_otherwise_drafts_in_python() -> None:
    class Nothing(NgramDrafter):
        def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
            return []

    class Short(NgramDrafter):
        def __init__(self, shortest: int, longest: int) -> None:
            super().__init__(shortest, longest)

    class Same(NgramDrafter):
        drafts_natively = True

    context = cast(Any, SimpleNamespace(native=True))
    kinds: list[tuple[Any, bool]] = [(NgramDrafter, True), (SuffixDrafter, True), (Same, True)]
    for kind, native in [*kinds, (Nothing, False), (Short, False)]:
        made = kind.build(kind.Options(), context)
        assert (made.native_lookups is not None) is native
        assert (made.text("a", 1).address != 0) is native


def test_a_native_call_may_have_read_beyond_the_end_of_a_response() -> None:
    drafter = SuffixDrafter(native=True)
    drafter.text("a", 2).extend([1, 2, 3, 4, 5, 6])
    drafter.commit([Commit("a", 2, (3, 4), (), 3, finish=FinishReason.STOP)])
    drafter.free(["a"])
    assert drafter.propose([context("b", [9, 4])], [DraftBudget(2, 2)]) == []
    (found,) = drafter.propose([context("c", [9, 3])], [DraftBudget(2, 2)])
    assert found.tokens == (4,)
