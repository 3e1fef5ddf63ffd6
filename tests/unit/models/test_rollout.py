"""A model's own loop of choosing and feeding gives what stepping gives, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cospec.core.interfaces import Model
from cospec.core.model_io import RolloutOutput, RolloutParams, SequenceSlice, TokenBatch
from cospec.core.sampling import softmax
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.model import ModelDrafter
from cospec.models.loading import LoadOptions, load_model
from cospec.native import library
from cospec.rng.random_streams import RandomStreams, StreamKind, exponential_sample
from cospec.sampling_params import SamplingParams
from harness.methods import override

pytestmark = pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    path = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def model(folder: Path) -> Model:
    return load_model(str(folder), LoadOptions(cache_bytes=1 << 20))


def drafter_of(folder: Path, rolls: bool) -> ModelDrafter:
    return ModelDrafter(model(folder), native=rolls)


def contexts(stream_kind: StreamKind, *temperatures: float) -> list[DraftContext]:
    return [
        DraftContext(
            f"s{i}",
            [(i * 7 + j * j) % 300 for j in range(5 + 9 * i)],
            5,
            SamplingParams(temperature=t),
            40 + i,
            stream_kind,
        )
        for i, t in enumerate(temperatures)
    ]


def same(first: list[Draft], second: list[Draft]) -> bool:
    def plain(draft: Draft) -> tuple[object, ...]:
        sure = None if draft.confidence is None else draft.confidence.tobytes()
        return draft.id, draft.tokens, None if draft.q is None else draft.q.tobytes(), sure, draft.hits

    return [plain(draft) for draft in first] == [plain(draft) for draft in second]


@pytest.mark.parametrize("stream_kind", [StreamKind.TARGET, StreamKind.DRAFT])
@pytest.mark.parametrize("temperatures", [(0.0,), (0.7,), (0.0, 0.8, 1.3), (1.0, 0.0)])
@pytest.mark.parametrize(("depth", "confident"), [(1, False), (4, False), (4, True), (17, True)])
def test_a_rollout_is_stepping_in_one_call(
    folder: Path, stream_kind: StreamKind, temperatures: tuple[float, ...], depth: int, confident: bool
) -> None:
    drafters = [drafter_of(folder, rolls) for rolls in (True, False)]
    asked = contexts(stream_kind, *temperatures)
    budgets = [DraftBudget(depth=depth, max_nodes=depth, confident=confident)] * len(asked)
    rolled, stepped = (drafter.propose(asked, budgets) for drafter in drafters)
    assert same(rolled, stepped) and [len(draft) for draft in rolled] == [depth] * len(asked)
    for kept in (2, 0, depth):  # what is accepted decides what the cache holds when the next draft begins
        commits = []
        for context, draft in zip(asked, rolled, strict=True):
            new = (*draft.tokens[:kept], 11)
            commits.append(Commit(context.id, len(context.tokens), new, tuple(range(len(new) - 1)), 0))
            cast(list[int], context.tokens).extend(new)
        if max(len(context.tokens) for context in asked) + depth > 64:
            return
        for drafter in drafters:
            drafter.commit(commits)
        rolled, stepped = (drafter.propose(asked, budgets) for drafter in drafters)
        assert same(rolled, stepped)


def test_a_rollout_counts_the_hits_of_missed_steps(folder: Path) -> None:
    """Some sequences missed none; what the rollout drafts is the same without the count."""
    rolling, stepping, uncounted = drafter_of(folder, True), drafter_of(folder, False), drafter_of(folder, True)
    drafters = (rolling, stepping, uncounted)
    asked = [replace(context, prompt_len=2) for context in contexts(StreamKind.DRAFT, 0.0, 0.8, 0.0)]
    budgets = [DraftBudget(4, 4, count_hits=True)] * 3
    first = [drafter.propose(asked, budgets) for drafter in drafters]
    assert same(first[0], first[1]) and [draft.hits[1] for draft in first[0]] == [3, 12, 21]
    guessed = [best_after(folder, context.tokens, 6) for context in asked]
    for context, guess, count in zip(asked, guessed, (1, 6, 6), strict=True):
        base, new = len(context.tokens), (7, *guess[1:count])
        cast(list[int], context.tokens).extend(new)
        for drafter in drafters:
            drafter.commit([Commit(context.id, base, new, (), base)])
    rolled, stepped = (drafter.propose(asked, budgets) for drafter in (rolling, stepping))
    plain = uncounted.propose(asked, [DraftBudget(4, 4)] * 3)
    assert same(rolled, stepped) and [draft.hits for draft in rolled] == [(0, 0), (5, 5), (5, 5)]
    assert same([replace(draft, hits=(0, 0)) for draft in rolled], plain)


def best_after(folder: Path, tokens: Sequence[int], count: int) -> list[int]:
    """Tokens after 7, as the model itself continues."""
    made = ModelDrafter(model(folder))
    asked = DraftContext("g", [*tokens, 7], 2, SamplingParams(temperature=0), 0, StreamKind.TARGET)
    return [7, *made.propose([asked], [DraftBudget(count - 1, count - 1)])[0].tokens]


@pytest.mark.parametrize("stream_kind", [StreamKind.TARGET, StreamKind.DRAFT])
@pytest.mark.parametrize("depths", [(1, 4, 2), (5, 5, 1), (3, 1, 6)])
def test_chains_of_different_lengths_roll_together(
    folder: Path, stream_kind: StreamKind, depths: tuple[int, ...]
) -> None:
    made = model(folder)
    calls: list[int] = []
    original = made.rollout

    def counted(batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        calls.append(len(params))
        return original(batch, params)

    override(made, rollout=counted)
    asked = contexts(stream_kind, 0.0, 0.8, 1.3)
    budgets = [DraftBudget(depth=depth, max_nodes=depth, confident=True) for depth in depths]
    rolled, stepped = (
        sorted(each.propose(asked, budgets), key=lambda draft: draft.id)
        for each in (ModelDrafter(made), drafter_of(folder, False))
    )
    assert calls == [3]
    assert same(rolled, stepped) and [len(draft) for draft in rolled] == list(depths)


def test_confidences_are_largest_probabilities_when_asked_for(folder: Path) -> None:
    """Known before a token is drawn; of a greedy request at temperature 1."""
    drafter, asked = drafter_of(folder, True), contexts(StreamKind.DRAFT, 0.0, 0.8)
    greedy, drawn = drafter.propose(asked, [DraftBudget(3, 3, confident=True)] * 2)
    assert drawn.q is not None and drawn.confidence is not None
    assert drawn.confidence.tolist() == drawn.q.max(-1).tolist()
    (whole,) = drafter_of(folder, False).propose(
        [replace(asked[0], sampling=SamplingParams(temperature=1.0))], [DraftBudget(1, 1)]
    )
    assert whole.q is not None and greedy.confidence is not None
    assert greedy.confidence[0] == whole.q[0].max() > 0
    drafter.free([context.id for context in asked])
    greedy, _ = drafter.propose(asked, [DraftBudget(3, 3)] * 2)
    assert greedy.confidence is None


def test_a_rollout_ends_at_the_context_s_end(folder: Path) -> None:
    drafter = drafter_of(folder, True)
    (context,) = contexts(StreamKind.TARGET, 0.0)
    tokens = list(range(61))
    long = DraftContext(context.id, tokens, 5, context.sampling, context.seed, context.stream_kind)
    (draft,) = drafter.propose([long], [DraftBudget(depth=8, max_nodes=8)])
    assert len(draft) == 3


def test_numbers_that_are_none_end_the_draft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(folder)
    drafter = ModelDrafter(made)
    asked = contexts(StreamKind.DRAFT, 0.0, 0.9)
    budgets = [DraftBudget(depth=3, max_nodes=3)] * 2
    whole = drafter.propose(asked, budgets)
    original = made.rollout

    def odd(*arguments: Any) -> RolloutOutput:
        rolled = original(*arguments)
        rolled.tokens[0][0] = rolled.tokens[1][2] = -1
        return rolled

    monkeypatch.setattr(made, "rollout", odd)
    drafter.free([context.id for context in asked])
    (draft,) = drafter.propose(asked, budgets)
    assert draft.id == "s1" and draft.tokens == whole[1].tokens[:2]
    assert draft.q is not None and len(draft.q) == 2


@pytest.mark.parametrize("depth", [1, 5])
def test_the_logits_of_a_rollout_are_those_of_stepping(folder: Path, depth: int) -> None:
    """Bit for bit, after backlogs of different lengths; a greedy and two drawing sequences."""
    rolls, steps = model(folder), model(folder)
    temperatures, backlogs = (0.0, 0.9, 1.4), (3, 1, 9)
    known = {f"s{n}": tuple((5 * n + 3 * i) % 300 for i in range(4 + count)) for n, count in enumerate(backlogs)}
    for made in (rolls, steps):
        for id, tokens in known.items():
            assert made.pages.open_sequence(id, tokens) == 0 and made.pages.allocate(id, len(tokens) + depth)
            made.forward(TokenBatch((SequenceSlice(id, 0, tokens[:4], (), 4),)))
    slices = [SequenceSlice(id, 4, tokens[4:], (), len(tokens) - 5) for id, tokens in known.items()]
    streams = [RandomStreams(n, 20).stream(len(tokens), StreamKind.DRAFT) for n, tokens in enumerate(known.values())]
    params = [RolloutParams(t, stream, depth, logits=True) for t, stream in zip(temperatures, streams, strict=True)]
    rolled = rolls.rollout(TokenBatch(tuple(slices)), params)
    assert rolled is not None and rolled.logits is not None and rolled.q is not None
    assert rolled.logits.shape == (depth, 3, 300)
    for step in range(depth):
        logits = steps.forward(TokenBatch(tuple(slices)))
        assert torch.equal(rolled.logits[step], logits)
        for n, t in enumerate(temperatures):
            token = int(logits[n].argmax())
            if t:
                q = softmax(logits[n : n + 1], [t])
                assert rolled.q[n, step].tobytes() == q.tobytes()
                position = len(known[f"s{n}"]) + step
                (token,) = exponential_sample(q, [RandomStreams(n, 20).stream(position, StreamKind.DRAFT)])
            assert rolled.tokens[n][step] == token
            slices[n] = SequenceSlice(slices[n].id, slices[n].start + len(slices[n].tokens), (token,))
    plain = rolls.rollout(TokenBatch(tuple(slices)), [RolloutParams(0.0, stream, 1) for stream in streams])
    assert plain is not None and plain.logits is None
