"""The page accounting under any order of calls, against a plain model of what stands in each page."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cospec.models.block_manager import BlockPool

IDS = st.sampled_from(["a", "b", "c", "d"])
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=13)


class Cache(RuleBasedStateMachine):
    """Sequences that attach, grow, keep and leave, and a store of pages that remembers what was written where."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 3
        self.pool = BlockPool(9, self.size)
        self.cells: dict[tuple[int, int], int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.computed: dict[str, int] = {}
        self.kept: dict[str, int] = {}  # leading tokens that stand in kept pages

    def read(self, id: str, place: int) -> int | None:
        return self.cells.get((self.pool.table(id)[place // self.size], place % self.size))

    @rule(id=IDS, text=TEXTS)
    def open_sequence(self, id: str, text: list[int]) -> None:
        if id in self.tokens:
            return
        found = self.pool.open_sequence(id, text)
        assert found < len(text)
        assert found % self.size == 0
        self.tokens[id], self.computed[id], self.kept[id] = list(text), found, found
        assert [self.read(id, place) for place in range(found)] == text[:found]

    @rule(id=IDS, more=TEXTS)
    def grow(self, id: str, more: list[int]) -> None:
        if id not in self.tokens:
            return
        text = self.tokens[id] + more
        before = list(self.pool.table(id))
        free = self.pool.num_pages * (1 - self.pool.usage)
        if not self.pool.allocate(id, len(text)):
            assert list(self.pool.table(id)) == before
            assert -(-len(text) // self.size) - len(before) > round(free)
            return
        self.tokens[id] = text
        for place in range(self.computed[id], len(text)):
            self.cells[self.pool.table(id)[place // self.size], place % self.size] = text[place]
        self.computed[id] = len(text)

    @rule(id=IDS)
    def cache_blocks(self, id: str) -> None:
        if id in self.tokens and self.computed[id] <= len(self.pool.table(id)) * self.size:
            self.pool.cache_blocks(id, self.tokens[id], self.computed[id])
            self.kept[id] = max(self.kept[id], self.computed[id] // self.size * self.size)

    @rule(id=IDS, back=st.integers(1, 4))
    def reject(self, id: str, back: int) -> None:
        """Computed tokens that were drafts and not kept are overwritten later."""
        if id in self.tokens:
            self.computed[id] = max(self.kept[id], self.computed[id] - back)
            self.tokens[id] = self.tokens[id][: max(self.computed[id], 1)]

    @rule(id=IDS)
    def free(self, id: str) -> None:
        self.pool.free(id)
        self.tokens.pop(id, None)
        self.computed.pop(id, None)
        self.kept.pop(id, None)

    @precondition(lambda self: not self.tokens)
    @rule()
    def nothing_is_held(self) -> None:
        assert self.pool.usage == 0
        assert self.pool.allocate("probe", self.pool.capacity)
        self.pool.free("probe")

    @invariant()
    def contents_are_everybodys_own(self) -> None:
        self.pool.check_integrity()
        for id, text in self.tokens.items():
            assert [self.read(id, place) for place in range(self.computed[id])] == text[: self.computed[id]]


Cache.TestCase.settings = settings(max_examples=60, stateful_step_count=40, derandomize=True)
TestCache = Cache.TestCase


def test_a_prefix_is_found_again_also_while_it_is_in_use() -> None:
    pool = BlockPool(10, 2)
    pool.open_sequence("a", [1, 2, 3, 4, 5])
    pool.allocate("a", 5)
    pool.cache_blocks("a", [1, 2, 3, 4, 5], 5)
    assert pool.open_sequence("b", [1, 2, 3, 4, 5]) == 4
    assert pool.open_sequence("c", [1, 2, 3, 4]) == 2  # the last token is always computed
    assert pool.open_sequence("d", [2, 2, 3, 4, 9]) == 0
    assert pool.table("b")[:2] == pool.table("a")[:2]
    pool.free("a")
    pool.free("b")
    assert pool.open_sequence("e", [1, 2, 3, 4, 9]) == 4


def test_equal_tokens_after_other_tokens_are_another_page() -> None:
    pool = BlockPool(10, 2)
    for id, text in (("a", [1, 2, 7, 7, 0]), ("b", [3, 4, 7, 7, 0])):
        pool.open_sequence(id, text)
        pool.allocate(id, 5)
        pool.cache_blocks(id, text, 5)
    assert pool.table("a")[1] != pool.table("b")[1]
    assert pool.open_sequence("c", [3, 4, 7, 7, 1]) == 4
    assert pool.table("c")[:2] == pool.table("b")[:2]


def test_eviction_order() -> None:
    pool = BlockPool(3, 2)
    pool.allocate("a", 6)
    pool.cache_blocks("a", [1, 2, 3, 4, 5, 6], 6)
    pool.free("a")
    assert pool.allocate("b", 2)
    assert pool.open_sequence("c", [1, 2, 3, 4, 5, 6, 7]) == 4


def test_without_prefix_caching_nothing_is_found() -> None:
    pool = BlockPool(4, 2, prefix_caching=False)
    pool.allocate("a", 4)
    pool.cache_blocks("a", [1, 2, 3, 4], 4)
    pool.free("a")
    assert pool.open_sequence("b", [1, 2, 3, 4]) == 0
    pool.check_integrity()


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    pool = BlockPool(3, 2)
    pool.allocate("a", 3)
    assert not pool.allocate("b", 3)
    assert pool.usage == pytest.approx(2 / 3)
    assert pool.allocate("b", 2)
    assert pool.allocate("a", 1)
    pool.check_integrity()
    for id in ("a", "b", "a", "unknown"):
        pool.free(id)
    assert pool.usage == 0


def test_the_check_sees_what_is_wrong() -> None:
    def held() -> BlockPool:
        pool = BlockPool(4, 2)
        for id in ("a", "b"):
            pool.allocate(id, 3)
        pool.cache_blocks("a", [1, 2, 3], 3)
        pool.check_integrity()
        return pool

    pool = held()
    pool.table("a").append(pool.table("b")[0])
    with pytest.raises(AssertionError):
        pool.check_integrity()
    pool = held()
    pool.table("a").pop()
    with pytest.raises(AssertionError):
        pool.check_integrity()
    pool = held()
    pool.num_pages += 1
    with pytest.raises(AssertionError, match="leaked"):
        pool.check_integrity()
