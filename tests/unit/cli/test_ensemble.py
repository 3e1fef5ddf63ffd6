"""Several models on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from server.fake_engine import FakeLLM

Command = Callable[..., Result]

LAW = '{"method": "weighted", "weights": [0.6, 0.4]}'


def test_generate_takes_several_models(llm: type[FakeLLM], cospec_command: Command, tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "results.jsonl"
    prompts.write_text(json.dumps({"prompt": "abc"}) + "\n")
    arguments = [
        "--model",
        "a",
        "--model",
        "b",
        "--ensemble",
        LAW,
        "--collaboration",
        '{"proposal": "naive", "gamma": 3}',
    ]
    result = cospec_command("generate", "--prompts", prompts, "--output", output, *arguments)
    assert result.exit_code == 0, result.output
    config = llm.made[0].engine.config
    assert [member.model for member in config.models or ()] == ["a", "b"]
    assert (config.model, config.served_model_name) == ("a", "a+b")
    assert config.ensemble == json.loads(LAW)
    assert (config.collaboration.proposal, config.collaboration.gamma) == ("naive", 3)


def test_serve_takes_several_models(cospec_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr("cospec.cli.serve.start", given.update)
    assert cospec_command("serve", "--model", "a", "--model", "b", "--ensemble", LAW).exit_code == 0
    assert given == {"models": ["a", "b"], "ensemble": LAW}


def test_serve_takes_one_model(cospec_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments in (["a"], ["--model", "a"]):
        given: dict[str, Any] = {}
        monkeypatch.setattr("cospec.cli.serve.start", given.update)
        assert cospec_command("serve", *arguments).exit_code == 0
        assert given == {"model": "a"}


@pytest.mark.parametrize("command", ["serve", "chat"])
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["a", "--model", "b"], "model is a as an argument and b with --model; allowed is one argument, or --model"),
        (["--model", "a", "--model", "b"], "ensemble is missing; allowed is an object for several models"),
    ],
)
def test_no_ensemble_is_made_unasked(
    cospec_command: Command, command: str, arguments: list[str], sentence: str
) -> None:
    result = cospec_command(command, *arguments)
    assert result.exit_code == 1
    assert sentence in result.stderr
