"""The joint distribution of three tokens is the target's to the last bit of probability: every path, no sampling.

The real engine runs on toy models, with several sequences in flight; its random draws branch over every outcome.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from cospec.core.engine import Engine
from cospec.core.plugin_base import Drafter
from cospec.core.types import Request, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.suffix import SuffixDrafter
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import total_variation
from harness.reference import joint_distribution_of
from harness.toys import ScriptedDrafter, enumerated_distribution, enumerated_distribution_among, toy_engine, with_pool

EXACT = 1e-12
LENGTH = 3
LONG = 8  # tokens that the request may write, so that drafts are not cut short before the third

PARAMS = {
    "plain": SamplingParams(max_tokens=LONG),
    "cold": SamplingParams(max_tokens=LONG, temperature=0.4),
    "hot": SamplingParams(max_tokens=LONG, temperature=3.0),
    "greedy": SamplingParams(max_tokens=LONG, temperature=0.0),
    "top-k": SamplingParams(max_tokens=LONG, top_k=2),
    "top-p": SamplingParams(max_tokens=LONG, top_p=0.6),
    "min-p": SamplingParams(max_tokens=LONG, min_p=0.5),
    "repetition": SamplingParams(max_tokens=LONG, repetition_penalty=1.7),
    "presence": SamplingParams(max_tokens=LONG, presence_penalty=1.1),
    "frequency": SamplingParams(max_tokens=LONG, frequency_penalty=-0.9),
    "bias": SamplingParams(max_tokens=LONG, logit_bias={0: 1.5, 2: -100.0}),
    "min-tokens": SamplingParams(max_tokens=LONG, min_tokens=2, stop_token_ids=(0,)),
    "stop": SamplingParams(max_tokens=LONG, stop_token_ids=(1,)),
    "allowed": SamplingParams(max_tokens=LONG, allowed_token_ids=(0, 2)),
    "bad words": SamplingParams(max_tokens=LONG, bad_words_token_ids=((1, 0), (2, 2), (0, 1, 2))),
    "all": SamplingParams(
        max_tokens=LONG,
        temperature=0.8,
        top_k=3,
        top_p=0.95,
        min_p=0.05,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={1: 0.5},
        min_tokens=1,
        stop_token_ids=(2,),
    ),
}

DRAFTERS: dict[str, Callable[[int], Drafter]] = {
    "other": lambda v: ModelDrafter(ToyModel(v, order=1, seed=5, sharpness=1.5)),
    "itself": lambda v: ModelDrafter(ToyModel(v, order=2, seed=1)),
    "ngram": lambda v: NgramDrafter(1, 3),
    "suffix": lambda v: SuffixDrafter(memory=0),  # what other paths of the enumeration wrote must not help it
    "point": lambda v: ScriptedDrafter([0, 1, 1, 0]),
}
PROMPT = (0, 1, 0)


def error(acceptance_method: str, drafter: Drafter, params: SamplingParams, k: int) -> float:
    """Total variation between what the engine writes and the target's distribution; the cache is empty at the end."""
    target = ToyModel(3, order=2, seed=1)
    engine = toy_engine(target, drafter, acceptance_method, k)
    found = enumerated_distribution(engine, PROMPT, params, LENGTH)
    engine.check_integrity()
    assert engine.metrics().kv_cache_usage == 0
    return total_variation(found, joint_distribution_of(target, params, PROMPT, LENGTH))


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_a_sampling_drafter_keeps_the_distribution(acceptance_method: str, params: str) -> None:
    assert error(acceptance_method, DRAFTERS["other"](3), PARAMS[params], k=1) < EXACT
    assert error(acceptance_method, DRAFTERS["other"](3), PARAMS[params], k=2) < EXACT


@pytest.mark.parametrize("drafter", ["other", "itself"])
@pytest.mark.parametrize(
    ("acceptance_method", "k", "length"), [("rejection", 2, 4), ("rejection", 3, 4), ("block", 2, 4), ("block", 3, 5)]
)
def test_long_drafts_of_two_words(acceptance_method: str, k: int, length: int, drafter: str) -> None:
    """Up to the bonus token of the first draft and into the next ones; one token comes before it, from the prompt."""
    params = SamplingParams(max_tokens=LONG, temperature=0.9)
    target = ToyModel(2, order=2, seed=1)
    engine = toy_engine(target, DRAFTERS[drafter](2), acceptance_method, k)
    found = enumerated_distribution(engine, PROMPT[:2], params, length)
    assert total_variation(found, joint_distribution_of(target, params, PROMPT[:2], length)) < EXACT


# All of these drafts are certain, so one drafter meets every parameter and the others meet those that end or mix.
CHOOSING = [
    *(("point", params) for params in PARAMS),
    *itertools.product(("ngram", "suffix"), ("plain", "greedy", "stop", "all")),
]


@pytest.mark.parametrize(("drafter", "params"), CHOOSING)
@pytest.mark.parametrize("acceptance_method", ["match", "rejection", "block", "recursive"])
def test_a_choosing_drafter_keeps_the_distribution(acceptance_method: str, drafter: str, params: str) -> None:
    for k in (1, 3):
        assert error(acceptance_method, DRAFTERS[drafter](3), PARAMS[params], k) < EXACT


@pytest.mark.parametrize("tree", range(1, 7))
def test_match_moves_the_cache_of_an_accepted_path(tree: int) -> None:
    """Five tokens, so that the cache entries after an accepted path is read."""
    target = ToyModel(3, order=2, seed=1)
    tokens, parents = chains_and_trees()[-tree]
    engine = toy_engine(ToyModel(3, order=2, seed=1), ScriptedDrafter(tokens, parents), "match", len(tokens))
    found = enumerated_distribution(engine, PROMPT, PARAMS["plain"], 5)
    assert total_variation(found, joint_distribution_of(target, PARAMS["plain"], PROMPT, 5)) < EXACT


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_the_target_as_its_own_drafter(acceptance_method: str) -> None:
    assert error(acceptance_method, DRAFTERS["itself"](3), PARAMS["plain"], k=1) < EXACT
    assert error(acceptance_method, DRAFTERS["itself"](3), PARAMS["all"], k=2) < EXACT


def chains_and_trees() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """All chains of up to three tokens over three words, and trees of every shape of three nodes and some of six."""
    shapes: list[tuple[int, ...]] = [
        (-1,),
        (-1, 0),
        (-1, 0, 1),
        (-1, -1),
        (-1, -1, -1),
        (-1, 0, 0),
        (-1, -1, 0),
        (-1, -1, 1),
    ]
    drafts = [(tokens, shape) for shape in shapes for tokens in itertools.product(range(3), repeat=len(shape))]
    six = [(-1, -1, -1, 0, 0, 3), (-1, -1, 1, 1, 2, 4), (-1, 0, -1, 2, 2, 4)]
    return drafts + [(tokens, shape) for shape in six for tokens in ((0, 1, 2, 0, 1, 2), (2, 1, 0, 2, 1, 1))]


@pytest.mark.parametrize("part", range(4))
def test_match_follows_the_distribution_whatever_is_drafted(part: int) -> None:
    target = ToyModel(3, order=2, seed=1)
    params = PARAMS["all" if part % 2 else "plain"]
    wanted = joint_distribution_of(target, params, PROMPT, LENGTH)
    for tokens, parents in chains_and_trees()[part::4]:
        engine = toy_engine(ToyModel(3, order=2, seed=1), ScriptedDrafter(tokens, parents), "match", len(tokens))
        found = enumerated_distribution(engine, PROMPT, params, LENGTH)
        assert total_variation(found, wanted) < EXACT, (tokens, parents)


@pytest.mark.parametrize(
    ("acceptance_method", "drafter", "k"),
    [
        ("match", "point", 3),
        ("rejection", "point", 3),
        ("block", "point", 3),
        ("rejection", "other", 1),
        ("block", "other", 1),
    ],
)
def test_a_crowded_cache_keeps_the_distribution(acceptance_method: str, drafter: str, k: int) -> None:
    """Preemption, recomputation, chunks and rounds without room for a draft, in the middle of an output."""
    engines: list[Engine] = []

    def build() -> Engine:
        target = with_pool(ToyModel(3, order=2, seed=1), num_pages=7, page_size=2)
        engine = toy_engine(target, DRAFTERS[drafter](3), acceptance_method, k, max_num_batched_tokens=12)
        engines.append(engine)
        return engine

    chosen = SpeculationParams(acceptance_method=acceptance_method)
    company = [Request(f"a{n}", (n, 2, 1, 0), SamplingParams(max_tokens=7), n, speculation=chosen) for n in range(2)]
    request = Request("z", PROMPT, PARAMS["plain"], 99, arrival=1.0, speculation=chosen)
    found = enumerated_distribution_among(build, company, request, LENGTH)
    assert (
        total_variation(found, joint_distribution_of(ToyModel(3, order=2, seed=1), PARAMS["plain"], PROMPT, LENGTH))
        < EXACT
    )
    assert any(engine.metrics().num_preemptions for engine in engines)


def test_the_reference_knows_its_parameters() -> None:
    """Every parameter set gives another distribution, so each test above checks its own parameters."""
    target = ToyModel(3, order=2, seed=1)
    distributions = [joint_distribution_of(target, params, PROMPT, LENGTH) for params in PARAMS.values()]
    assert all(total_variation(a, b) > 1e-3 for a, b in itertools.combinations(distributions, 2))
