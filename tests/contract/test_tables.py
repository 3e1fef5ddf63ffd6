"""Every entry of every table keeps its protocol: data that says what it needs, and the promises of its methods."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cospec.core.plugin_base import Drafter
from cospec.core.stats import StepStats, StepTimes
from cospec.core.tree import depths
from cospec.core.types import (
    BatchState,
    Commit,
    Draft,
    DraftBudget,
    DraftContext,
    Request,
    RequestState,
    TargetProbs,
)
from cospec.drafters.ngram import NgramDrafter
from cospec.logits_processors.bitmask import unpack
from cospec.models.medusa_heads import MedusaHeads
from cospec.models.toy import ToyModel
from cospec.policies.policy_build_context import PolicyContext
from cospec.registry import (
    ACCEPTANCE_METHODS,
    BLENDS,
    DRAFTERS,
    EXECUTION_MODES,
    LOGITS_PROCESSORS,
    POLICIES,
)
from cospec.rng.random_streams import RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams
from harness.plugin import every
from harness.pools import InlineHost
from harness.toys import toy_engine

V = 5


LEARNING = ("pool",)  # drafters that learn more than the text from commits
REPLAYING = ("synthetic",)  # drafters that have nothing to say until a request comes a second time


WIDTH = 4  # of the states that the toy target is said to have


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> InlineHost:
    """With an output embedding of the target's, and heads for it."""
    random, base = torch.Generator().manual_seed(3), tmp_path_factory.mktemp("host")
    save_file({"lm_head.weight": torch.randn(V, WIDTH, generator=random)}, base / "model.safetensors")
    weight, accuracy = torch.randn(3, WIDTH, WIDTH, generator=random), ((0.6, 0.2), (0.4, 0.2), (0.3, 0.1))
    MedusaHeads(weight, torch.zeros(3, WIDTH), accuracy).save(base / "heads")
    return InlineHost(ToyModel(V, seed=1), lambda name: ToyModel(V, seed=2), base, str(base / "heads"))


def drafter(name: str, host: InlineHost) -> Drafter:
    cls = DRAFTERS.load(name)
    built: Drafter = cls.build(cls.Options(), host)
    return built


def contexts(texts: Sequence[list[int]], params: SamplingParams, stream_kind: StreamKind) -> list[DraftContext]:
    return [DraftContext(f"s{n}", text, 2, params, n, stream_kind) for n, text in enumerate(texts)]


TEXTS = [[0, 1, 0, 1, 0, 1], [2, 2], [3, 1, 4, 1, 3, 1, 4, 1, 0], [0]]
KINDS = [
    (SamplingParams(temperature=0), StreamKind.TARGET),
    (SamplingParams(), StreamKind.TARGET),
    (SamplingParams(), StreamKind.DRAFT),
]


@pytest.mark.parametrize("name", every(DRAFTERS))
def test_a_drafter_says_what_it_is(name: str, host: InlineHost) -> None:
    assert DRAFTERS.load(name).__doc__
    made = drafter(name, host)
    assert made.name
    DRAFTERS.declares.check(name, made)  # what instances set, too
    assert made.stepper() is None or made.score_known_tokens([]) == {}
    assert dict(made.weights()).keys() == set(made.member_names or ())


@pytest.mark.parametrize(("params", "stream_kind"), KINDS)
@pytest.mark.parametrize("name", every(DRAFTERS))
def test_a_drafter_keeps_to_its_budget(
    name: str, params: SamplingParams, stream_kind: StreamKind, host: InlineHost
) -> None:
    made, texts = drafter(name, host), [list(text) for text in TEXTS]
    chance = np.random.default_rng(0)
    proposed = 0
    for _ in range(12):
        given = contexts(texts, params, stream_kind)
        before = [list(text) for text in texts]
        budgets = [DraftBudget(int(d), int(m)) for d, m in chance.integers(0, 5, (len(texts), 2))]
        drafts = made.propose(given, budgets)
        assert texts == before, "a drafter wrote committed tokens"
        assert len({draft.id for draft in drafts}) == len(drafts)
        commits = {
            f"s{n}": Commit(f"s{n}", len(text), (int(chance.integers(V)),), (), len(text))
            for n, text in enumerate(texts)
        }
        for draft in drafts:
            number = int(draft.id[1:])
            check_draft(made, draft, texts[number], budgets[number], stream_kind)
            proposed += len(draft)
            kept = int(chance.integers(len(draft) + 1))
            gained = (*draft.tokens[:kept], int(chance.integers(V)))
            base = len(texts[number])
            commits[draft.id] = Commit(draft.id, base, gained, tuple(range(kept)), base + kept, len(draft))
        if made.reads_hidden_states:
            commits = {id: each._replace(hidden_state=torch.full((WIDTH,), 0.1)) for id, each in commits.items()}
        for commit in commits.values():
            texts[int(commit.id[1:])].extend(commit.tokens)
        made.commit(list(commits.values()))
    judged = made.stream_kinds is None or stream_kind in made.stream_kinds  # some rules may not judge what a pool makes
    assert (proposed > 0) is judged or name in REPLAYING


def read_everything(made: Drafter) -> None:
    """As a scrape of the metrics does, and more."""
    for name, value in inspect.getmembers(type(made)):
        if isinstance(value, property):
            getattr(made, name)
    made.weights()


def drafted(made: Drafter, between: Callable[[Drafter], None]) -> list[object]:
    """All drafts of some rounds; ``between`` is called before and after each commit."""
    texts, found, chance = [list(text) for text in TEXTS], list[object](), np.random.default_rng(1)
    for _ in range(8):
        found += comparable(made.propose(contexts(texts, *KINDS[0]), [DraftBudget(3, 4)] * len(texts)))
        between(made)
        gained = [(int(token),) for token in chance.integers(V, size=len(texts))]
        commits = [Commit(f"s{n}", len(texts[n]), own, (), len(texts[n])) for n, own in enumerate(gained)]
        for text, commit in zip(texts, commits, strict=True):
            text.extend(commit.tokens)
        made.commit([each._replace(hidden_state=torch.full((WIDTH,), 0.1)) for each in commits])
        between(made)
    return found


@pytest.mark.parametrize("name", every(DRAFTERS))
def test_reading_a_drafter_changes_none_of_its_drafts(name: str, host: InlineHost) -> None:
    read, unread = drafter(name, host), drafter(name, host)
    assert drafted(read, read_everything) == drafted(unread, lambda made: None)


def test_a_getter_that_learns_is_found() -> None:
    class Counts(NgramDrafter):
        @property
        def reads(self) -> str:
            self.name += "+"
            return self.name

    assert drafted(Counts(), read_everything) != drafted(Counts(), lambda made: None)


def check_draft(made: Drafter, draft: Draft, text: list[int], budget: DraftBudget, stream_kind: StreamKind) -> None:
    n = len(draft)
    assert draft.base_len == len(text)
    assert 1 <= n <= budget.max_nodes
    assert max(depths(draft.parents)) <= budget.depth
    assert len(draft.parents) == len(draft.drafters) == n
    assert all(-1 <= parent < node for node, parent in enumerate(draft.parents))
    assert all(0 <= token < V for token in draft.tokens)
    if draft.confidence is not None:
        assert draft.confidence.shape == (n,)
        assert ((draft.confidence > 0) & (draft.confidence <= 1)).all()
    if draft.q is not None:
        assert made.samples
        assert stream_kind is StreamKind.DRAFT, "a draft drawn with the target's noise has no usable q"
        assert draft.q.shape == (n, V)
        assert draft.q.dtype == np.float64
        assert draft.q.sum(-1) == pytest.approx(np.ones(n))
        assert all(draft.q[node, token] > 0 for node, token in enumerate(draft.tokens))


@pytest.mark.parametrize("name", every(DRAFTERS))
def test_unknown_sequences_harm_no_drafter(name: str, host: InlineHost) -> None:
    made = drafter(name, host)
    made.free(["unknown"])
    made.commit([Commit("unknown", 4, (1, 2), (0,), 5)])
    assert made.propose([], []) == []
    made.propose(contexts(TEXTS, *KINDS[0]), [DraftBudget(2, 2)] * len(TEXTS))
    made.free(["s0", "unknown", "s0", "s1", "s2", "s3"])
    made.commit([Commit("s0", 6, (1,), (), 6)])
    again = made.propose(contexts(TEXTS, *KINDS[0]), [DraftBudget(2, 2)] * len(TEXTS))
    assert comparable(again) == comparable(
        drafter(name, host).propose(contexts(TEXTS, *KINDS[0]), [DraftBudget(2, 2)] * len(TEXTS))
    )


@pytest.mark.parametrize("name", every(DRAFTERS))
def test_a_stale_commit_or_an_ignored_draft_harms_no_drafter(name: str, host: InlineHost) -> None:
    """A draft that was never verified, and a round that the drafter was not asked in."""
    made, text = drafter(name, host), [0, 1, 2, 0, 1, 2, 0, 1]
    given = DraftContext("s", text, 2, *(KINDS[0][0], 0, KINDS[0][1]))
    made.propose([given], [DraftBudget(3, 3)])
    text.append(4)
    made.commit([Commit("s", 8, (4,), (), 8)])
    text += [0, 1]
    made.commit([Commit("s", 9, (0, 1), (), 10)])
    again, fresh = (each.propose([given], [DraftBudget(3, 3)]) for each in (made, drafter(name, host)))
    compared = opening if name in LEARNING else comparable
    assert compared(again) == compared(fresh)


def opening(drafts: Sequence[Draft]) -> list[object]:
    """What must be equal where commits decide which pool member a drafter follows next."""
    return [(draft.id, draft.base_len, draft.tokens[0]) for draft in drafts]


def comparable(drafts: Sequence[Draft]) -> list[object]:
    """The comparable fields of drafts."""
    return [(draft.id, draft.base_len, draft.tokens, draft.parents, draft.drafters) for draft in drafts]


@pytest.mark.parametrize("name", every(ACCEPTANCE_METHODS))
def test_a_rule_says_what_it_is(name: str) -> None:
    acceptance_method = ACCEPTANCE_METHODS.load(name)
    assert acceptance_method.stream_kind in (StreamKind.TARGET, StreamKind.DRAFT)
    assert acceptance_method.__doc__


@pytest.mark.parametrize("name", every(ACCEPTANCE_METHODS))
def test_a_verdict_is_a_path_from_the_root(name: str) -> None:
    acceptance_method, chance = ACCEPTANCE_METHODS.load(name)(), np.random.default_rng(5)
    for seed in range(300):
        n = int(chance.integers(1, 6))
        parents = tuple(int(chance.integers(-1, node)) if acceptance_method.trees else node - 1 for node in range(n))
        probs, q = chance.dirichlet(np.ones(V) * 0.3, n + 1), chance.dirichlet(np.ones(V) * 0.3, n)
        tokens = tuple(int(chance.choice(V, p=row)) for row in q)
        sampled = not acceptance_method.trees and seed % 2 == 0
        draft = Draft("s", 4, tokens, parents, ("d",) * n, q if sampled else None)
        result = acceptance_method.verify(draft, TargetProbs(probs=probs), RandomStreams(seed, 4))
        assert all(parents[node] == above for above, node in zip((-1, *result.path), result.path, strict=False))
        end = result.path[-1] if result.path else -1
        assert result.bonus == (end not in parents)
        assert result.token is not None and 0 <= result.token < V
        if acceptance_method.exact:
            rows = [0, *(node + 1 for node in result.path)]
            written = [*(tokens[node] for node in result.path), result.token]
            assert all(probs[row, token] > 0 for row, token in zip(rows, written, strict=True))


@pytest.mark.parametrize("name", every(BLENDS))
def test_a_blend_is_pure(name: str) -> None:
    cls = BLENDS.load(name)
    blend = cls.build(cls.Options(), 2)
    assert isinstance(blend.name, str)
    assert set(blend.members) <= {0, 1}
    logits = [torch.randn(3, V) for _ in blend.members]
    before = [each.clone() for each in logits]
    assert blend.combine(logits).shape == (3, V)
    assert all(torch.equal(one, other) for one, other in zip(logits, before, strict=True))


@pytest.mark.parametrize("name", every(POLICIES))
def test_a_policy_plans_for_everybody(name: str) -> None:
    cls = POLICIES.load(name)
    policy = cls.build(cls.Options(), PolicyContext(4))
    sequences = [RequestState(Request(f"s{n}", (1, 2), SamplingParams(), 0), [1, 2, 3]) for n in range(5)]
    for count in (0, 1, 5):
        budgets = policy.plan(BatchState(sequences[:count]))
        assert len(budgets) == count
        assert isinstance(policy.horizon, int) and policy.horizon >= 1
        for budget in budgets:
            assert 0 <= budget.depth <= budget.max_nodes or budget.depth == 0
            assert all(width >= 1 for width in budget.widths)
        stats = StepStats(0, count, count, 0, 0, 0, 0, count, StepTimes(), 0.1)
        policy.observe(stats, [Commit(one.id, 3, (1,), (), 3) for one in sequences[:count]])


@pytest.mark.parametrize("name", EXECUTION_MODES)
def test_an_execution_mode_gives_a_reason(name: str) -> None:
    components = toy_engine(ToyModel(V), None).execution_mode.components
    made = EXECUTION_MODES.load(name)(components)
    assert made.info.name in EXECUTION_MODES and made.info.reason


@pytest.mark.parametrize("name", every(LOGITS_PROCESSORS))
def test_a_logits_processor_shares_states_between_branches(name: str) -> None:
    cls = LOGITS_PROCESSORS.load(name)
    assert cls.__doc__
    params = SamplingParams(
        presence_penalty=1.0,
        logit_bias={1: 1.0},
        min_tokens=2,
        stop_token_ids=(0,),
        allowed_token_ids=(0, 1, 2),
        bad_words_token_ids=((1, 2), (3,)),
    )
    made = cls.build(cls.Options(), params)
    rows = torch.randn(2, V, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def seen(state: Any) -> list[Any]:
        mask = made.mask(state, V)
        return [made.edit(rows.clone(), [state, state]).tolist(), None if mask is None else unpack(mask, V).tolist()]

    root = made.start([0, 1, 2, 1])
    before = seen(root)
    first, second = made.advance(root, 1), made.advance(root, 2)
    left, right = seen(first), seen(second)
    made.advance(made.advance(first, 2), 1)
    assert [seen(root), seen(first), seen(second)] == [before, left, right]
    assert seen(made.advance(made.start([0, 1, 2, 1]), 1)) == left
    changes = [each[0] != rows.tolist() for each in (before, left, right)]
    assert not any(changes) if made.masks else any(changes)
    assert made.masks or [each[1] for each in (before, left, right)] == [None] * 3
