"""One round of a pool as the native library reads it: ``Board`` in ``csrc/together.h``."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from ctypes import POINTER, Structure, byref, c_int, c_int64, c_long, c_uint64, c_void_p
from functools import cache
from typing import Any

import numpy as np

from cospec import native
from cospec.drafters.pool.record import Knowledge, Seat
from cospec.draws import Floats
from cospec.types import Draft

UNKNOWN = 0.5  # as in ``combiners.job``
_FIELDS = {
    "seats": "reals prior calibrations weights odds first tokens parents raw",
    "guessed": "chances q shares spine length going count out_tokens out_parents out_owners out_confidence",
}


class _Board(Structure):
    """Mirrors the struct of that name."""

    _fields_ = [
        *[(name, c_int64) for name in ("rows", "members", "depth", "room", "steps")],
        *[(name, c_void_p) for head, tail in _FIELDS.items() for name in (head, *tail.split())],
    ]


@cache
def library() -> Any:
    """The native library with the functions that take a board."""
    found, board = native.library(), POINTER(_Board)
    said, mixtures = [c_void_p, c_long, c_void_p], [c_long, c_void_p, c_long]
    signatures: dict[str, list[Any]] = {
        "choose": [c_uint64, c_uint64, c_long, c_void_p, c_void_p], "unite": [c_void_p], "elect": [],
        "fuse": [], "hear": said, "read": [*said, c_void_p], "mix": mixtures, "draw": [*mixtures, c_void_p],
        "lead": [c_void_p, c_long, c_void_p, c_void_p, c_void_p],
        "learn": [c_void_p, c_long, c_void_p, c_long],
    }  # fmt: skip
    for name, arguments in signatures.items():
        function = getattr(found, f"cospec_pool_{name}")
        function.argtypes, function.restype = [board, *arguments], None
    found.cospec_pool_lead.restype = c_int
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


class Shelf:
    """Large arrays that are used again: the system clears new ones, which takes longer than what they are used for."""

    def __init__(self) -> None:
        self.spare: list[Floats] = []

    def take(self, size: int) -> Floats:
        """One with room for so many numbers, which may be any."""
        while self.spare:
            found = self.spare.pop()
            if len(found) >= size:
                return found
        return np.empty(size)


class Board:
    """What everybody says in one round, and what becomes of it. Kept until the round is committed.

    Arrays are as ``csrc/together.h`` says, behind one another in one block of integers and one of other numbers;
    ``place`` counts the rows of this board.

    Args:
        most: ``[R]``, see ``Choice.most``.
        leads: drafters may be led, so that there is to be room for what they say and for the spines.
    """

    def __init__(self, seats: Seq[Seat], most: Seq[int | None], knowledge: Knowledge, leads: bool) -> None:
        self.seats, self.knowledge = seats, knowledge
        rows, members = len(seats), knowledge.members
        self.rows, self.members = rows, members
        self._kept: list[Floats] = []
        words, reals = list[int](), list[float]()
        self.room = depth = 0
        for (_, budget, record, able), count in zip(seats, most, strict=True):
            far, nodes = budget.depth, budget.max_nodes
            words += record.words
            words += (able, record.base, 0 if count is None else count + 1, far, nodes)
            reals += (budget.threshold, record.heat)
            if nodes > self.room:
                self.room = nodes
            if depth < far:
                depth = far
        depth = min(depth, self.room)
        self._words, self._reals = array("Q", words), array("d", reals)
        self.depth = depth = depth if leads else 0
        cells, said = rows * members, 2 * rows * members * depth
        made, room = rows * (1 + 3 * self.room), rows * self.room
        # [R + 3 R room] what is made, [M, R] how far each is asked, [2, R] states, [R, D] spines, [D, M, R, 2] tokens
        self._asked, self._state = made, made + cells
        self.spine_at = self._state + 2 * rows
        self.guessed_at = self.spine_at + rows * depth
        self.ints, self.floats = ints(self.guessed_at + said), floats(2 * cells + room + said)
        self.chances_at = 2 * cells + room
        first, real = at(self.ints), at(self.floats)
        self.asked_at = first + 8 * made
        led = first + 8 * self.guessed_at if leads else 0
        held = (
            rows, members, depth, self.room, 0,
            at(self._words), at(self._reals), knowledge.prior.address, knowledge.address,
            real, real + 8 * cells, 0, 0, 0, 0,
            led, real + 8 * self.chances_at, 0, 0,
            first + 8 * self.spine_at, first + 8 * self._state, first + 8 * (self._state + rows),
            first, first + 8 * rows, first + 8 * (rows + room), first + 8 * (rows + 2 * room), real + 16 * cells,
        )  # fmt: skip
        self.c = _Board.from_buffer(array("q", held))  # quicker than to set one field after the other
        self.ref = byref(self.c)

    _shelf: Shelf

    def asked(self) -> list[list[int]]:
        """``[M][R]``, how far each drafter is to draft."""
        rows = self.rows
        flat = self.ints[self._asked : self._asked + rows * self.members].tolist()
        return [flat[place : place + rows] for place in range(0, len(flat), rows)]

    def give(self, given: Seq[dict[int, Draft]]) -> None:
        """Whole drafts by sequence and drafter."""
        first, tokens, parents, confident = [0], list[int](), list[int](), False
        drafts: list[Draft] = []
        members = range(self.members)
        for own in given:
            for member in members:
                if member in own:
                    draft = own[member]
                    tokens += draft.tokens
                    parents += draft.parents
                    confident = confident or draft.confidence is not None
                    drafts.append(draft)
                first.append(len(tokens))
        nodes = len(tokens)
        base = len(first)
        self._texts = array("q", first + tokens + parents)
        start, c = at(self._texts), self.c
        c.first, c.tokens, c.parents = start, start + 8 * base, start + 8 * (base + nodes)
        if confident:
            raw = [[UNKNOWN] * len(d.tokens) if d.confidence is None else d.confidence.tolist() for d in drafts]
            self._raw = array("d", [each for own in raw for each in own])
            c.raw = at(self._raw)

    def mix(self, shelf: Shelf, draws: bool) -> None:
        """Room for shares, and for distributions, which lie on arrays from the shelf, where any sequence has some."""
        cells = self.depth * self.members * self.rows
        self._parts = floats(cells)
        self._shelf, self.c.shares = shelf, at(self._parts)
        if draws:
            self.laws = array("Q", bytes(8 * cells))
            self.c.q = at(self.laws)

    def rows_of(self, count: int) -> Floats:
        """Room for so many numbers, until the board is gone."""
        found = self._shelf.take(count)
        self._kept.append(found)
        return found[:count]

    def __del__(self) -> None:
        if self._kept:
            self._shelf.spare += self._kept

    def place_of(self, member: int, row: int) -> int:
        """Where a drafter's word about a sequence stands at the present step, in ``[D, M, R]``."""
        return int((self.c.steps * self.members + member) * self.rows + row)

    def path(self, row: int) -> list[int]:
        """The spine so far."""
        first = self.spine_at + row * self.depth
        return self.ints[first : first + self.ints[self._state + row]].tolist()

    def paths(self, counts: Seq[int]) -> list[list[int]]:
        """The first ``counts [R]`` tokens of each spine."""
        depth, flat = self.depth, self.ints[self.spine_at : self.guessed_at].tolist()
        return [flat[row * depth : row * depth + count] for row, count in enumerate(counts)]

    def going(self) -> list[int]:
        """The rows whose spines go on."""
        first = self._state + self.rows
        return [row for row, on in enumerate(self.ints[first : first + self.rows]) if on]

    def fed(self) -> dict[int, int]:
        """The newest token of the spines that go on, by row."""
        held, first, rows = self.ints, self._state, self.rows
        states, depth, spine = held[first : first + 2 * rows].tolist(), self.depth, self.spine_at - 1
        return {row: held[spine + row * depth + states[row]] for row in range(rows) if states[rows + row]}

    def drafts(self, names: Seq[str], branches: bool) -> list[Draft]:
        """What was made, of the rows that anything was made for; chains unless it ``branches``."""
        found, room, size = [], self.room, self.rows * self.room
        made, start, name = self.ints[: self._asked].tolist(), self.rows, names.__getitem__
        first = 2 * self.rows * self.members
        sure = np.array(self.floats[first : first + size])
        for (context, _, record, _), count in zip(self.seats, made, strict=False):
            if count:
                end = start + count
                found.append(
                    Draft(
                        context.id,
                        record.base,
                        tuple(made[start:end]),
                        tuple(made[start + size : end + size]) if branches else straight(count),
                        tuple(map(name, made[start + 2 * size : end + 2 * size])),
                        None,
                        sure[start - self.rows : end - self.rows],
                    )
                )
            start += room
        return found
