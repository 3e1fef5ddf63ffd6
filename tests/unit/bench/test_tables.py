"""Figures in README and docs are those of the stored results, and no speed stands there by hand."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from typer.main import get_command

from cospec.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
SPEED = re.compile(r"\d(?:[\d.,]*) ?(?:×|x as|times as|tokens/s|ms\b|% (?:faster|slower))", re.IGNORECASE)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.tables")


def test_every_table_is_what_the_stored_result_gives(tables: ModuleType) -> None:
    for page in tables.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert tables.BLOCK.search(text), page
        assert tables.filled(text) == text, f"{page} is not what python -m benchmarks writes"


def test_no_speed_in_the_readme_is_written_by_hand(tables: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for said in ("1.5 × as fast", "2 times as fast", "557 tokens/s", "it takes 2.7 ms", "5% slower"):
        assert SPEED.search(said)
    assert SPEED.findall(tables.BLOCK.sub("", text)) == []


def test_a_changed_figure_changes_the_page(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stored = json.loads((ROOT / "benchmarks/results/compare_batch1.json").read_text(encoding="utf-8"))
    stored["runs"][0]["output_throughput"] += 1000
    to = tmp_path / "benchmarks" / "results" / "compare_batch1.json"
    to.parent.mkdir(parents=True)
    to.write_text(json.dumps(stored), encoding="utf-8")
    before = tables.block("compare_batch1")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.block("compare_batch1") != before


def test_the_commands_that_measure_are_commands(tables: ModuleType) -> None:
    for words in tables.COMMANDS.values():
        command, arguments = get_command(app), shlex.split(words)
        while arguments and hasattr(command, "commands"):
            command = command.commands[arguments.pop(0)]
        context = command.make_context("cospec", arguments)  # raises for an option that there is not
        assert context.params


def test_stored_comparisons_came_from_these_commands(tables: ModuleType) -> None:
    for name in ("compare_batch1", "compare_batch8"):
        stored = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8"))
        assert stored["command"].startswith(shlex.join(shlex.split(f"cospec {tables.COMMANDS[name]}")))
