"""Outputs follow the processed distribution exactly: the states follow every path of every draft."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from cospec.core.plugin_base import Drafter
from cospec.drafters.model import ModelDrafter
from cospec.logits_processors.states import ProcessorStates, RequestProcessors
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import total_variation
from harness.processors import ProcessedTable, registered
from harness.reference import joint_distribution_of
from harness.toys import (
    ScriptedDrafter,
    enumerated_distribution,
    make_request,
    run_all,
    tokens_of,
    toy_engine,
    with_pool,
)

EXACT, SEEN = 1e-12, 1e-2
PROMPT = (0, 1, 0)
NAMES = {"mask": ["no-repeat"], "edit": ["prefers-sum"], "both": ["prefers-sum", "no-repeat"]}
CHAIN: Callable[[], Drafter] = lambda: ScriptedDrafter([1, 2, 0])  # noqa: E731
TREE: Callable[[], Drafter] = lambda: ScriptedDrafter([1, 2, 2, 0, 0], [-1, -1, 0, 1, 2])  # noqa: E731
DRAWN: Callable[[], Drafter] = lambda: ModelDrafter(ToyModel(3, order=1, seed=5, sharpness=1.5))  # noqa: E731
CASES: list[tuple[str, Callable[[], Drafter], dict[str, Any]]] = [
    ("match", CHAIN, {"k": 3}),
    ("match", TREE, {"k": 3, "max_nodes": 5}),
    ("rejection", CHAIN, {"k": 3}),
    ("rejection", DRAWN, {"k": 2}),
    ("block", CHAIN, {"k": 3}),
    ("block", DRAWN, {"k": 2}),
    ("recursive", CHAIN, {"k": 3}),
    ("recursive", TREE, {"k": 3, "max_nodes": 5}),
    ("recursive", DRAWN, {"k": 1, "max_nodes": 2, "widths": (2,)}),
]


@pytest.fixture(autouse=True)
def known() -> Iterator[None]:
    with registered():
        yield


def target() -> ToyModel:
    return ToyModel(3, order=2, seed=1)


def params_of(names: Sequence[str], **more: Any) -> SamplingParams:
    chosen = {name: {"scale": 1.5} if name == "prefers-sum" else {} for name in names}
    return SamplingParams(**{"max_tokens": 8, **more}, logits_processors=chosen)


def error(method: str, drafter: Drafter, names: Sequence[str], shape: dict[str, Any]) -> float:
    params = params_of(names)
    found = enumerated_distribution(toy_engine(target(), drafter, method, **shape), PROMPT, params, 3)
    table = ProcessedTable(target(), names, 1.5)
    return total_variation(found, joint_distribution_of(table, params, PROMPT, 3))


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize(("method", "drafter", "shape"), CASES)
def test_every_path_has_its_own_state(
    method: str, drafter: Callable[[], Drafter], shape: dict[str, Any], kind: str
) -> None:
    assert error(method, drafter(), NAMES[kind], shape) < EXACT


@pytest.mark.parametrize(("method", "drafter", "shape"), CASES)
def test_states_that_ignore_the_path_are_detected(
    method: str, drafter: Callable[[], Drafter], shape: dict[str, Any]
) -> None:
    whole = RequestProcessors.states

    def ignoring(
        self: RequestProcessors, tokens: Sequence[int], committed: int, paths: Sequence[Sequence[int]]
    ) -> list[ProcessorStates]:
        return whole(self, tokens, committed, [()] * len(paths))

    with patch.object(RequestProcessors, "states", ignoring):
        assert error(method, drafter(), NAMES["both"], shape) > SEEN


SEEDED = {
    "custom": lambda: params_of(NAMES["both"], max_tokens=40, seed=4),
    "greedy": lambda: params_of(NAMES["both"], max_tokens=40, temperature=0),
    "fields": lambda: SamplingParams(
        max_tokens=40, seed=5, presence_penalty=0.7, bad_words_token_ids=((0, 1), (2, 2)), allowed_token_ids=(0, 1, 2)
    ),
}


@pytest.mark.parametrize("name", SEEDED)
@pytest.mark.parametrize("drafter", [CHAIN, TREE, DRAWN])
def test_preemption_and_resumption_leave_the_states_right(name: str, drafter: Callable[[], Drafter]) -> None:
    requests = [make_request(f"r{n}", PROMPT[: n + 1], SEEDED[name]()) for n in range(3)]
    wanted = tokens_of(run_all(toy_engine(target(), None), requests))
    crowded = toy_engine(with_pool(target(), num_pages=14), drafter(), "match", 3, max_nodes=5)
    assert tokens_of(run_all(crowded, requests)) == wanted
    assert crowded.metrics().num_preemptions > 0
    cut = [replace(each, resumed_output=wanted[each.id][:17]) for each in requests]
    rest = tokens_of(run_all(toy_engine(target(), drafter(), "match", 3, max_nodes=5), cut))
    assert rest == {id: tokens[17:] for id, tokens in wanted.items()}
