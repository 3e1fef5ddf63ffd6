"""Drafters whose forwards are all native, led along the spines of a round as one call: ``csrc/spec/pool_lockstep.cpp``.

What comes of it is what leading them position by position gives. That is still done where anybody is led in another
way, or where a drafter may be late, since nobody can be left out in the middle of a call.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from ctypes import addressof

from cospec.drafters.combiners.session import Session
from cospec.drafters.pool.board import Board, at, floats, ints, library
from cospec.native_structs import MixBuffers
from cospec.plugins import Lent


def lead(board: Board, session: Session, taking: Mapping[int, Seq[int]], mixing: MixBuffers | None) -> bool:
    """Lead the drafters along the sequences that they are ``taking``; False, with nothing done, where it cannot be."""
    contexts, depths = [seat.context for seat in board.seats], [min(b.depth, b.max_nodes) for _, b, *_ in board.seats]
    lent, words, places = list[Lent](), array("q"), [array("q", rows) for rows in taking.values()]
    for (member, rows), place in zip(taking.items(), places, strict=True):  # ``LockstepDrafter``
        led, lend = session.led[member], session.steppers[member].lend
        if led.deadline is not None:
            return False
        own: Lent | None = led.call(lend, [contexts[row] for row in rows], [depths[row] for row in rows])
        if own is None:
            return False
        words.extend((member, *own.names, at(own.segments), at(own.ids), at(place), len(place)))
        lent.append(own)
    count, fed, seconds = len(lent), ints(board.rows), floats(len(lent) + 1)
    how = None if mixing is None else addressof(mixing)
    if not library().cospec_pool_lockstep(board.ref, at(words), count, how, at(fed), at(seconds)):
        return False
    session.reading += seconds[count]
    paths = board.paths(fed)
    for (member, rows), spent in zip(taking.items(), seconds, strict=False):
        led = session.led[member]
        led.spend(spent)
        give_back = session.steppers[member].take_back
        led.call(give_back, [contexts[row] for row in rows], [paths[row] for row in rows])
    return True
