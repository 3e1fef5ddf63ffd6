"""The commands, against a scripted server and an engine without a model."""

from __future__ import annotations

import importlib.util
import json
import re
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import cospec.cli.bench_common as output
from cospec.bench import systems
from cospec.cli.main import app
from unit.bench.fakes import FakeSystem
from unit.bench.stub_server import Script, StubServer

STREAM: Script = ((0.01, "a"), (0.01, "bcde"))


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{number}"}) + "\n" for number in range(12)), encoding="utf-8")
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def stored(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "r.json").read_text(encoding="utf-8"))
    return found


def serve(server: StubServer, prompts: Path, *more: object) -> Result:
    where = ("--base-url", server.url, "--tokenizer", "none", "--num-warmups", 0, "--num-prompts", 6)
    to = ("--result-dir", prompts.parent, "--result-filename", "r")
    return run("serve", "--dataset-path", prompts, *where, *to, *more)


def test_serve_sweeps_rates_and_writes_both_files(prompts: Path) -> None:
    with StubServer({f"p{number}": STREAM for number in range(12)}) as server:
        done = serve(server, prompts, "--request-rate", "200,400", "--goodput", "ttft:60000", "tpot:60000")
    assert done.exit_code == 0, done.output
    result = stored(prompts.parent)
    assert [one["request_rate"] for one in result["runs"]] == [200.0, 400.0]
    first = result["runs"][0]
    assert len({body["prompt"] for body in server.bodies}) == 12, "no prompt is sent twice"
    assert first["completed"] == 6 and first["total_output_tokens"] == 30 and first["goodput_share"] == 1.0
    assert result["settings"]["goodput_ms"] == {"ttft": 60000.0, "tpot": 60000.0}
    assert "TTFT p99" in done.output and (prompts.parent / "r.html").read_text().startswith("<!doctype html>")


def test_a_dying_server_leaves_a_report_and_a_failing_status(prompts: Path) -> None:
    with StubServer({f"p{number}": STREAM for number in range(12)}, die_after=2) as server:
        done = serve(server, prompts, "--max-concurrency", 1, "--save-detailed")
    assert done.exit_code == 1
    (one,) = stored(prompts.parent)["runs"]
    assert one["completed"] == 2 and one["failed"] == 4 and len(one["ttfts"]) == 6
    assert "INTERRUPTED" in done.output and "FAILED" in done.output


def test_the_key_to_a_server_is_not_written_down(prompts: Path) -> None:
    assert output.command(["bench", "--api-key", "secret", "--x"]) == "cospec bench --api-key ... --x"
    assert "secret" not in output.command(["--api-key=secret"])
    assert "secret" not in output.command(['a={"url": "http://h", "api_key": "secret"}'])


def test_compare_takes_systems_by_name(prompts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"slow": 2.0, "fast": 1.0}
    monkeypatch.setattr(systems.SystemSpec, "build", lambda spec: FakeSystem(spec.name, repeat(seconds[spec.name]), []))
    done = run(
        *("compare", "slow={}", "fast={}", "--dataset-path", prompts, "--tokenizer", "none", "--num-prompts", 6),
        *("--repetitions", 2, "--result-dir", prompts.parent, "--result-filename", "r.json"),
    )
    assert done.exit_code == 0, done.output
    assert "2.00 x" in done.output
    ratios = stored(prompts.parent)["ratios"]
    assert {row["pairs"] for row in ratios} == {12}


def test_results_survive_a_server_that_dies(prompts: Path) -> None:
    streams = {f"p{number}": STREAM for number in range(12)}
    with StubServer(streams) as whole, StubServer(streams, die_after=4) as dying:
        done = run(
            *("compare", f"a={whole.url}", f"b={dying.url}", "--dataset-path", prompts, "--tokenizer", "none"),
            *("--num-prompts", 6, "--repetitions", 1, "--result-dir", prompts.parent, "--result-filename", "r"),
        )
    assert done.exit_code == 1 and "FAILED" in done.output and "Traceback" not in done.output
    result = stored(prompts.parent)
    assert [one["completed"] for one in result["runs"]] == [6, 3], "the warm-up took one of the four"
    assert {row["pairs"] for row in result["ratios"]} == {3}


def test_bad_outputs_are_refused_before_measuring(prompts: Path) -> None:
    with StubServer({}) as server:
        for arguments in (("--result-dir", prompts, "--result-filename", "r"), ("--tokenizer", prompts.parent)):
            done = run("serve", "--dataset-path", prompts, "--base-url", server.url, *arguments)
            assert done.exit_code == 1 and "allowed is" in done.output, done.output
        assert not server.bodies


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--request-rate", "fast"], "request_rate is 'fast'"),
        (["--goodput", "itl:3"], "goodput is 'itl:3'"),
        (["--percentile-metrics", "speed"], "percentile_metrics is 'speed'"),
        (["--extra-body", "{"], "extra_body"),
        (["stray"], "argument is 'stray'"),
        (["--trace", "nowhere.txt"], "trace is 'nowhere.txt'"),
        (["--base-url", "http://127.0.0.1:1"], "a server that answers|an OpenAI-compatible server"),
    ],
)
def test_impossible_arguments_are_reported_in_a_sentence(prompts: Path, arguments: list[str], expected: str) -> None:
    done = run("serve", "--dataset-path", prompts, *arguments)
    assert done.exit_code == 1 and re.search(expected, done.output), done.output
    assert "Traceback" not in done.output


def test_one_system_is_nothing_to_compare(prompts: Path) -> None:
    done = run("compare", "one={}", "--dataset-path", prompts)
    assert done.exit_code == 1 and "two or more" in done.output


@pytest.mark.parametrize("command", [["latency"], ["serve"], ["compare", "a={}", "b={}"]])
def test_a_missing_extra_is_one_sentence(prompts: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("cospec.cli.bench_common.find_spec", lambda name: None if name == "scipy" else real(name))
    done = run(*command, "--dataset-path", prompts)
    assert done.exit_code == 1 and "pip install 'cospec[bench]'" in done.output
    assert len(done.output.strip().splitlines()) == 1
