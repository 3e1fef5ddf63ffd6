"""The suffix automaton against counting by hand, what it proposes, and what it forgets."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, FinishReason
from cospec.drafters.suffix import LONGEST, ROOT, SharedResponses, SuffixAutomaton, SuffixDrafter
from cospec.native import library, lookups
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)
NATIVE = pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")


def built(*texts: Sequence[int]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        for token in text:
            automaton.add(token)
        automaton.cut()
    return automaton


def occurrences(texts: Sequence[Sequence[int]], words: Sequence[int]) -> int:
    n = len(words)
    return sum(list(text[i : i + n]) == list(words) for text in texts for i in range(len(text) - n + 1))


def state_of(automaton: SuffixAutomaton, words: Sequence[int]) -> int | None:
    state = ROOT
    for word in words:
        if word not in automaton.next[state]:
            return None
        state = automaton.next[state][word]
    return state


@pytest.mark.parametrize("seed", range(8))
def test_every_substring_is_counted(seed: int) -> None:
    chance = random.Random(seed)
    texts = [[chance.randrange(2 + seed % 3) for _ in range(chance.randrange(1, 40))] for _ in range(3)]
    texts.append([0] * 50)
    automaton = built(*texts)
    for text in texts:
        for start in range(len(text)):
            for end in range(start + 1, min(len(text), start + LONGEST) + 1):
                state = state_of(automaton, text[start:end])
                assert state is not None
                assert automaton.count[state] == occurrences(texts, text[start:end]), text[start:end]
    for _ in range(200):
        words = [chance.randrange(3) for _ in range(chance.randrange(1, 7))]
        assert (state_of(automaton, words) is not None) == (occurrences(texts, words) > 0)


@pytest.mark.parametrize("seed", range(6))
def test_matches_are_the_longest_suffixes(seed: int) -> None:
    chance = random.Random(seed)
    text = [chance.randrange(2) for _ in range(60)]
    automaton = SuffixAutomaton()
    for known, token in enumerate(text, start=1):
        automaton.add(token)
        earlier = [n for n in range(known) if occurrences([text[:known]], text[known - n : known]) > 1 or n == 0]
        assert automaton.own_match().length == min(max(earlier), LONGEST)
    other = [chance.randrange(3) for _ in range(20)]
    found = automaton.match(other)
    assert found.length == max(n for n in range(21) if n == 0 or occurrences([text], other[20 - n :]))


def draft(drafter: SuffixDrafter, tokens: list[int], budget: DraftBudget, id: str = "s") -> Draft | None:
    found = drafter.propose([DraftContext(id, tokens, len(tokens), GREEDY, 0, StreamKind.TARGET)], [budget])
    return found[0] if found else None


def test_it_goes_on_as_the_longest_match_did() -> None:
    found = draft(SuffixDrafter(), [5, 1, 2, 3, 4, 9, 2, 7, 7, 1, 2], DraftBudget(4, 4))
    assert found is not None
    assert found.tokens == (3, 4, 9, 2)
    assert found.parents == (-1, 0, 1, 2)
    assert found.q is None
    assert found.confidence is not None
    assert found.confidence[0] == pytest.approx(2 / 3)
    assert (found.confidence[1:] > found.confidence[:-1]).all(), "a longer match is trusted more"


def test_a_chain_follows_the_most_frequent_and_a_tree_all() -> None:
    text = [1, 2, 0, 1, 3, 0, 1, 3, 4, 1]
    chain = draft(SuffixDrafter(), text, DraftBudget(1, 1))
    assert chain is not None
    assert chain.tokens == (3,)
    tree = draft(SuffixDrafter(), text, DraftBudget(2, 5))
    assert tree is not None
    assert [tree.tokens[n] for n in range(len(tree)) if tree.parents[n] == -1] == [3, 2]
    assert tree.confidence is not None
    assert tree.confidence[:1] == pytest.approx([2 / 3 * 1 / 2])
    narrow = draft(SuffixDrafter(), text, DraftBudget(2, 5, widths=(1, 2)))
    assert narrow is not None
    assert [narrow.tokens[n] for n in range(len(narrow)) if narrow.parents[n] == -1] == [3]


def test_the_likeliest_nodes_come_first_within_the_budget() -> None:
    chance = random.Random(3)
    text = [chance.randrange(3) for _ in range(200)]
    whole, part = draft(SuffixDrafter(), text, DraftBudget(3, 60)), draft(SuffixDrafter(), text, DraftBudget(3, 7))
    assert whole is not None
    assert part is not None
    assert part.tokens == whole.tokens[:7]
    assert part.depth <= 3
    assert draft(SuffixDrafter(), text, DraftBudget(3, 7, threshold=0.9)) is None


def test_ended_responses_help_later_requests() -> None:
    drafter = SuffixDrafter()
    text = [1, 2, 3]
    assert draft(drafter, text, DraftBudget(2, 2), "a") is None
    drafter.commit([Commit("a", 3, (4, 5, 6, 7), (), 6, finish=FinishReason.STOP)])
    drafter.free(["a"])
    found = draft(drafter, [9, 8, 4, 5], DraftBudget(2, 2), "b")
    assert found is not None
    assert found.tokens == (6, 7)
    assert draft(drafter, [9, 8, 1, 2], DraftBudget(2, 2), "c") is None, "prompts are not shared"


@pytest.mark.parametrize("native", [False, pytest.param(True, marks=NATIVE)])
def test_memory_is_bounded_and_the_oldest_goes_first(native: bool) -> None:
    responses = lookups.NativeResponses if native else SharedResponses
    shared = responses(40)

    def matched(end: Sequence[int]) -> int:
        text = shared.new_text(0, 1)
        text.extend(end)
        return len(text.propose((), DraftBudget(9, 9)).tokens)

    def add(tokens: Sequence[int]) -> None:
        text = shared.new_text(0, 1)
        text.extend(tokens)
        shared.add(text, 0, len(tokens))

    for n in range(30):
        add([100 * n + k for k in range(7)])
        assert shared.size <= 60
    assert matched([2900, 2901]) == 5
    assert matched([0, 1]) == 0
    add(range(10_000, 10_100))
    assert shared.size <= 60 and matched([10_097, 10_098]) == 1 and matched([10_001, 10_002]) == 0
    none = SuffixDrafter(memory=0, native=native)
    draft(none, [1, 2], DraftBudget(1, 1), "a")
    none.commit([Commit("a", 2, (3, 4), (), 3, finish=FinishReason.STOP)])
    none.free(["a"])
    assert draft(none, [3], DraftBudget(1, 1), "b") is None
