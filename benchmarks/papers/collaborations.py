"""Reading ``benchmarks.collaborative``: ways of decoding with several models, over the standard one."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.sources import Found, Source

COLLABORATIVE = Source("collaborative", "python -m benchmarks.collaborative")


@dataclass(frozen=True, slots=True)
class Collaborations:
    """Rows of the stored file."""

    found: Found

    def settings(self, blend: str) -> tuple[str, ...]:
        """What else the rows of a blend differ in."""
        rows = [row for row in self.found.get("rows", ()) if str(row.get("blend", "")).startswith(blend)]
        return tuple(dict.fromkeys(row.get("setting", "") for row in rows))

    def speedup(self, blend: str, setting: str, method: str) -> str:
        """Of one method.

        Raises:
            KeyError: it was not measured.
        """
        for row in self.found["rows"]:
            if (row["setting"], row["method"]) == (setting, method) and row["blend"].startswith(blend):
                return "{:.2f}× ({:.2f} to {:.2f})".format(*row["speedup"])
        raise KeyError(method)
