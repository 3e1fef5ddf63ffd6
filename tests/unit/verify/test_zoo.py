"""``cospec verify zoo --quick``, rung by rung, on each kind of kernels; and what its chi-square can see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch

from cospec.errors import InvalidInput
from cospec.native import library
from cospec.verify import chisquare, enumeration
from cospec.verify.context import Check, CheckContext, bare_engine
from cospec.verify.controls import NoResidual
from cospec.verify.identity import greedy_checks, invariance_checks
from cospec.verify.joint_distribution import BORDER
from cospec.verify.suite import context_of_llm

pytestmark = pytest.mark.usefixtures("small_second_sample")
BEST = library.isa() if library.available() else "none"
GROUPS = {"greedy": greedy_checks, "chisquare": chisquare.run_checks, "invariance": invariance_checks}
SETS = list(dict.fromkeys([BEST, "avx512", "avx2"]))


@pytest.fixture(scope="module", params=SETS)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    if BEST != "none":
        try:
            library.set_isa(request.param)
        except InvalidInput:
            pytest.skip(f"this processor or build has no {request.param}")
    elif request.param != "none":
        pytest.skip("the native library is not built")
    yield request.param
    if BEST != "none":
        library.set_isa(BEST)


@pytest.fixture(scope="module")
def zoo() -> Iterator[CheckContext]:
    """The zoo's checks; transformers, which has kernels of its own, writes each text once."""
    made = context_of_llm(["zoo"], None, True, threads=1)
    with patch.object(made.reference, "generate", cache(made.reference.generate)):
        yield made


def test_the_enumeration_passes(zoo: CheckContext) -> None:
    assert all(check.passed for check in enumeration.run_checks(zoo))


@pytest.mark.parametrize("check_group", GROUPS.values(), ids=GROUPS)
def test_every_rung_passes(
    zoo: CheckContext, kernels: str, check_group: Callable[[CheckContext], Iterator[Check]]
) -> None:
    if check_group is chisquare.run_checks and kernels != BEST:
        pytest.skip("one sample is enough: instruction sets differ in roundings at most")
    checks = list(check_group(zoo))
    assert checks
    assert [check for check in checks if not check.passed] == []


def test_a_rule_without_residual_is_seen(zoo: CheckContext) -> None:
    """The chi-square of the quick run has the power to see a rule that is only slightly wrong."""
    wanted = chisquare.distribution(zoo)
    even = chisquare.even_drafter(zoo, wanted)
    wrong = bare_engine(zoo.target, even, chisquare.DEPTH, {"block": NoResidual()})
    assert not chisquare.fit(wanted, partial(chisquare.samples, zoo, wrong, "block"), zoo.effort.samples).good


def test_few_outcomes_are_near_the_border(zoo: CheckContext) -> None:
    """What is known to be uncertain is a part of the distribution, and most of it stays."""
    wanted = chisquare.distribution(zoo)
    assert sum(wanted.masses.values()) == pytest.approx(1.0)
    uncertain = sum(mass for outcome, mass in wanted.masses.items() if outcome[-1] == BORDER)
    assert zoo.reference.dtype is torch.bfloat16
    assert 0.0 < uncertain < 0.5
