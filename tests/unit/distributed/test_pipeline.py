"""The engine after a loss of its verifier: all caches are computed again, and no token changes."""

from __future__ import annotations

import random

import pytest

from cospec.core.engine import Engine
from cospec.core.types import Request
from cospec.drafters.model import ModelDrafter
from cospec.models.toy import EMPTY, ToyModel
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.in_flight import run_disturbed, with_steps_in_flight
from harness.toys import run_all, tokens_of, toy_engine, with_pool

VOCAB = 6


def target(pages: int = 64) -> ToyModel:
    return with_pool(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), pages, 4)


def requests() -> list[Request]:
    params = SamplingParams(temperature=0.9, max_tokens=20, seed=11)
    prompts = [[i % VOCAB for i in range(5 + 4 * n)] for n in range(6)]
    return [each for n, prompt in enumerate(prompts) for each in make_requests(f"r{n}", prompt, params)]


def wiped(model: ToyModel) -> None:
    """What a new process has in its cache."""
    model.cells[:] = [[EMPTY] * len(page) for page in model.cells]


@pytest.mark.parametrize("count", [1, 3])
def test_lost_caches_change_no_token(count: int) -> None:
    wanted = tokens_of(run_all(toy_engine(target(), None), requests()))
    for seed in range(8):
        chance, model = random.Random(seed), target()

        def fails(chance: random.Random = chance, model: ToyModel = model) -> str | None:
            if chance.random() > 0.03:
                return None
            wiped(model)
            return "after"

        engine = with_steps_in_flight(toy_engine(model, ModelDrafter(ToyModel(VOCAB, seed=3)), k=3), count, fails)
        found = run_disturbed(engine, requests(), seed, aborts=0.0)
        whole = {id: tokens for id, tokens in found.tokens.items() if len(tokens) == 20}
        assert whole == {id: wanted[id] for id in whole}
        assert len(whole) >= 3 and engine.metrics().kv_cache_usage == 0


def test_cached_prefixes_are_forgotten() -> None:
    """The control: a prefix that is found after a loss would be empty."""
    model = target()
    engine = toy_engine(model, None)
    first = run_all(engine, requests())
    wiped(model)
    broken = run_all(engine, requests())
    assert tokens_of(broken) != tokens_of(first)
    model.pages.forget_contents()
    model.pages.check_integrity()
    assert tokens_of(run_all(engine, requests())) == tokens_of(first)


def test_forgotten_pages_can_be_used_again() -> None:
    engine: Engine = toy_engine(target(40), None)
    for _ in range(3):
        run_all(engine, requests())
        engine.scheduler.pages.forget_contents()
        engine.check_integrity()
