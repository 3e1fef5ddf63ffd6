"""What is wrong with a command's files is one sentence, before any work whose result would be lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from cospec.profiling import measure
from cospec.simulation import run as simulation
from cospec.verify import suite

Command = Callable[..., Result]

ZOO = Path(__file__).resolve().parents[3] / "examples" / "scenarios" / "zoo.yaml"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in; whoever begins to work there has failed."""

    def work(*arguments: object, **options: object) -> None:
        raise AssertionError("the work began")

    for module, name in ((suite, "context_of_llm"), (measure, "measure_forwards"), (simulation, "simulate")):
        monkeypatch.setattr(module, name, work)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    return tmp_path


WRITTEN = "a file that can be written"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["verify", "--json", "folder"], "json is 'folder'"),
        (["verify", "--json", "no/such.json"], "json is 'no/such.json'"),
        (["generate", "--prompts", "prompts.jsonl", "--output", "out.jsonl", "--native", "on"], "native is 'on'"),
        (["chat", "--native", "on"], "native is 'on'"),
        (["bench", "latency", "--dataset-path", "prompts.jsonl", "--native", "on"], "native is 'on'"),
        (["profile", "zoo", "--output", "folder"], "output is 'folder'"),
        (["profile", "zoo", "--output", "no/such.json"], "output is 'no/such.json'"),
        (["profile", "zoo", "--plot", "p.gif"], "plot is 'p.gif'"),
        (["profile", "zoo", "--plot", "no/p.png"], "plot is 'no/p.png'"),
        (["simulate", ZOO, "--output", "folder"], "output is 'folder'"),
        (["simulate", ZOO, "--plot", "folder"], "plot is 'folder'"),
        (["simulate", "bytes"], "config is bytes"),
        (["simulate", "folder"], "config is 'folder'"),
        (["serve", "--config", "bytes"], "config is bytes"),
        (
            ["train", "tokenizer", "--data", "folder", "--out", "file"],
            "out is 'file'",
        ),
        (
            ["train", "target", "--data", "folder", "--from", "zoo", "--out", "file/below"],
            "out is 'file/below'",
        ),
        (
            ["train", "export", "--out", "folder", "--to", "file"],
            "to is 'file'",
        ),
        (
            ["train", "tokenizer", "--data", "folder", "--recipe", "bytes.yaml"],
            "recipe is bytes.yaml",
        ),
        (
            ["bench", "latency", "--dataset-path", "missing"],
            "dataset_path is 'missing'",
        ),
        (
            ["bench", "serve", "--dataset-path", ZOO.parents[1] / "prompts.jsonl", "--url", "http://127.0.0.1:99999"],
            "url is http://127.0.0.1:99999",
        ),
    ],
)
def test_errors_are_reported_before_the_work(
    cospec_command: Command, place: Path, arguments: list[object], expected: str
) -> None:
    result = cospec_command(*arguments)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith(f"cospec: {expected}")


def test_a_file_that_can_be_written_lets_the_work_begin(cospec_command: Command, place: Path) -> None:
    for arguments in (["verify", "--json", "file"], ["simulate", ZOO, "--output", "new.json", "--plot", "p.png"]):
        with pytest.raises(AssertionError, match="the work began"):
            cospec_command(*arguments)
