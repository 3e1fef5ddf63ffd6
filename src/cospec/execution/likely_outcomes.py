"""The likeliest outcomes of a verification in flight: how many draft tokens are accepted, and along which path.

A drafter that works meanwhile drafts after such an outcome (SSD, 2603.03251). The token after the accepted tokens is
guessed by the draft itself: its first tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from cospec.core.tree import children, depths
from cospec.core.types import Commit, Draft

GUESSES = 2  # of the token after a partly accepted draft
MOST = 4  # outcomes per draft, besides the likeliest outcome
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


def likeliest_outcomes(draft: Draft, rate: float) -> list[int]:
    """Return nodes of ``draft`` that may be the last accepted token, at most one per depth; -1: none is accepted.

    The first is the likeliest leaf, for a chain the whole draft. The others follow by probability.

    Args:
        rate: probability of a token given an accepted parent, where the draft has no confidences.
    """
    given = [rate] * len(draft) if draft.confidence is None else draft.confidence.tolist()
    reach, depth = [1.0], {-1: 0, **dict(enumerate(depths(draft.parents)))}
    for node, parent in enumerate(draft.parents):
        reach.append(reach[parent + 1] * given[node])
    ends = {}
    for node in range(-1, len(draft)):
        below = sum([given[child] for child in children(draft.parents, node)])
        ends[node] = reach[node + 1] * max(0.0, 1.0 - below)
    leaves = set(ends) - set(draft.parents)
    first = max(leaves, key=lambda node: ends[node])
    found, seen = [first], {depth[first]}
    for node in sorted(ends, key=lambda node: -ends[node]):
        if depth[node] not in seen and len(found) <= MOST:
            found.append(node)
            seen.add(depth[node])
    return found
