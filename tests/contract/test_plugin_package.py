"""A plug-in in a package of its own is found by its entry points and keeps the contract of every table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.plugin import SOURCE, install

ROOT = Path(__file__).resolve().parents[2]
NAMES = {
    "DRAFTERS": "phrases",
    "POLICIES": "two-lengths",
    "ACCEPTANCE_METHODS": "threshold",
    "LOGITS_PROCESSORS": "no-repeat-ngram",
    "BLENDS": "product",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Of a process that has the example installed."""
    folder = install(tmp_path_factory.mktemp("installed"))
    paths = [str(folder), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True)


def test_names_are_known_before_any_code_of_the_package_runs(environment: dict[str, str]) -> None:
    code = f"""
import sys
from cospec import registry
for table, name in {NAMES!r}.items():
    assert getattr(registry, table).installed == [name], table
    getattr(registry, table).check(name)
assert "cospec_example" not in sys.modules
for table, name in {NAMES!r}.items():
    assert getattr(registry, table).load(name).__module__.startswith("cospec_example.")
"""
    done = run(environment, "-c", code)
    assert done.returncode == 0, done.stderr


def test_the_contract_tests_hold(environment: dict[str, str]) -> None:
    chosen = " or ".join(NAMES.values())
    done = run(
        environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/contract/test_tables.py", "-k", chosen
    )
    assert done.returncode == 0, done.stdout
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None and int(found[1]) >= 10, done.stdout


def test_every_class_of_the_package_is_an_entry_point() -> None:
    declared = (SOURCE / "pyproject.toml").read_text(encoding="utf-8")
    for name in NAMES.values():
        assert f"\n{name} = " in declared
