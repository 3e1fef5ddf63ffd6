"""``cospec doctor``: its plan is the engine's, its smoke test runs, and each problem has a sentence and a status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from cospec.cli import doctor_checks
from cospec.llm import LLM
from cospec.native import library
from harness.gguf_files import write_model
from harness.gguf_models import MODELS, random_model

Command = Callable[..., Result]


def examined(cospec_command: Command, *arguments: object) -> tuple[int, dict[str, Any]]:
    result = cospec_command("doctor", "--json", *arguments)
    return result.exit_code, json.loads(result.output)


@pytest.mark.parametrize("bytes", [1 << 22, 1 << 23])
def test_the_plan_is_what_the_engine_takes(cospec_command: Command, bytes: int) -> None:
    code, found = examined(cospec_command, "--no-smoke-test", "--kv-cache-memory-bytes", bytes)
    plan = found["memory"]
    with LLM("zoo", kv_cache_memory_bytes=bytes, measure_at_start=False) as llm:
        assert plan["kv_cache_tokens"] == llm.engine.scheduler.pages.capacity
        assert plan["max_model_len"] == llm.engine.max_model_len
    assert plan["kv_cache_tokens"] * plan["kv_cache_bytes_per_token"] <= bytes
    assert plan["speculation"].startswith("draft_model zoo:drafter, policy goodput")
    assert (code, found["problems"], found["smoke_test"]) == (0, [], None)


@pytest.mark.slow
def test_the_smoke_test_compares_kernels_and_drafts(cospec_command: Command) -> None:
    code, found = examined(cospec_command)
    texts = found["smoke_test"]["texts"]
    assert set(texts) == {"torch", "drafted"} | ({"native"} if library.available() else set())
    assert len(set(texts.values())) == 1 and texts["torch"].strip()
    assert code == 0


def test_texts_that_differ_are_a_problem(cospec_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["one", "two", "one"])
    monkeypatch.setattr(doctor_checks, "smoke_test_text", lambda options: next(answers))
    result = cospec_command("doctor")
    assert result.exit_code == 1
    assert "problem: " in result.output and "no problems" not in result.output


def test_missing_kernels_and_few_processors(cospec_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "available", lambda: False)
    monkeypatch.setattr(library, "why_not", lambda: "the native kernels were not built")
    monkeypatch.setattr(doctor_checks, "cores", lambda: 2)
    code, found = examined(cospec_command, "--no-smoke-test")
    assert (code, found["kernels"]["native"], found["kernels"]["isa"]) == (0, False, None)
    said = " ".join(found["slow"])
    assert "the native kernels were not built" in said and "g++" in said
    assert "2 processors only" in said


@pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")
def test_instruction_set_without_bfloat16(cospec_command: Command) -> None:
    before = library.isa()
    library.set_isa("avx2" if "avx2" in doctor_checks.kernels(None)["available"] else "base")
    try:
        used = library.isa()
        _, found = examined(cospec_command, "--no-smoke-test")
        assert found["kernels"]["isa"] == library.isa() == used
    finally:
        library.set_isa(before)
    assert before in found["kernels"]["available"]
    assert any(used in reason and "emulate" in reason for reason in found["slow"])


def test_a_model_that_cannot_be_served_is_a_problem(cospec_command: Command, tmp_path: Path) -> None:
    code, found = examined(cospec_command, tmp_path, "--no-smoke-test")
    assert (code, found["memory"]) == (1, None)
    assert "has no readable config.json" in found["problems"][0]


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "pool", "drafters": [{"method": "nram"}]}, "speculative_config.drafters[0].method is 'nram'"),
        ({"method": "pool", "drafters": [{"method": "ngram"}] * 2}, "speculative_config.drafters[1].name is 'ngram'"),
        ({"method": "pool", "routing_options": {"x": 1}}, "key speculative_config.routing_options.x is 1"),
        ({"method": "heads", "heads": "/nope"}, "speculative_config.heads is '/nope'"),
        ({"method": "ngram", "drafter_nodes": {"bnd": 1}}, "key speculative_config.drafter_nodes.bnd is 1"),
        ({"method": "ngram", "prompt_lookup_max": 1}, "speculative_config.prompt_lookup_min is 2"),
        ({"method": "draft_model", "model": "/nope"}, "model is '/nope'"),
    ],
)
def test_a_drafter_that_the_engine_refuses_is_a_problem(
    cospec_command: Command, given: dict[str, Any], sentence: str
) -> None:
    code, found = examined(cospec_command, "--no-smoke-test", "--speculative-config", json.dumps(given))
    assert code == 1
    assert found["problems"][0].startswith(sentence)


def test_weights_above_the_memory_are_a_problem(cospec_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_checks, "memory_info", lambda: {"MemTotal": 2 << 20, "MemAvailable": 1 << 20})
    code, found = examined(cospec_command, "--no-smoke-test")
    assert code == 1
    assert "while 1 MiB of memory are available" in found["problems"][0]


def test_the_plan_names_the_formats_of_a_file(cospec_command: Command, tmp_path: Path) -> None:
    model = random_model(MODELS["qwen2"][0])
    path = write_model(tmp_path / "model.gguf", model, "Q4_0", kinds={"ffn_down": "Q8_0"})
    off = ("--no-smoke-test", "--speculative-config", json.dumps({"method": "off"}))
    (planned,) = examined(cospec_command, path, *off)[1]["memory"]["weights"]
    assert planned["formats"].startswith("q4_0 ") and ", q8_0 " in planned["formats"]
    (line,) = [line for line in cospec_command("doctor", path, *off).output.splitlines() if line.startswith("plan: ")]
    assert f"MiB {planned['formats']};" in line
    (planned,) = examined(cospec_command, path, *off, "--quantization", "q5_0")[1]["memory"]["weights"]
    assert planned["formats"] == "q5_0"


def test_the_reader_sees_every_part(cospec_command: Command) -> None:
    lines = cospec_command("doctor", "--no-smoke-test").output.splitlines()
    parts = ("installed", "machine", "GPU", "kernels", "model", "speculation", "plan", "longest sequence")
    assert [part for part in parts if not any(line.startswith(f"{part}: ") for line in lines)] == []
    assert lines[-1] == "no problems"
