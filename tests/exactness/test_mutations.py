"""The checks of this folder are able to fail: each mistake below must be seen by the check that guards against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast
from unittest.mock import patch

import numpy as np
import pytest

from cospec.acceptance.block import Block
from cospec.acceptance.rejection import Rejection
from cospec.acceptance.residual import residual
from cospec.core.model_io import SequenceSlice
from cospec.core.plugin_base import AcceptanceMethod, Drafter
from cospec.core.sampling import History
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, TargetProbs, VerifyResult
from cospec.drafters.model import ModelDrafter
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import BranchingRandom, BranchTrace, Unsound, total_variation
from harness.reference import joint_distribution_of
from harness.target_probs import target_probs_of
from harness.toys import ScriptedDrafter, enumerated_distribution, run_all, toy_engine, verifier_of
from harness.toys import make_request as request

SEEN = 1e-3
LONGER_THAN_ANY = 1_000_000  # tokens
PROMPT = (0, 1, 0)
PLAIN = SamplingParams(max_tokens=8)


def target() -> ToyModel:
    return ToyModel(3, order=2, seed=1)


def other() -> Drafter:
    return ModelDrafter(ToyModel(3, order=1, seed=5, sharpness=1.5))


def error(
    acceptance_method: AcceptanceMethod | str,
    drafter: Drafter,
    model: ToyModel | None = None,
    params: SamplingParams = PLAIN,
    shape: tuple[int, int] = (2, 3),
) -> float:
    """Total variation between the enumerated distribution and the target's; ``shape``: lengths of draft and output."""
    k, length = shape
    name = acceptance_method if isinstance(acceptance_method, str) else acceptance_method.name
    engine = toy_engine(model or target(), drafter, name, k)
    if not isinstance(acceptance_method, str):
        verifier_of(engine).acceptance_methods = {name: acceptance_method}
    return total_variation(
        enumerated_distribution(engine, PROMPT, params, length), joint_distribution_of(target(), params, PROMPT, length)
    )


class RejectionWith(Rejection):
    """Rejection with one step replaced."""

    def recovered(self, target_probs_of: Floats, draft: Draft, node: int) -> Floats:
        return residual(target_probs_of[node], draft, node)

    def bonus(self, target_probs_of: Floats) -> Floats:
        return np.asarray(target_probs_of[-1])

    def accepts(self, uniform: float, drawn_with: float, wanted: float) -> bool:
        return uniform * drawn_with < wanted

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        target_probs_of, n = target.distribution, len(draft)
        uniforms = draws.uniforms(draft.base_len, n, StreamKind.ACCEPT)
        for node, token in enumerate(draft.tokens):
            drawn_with = 1.0 if draft.q is None else float(draft.q[node, token])
            if not self.accepts(uniforms[node], drawn_with, float(target_probs_of[node, token])):
                weights = self.recovered(target_probs_of, draft, node)
                return VerifyResult(
                    tuple(range(node)), draws.token(weights, draft.base_len + node, StreamKind.RECOVER), False
                )
        return VerifyResult(
            tuple(range(n)), draws.token(self.bonus(target_probs_of), draft.base_len + n, StreamKind.TARGET), True
        )


class NoResidual(RejectionWith):
    def recovered(self, target_probs_of: Floats, draft: Draft, node: int) -> Floats:
        return np.asarray(target_probs_of[node])


class WrongResidualRow(RejectionWith):
    def recovered(self, target_probs_of: Floats, draft: Draft, node: int) -> Floats:
        rest = residual(target_probs_of[node + 1], draft, node)
        return rest if rest.any() else np.asarray(target_probs_of[node])


class ResidualWithoutClip(RejectionWith):
    def recovered(self, target_probs_of: Floats, draft: Draft, node: int) -> Floats:
        return (
            np.abs(target_probs_of[node] - draft.q[node]) if draft.q is not None else np.asarray(target_probs_of[node])
        )


class BonusFromTheRowBefore(RejectionWith):
    def bonus(self, target_probs_of: Floats) -> Floats:
        return np.asarray(target_probs_of[-2])


class AcceptsByProbability(RejectionWith):
    """Accepts with r instead of r / q."""

    def accepts(self, uniform: float, drawn_with: float, wanted: float) -> bool:
        return uniform < wanted


class BlockResidualUnscaled(Block):
    """Recovers as if the kept prefix weighed 1."""

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        with patch(
            "cospec.acceptance.block.residual",
            lambda target_probs_of, draft, node, scale: residual(target_probs_of, draft, node, 1.0),
        ):
            return super().verify(draft, target, draws)


class BlockWithoutSurplus(Block):
    """Tests each prefix by its weight alone."""

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        with patch("cospec.acceptance.block.surplus", lambda target_probs_of, draft, node, weight: np.array([weight])):
            return super().verify(draft, target, draws)


def test_the_copy_that_is_mutated_is_right() -> None:
    assert error(RejectionWith(), other()) < 1e-12


@pytest.mark.parametrize(
    "acceptance_method",
    [
        NoResidual(),
        WrongResidualRow(),
        ResidualWithoutClip(),
        BonusFromTheRowBefore(),
        AcceptsByProbability(),
        BlockResidualUnscaled(),
        BlockWithoutSurplus(),
    ],
    ids=lambda acceptance_method: type(acceptance_method).__name__,
)
def test_a_wrong_rule_is_seen(acceptance_method: AcceptanceMethod) -> None:
    shape = (2, 3) if isinstance(acceptance_method, Block) else (1, 3)  # the block's mistakes need a block
    assert error(acceptance_method, other(), shape=shape) > SEEN


class ReportsUntruncated(ModelDrafter):
    """Draws from the truncated q, reports the whole one."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        known = {context.id: context for context in contexts}
        return [replace(draft, q=self.whole(known[draft.id], draft)) for draft in super().propose(contexts, budgets)]

    def whole(self, context: DraftContext, draft: Draft) -> Floats:
        assert isinstance(self.model, ToyModel)
        rows = []
        for node in range(len(draft)):
            logits = self.model.logits([*context.tokens, *draft.tokens[:node]])
            history = History(context.tokens, context.prompt_len, [draft.tokens[:node]])
            rows.append(target_probs_of(logits[None], replace(context.sampling, top_k=0), history)[0])
        return np.stack(rows)


class ReportsColder(ReportsUntruncated):
    """Reports q at another temperature than it drew with."""

    def whole(self, context: DraftContext, draft: Draft) -> Floats:
        colder = replace(context, sampling=replace(context.sampling, temperature=0.5))
        return super().whole(colder, draft)


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_a_q_before_truncation_is_seen(acceptance_method: str) -> None:
    drafter = ToyModel(3, order=1, seed=5, sharpness=1.5)
    params = SamplingParams(max_tokens=8, top_k=2)
    assert error(acceptance_method, ModelDrafter(drafter), params=params) < 1e-12
    assert error(acceptance_method, ReportsUntruncated(drafter), params=params) > SEEN
    assert (
        error(acceptance_method, ReportsUntruncated(ToyModel(3, order=1, seed=5, sharpness=1.5)), shape=(1, 3)) < 1e-12
    )
    assert error(acceptance_method, ReportsColder(ToyModel(3, order=1, seed=5, sharpness=1.5)), shape=(1, 3)) > SEEN


class KeepsWhatItHas(ToyModel):
    """Trusts every cell that was written once: the cache of rejected tokens goes stale."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.seen: dict[str, int] = {}

    def write(self, id: str, place: int, token: int) -> None:
        if place >= self.seen.get(id, 0):
            self.seen[id] = place + 1
            super().write(id, place, token)


class DoesNotMove(ToyModel):
    """Leaves the accepted nodes of a tree where they were scored."""

    def commit(self, commits: Sequence[Commit]) -> None:
        pass


class SeesSiblings(ToyModel):
    """Attends to every node before it instead of its ancestors."""

    def context(self, part: SequenceSlice, row: int) -> list[int]:
        return [self.read(part.id, place) for place in range(part.start + row + 1)]


@pytest.mark.parametrize("acceptance_method", ["match", "rejection", "block"])
def test_a_stale_cache_is_seen(acceptance_method: str) -> None:
    assert error(acceptance_method, ScriptedDrafter([2, 1]), KeepsWhatItHas(3, order=2, seed=1)) > SEEN


@pytest.mark.parametrize("model", [DoesNotMove, SeesSiblings])
def test_a_mistaken_tree_is_seen(model: type[ToyModel]) -> None:
    tree = ScriptedDrafter([0, 1, 2, 0], [-1, -1, 1, 1])
    assert error("match", tree, shape=(4, 5)) < 1e-12
    assert error("match", tree, model(3, order=2, seed=1), shape=(4, 5)) > SEEN


def test_penalties_without_the_draft_tokens_are_seen() -> None:
    params = SamplingParams(max_tokens=8, repetition_penalty=2.0, frequency_penalty=0.5)
    with patch("cospec.acceptance.python_verification.path_to", lambda parents, node: []):
        assert error("match", ScriptedDrafter([0, 1]), params=params) > SEEN


class ForgetsToMove(ModelDrafter):
    """Leaves the accepted nodes of its tree where they were fed."""

    def commit(self, commits: Sequence[Commit]) -> None:
        with patch.object(self.model, "commit", lambda moved: None):
            super().commit(commits)


class FeedsOneTooFew(ModelDrafter):
    """Feeds each token one place too early after an accepted draft."""

    def commit(self, commits: Sequence[Commit]) -> None:
        super().commit(commits)
        cache = self.draft_kv_cache
        assert cache is not None
        for commit in commits:
            if commit.path:
                fed = LONGER_THAN_ANY - cache.backlog_len(commit.id, LONGER_THAN_ANY)
                cache.report_written(commit.id, fed + 1)


def acceptance(drafter: Drafter, nodes: int = 3, prompts: int = 12) -> float:
    """Share of accepted tokens. The drafter draws mostly from the target distribution, and is rejected now and then."""
    engine = toy_engine(ToyModel(5, order=3, seed=1), drafter, "match", 3, max_nodes=nodes)
    run_all(engine, [request(f"r{n}", (n % 5, 1), SamplingParams(max_tokens=30, seed=n)) for n in range(prompts)])
    metrics = engine.metrics()
    return sum(metrics.accepted_tokens.values()) / sum(metrics.draft_tokens.values())


class Stumbles(ToyModel):
    """Equal to the target except after every token 0, so that drafts are cut now and then."""

    def __init__(self) -> None:
        super().__init__(5, order=3, seed=1)
        self.table[:, :, 0] = self.table[:, :, 0].flip(-1)


@pytest.mark.parametrize(("mutant", "nodes"), [(FeedsOneTooFew, 3), (ForgetsToMove, 9)])
def test_a_drafter_with_a_stale_cache_is_seen_by_its_acceptance(
    mutant: Callable[[ToyModel], Drafter], nodes: int
) -> None:
    """The distribution stays right, because q is what the drafter drew from; fewer tokens are accepted."""
    assert acceptance(mutant(Stumbles()), nodes) < acceptance(ModelDrafter(Stumbles()), nodes) - 0.02


class Never:
    """Draws whose every uniform number is zero, which no real stream gives."""

    def uniforms(self, position: int, count: int, kind: StreamKind, branch: int = 0) -> Floats:
        return np.zeros(count)

    def token(self, weights: Floats, position: int, kind: StreamKind, branch: int = 0) -> int:
        return int(weights.argmax())


class AcceptsEquality(RejectionWith):
    def accepts(self, uniform: float, drawn_with: float, wanted: float) -> bool:
        return uniform * drawn_with <= wanted


@pytest.mark.parametrize(("acceptance_method", "kept"), [(Rejection(), 0), (Block(), 0), (AcceptsEquality(), 1)])
@pytest.mark.parametrize("q", [None, np.array([[0.5, 0.5, 0.0]])])
def test_a_token_of_probability_zero_is_never_kept(
    acceptance_method: AcceptanceMethod, kept: int, q: Floats | None
) -> None:
    """Strictly less, whatever the draw; ``<=`` is seen."""
    draft = Draft("s", 3, (0,), (-1,), ("d",), q)
    scores = TargetProbs(probs=np.array([[0.0, 0.3, 0.7], [0.2, 0.3, 0.5]]))
    assert len(acceptance_method.verify(draft, scores, cast(RandomStreams, Never())).path) == kept


def test_noise_that_serves_two_rounds_is_seen() -> None:
    """A rule that looks at the whole draft must not meet the same numbers again in the next round."""
    with pytest.raises(Unsound, match="was used twice"):
        enumerated_distribution(toy_engine(target(), other(), "block", 2), PROMPT, PLAIN, by_round=False)


class OneStream(Rejection):
    """Tests every token with the numbers it was drawn with."""

    name: ClassVar[str] = "rejection"

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        assert isinstance(draws, BranchingRandom)
        for node in range(len(draft)):
            draws.trace.use(("token", draft.base_len + node, StreamKind.DRAFT, draws.base, 0))
        return super().verify(draft, target, draws)


def test_one_stream_for_drafting_and_accepting_is_seen() -> None:
    with pytest.raises(Unsound, match="was used twice"):
        error(OneStream(), other())


def test_the_trace_visits_every_path_once() -> None:
    trace = BranchTrace()
    assert [trace.choose([0.5, 0.0, 0.5]), trace.choose([1.0]), trace.choose([0.25, 0.75])] == [0, 0, 0]
    assert trace.left == [(2,), (0, 0, 1)]
    assert trace.probability == 0.125
