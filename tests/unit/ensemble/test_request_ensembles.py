"""Ensembles of requests: each request keeps its ensemble, and no ensemble outlives its requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast
from weakref import WeakSet

import pytest
import torch

from cospec import register_blend
from cospec.ensemble.blends.registry import BlendRegistry
from cospec.ensemble.blends.weighted import Weighted
from cospec.errors import InvalidInput
from cospec.registry import BLENDS
from cospec.sampling_params import SamplingParams
from harness.ensembles import ensemble_engine, toys
from harness.toys import make_request, run_all, tokens_of

LAW = {"method": "weighted", "weights": [0.6, 0.4]}
PARAMS = SamplingParams(max_tokens=12, seed=3)
ALIVE: WeakSet[Weighted] = WeakSet()


class Counted(Weighted):
    """A mixture that is in ``ALIVE`` as long as the object exists."""

    def __init__(self, weights: Sequence[float]) -> None:
        super().__init__(weights)
        ALIVE.add(self)


@pytest.fixture(autouse=True)
def counted() -> Iterator[None]:
    BLENDS.register("counted", cast(Any, Counted))  # a protocol matches no class with class variables
    yield
    BLENDS.unregister("counted")


def of_model(place: int) -> Callable[[Sequence[torch.Tensor]], torch.Tensor]:
    """One model's logits alone."""
    return lambda logits: logits[place]


@pytest.mark.parametrize("asked", [True, False], ids=["asked for", "the engine's own"])
def test_a_blend_that_is_registered_again(asked: bool) -> None:
    """It writes the requests that begin then; one that is under way keeps the function that it began with."""
    ensemble, params = {"method": "again-test"}, SamplingParams(temperature=0, max_tokens=20)
    names = ("old", "new", "newer")
    alone = [
        tokens_of(
            run_all(
                ensemble_engine(toys(2, 5), {"method": "weighted", "lambda": part}), [make_request("r", (0, 1), params)]
            )
        )["r"]
        for part in (0.0, 1.0)
    ]
    assert alone[0] != alone[1]
    register_blend("again-test", of_model(0))
    engine = ensemble_engine(toys(2, 5), LAW if asked else ensemble)
    requests = [make_request(name, (0, 1), params, ensemble=ensemble if asked else None) for name in names]
    engine.add(requests[0])
    events = engine.step()
    register_blend("again-test", of_model(1))
    engine.add(requests[1])
    while engine.has_work:
        events += engine.step()
    events += [event for own in run_all(engine, requests[2:]).values() for event in own]
    found = tokens_of({name: [event for event in events if event.id == name] for name in names})
    assert found == {"old": alone[0], "new": alone[1], "newer": alone[1]}


def test_ensembles_are_kept_while_requests_run() -> None:
    """And one for all requests that ask for the same."""
    ensembles = BlendRegistry(LAW, 2)
    for n in range(100):
        ensembles.of(make_request(f"r{n}", (0,), PARAMS, ensemble={"method": "counted", "lambda": n / 100}))
    twice = [ensembles.of(make_request(name, (0,), PARAMS, ensemble={"method": "single"})) for name in ("a", "b")]
    assert twice[0] is twice[1]
    assert ensembles.uses("r1", 1)
    assert not ensembles.uses("r0", 1)
    assert len(ALIVE) == 100
    ensembles.free([f"r{n}" for n in range(100)])
    assert len(ALIVE) == 0
    assert not ensembles.uses("r1", 1)


def test_nothing_is_left_of_requests() -> None:
    """Those that finished, were aborted, were refused."""
    engine = ensemble_engine(toys(2, 5), LAW)
    asked = [make_request(f"r{n}", (0,), PARAMS, ensemble={"method": "counted", "lambda": n / 10}) for n in range(4)]
    run_all(engine, asked[:2])
    engine.add(asked[2])
    engine.step()
    assert len(ALIVE) == 1
    engine.abort(["r2"])
    with pytest.raises(InvalidInput):
        engine.add(replace(asked[3], ensemble={"method": "counted", "lambda": 7}))
    assert len(ALIVE) == 0
