"""``cospec calibrate`` on tiny models: an option that the engine takes, and one sentence for what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from cospec.ensemble.blends.registry import build_blend


def test_the_option_and_the_gain(tmp_path: Path, cospec_command: Callable[..., Result]) -> None:
    file = tmp_path / "answers.jsonl"
    rows = [{"prompt": "2 + 2 =", "reference": " 4, because"}, {"turns": ["It was"], "reference": " a dark night."}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = cospec_command("calibrate", "zoo", "zoo:drafter", "--references", file, "--tolerance", 0.05, "--threads", 1)
    assert done.exit_code == 0, done.output
    option, gain = done.output.strip().splitlines()[-2:]
    assert build_blend(json.loads(option), 2).name == "adaptive(max_divergence=0.1)"
    before, after = (float(gain.partition(word)[2].split()[0].strip(",")) for word in ("instead of", "acceptance rate"))
    assert before < after < 1


@pytest.mark.parametrize("line", ["no json", '{"prompt": "a"}', '{"turns": [], "reference": "b"}'])
def test_a_line_without_an_answer_is_named(tmp_path: Path, line: str, cospec_command: Callable[..., Result]) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text('{"prompt": "a", "reference": "b"}\n' + line + "\n")
    done = cospec_command("calibrate", "zoo", "zoo:drafter", "--references", file)
    assert done.exit_code == 1
    assert "references, line 2" in done.output
