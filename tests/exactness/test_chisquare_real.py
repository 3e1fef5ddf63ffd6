"""Statistics on models with attention, drafters and native kernels, against the distribution of transformers.

Each setup has a control that keeps every draft token, and each sample must contain draft tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import cospec
from cospec.acceptance.rejection import Rejection
from cospec.core.engine import Engine
from cospec.core.types import Draft, Request, SpeculationParams, TargetProbs, VerifyResult
from cospec.drafters.model import ModelDrafter
from cospec.registry import ACCEPTANCE_METHODS
from cospec.rng.random_streams import RandomStreams
from cospec.runtime.drafter_process_executor import ProcessExecutor
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.sampling_params import SamplingParams
from harness.ensembles import Mix, ensemble_engine, powers, weighted
from harness.enumerated_draws import OutputDistribution
from harness.llamas import blended_distribution_of, distribution_of, llama_engine, load, seeded, write_pair
from harness.overlap import under
from harness.remote_drafters import llama
from harness.statistics import coarse_fit
from harness.toys import run_all, tokens_of

LIKELY, IMPOSSIBLE = 1e-4, 1e-6
PROMPT = (3, 14, 15, 9, 2, 6)
# Outputs of tiny Llamas. Of the controls, the second model in the place of the blend is nearest: its p-value is 2e-13
# with 600 outputs; with 400 outputs 1e-8.
COUNT = 600
FAMILY = Path(cospec.__file__).parent / "zoo"
HALF = SamplingParams(temperature=0.5, max_tokens=5)
FEW = SamplingParams(temperature=1.0, top_k=8, max_tokens=5)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class KeepsAll(Rejection):
    """Accepts whatever was drafted."""

    name: ClassVar[str] = "keeps all"
    exact: ClassVar[bool] = False
    native_id: ClassVar[int | None] = None
    tensor_form: ClassVar[str | None] = None

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        n = len(draft)
        return VerifyResult(tuple(range(n)), target.draw(n, draft.base_len + n, draws), True)


@pytest.fixture(scope="module", autouse=True)
def keeps_all() -> Iterator[None]:
    """The control, as requests name it."""
    ACCEPTANCE_METHODS.register(KeepsAll.name, KeepsAll)
    yield
    ACCEPTANCE_METHODS.unregister(KeepsAll.name)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    write_pair(*folders)
    return folders


EXECUTION = {
    "sequential": ("sequential", "inline"),
    "pipelined": ("pipelined", "worker"),
    "draft-ahead": ("draft-ahead", "worker"),
    "draft-for-outcomes": ("draft-for-outcomes", "worker"),  # ``match`` alone drafts for outcomes; others draft ahead
    "process": ("sequential", "process"),
    "pipelined process": ("pipelined", "process"),
    "draft-ahead process": ("draft-ahead", "process"),
}
REALIGNED: dict[str, Any] = {"method": "realign", "weights": [-1.0, 2.0]}
# Proposal, its lengths, and the tokens to compare: where models take turns, the second model proposes the third token.
PROPOSALS: dict[str, tuple[str, list[int], int]] = {
    "realign naive": ("naive", [3, 3], 2),
    "realign alternate": ("alternate", [1, 2], 3),
}


@pytest.fixture(scope="module", params=[*EXECUTION, *PROPOSALS])
def setup(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def remote(pair: tuple[Path, Path]) -> Iterator[DrafterProxy]:
    executor = ProcessExecutor(llama(pair[1]))
    yield DrafterProxy(executor)
    executor.close()


@pytest.fixture(scope="module")
def distribution(pair: tuple[Path, Path], setup: str) -> OutputDistribution:
    if setup not in PROPOSALS:
        return distribution_of(pair[0], HALF, PROMPT, 2)
    return blended_distribution_of(pair, powers(*REALIGNED["weights"]), HALF, PROMPT, PROPOSALS[setup][2])


def engine_of(setup: str, pair: tuple[Path, Path], acceptance_method: str, request: pytest.FixtureRequest) -> Engine:
    """Tiny Llamas that draft three tokens."""
    if setup in PROPOSALS:
        proposal, gammas, _ = PROPOSALS[setup]
        models = [load(folder) for folder in pair]
        return ensemble_engine(
            models, REALIGNED, proposal, gammas, k=3, acceptance_method=acceptance_method, max_num_seqs=40
        )
    execution_mode, executor = EXECUTION[setup]
    drafter = request.getfixturevalue("remote") if executor == "process" else ModelDrafter(load(pair[1]))
    engine = llama_engine(load(pair[0]), drafter, 3, acceptance_method, max_num_seqs=40)
    return engine if setup == "sequential" else under(engine, execution_mode, executor)


def first_tokens(engine: Engine, count: int = 2) -> list[tuple[int, ...]]:
    """The first tokens of each output; those after the first follow a draft."""
    found = tokens_of(run_all(engine, seeded(PROMPT, HALF, COUNT), check=False))
    metrics = engine.metrics()
    assert sum(metrics.draft_tokens.values()) > len(found), "a sample without drafts says nothing"
    assert all(metrics.draft_tokens.values()) and sum(metrics.accepted_tokens.values()) > 0
    assert len(metrics.draft_tokens) == count - 1, "each token after the first follows a proposal of another model"
    engine.execution_mode.close()
    return [tokens[:count] for tokens in found.values()]


def p_value(
    setup: str,
    pair: tuple[Path, Path],
    acceptance_method: str,
    distribution: OutputDistribution,
    request: pytest.FixtureRequest,
) -> float:
    engine = engine_of(setup, pair, acceptance_method, request)
    return coarse_fit(first_tokens(engine, PROPOSALS[setup][2] if setup in PROPOSALS else 2), distribution)


@pytest.mark.parametrize("acceptance_method", ["match", "rejection", "block"])
def test_a_tiny_llama_follows_its_distribution(
    pair: tuple[Path, Path],
    setup: str,
    distribution: OutputDistribution,
    acceptance_method: str,
    request: pytest.FixtureRequest,
) -> None:
    assert p_value(setup, pair, acceptance_method, distribution, request) > LIKELY


def test_a_rule_that_keeps_everything_is_seen(
    pair: tuple[Path, Path], setup: str, distribution: OutputDistribution, request: pytest.FixtureRequest
) -> None:
    assert p_value(setup, pair, KeepsAll.name, distribution, request) < IMPOSSIBLE


@pytest.mark.parametrize("member", [0, 1])
def test_one_model_in_the_place_of_the_blend_is_seen(
    pair: tuple[Path, Path], member: int, request: pytest.FixtureRequest
) -> None:
    alone = distribution_of(pair[member], HALF, PROMPT, 2)
    assert p_value("realign naive", pair, "rejection", alone, request) < IMPOSSIBLE


ZOO: dict[str, dict[str, Any]] = {
    "sequential": {"speculative_config": {"method": "draft_model", "execution_mode": "sequential"}},
    "pipelined": {
        "speculative_config": {"method": "draft_model", "execution_mode": "pipelined", "drafter_executor": "thread"}
    },
    "draft-ahead": {
        "speculative_config": {"method": "draft_model", "execution_mode": "draft-ahead", "drafter_executor": "thread"}
    },
    "draft-for-outcomes": {
        "speculative_config": {
            "method": "draft_model",
            "execution_mode": "draft-for-outcomes",
            "drafter_executor": "thread",
        }
    },
    "process": {
        "speculative_config": {"method": "draft_model", "execution_mode": "sequential", "drafter_executor": "process"}
    },
    "realign": {
        "models": ["zoo", "zoo:drafter"],
        "ensemble": {"method": "realign", "lambda": 0.3},
        "collaboration": {"proposal": "naive", "proposer": 1, "gamma": 3},
    },
}
MIXES: dict[str, tuple[list[str], Mix]] = {
    "target": (["target"], weighted(1.0)),
    "realign": (["target", "drafter"], powers(0.7, 0.3)),
}


@cache
def zoo_distribution(mixed: str, prompt: Sequence[int]) -> OutputDistribution:
    members, mix = MIXES[mixed]
    return blended_distribution_of([FAMILY / member for member in members], mix, FEW, prompt, 3)


def zoo_outputs(llm: cospec.LLM, prompt: Sequence[int], acceptance_method: str) -> list[tuple[int, ...]]:
    # With 250 outputs, and with 100, the p-value of the control is 0 in double precision.
    # Of a length that is asked for: with so many requests the policy may draft too little for the control to be seen.
    chosen = SpeculationParams(acceptance_method=acceptance_method, length=3)
    asked: list[Request] = [replace(request, speculation=chosen) for request in seeded(prompt, FEW, 250)]
    before = sum(llm.engine.metrics().draft_tokens.values())
    found = tokens_of(run_all(llm.engine, asked, check=False))
    drafted = sum(llm.engine.metrics().draft_tokens.values()) - before
    assert drafted > len(found), "a sample without drafts says nothing"
    return [tokens[:3] for tokens in found.values()]


@pytest.mark.skipif(not (FAMILY / "target" / "config.json").exists(), reason="the zoo's target is not there yet")
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_follows_its_distribution(name: str) -> None:
    options: dict[str, Any] = {"dtype": "float32", "max_num_seqs": 64, "kv_cache_memory_bytes": 128 << 20, "threads": 1}
    with cospec.LLM(**ZOO[name], **options, measure_at_start=False) as llm:  # requests ask for a length
        prompt = tuple(llm.encode("The answer is"))
        distribution = zoo_distribution(name if name in MIXES else "target", prompt)
        for acceptance_method in ("rejection", "block"):
            assert coarse_fit(zoo_outputs(llm, prompt, acceptance_method), distribution) > LIKELY
        assert coarse_fit(zoo_outputs(llm, prompt, KeepsAll.name), distribution) < IMPOSSIBLE
