"""The ladder on a tiny model: it passes, and each rung fails when what it guards against is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from cospec import LLM, register_blend
from cospec.errors import InvalidInput
from cospec.registry import ACCEPTANCE_METHODS
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from cospec.verify import chisquare, enumeration
from cospec.verify.context import QUICK, Check, CheckContext, run
from cospec.verify.controls import KeepsAll, NoResidual
from cospec.verify.enumerated_draws import total_variation
from cospec.verify.identity import Pair, compare, greedy_checks
from cospec.verify.reference import tolerance_of
from cospec.verify.suite import CHECK_GROUPS, context_of_llm
from harness.llamas import write_pair
from harness.toys import verifier_of

GROUP_NAMES = ("enumeration", "greedy", "chisquare", "invariance")
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPTS = ((3, 14, 15, 9), (2, 6, 5), (3, 5, 8, 9, 7))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_tokenizer(folder: Path) -> None:
    """Words t0 to t63; any other is t0."""
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(64)}, unk_token="t0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> CheckContext:
    target, drafter = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    write_pair(target, drafter)
    write_tokenizer(target)
    write_tokenizer(drafter)
    made = context_of_llm(
        [str(target)], {"method": "draft_model", "model": str(drafter)}, True, kv_cache_memory_bytes=8 << 20, threads=1
    )
    effort = replace(QUICK, tokens=12, samples=300, length=2)
    return replace(made, prompts=PROMPTS, effort=effort)


@pytest.mark.parametrize("check_group", CHECK_GROUPS, ids=GROUP_NAMES)
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
    checks = list(chisquare.run_checks(replace(made, prompts=PROMPTS, effort=effort)))
    assert all(check.passed for check in checks), checks
    assert {"match, the engine's drafter", "control: keeps every draft token"} <= {
        check.name.removeprefix("acceptance method ") for check in checks
    }


@pytest.mark.parametrize("name", ["match", "block", "rejection"])
def test_the_enumeration_is_exact_for_exact_rules_alone(name: str) -> None:
    assert max(enumeration.errors(ACCEPTANCE_METHODS.load(name)(), 2).values()) < 1e-12
    for wrong in (NoResidual(), KeepsAll()):
        assert enumeration.errors(wrong, 2)["drawn drafts"] > enumeration.SEEN


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
    check = compare(context, "check_group", "name", GREEDY, Pair(wrong, right))
    assert not check.passed
    assert "prompt 1, token 4" in check.notes[0]
    assert "NOT a near-tie" in check.notes[0]


def test_a_missing_token_is_seen(context: CheckContext) -> None:
    right = greedy(context)
    assert not compare(context, "check_group", "name", GREEDY, Pair({**right, "0": right["0"][:-1]}, right)).passed


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
    check = compare(wide, "check_group", "name", GREEDY, Pair({**right, "0": tied}, right))
    assert check.passed
    assert "a near-tie, excused" in check.notes[0]
    worst = max(range(64), key=lambda token: context.reference.shortfalls(prompt, (*tied[:-1], token), GREEDY, 0)[-1])
    assert not compare(wide, "check_group", "name", GREEDY, Pair({**right, "0": (*tied[:-1], worst)}, right)).passed


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


@pytest.mark.parametrize("check_group", CHECK_GROUPS, ids=GROUP_NAMES)
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
