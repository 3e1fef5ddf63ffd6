"""The offline face on a toy model: order, all or nothing, several calls at once."""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Generator
from typing import Any, cast

import pytest

from cospec.core.types import SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.errors import EngineStopped, InvalidInput
from cospec.llm import LLM
from cospec.models.toy import ToyModel
from cospec.runtime.drafter_process_executor import ProcessExecutor
from cospec.sampling_params import SamplingParams
from harness.ensembles import ensemble_engine, toys
from harness.toys import toy_engine


def llm() -> LLM:
    """An ``LLM`` around loaded parts."""
    return LLM.from_engine(toy_engine(ToyModel(5, seed=1), ModelDrafter(ToyModel(5, seed=2))))


SEEDED = SamplingParams(max_tokens=12, seed=4)


def test_results_come_in_the_order_of_the_prompts() -> None:
    params = [SamplingParams(max_tokens=n, seed=1) for n in (9, 2, 5)]
    found = llm().generate([[0, 1], [2], [3, 3, 3]], params)
    assert [output.prompt_token_ids for output in found] == [(0, 1), (2,), (3, 3, 3)]
    assert [len(output.outputs[0].token_ids) for output in found] == [9, 2, 5]
    for output in found:
        stats = output.outputs[0].stats
        assert output.distribution == "target" and output.exact
        assert len(output.outputs[0].sources) == len(output.outputs[0].token_ids)
        assert stats.accepted == sum(stats.accepted_by_drafter.values())
        assert stats.mean_acceptance_length == pytest.approx(1 + stats.accepted / stats.drafts if stats.drafts else 1)
        assert output.outputs[0].sources.count("draft_model") == stats.accepted


def test_several_outputs_of_one_prompt_differ_and_add_up() -> None:
    (found,) = llm().generate([0, 1], SamplingParams(max_tokens=12, seed=4, n=4))
    assert [output.index for output in found.outputs] == [0, 1, 2, 3]
    assert len({output.token_ids for output in found.outputs}) > 1
    assert found.stats.target_calls == sum(output.stats.target_calls for output in found.outputs)
    assert found.outputs[0].token_ids == llm().generate([0, 1], SEEDED)[0].outputs[0].token_ids


def test_a_failed_output_is_reported_and_the_others_are_written(caplog: pytest.LogCaptureFixture) -> None:
    target = ToyModel(5, order=1, seed=1)
    target.table[4] = float("nan")
    target.table[..., 4] = -50.0
    failed, written = LLM.from_engine(toy_engine(target, None)).generate([[0, 4], [0, 1]], SEEDED)
    sentence = failed.outputs[0].error
    assert failed.outputs[0].finish_reason == "error" and sentence is not None and "not numbers" in sentence
    assert (written.outputs[0].finish_reason, written.outputs[0].error) == ("length", None)
    (record,) = caplog.records
    assert failed.request_id in record.getMessage() and sentence in record.getMessage()


def test_none_runs_when_one_cannot() -> None:
    made = llm()
    for prompts in ([[0, 1], [99]], [[0, 1], []]):
        with pytest.raises(InvalidInput):
            made.generate(prompts, SEEDED)
        assert not made.engine.has_work
    with pytest.raises(InvalidInput, match="sampling_params is 2 of them"):
        made.generate([[0]], [SEEDED, SEEDED])
    assert made.generate([], SEEDED) == []


def test_streams_and_calls_by_turns() -> None:
    """Reading one stream must not swallow what belongs to another."""
    made = llm()
    alone = {n: llm().generate([n, 1], SEEDED)[0].outputs[0].token_ids for n in range(3)}
    first, second = made.stream([0, 1], SEEDED), made.stream([1, 1], SEEDED)
    found = {0: list(next(first).tokens), 1: list(next(second).tokens)}
    assert made.generate([2, 1], SEEDED)[0].outputs[0].token_ids == alone[2]
    for number, stream in ((1, second), (0, first)):
        for event in stream:
            found[number] += event.tokens
    assert {n: tuple(tokens) for n, tokens in found.items()} == {0: alone[0], 1: alone[1]}
    assert not made.engine.has_work


def test_a_stream_that_is_closed_ends_the_work() -> None:
    made = llm()
    stream = made.stream([0, 1], SamplingParams(max_tokens=100, n=2))
    next(stream)
    assert isinstance(stream, Generator)
    stream.close()
    assert not made.engine.has_work
    assert made.engine.metrics().kv_cache_usage == 0


def test_a_closed_llm_says_so_in_one_sentence() -> None:
    """Closing twice is fine, an open stream ends with the sentence, and the engine has let go of everything."""
    with llm() as made:
        engine = made.engine
        stream = made.stream([0, 1], SamplingParams(max_tokens=100))
        made.encode([0, 1])
        next(stream)
    made.close()
    assert not engine.has_work
    assert engine.metrics().kv_cache_usage == 0
    for use in (
        lambda: made.generate([0, 1], SEEDED),
        lambda: made.chat([{"role": "user", "content": "x"}], SEEDED),
        lambda: made.stream([0, 1], SEEDED),
        lambda: made.encode([0, 1]),
        lambda: next(stream),
        lambda: made.engine,
        lambda: made.tokenizer,
        lambda: made.model_path,
    ):
        with pytest.raises(EngineStopped, match="closed"):
            use()


def test_an_error_inside_a_with_block_is_raised_and_closes_it() -> None:
    with pytest.raises(InvalidInput, match="prompt"), llm() as made:
        made.generate([], SEEDED)
        made.generate([[]], SEEDED)
    with pytest.raises(EngineStopped):
        made.engine  # noqa: B018


def running() -> set[threading.Thread]:
    """All threads but the one of tqdm's bars, which stays."""
    return {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}


@pytest.mark.parametrize(
    "options", [{"execution_mode": "pipelined"}, {"drafter_executor": "process"}], ids=["thread", "process"]
)
def test_closing_ends_what_drafts_and_frees_the_models(options: dict[str, Any]) -> None:
    threads = running()
    config = {"num_speculative_tokens": 3, **options}
    made = LLM(speculative_config=config, measure_at_start=False, kv_cache_memory_bytes=1 << 22)
    handle = made.engine.execution_mode.components.executor if "drafter_executor" in options else None
    model = weakref.ref(made.engine.parts.model)
    made.generate("It was a dark night, and", SamplingParams(max_tokens=8))
    assert handle is not None or running() - threads
    made.close()
    assert model() is None
    assert not running() - threads
    if handle is not None:
        with pytest.raises(ProcessLookupError):
            os.kill(cast(ProcessExecutor, handle).pid, 0)


def test_closing_ends_the_threads_of_models_that_score_at_once() -> None:
    threads = running()
    ensemble = {"method": "weighted", "weights": [0.6, 0.4]}
    with LLM.from_engine(ensemble_engine(toys(2, 5), ensemble, proposal="parallel")) as made:
        made.generate([[0, 1]], SEEDED)
        assert running() - threads
    assert not running() - threads


def test_speculation_of_one_call() -> None:
    (plain,) = llm().generate([0, 1], SEEDED, SpeculationParams(enabled=False))
    (drafted,) = llm().generate([0, 1], SEEDED, SpeculationParams(length=5))
    assert plain.outputs[0].token_ids == drafted.outputs[0].token_ids
    assert (plain.stats.drafted, drafted.stats.drafted > 0) == (0, True)
    with pytest.raises(InvalidInput, match=r"speculation.length is 65"):
        llm().generate([0, 1], SEEDED, SpeculationParams(length=65))
    with pytest.raises(InvalidInput, match=r"speculation.acceptance_method is 'none'.*auto"):
        llm().generate([0, 1], SEEDED, SpeculationParams(acceptance_method="none"))


def test_prompts_parameters_and_speculation_in_other_shapes() -> None:
    made = llm()
    (expected,) = made.generate([[0, 1]], SEEDED)
    for prompts in ({"prompt_token_ids": [0, 1]}, ((0, 1),), iter([[0, 1]])):
        (found,) = made.generate(prompts, iter([SEEDED]), {"length": 2})
        assert found.outputs[0].token_ids == expected.outputs[0].token_ids
    assert sum((event.tokens for event in made.stream([0, 1], SEEDED, {"enabled": False})), ()) == (
        expected.outputs[0].token_ids
    )


def test_the_distribution_of_one_call() -> None:
    made = LLM.from_engine(ensemble_engine(toys(2, 5), {"method": "weighted"}))
    ensemble, other = {"method": "contrastive", "mu": 0.5}, "contrastive(mu=0.5)"
    assert made.generate([0], SEEDED)[0].distribution == "weighted(0.5, 0.5)"
    assert {
        made.generate([0], SEEDED, ensemble=given)[0].distribution for given in (ensemble, json.dumps(ensemble))
    } == {other}
    assert {event.distribution for event in made.stream([0], SEEDED, ensemble=ensemble)} == {other}
    with pytest.raises(InvalidInput, match=r"ensemble is 5"):
        made.generate([0], SEEDED, ensemble=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("params", [5, "x", {"temperature": 0}, [None], [5]])
def test_wrong_sampling_parameters_are_reported(params: object) -> None:
    with pytest.raises(InvalidInput, match=r"^sampling_params is .*"):
        llm().generate([[0, 1]], params)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"lenght": 2}, "speculation is {'lenght': 2}"),
        (5, "speculation is 5"),
        ({"length": "2"}, "speculation.length is '2'"),
        ({"policy": "x"}, "speculation.policy is 'x'"),
    ],
)
def test_wrong_speculation_is_reported(given: Any, expected: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        llm().generate([[0, 1]], SEEDED, given)
    assert str(caught.value).startswith(expected)
