"""The checks of this folder are able to fail: each mistake below must be seen by the check that guards against it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast
from unittest.mock import patch

import numpy as np
import pytest

from cospec.batches import Segment
from cospec.drafters.model import ModelDrafter
from cospec.draws import Draws, Floats, Purpose
from cospec.models.toy import ToyModel
from cospec.params import SamplingParams
from cospec.plugins import Drafter, Rule
from cospec.rules.block import Block
from cospec.rules.rejection import Rejection
from cospec.rules.residual import residual
from cospec.sampling import History, law
from cospec.types import Budget, Commit, Context, Draft, Scores, Verdict
from harness.oracle import BranchingDraws, Trace, Unsound, total_variation
from harness.reference import joint_law
from harness.toys import ScriptedDrafter, enumerated_law, run_all, toy_engine, verifier_of
from harness.toys import make_request as request

SEEN = 1e-3
PROMPT = (0, 1, 0)
PLAIN = SamplingParams(max_tokens=8)


def target() -> ToyModel:
    return ToyModel(3, order=2, seed=1)


def other() -> Drafter:
    return ModelDrafter(ToyModel(3, order=1, seed=5, sharpness=1.5))


def error(
    rule: Rule | str,
    drafter: Drafter,
    model: ToyModel | None = None,
    params: SamplingParams = PLAIN,
    shape: tuple[int, int] = (2, 3),
) -> float:
    """Total variation between the enumerated law and the target's; ``shape`` is the draft's and the law's length."""
    k, length = shape
    name = rule if isinstance(rule, str) else rule.name
    engine = toy_engine(model or target(), drafter, name, k)
    if not isinstance(rule, str):
        verifier_of(engine).rules = {name: rule}
    return total_variation(enumerated_law(engine, PROMPT, params, length), joint_law(target(), params, PROMPT, length))


class RejectionWith(Rejection):
    """Rejection with one step replaced."""

    def recovered(self, law: Floats, draft: Draft, node: int) -> Floats:
        return residual(law[node], draft, node)

    def bonus(self, law: Floats) -> Floats:
        return np.asarray(law[-1])

    def accepts(self, uniform: float, drawn_with: float, wanted: float) -> bool:
        return uniform * drawn_with < wanted

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        law, n = scores.distribution, len(draft)
        uniforms = draws.uniforms(draft.base_len, n, Purpose.ACCEPT)
        for node, token in enumerate(draft.tokens):
            drawn_with = 1.0 if draft.q is None else float(draft.q[node, token])
            if not self.accepts(uniforms[node], drawn_with, float(law[node, token])):
                weights = self.recovered(law, draft, node)
                return Verdict(tuple(range(node)), draws.token(weights, draft.base_len + node, Purpose.RECOVER), False)
        return Verdict(tuple(range(n)), draws.token(self.bonus(law), draft.base_len + n, Purpose.TARGET), True)


class NoResidual(RejectionWith):
    def recovered(self, law: Floats, draft: Draft, node: int) -> Floats:
        return np.asarray(law[node])


class WrongResidualRow(RejectionWith):
    def recovered(self, law: Floats, draft: Draft, node: int) -> Floats:
        rest = residual(law[node + 1], draft, node)
        return rest if rest.any() else np.asarray(law[node])


class ResidualWithoutClip(RejectionWith):
    def recovered(self, law: Floats, draft: Draft, node: int) -> Floats:
        return np.abs(law[node] - draft.q[node]) if draft.q is not None else np.asarray(law[node])


class BonusFromTheRowBefore(RejectionWith):
    def bonus(self, law: Floats) -> Floats:
        return np.asarray(law[-2])


class AcceptsByProbability(RejectionWith):
    """Accepts with r instead of r / q."""

    def accepts(self, uniform: float, drawn_with: float, wanted: float) -> bool:
        return uniform < wanted


class BlockResidualUnscaled(Block):
    """Recovers as if the kept prefix weighed 1."""

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        with patch("cospec.rules.block.residual", lambda law, draft, node, scale: residual(law, draft, node, 1.0)):
            return super().judge(draft, scores, draws)


class BlockWithoutSurplus(Block):
    """Tests each prefix by its weight alone."""

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        with patch("cospec.rules.block.surplus", lambda law, draft, node, weight: np.array([weight])):
            return super().judge(draft, scores, draws)


def test_the_copy_that_is_mutated_is_right() -> None:
    assert error(RejectionWith(), other()) < 1e-12


@pytest.mark.parametrize(
    "rule",
    [
        NoResidual(),
        WrongResidualRow(),
        ResidualWithoutClip(),
        BonusFromTheRowBefore(),
        AcceptsByProbability(),
        BlockResidualUnscaled(),
        BlockWithoutSurplus(),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_a_wrong_rule_is_seen(rule: Rule) -> None:
    shape = (2, 3) if isinstance(rule, Block) else (1, 3)  # the block's mistakes need a block
    assert error(rule, other(), shape=shape) > SEEN


class ReportsUntruncated(ModelDrafter):
    """Draws from the truncated q, reports the whole one."""

    def propose(self, contexts: Sequence[Context], budgets: Sequence[Budget]) -> list[Draft]:
        known = {context.id: context for context in contexts}
        return [replace(draft, q=self.whole(known[draft.id], draft)) for draft in super().propose(contexts, budgets)]

    def whole(self, context: Context, draft: Draft) -> Floats:
        assert isinstance(self.model, ToyModel)
        rows = []
        for node in range(len(draft)):
            logits = self.model.logits([*context.tokens, *draft.tokens[:node]])
            history = History(context.tokens, context.prompt_len, [draft.tokens[:node]])
            rows.append(law(logits[None], replace(context.sampling, top_k=0), history)[0])
        return np.stack(rows)


class ReportsColder(ReportsUntruncated):
    """Reports q at another temperature than it drew with."""

    def whole(self, context: Context, draft: Draft) -> Floats:
        colder = replace(context, sampling=replace(context.sampling, temperature=0.5))
        return super().whole(colder, draft)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_q_before_truncation_is_seen(rule: str) -> None:
    drafter = ToyModel(3, order=1, seed=5, sharpness=1.5)
    params = SamplingParams(max_tokens=8, top_k=2)
    assert error(rule, ModelDrafter(drafter), params=params) < 1e-12
    assert error(rule, ReportsUntruncated(drafter), params=params) > SEEN
    assert error(rule, ReportsUntruncated(ToyModel(3, order=1, seed=5, sharpness=1.5)), shape=(1, 3)) < 1e-12
    assert error(rule, ReportsColder(ToyModel(3, order=1, seed=5, sharpness=1.5)), shape=(1, 3)) > SEEN


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

    def context(self, segment: Segment, row: int) -> list[int]:
        return [self.read(segment.id, place) for place in range(segment.start + row + 1)]


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_stale_cache_is_seen(rule: str) -> None:
    assert error(rule, ScriptedDrafter([2, 1]), KeepsWhatItHas(3, order=2, seed=1)) > SEEN


@pytest.mark.parametrize("model", [DoesNotMove, SeesSiblings])
def test_a_mistaken_tree_is_seen(model: type[ToyModel]) -> None:
    tree = ScriptedDrafter([0, 1, 2, 0], [-1, -1, 1, 1])
    assert error("match", tree, shape=(4, 5)) < 1e-12
    assert error("match", tree, model(3, order=2, seed=1), shape=(4, 5)) > SEEN


def test_penalties_without_the_draft_tokens_are_seen() -> None:
    params = SamplingParams(max_tokens=8, repetition_penalty=2.0, frequency_penalty=0.5)
    with patch("cospec.engine.judging.path_to", lambda parents, node: []):
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
        for commit in commits:
            if commit.path:
                self._follower._places[commit.id].fed += 1


def acceptance(drafter: Drafter, nodes: int = 3, prompts: int = 12) -> float:
    """Share of accepted tokens, with the target's own law drafted most of the time and a reject now and then."""
    engine = toy_engine(ToyModel(5, order=3, seed=1), drafter, "match", 3, max_nodes=nodes)
    run_all(engine, [request(f"r{n}", (n % 5, 1), SamplingParams(max_tokens=30, seed=n)) for n in range(prompts)])
    metrics = engine.metrics()
    return sum(metrics.accepted_tokens.values()) / sum(metrics.draft_tokens.values())


class Stumbles(ToyModel):
    """Equal to the target except behind every token 0, so that drafts are cut now and then."""

    def __init__(self) -> None:
        super().__init__(5, order=3, seed=1)
        self.table[:, :, 0] = self.table[:, :, 0].flip(-1)


@pytest.mark.parametrize(("mutant", "nodes"), [(FeedsOneTooFew, 3), (ForgetsToMove, 9)])
def test_a_drafter_with_a_stale_cache_is_seen_by_its_acceptance(
    mutant: Callable[[ToyModel], Drafter], nodes: int
) -> None:
    """Its law is not wrong, because q is what it drew from; it only agrees less often."""
    assert acceptance(mutant(Stumbles()), nodes) < acceptance(ModelDrafter(Stumbles()), nodes) - 0.02


class Never:
    """Draws whose every uniform number is zero, which no real stream gives."""

    def uniforms(self, position: int, count: int, purpose: Purpose, branch: int = 0) -> Floats:
        return np.zeros(count)

    def token(self, weights: Floats, position: int, purpose: Purpose, branch: int = 0) -> int:
        return int(weights.argmax())


class AcceptsEquality(RejectionWith):
    def accepts(self, uniform: float, drawn_with: float, wanted: float) -> bool:
        return uniform * drawn_with <= wanted


@pytest.mark.parametrize(("rule", "kept"), [(Rejection(), 0), (Block(), 0), (AcceptsEquality(), 1)])
@pytest.mark.parametrize("q", [None, np.array([[0.5, 0.5, 0.0]])])
def test_a_token_of_probability_zero_is_never_kept(rule: Rule, kept: int, q: Floats | None) -> None:
    """Strictly less, whatever the draw; ``<=`` is seen."""
    draft = Draft("s", 3, (0,), (-1,), ("d",), q)
    scores = Scores(law=np.array([[0.0, 0.3, 0.7], [0.2, 0.3, 0.5]]))
    assert len(rule.judge(draft, scores, cast(Draws, Never())).path) == kept


def test_noise_that_serves_two_rounds_is_seen() -> None:
    """A rule that looks at the whole draft must not meet the same numbers again in the next round."""
    with pytest.raises(Unsound, match="was used twice"):
        enumerated_law(toy_engine(target(), other(), "block", 2), PROMPT, PLAIN, by_round=False)


class OneStream(Rejection):
    """Tests every token with the numbers it was drawn with."""

    name: ClassVar[str] = "rejection"

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        assert isinstance(draws, BranchingDraws)
        for node in range(len(draft)):
            draws.trace.use(("token", draft.base_len + node, Purpose.DRAFT, draws.base, 0))
        return super().judge(draft, scores, draws)


def test_one_stream_for_drafting_and_accepting_is_seen() -> None:
    with pytest.raises(Unsound, match="was used twice"):
        error(OneStream(), other())


def test_the_trace_visits_every_path_once() -> None:
    trace = Trace()
    assert [trace.choose([0.5, 0.0, 0.5]), trace.choose([1.0]), trace.choose([0.25, 0.75])] == [0, 0, 0]
    assert trace.left == [(2,), (0, 0, 1)]
    assert trace.probability == 0.125
