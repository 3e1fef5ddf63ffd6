"""What a drafter can do, and how well it predicts the known tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class DrafterCapabilities:
    """What a drafter can do, and what takes time; policies plan with these data.

    Attributes:
        costless: a proposal of any length takes almost no time: look-ups.
        single_pass: one pass gives all levels of a draft: heads.
        trees: follows ``DraftBudget.widths``.
        chains: always has one node per level.
        num_drafters: drafters of a pool that may take part.
    """

    costless: bool = False
    single_pass: bool = False
    trees: bool = False
    chains: bool = False
    num_drafters: int = 1


class TokenScores(NamedTuple):
    """How well a drafter predicts the latest known tokens of a sequence.

    Attributes:
        probability_sum: of the tokens' probabilities under the drafter.
        num_tokens: the number of these tokens.
    """

    probability_sum: float
    num_tokens: int
