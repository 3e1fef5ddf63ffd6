"""How drafting after outcomes follows the measured times: what a step waits for, and how many branches are drafted."""

from __future__ import annotations

from collections.abc import Iterable

from cospec.core.tree import MAX_NODES
from cospec.core.types import Commit

RATE_STEP = 0.1  # of the moving averages
LATE = 0.05  # share of a step that may be spent on waiting for branches
FEWEST, GROWTH = 16, 8  # nodes
WINDOW = 8  # steps
HELPED = 0.9  # of the waits before a cut; a cut that leaves more did not help
HOLD = 32  # windows without a cut after one that did not help
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

    After each window of steps the drafts grow, or lose a quarter if the steps had to wait. A cut that did not make the
    next window's waits shorter is taken back for some windows: over a slow link drafts of any size come late.

    Attributes:
        count: nodes of each sequence.
    """

    def __init__(self) -> None:
        self.count = MAX_NODES
        self._step = self._waits = 0.0
        self._steps = self._held = 0  # steps in the window, and windows without a cut
        self._cut: tuple[int, float] | None = None  # count and waits before the latest cut

    def waited(self, seconds: float) -> None:
        """Learn how long a step waited for drafts after outcomes."""
        self._steps, self._waits = self._steps + 1, self._waits + seconds
        if self._steps == WINDOW:
            self._adapt(self._waits)
            self._steps, self._waits = 0, 0.0

    def stepped(self, seconds: float) -> None:
        """Learn how long the target took for a step."""
        self._step = seconds

    def _adapt(self, waits: float) -> None:
        """Choose the count by the waits of a window."""
        before, self._cut, self._held = self._cut, None, max(0, self._held - 1)
        if waits <= LATE * WINDOW * self._step:
            self.count = min(MAX_NODES, self.count + GROWTH)
        elif before is not None and waits > HELPED * before[1]:
            self.count, self._held = before[0], HOLD
        elif not self._held:
            self._cut, self.count = (self.count, waits), max(FEWEST, 3 * self.count // 4)


def _moved(average: float | None, value: float) -> float:
    return value if average is None else average + RATE_STEP * (value - average)
