"""Tables of results: a stored figure reaches the table, and the commands that measure are commands."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

from cospec.cli.main import app

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.tables")


def test_a_changed_figure_changes_the_page(tables: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stored = json.loads((ROOT / "benchmarks/results/compare_batch1.json").read_text(encoding="utf-8"))
    stored["runs"][0]["output_throughput"] += 1000
    to = tmp_path / "benchmarks" / "results" / "compare_batch1.json"
    to.parent.mkdir(parents=True)
    to.write_text(json.dumps(stored), encoding="utf-8")
    before = tables.block("compare_batch1")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    assert tables.block("compare_batch1") != before


def test_a_changed_figure_changes_the_headlines(tables: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    headlines = importlib.import_module("benchmarks.headlines")
    stored, before = headlines.stored, (headlines.summary(), headlines.headlines())

    def faster(name: str) -> dict[str, Any]:
        found: dict[str, Any] = stored(name)
        if name == "compare_batch1":
            found["runs"][-1]["output_throughput"] += 1000
            for row in found["ratios"]:
                row["ratio"] += 1
        return found

    monkeypatch.setattr(headlines, "stored", faster)
    assert headlines.summary() != before[0]
    assert headlines.headlines() != before[1]


def test_every_report_has_its_tables(tables: ModuleType) -> None:
    pages = importlib.import_module("benchmarks.pages")
    for name, report in pages.REPORTS.items():
        text = pages.page(name)
        assert all(tables.block(result) in text for _, result in report.blocks)
        assert text.count("| --- ") >= len(report.blocks)


def test_theorems_stand_where_their_models_are_and_acceptance_where_a_model_proposed(tables: ModuleType) -> None:
    theory: dict[str, Any] = {"theorem 3.1": 1.51, "theorem 3.6": 1.87, "alpha": [0.9, 0.8], "gammas": [0, 3]}
    theory |= {f"{kind} {what}": 2.0 for kind in ("naive", "alternate") for what in ("process", "measured")}

    def lines(**changed: Any) -> str:
        row = {"batch": 1, "temperature": 0.0, "domain": "code", "over_standard": {"standard": [1, 1, 1]}}
        return "\n".join(tables.collaborative({"settings": {"two": [{**row, "theory": {**theory, **changed}}]}}))

    assert "none, 0.80" in lines(form="naive") and "1.51" in lines(form="naive") and "1.87" not in lines(form="naive")
    assert "1.51" in lines(form="alternate") and "1.87" in lines(form="alternate")
    three = lines(form="alternate", alpha=[0.9] * 3, gammas=[1] * 3)
    assert "1.51" not in three and "1.87" not in three


def test_a_report_says_where_measured_speeds_are_of_another_run(tables: ModuleType) -> None:
    where = {"batch": 1, "temperature": 0.0, "domain": "code"}
    settings = {"two": [{**where, "over_standard": {"alternate": [1.5, 1.4, 1.6]}}]}
    assert not tables.other_run([{"setting": "two", "measured": 1.5, **where}], settings)
    assert tables.other_run([{"setting": "two", "measured": 1.6, **where}], settings)


def test_a_block_of_a_page_is_written_anew(tables: ModuleType) -> None:
    pages = importlib.import_module("benchmarks.pages")
    page = "before\n<!-- figures: summary -->\nold\n<!-- end -->\nafter\n"
    filled = pages.filled(page)
    assert "old" not in filled
    assert filled.startswith("before\n")
    assert filled.endswith("<!-- end -->\nafter\n")
    assert pages.filled(filled) == filled


def test_the_commands_that_measure_are_commands(tables: ModuleType) -> None:
    for words in tables.COMMANDS.values():
        command, arguments = get_command(app), shlex.split(words)
        while arguments and hasattr(command, "commands"):
            command = command.commands[arguments.pop(0)]
        context = command.make_context("cospec", arguments)  # raises for an option that there is not
        assert context.params


def test_verdicts_follow_from_figures(tables: ModuleType) -> None:
    """An interval with 1 decides first, then the paper's range; a missing figure shows nothing."""
    claims = importlib.import_module("benchmarks.claims")
    assert claims.verdict((1.4, 1.2, 1.6), 1.3) == claims.REACHED
    assert claims.verdict((1.2, 1.1, 1.3), 1.3) == claims.SMALLER
    assert claims.verdict((1.2, 0.9, 1.4), 1.3) == claims.verdict((0.9, 0.7, 1.2), 1.3) == claims.UNCLEAR
    assert claims.verdict((1.4, 0.9, 1.9), 1.3) == claims.verdict((0.96,), 1.3) == claims.UNCLEAR
    assert claims.verdict((0.8, 0.7, 0.9), 1.3) == claims.verdict((0.8,), 1.3) == claims.LOSS

    def missing() -> Sequence[Sequence[float]]:
        raise LookupError

    def gain() -> Sequence[Sequence[float]]:
        return ((1.4, 1.2, 1.6),)

    assert claims.Claim("P", "c", (1.2, 1.5), "measured", missing).cells()[3] == ""
    apart = claims.Claim("P", "c", (1.5, 1.5), "emulated", gain, up_to=True, comparable=False).cells()
    assert apart[2] == "up to 1.5×" and apart[-1] not in (claims.REACHED, claims.SMALLER)
    dear = claims.Claim("P", "c", (1.2, 1.5), "measured", gain, price="a price").cells()
    assert dear[2] == "1.20–1.50×" and "a price" in dear[-1]


def test_several_settings_are_judged_by_their_own_intervals(tables: ModuleType) -> None:
    """Middles below 1 are no loss where the intervals include 1, however near to each other the middles are."""
    claims = importlib.import_module("benchmarks.claims")

    def cells(*found: Sequence[float]) -> Any:
        return claims.Claim("P", "c", (1.2, 1.5), "measured", lambda: found).cells()

    doubtful, clear = (0.9, 0.8, 1.1), (0.88, 0.8, 0.95)
    assert cells(doubtful, doubtful)[-1] == claims.UNCLEAR
    assert cells(clear, clear)[-1] == claims.LOSS
    assert cells(doubtful, clear, doubtful)[-1] == f"{claims.LOSS} in 1 of 3"
    assert cells(doubtful, clear)[3] == "0.89× [0.88–0.90]", "brackets are extremes and no interval"


def test_a_ratio_of_two_speeds_is_clear_only_where_neither_lies_in_the_others_interval(tables: ModuleType) -> None:
    figures = importlib.import_module("benchmarks.claim_figures")
    for own, base, clear in (
        ((1.5, 1.4, 1.6), (2.0, 1.9, 2.1), True),
        ((1.5, 1.4, 2.0), (2.0, 1.9, 2.1), False),
        ((1.5, 1.4, 1.6), (2.0, 1.5, 2.1), False),
    ):
        middle, low, high = figures.ratio(own, base)
        assert middle == own[0] / base[0] and (high < 1.0) is clear and low < middle < high


def test_every_command_reads_its_options_before_it_measures() -> None:
    """``--help`` and misspelt options end a command; only processes that a command starts read places of ``argv``."""
    commands = [path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text("utf-8")]
    without = {path.stem for path in commands if "ArgumentParser(" not in path.read_text("utf-8")}
    assert commands and without <= {"__main__", "peer_worker", "probes"}
