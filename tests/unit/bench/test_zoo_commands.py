"""``cospec bench record`` and ``quality`` on the shipped models, small enough to end in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import cospec
from cospec.cli.main import app
from cospec.simulation.recorded_drafts import read_recording

ZOO = Path(cospec.__file__).parent / "zoo" / "target"
pytestmark = pytest.mark.skipif(not (ZOO / "config.json").exists(), reason="the zoo's target is not there yet")


def command(*words: str) -> str:
    found = CliRunner().invoke(app, list(words))
    assert found.exit_code == 0, found.output
    return found.output


def test_a_recording_is_simulated(tmp_path: Path) -> None:
    prompts, file = tmp_path / "p.jsonl", tmp_path / "drafts.npz"
    rows = [{"prompt": "def add(a, b):", "category": "code"}, {"prompt": "It was a dark", "category": "prose"}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    command(
        "bench", "record", "--dataset-path", str(prompts), "--num-prompts", "2", "--output-len", "12", "--depth", "3",
        "--drafter", "generic=zoo:drafter", "--drafter", "code=zoo:code", "--output", str(file), "--threads", "1",
    )  # fmt: skip
    found = read_recording(file)
    assert found.names == ("generic", "code") and found.tokens.shape == (2, 24, 3)
    assert sorted(found.domains) == ["code", "prose"]
    members = [{"name": "generic"}, {"name": "code"}, {"name": "ngram"}]
    scenario = {
        "requests": 4, "recording": file.name, "target": {"cost": {"fixed": 0.01}}, "domains": [{"name": "code"}],
        "drafting": {"kind": "recorded", "combiner": "vote", "members": members},
        "variants": [{"name": "vote", "num_speculative_tokens": 3}],
    }  # fmt: skip
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(scenario), encoding="utf-8")
    command("simulate", str(tmp_path / "s.yaml"), "--output", str(tmp_path / "s.json"))
    (run,) = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["runs"]
    assert run["requests"] == 4 and run["mean_acceptance_length"] > 1


def test_a_recorded_ensemble_is_simulated(tmp_path: Path) -> None:
    prompts, file = tmp_path / "p.jsonl", tmp_path / "members.npz"
    prompts.write_text(json.dumps({"prompt": "def add(a, b):", "category": "code"}) + "\n", encoding="utf-8")
    given = {"method": "weighted", "weights": [0.6, 0.4]}
    command(
        "bench", "record", "--dataset-path", str(prompts), "--num-prompts", "1", "--output-len", "12", "--depth", "1",
        "--model", "zoo:drafter", "--model", "zoo:code", "--ensemble", json.dumps(given), "--output", str(file),
        "--threads", "1",
    )  # fmt: skip
    assert read_recording(file).names == ("zoo:drafter", "zoo:code")
    members = [{"name": name} for name in read_recording(file).names]
    scenario = {
        "requests": 2, "recording": file.name, "domains": [{"name": "code"}],
        "target": {"cost": {"fixed": 0.01}, "members": members, "ensemble": given},
        "variants": [{"name": "own", "collaboration": {"gamma": [1, 2], "proposer": 1}}],
    }  # fmt: skip
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(scenario), encoding="utf-8")
    command("simulate", str(tmp_path / "s.yaml"), "--output", str(tmp_path / "s.json"))
    (run,) = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["runs"]
    assert run["requests"] == 2 and 0 < run["acceptance"] < 1
    found = CliRunner().invoke(app, ["bench", "record", "--dataset-path", str(prompts), "--output", str(file)])
    assert found.exit_code == 1 and "drafter is missing" in found.output


def test_quality_is_printed_with_its_interval(tmp_path: Path) -> None:
    tasks = tmp_path / "gsm8k.jsonl"
    tasks.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n", encoding="utf-8")
    shown = command(
        "bench", "quality", "--dataset-path", str(tasks), "--output-len", "8", "--threads", "1",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "q",
    )  # fmt: skip
    for name in ("exact", "adaptive"):
        assert any(line.startswith(f"{name}: ") and "/1 = " in line for line in shown.splitlines()), shown
    runs = json.loads((tmp_path / "q.json").read_text(encoding="utf-8"))["runs"]
    assert [run["label"] for run in runs] == ["exact", "adaptive"] and all(0 <= run["low"] < 1 for run in runs)
