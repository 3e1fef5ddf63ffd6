"""The commands around an engine without a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import cospec.llm
from cospec.cli.main import app
from server import fake_engine


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_engine.write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path) -> type[fake_engine.FakeLLM]:
    """The fake in the place of ``cospec.llm.LLM``."""
    monkeypatch.setattr(fake_engine.FakeLLM, "tokenizer_folder", str(tokenizer_folder))
    monkeypatch.setattr(fake_engine.FakeLLM, "made", [])
    monkeypatch.setattr(cospec.llm, "LLM", fake_engine.FakeLLM)
    return fake_engine.FakeLLM


@pytest.fixture
def cospec_command() -> Callable[..., Result]:
    runner = CliRunner()

    def call(*arguments: object, input: str | None = None) -> Result:
        result = runner.invoke(app, [str(argument) for argument in arguments], input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call
