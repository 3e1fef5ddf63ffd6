"""The model drafter keeps its cache true: its drafts are what its model would write after the committed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import patch

import numpy as np
import pytest
from torch import Tensor

from cospec.core.model_io import TokenBatch
from cospec.core.sampling import History
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.model import ModelDrafter
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams
from harness.target_probs import target_probs_of
from harness.toys import with_pool

V = 5
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.8, top_p=0.9, repetition_penalty=1.3)


def model() -> ToyModel:
    return with_pool(ToyModel(V, order=3, seed=4), 256, 4)


def fresh(context: DraftContext, depth: int) -> Draft:
    """What a drafter that never saw the sequence before proposes."""
    (draft,) = ModelDrafter(model()).propose([context], [DraftBudget(depth, depth)])
    return draft


def same(found: Draft, wanted: Draft) -> bool:
    if found.tokens != wanted.tokens:
        return False
    if found.q is None or wanted.q is None:
        return found.q is wanted.q
    return np.array_equal(found.q, wanted.q)


def step(drafter: ModelDrafter, contexts: Sequence[DraftContext], depth: int) -> list[Draft]:
    return drafter.propose(contexts, [DraftBudget(depth, depth)] * len(contexts))


@pytest.mark.parametrize("stream_kind", [StreamKind.DRAFT, StreamKind.TARGET])
@pytest.mark.parametrize("params", [GREEDY, DRAWN])
def test_it_catches_up_after_anything(params: SamplingParams, stream_kind: StreamKind) -> None:
    """Rejections at every place, bonus tokens, rounds it was not asked in, commits of several tokens."""
    chance = np.random.default_rng(3)
    own = model()
    drafter = ModelDrafter(own)
    texts: dict[str, list[int]] = {id: [n, 1, 2] for n, id in enumerate("abc")}
    for _ in range(25):
        asked = [id for id in texts if chance.random() < 0.7]
        depth = int(chance.integers(1, 5))
        contexts = [DraftContext(id, texts[id], 3, params, 9, stream_kind) for id in asked]
        drafts = {draft.id: draft for draft in step(drafter, contexts, depth)}
        for context in contexts:
            assert same(drafts[context.id], fresh(context, depth))
        commits = []
        for id, text in texts.items():
            draft = drafts.get(id)
            kept = int(chance.integers(0, len(draft) + 1)) if draft else 0
            gained = (*(draft.tokens[:kept] if draft else ()), int(chance.integers(0, V)))
            commits.append(Commit(id, len(text), gained, tuple(range(kept)), len(text) + kept))
            text.extend(gained)
        drafter.commit(commits)
        own.pages.check_integrity()
    drafter.free(["a", "b", "c", "unknown"])
    assert drafter.model.pages.usage == 0


def test_it_feeds_each_token_once() -> None:
    drafter = ModelDrafter(model())
    text = [0, 1, 2, 3]
    fed: list[int] = []
    forward = drafter.model.forward

    def counted(batch: TokenBatch) -> Tensor:
        fed.append(sum(len(part.tokens) for part in batch.slices))
        return forward(batch)

    with patch.object(drafter.model, "forward", counted):
        (draft,) = step(drafter, [DraftContext("s", text, 4, GREEDY, 0, StreamKind.DRAFT)], 3)
        assert fed == [4, 1, 1]
        text += [*draft.tokens, 4]  # all accepted: the last draft token and the bonus are new to it
        drafter.commit([Commit("s", 4, tuple(text[4:]), (0, 1, 2), 7)])
        fed.clear()
        (draft,) = step(drafter, [DraftContext("s", text, 4, GREEDY, 0, StreamKind.DRAFT)], 2)
        assert fed == [2, 1]
        text.append((draft.tokens[0] + 1) % V)  # rejected at once
        drafter.commit([Commit("s", 8, tuple(text[8:]), (), 8)])
        fed.clear()
        step(drafter, [DraftContext("s", text, 4, GREEDY, 0, StreamKind.DRAFT)], 1)
        assert fed == [1]


def test_long_backlogs_are_fed_in_pieces() -> None:
    text = [n % V for n in range(50)]
    context = DraftContext("s", text, 50, DRAWN, 3, StreamKind.DRAFT)
    wanted = fresh(context, 3)
    drafter = ModelDrafter(model())
    sizes: list[int] = []
    forward = drafter.model.forward

    def counted(batch: TokenBatch) -> Tensor:
        sizes.extend(len(part.tokens) for part in batch.slices)
        return forward(batch)

    with patch("cospec.drafters.draft_kv_cache.CATCH_UP_TOKENS", 16), patch.object(drafter.model, "forward", counted):
        (found,) = step(drafter, [context], 3)
    assert same(found, wanted)
    assert max(sizes) <= 16


def test_q_is_what_the_tokens_were_drawn_from() -> None:
    text = [0, 1, 2, 2]
    context = DraftContext("s", text, 2, DRAWN, 77, StreamKind.DRAFT)
    (draft,) = step(ModelDrafter(model()), [context], 4)
    assert draft.q is not None
    for node, token in enumerate(draft.tokens):
        before = list(draft.tokens[:node])
        q = target_probs_of(model().logits([*text, *before])[None], DRAWN, History(text, 2, [before]))[0]
        assert draft.q[node] == pytest.approx(q, abs=1e-14)
        assert token == RandomStreams(77, 4).token(q, 4 + node, StreamKind.DRAFT)


def test_match_draws_with_the_targets_noise_and_reports_no_q() -> None:
    context = DraftContext("s", [0, 1], 2, SamplingParams(), 5, StreamKind.TARGET)
    (draft,) = step(ModelDrafter(model()), [context], 3)
    assert draft.q is None
    text = [0, 1]
    for position in range(2, 5):
        p = target_probs_of(model().logits(text)[None], SamplingParams(), History(text, 2, [[]]))[0]
        text.append(RandomStreams(5, 0).token(p, position, StreamKind.TARGET))
    assert draft.tokens == tuple(text[2:])


def test_it_stays_inside_its_own_context() -> None:
    small = model()
    small.max_len = 6
    drafter = ModelDrafter(small)
    for known, wanted in ((3, 3), (4, 2), (5, 1), (6, 0), (9, 0)):
        context = DraftContext(f"s{known}", [1] * known, 1, GREEDY, 0, StreamKind.DRAFT)
        assert [len(draft) for draft in step(drafter, [context], 3)] == ([wanted] if wanted else [])


def test_a_sequence_without_room_is_left_out_and_draws_nothing() -> None:
    drafter = ModelDrafter(with_pool(ToyModel(V, order=3, seed=4), 4, 4))
    contexts = [DraftContext(id, [0, 1, 2, 3, 4, n, 1], 3, GREEDY, 0, StreamKind.DRAFT) for n, id in enumerate("abc")]
    drafts = step(drafter, contexts, 3)
    assert [draft.id for draft in drafts] == ["a"]
    drafter.free(["a"])
    assert [draft.id for draft in step(drafter, contexts[1:], 3)] == ["b"]
    drafter.model.pages.check_integrity()
