"""Drafts over the protocol of nodes leave the output distribution unchanged, whatever the network does to messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.strategies import lists, sampled_from

from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.model import ModelDrafter
from cospec.models.toy import ToyModel
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import total_variation
from harness.node_network import FAULTS, Network, carry, drafts_of, every_fault, settle
from harness.reference import joint_distribution_of
from harness.toys import ScriptedDrafter, enumerated_distribution, make_request, run_all, tokens_of, toy_engine, unmixed

V, EXACT, SEEN = 3, 1e-12, 1e-3
PROMPT, PARAMS = (0, 1, 0), SamplingParams(max_tokens=8)
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, seed=5)
Fault = Callable[[DraftContext, Network], None]


class Remote(Drafter):
    """A drafter at the other end of the protocol. Each request is a question, whose messages ``fault`` carries."""

    name, samples, drafts_ahead, reads_hidden_states, learns = "remote", True, False, False, False

    def __init__(self, drafter: Drafter, fault: Fault) -> None:
        self.network, self.fault, self.drafts = Network(drafter, V, samples=True), fault, 0

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        found: list[Draft] = []
        for context, budget in zip(contexts, budgets, strict=True):
            self.network.now += 1.0
            question = self.network.ask([context], budget.depth)
            self.fault(context, self.network)
            found += drafts_of(question)
        self.drafts += len(found)
        assert not self.network.link.quarantine
        return found

    def commit(self, commits: Sequence[Commit]) -> None:
        self._send(self.network.link.commit(commits))

    def free(self, ids: Sequence[str]) -> None:
        self._send(self.network.link.free(ids))

    def _send(self, frame: bytes | None) -> None:
        if frame is not None:
            self.network.to_node.append(frame)


def drafter(top_k: int | None = None) -> ModelDrafter:
    return ModelDrafter(ToyModel(V, order=1, seed=5, sharpness=1.5), top_k=top_k)


def error(remote: Drafter, method: str, length: int = 3, at_once: int = 16) -> float:
    """The distance of the engine's distribution of the first tokens from the target's."""
    target = ToyModel(V, order=2, seed=1)
    with patch("cospec.cluster.nodes.request_copies.derive_seed", unmixed):
        engine = toy_engine(target, remote, method, 2)
        found = enumerated_distribution(engine, PROMPT, PARAMS, length, at_once=at_once)
    return total_variation(found, joint_distribution_of(target, PARAMS, PROMPT, length))


@pytest.mark.parametrize(
    ("method", "fault"),
    [("match", every_fault), ("rejection", every_fault), ("block", every_fault), ("block", settle)],
)
def test_the_distribution_is_the_targets(method: str, fault: Fault) -> None:
    remote = Remote(ScriptedDrafter([0, 1]) if method == "match" else drafter(), fault)
    assert error(remote, method) < EXACT
    assert remote.drafts > 0
    if fault is every_fault:
        assert remote.network.link.counts.resyncs > 0 and remote.network.link.counts.ignored > 0


@pytest.mark.parametrize("method", ["rejection", "block"])
@settings(max_examples=15, deadline=None)
@given(faults=lists(sampled_from(FAULTS), min_size=2, max_size=11))
def test_any_order_of_faults_leaves_the_distribution(method: str, faults: list[str]) -> None:
    """The fault depends on the known tokens. One request runs at a time, and leaves no message to the next."""

    def fault(context: DraftContext, network: Network) -> None:
        if len(context.tokens) == len(PROMPT) + 1:
            question = network.to_node.pop()
            network.settle()
            network.to_node.append(question)
        carry(faults[(len(context.tokens) + 2 * sum(context.tokens)) % len(faults)], network)

    assert error(Remote(drafter(), fault), method, 2, at_once=1) < EXACT


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_drafter_may_cut_its_distribution_before_it_draws(method: str) -> None:
    remote = Remote(drafter(top_k=2), settle)
    assert error(remote, method) < EXACT
    assert remote.drafts > 0


@pytest.mark.parametrize("method", ["rejection", "block"])
def test_a_distribution_that_is_cut_after_the_draw_is_seen(method: str) -> None:
    """The control: tokens are drawn from all of q, and half of the other entries are sent as 0."""

    def cut(draft: Draft) -> Draft:
        assert draft.q is not None
        rows = []
        for token, row in zip(draft.tokens, draft.q, strict=True):
            kept = np.where((np.arange(V) == token) | (row == row.max()), row, 0.0)
            rows.append(kept / kept.sum())
        return Draft(draft.id, draft.base_len, draft.tokens, draft.parents, draft.drafters, np.array(rows))

    class Cutting(ModelDrafter):
        def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
            return [cut(draft) for draft in super().propose(contexts, budgets)]

    assert error(Remote(Cutting(ToyModel(V, order=1, seed=5, sharpness=1.5)), settle), method, 2) > SEEN


def selecting(fault: Fault) -> Remote:
    """A drafter whose answers are late where their first token is 0."""

    class Selecting(Remote):
        def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
            return [draft for draft in super().propose(contexts, budgets) if draft.tokens[0] != 0]

    return Selecting(drafter(), fault)


def test_time_must_not_select_among_drawn_tokens() -> None:
    """So the verifier sets no quantile as deadline for drafts with distributions."""
    assert error(selecting(settle), "rejection", 2) > SEEN


@pytest.mark.parametrize("fault", [settle, every_fault])
def test_match_writes_the_same_whatever_comes_late(fault: Fault) -> None:
    target, requests = ToyModel(V, order=2, seed=1), [make_request(f"r{n}", PROMPT, SEEDED) for n in range(8)]
    remote = selecting(fault)
    wanted = tokens_of(run_all(toy_engine(target, None), requests))
    assert tokens_of(run_all(toy_engine(target, remote, "match", 2), requests)) == wanted
    assert remote.drafts > 0


def test_distributions_wait_for_the_longest_time() -> None:
    network = Network(drafter(), V, samples=True)
    for number in range(20):
        network.ask([DraftContext("a", [1] * (number + 1), 1, PARAMS, 7, StreamKind.TARGET)])
        network.now += 0.01
        network.settle()
    for kind, quick in ((StreamKind.TARGET, True), (StreamKind.DRAFT, False)):
        question = network.ask([DraftContext("a", [1] * 21, 1, PARAMS, 7, kind)])
        assert (question.due - question.sent < 1.0) is quick
        network.settle()
