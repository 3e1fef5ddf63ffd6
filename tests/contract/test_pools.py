"""Every combiner and routing says as data what it is, and keeps its promises."""

from __future__ import annotations

import numpy as np
import pytest

from cospec.core.tree import depths
from cospec.core.types import DraftBudget, DraftContext
from cospec.registry import COMBINERS, ROUTINGS
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from harness.pools import pool_of, toy_drafters

V = 5
KINDS = [
    (SamplingParams(temperature=0), StreamKind.TARGET),
    (SamplingParams(), StreamKind.TARGET),
    (SamplingParams(), StreamKind.DRAFT),
    (SamplingParams(temperature=0), StreamKind.DRAFT),
]


@pytest.mark.parametrize("name", COMBINERS)
def test_a_combiner_says_what_it_is(name: str) -> None:
    combiner = COMBINERS.load(name)()
    assert combiner.__doc__
    assert StreamKind.TARGET in combiner.stream_kinds, "a rule that draws by itself may judge anything"
    assert combiner.stream_kinds <= {StreamKind.TARGET, StreamKind.DRAFT}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("params", "stream_kind"), KINDS)
@pytest.mark.parametrize("name", COMBINERS)
def test_a_combined_draft_keeps_to_its_budget(
    name: str, params: SamplingParams, stream_kind: StreamKind, routing: str
) -> None:
    pool = pool_of(toy_drafters(V), name, routing, V)
    texts = [[0, 1, 0, 1, 0, 1], [2, 2], [3, 1, 4, 1, 3, 1, 4, 1, 0], [0]]
    chance, proposed = np.random.default_rng(0), 0
    for _ in range(10):
        budgets = [DraftBudget(int(depth), int(nodes)) for depth, nodes in chance.integers(0, 7, (len(texts), 2))]
        contexts = [DraftContext(f"s{n}", text, 1, params, n, stream_kind) for n, text in enumerate(texts)]
        drafts = pool.propose(contexts, budgets)
        for draft in drafts:
            budget, n = budgets[int(draft.id[1:])], len(draft)
            proposed += n
            assert draft.base_len == len(texts[int(draft.id[1:])])
            assert 1 <= n <= budget.max_nodes
            assert max(depths(draft.parents)) <= budget.depth
            assert set(draft.drafters) <= set(pool.member_names)
            pairs = list(zip(draft.parents, draft.tokens, strict=True))
            assert len(set(pairs)) == n, "equal tokens after one node are one node"
            assert draft.confidence is not None
            assert ((draft.confidence >= 0) & (draft.confidence <= 1)).all()
            assert (draft.q is not None) is (stream_kind is StreamKind.DRAFT and not params.greedy)
            if draft.q is not None:
                assert draft.q.sum(-1) == pytest.approx(np.ones(n))
                assert all(row[token] > 0 for row, token in zip(draft.q, draft.tokens, strict=True))
        for text in texts:
            text.append(int(chance.integers(V)))
    assert (proposed > 0) is (stream_kind in COMBINERS.load(name).stream_kinds)
