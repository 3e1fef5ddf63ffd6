"""The memory for KV caches is one amount, divided before any model takes its part."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import transformers

from cospec.assembly.build import build_components
from cospec.config import EngineConfig
from cospec.errors import InvalidInput, ModelError
from cospec.models import memory as budgets
from cospec.models.kv_cache import LayerShape
from cospec.models.kv_cache_formats import CACHE_DTYPES
from cospec.models.loading import LoadOptions, cache_budget, load_model
from cospec.models.memory import CacheBudget, KVRoom, MemoryNeed, divide, need_of, pages_for
from harness.tiny import tiny

GIB = 1 << 30
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
TARGET, DRAFTER = MemoryNeed(weights=4 * GIB, token=30_000), MemoryNeed(weights=GIB, token=2_000)


def shapes_of(need: MemoryNeed) -> list[LayerShape]:
    return [LayerShape(heads=1, dim=need.token // 8)]  # keys and values in float32


def pages(need: MemoryNeed, budget: CacheBudget, sequences: int = 10**6) -> int:
    return pages_for("m", budget, shapes_of(need), torch.float32, 16, KVRoom(4096, 2, sequences))


def test_drafter_and_target_hold_equally_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake device has 16 GiB with 2 in use: 14.4 for weights and caches, less those 2, less 5 of weights."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (14 * GIB, 16 * GIB))
    budget = divide([TARGET, DRAFTER], CUDA, utilization=0.9)
    assert budget.total == pytest.approx((14.4 - 2 - 5) * GIB, rel=1e-6)
    counts = [pages(need, budget) for need in (TARGET, DRAFTER)]
    assert counts[0] == counts[1] > 0
    used = sum(count * 16 * need.token for count, need in zip(counts, (TARGET, DRAFTER), strict=True))
    assert budget.total - 16 * 32_000 < used <= budget.total
    assert pages(TARGET, budget, sequences=3) == 3 * 4096 // 16, "no more than the sequences can fill"


def test_a_model_alone_has_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "available_memory", lambda: 3 * GIB)
    assert divide([DRAFTER], CPU, 0.9) == CacheBudget(GIB // 2, None, given=False)
    assert divide([MemoryNeed(0, 1)], CPU, 0.9, given=123) == CacheBudget(123, None)
    monkeypatch.setattr(budgets, "available_memory", lambda: 100 * GIB)
    assert divide([DRAFTER], CPU, 0.9).total == GIB


def test_too_little_memory_is_reported_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 16 * GIB))
    with pytest.raises(ModelError, match=r"KV cache of m .* 0 bytes"):
        pages(TARGET, divide([TARGET, DRAFTER], CUDA, 0.9))
    with pytest.raises(InvalidInput, match="kv_cache_memory_bytes is 1000"):
        pages(TARGET, divide([TARGET, DRAFTER], CUDA, 0.9, given=1000))


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama", "float32"), ("gpt2", "int8"), ("qwen3", "bfloat16"), ("mistral-window", "float16")]
)
def test_what_a_cache_takes_is_known_from_the_configuration(name: str, dtype: str, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path)
    model = load_model(str(tmp_path), LoadOptions(device="cpu", cache_bytes=1 << 20, kv_cache_dtype=dtype))
    taken = sum(layer.keys[0].nbytes + layer.values[0].nbytes for layer in cast(Any, model).cache.layers) // 16
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert need_of(config, 0, CACHE_DTYPES[dtype]).token == taken


def test_an_engine_divides_what_it_is_given(tmp_path: Path) -> None:
    target, drafter = tmp_path / "target", tmp_path / "drafter"
    tiny("llama").save_pretrained(target)
    tiny("llama", seed=2).save_pretrained(drafter)
    member = {"method": "draft_model", "model": str(drafter)}
    for speculative in (member, {"method": "pool", "drafters": [{"name": "a", **member}, {"name": "b", **member}]}):
        models = 3 if "drafters" in speculative else 2
        config = EngineConfig.build(
            {
                "model": str(target),
                "kv_cache_memory_bytes": 1 << 20,
                "speculative_config": speculative,
                "device": "cpu",
                "measure_at_start": False,
            }
        )
        options = LoadOptions(device="cpu", cache_bytes=1 << 20)
        alone = load_model(str(target), options).pages.capacity
        shared = cache_budget([(str(target), options), *[(str(drafter), options)] * (models - 1)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cospec.assembly.build.load_tokenizer", lambda path: None)
            parts = build_components(config)
        assert parts.model.pages.capacity == load_model(str(target), replace(options, budget=shared)).pages.capacity
        assert parts.model.pages.capacity == pytest.approx(alone / models, abs=16)


def test_a_broken_drafter_is_reported_before_models_are_loaded(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "target")
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "config.json").write_text(json.dumps({}))
    with pytest.raises(ModelError, match="no weights"):
        cache_budget([(str(tmp_path / name), LoadOptions(device="cpu")) for name in ("target", "drafter")])
