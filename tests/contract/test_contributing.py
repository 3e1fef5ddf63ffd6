"""The drafter on the page for contributors is a drafter: it is what the protocol asks for, and it serves."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cospec
from cospec.config import EngineConfig
from cospec.core.assembly import memory_plan_of
from cospec.llm import LLM
from cospec.models.toy import ToyModel
from cospec.registry import DRAFTERS
from cospec.sampling_params import SamplingParams
from harness.toys import toy_engine

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def repeat(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """The page's class, under its name in the table."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    module = ModuleType("repeat_drafter")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code[1], str(PAGE), "exec"), module.__dict__)
    cospec.register_drafter("repeat", module.__dict__["RepeatDrafter"])
    yield DRAFTERS.load("repeat")
    DRAFTERS.unregister("repeat")


def test_it_says_what_it_is(repeat: type[Any]) -> None:
    DRAFTERS.declares.check("repeat", repeat)
    assert repeat.__doc__
    chosen = {"method": "repeat", "num_speculative_tokens": 3}
    memory, _ = memory_plan_of(EngineConfig.build({"model": "zoo", "speculative_config": chosen, "device": "cpu"}))
    assert len(memory.weights) == 1  # the drafter has no model


def test_it_drafts_and_changes_nothing(repeat: type[Any]) -> None:
    def written(drafter: Any) -> tuple[tuple[int, ...], int]:
        made = LLM.from_engine(toy_engine(ToyModel(5, seed=1), drafter))
        (found,) = made.generate([0, 1], SamplingParams(max_tokens=30, seed=4))
        return found.outputs[0].token_ids, found.stats.drafted

    drafter = repeat.build(repeat.Options(), None)
    (plain, nothing), (drafted, tokens) = written(None), written(drafter)
    assert plain == drafted
    assert (nothing, tokens > 0) == (0, True)
