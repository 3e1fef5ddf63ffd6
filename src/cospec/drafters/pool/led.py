"""Drafters whose forwards are all native, led along the spines of a round as one native call: ``csrc/led.cpp``.

What comes of it is what leading them position by position gives. That is still done where anybody is led in another
way, or where a drafter may be late, since nobody can be left out in the middle of a call.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from ctypes import Structure, addressof, byref, c_double, c_int64, c_void_p

from cospec.drafters.combiners.session import Session
from cospec.drafters.pool.board import Board, at, ints, library
from cospec.drafters.stepping import Lent


class _Led(Structure):
    """Mirrors the struct of that name."""

    _fields_ = [
        ("member", c_int64),
        *[(name, c_void_p) for name in ("model", "cache", "segments", "ids", "places")],
        ("count", c_int64),
        ("seconds", c_double),
    ]


class Mixing(Structure):
    """Mirrors the struct of that name."""

    _fields_ = [("distributions", c_void_p), ("mixtures", c_void_p), ("vocab", c_int64), ("kept", c_int64)]


def lead(board: Board, session: Session, taking: Mapping[int, Seq[int]], mixing: Mixing | None) -> bool:
    """Lead the drafters along the sequences that they are ``taking``; False, with nothing done, where it cannot be."""
    lent = _lent(board, session, taking)
    if lent is None:
        return False
    places = {member: array("q", rows) for member, rows in taking.items()}
    led = (_Led * len(lent))(
        *[
            _Led(member, *own.names, at(own.segments), at(own.ids), at(places[member]), len(places[member]), 0.0)
            for member, own in lent.items()
        ]
    )
    fed, reading = ints(board.rows), c_double()
    how = None if mixing is None else addressof(mixing)
    if not library().cospec_pool_lead(board.ref, addressof(led), len(led), how, at(fed), byref(reading)):
        return False
    session.reading += reading.value
    contexts = [seat.context for seat in board.seats]
    paths = [board.path(row)[:count] for row, count in enumerate(fed)]
    for part in led:
        rows = taking[part.member]
        session.led[part.member].spend(part.seconds)
        give_back = session.steppers[part.member].take_back
        session.led[part.member].call(give_back, [contexts[row] for row in rows], [paths[row] for row in rows])
    return True


def _lent(board: Board, session: Session, taking: Mapping[int, Seq[int]]) -> dict[int, Lent] | None:
    """Their models; None where one cannot be had."""
    found: dict[int, Lent] = {}
    for member, rows in taking.items():
        if session.led[member].deadline is not None:
            return None
        seats = [board.seats[row] for row in rows]
        depths = [min(budget.depth, budget.max_nodes) for _, budget, _, _ in seats]
        own: Lent | None = session.led[member].call(
            session.steppers[member].lend, [context for context, *_ in seats], depths
        )
        if own is None:
            return None
        found[member] = own
    return found
