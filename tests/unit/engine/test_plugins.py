"""Modules that a configuration names are imported in the drafter's process too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cospec.config import EngineConfig, SpeculativeConfig
from cospec.engine.drafters import EngineHost, TargetFacts, build_drafter
from cospec.errors import ModelError
from cospec.models.loading import LoadOptions
from cospec.rounds.remote import RemoteDrafter

PLUGIN = """
import cospec
from cospec.drafters.ngram import NgramDrafter

class Own(NgramDrafter):
    @classmethod
    def build(cls, options, host):
        return cls(name="own")

cospec.register_drafter("of-a-plugin", Own)
"""


def test_a_drafter_that_a_module_registers_works_in_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "drafter_plugin.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    host = EngineHost(TargetFacts(5, torch.device("cpu")), tmp_path, None, None, LoadOptions())
    chosen = SpeculativeConfig(method="of-a-plugin", drafting="process")
    with pytest.raises(ModelError, match=r"speculative_config\.method is 'of-a-plugin'"):
        build_drafter(chosen, host, EngineConfig())
    drafter = build_drafter(chosen, host, EngineConfig(plugins=("drafter_plugin",)))
    assert isinstance(drafter, RemoteDrafter)
    try:
        assert drafter.name == "own"
    finally:
        drafter.handle.close()
