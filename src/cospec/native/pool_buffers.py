"""One round of a pool as the native library reads it: ``PoolBatchStruct`` in ``csrc/spec/pool_batch.h``."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from ctypes import POINTER, byref, c_int, c_long, c_uint64, c_void_p, sizeof
from functools import cache
from typing import Any

import numpy as np

from cospec.core.rng import Floats
from cospec.core.types import Draft
from cospec.drafters.pool.state import DraftTask, Given, PoolStats
from cospec.native import library
from cospec.native.structs import DraftTaskStruct, PoolBatchStruct, packer

UNKNOWN = 0.5  # as in ``drafters.pool.combiners.combine``


@cache
def pool_cdll() -> Any:
    """The native library with the functions that take a board."""
    found, board = library.cdll(), POINTER(PoolBatchStruct)
    said, mixtures = [c_void_p, c_long, c_void_p], [c_long, c_void_p, c_long]
    signatures: dict[str, list[Any]] = {
        "route": [c_uint64, c_uint64, c_long, c_void_p, c_void_p], "union": [c_void_p], "vote": [], "fuse": [],
        "read_candidates": said, "read_distributions": [*said, c_void_p],
        "mix": mixtures, "sample": [*mixtures, c_void_p],
        "lockstep": [c_void_p, c_long, c_void_p, c_void_p, c_void_p],
        "feedback": [c_void_p, c_long, c_long],
    }  # fmt: skip
    for name, arguments in signatures.items():
        function = getattr(found, f"cospec_pool_{name}")
        function.argtypes, function.restype = [board, *arguments], None
    found.cospec_pool_lockstep.restype = c_int
    return found


def at(held: array[Any]) -> int:
    """Where an array lies."""
    return held.buffer_info()[0]


def ints(count: int) -> array[int]:
    """So many zeros."""
    return array("q", bytes(8 * count))


def floats(count: int) -> array[float]:
    """So many zeros."""
    return array("d", bytes(8 * count))


@cache
def straight(nodes: int) -> tuple[int, ...]:
    """The parents of a chain."""
    return tuple(range(-1, nodes - 1))


class NativeArray:
    """Where one board after the other lies, all of the same ``shape``: rows, depth, room.

    Arrays are as ``csrc/spec/pool_batch.h`` says, behind one another in one block of integers and one of other numbers.
    Large ones grow as they are asked for: the system clears new memory, which takes longer than what it is used for.
    """

    def __init__(self, shape: tuple[int, int, int], pool_stats: PoolStats) -> None:
        self.shape = rows, depth, room = shape
        members = pool_stats.members
        cells = rows * members
        # [R + 3 R room] what is made, [M, R] how far each is asked, [2, R] states, [R, D] spines,
        # [R, M, 2] spans, [D, M, R, 2] tokens, [D, M, R] distributions
        self.asked = rows * (1 + 3 * room)
        self.state = self.asked + cells
        self.spine = self.state + 2 * rows
        self.spans = self.spine + rows * depth
        self.guessed = self.spans + 2 * cells
        self.probs = self.guessed + 2 * depth * cells
        # [2, R, M] weights and odds, [R, room] confidences, [D, M, R, 2] of guesses, [R, D, M] shares
        self.chances = 2 * cells + rows * room
        self.ints, self.floats = ints(self.probs + depth * cells), floats(self.chances + 3 * depth * cells)
        self.draft_tasks, self.draft_task = bytearray(sizeof(DraftTaskStruct) * rows), packer(DraftTaskStruct, rows)
        self.confidence = np.frombuffer(self.floats)[2 * cells : self.chances]
        self._seats = np.frombuffer(self.draft_tasks, np.uint8)
        self._large: dict[str, tuple[Floats, int]] = {}
        first, real, made = at(self.ints), at(self.floats), rows * room
        self.asked_at = first + 8 * self.asked
        held = (
            rows, members, depth, room, 0,
            library.address(self._seats), pool_stats.prior.address, pool_stats.address, real, real + 8 * cells,
            first + 8 * self.spans, 0, 0, 0,
            first + 8 * self.guessed, real + 8 * self.chances, first + 8 * self.probs,
            real + 8 * (self.chances + 2 * depth * cells),
            first + 8 * self.spine, first + 8 * self.state, first + 8 * (self.state + rows),
            first, first + 8 * rows, first + 8 * (rows + made), first + 8 * (rows + 2 * made), real + 16 * cells,
        )  # fmt: skip
        self.c = PoolBatchStruct.from_buffer(array("q", held))
        self.ref = byref(self.c)

    def large(self, name: str, count: int) -> tuple[Floats, int]:
        """Room for so many numbers at least, which may be any, and where it is."""
        found = self._large.get(name)
        if found is None or len(found[0]) < count:
            made = np.empty(count)
            found = self._large[name] = made, library.address(made)
        return found


class BufferPool:
    """Spaces that no board lies on."""

    def __init__(self, pool_stats: PoolStats) -> None:
        self.pool_stats = pool_stats
        self._spare: list[NativeArray] = []

    def take(self, shape: tuple[int, int, int]) -> NativeArray:
        """One of that shape; those of other shapes make way."""
        while self._spare:
            found = self._spare.pop()
            if found.shape == shape:
                return found
        return NativeArray(shape, self.pool_stats)

    def give_back(self, space: NativeArray) -> None:
        """Nobody needs what is on it."""
        self._spare.append(space)


class PoolBuffers:
    """What everybody says in one round, and what becomes of it. Kept until the round is committed.

    ``place`` counts the rows of this board.

    Args:
        leads: drafters may be led, so that there is to be room for what they say and for the spines.
    """

    def __init__(self, draft_tasks: Sequence[DraftTask], buffer_pool: BufferPool, leads: bool) -> None:
        self.draft_tasks, self._buffer_pool = draft_tasks, buffer_pool
        self.rows, self.members = len(draft_tasks), buffer_pool.pool_stats.members
        words, room, depth = list[float](), 0, 0
        for _, budget, record, able, most in draft_tasks:
            far, nodes = budget.depth, budget.max_nodes
            words += record.words
            words += (able, record.base, 0 if most is None else most + 1, far, nodes, budget.threshold)
            if nodes > room:
                room = nodes
            if depth < far:
                depth = far
        self.depth = depth = min(depth, room) if leads else 0
        self._held: list[Floats] = []
        self.space = space = buffer_pool.take((self.rows, depth, room))
        space.draft_task.pack_into(space.draft_tasks, 0, *words)
        self.c, self.ref = space.c, space.ref

    def __del__(self) -> None:
        self._buffer_pool.give_back(self.space)

    def asked(self) -> list[list[int]]:
        """``[M][R]``, how far each drafter is to draft."""
        rows, space = self.rows, self.space
        flat = space.ints[space.asked : space.state].tolist()
        return [flat[place : place + rows] for place in range(0, len(flat), rows)]

    def give(self, given: Sequence[Given]) -> None:
        """Whole drafts."""
        tokens, parents, confident = list[int](), list[int](), False
        held, spans, members = self.space.ints, self.space.spans, self.members
        for row, member, draft in given:
            span = spans + 2 * (row * members + member)
            held[span], held[span + 1] = len(tokens), len(draft.tokens)
            tokens += draft.tokens
            parents += draft.parents
            confident = confident or draft.confidence is not None
        nodes, c = len(tokens), self.c
        tokens += parents
        self._texts = array("q", tokens)
        c.tokens = start = at(self._texts)
        c.parents = start + 8 * nodes
        if confident:
            raw = [[UNKNOWN] * len(d.tokens) if d.confidence is None else d.confidence.tolist() for *_, d in given]
            self._raw = array("d", [each for own in raw for each in own])
            c.raw_confidence = at(self._raw)

    def hold(self, place: int, probs: Floats) -> None:
        """A distribution that was read elsewhere."""
        self._held.append(probs)
        self.space.ints[self.space.probs + place] = library.address(probs)

    def place_of(self, member: int, row: int) -> int:
        """Where a drafter's word about a sequence stands at the present step, in ``[D, M, R]``."""
        return int((self.c.steps * self.members + member) * self.rows + row)

    def path(self, row: int) -> list[int]:
        """The spine so far."""
        space = self.space
        first = space.spine + row * self.depth
        return space.ints[first : first + space.ints[space.state + row]].tolist()

    def paths(self, counts: Sequence[int]) -> list[list[int]]:
        """The first ``counts [R]`` tokens of each spine."""
        depth, space = self.depth, self.space
        flat = space.ints[space.spine : space.spans].tolist()
        return [flat[row * depth : row * depth + count] for row, count in enumerate(counts)]

    def going(self) -> list[int]:
        """The rows whose spines go on."""
        first = self.space.state + self.rows
        return [row for row, on in enumerate(self.space.ints[first : first + self.rows]) if on]

    def fed(self) -> dict[int, int]:
        """The newest token of the spines that go on, by row."""
        held, first, rows = self.space.ints, self.space.state, self.rows
        states, depth, spine = held[first : first + 2 * rows].tolist(), self.depth, self.space.spine - 1
        return {row: held[spine + row * depth + states[row]] for row in range(rows) if states[rows + row]}

    def drafts(self, names: Sequence[str], branches: bool, q: Floats | None = None) -> list[Draft]:
        """What was made, of the rows that anything was made for; chains unless it ``branches``.

        ``q [R, D, V]`` is of the sequences that draw from one of their own.
        """
        found, rows, space = [], self.rows, self.space
        room = space.shape[2]
        size, end = rows * room, space.asked
        counts, tokens = space.ints[:rows].tolist(), space.ints[rows : rows + size].tolist()
        parents = space.ints[rows + size : end - size].tolist() if branches else []
        owners, sure = list(map(names.__getitem__, space.ints[end - size : end])), space.confidence.copy()
        start = 0
        for row, count in enumerate(counts):
            if count:
                context, _, record, _, _ = self.draft_tasks[row]
                end = start + count
                found.append(
                    Draft(
                        context.id,
                        record.base,
                        tuple(tokens[start:end]),
                        tuple(parents[start:end]) if branches else straight(count),
                        tuple(owners[start:end]),
                        q[row, :count] if q is not None and record.keeps else None,
                        sure[start:end],
                    )
                )
            start += room
        return found
