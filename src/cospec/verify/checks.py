"""What a rung reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was tried.

    Attributes:
        rung: of the ladder, such as ``enumeration``.
        name: what was tried.
        found: the figure, in words.
        wanted: what it has to be, in words.
        notes: what a reader should know, such as near-ties that were excused.
        false_alarm: the probability that a right engine fails this check.
    """

    check_group: str
    name: str
    found: str
    wanted: str
    passed: bool
    notes: tuple[str, ...] = ()
    false_alarm: float = 0.0
