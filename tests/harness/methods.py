"""Methods and constants of single objects, replaced for the rest of a test."""

from __future__ import annotations

from typing import Any


def override(owner: object, **members: Any) -> None:
    """Replace members of ``owner`` alone; the class and its other objects keep theirs."""
    for name, member in members.items():
        setattr(owner, name, member)
