"""Digests of prompts, and the order of replicas."""

from __future__ import annotations

import pytest

from cospec.cluster.prefix_index import BLOCK, MAX_BLOCKS, PrefixIndex, digests, rank


def test_digests_stand_for_everything_before() -> None:
    prompt = list(range(3 * BLOCK + 5))
    other = [prompt[0] + 1, *prompt[1:]]
    assert len(digests(prompt)) == 3
    assert digests(prompt)[:2] == digests(prompt[: 2 * BLOCK])
    assert not set(digests(prompt)) & set(digests(other))


def test_long_prompts_are_compared_by_their_beginning() -> None:
    assert len(digests(range((MAX_BLOCKS + 3) * BLOCK))) == MAX_BLOCKS


def test_match_counts_leading_blocks_only() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    prompt = digests(range(4 * BLOCK))
    index.insert(prompt[:2], "a")
    index.insert(prompt[1:], "b")
    assert index.matched(prompt, "a") == 2
    assert index.matched(prompt, "b") == 0
    assert index.matched(prompt, "unknown") == 0


def test_ends_of_prompts_are_dropped_before_beginnings() -> None:
    index: PrefixIndex[str] = PrefixIndex(capacity=4)
    old, new = digests(range(3 * BLOCK)), digests(range(1000, 1000 + 3 * BLOCK))
    index.insert(old, "a")
    index.insert(new, "a")
    assert index.matched(new, "a") == 3
    assert index.matched(old, "a") == 1


def test_replicas_that_are_gone_are_forgotten() -> None:
    index: PrefixIndex[str] = PrefixIndex()
    prompt = digests(range(BLOCK))
    for name in "ab":
        index.insert(prompt, name)
    index.keep(["b"])
    assert index.matched(prompt, "a") == 0
    assert index.matched(prompt, "b") == 1


@pytest.mark.parametrize(
    ("matched", "running", "expected"),
    [
        ({"a": 0, "b": 3}, {"a": 0, "b": 2}, ["b", "a"]),
        ({"a": 0, "b": 3}, {"a": 0, "b": 3}, ["a", "b"]),
        ({"a": 1, "b": 1, "c": 4}, {"a": 1, "b": 0, "c": 9}, ["b", "a", "c"]),
        ({}, {}, []),
    ],
    ids=["prefix", "queue too long", "equal prefixes", "none"],
)
def test_prefix_wins_unless_the_queue_is_long(
    matched: dict[str, int], running: dict[str, int], expected: list[str]
) -> None:
    assert rank(matched, running, slack=2) == expected
