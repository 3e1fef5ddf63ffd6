"""Drafters whose forwards are all native, led along the spines of a round as one call: ``csrc/spec/pool_lockstep.cpp``.

What comes of it is what leading them position by position gives. That is still done where anybody is led in another
way, or where a drafter may be late, since nobody can be left out in the middle of a call.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from ctypes import addressof

from cospec.core.plugins import CacheLease
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.native.pool_buffers import PoolBuffers, at, floats, ints, pool_cdll
from cospec.native.structs import MixBuffersStruct


def lead(
    board: PoolBuffers, session: LockstepSession, taking: Mapping[int, Sequence[int]], mixing: MixBuffersStruct | None
) -> bool:
    """Lead the drafters along the sequences that they are ``taking``; False, with nothing done, where it cannot be."""
    contexts, depths = (
        [draft_task.context for draft_task in board.draft_tasks],
        [min(b.depth, b.max_nodes) for _, b, *_ in board.draft_tasks],
    )
    lent, words, places = list[CacheLease](), array("q"), [array("q", rows) for rows in taking.values()]
    for (member, rows), place in zip(taking.items(), places, strict=True):  # ``LockstepDrafterStruct``
        led, lease = session.led[member], session.steppers[member].lease
        if led.deadline is not None:
            return False
        own: CacheLease | None = led.call(lease, [contexts[row] for row in rows], [depths[row] for row in rows])
        if own is None:
            return False
        words.extend((member, *own.names, at(own.segments), at(own.ids), at(place), len(place)))
        lent.append(own)
    count, fed, seconds = len(lent), ints(board.rows), floats(len(lent) + 1)
    how = None if mixing is None else addressof(mixing)
    if not pool_cdll().cospec_pool_lockstep(board.ref, at(words), count, how, at(fed), at(seconds)):
        return False
    session.reading += seconds[count]
    paths = board.paths(fed)
    for (member, rows), spent in zip(taking.items(), seconds, strict=False):
        led = session.led[member]
        led.spend(spent)
        give_back = session.steppers[member].release_lease
        led.call(give_back, [contexts[row] for row in rows], [paths[row] for row in rows])
    return True
