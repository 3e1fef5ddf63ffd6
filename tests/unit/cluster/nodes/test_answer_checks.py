"""Messages that break the protocol: each is noticed, named, and costs the node its place."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from cospec.cluster.nodes.answer_checks import AskedDraft, check_draft, check_score, check_step, sparse_row
from cospec.cluster.nodes.wire import (
    HEADER,
    MAGIC,
    MAX_BYTES,
    VERSION,
    DamagedFrame,
    FrameCodec,
    NodeAnswer,
    NodeDraft,
    NodeDrafts,
    NodeHeartbeat,
    NodeScore,
    NodeScores,
    NodeStep,
    SparseRow,
    ToVerifier,
)
from cospec.core.types import DraftBudget
from cospec.runtime.codec import ProtocolError
from harness.node_network import Network, context

GOOD = NodeDraft("a", 1, 2, (4, 5), (-1, 0), None, None)
ASKED = AskedDraft(DraftBudget(2, 2), False)
Q = (SparseRow([1, 4], np.array([0.5, 0.5]).tobytes()), SparseRow([5], np.array([1.0]).tobytes()))


def changed(**values: Any) -> NodeDraft:
    return msgspec.structs.replace(GOOD, **values)


def test_a_good_draft_passes() -> None:
    found = check_draft(GOOD, ASKED, 6, "name")
    assert (found.tokens, found.parents, found.drafters, found.q) == ((4, 5), (-1, 0), ("name", "name"), None)
    with_q = check_draft(changed(q=Q), replace(ASKED, wants_q=True), 6, "name")
    assert with_q.q is not None and with_q.q.tolist() == [[0, 0.5, 0, 0, 0.5, 0], [0, 0, 0, 0, 0, 1]]
    assert check_draft(changed(q=Q), ASKED, 6, "name").q is None, "unasked distributions are not read"
    assert tuple(map(sparse_row, with_q.q)) == Q


def test_a_draft_after_outcomes_begins_before_the_assumed_tokens() -> None:
    tree = NodeDraft("a", 1, 9, (4, 5, 3, 2, 1), (-1, 0, 0, 1, 3), None, None)
    asked = AskedDraft(DraftBudget(2, 3, (2,), outcomes=True), False, given=2)
    assert check_draft(tree, asked, 6, "name").base_len == 7
    for given, sentence in ((0, "5 tokens"), (1, "5 tokens")):
        with pytest.raises(ProtocolError, match=sentence):
            check_draft(tree, replace(asked, given=given), 6, "name")
    with pytest.raises(ProtocolError, match="longer path"):
        check_draft(tree, replace(asked, budget=DraftBudget(1, 3, (2,), outcomes=True)), 6, "name")


@pytest.mark.parametrize(
    ("values", "asked", "reason"),
    [
        ({"tokens": (4, 6)}, {}, "outside of the vocabulary"),
        ({"tokens": (-1, 4)}, {}, "outside of the vocabulary"),
        ({"tokens": (), "parents": ()}, {}, "has 0 tokens"),
        ({"tokens": (4, 5, 1), "parents": (-1, 0, 1)}, {}, "at most 2 tokens"),
        ({"parents": (-1,)}, {}, "number of parents"),
        ({"parents": (0, -1)}, {}, "before its parent"),
        ({"parents": (-1, -2)}, {}, "before its parent"),
        ({"parents": (-1, -1)}, {}, "a chain was asked for"),
        ({"parents": (-1, -1), "tokens": (4, 4)}, {"budget": DraftBudget(2, 3)}, "same token twice"),
        ({}, {"budget": DraftBudget(1, 3)}, "longer path"),
        ({"confidence": (0.5,)}, {}, "confidences"),
        ({"confidence": (0.5, 1.5)}, {}, "confidences"),
        ({"confidence": (0.5, float("nan"))}, {}, "confidences"),
        ({}, {"wants_q": True}, "distributions were asked for"),
        ({"q": Q[:1]}, {"wants_q": True}, "distributions were asked for"),
        ({"q": (Q[0], SparseRow([5], b""))}, {"wants_q": True}, "too few probabilities"),
        ({"q": (Q[0], SparseRow([6], np.ones(1).tobytes()))}, {"wants_q": True}, "outside of the vocabulary"),
        ({"q": (Q[0], SparseRow([2**63], np.ones(1).tobytes()))}, {"wants_q": True}, "more than 64 bits"),
        ({"q": (Q[0], SparseRow([4, 1], np.full(2, 0.5).tobytes()))}, {"wants_q": True}, "repeated tokens"),
        ({"q": (Q[0], SparseRow([5], np.full(1, 0.5).tobytes()))}, {"wants_q": True}, "sum to 1"),
        ({"q": (Q[0], SparseRow([5], np.full(1, np.inf).tobytes()))}, {"wants_q": True}, "not above 0"),
        ({"q": (Q[0], SparseRow([4], np.ones(1).tobytes()))}, {"wants_q": True}, "excludes"),
    ],
)
def test_a_draft_of_another_shape_is_named(values: dict[str, Any], asked: dict[str, Any], reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        check_draft(changed(**values), replace(ASKED, **asked), 6, "name")


@pytest.mark.parametrize(
    ("chance", "tokens", "reason"),
    [
        (float("nan"), 2, "sum of probabilities"),
        (float("inf"), 2, "sum of probabilities"),
        (-0.1, 2, "sum of probabilities"),
        (2.1, 2, "sum of probabilities"),
        (1.0, 5, "about 5 tokens of 5"),
        (1.0, -1, "about -1 tokens"),
        (1.0, 10**9, "allowed are 32"),
    ],
)
def test_scores_that_no_drafter_makes_are_named(chance: float, tokens: int, reason: str) -> None:
    assert check_score(NodeScore("a", 1, 5, 1.5, 4)) == (1.5, 4)
    with pytest.raises(ProtocolError, match=reason):
        check_score(NodeScore("a", 1, 5 if tokens < 10 else 10**10, chance, tokens))


@pytest.mark.parametrize(
    ("values", "wants_q", "reason"),
    [
        ({"token": 6}, False, "outside of the vocabulary"),
        ({"token": -1}, False, "outside of the vocabulary"),
        ({"token": -2, "q": Q[0]}, True, "outside of the vocabulary"),
        ({"second": (6, 0.1)}, False, "outside of the vocabulary"),
        ({"second": (2, 1.1)}, False, "no probability"),
        ({"confidence": float("nan")}, False, "no probability"),
        ({}, True, "no distribution"),
        ({"q": Q[0]}, False, "another distribution"),
        ({"q": SparseRow([1, 4], np.array([0.5, 0.6]).tobytes())}, True, "sum to 1"),
    ],
)
def test_candidates_of_another_shape_are_named(values: dict[str, Any], wants_q: bool, reason: str) -> None:
    step = NodeStep("a", 1, 2, 4, 0.5, (2, 0.25), None)
    assert check_step(step, False, 6) == (4, 0.5, None, (2, 0.25))
    undrawn = check_step(msgspec.structs.replace(step, token=-1, second=None, q=Q[0]), True, 6)
    assert undrawn.token == -1 and undrawn.q is not None and undrawn.q.tolist() == [0, 0.5, 0, 0, 0.5, 0]
    with pytest.raises(ProtocolError, match=reason):
        check_step(msgspec.structs.replace(step, **values), wants_q, 6)


def resealed(payload: bytes, magic: bytes = MAGIC, version: int = VERSION) -> bytes:
    return HEADER.pack(magic, version, zlib.crc32(payload)) + payload


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"", "0 bytes"),
        (b"x" * (MAX_BYTES + 1), "at most"),
        (resealed(b"\x80", magic=b"xx"), "no message"),
        (resealed(b"\x80", version=VERSION + 1), f"speaks version {VERSION + 1}"),
        (resealed(b"\xc1"), "cannot be read"),
        (resealed(msgspec.msgpack.encode({"type": "NodeGift"})), "cannot be read"),
        (resealed(msgspec.msgpack.encode({"type": "NodeDrafts", "number": "one"})), "cannot be read"),
        (resealed(b"\x91" * 5000), "cannot be read"),
    ],
)
def test_a_frame_that_is_no_message_is_named(frame: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        FrameCodec(ToVerifier).decode(frame)


def test_a_damaged_frame_is_dropped() -> None:
    frame = bytearray(FrameCodec(ToVerifier).encode(NodeHeartbeat(3)))
    assert FrameCodec(ToVerifier).decode(bytes(frame)) == NodeHeartbeat(3)
    frame[-1] ^= 1
    with pytest.raises(DamagedFrame):
        FrameCodec(ToVerifier).decode(bytes(frame))
    assert struct.calcsize("<2sBI") == HEADER.size


FORGED: dict[str, Callable[[NodeDrafts], NodeAnswer]] = {
    "another request": lambda m: msgspec.structs.replace(m, found=[msgspec.structs.replace(m.found[0], id="z")]),
    "twice": lambda m: msgspec.structs.replace(m, found=m.found * 2),
    "another epoch": lambda m: msgspec.structs.replace(m, found=[msgspec.structs.replace(m.found[0], epoch=9)]),
    "other tokens": lambda m: msgspec.structs.replace(m, found=[msgspec.structs.replace(m.found[0], base=1)]),
    "never made": lambda m: msgspec.structs.replace(m, number=99),
    "no time": lambda m: msgspec.structs.replace(m, seconds=float("nan")),
    "another call": lambda m: NodeScores(m.number, [], 0.0),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_a_forged_answer_quarantines_the_node(forge: Callable[[NodeDrafts], NodeAnswer]) -> None:
    network = Network()
    call = network.ask([context("a", [1, 2])])
    network.reach_node()
    codec = FrameCodec(ToVerifier)
    network.to_verifier = [codec.encode(forge(codec.decode(network.to_verifier[0])))]
    network.settle()
    assert call.lost and call.found is None
    assert network.link.quarantine and not network.link.usable


def test_many_damaged_frames_quarantine_the_node() -> None:
    network = Network()
    frame = bytearray(network.service.encode(NodeHeartbeat()))
    frame[-1] ^= 1
    for _ in range(8):
        assert network.link.decode(bytes(frame)) is None and not network.link.quarantine
    network.link.decode(bytes(frame))
    assert "checksum" in network.link.quarantine


def test_any_exception_of_a_check_quarantines_the_node() -> None:
    def fails(part: Any) -> Any:
        raise ZeroDivisionError("float division by zero")

    network = Network()
    call = network.ask([context("a", [1, 2])])
    call.check = fails
    network.settle()
    assert call.lost and network.link.quarantine == "float division by zero"
