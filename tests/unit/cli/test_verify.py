"""``cospec verify``: the table, the JSON, the exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cospec.verify import suite
from cospec.verify.context import Check

Command = Callable[..., Result]

GOOD = Check("enumeration", "rule match", "TV 1e-16", "< 1e-12", True)
TIE = Check("greedy identity", "speculation = plain", "9 of 10", "equal", True, ("prompt 0, token 3: a near-tie",))
SAMPLED = Check("chi-square", "rule match", "p = 0.4", "once > 1e-04", True, false_alarm=4e-8)
BAD = Check("chi-square", "rule block", "p = 1e-30", "> 1e-04", False)


@pytest.fixture
def climbing(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A ladder that gives the checks of ``checks`` and notes what it was asked for."""
    noted: dict[str, Any] = {"checks": [GOOD, TIE]}

    def context_of(models: list[str], speculative: Any, quick: bool, edits: Any, **options: Any) -> dict[str, Any]:
        noted.update(models=models, speculative=speculative, quick=quick, edits=edits, options=options)
        return noted

    monkeypatch.setattr(suite, "context_of_llm", context_of)
    monkeypatch.setattr(suite, "run_checks", lambda context: iter(context["checks"]))
    return noted


def test_all_passed(cospec_command: Command, climbing: dict[str, Any], tmp_path: Path) -> None:
    to = tmp_path / "found.json"
    config = '{"method": "ngram"}'
    result = cospec_command("verify", "folder", "--speculative-config", config, "--quick", "--threads", 1, "--json", to)
    assert result.exit_code == 0, result.output
    assert climbing["models"] == ["folder"]
    assert climbing["speculative"] == {"method": "ngram"}
    assert climbing["quick"] is True
    assert climbing["options"] == {"threads": 1}
    assert "all 2 checks passed" in result.output
    assert "a near-tie" in result.output
    found = json.loads(to.read_text())
    assert found["passed"] is True
    assert [check["check_group"] for check in found["checks"]] == ["enumeration", "greedy identity"]
    assert found["checks"][1]["notes"] == ["prompt 0, token 3: a near-tie"]


def test_the_false_alarms_of_all_checks_are_stated(
    cospec_command: Command, climbing: dict[str, Any], tmp_path: Path
) -> None:
    climbing["checks"] += [SAMPLED, SAMPLED]
    result = cospec_command("verify", "--json", tmp_path / "found.json")
    assert "8e-08" in result.output
    assert json.loads((tmp_path / "found.json").read_text())["false_alarm"] == pytest.approx(8e-8)


def test_one_failure_is_shown_and_is_the_exit_status(cospec_command: Command, climbing: dict[str, Any]) -> None:
    climbing["checks"].append(BAD)
    result = cospec_command("verify")
    assert result.exit_code == 1
    assert "FAIL" in result.output
    assert "1 of 3 checks failed" in result.output


def test_wrong_input_is_one_sentence(cospec_command: Command, climbing: dict[str, Any], tmp_path: Path) -> None:
    result = cospec_command("verify", "zoo", "--speculative-config", "{")
    assert (result.exit_code, result.stderr.startswith("cospec: speculative_config is")) == (1, True)
    result = cospec_command("verify", "zoo", "--json", tmp_path / "no" / "such" / "file")
    assert (result.exit_code, "cospec: json is" in result.stderr) == (1, True)
    assert "model" not in climbing, "the file is looked at before anything is tried"
