"""DSD's equations of a pipeline whose times were measured, as printed and corrected.

The equations take the tokens of a traversal and the times without links from the same run that they are compared with.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.dsd_nodes import WINDOW
from benchmarks.papers.sources import Found


@dataclass(frozen=True, slots=True)
class Nodes:
    """A pipeline and its figures without delays.

    Attributes:
        t0: seconds of a one-token step.
        window: seconds of a step that verifies ``WINDOW`` draft tokens, without the draft.
        draft: seconds per draft token.
        links: that a window crosses: between nodes, and back to the engine where that link is slow too.
    """

    count: int
    t0: float
    window: float
    draft: float
    links: int

    @classmethod
    def stored(cls, found: Found) -> Nodes:
        """From a file; one without ``links`` has those between the nodes."""
        return cls(**{"links": found["count"] - 1, **found})

    def equations(self, t1: float, kept: float) -> dict[str, float]:
        """Return predicted seconds per token, and speed-ups.

        Args:
            t1: seconds of a link.
            kept: tokens per traversal, k in the paper.
        """
        crossing = self.links * t1
        plain = self.t0 + crossing
        rate = kept / (WINDOW + 1)
        corrected = (self.window + WINDOW * self.draft + crossing) / kept
        return {
            "plain_eq3": plain,
            "window_eq4": self.t0 + crossing / kept,
            "window_corrected": corrected,
            "saved_eq5": crossing * (kept - 1) / (kept * plain),
            "speed_eq9": plain / (self.t0 / rate + crossing / kept),
            "speed_corrected": plain / corrected,
        }


def kept(way: Found) -> float:
    """Tokens per traversal, as time per token counts them: the inverse of traversals per token.

    A mean over runs of tokens per traversal is larger, and does not belong to a mean time per token.
    """
    return float(1.0 / way["rounds"])
