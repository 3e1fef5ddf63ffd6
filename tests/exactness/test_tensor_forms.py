"""The tensor forms in the engine: the outputs of the readable methods, and their distribution by many seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch

from cospec.acceptance import python_verification
from cospec.acceptance.device_draft_probs import DeviceProbs
from cospec.acceptance.python_verification import VerifyTask
from cospec.acceptance.rejection import Rejection
from cospec.acceptance.tensor import verify as tensor
from cospec.core.model_io import TokenBatch
from cospec.core.plugin_base import AcceptanceMethod, Drafter
from cospec.core.types import (
    Draft,
    DraftBudget,
    DraftContext,
    RequestState,
    ScheduledRequest,
    SpeculationParams,
    VerifyResult,
)
from cospec.drafters.model import ModelDrafter
from cospec.models.toy import ToyModel
from cospec.registry import ACCEPTANCE_METHODS
from cospec.rng.random_streams import Floats
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.statistics import fit
from harness.tensor_forms import NoResidual
from harness.toys import ScriptedDrafter, make_request, run_all, tokens_of, toy_engine

LIKELY, IMPOSSIBLE = 1e-4, 1e-6
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=20, min_tokens=4, stop_token_ids=(2,)),
    "plain": SamplingParams(max_tokens=20),
    "all": SamplingParams(
        temperature=0.8,
        top_k=4,
        top_p=0.9,
        min_p=0.02,
        presence_penalty=0.4,
        bad_words_token_ids=((1, 1), (3, 0)),
        max_tokens=20,
    ),
}
CHAIN: Callable[[], Drafter] = lambda: ModelDrafter(ToyModel(5, order=1, seed=5, sharpness=1.5))  # noqa: E731
TREE: Callable[[], Drafter] = lambda: ScriptedDrafter([0, 1, 2, 3, 4, 0], [-1, -1, -1, 0, 1, 4])  # noqa: E731
CASES = [(name, CHAIN) for name in ACCEPTANCE_METHODS] + [(name, TREE) for name in ("match", "recursive", "typical")]


class Elsewhere(torch.Tensor):
    """Stands for logits on another device."""

    is_cpu = False


class ModelElsewhere(ToyModel):
    """A toy model on another device, as far as the engine knows."""

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        logits: torch.Tensor = super().forward(batch).as_subclass(Elsewhere)
        return logits


class DrawsElsewhere(ModelDrafter):
    """Keeps the distributions of its drafts on another device."""

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        return [elsewhere(draft) for draft in super().propose(contexts, budgets)]


def elsewhere(draft: Draft) -> Draft:
    """The draft with its distributions as those on a device."""
    if draft.q is None:
        return draft
    chosen = draft.q[np.arange(len(draft)), list(draft.tokens)]
    return replace(draft, q=DeviceProbs(torch.from_numpy(draft.q), chosen).as_floats())


def outputs(
    method: str, drafter: Drafter, params: SamplingParams, model: ToyModel, formless: int = 0
) -> dict[str, tuple[int, ...]]:
    """Of seeded requests, the first of which may have a method without a form."""
    engine = toy_engine(model, drafter, method, 3, max_nodes=6)
    requests = [make_requests(f"r{n}", (0, n % 5), params)[0] for n in range(12)]
    for number in range(formless):
        requests[number] = replace(requests[number], speculation=SpeculationParams(acceptance_method="formless"))
    return tokens_of(run_all(engine, [replace(each, seed=n) for n, each in enumerate(requests)]))


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(("method", "drafter"), CASES)
def test_an_engine_writes_the_same_tokens(method: str, drafter: Callable[[], Drafter], params: str) -> None:
    with patch(
        "cospec.acceptance.python_verification.verify_drafts", side_effect=AssertionError("the logits left the device")
    ):
        found = outputs(method, drafter(), PARAMS[params], ModelElsewhere(5, seed=1))
    assert found == outputs(method, drafter(), PARAMS[params], ToyModel(5, seed=1))


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("method", ["rejection", "block"])
def test_distributions_of_drafts_stay_on_the_device(method: str, params: str) -> None:
    def drafter(kind: type[ModelDrafter]) -> ModelDrafter:
        return kind(ToyModel(5, order=1, seed=5, sharpness=1.5))

    with patch.object(DeviceProbs, "__array__", side_effect=AssertionError("distributions left the device")) as read:
        found = outputs(method, drafter(DrawsElsewhere), PARAMS[params], ModelElsewhere(5, seed=1))
    assert not read.called
    assert found == outputs(method, drafter(ModelDrafter), PARAMS[params], ToyModel(5, seed=1))
    on_host = outputs(method, drafter(DrawsElsewhere), PARAMS[params], ToyModel(5, seed=1))
    assert found == on_host, "a verifier on the host copies them"


class Formless(Rejection):
    """``rejection`` without a tensor form."""

    name: ClassVar[str] = "formless"


def test_methods_without_a_form_are_verified_readably() -> None:
    """Requests of one step are verified by tensors and readably, each by its own method."""
    ACCEPTANCE_METHODS.register("formless", Formless)
    try:
        wanted = outputs("rejection", CHAIN(), PARAMS["plain"], ToyModel(5, seed=1))
        readable = outputs("formless", CHAIN(), PARAMS["plain"], ToyModel(5, seed=1))
        with patch(
            "cospec.acceptance.python_verification.verify_drafts", side_effect=python_verification.verify_drafts
        ) as called:
            mixed = outputs("rejection", CHAIN(), PARAMS["plain"], ModelElsewhere(5, seed=1), formless=1)
        methods = {method.name for call in called.call_args_list for method in call.args[1]}
    finally:
        ACCEPTANCE_METHODS.unregister("formless")
    assert methods == {"formless"}
    assert mixed["r0-0"] == readable["r0-0"]
    assert {id: mixed[id] for id in mixed if id != "r0-0"} == {id: wanted[id] for id in wanted if id != "r0-0"}


V, DEPTH, COUNT = 3, 2, 10_000
TABLES = np.random.default_rng(0).dirichlet(np.ones(V), size=(2, 1 + V + V * V))  # p and q after each prefix


def row_of(prefix: Sequence[int]) -> int:
    """The row of a prefix in ``TABLES``."""
    start = (0, 1, 1 + V)[len(prefix)]
    return start + sum([token * int(V**place) for place, token in enumerate(prefix)])


def drawn_outputs(method: AcceptanceMethod) -> list[tuple[int, ...]]:
    """The first two tokens of many requests; tokens after the verified ones are drawn from p."""
    random = np.random.default_rng(1)
    p, q = TABLES
    tasks, rows = list[VerifyTask](), list[Floats]()
    for seed in range(COUNT):
        request = make_request(f"s{seed}", (0,), SamplingParams(max_tokens=9, seed=seed))
        entry = ScheduledRequest(RequestState(request, [0]), 1, DraftBudget(DEPTH, DEPTH))
        tokens = [int(random.choice(V, p=q[0]))]
        tokens.append(int(random.choice(V, p=q[row_of(tokens)])))
        places = [row_of(tokens[:n]) for n in range(DEPTH + 1)]
        draft = Draft(request.id, 1, tuple(tokens), (-1, 0), ("d",) * DEPTH, q[places[:DEPTH]])
        tasks.append(VerifyTask(entry, draft, seed * (DEPTH + 1), (seed + 1) * (DEPTH + 1), DEPTH + 1))
        rows.append(np.log(p[places]))
    verified = tensor.verify_drafts(tasks, [method] * COUNT, torch.from_numpy(np.concatenate(rows)))
    found = []
    for task, result in zip(tasks, verified, strict=True):
        assert isinstance(result, VerifyResult) and task.draft is not None and result.token is not None
        output = [*(task.draft.tokens[node] for node in result.path), result.token][:DEPTH]
        if len(output) < DEPTH:
            output.append(int(random.choice(V, p=p[row_of(output)])))
        found.append(tuple(output))
    return found


def fits(method: AcceptanceMethod) -> float:
    p = TABLES[0]
    wanted = {(a, b): float(p[0, a] * p[row_of([a]), b]) for a in range(V) for b in range(V)}
    return fit(drawn_outputs(method), wanted)


@pytest.mark.parametrize("name", ["match", "rejection", "block", "recursive"])
def test_tokens_follow_the_target_distribution(name: str) -> None:
    assert fits(ACCEPTANCE_METHODS.load(name)()) > LIKELY


def test_a_form_without_a_residual_is_detected() -> None:
    assert fits(NoResidual()) < IMPOSSIBLE
