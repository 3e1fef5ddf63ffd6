"""Token trees as parent lists: attention between nodes, depths, and paths.

``parents[i]`` is the index of node ``i``'s parent, -1 for the root; parents come before children.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

MAX_NODES = 64  # one machine word of ancestor bits per node


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """Bit ``j`` of entry ``i`` is set when node ``j`` is node ``i`` or above it: the tree's attention mask.

    Raises:
        ValueError: a parent does not come before its child, or the tree has more than ``MAX_NODES`` nodes.
    """
    if len(parents) > MAX_NODES:
        raise ValueError(f"the tree has {len(parents)} nodes; allowed is at most {MAX_NODES}")
    bits: list[int] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            raise ValueError(f"node {node} has parent {parent}; allowed is an earlier node, or -1 for the root")
        bits.append((bits[parent] if parent >= 0 else 0) | (1 << node))
    return bits


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node, 1 for children of the root: its distance after the last committed token."""
    result: list[int] = []
    for parent in parents:
        result.append(result[parent] + 1 if parent >= 0 else 1)
    return result


@cache
def chain(nodes: int) -> tuple[int, ...]:
    """The parents of a chain."""
    return tuple(range(-1, nodes - 1))


def is_chain(parents: Sequence[int]) -> bool:
    """Whether every node continues the one before it, so that plain causal attention serves."""
    return tuple(parents) == chain(len(parents))


def path_to(parents: Sequence[int], node: int) -> list[int]:
    """Nodes from a child of the root down to ``node``; empty for the root itself (-1)."""
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = parents[node]
    return path[::-1]


def children(parents: Sequence[int], node: int) -> list[int]:
    """Children of ``node`` (-1: of the root) in order."""
    return [child for child, parent in enumerate(parents) if parent == node]


def sibling_ranks(parents: Sequence[int], path: Sequence[int]) -> tuple[int, ...]:
    """Return the place of each node of ``path`` among its siblings; empty for a chain."""
    if is_chain(parents):
        return ()
    return tuple([list(parents[:node]).count(parents[node]) for node in path])


def level_nodes(widths: Sequence[int], depth: int) -> int:
    """Return the number of nodes of a tree with ``depth`` levels.

    Each node of level ``i`` has ``widths[i]`` children, or one child after the end of ``widths``; the root is level 0.
    """
    total, level = 0, 1
    for number in range(depth):
        level *= widths[number] if number < len(widths) else 1
        total += level
    return total
