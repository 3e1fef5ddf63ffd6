"""What a user gives: each mistake gets one sentence that names the field, what was given and what is allowed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from cospec.config import EngineConfig, read_file, read_json, speculative_config
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import Request, SpeculationParams
from cospec.errors import InvalidInput
from cospec.registry import (
    ACCEPTANCE_METHODS,
    BLENDS,
    DRAFTERS,
    EXECUTION_MODES,
    POLICIES,
    Declares,
    PluginTable,
)
from cospec.rng.random_streams import derive_seed
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import InputProcessor, make_requests

WRONG_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"n": 0}, "n is 0"),
    ({"n": True}, "n is True"),
    ({"temperature": -0.1}, "temperature is -0.1"),
    ({"temperature": math.nan}, "temperature is nan"),
    ({"temperature": "1"}, "temperature is '1'"),
    ({"top_p": 0}, "top_p is 0"),
    ({"top_p": 1.1}, "top_p is 1.1"),
    ({"top_k": -2}, "top_k is -2"),
    ({"top_k": 2**63}, f"top_k is {2**63}"),
    ({"min_p": 2}, "min_p is 2"),
    ({"repetition_penalty": 1e-38}, "repetition_penalty is 1e-38"),
    ({"presence_penalty": 3}, "presence_penalty is 3"),
    ({"frequency_penalty": -3}, "frequency_penalty is -3"),
    ({"max_tokens": 0}, "max_tokens is 0"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5"),
    ({"seed": 2**64}, f"seed is {2**64}"),
    ({"logprobs": 21}, "logprobs is 21"),
    ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
    ({"stop": [""]}, "stop is ''"),
    ({"stop": 5}, "stop is 5"),
    ({"stop": b"x"}, "stop is b'x'"),
    ({"stop": "\ud800"}, "stop is '\\ud800'"),
    ({"stop_token_ids": 5}, "stop_token_ids is 5"),
    ({"ignore_eos": 1}, "ignore_eos is 1"),
    ({"temperature": 10**400}, f"temperature is {10**400}"),
    ({"stop_token_ids": [-1]}, "stop_token_ids is -1"),
    ({"logit_bias": {"x": 1}}, "logit_bias is {'x': 1}"),
    ({"logit_bias": {3: 101}}, "logit_bias[3] is 101.0"),
    ({"heat": 1}, "sampling parameter is 'heat'"),
]


@pytest.mark.parametrize(("given", "sentence"), WRONG_PARAMS, ids=lambda value: str(value)[:30])
def test_sampling_parameters(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        SamplingParams.parse(given)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_a_bias_that_is_no_object() -> None:
    with pytest.raises(InvalidInput, match="logit_bias is 5"):
        SamplingParams(logit_bias=5)  # type: ignore[arg-type]


def test_the_field_of_a_token_id_is_the_one_that_was_given() -> None:
    with pytest.raises(InvalidInput) as caught:
        RESOLVER.resolve(request(logit_bias={12: 1.0}))
    assert caught.value.field == "logit_bias"


def test_good_sampling_parameters() -> None:
    found = SamplingParams.parse(
        {"stop": "x", "logit_bias": {"3": 1}, "stop_token_ids": [1], "temperature": 0, "top_k": -1}
    )
    assert (found.stop, found.logit_bias, found.stop_token_ids, found.greedy) == (("x",), {3: 1.0}, (1,), True)
    assert not found.truncates
    assert not SamplingParams().edits_logits
    assert SamplingParams(min_tokens=1).edits_logits


WRONG_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"max_num_seq": 3}, "key max_num_seq is 3"),
    ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    ({"max_num_seqs": "8"}, "max_num_seqs is '8'"),
    ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
    ({"device": "tpu"}, "device is 'tpu'"),
    ({"speculative_config": "{"}, "speculative_config is '{'"),
    ({"speculative_config": "[]"}, "speculative_config is '[]'"),
    ({"speculative_config": 3}, "speculative_config is 3"),
    (
        {"speculative_config": {"num_speculative_tokens": 65}},
        "speculative_config.num_speculative_tokens is 65",
    ),
]


@pytest.mark.parametrize(("given", "sentence"), WRONG_CONFIGS, ids=lambda value: str(value)[:40])
def test_engine_configuration(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        EngineConfig.build(given)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_the_methods_own_keys_are_passed_on() -> None:
    found = EngineConfig.build({"speculative_config": '{"method": "ngram", "prompt_lookup_max": 3}'}).speculative_config
    assert found is not None
    assert (found.method, dict(found.options)) == ("ngram", {"prompt_lookup_max": 3})
    assert EngineConfig.build({"speculative_config": found}).speculative_config is found
    assert speculative_config({"options": 1}).options == {}


def test_files(tmp_path: Path) -> None:
    good = tmp_path / "c.yaml"
    good.write_text("model: zoo\nmax_num_seqs: 3\n")
    assert read_file(good) == {"model": "zoo", "max_num_seqs": 3}
    good.write_text('{"a":\t1e7}')  # as YAML, a tab is refused and 1e7 a word
    assert read_file(good) == {"a": 1e7}
    for name, text, sentence in (
        ("list.json", "[1]", "a file that holds one object"),
        ("broken.json", "{", "a JSON or YAML file"),
        ("broken.yaml", "a: 1\n b: 2\n", "which is not JSON or YAML in line 2, column 3"),
        ("list.yaml", "- 1", "which holds a list"),
        ("empty.yaml", "", "which holds nothing"),
        ("missing.json", None, "a readable file (No such file or directory)"),
    ):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        with pytest.raises(InvalidInput) as caught:
            read_file(path)
        assert sentence in str(caught.value)
        assert str(path) in str(caught.value)
    assert read_json('{"a": 1}', "x") == {"a": 1}


RESOLVER = InputProcessor(vocab_size=10, max_len=20, eos=frozenset({9, 8}), acceptance_method="auto", max_depth=6)


def request(
    prompt: tuple[int, ...] = (1, 2), speculation: SpeculationParams = SpeculationParams(), **params: Any
) -> Request:
    (made,) = make_requests("r", prompt, SamplingParams(**params), speculation)
    return made


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (request(()), "prompt is empty"),
        (
            request((1,) * 20),
            "prompt is 20 tokens long",
        ),
        (request((1, 10)), "prompt token id is 10"),
        (request(stop_token_ids=(11,)), "stop_token_ids token id is 11"),
        (request(logit_bias={12: 1.0}), "logit_bias token id is 12"),
        (request(speculation=SpeculationParams(length=7)), "speculation.length is 7"),
        (request(speculation=SpeculationParams(acceptance_method="x")), "speculation.acceptance_method is 'x'"),
        (request(min_tokens=1, stop_token_ids=tuple(range(8))), "stop_token_ids is every token"),
    ],
)
def test_requests_that_cannot_be_served(wrong: Request, sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        RESOLVER.resolve(wrong)
    assert str(caught.value).startswith(sentence)


def test_what_a_request_resolves_to() -> None:
    found = RESOLVER.resolve(request((1,) * 15, max_tokens=None, min_tokens=16, stop_token_ids=(3,)))
    assert found.sampling.max_tokens == 5
    assert found.sampling.min_tokens == 5
    assert found.sampling.stop_token_ids == (3, 8, 9)
    assert RESOLVER.resolve(request(ignore_eos=True, stop_token_ids=(3,))).sampling.stop_token_ids == (3,)
    assert RESOLVER.resolve(request(max_tokens=4)).sampling.max_tokens == 4


def test_which_rule_is_automatic() -> None:
    acceptance_methods = [
        RESOLVER.resolve(request(**given)).speculation.acceptance_method
        for given in ({"temperature": 0}, {"seed": 0}, {}, {"temperature": 0.5})
    ]
    assert acceptance_methods == ["match", "match", "block", "block"]
    assert (
        RESOLVER.resolve(
            request(seed=1, speculation=SpeculationParams(acceptance_method="rejection"))
        ).speculation.acceptance_method
        == "rejection"
    )


def test_outputs_of_one_call() -> None:
    seeded = make_requests("r", (1,), SamplingParams(n=3, seed=5))
    assert [(each.id, each.parent, each.index, each.seed) for each in seeded] == [
        (f"r-{index}", "r", index, derive_seed(5, index)) for index in range(3)
    ]
    assert seeded[0].seed == 5
    first, second = (make_requests("r", (1,), SamplingParams())[0].seed for _ in range(2))
    assert first != second


def test_tables() -> None:
    table: PluginTable[type[AcceptanceMethod]] = PluginTable(
        "thing", {"a": "cospec.acceptance.match:Match"}, Declares("thing", "cospec.core.plugin_base:AcceptanceMethod")
    )
    with pytest.raises(InvalidInput, match="thing is 'b'"):
        table.load("b")
    table.check("off", "off")
    assert table.load("a").name == "match"
    for each in (DRAFTERS, ACCEPTANCE_METHODS, POLICIES, BLENDS, EXECUTION_MODES):
        assert all(each.load(name) for name in each)
