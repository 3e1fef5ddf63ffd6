"""Every ``cospec`` command in README, CONTRIBUTING and docs is one that the real command line takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup
from typer.main import get_command

from cospec.cli.main import app

ROOT = Path(__file__).resolve().parents[3]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BEGINS = re.compile(r"(?:\$ )?(?:\.venv/bin/)?cospec (.*)", re.DOTALL)
COSPEC = get_command(app)


def commands(page: str) -> list[list[str]]:
    """Arguments of the commands in the shell blocks of a page; lines with optional parts in brackets are left out."""
    found = []
    for block in re.findall(r"^```(?:sh|console)\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE):
        lines = iter(block.splitlines())
        for line in lines:
            if not (begins := BEGINS.fullmatch(line)):
                continue
            words = _split(begins[1])
            text = begins[1]
            while words is None:
                text = text.removesuffix("\\") + "\n" + next(lines)
                words = _split(text)
            if not any(word.startswith("[") for word in words):
                found.append(words)
    return found


def _split(text: str) -> list[str] | None:
    """The words of a command; None where the command goes on in the next line."""
    if text.endswith("\\"):
        return None
    try:
        words = shlex.split(text, comments=True)
    except ValueError:  # an open quote
        return None
    ends = [place for place, word in enumerate(words) if word in ("&", "|", ">", "&&")]
    return words[: ends[0]] if ends else words


def parse(arguments: list[str]) -> None:
    """Raises about a command or option that does not exist."""
    rest, command = list(arguments), COSPEC
    while isinstance(command, TyperGroup) and rest and rest[0] != "--help":
        name = rest.pop(0)
        if name not in command.commands:
            raise LookupError(f"there is no command {name}")
        command = command.commands[name]
    try:
        command.make_context("cospec", rest)
    except typer.Exit as ended:  # --help
        assert ended.exit_code == 0


FOUND = [(page.name, words) for page in PAGES for words in commands(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize(("page", "words"), FOUND, ids=[f"{page}-{' '.join(words)[:40]}" for page, words in FOUND])
def test_commands_of_pages(page: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    parse(words)


def test_commands_are_found() -> None:
    page = "```sh\n# a note\ncospec serve \\\n  --port 1 &\n```\ntext\n```console\n$ cospec chat --x '{\n}'\n2\n```\n"
    assert commands(page) == [["serve", "--port", "1"], ["chat", "--x", "{\n}"]]
    assert len(FOUND) > 30


@pytest.mark.parametrize("words", [["serve", "--no-such-option"], ["brew"], ["bench", "brew"]])
def test_a_wrong_command_is_seen(words: list[str]) -> None:
    with pytest.raises(Exception, match=words[-1]):
        parse(words)
