"""Drafters whose forwards are all native, led along the spines of a round as one native call: ``csrc/led.cpp``.

What comes of it is what leading them position by position gives. That is still done where anybody is led in another
way, or where a drafter may be late, since nobody can be left out in the middle of a call.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from ctypes import Structure, addressof, c_int64, c_void_p

from cospec.drafters.combiners.session import Session
from cospec.drafters.pool.board import Board, at, floats, ints, library
from cospec.drafters.stepping import Lent


class Mixing(Structure):
    """Mirrors the struct of that name."""

    _fields_ = [("distributions", c_void_p), ("mixtures", c_void_p), ("vocab", c_int64), ("kept", c_int64)]


def lead(board: Board, session: Session, taking: Mapping[int, Seq[int]], mixing: Mixing | None) -> bool:
    """Lead the drafters along the sequences that they are ``taking``; False, with nothing done, where it cannot be."""
    lent = _lent(board, session, taking)
    if lent is None:
        return False
    words, places = array("q"), [array("q", rows) for rows in taking.values()]
    for (member, own), place in zip(lent.items(), places, strict=True):  # ``Led`` in ``csrc/led.cpp``
        words.extend((member, *own.names, at(own.segments), at(own.ids), at(place), len(place)))
    count, fed, seconds = len(lent), ints(board.rows), floats(len(lent) + 1)
    how = None if mixing is None else addressof(mixing)
    if not library().cospec_pool_lead(board.ref, at(words), count, how, at(fed), at(seconds)):
        return False
    session.reading += seconds[count]
    contexts, paths = [seat.context for seat in board.seats], board.paths(fed)
    for (member, rows), spent in zip(taking.items(), seconds, strict=False):
        led = session.led[member]
        led.spend(spent)
        give_back = session.steppers[member].take_back
        led.call(give_back, [contexts[row] for row in rows], [paths[row] for row in rows])
    return True


def _lent(board: Board, session: Session, taking: Mapping[int, Seq[int]]) -> dict[int, Lent] | None:
    """Their models; None where one cannot be had."""
    found: dict[int, Lent] = {}
    for member, rows in taking.items():
        if session.led[member].deadline is not None:
            return None
        seats = [board.seats[row] for row in rows]
        depths = [min(seat.budget.depth, seat.budget.max_nodes) for seat in seats]
        own: Lent | None = session.led[member].call(
            session.steppers[member].lend, [context for context, *_ in seats], depths
        )
        if own is None:
            return None
        found[member] = own
    return found
