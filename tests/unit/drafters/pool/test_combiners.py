"""What each combiner makes of given drafts and guesses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import pytest
import torch

from cospec.core.sampling import History
from cospec.core.tree import path_to
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.calibration import cells
from cospec.drafters.model import ModelDrafter
from cospec.drafters.pool.candidates import distributions, draw
from cospec.drafters.pool.combiners.combiner import (
    Candidate,
    CombineTask,
    DraftCandidates,
    StepCandidates,
)
from cospec.drafters.pool.combiners.fuse import FusedTree
from cospec.drafters.pool.lockstep import LockstepPath
from cospec.drafters.pool.lockstep_session import LockstepSession
from cospec.drafters.pool.routing.routing import Feedback
from cospec.drafters.pool.tree_builder import TreeBuilder
from cospec.models.toy import ToyModel
from cospec.registry import COMBINERS
from cospec.rng.random_streams import RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams
from harness.pools import Ticks, pool_of, toy_drafters
from harness.target_probs import target_probs_of

GREEDY = SamplingParams(temperature=0)
NAMES = ("a", "b", "c")


def chain(*tokens: int, confidence: list[float] | None = None) -> Draft:
    n = len(tokens)
    held = None if confidence is None else np.array(confidence)
    return Draft("s", 4, tokens, tuple(range(-1, n - 1)), ("x",) * n, confidence=held)


def uncalibrated(member: int, raw: float, rank: int = 0) -> float:
    return raw


def job(drafts: Mapping[int, Draft], weights: list[float], budget: DraftBudget | None = None) -> CombineTask:
    context = DraftContext("s", [0, 1, 2, 3], 2, GREEDY, 0, StreamKind.TARGET)
    return CombineTask(context, budget or DraftBudget(3, 8), weights, (), uncalibrated, dict(drafts))


def combined(name: str, made: CombineTask) -> Draft | None:
    session = LockstepSession({}, (), 10, Ticks(), cells(2, 2, 3), draw, native=False)
    drafts = COMBINERS.load(name)().combine([made], session, NAMES)
    return drafts[0] if drafts else None


def paths(draft: Draft) -> set[tuple[int, ...]]:
    return {tuple(draft.tokens[above] for above in path_to(draft.parents, node)) for node in range(len(draft))}


def test_union_merges_what_is_equal_and_keeps_every_path() -> None:
    draft = combined("union", job({0: chain(5, 6, 7), 1: chain(5, 8), 2: chain(9)}, [0.5, 0.3, 0.2]))
    assert draft is not None
    assert paths(draft) == {(5,), (5, 6), (5, 6, 7), (5, 8), (9,)}
    assert draft.drafters[draft.tokens.index(5)] == "a"
    assert draft.drafters[draft.tokens.index(8)] == "b"


def test_union_cuts_by_weight_times_confidence() -> None:
    sure, unsure = chain(5, 6, confidence=[0.9, 0.9]), chain(7, 8, confidence=[0.2, 0.9])
    made = job({0: sure, 1: unsure}, [0.5, 0.5], DraftBudget(2, 2))
    draft = combined("union", made)
    assert draft is not None
    assert draft.tokens == (5, 6)
    heavy = combined("union", job({0: sure, 1: unsure}, [0.05, 0.95], DraftBudget(2, 2)))
    assert heavy is not None
    assert heavy.tokens == (7, 8)


def test_vote_follows_figure_5_of_the_paper() -> None:
    """Two of three say the first word, so their lighter sum wins; among them the heavier one's second word."""
    drafts = {0: chain(1, 2), 1: chain(1, 3), 2: chain(4, 5)}
    draft = combined("vote", job(drafts, [0.35, 0.25, 0.4]))
    assert draft is not None
    assert draft.tokens == (1, 2)
    alone = combined("vote", job(drafts, [0.2, 0.2, 0.6]))
    assert alone is not None
    assert alone.tokens == (4, 5)
    assert alone.is_chain


def test_fuse_extends_the_likeliest_token_and_branches_to_others() -> None:
    drafts = {0: chain(5, 6, confidence=[0.6, 0.5]), 1: chain(7, 8, 9, confidence=[0.8, 0.3, 0.3])}
    draft = combined("fuse", job(drafts, [0.9, 0.1, 0.0]))
    assert draft is not None
    assert paths(draft) == {(7,), (7, 8), (7, 8, 9), (5,), (5, 6)}
    assert draft.confidence is not None
    leaf = draft.tokens.index(5)
    assert draft.confidence[leaf] == pytest.approx(0.2)  # no likelier than that the spine is wrong
    assert draft.drafters[draft.tokens.index(7)] == "b"


def test_fuse_adds_the_second_token_of_the_winning_drafter_only() -> None:
    context = DraftContext("s", [0, 1, 2, 3], 2, GREEDY, 0, StreamKind.TARGET)
    line = LockstepPath(
        CombineTask(context, DraftBudget(1, 8), [0.5, 0.5], (0, 1), lambda member, raw, rank=0: raw / (1 + rank))
    )
    line.add_candidate(0, Candidate(5, 0.6, second=(6, 0.3)))
    line.add_candidate(1, Candidate(7, 0.5, second=(8, 0.4)))
    fusion = FusedTree(line)
    fusion.advance()
    draft = fusion.finish(NAMES)
    assert draft is not None and draft.confidence is not None
    assert dict(zip(draft.tokens, draft.drafters, strict=True)) == {5: "a", 7: "b", 6: "a"}
    assert draft.confidence.tolist() == pytest.approx([0.6, 0.4, 0.15])  # each next best one has its own calibration
    assert line.tokens == [5]


def test_fuse_keeps_to_its_nodes_by_path_probability() -> None:
    drafts = {0: chain(5, 6, 4, confidence=[0.9, 0.9, 0.05]), 1: chain(7, confidence=[0.5])}
    for nodes, wanted in ((1, {(5,)}), (2, {(5,), (5, 6)}), (3, {(5,), (5, 6), (7,)})):
        draft = combined("fuse", job(drafts, [0.5, 0.5], DraftBudget(3, nodes)))
        assert draft is not None
        assert paths(draft) == wanted


def test_a_threshold_ends_a_spine() -> None:
    drafts = {0: chain(5, 6, 7, confidence=[0.9, 0.5, 0.9])}
    draft = combined("fuse", job(drafts, [1.0], DraftBudget(3, 8, threshold=0.5)))
    assert draft is not None
    assert draft.tokens == (5,)


def test_mix_takes_the_token_with_most_weight() -> None:
    draft = combined("mix", job({0: chain(5, 6), 1: chain(7), 2: chain(7, 8)}, [0.4, 0.3, 0.3]))
    assert draft is not None
    assert draft.tokens == (7, 8)
    assert draft.q is None
    assert draft.is_chain


def test_a_missing_candidate_ends_the_comparison_of_a_drafter() -> None:
    context = DraftContext("s", [0, 1, 2, 3], 2, GREEDY, 0, StreamKind.TARGET)
    line = LockstepPath(CombineTask(context, DraftBudget(4, 4), [1.0], (0,), uncalibrated))
    line.add_candidate(0, Candidate(5, 0.5))
    line.advance(5, 0.5)
    line.advance(6, 0.5)
    line.add_candidate(0, Candidate(7, 0.5))
    assert [each.candidate.token for each in line.candidates] == [7], "the candidate counts nevertheless"
    assert line.task.candidate_sets[0].verify([5, 6, 7]) == Feedback(1.0, 1, 1, [(0.5, 1.0)])


def test_a_vote_ends_where_the_last_voter_does() -> None:
    draft = combined("vote", job({0: chain(1, 2), 1: chain(1, 2, 3), 2: chain(1)}, [0.5, 0.3, 0.2]))
    assert draft is not None
    assert draft.tokens == (1, 2, 3)
    assert draft.drafters == ("a", "a", "b")
    short = combined("vote", job({0: chain(1, 2, 3, confidence=[0.9, 0.8, 0.7])}, [1.0], DraftBudget(2, 2)))
    assert short is not None and short.confidence is not None
    assert short.tokens == (1, 2)
    assert short.confidence.tolist() == [0.9, 0.8]


def test_no_draft_without_candidates() -> None:
    for name in COMBINERS:
        assert combined(name, job({}, [1.0])) is None


def test_a_mixture_is_what_its_tokens_were_drawn_from() -> None:
    """Against the drafters' own distributions, mixed by hand with the weights that the pool had."""
    pool = pool_of(toy_drafters(3), "mix", "all")
    params, tokens = SamplingParams(temperature=0.7, top_p=0.9), [0, 1, 0, 1, 0]
    context = DraftContext("s", tokens, 2, params, 9, StreamKind.DRAFT)
    (draft,) = pool.propose([context], [DraftBudget(2, 2)])
    assert draft.q is not None
    assert draft.tokens[0] == RandomStreams(9, 5).token(draft.q[0], 5, StreamKind.DRAFT)
    models = [cast(Any, pool.members[n].drafter).model for n in (0, 1)]
    rows = [target_probs_of(model.logits(tokens)[None], params, History(tokens, 2, [[]]))[0] for model in models]
    copied = np.eye(3)[1]  # what followed 0 1 0 before
    shares = np.array([rows[0].max(), rows[1].max(), 0.5])  # equal weights, and unchecked confidences
    wanted = shares @ np.stack([*rows, copied]) / shares.sum()
    assert draft.q[0] == pytest.approx(wanted)


def test_a_drafter_says_what_it_would_draw_itself() -> None:
    """The distribution of a greedy request is a point mass; the draw is known, so the score is known."""
    logits, params = torch.tensor([[0.1, 0.3, 0.2]]), SamplingParams(temperature=0.7)
    wanted = target_probs_of(logits.double(), params, History([0], 1, [[]]))[0]
    for stream_kind, token in (
        (StreamKind.TARGET, RandomStreams(9, 1).token(wanted, 1, StreamKind.TARGET)),
        (StreamKind.DRAFT, -1),
    ):
        (guess,) = distributions(logits, [DraftContext("s", [0], 1, params, 9, stream_kind)], [[]])
        assert guess is not None and guess.q is not None
        assert (guess.token, guess.confidence) == (token, guess.q.max())
        assert guess.q == pytest.approx(wanted)
        hits = StepCandidates((), [guess]).verify([2]).hits
        assert hits == (float(guess.q[2]) if token < 0 else float(token == 2))
    greedy = DraftContext("s", [0], 1, SamplingParams(temperature=0), 9, StreamKind.TARGET)
    (guess,) = distributions(logits, [greedy], [[]])
    assert guess is not None and guess.q is None
    assert (guess.token, guess.chance(1), guess.chance(2)) == (1, 1.0, 0.0)


def test_a_greedy_mixture_is_a_vote() -> None:
    """Two drafters that agree outweigh a heavier one; a mixture of softmaxes would go by what all find possible."""
    pool = pool_of({name: ModelDrafter(ToyModel(3, order=1, seed=1)) for name in "abc"}, "mix", "all")
    rows = {"a": [2.0, 1.9, 0.0], "b": [0.0, 1.9, 2.0], "c": [0.0, 1.9, 2.0]}
    for member in pool.members:
        model, row = cast(Any, member.drafter).model, rows[member.name]
        model.forward = lambda batch, row=row: torch.tensor([row] * len(batch.slices), dtype=torch.float64)
    context = DraftContext("s", [0, 1], 1, SamplingParams(temperature=0), 9, StreamKind.TARGET)
    (draft,) = pool.propose([context], [DraftBudget(2, 2)])
    assert draft.tokens == (2, 2)
    assert draft.drafters == ("b", "b")


def test_a_growing_tree_never_keeps_a_node_without_its_parent() -> None:
    tree = TreeBuilder()
    first = tree.put(-1, 1, 0, 0.1, 0.1)
    second = tree.put(first, 2, 0, 0.9, 0.9)  # a score above its parent's, as rounding may make it
    third = tree.put(-1, 3, 1, 0.5, 0.5)
    assert tree.best(1) == [2]
    assert tree.best(2) == [0, 2]
    assert second == 1
    assert tree.put(first, 2, 1, 0.3, 0.3) == second, "equal tokens after the same parent are one node"
    assert [tree.outranked(node) for node in (first, second, third)] == [2, 0, 1]


def test_slates_tell_what_each_drafter_got_right() -> None:
    whole = DraftCandidates(chain(5, 6, 7, confidence=[0.9, 0.8, 0.7]))
    assert whole.verify([5, 6, 1]) == Feedback(2, 3, 3, [(0.9, 1.0), (0.8, 1.0), (0.7, 0.0)])
    assert whole.verify([1]) == Feedback(0, 1, 3, [(0.9, 0.0)])
    q = np.array([0.1, 0.2, 0.7])
    drawn = StepCandidates([2, 0], [Candidate(1, 0.6), Candidate(2, 0.7, q)])
    assert drawn.verify([2, 1]) == Feedback(0.0, 2, 2, [(0.6, 0.0), (0.7, 0.0)]), "its own token was another one"
    led = StepCandidates([2, 0], [Candidate(1, 0.6), Candidate(-1, 0.7, q)])
    assert led.verify([2, 1]) == Feedback(0.2, 2, 2, [(0.6, 0.0), (0.7, 0.2)])
    assert led.verify([0, 1]) == Feedback(0.0, 1, 2, [(0.6, 0.0)])
