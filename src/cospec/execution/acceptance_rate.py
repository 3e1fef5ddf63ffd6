"""The acceptance rate of drafts without confidences."""

from __future__ import annotations

from collections.abc import Iterable

from cospec.core.types import Commit

RATE_STEP = 0.02  # of the moving average of the acceptance rate


class AcceptanceRate:
    """The moving average of the share of right tokens among verified tokens, for drafts without confidences."""

    def __init__(self) -> None:
        self.value = 0.7

    def learn(self, commits: Iterable[Commit]) -> None:
        """Learn from verified drafts."""
        for commit in commits:
            if commit.drafted:
                for right in [1.0] * len(commit.path) + [0.0] * commit.rejected:
                    self.value += RATE_STEP * (right - self.value)
