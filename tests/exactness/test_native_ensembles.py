"""Steps of a target that is relaxed towards its drafter: native calls give what turns of the models give, which follow
the relaxed distribution."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cospec.core.engine import Engine
from cospec.core.types import Request, SpeculationParams
from cospec.ensemble.native_steps import LOGPROBS, SEVERAL_MODELS
from cospec.native import library
from cospec.native.native_request import EDITED
from cospec.sampling_params import SamplingParams
from harness.ensembles import adaptive, ensemble_engine
from harness.enumerated_draws import OutputDistribution
from harness.llamas import blended_distribution_of, load, seeded
from harness.native_steps import SHAPES, calls, requests, uneven, written
from harness.statistics import coarse_fit
from harness.toys import make_request, run_all, tokens_of

pytestmark = [
    pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels"),
    pytest.mark.usefixtures("no_time_limit"),
]
LIKELY, IMPOSSIBLE = 1e-4, 1e-6
BOUND = 0.1
RELAXED = {"method": "adaptive", "max_divergence": BOUND, "lambda1": 9.0, "lambda2": 1.0, "lambda3": 0.0}
PROMPT = (3, 14, 15, 9, 2, 6)


def pair_engine(folders: tuple[Path, Path], ensemble: Mapping[str, Any] = RELAXED, k: Any = 3, **more: Any) -> Engine:
    """An engine of a target and a member that proposes ``k`` tokens."""
    pages = more.pop("pages", 200)
    models = [load(folder, pages=pages) for folder in folders]
    return ensemble_engine(models, ensemble, "naive", k, proposer=1, **more)


def texts(engine: Engine, asked: list[Request], gap: int = 0) -> dict[str, list[Any]]:
    """What each output came to be; divergences are rounded."""
    found = written(engine, asked, gap)
    for row in found.values():
        row[5] = replace(row[5], divergence=round(row[5].divergence, 9))
    return found


@pytest.mark.parametrize("shape", list(SHAPES))
@pytest.mark.parametrize(("acceptance_method", "k"), [("match", 1), ("rejection", 3), ("block", 4)])
def test_native_steps_are_turns(folders: tuple[Path, Path], acceptance_method: str, k: int, shape: str) -> None:
    chosen = SpeculationParams(acceptance_method=acceptance_method)
    asked = [replace(request, speculation=chosen) for request in requests(SHAPES[shape], streams=False)]
    for bound in (0.0, BOUND):
        ensemble = {**RELAXED, "max_divergence": bound}
        native, turns = (pair_engine(folders, ensemble, k, native=native) for native in ("auto", "off"))
        noted = calls(native)
        found = texts(native, asked)
        assert found == texts(turns, asked)
        assert any([row[5].mean_divergence for row in found.values()]) == bool(bound)
        longest = max(steps for _, steps in noted)
        assert longest > 1 if shape in ("greedy", "sampled", "seeded") else longest <= 8
        if shape == "edited":
            assert native.metrics().python_path_requests.get(EDITED)


def test_arrivals_lengths_and_preemption(folders: tuple[Path, Path]) -> None:
    """Requests join and leave, the caches are short, and some drafts are shorter than others or absent."""
    asked = uneven(requests(SHAPES["sampled"], streams=True), 3)
    asked = [replace(each, speculation=replace(each.speculation, acceptance_method="match")) for each in asked]
    wanted = texts(pair_engine(folders, native="off"), asked)
    tokens = {id: row[:2] for id, row in wanted.items()}
    for gap, pages, more in ((0, 200, {}), (2, 200, {}), (1, 22, {"max_num_seqs": 4}), (1, 200, {"k": "auto"})):
        engine = pair_engine(folders, pages=pages, **more)
        found = texts(engine, asked, gap)
        assert {id: row[0] for id, row in found.items()} == {id: row[0] for id, row in tokens.items()}, (gap, pages)
        assert engine.metrics().native_requests


def test_outputs_up_to_the_longest_context(folders: tuple[Path, Path]) -> None:
    """The last tokens have no room for a draft; the drafter scores them all the same."""
    params = replace(SHAPES["sampled"], max_tokens=None)
    prompts = [[(7 * n + i * i) % 64 for i in range(80 + 9 * n)] for n in range(3)]
    asked = [replace(make_request(f"r{n}", prompt, params), seed=n) for n, prompt in enumerate(prompts)]
    asked = [replace(each, speculation=SpeculationParams(acceptance_method="block")) for each in asked]
    native, turns = (pair_engine(folders, native=native) for native in ("auto", "off"))
    found = texts(native, asked)
    assert found == texts(turns, asked)
    assert [len(row[0]) + len(prompt) for row, prompt in zip(found.values(), prompts, strict=True)] == [128] * 3
    assert native.metrics().native_requests > 3


def test_blends_share_a_step(folders: tuple[Path, Path]) -> None:
    """Two bounds, the target alone, a blend for turns, log-probabilities: each as alone, each with its own reason."""
    ensembles: list[dict[str, Any]] = [
        {}, {**RELAXED, "max_divergence": 0.02}, {"method": "single"}, {"method": "weighted", "lambda": 0.4}, {},
    ]  # fmt: skip
    chosen = SpeculationParams(acceptance_method="rejection")
    asked = [
        replace(request, speculation=chosen, ensemble=ensemble or None)
        for request, ensemble in zip(requests(SHAPES["sampled"], streams=False), ensembles, strict=True)
    ]
    asked[4] = replace(asked[4], sampling=replace(asked[4].sampling, logprobs=1, max_tokens=12))
    engine = pair_engine(folders)
    alone: dict[str, list[Any]] = {}
    for request in asked:
        alone |= texts(pair_engine(folders), [request])
    assert texts(engine, asked) == alone
    reasons = engine.metrics().python_path_requests
    assert reasons[SEVERAL_MODELS] and reasons[LOGPROBS]


# ---- the distribution

PARAMS = SamplingParams(temperature=0.7, max_tokens=6)


@pytest.fixture(scope="module")
def distribution(folders: tuple[Path, Path]) -> OutputDistribution:
    """Of two tokens, by transformers' forwards and the blend by the book."""
    return blended_distribution_of(folders, adaptive(BOUND, 9.0, 1.0, 0.0), PARAMS, PROMPT, 2)


def pairs_of_tokens(folders: tuple[Path, Path], acceptance_method: str, k: int, bound: float) -> list[tuple[int, ...]]:
    """The first two tokens of many outputs; the second follows a draft of ``k`` tokens or the whole of one."""
    engine = pair_engine(folders, {**RELAXED, "max_divergence": bound}, k, max_num_seqs=40)
    chosen = SpeculationParams(acceptance_method=acceptance_method)
    asked = [replace(request, speculation=chosen) for request in seeded(PROMPT, PARAMS, 1600)]
    return [tokens[:2] for tokens in tokens_of(run_all(engine, asked, check=False)).values()]


@pytest.mark.parametrize(("acceptance_method", "k"), [("match", 2), ("rejection", 1), ("block", 3)])
def test_outputs_follow_the_relaxed_distribution(
    folders: tuple[Path, Path], distribution: OutputDistribution, acceptance_method: str, k: int
) -> None:
    assert coarse_fit(pairs_of_tokens(folders, acceptance_method, k, BOUND), distribution) > LIKELY


def test_another_distribution_is_seen(folders: tuple[Path, Path], distribution: OutputDistribution) -> None:
    """That of the target alone."""
    assert coarse_fit(pairs_of_tokens(folders, "rejection", 2, 0.0), distribution) < IMPOSSIBLE
