"""How drafting after outcomes follows the measured times: what a step waits for, and how many branches are drafted."""

from __future__ import annotations

from collections.abc import Iterable

from cospec.core.tree import MAX_NODES
from cospec.core.types import Commit

RATE_STEP = 0.1  # of the moving averages
LATE = 0.05  # share of a step that may be spent on waiting for branches
FEWEST = 8  # nodes
WAIT_EVERY = 64  # steps after which a step waits, so that the time of a draft is measured again


class DraftWait:
    """Compares the committed tokens per second of a step that waits and of a step that does not.

    Sequences with a draft commit ``tokens`` each, the others one token. A step takes ``step`` seconds, and a draft
    ``draft`` seconds more. A step always waits until all three are known.
    """

    def __init__(self) -> None:
        self._draft: float | None = None
        self._step: float | None = None
        self._tokens: float | None = None
        self._hurried = 0  # steps since the latest one that waited

    def pays(self, ready: int, missing: int) -> bool:
        """Return whether a step waits for ``missing`` drafts; ``ready`` drafts are there."""
        self._hurried += 1
        if self._draft is None or self._step is None or self._tokens is None or self._hurried >= WAIT_EVERY:
            return True
        hurried = (ready * self._tokens + missing) / self._step
        return (ready + missing) * self._tokens / (self._step + self._draft) > hurried

    def waited(self, seconds: float) -> None:
        """Learn how long a step waited for drafts."""
        self._draft, self._hurried = _moved(self._draft, seconds), 0

    def stepped(self, seconds: float) -> None:
        """Learn how long the target took for a step."""
        self._step = _moved(self._step, seconds)

    def committed(self, commits: Iterable[Commit]) -> None:
        """Learn how many tokens sequences with a draft commit."""
        counts = [len(commit.tokens) for commit in commits if commit.drafted]
        if counts:
            self._tokens = _moved(self._tokens, sum(counts) / len(counts))


class OutcomeNodes:
    """How many nodes a draft after outcomes may have: as many as are drafted while the target verifies.

    Attributes:
        count: nodes of each sequence. Grows by one node per step, and falls by a quarter if a step had to wait.
    """

    def __init__(self) -> None:
        self.count = MAX_NODES
        self._step = 0.0

    def waited(self, seconds: float) -> None:
        """Learn how long a step waited for drafts after outcomes."""
        if seconds > LATE * self._step:
            self.count = max(FEWEST, 3 * self.count // 4)
        else:
            self.count = min(MAX_NODES, self.count + 1)

    def stepped(self, seconds: float) -> None:
        """Learn how long the target took for a step."""
        self._step = seconds


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + RATE_STEP * (value - average)
