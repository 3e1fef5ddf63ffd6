"""CoS's theorems on the speed-up of collaborative decoding, for comparison with exact counts of calls (CoS 3.2, 3.3).

``alpha`` is the acceptance rate of a proposed token, ``gamma`` the length of a proposal, ``c`` the ratio of a
proposer's time per call to the scorer's. Factors are relative to standard collaborative decoding.
"""

from __future__ import annotations

from collections.abc import Sequence


def expected_tokens(alpha: float, gamma: int) -> float:
    """Expected tokens of a proposal and its verification, without a bonus (CoS eq. 12): ``(1 - a^g) / (1 - a)``."""
    return float(gamma) if alpha >= 1 else (1 - alpha**gamma) / (1 - alpha)


def naive_factor(alpha: float, gamma: int, c: float) -> float:
    """Speed-up when only the default proposer proposes (CoS theorem 3.1)."""
    return expected_tokens(alpha, gamma) * (1 + c) / (1 + c * gamma)


def alternate_factor(
    alpha: float, gamma: int, c: float, scorer_gamma: int = 1, scorer_alpha: float | None = None
) -> float:
    """Speed-up when the scorer proposes too (CoS theorem 3.6).

    ``scorer_alpha`` is the acceptance rate of the scorer's proposals; the paper sets it to ``alpha``.
    """
    bonus = (alpha if scorer_alpha is None else scorer_alpha) ** scorer_gamma
    return expected_tokens(alpha, gamma) * (1 + c) / (1 + c * gamma - bonus * c)


def acceptance_bound(weights: Sequence[float], proposer: int) -> float:
    """Lower bound of a model's acceptance rate in a weighted blend: the model's weight (CoS theorem 3.2)."""
    return weights[proposer]
