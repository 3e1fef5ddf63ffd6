"""The parts of a step: what a benchmark measures of an engine, and what the papers' report says of two systems."""

from __future__ import annotations

import importlib
import json
import re
import time
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cospec import LLM, SamplingParams
from cospec.distributed.messages import Window

ROOT = Path(__file__).resolve().parents[3]
MACHINE = {"date": "2026-01-02", "processor": "2 x Chip", "threads": 2, "torch": "2.0"}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def parts(**given: float) -> dict[str, float]:
    usual = {"steps": 100, "batch": 6.0, "tokens": 2.0, "verification": 0.05, "waiting": 0.03, "rest": 0.02}
    return {**usual, **given}


def stored(**variants: dict[str, Any]) -> dict[str, Any]:
    """Results of variants, whose names have spaces for underscores."""
    names = {"CoSine": "CoSine, 4 nodes", "SpecInfer": "SpecInfer, 4 nodes", "in_turn": "without pipelining"}
    rows = {}
    for name, given in variants.items():
        own = {"parts": given, "target_idle": 0.25, "nodes_idle": 0.5, "mean_latency": 1.0, "tokens_per_second": 100.0}
        rows[names.get(name, name.replace("_", " "))] = {**own, "exits": {"windows": 12, "skipped": 9.0}}
    return {"machine": MACHINE, "variants": rows}


def factors(words: str) -> list[float]:
    return [float(number) for number in re.findall(r"(\d+\.\d+)×", words)]


def test_three_parts_multiply_to_the_throughput(benchmark: Any) -> None:
    step_parts = benchmark("papers.step_parts").StepParts
    own, other = step_parts(**parts(tokens=3.0, batch=3.0, waiting=0.0)), step_parts(**parts())
    assert other.throughput == pytest.approx(2.0 * 6.0 / 0.1)
    assert own.over(other) == pytest.approx((1.5, (3 / 0.05) / (6 / 0.08), (0.05 / 0.07) / (0.08 / 0.1)))
    assert prod(own.over(other)) == pytest.approx(own.throughput / other.throughput)


def test_the_row_of_two_systems_has_their_parts(benchmark: Any) -> None:
    losses = benchmark("papers.cosine_losses")
    found = stored(CoSine=parts(batch=3.0, waiting=0.0), SpecInfer=parts())
    words = losses.by_parts(found, losses.WHOLE, losses.SPECINFER)
    assert factors(words) == [0.71, 1.0, 0.8, 0.89]
    assert "batch 3.0 against 6.0, 0 against 30 ms" in words and "target idle 25% against 25%" in words


def test_what_is_missing_is_hidden_drafts_overhead_and_the_rest(benchmark: Any) -> None:
    losses = benchmark("papers.cosine_losses")
    half = parts(batch=3.0, waiting=0.02, rest=0.0)
    found = stored(CoSine=half, SpecInfer=parts(tokens=2.5), in_turn=parts())
    words = losses.missing(found, losses.SPECINFER)
    throughput = 2.0 * 3.0 / 0.07
    low, high = (gain * 150.0 / throughput for gain in (1.31, 1.62))
    possible = (6 / 0.05) / (3 / 0.07)
    assert words.startswith(f"{low:.2f} to {high:.2f}× missing = {possible:.2f}× ")
    assert words.endswith(f"{low / possible:.2f} to {high / possible:.2f}× left")
    assert f"{1.0:.2f}× without overhead" in words


def test_exits_are_counted(benchmark: Any) -> None:
    losses = benchmark("papers.cosine_losses")
    words = losses.exits(stored(PipeInfer=parts(), one_drafter=parts()), "PipeInfer")
    assert "12 refuted windows in 100 steps" in words and "did not compute 9 halves" in words


def test_results_from_before_the_parts_read_not_run(benchmark: Any, tmp_path: Path) -> None:
    sources, losses = benchmark("papers.sources"), benchmark("papers.cosine_losses")
    found = stored(CoSine=parts(), SpecInfer=parts(), in_turn=parts(), PipeInfer=parts(), one_drafter=parts())

    def ours() -> set[str]:
        (tmp_path / "cosine_nodes.json").write_text(json.dumps(found), encoding="utf-8")
        rows = losses.losses(sources.Results("cosine", tmp_path, tmp_path)).rows
        return {row.ours for row in rows if row.what.startswith("CoSine over SpecInfer, 24")}

    assert ours() != {"not run"}
    for row in found["variants"].values():
        del row["parts"]
    assert ours() == {"not run"}


def test_systems_on_a_target_in_stages_are_compared_by_parts(benchmark: Any, tmp_path: Path) -> None:
    sources, losses = benchmark("papers.sources"), benchmark("papers.cosine_losses")
    half, fewer = parts(waiting=0.01), parts(tokens=1.5)
    found = stored(CoSine=half, SpecInfer=parts(), after_outcomes=fewer, PipeInfer=half, one_drafter=fewer)
    (tmp_path / "cosine_nodes_stages_low.json").write_text(json.dumps(found), encoding="utf-8")
    rows = losses.losses(sources.Results("cosine", tmp_path, tmp_path)).rows
    ending = ", two stages, 6 requests"
    ours = {row.what.removesuffix(ending): factors(row.ours)[:4] for row in rows if row.what.endswith(ending)}
    assert ours == {
        "CoSine over SpecInfer": [1.25, 1.0, 1.33, 0.94],
        "CoSine after outcomes over SpecInfer": [0.75, 0.75, 1.0, 1.0],
        "PipeInfer over one drafter in turn": [1.67, 1.33, 1.33, 0.94],
    }


def test_measured_parts_are_those_of_the_run(benchmark: Any) -> None:
    speculative = {"method": "draft_model", "model": "zoo:drafter", "execution_mode": "draft-ahead"}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM("zoo", speculative, threads=1, native="off", measure_at_start=False, max_model_len=128) as llm:
        times = benchmark("step_times").StepTimes(llm.engine)
        started = time.monotonic()
        found = llm.generate(["def add(a, b):", "The sum of 2 and 3 is"], params)
        seconds, stats = time.monotonic() - started, [each.stats for each in found]
        measured = times.parts(seconds, 24, stats)
    assert min(asdict(measured).values()) > 0
    assert measured.steps == max(each.target_calls for each in stats)
    assert measured.throughput == pytest.approx(24 / seconds)
    assert measured.tokens == 24 / sum(each.target_calls for each in stats)
    assert times.cancelled() == 0


def test_a_slow_stage_counts_its_time_and_skipped_windows(benchmark: Any, tmp_path: Path) -> None:
    slow_stage = benchmark("slow_stage")
    counts = np.memmap(tmp_path / "counts", np.float64, "w+", shape=(2, 2))
    stage = slow_stage.SlowStage(slow_stage.Pace(0.01, 0.01, str(tmp_path / "counts")), 1)
    empty, ids = np.zeros((0, 1), np.int64), np.arange(3)
    for error in (None, "nothing reads the result"):
        with stage.window(Window(0, empty, ids, empty, empty, empty, empty, error=error)):
            pass
    assert counts[1, slow_stage.BUSY] >= 0.04 and counts[1, slow_stage.SKIPPED] == 1
    assert not counts[0].any()
