"""Requests with one seed keep their distributions, though drafts learn from earlier requests.

All requests are enumerated together, and whoever asks for the same numbers gets the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import pytest

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.interfaces import PipelinedModel
from cospec.core.plugin_base import Drafter
from cospec.core.types import Request, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.suffix import SuffixDrafter
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from cospec.text import input_processor
from harness.enumerated_draws import BranchTrace, OutputDistribution, enumerate_runs, total_variation
from harness.in_flight import QueuedModel
from harness.pools import pool_of
from harness.reference import joint_distribution_of
from harness.remembered_draws import Numbers, remembered
from harness.toys import run_all, tokens_of, toy_engine

EXACT, SEEN = 1e-12, 1e-3
LENGTH = 3  # tokens of each; rounds draft from the second on
FIRST = Request("first", (0, 1, 0), SamplingParams(max_tokens=LENGTH, seed=7), 7)
OTHER_PROMPT = replace(FIRST, id="second", prompt=(1, 2, 0))
OTHER_TEMPERATURE = replace(FIRST, id="second", sampling=replace(FIRST.sampling, temperature=0.6))


def distribution_of_last(
    acceptance_method: str,
    requests: Sequence[Request],
    vocab: int = 3,
    drafter: Callable[[], Drafter] = SuffixDrafter,
) -> OutputDistribution:
    """Over everything that may happen to the requests before it, one after the other, and to itself."""
    target = ToyModel(vocab, order=2, seed=1)
    shape = {"max_nodes": 3} if acceptance_method == "recursive" else {}

    def run(trace: BranchTrace) -> tuple[int, ...]:
        engine = toy_engine(target, drafter(), acceptance_method, k=2, **shape)
        with remembered(Numbers(trace)):
            for request in requests:
                found = tokens_of(
                    run_all(
                        engine,
                        [replace(request, speculation=SpeculationParams(acceptance_method=acceptance_method))],
                        check=False,
                    )
                )
        return found[requests[-1].id]

    return enumerate_runs(run)


def error(acceptance_method: str, second: Request) -> float:
    target = ToyModel(3, order=2, seed=1)
    wanted = joint_distribution_of(target, second.sampling, second.prompt, LENGTH)
    return total_variation(distribution_of_last(acceptance_method, [FIRST, second]), wanted)


def error_of_repetitions(acceptance_method: str, times: int, vocab: int = 2, first: Request = FIRST) -> float:
    """Of the last of several equal requests; the third time over two tokens only, because runs multiply."""
    again = [replace(FIRST, id=f"again{number}") for number in range(1, times)]
    wanted = joint_distribution_of(ToyModel(vocab, order=2, seed=1), FIRST.sampling, FIRST.prompt, LENGTH)
    return total_variation(distribution_of_last(acceptance_method, [first, *again], vocab), wanted)


@pytest.mark.parametrize("second", [OTHER_PROMPT, OTHER_TEMPERATURE], ids=["prompt", "temperature"])
@pytest.mark.parametrize("acceptance_method", ["rejection", "block", "match"])
def test_the_second_request_with_one_seed_keeps_its_distribution(acceptance_method: str, second: Request) -> None:
    assert error(acceptance_method, second) < EXACT


@pytest.mark.parametrize("second", [OTHER_PROMPT, OTHER_TEMPERATURE], ids=["prompt", "temperature"])
def test_shared_numbers_would_be_seen(second: Request) -> None:
    with patch.object(input_processor, "own_seed", lambda request, number: request.seed):
        assert error("rejection", second) > SEEN


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("acceptance_method", ["rejection", "block", "recursive", "match"])
def test_a_repeated_request_keeps_its_distribution(acceptance_method: str, times: int) -> None:
    assert error_of_repetitions(acceptance_method, times, vocab=5 - times) < EXACT


@pytest.mark.parametrize("changed", [{"max_tokens": 4}, {"stop_token_ids": (1,)}], ids=str)
def test_requests_with_different_ends_keep_their_distribution(changed: dict[str, Any]) -> None:
    first = replace(FIRST, sampling=replace(FIRST.sampling, **changed))
    assert error_of_repetitions("rejection", 2, first=first) < EXACT
    with without_numbers():
        assert error_of_repetitions("rejection", 2, first=first) > SEEN


@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize("acceptance_method", ["rejection", "block", "recursive"])
def test_repetitions_with_the_same_numbers_would_be_seen(acceptance_method: str, times: int) -> None:
    with without_numbers():
        assert error_of_repetitions(acceptance_method, times, vocab=5 - times) > SEEN


class HostileDrafter(SuffixDrafter):
    """Remembers earlier requests, and declares that nothing learns, as a drafter node can."""

    learns = False

    def __init__(self, trusted: bool) -> None:
        super().__init__()
        self.trusted = trusted


@pytest.mark.parametrize("acceptance_method", ["rejection", "block"])
def test_an_untrusted_drafter_learns_nothing_from_a_seed(acceptance_method: str) -> None:
    """With an untrusted drafter no two requests share random numbers; the trusted one is the control."""
    wanted = joint_distribution_of(ToyModel(3, order=2, seed=1), FIRST.sampling, FIRST.prompt, LENGTH)
    requests = [FIRST, replace(FIRST, id="again")]
    for trusted in (False, True):
        found = distribution_of_last(acceptance_method, requests, drafter=partial(HostileDrafter, trusted))
        assert (total_variation(found, wanted) < EXACT) is not trusted
        assert (total_variation(found, wanted) > SEEN) is trusted


def test_an_untrusted_drafter_cannot_derive_the_seed() -> None:
    """A node reads the user's seed, prompt and parameters, which give the seed of a request with a trusted drafter."""

    def seeds(drafter: Drafter, acceptance_method: str) -> set[int]:
        resolve = toy_engine(ToyModel(3, order=2, seed=1), drafter).parts.input_processor.resolve
        chosen = SpeculationParams(acceptance_method=acceptance_method)
        return {resolve(replace(FIRST, speculation=chosen), number).seed for number in range(3)}

    assert len(seeds(HostileDrafter(True), "block")) == 1
    pool = pool_of({"away": HostileDrafter(False), "here": NgramDrafter()}, "mix", "all", 3)
    for drafter in (HostileDrafter(False), pool):
        assert len(seeds(drafter, "block") | seeds(drafter, "rejection")) == 6
        assert seeds(drafter, "match") == {FIRST.seed}, "a node races with the noise of the target"


def without_numbers() -> Any:
    """Seeds that do not depend on how many requests came before."""
    own_seed = input_processor.own_seed
    return patch.object(input_processor, "own_seed", lambda request, number: own_seed(request))


@pytest.mark.parametrize(("drafter", "repeats"), [(SuffixDrafter(), False), (NgramDrafter(), True)])
def test_where_nothing_learns_a_repetition_is_the_same_draw(drafter: Drafter, repeats: bool) -> None:
    engine = toy_engine(ToyModel(3, order=2, seed=1), drafter, "rejection", k=2)
    request = replace(
        FIRST,
        sampling=replace(FIRST.sampling, max_tokens=40),
        speculation=SpeculationParams(acceptance_method="rejection"),
    )
    written = [tokens_of(run_all(engine, [request]))["first"] for _ in range(2)]
    assert (written[0] == written[1]) is repeats


@pytest.mark.parametrize("acceptance_method", ["rejection", "block", "match"])
def test_a_request_that_is_made_again_alone_writes_the_same(acceptance_method: str) -> None:
    """For any length, except drafts that the end cuts, and with any further outputs of the request."""
    found = []
    changes: list[dict[str, Any]] = [{}, {}, {"logprobs": 2}, {"max_tokens": 60}, {"stop": ()}]
    for more in changes:
        params = SamplingParams(**{"max_tokens": 40, "seed": 7, **more})
        request = replace(FIRST, sampling=params, speculation=SpeculationParams(acceptance_method=acceptance_method))
        engine = toy_engine(ToyModel(3, order=2, seed=1), SuffixDrafter(), acceptance_method, k=2)
        found.append(tokens_of(run_all(engine, [request]))["first"][:30])
    assert len(set(found)) == 1


def test_which_requests_have_numbers_of_their_own() -> None:
    """Those that are drafted for under a rule that tests drawn drafts; the others' text is that of their seed."""
    resolve = toy_engine(ToyModel(3, order=2, seed=1), SuffixDrafter()).parts.input_processor.resolve

    def seed(request: Request, **chosen: Any) -> int:
        return resolve(replace(request, speculation=SpeculationParams(**chosen))).seed

    seeds = {seed(request, acceptance_method="block") for request in (FIRST, OTHER_PROMPT, OTHER_TEMPERATURE)}
    seeds |= {seed(FIRST, acceptance_method="rejection"), seed(FIRST, acceptance_method="block", length=2)}
    assert len(seeds) == 5
    assert FIRST.seed not in seeds
    unseeded = replace(FIRST, sampling=replace(FIRST.sampling, seed=None))
    for same in (
        seed(FIRST),
        seed(FIRST, acceptance_method="block", enabled=False),
        seed(unseeded, acceptance_method="block"),
    ):
        assert same == FIRST.seed


def test_a_repetition_has_other_numbers_where_other_requests_decide_about_drafts_ahead() -> None:
    """Requests with one seed would otherwise choose by their common numbers when each draws ahead."""

    def seeds(execution_mode: str) -> set[int]:
        model = ToyModel(3, order=2, seed=1)
        model.pipelined_model = cast(PipelinedModel, QueuedModel(model, 3, lambda: None))
        speculative = SpeculativeConfig(num_speculative_tokens=2, policy="fixed", execution_mode=execution_mode)
        drafter = ModelDrafter(ToyModel(3, order=1, seed=2))
        resolve = assemble(model, drafter, speculative, EngineConfig(), TextInfo()).input_processor.resolve
        request = replace(FIRST, speculation=SpeculationParams(acceptance_method="block"))
        return {resolve(request, number).seed for number in range(2)}

    assert len(seeds("draft-ahead")) == 2 and len(seeds("sequential")) == 1


OTHER_LAWS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.9},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 2},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "presence_penalty": {"presence_penalty": 0.1},
    "frequency_penalty": {"frequency_penalty": 0.1},
    "min_tokens": {"min_tokens": 2},
    "logit_bias": {"logit_bias": {0: 0.5}},
    "allowed_token_ids": {"allowed_token_ids": (0, 1)},
    "bad_words_token_ids": {"bad_words_token_ids": ((1,),)},
    "logits_processors": {"logits_processors": {"mine": {}}},
}


@pytest.mark.parametrize("changed", OTHER_LAWS)
def test_every_parameter_of_the_distribution_changes_the_draws(changed: str) -> None:
    other = replace(FIRST, sampling=replace(FIRST.sampling, **OTHER_LAWS[changed]))
    assert input_processor.own_seed(other) != input_processor.own_seed(FIRST)
    for table in ("SHAPING", "OPTIONAL_SHAPING"):
        names: tuple[str, ...] = getattr(input_processor, table)
        if changed in names:
            with patch.object(input_processor, table, tuple(name for name in names if name != changed)):
                assert input_processor.own_seed(other) == input_processor.own_seed(FIRST), (
                    "a parameter that is left out would be seen"
                )


def test_every_blend_and_every_number_gives_numbers_of_its_own() -> None:
    blends = [None, {"method": "weighted", "lambda": 0.3}, {"method": "weighted", "lambda": 0.4}, {"method": "realign"}]
    seeds = {
        input_processor.own_seed(replace(FIRST, ensemble=ensemble), number)
        for ensemble in blends
        for number in range(50)
    }
    assert len(seeds) == 4 * 50
