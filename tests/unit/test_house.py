"""The house rules that a machine can check: import order, sizes of files, plug-in tables, links of pages."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import cospec
from cospec import registry
from cospec.errors import InvalidInput
from cospec.registry import PluginTable

ROOT = Path(__file__).resolve().parents[2]
SOURCES = [path for folder in ("src/cospec", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
PACKAGE = [path for path in SOURCES if path.is_relative_to(ROOT / "src")]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TABLES = {name: value for name, value in vars(registry).items() if isinstance(value, PluginTable)}
WITH_PATHS = [*PAGES, *sorted((ROOT / "src").rglob("*.md"))]
PATH = re.compile(r"(?<![\w/.:~-])(?:[\w-]+/)+[\w.-]+\.(?:py|cpp|h|md)\b")
NAMED_CLASS = re.compile(r"``([a-z_]+)\.([A-Z]\w+)``")
TEXTS: dict[str, list[str]] = {}
for source in PACKAGE:
    TEXTS.setdefault(source.stem, []).append(source.read_text(encoding="utf-8"))
LINK = re.compile(r"\]\(([^)\s]+)\)")


def links(text: str) -> list[str]:
    """Relative targets of a page's links and pictures, without anchors."""
    found = [link.partition("#")[0] for link in LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))]
    return [link for link in found if link and not re.match(r"\w+:", link)]


def test_imports_keep_their_order() -> None:
    linter = shutil.which("lint-imports", path=str(Path(sys.executable).parent)) or shutil.which("lint-imports")
    if linter is None:
        pytest.skip("import-linter is not installed")
    done = subprocess.run([linter, "--no-logo", "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("table", sorted(TABLES))
def test_every_plugin_loads(table: str) -> None:
    for name in TABLES[table]:
        assert isinstance(TABLES[table].load(name), type)
    with pytest.raises(InvalidInput, match="nothing"):
        TABLES[table].load("nothing")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_size(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400, "split the file"


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstring_and_no_notes(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"\b(TODO|FIXME|XXX)\b", text)
    assert text.startswith('"""') or not text, "a file begins with a docstring"


def test_tests_of_clusters_are_where_make_runs_them() -> None:
    marked = {
        path for path in (ROOT / "tests").rglob("*.py") if re.search(r"pytest\.mark\.(ray|cluster)\b", path.read_text())
    }
    assert {path.relative_to(ROOT).parts[1] for path in marked} == {"cluster", "contract"}


def test_command_and_package_have_one_version() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert cospec.__version__ == declared


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    for link in links(page.read_text(encoding="utf-8")):
        assert (page.parent / link).exists(), link


@pytest.mark.parametrize("page", WITH_PATHS, ids=lambda page: str(page.relative_to(ROOT)))
def test_named_files_exist(page: Path) -> None:
    """Of paths in text and commands; the files of recipes do not exist."""
    text = re.sub(r"\]\([^)]*\)|https?://\S+|^# src/.*$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    bases = (ROOT, ROOT / "src" / "cospec", ROOT / "docs", page.parent)
    missing = {path for path in PATH.findall(text) if not any((base / path).exists() for base in bases)}
    assert not missing


@pytest.mark.parametrize("path", PACKAGE, ids=lambda path: str(path.relative_to(ROOT)))
def test_named_classes_exist(path: Path) -> None:
    """Of ``module.Class`` in docstrings and comments, where the module is of this package."""
    missing = {
        f"{module}.{name}"
        for module, name in NAMED_CLASS.findall(path.read_text(encoding="utf-8"))
        if importlib.util.find_spec(module) is None
        and not any(re.search(rf"^(class )?{name}\b", text, re.MULTILINE) for text in TEXTS.get(module, ()))
    }
    assert not missing


def test_every_picture_is_shown() -> None:
    shown = {Path(link).name for page in PAGES for link in links(page.read_text(encoding="utf-8"))}
    assert {picture.name for picture in (ROOT / "docs" / "images").iterdir()} <= shown


def test_links_are_found() -> None:
    assert links("[a](b.md#c) ![d](images/e.svg) [f](https://g) [h](#i)\n```\n[j](k)\n```") == ["b.md", "images/e.svg"]
