"""A request's own policy: it decides for that request and for no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cospec.assembly.drafting import build_policy, check_policy
from cospec.config import SpeculativeConfig, speculative_config
from cospec.core.stats import StepStats, StepTimes
from cospec.core.types import (
    BatchState,
    Commit,
    Draft,
    FinishReason,
    Request,
    RequestState,
    SpeculationParams,
)
from cospec.drafters.model import ModelDrafter
from cospec.errors import InvalidInput
from cospec.models.toy import ToyModel
from cospec.policies.fixed import Fixed, Off
from cospec.policies.requested_policy import RequestedPolicy
from cospec.sampling_params import SamplingParams
from harness.execution import sequences
from harness.toys import make_request, run_all, toy_engine


def asking(names: list[str | None]) -> list[RequestState]:
    return [
        replace(one, request=replace(one.request, speculation=SpeculationParams(policy=name)))
        for one, name in zip(sequences(len(names)), names, strict=True)
    ]


def test_each_request_has_a_policy_of_its_own() -> None:
    made: list[str] = []

    def make(name: str) -> Off:
        made.append(name)
        return Off()

    policy = RequestedPolicy(Fixed(3), make)
    ready = asking([None, "off", None, "off"])
    for _ in range(3):
        assert [budget.depth for budget in policy.plan(BatchState(ready))] == [3, 0, 3, 0]
    assert made == ["off"], "built once"
    drafts = [Draft(f"s{n}", 200, (1,), (-1,), ("d",), None, np.array([0.5])) for n in (0, 1)]
    assert {draft.id for draft in policy.trim(drafts)} == {"s0", "s1"}
    for id, horizon in (("s1", 1), ("s3", Fixed.horizon)):
        end = Commit(id, 200, (1,), (), 201, finish=FinishReason.STOP)
        policy.observe(StepStats(0, 1, 1, 200, 0, 0, 0, 1, StepTimes(), 1e-3), [end])
        assert policy.horizon == horizon, "one step at a time until the last request with a policy of its own has ended"
    assert [budget.depth for budget in policy.plan(BatchState(ready[:1]))] == [3]
    assert policy.gauges() == {"speculation_length": 3}


def test_an_aborted_request_leaves_no_state() -> None:
    policy = RequestedPolicy(Fixed(3), lambda name: Off())
    ready = asking([None, "off"])
    policy.plan(BatchState(ready))
    assert policy.horizon == 1
    policy.plan(BatchState(ready[:1]))
    assert policy.horizon == Fixed.horizon, "several steps may again run as one call"


def test_the_configuration_names_the_policy() -> None:
    assert SpeculativeConfig().policy_name == "goodput"
    assert SpeculativeConfig(num_speculative_tokens=3).policy_name == "fixed"
    assert SpeculativeConfig(num_speculative_tokens=3, policy="slope").policy_name == "slope"
    drafter = ModelDrafter(ToyModel(5, seed=1))
    for number, lengths in ((3, {3}), (0, {0})):
        policy = build_policy(SpeculativeConfig(num_speculative_tokens=number), drafter, float)
        assert {budget.depth for budget in policy.plan(BatchState(sequences(2)))} == lengths
    assert build_policy(SpeculativeConfig(), None, float).plan(BatchState(sequences(1)))[0].depth == 0


def test_wrong_names_and_options() -> None:
    given = {"policy": "goodput", "policy_options": {"priorr": 1}}
    with pytest.raises(InvalidInput, match=r"key speculative_config.policy_options.priorr is 1; allowed is one of"):
        check_policy(speculative_config(given))
    with pytest.raises(InvalidInput, match=r"speculative_config.policy is 'best'; allowed is one of fixed, off, "):
        check_policy(SpeculativeConfig(policy="best"))
    with pytest.raises(InvalidInput, match="a whole number from 0 to 64, or 'auto'"):
        speculative_config({"num_speculative_tokens": "some"})


def test_requests_choose_what_they_may() -> None:
    def request(**chosen: Any) -> Request:
        return make_request("r", (0, 1), SamplingParams(max_tokens=6, seed=1), speculation=SpeculationParams(**chosen))

    open_ = toy_engine(ToyModel(5, seed=1), ModelDrafter(ToyModel(5, seed=2)))
    run_all(open_, [request(policy="off")])
    assert sum(open_.metrics().draft_tokens.values()) == 0
    with pytest.raises(InvalidInput, match=r"^speculation.policy is 'best'"):
        open_.add(request(policy="best"))
    with pytest.raises(InvalidInput, match=r"^speculation.length is 4; allowed is 0 or absent with policy 'off'"):
        open_.add(request(policy="off", length=4))
    open_.parts.input_processor.resolve(request(policy="off", length=0))
    shut = replace(open_.parts.input_processor, may_choose=frozenset({"length"}))
    shut.resolve(request(length=2))
    refused: dict[str, dict[str, Any]] = {
        "speculation.enabled": {"enabled": False},
        "speculation.policy": {"policy": "off"},
        "speculation.acceptance_method": {"acceptance_method": "match"},
        "speculation.drafters": {"drafters": ("a",)},
    }
    for field, chosen in refused.items():
        with pytest.raises(InvalidInput, match=f"{field} is .*; allowed is absent"):
            shut.resolve(request(**chosen))
