"""What a drafter would have guessed in the steps that it missed, as the forward shows that feeds their tokens."""

from __future__ import annotations

from dataclasses import replace

from cospec.core.plugin_base import SoleDrafter
from cospec.core.types import Commit, DraftBudget, DraftContext
from cospec.drafters.model import ModelDrafter
from cospec.drafters.pool.pool import MISSED_STEPS, PoolDrafter
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from harness.pools import pool_of

PROMPT = [0, 3, 1]
CHAIN, COUNTED = DraftBudget(2, 2), DraftBudget(2, 2, count_hits=True)


def toy(seed: int) -> ToyModel:
    return ToyModel(5, order=2, seed=seed, sharpness=3.0)


def context(tokens: list[int], drafters: tuple[str, ...] | None = None) -> DraftContext:
    return DraftContext("s", tokens, len(PROMPT), SamplingParams(temperature=0), 0, StreamKind.TARGET, 0, drafters)


def best(model: ToyModel, tokens: list[int]) -> int:
    return int(model.logits(tokens).argmax())


def written(target: ToyModel, tokens: list[int], count: int) -> list[int]:
    """The tokens and ``count`` more of the greedy target."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(best(target, tokens))
    return tokens


def test_hits_count_the_likeliest_tokens_without_more_forwards() -> None:
    models = toy(5), toy(5)
    plain, counting = (ModelDrafter(model) for model in models)
    tokens = written(toy(6), PROMPT, 1)
    for drafter in (plain, counting):
        drafter.propose([context(tokens)], [CHAIN])
    for missed in (1, 2, 3, 7):
        tokens, fed = written(toy(6), tokens, missed), len(tokens)
        for drafter in (plain, counting):
            drafter.commit([Commit("s", fed, tuple(tokens[fed:]), (), fed)])
        own, counted = (d.propose([context(tokens)], [b])[0] for d, b in ((plain, CHAIN), (counting, COUNTED)))
        assert (own.tokens, own.hits) == (counted.tokens, (0, 0))
        compared = range(fed + 1, len(tokens)) if missed >= 3 else ()
        right = sum(best(models[1], tokens[:place]) == tokens[place] for place in compared)
        assert counted.hits == (right, len(compared))
    assert (models[0].calls, models[0].rows) == (models[1].calls, models[1].rows)


def test_prompt_and_unverified_tokens_are_not_compared() -> None:
    drafter, tokens = ModelDrafter(toy(5)), written(toy(6), PROMPT, 4)
    assert drafter.propose([context(tokens)], [COUNTED])[0].hits[1] == 4
    drafter.free(["s"])
    assert drafter.propose([replace(context(tokens), assumed=2)], [COUNTED])[0].hits == (0, 0)


def run(pool: PoolDrafter, target: ToyModel, tokens: list[int], names: tuple[str, ...], steps: int) -> list[int]:
    """Let the named drafters propose; a token of the target follows each draft, which is rejected."""
    for _ in range(steps):
        pool.propose([context(tokens, names)], [CHAIN])
        base, tokens = len(tokens), written(target, tokens, 1)
        pool.commit([Commit("s", base, tuple(tokens[base:]), (), base, 2, rejected=True)])
    return tokens


def test_the_weight_follows_with_the_first_draft_after_missed_steps() -> None:
    """Before anything of that draft is verified. Without hits, ``all`` weighs by verified drafts alone."""
    weights = {}
    for routing in ("hedge", "all"):
        target = toy(6)
        pool = pool_of({"right": ModelDrafter(toy(6)), "wrong": ModelDrafter(toy(5))}, "vote", routing, 5)
        tokens = run(pool, target, list(PROMPT), ("wrong",), 9)
        before = pool.weights()["right"]
        pool.propose([context(tokens, ("right",))], [CHAIN])
        weights[routing] = before, pool.weights()["right"]
    assert weights["hedge"][1] > weights["hedge"][0] + 0.05
    assert weights["all"][1] == weights["all"][0]


def test_native_code_drafts_again_once_the_missed_steps_are_counted() -> None:
    pool = pool_of({"right": ModelDrafter(toy(6)), "wrong": ModelDrafter(toy(5))}, "vote", "hedge", 5)
    tokens = run(pool, toy(6), list(PROMPT), ("wrong",), 5)
    one = context(tokens, ("right",))
    assert pool.drafts_alone(one, CHAIN) == MISSED_STEPS
    tokens = run(pool, toy(6), tokens, ("right",), 1)
    assert isinstance(pool.drafts_alone(context(tokens, ("right",)), CHAIN), SoleDrafter)
