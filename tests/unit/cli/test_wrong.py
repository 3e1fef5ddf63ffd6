"""What is wrong with a command's files is one sentence, before any work whose result would be lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from cospec.bench.verify import ladder
from cospec.profiling import measure
from cospec.simulation import run as simulation

ZOO = Path(__file__).resolve().parents[3] / "examples" / "scenarios" / "zoo.yaml"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to stand in; whoever begins to work there has failed."""

    def work(*arguments: object, **options: object) -> None:
        raise AssertionError("the work began")

    for module, name in ((ladder, "subject_of"), (measure, "measure_forwards"), (simulation, "simulate")):
        monkeypatch.setattr(module, name, work)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe")
    return tmp_path


WRITTEN = "a file that can be written"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["verify", "--json", "folder"], f"json is 'folder'; allowed is {WRITTEN}."),
        (["verify", "--json", "no/such.json"], f"json is 'no/such.json'; allowed is {WRITTEN}."),
        (["profile", "zoo", "--output", "folder"], f"output is 'folder'; allowed is {WRITTEN}."),
        (["profile", "zoo", "--output", "no/such.json"], f"output is 'no/such.json'; allowed is {WRITTEN}."),
        (["profile", "zoo", "--plot", "p.gif"], "plot is 'p.gif'; allowed is a file whose name ends in .png."),
        (["profile", "zoo", "--plot", "no/p.png"], f"plot is 'no/p.png'; allowed is {WRITTEN}."),
        (["simulate", ZOO, "--output", "folder"], f"output is 'folder'; allowed is {WRITTEN}."),
        (["simulate", ZOO, "--plot", "folder"], "plot is 'folder'; allowed is a file whose name ends in .png."),
        (["simulate", "bytes"], "config is bytes, which is not JSON or YAML; allowed is a JSON or YAML file."),
        (["simulate", "folder"], "config is 'folder'; allowed is a readable file (Is a directory)."),
        (["serve", "--config", "bytes"], "config is bytes, which is not JSON or YAML; allowed is a JSON or YAML file."),
        (
            ["train", "tokenizer", "--data", "folder", "--out", "file"],
            "out is 'file'; allowed is a folder that can be written (File exists).",
        ),
        (
            ["train", "target", "--data", "folder", "--from", "zoo", "--out", "file/below"],
            "out is 'file/below'; allowed is a folder that can be written (Not a directory).",
        ),
        (
            ["train", "export", "--out", "folder", "--to", "file"],
            "to is 'file'; allowed is a folder that can be written (File exists).",
        ),
        (
            ["train", "tokenizer", "--data", "folder", "--recipe", "bytes.yaml"],
            "recipe is bytes.yaml, which is not YAML; allowed is a YAML file.",
        ),
        (
            ["bench", "latency", "--dataset-path", "missing"],
            "dataset_path is 'missing'; allowed is a readable text file (No such file or directory).",
        ),
        (
            ["bench", "serve", "--dataset-path", ZOO.parents[1] / "prompts.jsonl", "--url", "http://127.0.0.1:99999"],
            "url is http://127.0.0.1:99999 (there is no such port); "
            "allowed is the address of an OpenAI-compatible server that answers.",
        ),
    ],
)
def test_what_is_wrong_is_told_first(cospec_command, place: Path, arguments: list[object], told: str) -> None:
    result = cospec_command(*arguments)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1] == f"cospec: {told}"


def test_a_file_that_can_be_written_lets_the_work_begin(cospec_command, place: Path) -> None:
    for arguments in (["verify", "--json", "file"], ["simulate", ZOO, "--output", "new.json", "--plot", "p.png"]):
        with pytest.raises(AssertionError, match="the work began"):
            cospec_command(*arguments)
