"""What the comparison of forwards on GGUF files computes."""

from __future__ import annotations

import pytest
from benchmarks.gguf_speed import CONTEXT, Work


@pytest.mark.parametrize(
    ("context", "prompts", "tokens"),
    [(256, (256, 2048), 4096), (8192, (), 8192 + CONTEXT), (8192, (256,), 8192 + CONTEXT)],
)
def test_a_cache_holds_context_and_prompts(context: int, prompts: tuple[int, ...], tokens: int) -> None:
    assert Work(context, prompts, 4).most_tokens == tokens
