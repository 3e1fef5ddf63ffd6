"""Which drafters of a pool score known tokens, and that one drafter drafts alone afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cospec.core.drafter_capabilities import TokenScores
from cospec.core.plugin_base import SoleDrafter
from cospec.core.types import Commit, DraftBudget, DraftContext
from cospec.drafters.pool.known_token_scoring import LOOK_AFTER, RESCORE_AFTER
from cospec.drafters.pool.members import Member
from cospec.drafters.pool.pool import PoolContext, PoolDrafter
from cospec.registry import COMBINERS, ROUTINGS
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from harness.pools import Ticks, pool_of
from harness.toys import ScriptedDrafter

BUDGET = DraftBudget(3, 8)


class Scoring(ScriptedDrafter):
    """Gives every known token one probability, and counts the scorings."""

    scores_known_tokens = True

    def __init__(self, chance: float) -> None:
        super().__init__([4, 4])
        self.chance, self.scorings = chance, 0

    def score_known_tokens(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        self.scorings += 1
        return {each.id: TokenScores(self.chance * 8, 8) for each in contexts}


def scored(chances: Sequence[float], steps: int) -> list[int]:
    """Return how often drafters with these probabilities score in some steps that accept nothing."""
    drafters = {str(number): Scoring(chance) for number, chance in enumerate(chances)}
    pool, tokens = pool_of(dict(drafters), "union", "hedge", 5, Ticks()), [3, 4, 3, 4]
    context = request(tokens)
    for _ in range(steps):
        pool.propose([context], [BUDGET])
        pool.commit([Commit("s", len(tokens), (3,), (), len(tokens))])
        tokens.append(3)
    return [drafter.scorings for drafter in drafters.values()]


def request(tokens: list[int]) -> DraftContext:
    """A greedy request with one prompt token."""
    return DraftContext("s", tokens, 1, SamplingParams(temperature=0, max_tokens=24), 0, StreamKind.TARGET)


def test_drafters_without_a_chance_score_once() -> None:
    """Two equal drafters score again; a drafter that the scores exclude does not."""
    assert scored([0.9, 0.9, 0.0], RESCORE_AFTER + 2) == [2, 2, 1]


def test_no_drafter_scores_again_where_one_leads() -> None:
    """One drafter has nearly all of the weight."""
    assert scored([0.9, 0.0, 0.0], RESCORE_AFTER + 2) == [1, 1, 1]


def test_a_clear_lead_is_looked_at_again() -> None:
    """At times only, because every look computes weights."""
    drafters = {"a": Scoring(0.9), "b": Scoring(0.0)}
    pool, tokens = pool_of(dict(drafters), "union", "hedge", 5, Ticks()), [3, 4, 3, 4]
    context = request(tokens)
    pool.propose([context], [BUDGET])
    weights = pool.records["s"].weights
    weights.steps = weights.score_at
    pool.prepare([context], [BUDGET])
    assert weights.score_at == weights.steps + LOOK_AFTER
    weights.chance[1] = weights.chance[0]
    weights.score_known_tokens([None, (0.9 * 8, 8)])  # the lead is gone
    weights.steps += LOOK_AFTER - 1
    pool.prepare([context], [BUDGET])
    assert [each.scorings for each in drafters.values()] == [1, 1]
    weights.steps += 1
    pool.prepare([context], [BUDGET])
    assert [each.scorings for each in drafters.values()] == [2, 2]


def test_only_drafters_that_a_request_names_score() -> None:
    drafters = {name: Scoring(0.5) for name in ("first", "second", "third")}
    pool = pool_of(dict(drafters), "union", "hedge", 5, Ticks())
    pool.propose([replace(request([3, 4, 3, 4]), drafters=("first", "third"))], [BUDGET])
    assert [each.scorings for each in drafters.values()] == [1, 0, 1]


def test_scores_come_before_a_drafter_drafts_alone() -> None:
    """``drafts_alone`` has no drafter before ``prepare``, and the likelier drafter after it; scores are taken once."""
    good, bad = Scoring(0.9), Scoring(0.1)
    members = [Member.of(name, each, Ticks(), False) for name, each in (("bad", bad), ("good", good))]
    pool = PoolDrafter(members, COMBINERS.load("vote")(), ROUTINGS.load("hedge")(), PoolContext(5, Ticks(), at_most=1))
    context = request([3, 4, 3, 4])
    assert isinstance(pool.drafts_alone(context, BUDGET), str)
    pool.prepare([context], [BUDGET])
    assert pool.drafts_alone(context, BUDGET) == SoleDrafter("good", good)
    pool.prepare([context], [BUDGET])
    pool.propose([context], [BUDGET])
    assert (good.scorings, bad.scorings) == (1, 1)


def test_a_request_without_a_draft_is_not_scored() -> None:
    """The budget has no tokens."""
    drafter = Scoring(0.9)
    pool = pool_of({"one": drafter, "two": Scoring(0.9)}, "union", "hedge", 5, Ticks())
    pool.prepare([request([3, 4])], [DraftBudget(0, 0)])
    assert drafter.scorings == 0
