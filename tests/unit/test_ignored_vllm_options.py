"""Habits from vLLM: keywords, dtypes, ``use_tqdm`` and ``get_tokenizer`` work, or one sentence names the cospec way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cospec.config import EngineConfig
from cospec.drafters.model import ModelDrafter
from cospec.errors import InvalidInput
from cospec.ignored_vllm_options import ACCEPTED, without_vllm_options
from cospec.llm import LLM
from cospec.models.toy import ToyModel
from cospec.sampling_params import SamplingParams
from harness.toys import toy_engine

HARMLESS: dict[str, Any] = {
    "data_parallel_size": 1, "trust_remote_code": False, "seed": 0, "swap_space": 4,
    "enforce_eager": True, "disable_log_stats": False, "max_logprobs": 20, "load_format": "auto", "revision": None,
}  # fmt: skip


def test_harmless_values_are_accepted_and_the_rest_is_left() -> None:
    assert without_vllm_options({**HARMLESS, "max_num_seqs": 3}) == {"max_num_seqs": 3}
    assert ACCEPTED.keys().isdisjoint(EngineConfig.model_fields)
    with LLM("zoo", kv_cache_memory_bytes=1 << 22, measure_at_start=False, **HARMLESS) as llm:
        assert llm.get_tokenizer() is llm.tokenizer
        assert llm.get_tokenizer().encode("a")


@pytest.mark.parametrize(
    ("name", "value", "way"),
    [
        ("data_parallel_size", 2, "device"),
        ("data_parallel_size", True, "device"),
        ("trust_remote_code", True, "model folder"),
        ("seed", 42, "SamplingParams"),
        ("max_logprobs", 50, "20"),
        ("enforce_eager", "yes", "True or False"),
        ("revision", "main", "hub"),
    ],
)
def test_other_values_are_refused_before_a_model_is_loaded(name: str, value: Any, way: str) -> None:
    with pytest.raises(InvalidInput, match=f"{name} is .*{way}"):
        LLM("/no/such/folder", **{name: value})


@pytest.mark.parametrize(
    ("given", "read"),
    [("half", "float16"), ("float16", "float16"), ("float", "float32"), ("bfloat16", "bfloat16"), ("auto", "auto"),
     (torch.float16, "float16"), (torch.bfloat16, "bfloat16")],
)  # fmt: skip
def test_dtypes_have_vllms_names(given: Any, read: str) -> None:
    assert EngineConfig.build({"dtype": given}).dtype == read


@pytest.mark.parametrize("given", ["int4", 16, None])
def test_other_dtypes_are_refused(given: Any) -> None:
    with pytest.raises(InvalidInput, match="dtype is"):
        EngineConfig.build({"dtype": given})


class Bar:
    """Stands for ``tqdm``."""

    def __init__(self, **given: Any) -> None:
        self.given, self.count, self.closed = given, 0, False

    def update(self, count: int) -> None:
        self.count += count

    def close(self) -> None:
        self.closed = True


def into(bars: list[Bar]) -> Any:
    """Makes bars and keeps them in ``bars``."""

    def make(**given: Any) -> Bar:
        bars.append(Bar(**given))
        return bars[-1]

    return make


def toys() -> LLM:
    return LLM.from_engine(toy_engine(ToyModel(5, seed=1), ModelDrafter(ToyModel(5, seed=2))))


def test_a_callable_takes_the_place_of_the_bar() -> None:
    bars: list[Bar] = []
    with toys() as llm:
        llm.generate([[0, 1], [2]], SamplingParams(max_tokens=4, n=3), use_tqdm=into(bars))
    (bar,) = bars
    assert (bar.given["total"], bar.count, bar.closed) == (6, 6, True)


@pytest.mark.parametrize("wanted", [True, False])
def test_the_bar_is_shown_when_asked_for(wanted: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with toys() as llm:
        llm.generate([[0, 1], [2]], SamplingParams(max_tokens=4), use_tqdm=wanted)
    assert ("2/2" in capfd.readouterr().err) is wanted


def test_the_bar_is_closed_when_a_prompt_is_refused() -> None:
    bars: list[Bar] = []
    with toys() as llm, pytest.raises(InvalidInput):
        llm.generate([[0, 1], [99]], SamplingParams(max_tokens=4), use_tqdm=into(bars))
    assert all(bar.closed for bar in bars)
