"""Trees keep the distribution: every path by enumeration, with errors that the enumeration must detect."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast
from unittest.mock import patch

import numpy as np
import pytest

from cospec.acceptance.recursive import Recursive
from cospec.acceptance.typical import Typical
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, TargetProbs, VerifyResult
from cospec.drafters import dynamic_tree
from cospec.drafters.model import ModelDrafter
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import BranchingRandom, BranchTrace, Unsound, enumerate_runs, total_variation
from harness.reference import joint_distribution_of
from harness.toys import (
    ScriptedDrafter,
    enumerated_distribution,
    make_request,
    run_all,
    tokens_of,
    toy_engine,
    verifier_of,
)

EXACT, SEEN = 1e-12, 1e-3
PROMPT = (0, 1, 0)
PLAIN = SamplingParams(max_tokens=8)
MIXED = SamplingParams(
    max_tokens=8, temperature=0.8, top_p=0.95, repetition_penalty=1.3, logit_bias={1: 0.5}, stop_token_ids=(2,)
)
SHAPES = {"two": (1, (2,), 2), "three": (1, (3,), 3), "two and one": (2, (2, 1), 3), "best two": (2, (2, 1), 2)}


def target() -> ToyModel:
    return ToyModel(3, order=2, seed=1)


def other() -> ToyModel:
    return ToyModel(3, order=1, seed=5, sharpness=1.5)


def error(
    drafter: ModelDrafter | ScriptedDrafter,
    shape: str,
    params: SamplingParams = PLAIN,
    acceptance_method: AcceptanceMethod | str = "recursive",
    length: int = 3,
) -> float:
    depth, widths, nodes = SHAPES[shape]
    name = acceptance_method if isinstance(acceptance_method, str) else acceptance_method.name
    engine = toy_engine(target(), drafter, name, depth, max_nodes=nodes, widths=widths)
    if not isinstance(acceptance_method, str):
        verifier_of(engine).acceptance_methods = {name: acceptance_method}
    found = enumerated_distribution(engine, PROMPT, params, length)
    assert engine.metrics().kv_cache_usage == 0
    return total_variation(found, joint_distribution_of(target(), params, PROMPT, length))


@pytest.mark.parametrize("params", [PLAIN, MIXED], ids=["plain", "mixed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_drawn_trees_keep_the_distribution(shape: str, params: SamplingParams) -> None:
    assert error(ModelDrafter(other()), shape, params, length=3 if SHAPES[shape][0] == 1 else 2) < EXACT
    assert error(ModelDrafter(target()), shape, params, length=2) < EXACT


def test_free_trees_of_two_words_keep_the_distribution() -> None:
    """The shape is left to the drafter, and side branches are cut by what lies under other ones."""
    model = ToyModel(2, order=2, seed=1)
    for depth, nodes, length in ((2, 3, 4), (2, 4, 3), (3, 4, 4)):
        drafter = ModelDrafter(ToyModel(2, order=1, seed=3, sharpness=1.5))
        engine = toy_engine(model, drafter, "recursive", depth, max_nodes=nodes)
        found = enumerated_distribution(engine, PROMPT[:2], PLAIN, length)
        assert (
            total_variation(found, joint_distribution_of(ToyModel(2, order=2, seed=1), PLAIN, PROMPT[:2], length))
            < EXACT
        )


@pytest.mark.parametrize("acceptance_method", ["recursive", "match"])
@pytest.mark.parametrize("parents", [(-1, -1), (-1, -1, 1), (-1, 0, -1, 2, 2, 4)])
def test_chosen_trees_keep_the_distribution(acceptance_method: str, parents: tuple[int, ...]) -> None:
    for tokens in ((0, 1, 2, 0, 1, 2), (1, 1, 0, 2, 2, 0)):
        drafter = ScriptedDrafter(tokens[: len(parents)], parents)
        engine = toy_engine(target(), drafter, acceptance_method, 3, max_nodes=6)
        found = enumerated_distribution(engine, PROMPT, MIXED, 4)
        assert total_variation(found, joint_distribution_of(target(), MIXED, PROMPT, 4)) < EXACT


class WithReplacement(ModelDrafter):
    """Reports for every child the q of a draw with replacement, though the elder siblings were out of it."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        return [self.unreduced(draft) for draft in super().propose(contexts, budgets)]

    @staticmethod
    def unreduced(draft: Draft) -> Draft:
        assert draft.q is not None
        eldest = [draft.parents.index(parent) for parent in draft.parents]
        return replace(draft, q=draft.q[eldest])


class Unnormalised(WithReplacement):
    """Takes the elder siblings out of q and forgets to divide by what is left."""

    @staticmethod
    def unreduced(draft: Draft) -> Draft:
        assert draft.q is not None
        whole = WithReplacement.unreduced(draft).q
        assert whole is not None
        return replace(draft, q=np.where(draft.q > 0, whole, 0.0))


class OrderedByValue(ModelDrafter):
    """Puts the child that its own model likes best first."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        return [self._sorted(draft) for draft in super().propose(contexts, budgets)]

    @staticmethod
    def _sorted(draft: Draft) -> Draft:
        assert draft.q is not None
        q = draft.q[0]
        order = sorted(range(len(draft)), key=lambda node: (draft.parents[node], -q[draft.tokens[node]]))
        place = {-1: -1} | {node: at for at, node in enumerate(order)}
        tokens = tuple(draft.tokens[node] for node in order)
        return replace(draft, tokens=tokens, parents=tuple(place[draft.parents[node]] for node in order))


class KeepsTheLikelier(ModelDrafter):
    """Drafts two children and drops the one whose token turned out less likely."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        return [self._cut(draft) for draft in super().propose(contexts, budgets)]

    @staticmethod
    def _cut(draft: Draft) -> Draft:
        assert draft.q is not None
        q = draft.q[0]
        best = max(range(len(draft)), key=lambda node: q[draft.tokens[node]])
        name, confidence = draft.drafters[:1], None
        return Draft(draft.id, draft.base_len, draft.tokens[best : best + 1], (-1,), name, draft.q[:1], confidence)


@pytest.mark.parametrize("drafter", [WithReplacement, Unnormalised, OrderedByValue, KeepsTheLikelier])
def test_a_wrong_tree_is_seen(drafter: type[ModelDrafter]) -> None:
    shape = "three" if drafter is OrderedByValue else "two"
    assert error(drafter(other()), shape, length=2) > SEEN


def test_children_that_share_their_numbers_are_seen() -> None:
    """Draws of one position apart by their branch alone."""
    stream = BranchingRandom.stream
    with (
        patch.object(BranchingRandom, "stream", lambda self, position, kind, branch=0: stream(self, position, kind)),
        pytest.raises(Unsound, match="was used twice"),
    ):
        error(ModelDrafter(other()), "two", length=2)


class SkipsTheResidual(Recursive):
    """Tests every child against the first distribution, not the residual."""

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        with patch("cospec.acceptance.recursive.residual", lambda probs, draft, node: probs):
            return super().verify(draft, target, draws)


class RecoversFromTheTarget(Recursive):
    """Takes the children's share away for their tests, and forgets it for the token after them."""

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        result = super().verify(draft, target, draws)
        if result.bonus:
            return result
        row = result.path[-1] + 1 if result.path else 0
        position = draft.base_len + len(result.path)
        return result._replace(token=draws.token(target.distribution[row], position, StreamKind.TARGET))


@pytest.mark.parametrize(
    "acceptance_method",
    [SkipsTheResidual(), RecoversFromTheTarget()],
    ids=lambda acceptance_method: type(acceptance_method).__name__,
)
def test_a_wrong_rule_is_seen(acceptance_method: AcceptanceMethod) -> None:
    assert error(ModelDrafter(other()), "two", acceptance_method=acceptance_method, length=2) > SEEN


def test_a_rule_that_does_not_claim_to_be_exact_is_not() -> None:
    assert not Typical.exact
    assert error(ScriptedDrafter([0, 1], [-1, -1]), "two", acceptance_method=Typical(), length=2) > SEEN


def with_replacement(p: Floats, q: Floats, count: int, trace: BranchTrace) -> int:
    """``count`` children of the root drawn independently from q, judged; the first token that this gives."""
    tokens = tuple(trace.choose(list(q)) for _ in range(count))
    draft = Draft("s", 5, tokens, (-1,) * count, ("d",) * count, np.tile(q, (count, 1)))
    result = Recursive().verify(
        draft, TargetProbs(probs=np.tile(p, (count + 1, 1))), cast(RandomStreams, BranchingRandom(trace, 5))
    )
    assert result.token is not None
    return tokens[result.path[0]] if result.path else result.token


@pytest.mark.parametrize("seed", range(20))
def test_children_drawn_with_replacement_keep_the_distribution(seed: int) -> None:
    chance = np.random.default_rng(seed)
    p, q = (np.maximum(chance.dirichlet(np.ones(4) * 0.5) - 0.05, 0) for _ in range(2))
    p, q = p / p.sum(), q / q.sum()
    probs = enumerate_runs(lambda trace: with_replacement(p, q, 3, trace))
    assert total_variation(probs, {token: float(mass) for token, mass in enumerate(p) if mass}) < EXACT


def test_the_oracle_of_the_mutations_is_the_engine() -> None:
    """The unchanged drafter and rule, on the shapes that the mistakes are seen on."""
    assert error(ModelDrafter(other()), "two", length=2) < EXACT
    assert error(ModelDrafter(other()), "three", length=2) < EXACT


@pytest.mark.parametrize("acceptance_method", ["match", "recursive", "typical"])
@pytest.mark.parametrize("shape", [{"max_nodes": 7}, {"widths": (3, 2, 1)}, {"widths": (2, 2, 2), "max_nodes": 6}])
def test_greedy_tokens_are_the_same_with_trees(acceptance_method: str, shape: dict[str, object]) -> None:
    params = SamplingParams(temperature=0, max_tokens=40, repetition_penalty=1.1)
    requests = [make_request(f"r{n}", (n % 5, 1, 2), params) for n in range(6)]
    plain = tokens_of(run_all(toy_engine(ToyModel(5, order=3, seed=1), None), requests))
    engine = toy_engine(
        ToyModel(5, order=3, seed=1), ModelDrafter(ToyModel(5, order=2, seed=1)), acceptance_method, 3, **shape
    )
    assert tokens_of(run_all(engine, requests)) == plain
    metrics = engine.metrics()
    assert sum(metrics.accepted_tokens.values()) > 0


def test_seeded_tokens_do_not_depend_on_trees() -> None:
    params = [SamplingParams(seed=n, max_tokens=40) for n in range(8)]
    requests = [make_request(f"r{n}", (n % 5, 1, 2), each) for n, each in enumerate(params)]
    plain = tokens_of(run_all(toy_engine(ToyModel(5, order=3, seed=1), None), requests))
    drafter = SpyOnPaths(ToyModel(5, order=2, seed=1))
    engine = toy_engine(ToyModel(5, order=3, seed=1), drafter, "match", 3, max_nodes=9)
    assert tokens_of(run_all(engine, requests)) == plain
    assert drafter.moved > 10


class SpyOnPaths(ModelDrafter):
    """Counts accepted paths that are no prefix of their tree."""

    moved = 0

    def commit(self, commits: Sequence[Commit]) -> None:
        self.moved += sum(commit.path != tuple(range(len(commit.path))) for commit in commits)
        super().commit(commits)


def test_budgets_that_branch() -> None:
    assert not dynamic_tree.branches(DraftBudget(4, 4))
    assert dynamic_tree.branches(DraftBudget(4, 5))
    assert dynamic_tree.branches(DraftBudget(4, 4, threshold=0.1))
