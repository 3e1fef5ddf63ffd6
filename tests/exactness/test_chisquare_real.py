"""Statistics on models with attention, drafters and native kernels, against the distribution of transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import cospec
from cospec.acceptance.rejection import Rejection
from cospec.core.rng import RandomStreams, StreamKind
from cospec.core.types import Draft, Speculation, TargetProbs, VerifyResult
from cospec.drafters.model import ModelDrafter
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import OutputDistribution
from harness.llamas import distribution_of, llama_engine, load, seeded, write_pair
from harness.statistics import coarse_fit
from harness.toys import run_all, tokens_of, verifier_of

LIKELY, IMPOSSIBLE = 1e-4, 1e-6
PROMPT = (3, 14, 15, 9, 2, 6)
ZOO = Path(cospec.__file__).parent / "zoo" / "target"
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

    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        n = len(draft)
        return VerifyResult(
            tuple(range(n)), draws.token(target.distribution[n], draft.base_len + n, StreamKind.TARGET), True
        )


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    write_pair(*folders)
    return folders


@pytest.fixture(scope="module")
def distribution(pair: tuple[Path, Path]) -> OutputDistribution:
    return distribution_of(pair[0], HALF, PROMPT, 2)


def pairs_of_tokens(pair: tuple[Path, Path], acceptance_method: str, keeps_all: bool = False) -> list[tuple[int, ...]]:
    engine = llama_engine(load(pair[0]), ModelDrafter(load(pair[1])), 3, acceptance_method, max_num_seqs=40)
    if keeps_all:
        verifier_of(engine).acceptance_methods = {acceptance_method: KeepsAll()}
    found = tokens_of(run_all(engine, seeded(PROMPT, HALF, 1200), check=False))
    return [tokens[:2] for tokens in found.values()]


@pytest.mark.parametrize("acceptance_method", ["match", "rejection", "block"])
def test_a_tiny_llama_follows_its_distribution(
    pair: tuple[Path, Path], distribution: OutputDistribution, acceptance_method: str
) -> None:
    assert coarse_fit(pairs_of_tokens(pair, acceptance_method), distribution) > LIKELY


def test_a_rule_that_keeps_everything_is_seen(pair: tuple[Path, Path], distribution: OutputDistribution) -> None:
    assert coarse_fit(pairs_of_tokens(pair, "rejection", keeps_all=True), distribution) < IMPOSSIBLE


needs_zoo = pytest.mark.skipif(not (ZOO / "config.json").exists(), reason="the zoo's target is not there yet")


@pytest.fixture(scope="module")
def zoo() -> cospec.LLM:
    return cospec.LLM("zoo", dtype="float32", max_num_seqs=64, kv_cache_memory_bytes=128 << 20, threads=1)


def zoo_outputs(zoo: cospec.LLM, prompt: Sequence[int], acceptance_method: str) -> list[tuple[int, ...]]:
    # Of a length that is asked for: with so many requests the policy may draft too little for the control to be seen.
    engine = zoo.engine
    requests = seeded(prompt, FEW, 400)
    chosen = [
        type(request)(request.id, request.prompt, request.sampling, request.seed, parent=request.id,
                      speculation=Speculation(acceptance_method=acceptance_method, length=3))
        for request in requests
    ]  # fmt: skip
    return [tokens[:3] for tokens in tokens_of(run_all(engine, chosen, check=False)).values()]


@needs_zoo
def test_the_zoo_follows_its_distribution(zoo: cospec.LLM) -> None:
    prompt = zoo.encode("The answer is")
    distribution = distribution_of(ZOO, FEW, prompt, 3)
    for acceptance_method in ("rejection", "block"):
        assert coarse_fit(zoo_outputs(zoo, prompt, acceptance_method), distribution) > LIKELY
    verifier = verifier_of(zoo.engine)
    acceptance_methods = verifier.acceptance_methods
    try:
        verifier.acceptance_methods = {**acceptance_methods, "rejection": KeepsAll()}
        assert coarse_fit(zoo_outputs(zoo, prompt, "rejection"), distribution) < IMPOSSIBLE
    finally:
        verifier.acceptance_methods = acceptance_methods
