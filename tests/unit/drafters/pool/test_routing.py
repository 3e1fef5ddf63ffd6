"""Weights, calibration and who is chosen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.calibration import Calibration
from cospec.drafters.pool.combiners.combiner import Candidate, DraftCandidates, StepCandidates
from cospec.drafters.pool.combiners.union import Union
from cospec.drafters.pool.coordinator import Coordinator, PoolConfig, allot
from cospec.drafters.pool.routing.drafter_weights import DrafterWeights, WeightPrior
from cospec.drafters.pool.routing.explore import Explore, ExploreOptions, OutputEmbeddings
from cospec.drafters.pool.routing.hedge import PATIENCE, Hedge
from cospec.drafters.pool.routing.routing import Feedback, RoutingInput
from cospec.drafters.pool.state import EDGE, PoolStats, RequestCalibration
from cospec.models.files.source import OUTPUT_EMBEDDINGS
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import resolve
from cospec.registry import ROUTINGS
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from harness.gguf_files import write_model
from harness.gguf_models import MODELS, random_model
from harness.pools import pool_of
from harness.toys import ScriptedDrafter

PRIOR = WeightPrior([0.5] * 3)


def observed(rates: tuple[float, ...], seen: float = 40.0) -> DrafterWeights:
    made = DrafterWeights(len(rates))
    made.took_part(range(len(rates)))
    for member, rate in enumerate(rates):
        made.count(member, rate * seen, seen)
    return made


def choice(
    weights: list[float],
    count: int | None = None,
    seed: int = 0,
    unscored: Sequence[int] = (),
    loads: Sequence[float] = (),
) -> RoutingInput:
    return RoutingInput(tuple(range(len(weights))), count, weights, seed, 7, frozenset(unscored), loads)


def test_weights_are_equal_at_first_and_follow_what_was_guessed() -> None:
    assert DrafterWeights(3).weights(PRIOR) == pytest.approx([1 / 3] * 3)
    weights = observed((0.8, 0.5, 0.2)).weights(PRIOR)
    assert weights[0] > 0.9
    assert weights[0] > weights[1] > weights[2] > 0
    assert sum(weights) == pytest.approx(1.0)


def test_who_was_not_asked_loses_nothing_and_evidence_fades() -> None:
    made = observed((0.8, 0.5, 0.5))
    asked = DrafterWeights(3)
    asked.count(0, 32, 40)
    assert asked.weights(PRIOR)[1:] == pytest.approx(made.weights(PRIOR)[1:])
    before = made.weights(PRIOR)[0]
    made.decay(200)
    assert 1 / 3 < made.weights(PRIOR)[0] < before


def test_weights_find_the_best_in_hindsight() -> None:
    """Regret: after a few hundred tokens the best of three holds nearly all weight, whichever it is."""
    chance = np.random.default_rng(0)
    for best in range(3):
        made, rates = DrafterWeights(3), [0.5, 0.5, 0.5]
        rates[best] = 0.75
        share = []
        for _ in range(100):
            made.decay(2)
            for member, rate in enumerate(rates):
                made.count(member, float((chance.random(2) < rate).sum()), 2)
            share.append(made.weights(PRIOR)[best])
        assert np.mean(share[50:]) > 0.8


def test_a_new_request_starts_with_what_others_taught() -> None:
    prior = WeightPrior([0.5] * 3)
    for _ in range(20):
        prior.learn(observed((0.9, 0.3, 0.5)))
    weights = DrafterWeights(3).weights(prior)
    assert weights[0] > weights[2] > weights[1]
    unseen = WeightPrior([0.5] * 3)
    unseen.learn(DrafterWeights(3))
    assert unseen.rates == pytest.approx([0.5] * 3)


def test_hedge_takes_the_heaviest() -> None:
    hedge, made = Hedge(), observed((0.8, 0.5, 0.2))
    assert hedge.route(made, choice([0.9, 0.07, 0.03])) == [0]
    assert hedge.route(made, choice([0.5, 0.1, 0.4])) == [0, 2]
    assert hedge.route(made, choice([0.4, 0.35, 0.25], count=2)) == [0, 1]


def test_hedge_routes_to_unscored_drafters_first_and_again() -> None:
    hedge, made = Hedge(), observed((0.8, 0.5, 0.2))
    assert hedge.route(DrafterWeights(3), choice([0.9, 0.07, 0.03], unscored=[1, 2])) == [0, 1, 2]
    assert hedge.route(made, choice([0.9, 0.07, 0.03], unscored=[2])) == [0]
    made.idle[1] = made.idle[2] = PATIENCE
    assert hedge.route(made, choice([0.9, 0.07, 0.03], unscored=[2])) == [0, 2]
    assert hedge.route(made, choice([0.9, 0.07, 0.03], count=1, unscored=[2])) == [2]


def test_unscored_drafters_draft_first_and_again_after_patience() -> None:
    """One takes part at a time, and the other one is better by all that is known."""
    pool = pool_of({name: ScriptedDrafter([1, 2, 3]) for name in "ab"}, "vote", "hedge", 5)
    pool.pool_stats.prior = WeightPrior([0.95, 0.05])
    pool_config = replace(pool.coordinator.pool_config, free=0, unscored=frozenset({1}))
    pool.coordinator = Coordinator(pool_config, pool.pool_stats)
    context = DraftContext("s", [0, 4], 1, SamplingParams(temperature=0), 0, StreamKind.TARGET)
    drafted = [pool.propose([context], [DraftBudget(3, 3, drafters=1)])[0].drafters for _ in range(2 * PATIENCE + 3)]
    assert [place for place, own in enumerate(drafted) if own[0] == "b"] == [0, PATIENCE + 1, 2 * PATIENCE + 2]


def test_looks_tell_drafters_apart_before_any_has_drafted() -> None:
    made = DrafterWeights(3)
    made.score_known_tokens([(16.0, 32), (8.0, 32), None])
    weights = made.weights(PRIOR)
    assert weights[0] > 0.45
    assert weights[1] < 0.01
    assert weights[2] == pytest.approx(weights[0]), "who cannot look loses nothing"
    for _ in range(3):
        made.score_known_tokens([(4.0, 32), (16.0, 32), None])
    assert made.weights(PRIOR)[1] > 0.45 > 0.01 > made.weights(PRIOR)[0], "what was found later counts for more"
    late = DrafterWeights(2)
    late.score_known_tokens([(16.0, 32), (8.0, 16)])
    assert late.weights(WeightPrior([0.5] * 2)) == pytest.approx([0.5, 0.5]), "means are compared"


def test_explore_is_sure_of_the_best_after_a_good_round_only() -> None:
    """With probability beta the best after a good round, with alpha after a bad one; alpha < beta."""
    explore, found = Explore(), {}
    for accepted in (0, 4):
        made = observed((0.5, 0.5, 0.5))
        made.scores[:] = [0.1, 0.9, 0.2]
        made.accepted = accepted
        chosen = [explore.route(made, choice([1 / 3] * 3, count=1, seed=seed)) for seed in range(2000)]
        assert all(len(each) == 1 for each in chosen)
        found[accepted] = np.mean([each == [1] for each in chosen])
    assert found[0] == pytest.approx(0.3 + 0.7 / 3, abs=0.04)
    assert found[4] == pytest.approx(0.8 + 0.2 / 3, abs=0.04)


def test_the_constants_of_explore_are_options() -> None:
    made = observed((0.5, 0.5, 0.5))
    made.scores[:], made.accepted = [0.1, 0.9, 0.2], 2
    always = Explore.build(ExploreOptions(alpha=0, beta=1, tau=2))
    chosen = {always.route(made, choice([1 / 3] * 3, count=1, seed=seed))[0] for seed in range(50)}
    assert chosen == {1}
    never = Explore.build(ExploreOptions(alpha=0, beta=1, tau=3))
    assert {never.route(made, choice([1 / 3] * 3, count=1, seed=seed))[0] for seed in range(50)} == {0, 1, 2}


@pytest.mark.parametrize("epsilon", [0.05, 0.2])
def test_explore_scores_follow_equation_2_within_its_bounds(epsilon: float) -> None:
    explore, made = Explore(ExploreOptions(epsilon=epsilon)), DrafterWeights(2)
    for _ in range(50):
        explore.learn(made, {0: Feedback(3, 3, 3, [(1.0, 1.0)] * 3), 1: Feedback(0, 1, 1, [(0.9, 0.0)])})
    assert made.scores[0] == pytest.approx((1 - epsilon) ** 2 / ((1 - epsilon) ** 2 + epsilon**2), abs=1e-3)
    assert made.scores[1] == pytest.approx(
        0.9 * epsilon / (0.9 * epsilon + 0.1 * (1 - epsilon)) if epsilon < 0.1 else 0.5, abs=1e-3
    )


def test_explore_learns_from_similar_tokens() -> None:
    explore, plain, similar = Explore(ExploreOptions(rate=1.0)), DrafterWeights(1), DrafterWeights(1)
    for made, similarities in ((plain, ()), (similar, (1.0, 0.8))):
        explore.learn(made, {0: Feedback(1, 2, 2, [(0.7, 1.0), (0.7, 0.0)], similarities=similarities)})

    def agreement(c: float, d: float) -> float:
        return c * d / (c * d + (1 - c) * (1 - d))

    assert plain.scores[0] == pytest.approx((agreement(0.7, 0.95) + agreement(0.7, 0.05)) / 2)
    assert similar.scores[0] == pytest.approx((agreement(0.7, 0.95) + agreement(0.7, 0.8)) / 2)
    assert Explore().compares and not Explore(ExploreOptions(embeddings=False)).compares


def test_a_busy_drafter_has_a_lower_score() -> None:
    made = observed((0.5, 0.5, 0.5))
    made.scores[:] = [0.1, 0.9, 0.8]
    best = Explore(ExploreOptions(alpha=1, beta=1))
    assert best.route(made, choice([1 / 3] * 3, count=1)) == [1]
    assert best.route(made, choice([1 / 3] * 3, count=1, loads=[0.0, 2.0, 1.0])) == [2]


def test_candidates_are_compared_up_to_the_first_mistake() -> None:
    def similarity(one: int, other: int) -> float:
        return 1.0 if one == other else one / 10

    chain = Draft("r", 1, (5, 6, 7), (-1, 0, 1), ("a",) * 3)
    assert DraftCandidates(chain).verify([5, 8, 9], similarity).similarities == [1.0, 0.6]
    tree = Draft("r", 1, (5, 4, 3), (-1, -1, 0), ("a",) * 3)
    assert DraftCandidates(tree).verify([5, 9], similarity).similarities == [1.0, 0.4, 0.3]
    led = StepCandidates([5, 6], [Candidate(5, 0.5), Candidate(2, 0.5), Candidate(1, 0.5)])
    assert led.verify([5, 9], similarity).similarities == [1.0, 0.2]
    drawn = StepCandidates([5], [Candidate(-1, 0.5, np.full(9, 1 / 9))])
    assert drawn.verify([5], similarity).similarities == () == DraftCandidates(chain).verify([5]).similarities


def test_similarity_is_the_cosine_of_the_output_embeddings(tmp_path: Path) -> None:
    head, other = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(6, 4)
    save_file({"model.embed_tokens.weight": other, "lm_head.weight": head.bfloat16()}, tmp_path / "model.safetensors")
    found = OutputEmbeddings.find(tmp_path)
    assert found is not None
    wanted = torch.nn.functional.cosine_similarity(head[:, None], head[None], dim=-1).clamp_min(0)
    assert [[found.similarity(a, b) for b in range(6)] for a in range(6)] == [
        pytest.approx(row, abs=0.02) for row in wanted.tolist()
    ]
    assert OutputEmbeddings.find(None) is None and OutputEmbeddings.find(tmp_path / "nothing") is None


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_similarity_of_a_gguf_file_is_that_of_its_tensors(tmp_path: Path, kind: str) -> None:
    model = random_model(MODELS["llama"][0])
    folder = resolve(str(write_model(tmp_path / "m.gguf", model, kind)))
    found, head = OutputEmbeddings.find(folder), open_source(folder)
    assert found is not None
    name = next(name for name in OUTPUT_EMBEDDINGS if name in head.shapes)
    rows = head.read(name).float()
    wanted = torch.nn.functional.cosine_similarity(rows[3], rows[5], dim=0).clamp_min(0)
    assert found.similarity(3, 5) == pytest.approx(float(wanted), abs=1e-6)


@pytest.mark.parametrize("name", ROUTINGS)
def test_a_routing_chooses_at_least_one_of_the_able_drafters(name: str) -> None:
    routing, made = ROUTINGS.load(name)(), observed((0.2, 0.5, 0.6, 0.3))
    assert routing.name == name
    for count in (None, 1, 2, 4, 9):
        given = RoutingInput((1, 3), count, [0.25] * 4, 1, 3)
        chosen = routing.route(made, given)
        assert chosen
        assert set(chosen) <= {1, 3}
        assert len(set(chosen)) == len(chosen) <= (count or 4)


def test_confidence_becomes_the_observed_acceptance() -> None:
    calibration, chance = Calibration(), np.random.default_rng(1)
    assert calibration.read(0.9) == pytest.approx(0.9)
    for _ in range(3000):
        calibration.learn([(0.9, float(chance.random() < 0.4))])
    assert calibration.read(0.9) == pytest.approx(0.4, abs=0.03)
    assert calibration.read(0.1) == pytest.approx(0.1)
    raw = np.array([[0.9, 0.1], [0.0, 1.0]])
    assert calibration(raw).ravel().tolist() == [calibration.read(each) for each in raw.ravel()]
    for _ in range(20000):
        calibration.learn([(0.9, 1.0)])
    assert 0.9 < calibration.read(0.9) < 1.0


def test_trust_is_between_its_bounds_and_moves_with_the_odds() -> None:
    trust = RequestCalibration(PoolStats(2), True, [1.0, 3.0])
    assert trust(0, 0.5) == pytest.approx(0.5)
    assert trust(1, 0.5) == pytest.approx(0.75)
    assert trust(0, 1.0) == pytest.approx(1 - EDGE)
    assert trust(0, 0.0) == pytest.approx(EDGE)
    trust.pool_stats.calibration(True, 1, 0).learn([(0.5, 0.0)] * 100)
    assert trust(0, 0.5, 1) < 0.05, "next best guesses have a calibration of their own"
    assert trust(0, 0.5) == pytest.approx(0.5)


def shares(weights: list[float], nodes: int, novelty: float = 1.0, **pool_config: Any) -> list[int]:
    names = tuple("abcd"[: len(weights)])
    pool_stats = PoolStats(len(weights))
    pool_stats.novelty[:] = novelty
    trust = RequestCalibration(pool_stats, True, [1.0] * len(weights))
    return allot(PoolConfig(names, Union(), Hedge(), allots=True, **pool_config), DraftBudget(4, nodes), weights, trust)


def test_nodes_go_to_the_tokens_that_are_worth_most() -> None:
    """With confidences of a half, a drafter's tokens are worth a half, a quarter, ... of its weight."""
    assert shares([0.9, 0.1], 4) == [4, 0]
    assert shares([0.9, 0.1], 5) == [4, 1], "0.05 is all that is left"
    assert shares([0.6, 0.4], 4) == [2, 2]
    assert shares([0.4, 0.3, 0.3], 3) == [1, 1, 1]
    assert shares([0.4, 0.3, 0.3], 40) == [4, 4, 4]
    assert shares([0.9, 0.1], 4, novelty=0.5) == [4, 4], "half of the tokens were others' too, so twice as many"
    assert shares([0.8, 0.1, 0.1], 2, free=0b010) == [2, 2, 0], "who costs nothing is no rival"
    assert shares([0.9, 0.05, 0.05], 2, unscored=frozenset({2})) == [2, 0, 1], "a drafter without scores gets a share"
    assert shares([1.0, 0.0], 8) == [4, 0], "who does not take part is not asked"


def test_a_pool_learns_how_much_its_drafters_have_in_common() -> None:
    """Two that always say the same, and two that never do; only ``union`` under a routing by weight asks."""
    for second, wanted in (([1, 2, 3], 0.5), ([2, 1, 3], 1.0)):
        pool = pool_of({"a": ScriptedDrafter([1, 2, 3]), "b": ScriptedDrafter(second)}, "union", "hedge", 5)
        for member in pool.members:
            member.costless = False
        for n in range(200):
            sampling = SamplingParams(temperature=0)
            pool.propose([DraftContext(f"s{n}", [0, 4], 1, sampling, 0, StreamKind.TARGET)], [DraftBudget(3, 6)])
        assert pool.pool_stats.novelty.tolist() == pytest.approx([1.0, wanted], abs=0.01)
