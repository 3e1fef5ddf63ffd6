"""``cospec bench record`` and ``quality`` on the shipped models, small enough to end in seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import cospec
from cospec import LLM, SamplingParams
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
    """The simulated acceptance is that of the engine with the same proposals on the same prompts."""
    prompts, file = tmp_path / "p.jsonl", tmp_path / "members.npz"
    texts, names, given = ["It was a dark", "import os\n"], ["zoo:drafter", "zoo:code"], {"method": "weighted"}
    rows = [json.dumps({"prompt": text, "category": "code"}) + "\n" for text in texts]
    prompts.write_text("".join(rows), encoding="utf-8")
    recording = "bench", "record", "--dataset-path", str(prompts), "--num-prompts", "2", "--output", str(file)
    command(
        *recording, "--output-len", "32", "--depth", "1", "--ensemble", json.dumps(given), "--threads", "1",
        *(word for name in names for word in ("--model", name)),
    )  # fmt: skip
    assert read_recording(file).names == tuple(names)
    own = {"proposal": "alternate", "gamma": [1, 3], "proposer": 1}
    scenario = {
        "requests": 2, "recording": file.name, "domains": [{"name": "code"}],
        "target": {"cost": {"fixed": 0.01}, "members": [{"name": name} for name in names], "ensemble": given},
        "arrivals": {"kind": "closed", "concurrency": [2]}, "variants": [{"name": "own", "collaboration": own}],
    }  # fmt: skip
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(scenario), encoding="utf-8")
    command("simulate", str(tmp_path / "s.yaml"), "--output", str(tmp_path / "s.json"))
    (run,) = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["runs"]
    with LLM(models=names, ensemble=given, collaboration=own, threads=1) as llm:
        found = llm.generate(texts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    accepted, rejected = (
        sum(each) for each in zip(*((o.stats.accepted, o.stats.rejections) for o in found), strict=True)
    )
    assert accepted > 10 and rejected > 2
    assert run["acceptance"] == pytest.approx(accepted / (accepted + rejected), abs=0.03), "but for ties of float32"


def test_a_recording_needs_a_drafter(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "def"}) + "\n", encoding="utf-8")
    given = "--dataset-path", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "r.npz")
    found = CliRunner().invoke(app, ["bench", "record", *given])
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
