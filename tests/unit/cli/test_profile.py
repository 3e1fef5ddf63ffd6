"""``cospec profile`` on a tiny model: a table, a file, and one sentence for what cannot be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from harness.tiny import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    return path


def test_a_model_and_a_drafter(folder: Path, tmp_path: Path, cospec_command: Callable[..., Result]) -> None:
    file = tmp_path / "profile.json"
    done = cospec_command("profile", folder, "--drafter", folder, "--seconds", 0.3, "--output", file, "--device", "cpu")
    assert done.exit_code == 0
    assert "fixed ms" in " ".join(done.output.split())
    stored = json.loads(file.read_text())
    assert stored["machine"]["threads"] >= 1
    assert [each["name"] for each in stored["profiles"]] == [str(folder), f"{folder}, drafting"]
    for each in stored["profiles"]:
        assert len(each["samples"]) >= 6
        assert each["held_out"]["median_error"] >= 0
        assert min(each["fit"]["slopes"]) >= 0


def test_a_model_that_is_not_there(tmp_path: Path, cospec_command: Callable[..., Result]) -> None:
    done = cospec_command("profile", tmp_path / "nothing", "--seconds", 0.1)
    assert done.exit_code == 1
    assert "Traceback" not in done.output
