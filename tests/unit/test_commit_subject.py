"""The hook that checks the subjects of commits."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CONFIG = Path(__file__).parents[2] / ".pre-commit-config.yaml"


def accepts(message: str, folder: Path) -> bool:
    """Return whether the hook accepts a commit message."""
    hooks = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["repos"][0]["hooks"]
    hook = next(each for each in hooks if each["id"] == "commit-subject")
    file = folder / "message"
    file.write_text(message, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        f"pre_commit.languages.{hook['language']}",
        *hook["args"],
        hook["entry"],
        str(file),
    ]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("message", "right"),
    [
        ("core: count steps\n\nA body may have lines of any length, " + 80 * "x", True),
        ("ops, models: round by group\n", True),
        ("Merge branch 'main'\n", True),
        ("core: " + 66 * "a", True),
        ("core: " + 67 * "a", False),
        ("count steps\n\ncore: a body that looks like a subject", False),
        ("core: Count steps\n", False),
    ],
)
def test_subject_has_area_and_72_characters(message: str, right: bool, tmp_path: Path) -> None:
    assert accepts(message, tmp_path) == right
