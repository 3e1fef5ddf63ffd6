"""The ladder on a tiny model: it passes, and each rung fails when what it guards against is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from cospec import LLM, register_blend, register_drafter
from cospec.acceptance.recursive import Recursive
from cospec.acceptance.residual import residual
from cospec.core.stats import StepStats
from cospec.core.tree import children
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, TargetProbs, VerifyResult
from cospec.drafters.interfaces import DrafterBuildContext
from cospec.errors import InvalidInput
from cospec.plugin_options import Options
from cospec.registry import ACCEPTANCE_METHODS, DRAFTERS
from cospec.rng.random_streams import RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from cospec.verify import chisquare, enumeration, processors
from cospec.verify.chisquare import NO_DRAFTS
from cospec.verify.context import QUICK, Check, CheckContext, draft_tokens, run
from cospec.verify.controls import EvenDrafter, KeepsAll, NoResidual
from cospec.verify.enumerated_draws import Unsound, total_variation
from cospec.verify.identity import DecodingPair, compare, greedy_checks
from cospec.verify.reference import tolerance_of
from cospec.verify.suite import CHECK_GROUPS, context_of_llm, run_checks
from harness.llamas import write_pair, write_tokenizer
from harness.toys import verifier_of

pytestmark = pytest.mark.usefixtures("small_second_sample")
GROUP_NAMES = ("enumeration", "greedy", "chisquare", "invariance")
GROUPS = [group for group in CHECK_GROUPS if group is not processors.run_checks]  # see test_verify_plugins.py
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = ((3, 14, 15, 9), (2, 6, 5), (3, 5, 8, 9, 7))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def context(spelled: tuple[Path, Path]) -> CheckContext:
    target, drafter = spelled
    made = context_of_llm(
        [str(target)], {"method": "draft_model", "model": str(drafter)}, True, kv_cache_memory_bytes=8 << 20, threads=1
    )
    effort = replace(QUICK, tokens=12, samples=300, length=2)
    return replace(made, prompts=PROMPTS, effort=effort)


@pytest.mark.parametrize("check_group", GROUPS, ids=GROUP_NAMES)
def test_a_right_engine_climbs_every_rung(
    context: CheckContext, check_group: Callable[[CheckContext], Iterator[Check]]
) -> None:
    checks = list(check_group(context))
    assert checks
    for check in checks:
        assert check.passed, check


@pytest.mark.parametrize("combiner", ["vote", "union", "fuse", "mix"])
def test_a_pool_is_sampled_with_a_method_that_the_pool_can_verify(tmp_path: Path, combiner: str) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    write_pair(target, drafter)
    write_tokenizer(target)
    write_tokenizer(drafter)
    method = "draft_model"
    members = [
        {"name": name, "method": method, "model": str(folder)}
        for name, folder in (("small", drafter), ("copy", target))
    ]
    pool = {"method": "pool", "drafters": members, "combiner": combiner}
    made = context_of_llm([str(target)], pool, True, kv_cache_memory_bytes=8 << 20, threads=1)
    effort = replace(QUICK, tokens=12, samples=200, length=2)
    checks = [
        check for run_checks in CHECK_GROUPS[::2] for check in run_checks(replace(made, prompts=PROMPTS, effort=effort))
    ]
    assert all(check.passed for check in checks), checks
    assert {
        f"match, {combiner} and hedge over 2 drafters",
        "match, the engine's drafter",
        "control: keeps every draft token",
    } <= {check.name.removeprefix("acceptance method ") for check in checks}


@pytest.fixture(scope="module", params=[{"max_nodes": 6}, {"widths": (3, 2)}], ids=["max_nodes", "widths"])
def branching(request: pytest.FixtureRequest, context: CheckContext, spelled: tuple[Path, Path]) -> CheckContext:
    """An engine that drafts trees of two levels."""
    speculative = {"method": "draft_model", "model": str(spelled[1]), "num_speculative_tokens": 2, **request.param}
    return context_with(context, spelled[0], speculative)


def context_with(context: CheckContext, target: Path, speculative: dict[str, Any]) -> CheckContext:
    made = context_of_llm([str(target)], speculative, True, kv_cache_memory_bytes=8 << 20, threads=1)
    return replace(made, prompts=context.prompts, effort=context.effort)


def noted_commits(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> list[Commit]:
    """What the engine commits from now on."""
    found: list[Commit] = []
    policy = context.llm.engine.scheduler.policy
    observe = policy.observe

    def noted(stats: StepStats, commits: Sequence[Commit]) -> None:
        found.extend(commits)
        observe(stats, commits)

    monkeypatch.setattr(policy, "observe", noted)
    return found


@pytest.mark.parametrize("check_group", GROUPS, ids=GROUP_NAMES)
def test_draft_trees_climb_every_rung(
    branching: CheckContext,
    check_group: Callable[[CheckContext], Iterator[Check]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commits = noted_commits(branching, monkeypatch)
    checks = list(check_group(branching))
    assert checks and [check for check in checks if not check.passed] == []
    assert branching.acceptance_methods == ("match", "recursive")
    second = [commit for commit in commits if any(rank > 0 for rank in commit.ranks)]
    if check_group is not CHECK_GROUPS[0]:  # the enumeration has an engine of its own
        assert second, "no second choice of a tree was accepted"
    if check_group is chisquare.run_checks:
        assert not any(NO_DRAFTS in check.notes for check in checks)


class KeepsTheFirst(Recursive):
    """Keeps the first child of each node, untested."""

    tensor_form: ClassVar[str | None] = None

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        path, node = list[int](), -1
        while offered := children(draft.parents, node):
            node = offered[0]
            path.append(node)
        return VerifyResult(tuple(path), target.draw(node + 1, draft.base_len + len(path), draws), bonus=True)


def test_a_wrong_rule_for_trees_fails_the_chi_square(branching: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = verifier_of(branching.llm.engine)
    monkeypatch.setattr(verifier, "acceptance_methods", {**verifier.acceptance_methods, "recursive": KeepsTheFirst()})
    found = {check.name: check for check in chisquare.run_checks(replace(branching, acceptance_methods=("recursive",)))}
    check = found["acceptance method recursive, the engine's drafter"]
    assert not check.passed and NO_DRAFTS not in check.notes


class ForgetsSiblings(Recursive):
    """Tests each child against the whole distribution, as if no sibling had been rejected before; right on chains."""

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        path, node = list[int](), -1
        while offered := children(draft.parents, node):
            position, row = draft.base_len + len(path), target.distribution[node + 1]
            rest, kept = row, None
            for place, child in enumerate(offered):
                (uniform,) = draws.uniforms(position, 1, StreamKind.ACCEPT, place)
                drawn_with = 1.0 if draft.q is None else draft.q[child, draft.tokens[child]]
                if uniform * drawn_with < row[draft.tokens[child]]:
                    kept = child
                    break
                rest = residual(rest, draft, child)
                rest = rest / rest.sum()
            if kept is None:
                return VerifyResult(tuple(path), draws.token(rest, position, StreamKind.RECOVER), bonus=False)
            path.append(kept)
            node = kept
        return VerifyResult(tuple(path), target.draw(node + 1, draft.base_len + len(path), draws), bonus=True)


def test_the_enumeration_covers_trees() -> None:
    """Also of a rule with its own stream of drafts; a rule that is wrong on trees alone is seen there."""
    right, wrong = enumeration.errors(Recursive(), 2), enumeration.errors(ForgetsSiblings(), 2)
    assert max(right.values()) < enumeration.EXACT
    assert wrong.pop("chosen trees") > enumeration.SEEN
    assert max(wrong.values()) < enumeration.EXACT


class GuessOptions(Options):
    """Keys of ``speculative_config``."""

    tokens: list[int]


class Guess(EvenDrafter):
    """A user's drafter, which draws from the tokens of its options."""

    first: tuple[int, ...]

    Options: ClassVar[type[GuessOptions]] = GuessOptions

    @classmethod
    def build(cls, options: GuessOptions, host: DrafterBuildContext) -> Guess:
        made = cls(options.tokens, host.target.vocab_size)
        made.first = (options.tokens[0],)
        return made


class Liar(Guess):
    """Always drafts the first token, and claims to have drawn it."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        return [replace(draft, tokens=self.first * len(draft)) for draft in super().propose(contexts, budgets)]


@pytest.fixture
def plugin(request: pytest.FixtureRequest, context: CheckContext, spelled: tuple[Path, Path]) -> Iterator[CheckContext]:
    register_drafter("guess", request.param)
    tokens = chisquare.distribution(context).likeliest(1, 4)
    yield context_with(context, spelled[0], {"method": "guess", "tokens": list(tokens)})
    DRAFTERS.unregister("guess")


@pytest.mark.parametrize("plugin", [Guess], indirect=True)
@pytest.mark.parametrize("check_group", GROUPS, ids=GROUP_NAMES)
def test_a_drafter_of_the_user_climbs_every_rung(
    plugin: CheckContext, check_group: Callable[[CheckContext], Iterator[Check]]
) -> None:
    before = draft_tokens(plugin.llm.engine)
    checks = list(check_group(plugin))
    after = draft_tokens(plugin.llm.engine)
    assert checks and [check for check in checks if not check.passed] == []
    if check_group is not CHECK_GROUPS[0]:
        assert after[1] > before[1], "the user's drafter drafted nothing"
    if check_group is chisquare.run_checks:
        assert after[0] > before[0]
        assert not any(NO_DRAFTS in check.notes for check in checks)


@pytest.mark.parametrize("plugin", [Liar], indirect=True)
def test_a_drafter_of_the_user_that_declares_another_distribution_is_seen(plugin: CheckContext) -> None:
    found = {check.name: check.passed for check in chisquare.run_checks(plugin)}
    assert found["acceptance method block, the engine's drafter"] is False
    assert found["acceptance method block, an even drafter"] is True


@pytest.mark.parametrize("name", ["match", "block", "rejection"])
def test_the_enumeration_is_exact_for_exact_rules_alone(name: str) -> None:
    assert max(enumeration.errors(ACCEPTANCE_METHODS.load(name)(), 2).values()) < 1e-12
    for wrong in (NoResidual(), KeepsAll()):
        assert enumeration.errors(wrong, 2)["drawn drafts"] > enumeration.SEEN


def test_a_number_that_cannot_be_enumerated_is_a_failed_check(
    context: CheckContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(context: CheckContext) -> Iterator[Check]:
        raise Unsound("the random key was used twice")
        yield

    monkeypatch.setattr("cospec.verify.suite.CHECK_GROUPS", (refused,))
    (check,) = run_checks(context)
    assert not check.passed and check.notes == ("the random key was used twice",)


def test_a_wrong_rule_fails_the_chi_square(context: CheckContext, monkeypatch: pytest.MonkeyPatch) -> None:
    verifier = verifier_of(context.llm.engine)
    monkeypatch.setattr(verifier, "acceptance_methods", {**verifier.acceptance_methods, "block": KeepsAll()})
    found = {
        check.name: check.passed for check in chisquare.run_checks(replace(context, acceptance_methods=("block",)))
    }
    assert found["acceptance method block, the engine's drafter"] is False
    assert found["acceptance method block, an even drafter"] is True


def greedy(context: CheckContext) -> dict[str, tuple[int, ...]]:
    return {str(n): context.reference.generate(prompt, 8) for n, prompt in enumerate(context.prompts)}


def test_another_token_is_seen_and_told(context: CheckContext) -> None:
    right = greedy(context)
    wrong = {**right, "1": (*right["1"][:3], (right["1"][3] + 1) % 64, *right["1"][4:])}
    check = compare(context, "check_group", "name", GREEDY, DecodingPair(wrong, right))
    assert not check.passed
    assert "prompt 1, token 4" in check.notes[0]
    assert "NOT a near-tie" in check.notes[0]


def test_a_missing_token_is_seen(context: CheckContext) -> None:
    right = greedy(context)
    assert not compare(
        context, "check_group", "name", GREEDY, DecodingPair({**right, "0": right["0"][:-1]}, right)
    ).passed


def test_a_near_tie_is_excused_and_what_follows_it_is_not(context: CheckContext) -> None:
    """With a tolerance as wide as the gap, the other token is a near-tie; a wrong token after it is still wrong."""
    right = greedy(context)
    prompt, ours = context.prompts[0], right["0"]
    gaps = {
        token: context.reference.shortfalls(prompt, (*ours[:2], token), GREEDY, 0)[-1]
        for token in range(64)
        if token != ours[2]
    }
    second = min(gaps, key=lambda token: gaps[token])
    wide = replace(context, tolerance=gaps[second] * 1.01)
    tied = (*ours[:2], second, *context.reference.generate((*prompt, *ours[:2], second), 5))
    check = compare(wide, "check_group", "name", GREEDY, DecodingPair({**right, "0": tied}, right))
    assert check.passed
    assert "a near-tie, excused" in check.notes[0]
    worst = max(range(64), key=lambda token: context.reference.shortfalls(prompt, (*tied[:-1], token), GREEDY, 0)[-1])
    assert not compare(
        wide, "check_group", "name", GREEDY, DecodingPair({**right, "0": (*tied[:-1], worst)}, right)
    ).passed


def test_seeded_tokens_are_the_firsts_of_their_noise(context: CheckContext) -> None:
    """The reference's score with the noise of a seed ranks first what ``match`` draws with that seed."""
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=8, ignore_eos=True)
    for prompt in context.prompts:
        ((_, output),) = run(context.llm.engine, make_requests("one", prompt, params)).items()
        assert max(context.reference.shortfalls(prompt, output, params, 11)) < context.tolerance
        assert max(context.reference.shortfalls(prompt, output, params, 12)) > context.tolerance


def test_tolerances_follow_the_arithmetic() -> None:
    assert tolerance_of(torch.float32) < tolerance_of(torch.bfloat16)


def test_what_cannot_be_verified_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="method"):
        context_of_llm(["zoo"], {"method": "nothing"}, True)


@pytest.fixture(scope="module")
def blended(tmp_path_factory: pytest.TempPathFactory) -> CheckContext:
    """Two models under the user's own blend, which propose to each other."""
    register_blend(
        "mean-of-logs", lambda logits: torch.stack([torch.log_softmax(x.double(), -1) for x in logits]).mean(0)
    )
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    write_pair(*folders)
    for folder in folders:
        write_tokenizer(folder)
    made = context_of_llm(
        [str(folder) for folder in folders],
        None,
        True,
        ensemble={"method": "mean-of-logs"},
        kv_cache_memory_bytes=8 << 20,
        threads=1,
    )
    return replace(made, prompts=PROMPTS, effort=replace(QUICK, tokens=12, samples=300, length=2))


@pytest.mark.parametrize("check_group", GROUPS, ids=GROUP_NAMES)
def test_several_models_under_a_blend_of_the_user(
    blended: CheckContext, check_group: Callable[[CheckContext], Iterator[Check]]
) -> None:
    checks = list(check_group(blended))
    assert checks and [check for check in checks if not check.passed] == []


def test_one_model_in_the_place_of_a_blend_is_seen(blended: CheckContext) -> None:
    """Each group compares with the blend: outputs of the first model alone fail."""
    alone = replace(blended, llm=LLM(str(blended.llm.model_paths[0]), {"method": "off"}, threads=1))
    for checks in (greedy_checks, chisquare.run_checks):
        assert not all(check.passed for check in checks(alone))
    first = enumeration.toy_target(2, {"method": "single"})
    second = enumeration.toy_target(2, {"method": "weighted", "lambda": 0.5})
    exact = ACCEPTANCE_METHODS.load("rejection")()
    assert max(enumeration.errors(exact, 2, second).values()) < enumeration.EXACT
    assert total_variation(enumeration.wanted(first, 2), enumeration.wanted(second, 2)) > enumeration.SEEN
