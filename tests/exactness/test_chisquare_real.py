"""Statistics on models with attention, drafters and native kernels as they are used, against transformers' own law."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

import cospec
from cospec.drafters.model import ModelDrafter
from cospec.draws import Draws, Purpose
from cospec.params import SamplingParams
from cospec.rules.rejection import Rejection
from cospec.types import Draft, Scores, Speculation, Verdict
from harness.llamas import law_of, llama_engine, load, seeded, write_pair
from harness.oracle import Law
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

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        n = len(draft)
        return Verdict(tuple(range(n)), draws.token(scores.distribution[n], draft.base_len + n, Purpose.TARGET), True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folders = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    write_pair(*folders)
    return folders


@pytest.fixture(scope="module")
def law(pair: tuple[Path, Path]) -> Law:
    return law_of(pair[0], HALF, PROMPT, 2)


def pairs_of_tokens(pair: tuple[Path, Path], rule: str, keeps_all: bool = False) -> list[tuple[int, ...]]:
    engine = llama_engine(load(pair[0]), ModelDrafter(load(pair[1])), 3, rule, max_num_seqs=40)
    if keeps_all:
        verifier_of(engine).rules = {rule: KeepsAll()}
    found = tokens_of(run_all(engine, seeded(PROMPT, HALF, 1200), check=False))
    return [tokens[:2] for tokens in found.values()]


@pytest.mark.parametrize("rule", ["match", "rejection", "block"])
def test_a_tiny_llama_follows_its_law(pair: tuple[Path, Path], law: Law, rule: str) -> None:
    assert coarse_fit(pairs_of_tokens(pair, rule), law) > LIKELY


def test_a_rule_that_keeps_everything_is_seen(pair: tuple[Path, Path], law: Law) -> None:
    assert coarse_fit(pairs_of_tokens(pair, "rejection", keeps_all=True), law) < IMPOSSIBLE


needs_zoo = pytest.mark.skipif(not (ZOO / "config.json").exists(), reason="the zoo's target is not there yet")


@pytest.fixture(scope="module")
def zoo() -> cospec.LLM:
    return cospec.LLM("zoo", dtype="float32", max_num_seqs=64, kv_cache_memory_bytes=128 << 20, threads=1)


def zoo_outputs(zoo: cospec.LLM, prompt: Sequence[int], rule: str) -> list[tuple[int, ...]]:
    # Of a length that is asked for: with so many requests the policy may draft too little for the control to be seen.
    engine = zoo.engine
    requests = seeded(prompt, FEW, 400)
    chosen = [
        type(request)(request.id, request.prompt, request.sampling, request.seed, parent=request.id,
                      speculation=Speculation(rule=rule, length=3))
        for request in requests
    ]  # fmt: skip
    return [tokens[:3] for tokens in tokens_of(run_all(engine, chosen, check=False)).values()]


@needs_zoo
def test_the_zoo_follows_its_law(zoo: cospec.LLM) -> None:
    prompt = zoo.encode("The answer is")
    law = law_of(ZOO, FEW, prompt, 3)
    for rule in ("rejection", "block"):
        assert coarse_fit(zoo_outputs(zoo, prompt, rule), law) > LIKELY
    verifier = verifier_of(zoo.engine)
    rules = verifier.rules
    try:
        verifier.rules = {**rules, "rejection": KeepsAll()}
        assert coarse_fit(zoo_outputs(zoo, prompt, "rejection"), law) < IMPOSSIBLE
    finally:
        verifier.rules = rules
