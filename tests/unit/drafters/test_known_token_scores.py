"""A drafter scores known tokens: all of a short backlog, the end of a long one."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import pytest
import torch

from cospec.core.model_io import TokenBatch
from cospec.core.types import DraftBudget, DraftContext
from cospec.drafters.cross_tokenizer import SharedVocab
from cospec.drafters.draft_kv_cache import LOOKBACK, DraftKVCache
from cospec.drafters.known_token_scores import LONG_BACKLOG, WINDOW, score_known_tokens
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from harness.toys import with_pool

SHORT, LONG = [0, 1, 2, 2] * 5, [0, 1, 4, 2, 2, 3, 1] * (LONG_BACKLOG // 6)


def context(id: str, tokens: Sequence[int]) -> DraftContext:
    return DraftContext(id, tokens, len(tokens), SamplingParams(temperature=0), 0, StreamKind.TARGET)


def test_of_a_long_backlog_the_end_is_scored_and_nothing_is_kept() -> None:
    model = with_pool(ToyModel(5, order=2, seed=1, sharpness=2.0), 400, 16)
    cache = DraftKVCache(model, SharedVocab())
    read: list[int] = []
    forward = model.forward

    def counted(batch: TokenBatch) -> torch.Tensor:
        read.extend(len(part.tokens) for part in batch.slices)
        return forward(batch)

    with patch.object(model, "forward", counted):
        found = score_known_tokens(model, cache, [context("long", LONG), context("short", SHORT)])
    assert sorted(read) == [len(SHORT), WINDOW]
    for id, tokens in (("long", LONG), ("short", SHORT)):
        last = range(max(1, len(tokens) - LOOKBACK), len(tokens))
        wanted = [float(torch.softmax(model.logits(tokens[:n]), -1)[tokens[n]]) for n in last]
        assert found[id].num_tokens == len(wanted)
        assert found[id].probability_sum == pytest.approx(sum(wanted))
    assert cache.backlog_len("long", len(LONG)) == len(LONG)
    assert cache.backlog_len("short", len(SHORT)) == 1
    cache.free(["short"])
    model.pages.check_integrity()
    assert model.pages.usage == 0.0


def test_a_long_backlog_has_no_score_where_the_cache_has_no_room_for_its_end() -> None:
    model = with_pool(ToyModel(5, order=2, seed=1), WINDOW // 16, 16)
    cache = DraftKVCache(model, SharedVocab())
    assert score_known_tokens(model, cache, [context("long", LONG)]) == {}
    model.pages.check_integrity()
    assert model.pages.usage == 0.0


def test_a_drafter_reads_all_before_it_drafts() -> None:
    model = with_pool(ToyModel(5, order=2, seed=1), 400, 16)
    cache = DraftKVCache(model, SharedVocab())
    one = context("long", LONG)
    score_known_tokens(model, cache, [one])
    assert cache.open(one, DraftBudget(1, 1)) is not None
    (part,) = cache.backlog([one]).slices
    assert part.tokens == tuple(LONG)
