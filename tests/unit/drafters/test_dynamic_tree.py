"""Trees of the model drafter: their shape, what is known of each node beforehand, and the cache after them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from cospec.core.model_io import TokenBatch
from cospec.core.sampling import History
from cospec.core.tree import children, depths, path_to
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.calibration import PRIOR, Calibration
from cospec.drafters.model import ModelDrafter
from cospec.models.input_batch import check
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams
from harness.methods import override
from harness.target_probs import target_probs_of
from harness.toys import with_pool

V = 6
GREEDY = SamplingParams(temperature=0)
DRAWN = SamplingParams(temperature=0.9, repetition_penalty=1.2)
TEXT = [0, 1, 2, 2]
BUDGETS = [
    DraftBudget(3, 8),
    DraftBudget(2, 12, widths=(3, 2)),
    DraftBudget(4, 5),
    DraftBudget(3, 60, widths=(3, 3, 2)),
    DraftBudget(1, 4),
]


def model() -> ToyModel:
    return with_pool(ToyModel(V, order=3, seed=4), 256, 4)


def context(
    text: list[int], params: SamplingParams, stream_kind: StreamKind = StreamKind.DRAFT, id: str = "s"
) -> DraftContext:
    return DraftContext(id, text, 2, params, 77, stream_kind)


def drafted(budget: DraftBudget, params: SamplingParams = GREEDY, stream_kind: StreamKind = StreamKind.DRAFT) -> Draft:
    (draft,) = ModelDrafter(model()).propose([context(TEXT, params, stream_kind)], [budget])
    return draft


def distribution_after(draft: Draft, node: int, params: SamplingParams) -> np.ndarray:
    """The drafter's distribution after a node, without any cache."""
    path = [draft.tokens[above] for above in path_to(draft.parents, node)]
    rows = target_probs_of(model().logits([*TEXT, *path])[None], params, History(TEXT, 2, [path]))
    return np.asarray(rows[0])


def values(draft: Draft) -> list[float]:
    assert draft.confidence is not None
    return [float(np.prod(draft.confidence[path_to(draft.parents, node)])) for node in range(len(draft))]


@pytest.mark.parametrize("stream_kind", [StreamKind.DRAFT, StreamKind.TARGET])
@pytest.mark.parametrize("params", [GREEDY, DRAWN])
@pytest.mark.parametrize("budget", BUDGETS)
def test_a_tree_keeps_to_its_budget(budget: DraftBudget, params: SamplingParams, stream_kind: StreamKind) -> None:
    draft = drafted(budget, params, stream_kind)
    assert 1 <= len(draft) <= budget.max_nodes
    assert max(depths(draft.parents)) <= budget.depth
    assert len(draft) > draft.depth, "it branches"
    for node in range(-1, len(draft)):
        below = children(draft.parents, node)
        assert len({draft.tokens[child] for child in below}) == len(below)
        if budget.widths and below:
            assert len(below) <= budget.widths[depths(draft.parents)[below[0]] - 1]


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
def test_the_whole_level_tree_where_the_budget_allows_it(params: SamplingParams) -> None:
    draft = drafted(DraftBudget(3, 60, widths=(3, 3, 2)), params)
    assert [depths(draft.parents).count(level) for level in (1, 2, 3)] == [3, 9, 18]


def test_a_greedy_tree_holds_the_likeliest_paths() -> None:
    """Of all paths of the widest tree the best are kept, and the main path is the chain."""
    whole, best = drafted(DraftBudget(3, 60, widths=(3, 3, 2))), drafted(DraftBudget(3, 9, widths=(3, 3, 2)))
    assert sorted(values(best), reverse=True) == pytest.approx(sorted(values(whole), reverse=True)[:9])
    one = SamplingParams()  # of the confidences
    for node, (parent, token) in enumerate(zip(best.parents, best.tokens, strict=True)):
        assert best.confidence is not None
        assert best.confidence[node] == pytest.approx(distribution_after(best, parent, one)[token])
    chain = drafted(DraftBudget(3, 3))
    node, main = -1, []
    while below := children(whole.parents, node):
        node = below[0]
        main.append(whole.tokens[node])
    assert tuple(main) == chain.tokens


def test_children_are_drawn_without_replacement_from_what_is_left() -> None:
    draft = drafted(DraftBudget(2, 40, widths=(4, 3)), DRAWN)
    assert draft.q is not None
    for node in range(-1, len(draft)):
        q = distribution_after(draft, node, DRAWN)
        ranked = np.sort(q)[::-1]
        for place, child in enumerate(children(draft.parents, node)):
            assert draft.q[child] == pytest.approx(q / q.sum(), abs=1e-14)
            assert draft.confidence is not None
            assert draft.confidence[child] == pytest.approx(ranked[place])
            assert q[draft.tokens[child]] > 0
            q[draft.tokens[child]] = 0.0


def test_under_match_children_stand_in_the_order_of_the_targets_race() -> None:
    draft = drafted(DraftBudget(2, 12, widths=(3, 3)), DRAWN, StreamKind.TARGET)
    assert draft.q is None
    for node in range(-1, len(draft)):
        weights = distribution_after(draft, node, DRAWN)
        position = len(TEXT) + (depths(draft.parents)[node] if node >= 0 else 0)
        for child in children(draft.parents, node):
            assert draft.tokens[child] == RandomStreams(77, 0).token(weights, position, StreamKind.TARGET)
            weights[draft.tokens[child]] = 0.0


@pytest.mark.parametrize("budget", [DraftBudget(4, 4, threshold=0.2), DraftBudget(4, 20, threshold=0.2)])
def test_drafting_stops_where_path_confidence_is_below_threshold(budget: DraftBudget) -> None:
    draft = drafted(budget)
    whole = drafted(DraftBudget(budget.depth, budget.max_nodes, threshold=1e-9))
    assert min(values(draft)) >= 0.2
    assert len(draft) == sum(value >= 0.2 for value in values(whole)) < len(whole)
    assert ModelDrafter(model()).propose([context(TEXT, GREEDY)], [DraftBudget(4, 4, threshold=1.0)]) == []


@pytest.mark.parametrize("stream_kind", [StreamKind.DRAFT, StreamKind.TARGET])
@pytest.mark.parametrize("params", [GREEDY, DRAWN])
def test_the_cache_catches_up_after_any_path(params: SamplingParams, stream_kind: StreamKind) -> None:
    """Accepted paths of all lengths through all branches, rounds without a draft, and chains in between."""
    chance = np.random.default_rng(3)
    drafter = ModelDrafter(model())
    texts = {id: [n, 1, 2] for n, id in enumerate("abc")}
    for _ in range(25):
        asked = [id for id in texts if chance.random() < 0.8]
        budget = [DraftBudget(3, 9), DraftBudget(3, 9, widths=(2, 2, 1)), DraftBudget(2, 2)][int(chance.integers(3))]
        contexts = [context(texts[id], params, stream_kind, id) for id in asked]
        drafts = {draft.id: draft for draft in drafter.propose(contexts, [budget] * len(contexts))}
        for each in contexts:
            (fresh,) = ModelDrafter(model()).propose([each], [budget])
            assert (drafts[each.id].tokens, drafts[each.id].parents) == (fresh.tokens, fresh.parents)
        commits = []
        for id, text in texts.items():
            draft, path = drafts.get(id), list[int]()
            while draft and chance.random() < 0.8 and (below := children(draft.parents, path[-1] if path else -1)):
                path.append(int(chance.choice(below)))
            gained = (*(draft.tokens[node] for node in path), int(chance.integers(V))) if draft else (1,)
            commits.append(Commit(id, len(text), gained, tuple(path), len(text) + len(path)))
            text.extend(gained)
        drafter.commit(commits)
        drafter.model.pages.check_integrity()
    drafter.free(list(texts))
    assert drafter.model.pages.usage == 0


def test_without_room_for_a_tree_it_leaves_the_sequence_out() -> None:
    drafter = ModelDrafter(with_pool(ToyModel(V, order=3, seed=4), 3, 4))
    contexts = [context([0, 1, 2, 3, n], GREEDY, id=id) for n, id in enumerate("ab")]
    assert [draft.id for draft in drafter.propose(contexts, [DraftBudget(2, 3)] * 2)] == ["a"]
    drafter.model.pages.check_integrity()


def test_calibration_learns_what_a_confidence_is_worth() -> None:
    calibration = Calibration()
    raw = np.array([[0.9, 0.1], [0.5, 0.0]])
    assert calibration(raw) == pytest.approx(raw), "before anything was seen, what the drafter says"
    for _ in range(100):
        calibration.learn([(0.9, float(n < 10)) for n in range(20)])
    found = calibration(raw)
    assert found[0, 0] == pytest.approx(0.5, abs=PRIOR / 1000)
    assert found[0, 1] == pytest.approx(0.1)
    assert calibration(np.array([1.0, 0.0])).max() <= 1.0


def test_an_overconfident_drafter_is_believed_less() -> None:
    """Nodes whose tokens never come to be count against their confidence."""
    calibration = Calibration()
    drafter, text = ModelDrafter(model(), calibration=calibration), list(TEXT)
    (first,) = drafter.propose([context(text, GREEDY)], [DraftBudget(2, 6)])
    for _ in range(60):
        (draft,) = drafter.propose([context(text, GREEDY)], [DraftBudget(2, 6)])
        offered = {draft.tokens[node] for node in children(draft.parents, -1)}
        wrong = next(token for token in range(V) if token not in offered)
        drafter.commit([Commit("s", len(text), (wrong,), (), len(text), len(draft), rejected=True)])
        text.append(wrong)
    raw = np.array([0.1, 0.3, 0.5])
    assert (calibration(raw) < raw).all()
    assert first.confidence is not None


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
@pytest.mark.parametrize("given", [(), (3,), (3, 1, 4)])
def test_a_tree_after_outcomes_continues_each_of_them_as_a_chain_would(
    given: tuple[int, ...], params: SamplingParams
) -> None:
    """Given tokens come first. After each number of these come guesses, and after a guess what a chain would have."""
    drafter, kind = ModelDrafter(model()), StreamKind.TARGET
    known = DraftContext("s", [*TEXT, *given], 2, params, 77, kind, assumed=len(given))
    (draft,) = drafter.propose([known], [DraftBudget(3, 40, widths=(2,), outcomes=True)])
    assert draft.base_len == len(TEXT)
    assert draft.tokens[: len(given)] == given and draft.parents[: len(given)] == tuple(range(-1, len(given) - 1))
    assert len(set(zip(draft.parents, draft.tokens, strict=True))) == len(draft), "siblings differ"
    branches = 0
    for node in range(len(given), len(draft)):
        if draft.parents[node] >= len(given):
            continue
        path = [draft.tokens[above] for above in path_to(draft.parents, node)]
        (chain,) = ModelDrafter(model()).propose([context([*TEXT, *path], params, kind)], [DraftBudget(2, 2)])
        below, tokens = children(draft.parents, node), list[int]()
        while below:
            assert len(below) == 1
            tokens.append(draft.tokens[below[0]])
            below = children(draft.parents, below[0])
        assert tuple(tokens) == chain.tokens[: len(tokens)]
        branches += len(tokens) == 2
    assert branches >= 2 * (1 + len(given)), "two guesses after each number of given tokens, each with two more tokens"


@pytest.mark.parametrize("params", [GREEDY, DRAWN])
def test_given_tokens_are_rated_as_first_children(params: SamplingParams) -> None:
    """A drawn token has the largest probability, whatever the token; guesses after it have the others, in order."""
    given, kind = (3, 1), StreamKind.TARGET
    known = DraftContext("s", [*TEXT, *given], 2, params, 77, kind, assumed=len(given))
    (draft,) = ModelDrafter(model()).propose([known], [DraftBudget(2, 40, widths=(3,), outcomes=True)])
    assert draft.confidence is not None
    whole = replace(params, temperature=1.0) if params.greedy else params
    for place, token in enumerate(given):
        rows = model().logits([*TEXT, *given[:place]])[None]
        row = np.asarray(target_probs_of(rows, whole, History(TEXT, 2, [list(given[:place])]))[0])
        first = token if params.greedy else int(row.argmax())
        assert draft.confidence[place] == pytest.approx(row[first])
        guesses = [node for node in children(draft.parents, place - 1) if node >= len(given)]
        others = np.sort(np.delete(row, first))[::-1]
        assert guesses and list(draft.confidence[guesses]) == pytest.approx(others[: len(guesses)].tolist())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_cache_after_outcomes(count: int) -> None:
    """The next draft is that of a drafter without a history, whichever branch the target took."""
    drafter, given, kind = ModelDrafter(model()), (3, 1, 4), StreamKind.TARGET
    drafter.propose([context(TEXT, GREEDY, kind)], [DraftBudget(3, 3)])
    known = DraftContext("s", [*TEXT, *given], 2, GREEDY, 77, kind, assumed=3)
    (draft,) = drafter.propose([known], [DraftBudget(3, 40, widths=(2,), outcomes=True)])
    last = children(draft.parents, count - 1)[-1]
    path = path_to(draft.parents, last)
    tokens = tuple(draft.tokens[node] for node in path)
    drafter.commit([Commit("s", len(TEXT), tokens, tuple(range(count)), len(TEXT) + count, drafted=3)])
    after = [*TEXT, *tokens]
    found = drafter.propose([context(after, GREEDY, kind)], [DraftBudget(3, 8)])
    (wanted,) = ModelDrafter(model()).propose([context(after, GREEDY, kind)], [DraftBudget(3, 8)])
    assert [each.tokens for each in found] == [wanted.tokens]


@pytest.mark.parametrize("known", range(2045, 2050))
def test_a_long_text_that_is_not_cached_leaves_the_rows_of_given_tokens_for_the_last_piece(known: int) -> None:
    """2048 tokens are fed at once."""
    long = with_pool(ToyModel(V, order=2, seed=1), 1024, 4)
    long.max_len = 4096
    forward, pieces = long.forward, list[int]()

    def checked(batch: TokenBatch) -> Tensor:
        check(batch, V, long.max_len)
        pieces.append(len(batch.slices[0].tokens))
        return forward(batch)

    override(long, forward=checked)
    text = [n % V for n in range(known)]
    asked = DraftContext("s", [*text, 3, 1, 4, 2], 2, GREEDY, 77, StreamKind.TARGET, assumed=4)
    (draft,) = ModelDrafter(long).propose([asked], [DraftBudget(2, 30, widths=(2,), outcomes=True)])
    assert draft.tokens[:4] == (3, 1, 4, 2)
    assert max(pieces) <= 2048 and sum(pieces[:2]) == known + 4
