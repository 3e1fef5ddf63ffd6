"""The protocol of drafter nodes over a network that loses, repeats, delays, reorders and damages messages."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cospec.cluster.nodes import node_session, request_copies, wire
from cospec.cluster.nodes.deadline import WARM_UP
from cospec.cluster.nodes.node_calls import PendingCall
from cospec.cluster.nodes.wire import FrameCodec, NodeHeartbeat, TokensUpdate, ToVerifier
from cospec.core.types import Commit
from harness.node_network import VOCAB, Echo, Network, context, drafts_of, echo

IDS = st.sampled_from(["a", "b", "c"])
PLACE = st.integers(0, 30)


class Protocol(RuleBasedStateMachine):
    """The drafts that the verifier takes continue the tokens that the verifier asked about, whatever is lost."""

    @initialize()
    def start(self) -> None:
        self.network = Network()
        self.tokens: dict[str, list[int]] = {"a": [1], "b": [2], "c": [3]}
        self.asked: list[tuple[PendingCall, dict[str, tuple[int, ...]]]] = []
        self.damaged = 0

    @rule(ids=st.sets(IDS, min_size=1), assumed=st.integers(0, 2), depth=st.integers(1, 4))
    def ask(self, ids: set[str], assumed: int, depth: int) -> None:
        if not self.network.link.usable:
            return
        ahead = [5] * assumed
        contexts = [context(id, [*self.tokens[id], *ahead], assumed) for id in sorted(ids)]
        call = self.network.ask(contexts, depth)
        self.asked.append((call, {each.id: echo(each.tokens, depth) for each in contexts}))

    @rule(id=IDS, count=st.integers(1, 3), token=st.integers(0, VOCAB - 1))
    def commit(self, id: str, count: int, token: int) -> None:
        tokens = tuple((token + step) % VOCAB for step in range(count))
        frame = self.network.link.commit([Commit(id, len(self.tokens[id]), tokens, (), 0)])
        self.tokens[id] += tokens
        if frame is not None:
            self.network.to_node.append(frame)

    @rule(id=IDS, token=st.integers(0, VOCAB - 1))
    def restart_request(self, id: str, token: int) -> None:
        """The id is used again, with other tokens."""
        frame = self.network.link.free([id])
        self.tokens[id] = [token]
        if frame is not None:
            self.network.to_node.append(frame)

    @rule(place=PLACE, node=st.booleans())
    def deliver(self, place: int, node: bool) -> None:
        frames = self.network.to_node if node else self.network.to_verifier
        if frames:
            reach = self.network.reach_node if node else self.network.reach_verifier
            reach(place % len(frames))

    @rule(place=PLACE, node=st.booleans())
    def lose(self, place: int, node: bool) -> None:
        frames = self.network.to_node if node else self.network.to_verifier
        if frames:
            frames.pop(place % len(frames))

    @rule(place=PLACE, node=st.booleans())
    def repeat(self, place: int, node: bool) -> None:
        frames = self.network.to_node if node else self.network.to_verifier
        if frames:
            frames.append(frames[place % len(frames)])

    @rule(place=PLACE, node=st.booleans(), byte=st.integers(3, 400), bit=st.integers(0, 7))
    def damage(self, place: int, node: bool, byte: int, bit: int) -> None:
        frames = self.network.to_node if node else self.network.to_verifier
        if frames and self.damaged < node_session.MOST_DAMAGED:
            self.damaged += 1
            frame = bytearray(frames[place % len(frames)])
            frame[3 + byte % (len(frame) - 3)] ^= 1 << bit
            frames[place % len(frames)] = bytes(frame)

    @rule(seconds=st.sampled_from([0.01, 1.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.network.now += seconds

    @rule()
    def restart_node(self) -> None:
        self.network.link.lose()
        self.network.join()
        self.damaged = 0

    @rule()
    def heal(self) -> None:
        """Without further damage, the second call of a request gets its draft."""
        self.network.settle()
        self.network.now += 100.0
        for _ in range(2):
            wanted = {id: echo(tokens, 3) for id, tokens in self.tokens.items()}
            call = self.network.ask([context(id, tokens) for id, tokens in self.tokens.items()])
            self.network.settle()
            found = {draft.id: draft.tokens for draft in drafts_of(call)}
        assert found == wanted

    @invariant()
    def drafts_continue_what_was_asked(self) -> None:
        for call, wanted in self.asked:
            for draft in drafts_of(call):
                assert draft.tokens == wanted[draft.id]
        assert not self.network.link.quarantine, "an honest node is not excluded"


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(max_examples=60, stateful_step_count=40)


def one_lost_update(network: Network) -> Sequence[tuple[int, ...]]:
    """The drafts of the second and third call, where the node misses the update between them."""
    network.ask([context("a", [1, 2], assumed=1)])
    network.settle()
    network.ask([context("a", [1, 3])])
    network.to_node.clear()
    network.now += 1.0
    call = network.ask([context("a", [1, 3, 4])])
    network.settle()
    return [draft.tokens for draft in drafts_of(call)]


def test_a_lost_update_costs_one_draft_and_a_new_epoch() -> None:
    network = Network()
    assert one_lost_update(network) == []
    assert network.link.counts.resyncs == 1
    call = network.ask([context("a", [1, 3, 4])])
    network.settle()
    assert [draft.tokens for draft in drafts_of(call)] == [echo([1, 3, 4], 3)]


def test_without_numbers_of_updates_a_node_drafts_for_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the property above depends on the check."""

    def blindly(copy: request_copies.TokenCopy, update: TokensUpdate) -> bool:
        return update.base <= len(copy.tokens)

    monkeypatch.setattr(request_copies.TokenCopy, "precedes", blindly)
    (tokens,) = one_lost_update(Network())
    assert tokens == echo([1, 2, 4], 3) != echo([1, 3, 4], 3)


def test_repeated_and_late_answers_are_ignored() -> None:
    network = Network()
    call = network.ask([context("a", [1, 2])])
    network.reach_node()
    network.to_verifier *= 3
    network.settle()
    assert len(drafts_of(call)) == 1
    assert network.link.counts.ignored == 2
    late = network.ask([context("a", [1, 2, 3])])
    network.now += 60.0
    assert network.link.overdue(late) and network.link.counts.late == 1
    network.settle()
    assert late.found is not None, "the answer is there for a caller that waits longer"


def test_a_node_that_never_answers_is_asked_no_more() -> None:
    network = Network()
    for count in range(node_session.MISSES):
        assert network.link.usable, count
        call = network.ask([context("a", [1] * (count + 1))])
        network.now += 11.0
        assert network.link.overdue(call)
    assert not network.link.usable
    network.link.decode(FrameCodec(ToVerifier).encode(NodeHeartbeat()))
    assert not network.link.usable, "a beat is no answer"
    network.settle()
    assert not network.link.usable, "late answers do not show that the node is in time again"
    network.now += node_session.LONGEST_PAUSE
    frame = network.link.probe()
    assert frame is not None
    network.to_node.append(frame)
    network.settle()
    assert network.link.usable, "the node answers a probe"


def silence(network: Network, late: bool = False) -> float:
    """Ask a node that answers nothing, or ``late``, while the node can be asked; returns seconds of waiting."""
    waited = 0.0
    while network.link.usable:
        call = network.ask([context("a", [1])])
        if not late:
            network.to_node.clear()
        waited += max(0.0, call.due - network.now)
        network.now = max(network.now, call.due)
        assert network.link.overdue(call)
        network.now += 0.0001
        network.settle()
    return waited


@pytest.mark.parametrize("late", [False, True])
def test_nodes_that_answer_only_probes_delay_steps_less_and_less(late: bool) -> None:
    network, waited, probes = Network(), 0.0, 0
    for _ in range(WARM_UP):
        network.ask([context("a", [1])])
        network.now += 0.005
        network.settle()
    waited += silence(network, late)
    assert network.link.probe() is None, "the first probe comes after a pause"
    for _ in range(4000):
        network.now += 1.0
        frame = network.link.probe()
        if frame is not None:
            network.to_node.append(frame)
            network.settle()
            probes += 1
            assert network.link.usable, "the node answered a probe"
            waited += silence(network, late)
    assert probes < 80, "a late node gets one call in a pause"
    assert waited < (node_session.MISSES + probes) * network.link.times.most if late else waited < 8.0
    assert network.link.pause == node_session.LONGEST_PAUSE
    for _ in range(100):
        network.now += node_session.LONGEST_PAUSE
        frame = network.link.probe()
        if frame is not None:
            network.to_node.append(frame)
        network.ask([context("a", [1])])
        network.settle()
    assert network.link.usable and network.link.pause == 0, "answers in time count"


def test_a_probe_that_gets_no_answer_delays_nothing() -> None:
    network = Network()
    silence(network)
    late = network.link.counts.late
    for _ in range(100):
        network.now += 1.0
        network.link.probe()
        network.link.decode(FrameCodec(ToVerifier).encode(NodeHeartbeat()))
        assert not network.link.usable
    assert network.link.counts.late == late


def test_messages_that_are_too_large_count_as_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network()
    network.ask([context("a", [1, 2])])
    network.settle()
    with monkeypatch.context() as small:
        small.setattr(wire, "MAX_BYTES", 20)
        assert network.link.commit([Commit("a", 2, (3,), (), 0)]) is None
        assert network.link.free(["a"]) is None
    call = network.ask([context("a", [4])])
    network.settle()
    assert [draft.tokens for draft in drafts_of(call)] == [echo([4], 3)]


def test_an_error_of_the_drafter_costs_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Raising(Echo):
        def propose(self, contexts, budgets):  # type: ignore[no-untyped-def]
            if any(each.id == "bad" for each in contexts):
                raise ZeroDivisionError("no")
            return super().propose(contexts, budgets)

    network = Network(Raising())
    call = network.ask([context("bad", [1]), context("good", [2])])
    network.settle()
    assert call.lost and network.link.counts.errors == 1
    assert "ZeroDivisionError" in caplog.text
    call = network.ask([context("good", [2, 3])])
    network.settle()
    assert [draft.tokens for draft in drafts_of(call)] == [echo([2, 3], 3)]
