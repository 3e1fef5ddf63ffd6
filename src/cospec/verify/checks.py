"""The result of a check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Attributes:
        check_group: of the suite, such as ``enumeration``.
        name: the subject of the check.
        found: the measured value, in words.
        wanted: the required value, in words.
        notes: remarks for the reader, such as excused near-ties.
        false_alarm: the probability that an exact engine fails this check.
    """

    check_group: str
    name: str
    found: str
    wanted: str
    passed: bool
    notes: tuple[str, ...] = ()
    false_alarm: float = 0.0
