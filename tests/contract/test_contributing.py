"""The drafter on the page for contributors is a drafter: it is what the protocol asks for, and it serves."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cospec.config import SpeculativeConfig
from cospec.engine import build
from cospec.llm import LLM
from cospec.models.toy import ToyModel
from cospec.params import SamplingParams
from cospec.registry import DRAFTERS
from harness.toys import toy_engine

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


@pytest.fixture
def repeat(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The page's class, under its name in the table."""
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert code is not None
    module = ModuleType("repeat_drafter")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(code[1], str(PAGE), "exec"), module.__dict__)
    monkeypatch.setitem(DRAFTERS._entries, "repeat", "repeat_drafter:RepeatDrafter")
    loaded: type[Any] = DRAFTERS.load("repeat")
    return loaded


def test_it_says_what_it_is(repeat: type[Any]) -> None:
    assert all(
        isinstance(getattr(repeat, fact), bool) for fact in ("samples", "drafts_ahead", "reads_states", "learns")
    )
    assert repeat.__doc__
    config = SpeculativeConfig(method="repeat", num_speculative_tokens=3)
    build._check(config)
    assert not build._reads_states(config)


def test_it_drafts_and_changes_nothing(repeat: type[Any]) -> None:
    def written(drafter: object) -> tuple[tuple[int, ...], int]:
        made = LLM.around(toy_engine(ToyModel(5, seed=1), drafter))  # type: ignore[arg-type]
        (found,) = made.generate([0, 1], SamplingParams(max_tokens=30, seed=4))
        return found.outputs[0].token_ids, found.stats.drafted

    drafter = repeat.build(repeat.Options(), None)
    (plain, nothing), (drafted, tokens) = written(None), written(drafter)
    assert plain == drafted
    assert (nothing, tokens > 0) == (0, True)
