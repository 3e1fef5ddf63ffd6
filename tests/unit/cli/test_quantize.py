"""``cospec quantize``: the written file, the perplexity before and after, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from cospec.models.loading import load_model
from cospec.models.model_folder import zoo_members

Command = Callable[..., Result]

pytestmark = pytest.mark.skipif("drafter" not in zoo_members(), reason="the zoo's weights are not installed")


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "book.txt"
    path.write_text("It was a dark and stormy night. The old man went home, and he said that " * 8)
    return path


def change(output: str) -> float:
    """The relative change of the perplexity, in percent."""
    found = re.search(r"perplexity: [\d.]+ before, [\d.]+ after \(([+-][\d.]+)%\)", output)
    assert found is not None, output
    return float(found[1])


def test_writes_a_file_that_loads(cospec_command: Command, text: Path, tmp_path: Path) -> None:
    output = tmp_path / "drafter.gguf"
    result = cospec_command("quantize", "zoo:drafter", output, "--type", "q8_0", "--text", text, "--tokens", 64)
    assert result.exit_code == 0, result.output
    assert result.output.startswith(f"{output}: ") and abs(change(result.output)) < 2
    assert load_model(str(output)).vocab_size == load_model("zoo:drafter").vocab_size


def test_perplexity_needs_no_file(cospec_command: Command, text: Path, tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    result = cospec_command("quantize", "zoo:drafter", "--type", "int4", "--text", text, "--tokens", 64)
    assert result.exit_code == 0, result.output
    assert change(result.output) != 0
    assert {path for path in tmp_path.iterdir() if path.suffix == ".gguf"} <= before


def test_refusals(cospec_command: Command, text: Path, tmp_path: Path) -> None:
    for arguments, why in (
        ((), "OUT.gguf is missing; allowed is a file name, or --text with a text file"),
        ((tmp_path / "a.gguf", "--type", "q4_9"), "type is 'q4_9'"),
        (("--text", text, "--type", "q4_9"), "quantization is 'q4_9'"),
        ((tmp_path / "a.bin",), "a.bin"),
    ):
        result = cospec_command("quantize", "zoo:drafter", *arguments)
        assert result.exit_code != 0 and why in result.output, result.output
    assert not (tmp_path / "a.gguf").exists()
