"""A request that cannot go on ends no other request."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from cospec.core.model_io import TokenBatch
from cospec.core.plugin_base import Drafter
from cospec.core.types import FinishReason, Request, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.errors import InvalidInput
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.toys import make_request, run_all, tokens_of, toy_engine

POISON = 4
CLEAN = [(0, 1), (2, 3, 1), (1, 1, 1, 0)]


class Poisoned(ToyModel):
    """Gives ``value`` for the logits of every row after the token ``POISON``, or for some of them."""

    def __init__(self, value: float, whole_row: bool = True) -> None:
        super().__init__(5, order=2, seed=1)
        places = slice(None) if whole_row else slice(0, 2)
        self.table[:, POISON, places] = value
        self.table[POISON, :, places] = value
        self.table[..., POISON] -= 50.0  # no request writes the token without being forced


def healthy_outputs(params: SamplingParams, acceptance_method: str) -> dict[str, tuple[int, ...]]:
    model = Poisoned(0.0)
    return tokens_of(run_all(toy_engine(model, None, acceptance_method), healthy(params, acceptance_method)))


def healthy(params: SamplingParams, acceptance_method: str) -> list[Request]:
    chosen = SpeculationParams(acceptance_method=acceptance_method)
    return [make_request(f"r{n}", prompt, params, speculation=chosen) for n, prompt in enumerate(CLEAN)]


DRAFTERS: dict[str, Callable[[float, bool], Drafter | None]] = {
    "none": lambda value, whole: None,
    "healthy": lambda value, whole: ModelDrafter(ToyModel(5, order=2, seed=3)),
}


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers(temperature: float, value: float, whole: bool, drafter: str) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3)
    engine = toy_engine(Poisoned(value, whole), DRAFTERS[drafter](value, whole), "match", 3)
    bad = make_request("bad", (0, POISON), params, speculation=SpeculationParams(acceptance_method="match"))
    events = run_all(engine, [*healthy(params, "match")[:2], bad, *healthy(params, "match")[2:]])
    last = events.pop("bad")[-1]
    usable = value == -math.inf and not whole  # two tokens that cannot come
    if not usable:
        assert last.finish is FinishReason.ERROR
        assert last.error
    assert tokens_of(events) == healthy_outputs(params, "match")
    assert engine.metrics().kv_cache_usage == 0
    assert not engine.has_work


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("acceptance_method", ["match", "rejection", "block"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_whose_logits_are_no_numbers_costs_only_drafts(
    temperature: float, acceptance_method: str, value: float
) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3)
    chosen = SpeculationParams(acceptance_method=acceptance_method)
    engine = toy_engine(ToyModel(5, order=2, seed=1), ModelDrafter(Poisoned(value)), acceptance_method, 3)
    bad = make_request("bad", (0, POISON), params, speculation=chosen)
    events = run_all(engine, [bad, *healthy(params, acceptance_method)])
    assert all(own[-1].finish is FinishReason.LENGTH for own in events.values())
    if acceptance_method == "match" or temperature == 0:
        model = ToyModel(5, order=2, seed=1)
        assert tokens_of(events) == tokens_of(
            run_all(toy_engine(model, None, acceptance_method), [bad, *healthy(params, acceptance_method)])
        )


class Breaks(ToyModel):
    """Raises for the request ``bad`` once it has written a token, and in the next ``errors`` forwards."""

    def __init__(self, errors: int = 0) -> None:
        super().__init__(5, order=2, seed=1)
        self.errors = errors

    def forward(self, batch: TokenBatch) -> Tensor:
        broken = any(part.id == "bad" and part.start + len(part.tokens) > 2 for part in batch.slices)
        if broken or self.errors:
            self.errors = max(0, self.errors - 1)
            raise RuntimeError("out of memory")
        return super().forward(batch)


def test_every_token_banned() -> None:
    """Parameters that leave no token are refused or end that request alone."""
    params = SamplingParams(max_tokens=6, min_tokens=3, stop_token_ids=(0, 1, 2, 3, 4), seed=3)
    engine = toy_engine(ToyModel(5, seed=1), ModelDrafter(ToyModel(5, seed=2)), "match", 3)
    plain = SamplingParams(max_tokens=6, seed=3)
    good = make_request("good", (0, 1), plain)
    wanted = tokens_of(run_all(toy_engine(ToyModel(5, seed=1), None, "match"), [good]))["good"]
    with contextlib.suppress(InvalidInput):
        engine.add(make_request("bad", (0, 1), params))
    engine.add(good)
    found: tuple[int, ...] = ()
    while engine.has_work:
        found += tuple(t for event in engine.step() if event.id == "good" for t in event.tokens)
    assert found == wanted


def test_an_id_in_use_is_refused() -> None:
    engine = toy_engine(ToyModel(5, seed=1), None)
    request = make_request("same", (0, 1), SamplingParams(max_tokens=3))
    engine.add(request)
    with pytest.raises(InvalidInput, match="same"):
        engine.add(request)
    tokens = [token for _ in range(5) for event in engine.step() for token in event.tokens]
    assert len(tokens) == 3
    engine.check_integrity()


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_a_forward_that_raises_ends_the_request_that_it_raises_for(drafter: str) -> None:
    params = SamplingParams(max_tokens=8, seed=3)
    engine = toy_engine(Breaks(), DRAFTERS[drafter](0.0, True), "match", 3)
    bad = make_request("bad", (0, 1), params)
    events = run_all(engine, [*healthy(params, "match")[:2], bad, *healthy(params, "match")[2:]])
    last = events.pop("bad")[-1]
    assert last.finish is FinishReason.ERROR and "out of memory" in (last.error or "")
    wanted = tokens_of(run_all(toy_engine(ToyModel(5, order=2, seed=1), None, "match"), healthy(params, "match")))
    assert tokens_of(events) == wanted
    assert engine.metrics().kv_cache_usage == 0 and not engine.has_work


def test_errors_that_pass_cost_no_token() -> None:
    params = SamplingParams(max_tokens=8, seed=3)
    wanted = tokens_of(run_all(toy_engine(ToyModel(5, order=2, seed=1), None, "match"), healthy(params, "match")))
    model = Breaks()
    engine = toy_engine(model, DRAFTERS["healthy"](0.0, True), "match", 3)
    for request in healthy(params, "match"):
        engine.add(request)
    found: dict[str, tuple[int, ...]] = dict.fromkeys(wanted, ())
    for step in range(10_000):
        if not engine.has_work:
            break
        model.errors = 2 if step % 6 == 5 else model.errors  # the next two forwards fail
        for event in engine.step():
            assert event.error is None
            found[event.id] += event.tokens
        engine.check_integrity()
    assert found == wanted


def test_aborts_at_every_step_give_everything_back() -> None:
    for steps in range(8):
        drafter = ModelDrafter(ToyModel(5, seed=2))
        engine = toy_engine(ToyModel(5, seed=1), drafter, k=3, max_num_batched_tokens=4)
        for n in range(4):
            engine.add(make_request(f"r{n}", (n, 1, 2, 3, 0), SamplingParams(max_tokens=9)))
        for _ in range(steps):
            engine.step()
        engine.abort([f"r{n}" for n in range(4)] + ["unknown"])
        engine.abort(["r0"])
        engine.check_integrity()
        drafter.model.pages.check_integrity()
        assert not engine.has_work
        assert engine.metrics().kv_cache_usage == 0 == drafter.model.pages.usage
        assert engine.step() == []
        assert sum(engine.metrics().requests_finished.values()) == 4


def test_greedy_ties_are_broken_alike_with_and_without_a_draft() -> None:
    """Float32 logits that are equal after penalties: the point mass and the choice must be the same token."""
    from cospec.core.sampling import History, edit, likeliest
    from harness.target_probs import target_probs_of

    def choices(logits: Tensor, params: SamplingParams, history: History) -> list[int | None]:
        return likeliest(edit(logits, params, history))

    generator = torch.Generator().manual_seed(0)
    for size in (5, 33, 1000):
        logits = torch.randint(0, 3, (40, size), generator=generator).float() + 1e-7 * torch.rand(40, size)
        for params in (
            SamplingParams(temperature=0, frequency_penalty=0.7),
            SamplingParams(temperature=0, repetition_penalty=1.3),
            SamplingParams(temperature=0, logit_bias={1: 77.7, 2: 77.7}),
        ):
            history = History([0, 1, 2, 1, 4], 1, [[]] * 40)
            assert target_probs_of(logits, params, history).argmax(-1).tolist() == choices(logits, params, history)
            assert (
                choices(logits[:1], params, History([0, 1, 2, 1, 4], 1, [[]])) == choices(logits, params, history)[:1]
            )
