"""The report of an engine at its start."""

from __future__ import annotations

from pathlib import Path

import pytest

from cospec.config import EngineConfig, EnsembleMember
from cospec.metrics.start_report import summarize
from cospec.models.files.weight_source_selection import open_source
from cospec.models.loading import resolve
from cospec.models.weights.fp32 import Fp32
from harness.gguf_files import write_model
from harness.gguf_models import MODELS, random_model


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with weights of two types."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = random_model(MODELS["llama"][0])
    return resolve(str(write_model(tmp_path / "model.gguf", model, "Q4_0", kinds={"ffn_down": "Q8_0"})))


def test_the_formats_are_those_of_the_file(path: Path) -> None:
    report = summarize(EngineConfig(model="m"), [path], "off", (64, 32))
    source = open_source(path)
    assert "q4_0" in report.formats and "q8_0" in report.formats
    assert report.formats == source.formats(Fp32())
    assert report.models == (("m", source.elements),)
    assert f"weights: {report.formats}" in report.lines()


def test_each_member_has_formats_and_a_cache_of_its_own(path: Path) -> None:
    members = [
        EnsembleMember(model="a"),
        EnsembleMember(model="b", quantization="q5_0", kv_cache_dtype="bfloat16"),
    ]
    config = EngineConfig(models=members, kv_cache_dtype="int8")
    report = summarize(config, [path, path], "off", (64, 32))
    assert report.formats == f"{open_source(path).formats(Fp32())} and q5_0"
    assert report.kv_cache_dtype == "int8, bfloat16"
