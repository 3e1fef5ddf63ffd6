"""One round of a pool as the native library reads it: ``Board`` in ``csrc/together.h``."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from ctypes import POINTER, Structure, byref, c_double, c_int64, c_long, c_uint64, c_void_p
from functools import cache
from typing import Any

import numpy as np

from cospec import native
from cospec.drafters.pool.record import Knowledge, Seat
from cospec.draws import Draws, Floats
from cospec.types import Draft

UNKNOWN = 0.5  # as in ``combiners.job``
_FIELDS = {
    "standings": "prior calibrations greedy depths nodes thresholds weights odds first tokens parents raw",
    "heats": "streams",
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
    rows = [c_long, c_void_p, c_long, c_void_p, c_long]
    signatures: dict[str, list[Any]] = {
        "weigh": [], "choose": [c_void_p, c_uint64, c_void_p, c_double],
        "allot": [c_uint64, c_uint64, c_void_p, c_void_p], "unite": [c_void_p], "elect": [], "fuse": [],
        "hear": rows, "read": [*rows, c_void_p],
        "mix": [c_long, c_void_p], "take": [], "learn": [c_void_p, c_long, c_void_p, c_void_p, c_void_p],
    }  # fmt: skip
    for name, arguments in signatures.items():
        function = getattr(found, f"cospec_pool_{name}")
        function.argtypes, function.restype = [board, *arguments], None
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

    Arrays are as ``csrc/together.h`` says; ``place`` counts the rows of this board.
    """

    def __init__(self, seats: Seq[Seat], knowledge: Knowledge) -> None:
        self.seats, self.knowledge = seats, knowledge
        self.rows, self.members = len(seats), knowledge.members
        self.drafted = 0  # nodes of all whole drafts
        self._kept: list[Floats] = []
        rows, budgets = self.rows, [seat.budget for seat in seats]
        self.depths = [min(budget.depth, budget.max_nodes) for budget in budgets]
        self.room = max([budget.max_nodes for budget in budgets])
        self._limits = array("q", [seat.context.sampling.greedy for seat in seats])
        self._limits.extend([budget.depth for budget in budgets])
        self._limits.extend([budget.max_nodes for budget in budgets])
        self._thresholds = array("d", [budget.threshold for budget in budgets])
        self._standings = array("Q", [seat.record.standing.address for seat in seats])
        self._shares = floats(2 * rows * self.members)
        first, shares = at(self._limits), at(self._shares)
        self.c = _Board(
            rows, self.members, 0, self.room, 0, at(self._standings),
            knowledge.prior.address, knowledge.address, first, first + 8 * rows, first + 16 * rows,
            at(self._thresholds), shares, shares + 8 * rows * self.members,
        )  # fmt: skip
        self.ref = byref(self.c)

    shares: list[list[float]]
    _shelf: Shelf

    def weights(self) -> list[list[float]]:
        """``[R][M]``, as they stand."""
        flat, members = self._shares[: self.rows * self.members].tolist(), self.members
        return [flat[place : place + members] for place in range(0, len(flat), members)]

    def whole_depths(self) -> list[list[int]]:
        """``[R][M]``, all the way for those that take part."""
        pairs = zip(self.shares, self.depths, strict=True)
        return [[depth if weight else 0 for weight in own] for own, depth in pairs]

    def set_weights(self, place: int, weights: Seq[float]) -> None:
        """Those of one sequence, ``[M]``."""
        self._shares[place * self.members : (place + 1) * self.members] = array("d", weights)

    def give(self, given: Seq[dict[int, Draft]]) -> None:
        """Whole drafts by sequence and drafter, and room for what is made of everything."""
        first, tokens, parents, confident = [0], list[int](), list[int](), False
        drafts: list[Draft] = []
        for own in given:
            for member in range(self.members):
                draft = own.get(member) if own else None
                if draft is not None:
                    tokens += draft.tokens
                    parents += draft.parents
                    confident = confident or draft.confidence is not None
                    drafts.append(draft)
                first.append(len(tokens))
        nodes, self.drafted = first[-1], first[-1]
        self._texts = array("q", first + tokens + parents)
        base = at(self._texts)
        self.c.first, self.c.tokens = base, base + 8 * len(first)
        self.c.parents = base + 8 * (len(first) + nodes)
        if confident:
            raw = [[UNKNOWN] * len(d.tokens) if d.confidence is None else d.confidence.tolist() for d in drafts]
            self._raw = array("d", [each for own in raw for each in own])
            self.c.raw = at(self._raw)
        self._made, self._sure = ints(self.rows * (1 + 3 * self.room)), floats(self.rows * self.room)
        made, size = at(self._made), 8 * self.rows * self.room
        self.c.count, self.c.out_tokens = made, made + 8 * self.rows
        self.c.out_parents, self.c.out_owners = self.c.out_tokens + size, self.c.out_tokens + 2 * size
        self.c.out_confidence = at(self._sure)

    def lead(self) -> None:
        """Room for what drafters say that are led, and for the spines."""
        depth = max(self.depths)
        self.c.depth, seats = depth, depth * self.members * self.rows
        self.guessed = array("q", b"\xff" * (16 * seats))  # -1
        self.chances = floats(2 * seats)
        self.spine = ints(self.rows * depth)
        self.state = ints(self.rows) + array("q", [1]) * self.rows  # lengths, then who goes on
        params = [seat.context.sampling for seat in self.seats]
        self._heats = array("d", [0.0 if each.greedy else each.temperature for each in params])
        words = array("Q")
        for context, *_ in self.seats:
            base = len(context.tokens)
            words.extend(Draws(context.seed, base).stream(base, context.noise))
        self._streams = words
        self.c.guessed, self.c.chances, self.c.spine = at(self.guessed), at(self.chances), at(self.spine)
        self.c.length, self.c.going = at(self.state), at(self.state) + 8 * self.rows
        self.c.heats, self.c.streams = at(self._heats), at(self._streams)

    def mix(self, shelf: Shelf) -> None:
        """Room for distributions, which lie on arrays from the shelf."""
        seats = self.c.depth * self.members * self.rows
        self.laws = array("Q", bytes(8 * seats))
        self._parts = floats(seats)
        self._shelf = shelf
        self.c.q, self.c.shares = at(self.laws), at(self._parts)

    def rows_of(self, count: int, vocab: int) -> Floats:
        """``[count, vocab]``, until the board is gone."""
        found = self._shelf.take(count * vocab)
        self._kept.append(found)
        return found[: count * vocab].reshape(count, vocab)

    def __del__(self) -> None:
        if self._kept:
            self._shelf.spare += self._kept

    def place_of(self, member: int, row: int) -> int:
        """Where a drafter's word about a sequence stands at the present step, in ``[D, M, R]``."""
        return int((self.c.steps * self.members + member) * self.rows + row)

    def path(self, row: int) -> list[int]:
        """The spine so far."""
        first = row * self.c.depth
        return self.spine[first : first + self.state[row]].tolist()

    def going(self) -> list[int]:
        """``[R]``, which spines go on."""
        return self.state[self.rows :].tolist()

    def fed(self) -> dict[int, int]:
        """The newest token of the spines that go on, by row."""
        state, depth, spine = self.state, self.c.depth, self.spine
        return {row: spine[row * depth + state[row] - 1] for row, on in enumerate(self.going()) if on}

    def drafts(self, names: Seq[str]) -> list[Draft]:
        """What was made, of the rows that anything was made for."""
        found, room, size = [], self.room, self.rows * self.room
        made, first, name = self._made, self.rows, names.__getitem__
        sure = np.frombuffer(self._sure)
        for row, (context, *_) in enumerate(self.seats):
            count = made[row]
            if not count:
                continue
            start = first + row * room
            found.append(
                Draft(
                    context.id,
                    len(context.tokens),
                    tuple(made[start : start + count]),
                    tuple(made[start + size : start + size + count]),
                    tuple(map(name, made[start + 2 * size : start + 2 * size + count])),
                    None,
                    sure[row * room : row * room + count],
                )
            )
        return found
