"""Plug-ins in an engine: in the process of the drafter, and acceptance methods that requests name."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from cospec import register_acceptance_method
from cospec.acceptance.match import Match
from cospec.assembly.components import AcceptanceMethods
from cospec.assembly.drafters import EngineHost, TargetFacts, build_drafter
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.errors import ModelError
from cospec.models.loading import LoadOptions
from cospec.registry import ACCEPTANCE_METHODS, DRAFTERS, import_plugins
from cospec.runtime.drafter_proxy import DrafterProxy

PLUGIN = """
import cospec
from cospec.drafters.ngram import NgramDrafter

class Own(NgramDrafter):
    @classmethod
    def build(cls, options, host):
        return cls(name="own")

cospec.register_drafter("of-a-plugin", Own)
"""


def test_a_drafter_that_a_module_registers_works_in_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "drafter_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    host = EngineHost(TargetFacts(5, torch.device("cpu")), tmp_path, None, None, LoadOptions())
    chosen = SpeculativeConfig(method="of-a-plugin", drafter_executor="process")
    import_plugins(("drafter_plugin",))
    request.addfinalizer(partial(DRAFTERS.unregister, "of-a-plugin"))
    with pytest.raises(ModelError, match=r"speculative_config\.method is 'of-a-plugin'"):
        build_drafter(chosen, host, EngineConfig())
    drafter = build_drafter(chosen, host, EngineConfig(plugins=("drafter_plugin",)))
    assert isinstance(drafter, DrafterProxy)
    try:
        assert drafter.name == "own"
    finally:
        drafter.executor.close()


@pytest.fixture
def late() -> Iterator[str]:
    """The name of an acceptance method that a test registers."""
    yield "late"
    ACCEPTANCE_METHODS.unregister("late")


def test_a_late_acceptance_method(late: str) -> None:
    methods = AcceptanceMethods()
    assert "late" not in methods.inexact_methods
    made: list[str] = []
    own = {"name": "late", "exact": False, "trees": False, "__init__": lambda self: made.append("late")}
    register_acceptance_method("late", type("Late", (Match,), own))
    assert made == [] and "late" in methods
    assert "late" in methods.inexact_methods and "late" in methods.chains_only
    assert "match" not in methods.inexact_methods and "block" in methods.chains_only
    assert methods["late"] is methods["late"] and made == ["late"]
