"""Drafter nodes in processes: joined, alone and in pools, refused, and hostile. Outputs are those without drafts."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from string import ascii_lowercase
from zlib import crc32

import pytest

from cospec.cluster.nodes import wire
from cospec.cluster.nodes.hub import NodeHub
from cospec.cluster.nodes.keys import make_keys
from cospec.cluster.nodes.request_copies import node_seed
from cospec.cluster.nodes.wire import FrameCodec, NodeDrafts, Refused, ToNode, Welcome
from cospec.config import LinkConfig
from cospec.core.types import DraftBudget, DraftContext, SpeculationParams
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from harness.node_engines import accepted, alone, nodes_of, plain, requests, rows, target, writes_the_same
from harness.nodes import NodeProcess, Peer, Start, hub_for_tests, on_nodes, peers
from harness.overlap import MODES, under
from harness.pools import pool_engine, pool_of
from harness.remote_drafters import VOCAB, toy
from harness.toys import make_request, run_all, tokens_of, toy_engine
from harness.waiting import until

pytest.importorskip("zmq")
pytestmark = pytest.mark.cluster

NAMES = ("itself", "other", "ngram")
POOLS = [("fuse", "drafts"), ("union", "drafts"), ("fuse", "steps"), ("mix", "steps")]


@pytest.mark.parametrize(("combiner", "part"), POOLS)
def test_nodes_of_a_pool(combiner: str, part: str, hub: NodeHub, start: Start) -> None:
    names = NAMES if part == "drafts" else ("itself", "other")
    drafters = {name: on_nodes(hub, name)[0] for name in names}
    for name in names:
        start(hub, name)
    until(lambda: rows(hub, "ready") == len(names), "the nodes")
    engine = pool_engine(target(), pool_of(drafters, combiner, "all", VOCAB, token_steps=part == "steps"), "match")
    writes_the_same(engine, "a")
    assert engine.metrics().accepted_tokens["itself"] > 100
    assert {row["node"]: row[part] > 0 for row in hub.status()} == dict.fromkeys(nodes_of(hub), True)
    assert len(nodes_of(hub)) == len(names)
    engine.close()
    assert not hub.status()


@pytest.mark.parametrize("mode", ["draft-ahead", "draft-for-outcomes", "pipelined"])
def test_a_pool_on_nodes_drafts_during_verification(mode: str, hub: NodeHub, start: Start) -> None:
    pool = pool_of({name: on_nodes(hub, name)[0] for name in NAMES}, "fuse", "hedge", VOCAB)
    assert pool.drafts_ahead
    start(hub, *NAMES)
    until(lambda: rows(hub, "ready") == 3, "one node with three drafters")
    engine = under(toy_engine(target(), pool, "match", k=3), mode, "worker")
    writes_the_same(engine, "a")
    assert engine.metrics().accepted_tokens["itself"] > 100
    weights = pool.weights()
    assert weights["itself"] > weights["ngram"], "what was not drafted ahead still teaches the weights"
    assert {row["drafter"] for row in hub.status() if row["scores"]} == {"itself", "other"}
    engine.execution_mode.close()
    pool.close()


@pytest.mark.parametrize("drafter", ["other", "ngram"])
def test_a_node_drafts_after_outcomes(drafter: str, hub: NodeHub, start: Start) -> None:
    """A lookup continues the whole draft alone. A busy machine takes several rounds: late drafts are lost."""
    drafter_on_node, _ = on_nodes(hub, drafter)
    start(hub, drafter)
    until(lambda: rows(hub, "ready") == 1, "the node")
    engine = under(toy_engine(target(), drafter_on_node, "match", k=3), "draft-for-outcomes", "process")
    for prefix in ascii_lowercase:
        for request in requests(prefix):
            assert tokens_of(run_all(engine, [request])) == plain([request])
        used = engine.metrics().drafts_ahead
        if used["likeliest"] + used["other"] > 40:
            break
    assert used["likeliest"] + used["other"] > 40
    assert {row["state"] for row in hub.status()} == {"ready"}, "no answer breaks the protocol"
    engine.execution_mode.close()
    drafter_on_node.close()


@pytest.mark.parametrize("mode", MODES)
def test_one_drafter_on_two_nodes(mode: str, hub: NodeHub, start: Start) -> None:
    drafter, engine = alone(hub)
    for _ in range(2):
        start(hub, "itself")
    until(lambda: rows(hub, "ready") == 2, "two nodes")
    writes_the_same(under(engine, mode, "process"), "a")
    assert accepted(engine) > 100
    assert all(row["drafts"] > 0 for row in hub.status()), "both nodes draft"
    drafter.close()


def test_a_node_over_a_slow_link_drafts_later(hub: NodeHub, start: Start) -> None:
    drafter, engine = alone(hub)
    node = start(hub, "itself", link=LinkConfig(delay=0.01, jitter=0.005))
    until(lambda: rows(hub, "ready") == 1, "a node")
    writes_the_same(engine, "a")
    assert accepted(engine) > 100
    assert hub.status()[0]["latency_seconds"] > 0.02, "a delay in each direction"
    node.send(signal.SIGTERM)
    assert node.wait() == 0
    until(lambda: not hub.status(), "a node that leaves")
    drafter.close()


def test_a_node_joins_while_requests_run(hub: NodeHub, start: Start) -> None:
    drafter, engine = alone(hub)
    writes_the_same(engine, "a")
    assert accepted(engine) == 0
    start(hub, "itself")
    params, deadline = SamplingParams(temperature=0, max_tokens=400), time.monotonic() + 60
    while not accepted(engine) and time.monotonic() < deadline:
        request, tokens = make_request("long", (1, 2), params), tuple[int, ...]()
        engine.add(request)
        while engine.has_work:
            tokens += tuple(token for event in engine.step() for token in event.tokens)
            time.sleep(0.001)
        assert tokens == plain([request])["long"]
    assert accepted(engine) > 0
    drafter.close()


@pytest.fixture
def peer(hub: NodeHub) -> Iterator[Callable[[], Peer]]:
    with peers(hub) as connect:
        yield connect


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"drafter": "unknown"}, "Drafter 'unknown' is unknown; allowed is one of itself."),
        ({"method": "ngram"}, "has the method 'draft_model'"),
        ({"vocab_size": 7}, "The target has 6 tokens"),
        ({"node": "a\nb"}, "printable"),
        ({"cost_per_hour": float("nan")}, "cost per hour"),
    ],
)
def test_offers_that_do_not_fit_are_refused(
    changes: dict[str, object], reason: str, hub: NodeHub, peer: Callable[[], Peer]
) -> None:
    drafter, _ = alone(hub)
    answer = peer().say(peer().hello(**changes))
    assert isinstance(answer, Refused) and reason in answer.reason
    assert not hub.status()
    drafter.close()


def test_hostile_peers_cost_nothing(hub: NodeHub, start: Start, peer: Callable[[], Peer]) -> None:
    """Garbage, a wrong version, oversized frames, forged and replayed answers, while an honest node works."""
    drafter, engine = alone(hub)
    start(hub, "itself")
    until(lambda: rows(hub, "ready") == 1, "the honest node")
    garbage = peer()
    assert garbage.say(b"x" * 100) is None, "a damaged frame is dropped"
    assert isinstance(garbage.say(wire.HEADER.pack(wire.MAGIC, wire.VERSION, crc32(b"\xc1")) + b"\xc1"), Refused)
    assert garbage.say(garbage.hello()) is None, "a peer that sent garbage is ignored"
    other = peer()
    frame = bytearray(other.hello())
    frame[2] += 1
    answer = other.say(bytes(frame))
    assert isinstance(answer, Refused) and "version" in answer.reason
    big = peer()
    assert big.say(b"\0" * (wire.MAX_ENCRYPTED_BYTES + 1)) is None, "the socket drops the connection"
    forger = peer()
    assert isinstance(forger.say(forger.hello()), Welcome)
    answer = forger.say(forger.codec.encode(NodeDrafts(12345, [], 0.0)))
    assert isinstance(answer, Refused) and "never made" in answer.reason
    assert rows(hub, "quarantined") == 1
    assert forger.say(forger.hello()) is None, "quarantine lasts"
    replayer, codec = peer(), FrameCodec(ToNode)
    assert isinstance(replayer.say(replayer.hello()), Welcome)
    replayed = 0

    def replay(step: int) -> None:
        nonlocal replayed
        while replayer.socket.poll(0):
            message = codec.decode(replayer.socket.recv())
            if isinstance(message, wire.AskDrafts):
                for _ in range(3):  # an empty answer, thrice
                    replayer.socket.send(codec.encode(NodeDrafts(message.number, [], 0.0)))
                    replayed += 1

    writes_the_same(engine, "h", replay)
    assert replayed > 0
    assert accepted(engine) > 0, "the honest node drafts"
    drafter.close()


@pytest.mark.parametrize("routing", ["all", "hedge"])
def test_a_node_reads_only_requests_of_its_drafter(
    routing: str, hub: NodeHub, start: Start, peer: Callable[[], Peer]
) -> None:
    """Every message to the peer is read; requests that exclude the peer's drafter are in none."""
    pool = pool_of({name: on_nodes(hub, name)[0] for name in ("itself", "other")}, "fuse", routing, VOCAB)
    start(hub, "itself")
    curious, codec = peer(), FrameCodec(ToNode)
    assert isinstance(curious.say(curious.hello(drafter="other", scores=True)), Welcome)
    until(lambda: rows(hub, "ready") == 2, "both nodes")
    engine = pool_engine(target(), pool, "match")
    private = [replace(each, speculation=SpeculationParams(drafters=("itself",))) for each in requests("private-")]
    for request in [*private, *requests("open-")]:
        engine.add(request)
    tokens: dict[str, tuple[int, ...]] = {}
    read = ""
    while engine.has_work:
        for event in engine.step():
            tokens[event.id] = tokens.get(event.id, ()) + event.tokens
        while curious.socket.poll(0):
            message = codec.decode(curious.socket.recv())
            read += str(message)
            if isinstance(message, wire.AskDrafts):
                curious.socket.send(codec.encode(NodeDrafts(message.number, [], 0.0)))
    assert tokens == plain([*requests("private-"), *requests("open-")])
    assert "open-" in read and "private-" not in read
    engine.close()


def test_only_nodes_with_keys_are_admitted(tmp_path: Path, start: Start) -> None:
    for folder in ("ours", "theirs"):
        make_keys(tmp_path / folder, ["node"])
    hub = hub_for_tests(keys=tmp_path / "ours")
    drafter, engine = alone(hub)
    stranger = Peer(hub.address)
    assert stranger.say(stranger.hello()) is None, "a peer without keys"
    stranger.close()
    (tmp_path / "theirs" / "verifier.key").write_bytes((tmp_path / "ours" / "verifier.key").read_bytes())
    liar = Peer(hub.address, tmp_path / "theirs")
    assert liar.say(liar.hello()) is None, "a peer with keys of its own"
    liar.close()
    assert not hub.status()
    start(hub, "itself", keys=tmp_path / "ours")
    until(lambda: rows(hub, "ready") == 1, "the node with keys")
    writes_the_same(engine, "a")
    assert accepted(engine) > 0
    drafter.close()


def test_a_verifier_that_starts_again_gets_its_nodes() -> None:
    """The node is there before the verifier, and stays when the verifier ends."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    node = NodeProcess(address, [("itself", toy("itself"))])
    for _ in range(2):
        hub = hub_for_tests(bind=address)
        drafter, engine = alone(hub)
        until(lambda: rows(hub, "ready") == 1, "the node")  # noqa: B023 - called at once
        writes_the_same(engine, "a")
        assert accepted(engine) > 0
        drafter.close()
    node.close()


def test_trusted_nodes_send_what_tokens_were_drawn_from(start: Start) -> None:
    hub = hub_for_tests(trusted=True)
    drafter, executor = on_nodes(hub, "other")
    start(hub, "other")
    until(lambda: rows(hub, "ready") == 1, "the node")
    context = DraftContext("a", [1, 2, 3], 3, SamplingParams(temperature=0.9), 5, StreamKind.DRAFT)
    (draft,) = executor.submit("propose", [context], [DraftBudget(4, 4)]).result(10.0)
    local = toy("other")().propose([replace(context, seed=node_seed(context))], [DraftBudget(4, 4)])[0]
    assert draft.tokens == local.tokens and draft.q is not None and local.q is not None
    assert (draft.q == local.q).all()
    assert node_seed(context) != context.seed, "a node cannot know the draws that decide on acceptance"
    drafter.close()
