"""GGUF files of benchmarks: greedy decoding follows the table of next tokens, so acceptance is known."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cospec import LLM, SamplingParams

ROOT = Path(__file__).resolve().parents[3]
TOKENS = 24


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.gguf_files")


def test_tables_of_next_tokens(files: ModuleType) -> None:
    cycle = files.one_cycle(2048)
    assert sorted(cycle) == list(range(2048))
    walk = [files.WORDS]
    while (following := cycle[walk[-1]]) != walk[0]:
        walk.append(following)
    assert len(walk) == 2048 - files.WORDS
    wrong = files.with_errors(cycle, 0.7)
    assert sorted(wrong) == list(range(2048))
    assert np.mean((wrong == cycle)[files.WORDS :]) == pytest.approx(0.7, abs=0.04)


@pytest.mark.parametrize(("kind", "experts"), [("q4_0", 0), ("q8_0", 0), ("q4_0", 4)])
def test_greedy_tokens_and_accepted_drafts_follow_the_tables(
    files: ModuleType, tmp_path: Path, kind: str, experts: int
) -> None:
    """Also of a mixture, whose forward of one row reads half of its experts."""
    architecture = "qwen3moe" if experts else "qwen2"
    model = files.Model("small", architecture, 256, 2, 512, 4, 2, 2048, 64, experts=experts, chosen=experts // 2)
    whole = files.Model("all", architecture, 256, 2, 512, 4, 2, 2048, 64, experts=experts, chosen=experts)
    unread = 2 * 2 * 3 * 256 * 512 * 18 // 32 if experts else 0  # weights of two experts of two layers
    assert whole.bytes_of_one_row(kind) - model.bytes_of_one_row(kind) == unread
    cycle = files.one_cycle(model.vocabulary)
    wrong = files.with_errors(cycle, 0.5)
    files.write_file(tmp_path / "target.gguf", model, kind, cycle)
    files.write_file(tmp_path / "draft.gguf", model, "q8_0", wrong)
    path = [files.WORDS + 7]
    for _ in range(TOKENS):
        path.append(int(cycle[path[-1]]))
    drafter = {"method": "draft_model", "model": str(tmp_path / "draft.gguf"), "num_speculative_tokens": 1}
    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(str(tmp_path / "target.gguf"), drafter) as llm:
        answer = llm.generate([[600, 700, path[0]]], params)[0]
    assert list(answer.outputs[0].token_ids) == path[1:]
    right = [bool(wrong[token] == cycle[token]) for token in path[:-1]]
    assert any(right) and not all(right)
    place, drafted, accepted = 1, 0, 0  # the prefill gives the first token
    while place < TOKENS - 1:  # no draft for the last token
        drafted, accepted = drafted + 1, accepted + right[place]
        place += 1 + right[place]
    assert (answer.stats.drafted, answer.stats.accepted) == (drafted, accepted)
