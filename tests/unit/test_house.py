"""The house rules that a machine can check: import order, what the docs name, what a file may hold."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cospec import registry
from cospec.errors import InvalidInput
from cospec.registry import Table

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "cospec").rglob("*.py"))
TABLES = {name: value for name, value in vars(registry).items() if isinstance(value, Table)}
KINDS = {
    "DRAFTERS": ("drafter", "drafters"),
    "RULES": ("rule", "rules"),
    "POLICIES": ("policy", "policies"),
    "BLENDS": ("blend", "blends"),
    "ROUNDS": ("round", "rounds"),
    "COMBINERS": ("combiner", "drafters"),
    "ROUTINGS": ("routing", "drafters"),
}


def _rows() -> list[list[str]]:
    """Cells of the table of mechanisms."""
    lines = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def _named(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_imports_keep_their_order() -> None:
    linter = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if linter is None:
        pytest.skip("import-linter is not installed")
    done = subprocess.run([linter, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_file_that_the_table_names_exists() -> None:
    rows = _rows()
    assert len(rows) > 10
    for row in rows:
        assert len(row) == 5, row
        assert _named(row[3]) and _named(row[4]), f"{row[0]} names no file or no test"
        for path in _named(row[3]) + _named(row[4]):
            assert (ROOT / path).is_file(), f"{row[0]} names {path}, which does not exist"


@pytest.mark.parametrize("table", sorted(TABLES))
def test_every_plugin_is_in_the_table_beside_its_file(table: str) -> None:
    kind, _ = KINDS[table]
    for name, target in TABLES[table].items():
        path = "src/" + target.partition(":")[0].replace(".", "/") + ".py"
        places = [row for row in _rows() if row[1] == f"{kind} `{name}`"]
        assert places, f"docs/papers.md has no row for {kind} `{name}`"
        assert path in _named(places[0][3]), f"docs/papers.md does not name {path} for {kind} `{name}`"


@pytest.mark.parametrize("table", sorted(TABLES))
def test_every_plugin_loads_and_stands_in_its_room(table: str) -> None:
    _, room = KINDS[table]
    for name, target in TABLES[table].items():
        assert isinstance(TABLES[table].load(name), type)
        assert target.startswith(f"cospec.{room}."), f"{name} is not in {room}/"
    with pytest.raises(InvalidInput, match="one of"):
        TABLES[table].load("nothing")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT / "src")))
def test_a_file_is_one_idea(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400, "one idea per file: split it"
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    assert text.startswith('"""') or not text, "a file begins by saying what it is for"


def test_the_command_and_the_package_agree_on_the_version() -> None:
    import tomllib

    import cospec

    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert cospec.__version__ == declared


def test_architecture_names_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in (ROOT / "src" / "cospec").iterdir():
        if path.suffix == ".py" and not path.name.startswith("__"):
            assert f"`{path.name}`" in page, f"docs/architecture.md does not name {path.name}"
        elif path.is_dir() and not path.name.startswith("__"):
            assert f"`{path.name}/`" in page, f"docs/architecture.md does not name {path.name}/"


def test_every_picture_is_shown_on_a_page() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    shown = {name for page in pages for name in re.findall(r"images/([\w.-]+)\)", page.read_text())}
    assert shown == {picture.name for picture in (ROOT / "docs" / "images").iterdir()}
