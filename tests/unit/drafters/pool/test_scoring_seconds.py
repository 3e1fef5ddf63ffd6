"""The seconds in which drafters of a pool score known tokens, apart from those of drafting."""

from __future__ import annotations

from collections.abc import Sequence

from cospec.core.drafter_capabilities import TokenScores
from cospec.core.types import Commit, DraftBudget, DraftContext
from cospec.drafters.pool.known_token_scoring import RESCORE_AFTER
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from harness.pools import Ticks, pool_of
from harness.toys import ScriptedDrafter


class Scoring(ScriptedDrafter):
    """Takes a second to score."""

    scores_known_tokens = True

    def __init__(self, clock: Ticks) -> None:
        super().__init__([4, 4])
        self.clock = clock

    def score_known_tokens(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        self.clock.now += 1.0
        return {each.id: TokenScores(1.0, 1) for each in contexts}


def test_the_seconds_of_scoring_are_known() -> None:
    """Before the first step and again after some steps, by each drafter that can."""
    clock, tokens, found = Ticks(), [3, 4, 3, 4], list[float]()
    drafters = {"one": Scoring(clock), "two": Scoring(clock), "copy": ScriptedDrafter([4])}
    pool = pool_of(drafters, "union", "hedge", 5, clock)
    context = DraftContext("s", tokens, 1, SamplingParams(temperature=0, max_tokens=64), 0, StreamKind.TARGET)
    for _ in range(RESCORE_AFTER + 2):
        pool.propose([context], [DraftBudget(3, 8)])
        pool.commit([Commit("s", len(tokens), (3,), (), len(tokens))])
        tokens.append(3)
        found.append(pool.scoring_seconds)
    assert found == [2.0] * RESCORE_AFTER + [4.0] * 2
