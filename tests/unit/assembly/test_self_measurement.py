"""Engines whose policy reads costs measure themselves at start, by the rounds that they will run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cospec.llm import LLM
from cospec.native import library
from cospec.profiling import start
from cospec.profiling.measure import measure_multi_steps
from cospec.sampling_params import SamplingParams


@pytest.mark.parametrize(("policy", "whole"), [("goodput", True), ("milp", False), ("confidence", False)])
def test_rounds_are_measured_as_the_policy_lets_them_run(
    policy: str, whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cuts drafts, or might, has none of its rounds run as one call."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(start, "SECONDS", 0.05)
    bursts: list[object] = []

    def noting(*given: Any) -> Any:
        bursts.append(given[4])
        return measure_multi_steps(*given)

    monkeypatch.setattr(start, "measure_multi_steps", noting)
    with LLM("zoo", {"method": "draft_model", "policy": policy}, kv_cache_memory_bytes=1 << 25) as llm:
        (found,) = llm.generate("It was a dark night, and", SamplingParams(max_tokens=12, temperature=0))
        assert llm.engine.parts.model.pages.usage == 0
    assert len(found.outputs[0].token_ids) == 12
    assert [burst is not None for burst in bursts] == [whole and library.available()]
