"""Messages arrive as they were sent; bytes that are no message raise one clear error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, FinishReason
from cospec.rng.random_streams import StreamKind
from cospec.runtime.codec import Codec, ProtocolError, decode_call, encode_call
from cospec.runtime.messages import (
    VERSION,
    Commits,
    ContextDecoder,
    ContextEncoder,
    ContextUpdate,
    DrafterCommand,
    DrafterReply,
    Drafts,
    EngineCommand,
    Free,
    Hello,
    Propose,
    Stop,
    check_version,
)
from cospec.sampling_params import SamplingParams

PARAMS = SamplingParams(temperature=0.5, top_k=3, logit_bias={3: 1.5}, stop=("a",))


def sent(message: Any, accepts: Any) -> Any:
    return Codec(accepts).decode([bytearray(part) for part in Codec(accepts).encode(message)])


def test_a_proposal_arrives_as_it_was_sent() -> None:
    context = DraftContext("s", [1, 2, 70_000], 2, PARAMS, 2**64 - 1, StreamKind.DRAFT, 1, ("a", "b"))
    outgoing, incoming = ContextEncoder(), ContextDecoder()
    for _ in range(2):  # the second time as a difference from the first
        message = sent(Propose(7, [outgoing.encode(context)], [DraftBudget(2, 2, (1, 1))]), DrafterCommand)
        assert (message.number, message.budgets) == (7, [DraftBudget(2, 2, (1, 1))])
        assert incoming.decode(message.contexts[0]) == context
    assert message.contexts[0].tokens == [70_000] and message.contexts[0].start is None


def test_arrays_and_states_arrive_as_they_were_sent() -> None:
    q = np.random.default_rng(0).random((4, 9))[1:3]
    draft = Draft("s", 3, (4, 5), (-1, 0), ("d", "d"), q, q.max(-1))
    parts = Codec(DrafterReply).encode(Drafts(1, [draft], 0.5))
    assert [len(part) for part in parts[1:]] == [q.nbytes, 16] and len(parts[0]) < 200
    (found,) = Codec(DrafterReply).decode(parts).drafts
    assert np.array_equal(found.q, q) and np.array_equal(found.confidence, q.max(-1)) and found.tokens == (4, 5)
    commit = Commit("s", 3, (4,), (0,), 4, 2, FinishReason.STOP, True, torch.arange(3.0, dtype=torch.bfloat16))
    (other,) = sent(Commits([commit]), DrafterCommand).commits
    assert torch.equal(other.hidden_state, torch.arange(3.0)) and other.finish is FinishReason.STOP
    assert (other.tokens, other.rejected) == ((4,), True)


def test_an_update_without_its_beginning_is_refused() -> None:
    for start in (None, ContextEncoder().encode(DraftContext("s", [1], 1, PARAMS, 0, StreamKind.DRAFT)).start):
        with pytest.raises(ProtocolError, match="after 3 tokens that never came"):
            ContextDecoder().decode(ContextUpdate("s", 3, [4], 0, StreamKind.DRAFT, 0, start))


def test_a_context_that_changed_before_its_end_is_sent_anew() -> None:
    outgoing, incoming = ContextEncoder(), ContextDecoder()
    for tokens, params in (([1, 2, 3], PARAMS), ([1], PARAMS), ([4], SamplingParams())):
        context = DraftContext("s", tokens, 1, params, 0, StreamKind.DRAFT)
        assert incoming.decode(outgoing.encode(context)) == context


ARRAY = msgspec.msgpack.Ext(1, msgspec.msgpack.encode(("<f8", (2,), 1, "cpu")))


def draft_of(q: Any) -> bytes:
    fields = {"id": "s", "base_len": 1, "tokens": [1], "parents": [-1], "drafters": ["d"], "q": q}
    return msgspec.msgpack.encode({"type": "Drafts", "number": 1, "drafts": [fields], "busy": 0.0})


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [b"\xc1"],
        [b"\x80\x04\x95."],  # a pickle
        [msgspec.msgpack.encode({"type": "Call", "name": "os:system"})],
        [msgspec.msgpack.encode({"type": "Drafts", "number": "1", "drafts": [], "busy": 0.0})],
        [msgspec.msgpack.encode({"type": "Drafts", "drafts": []})],
        [msgspec.msgpack.encode({"type": "Free", "ids": []})],  # of the other direction
        [draft_of([1.0])],
        [draft_of(ARRAY)],
        [draft_of(ARRAY), bytes(15)],
        [draft_of(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(("|O", (2,), 1, "cpu")))), bytes(16)],
        [draft_of(msgspec.msgpack.Ext(1, msgspec.msgpack.encode(("<f8", (-2,), 1, "cpu")))), bytes(16)],
        [draft_of(msgspec.msgpack.Ext(9, msgspec.msgpack.encode(("<f8", (2,), 1, "cpu")))), bytes(16)],
        [draft_of(msgspec.msgpack.Ext(2, msgspec.msgpack.encode(("<f8", (2,), 1, "disk")))), bytes(16)],
        [draft_of(msgspec.msgpack.Ext(1, b"\xc1")), bytes(16)],
        [b"\x91" * 100_000],
    ],
)
def test_what_is_no_message_is_refused(parts: list[bytes]) -> None:
    with pytest.raises(ProtocolError, match=r"^A message cannot be read: .*\.$"):
        Codec(DrafterReply).decode(parts)
    assert Codec(DrafterReply).decode([draft_of(ARRAY), bytes(16)]).drafts[0].q.tolist() == [0.0, 0.0]


def test_what_does_not_travel_is_refused_before_it_is_sent() -> None:
    for value in (object(), np.array([None])):
        with pytest.raises(TypeError, match="not travel"):
            Codec(DrafterCommand).encode(Commits([Commit("s", 1, (), (), 1, hidden_state=value)]))


def test_another_version_is_refused_with_both_numbers() -> None:
    check_version(Hello(VERSION))
    with pytest.raises(ProtocolError, match=f"peer speaks version {VERSION + 1} .* process speaks version {VERSION}"):
        check_version(Hello(VERSION + 1))
    for message in (Stop(), Free([])):
        with pytest.raises(ProtocolError, match="Hello"):
            check_version(message)


def build(config: EngineConfig, device: torch.device, path: Path, names: tuple[str, ...], size: int | None) -> Any:
    return config, device, path, names, size


def test_a_call_travels_by_name_and_typed_arguments() -> None:
    speculative = SpeculativeConfig(method="pool", options={"drafters": [{"method": "ngram"}]}, widths=(2, 1))
    config = EngineConfig(model="m", speculative_config=speculative, plugins=("a",))
    values = config, torch.device("cuda:1"), Path("/x"), ("a", "b"), None
    name, arguments = encode_call(build, *values)
    assert name.endswith("test_messages:build")
    kinds = EngineConfig, torch.device, Path, tuple[str, ...], int | None
    assert tuple(Codec(kind).decode([raw]) for kind, raw in zip(kinds, arguments, strict=True)) == values
    name, arguments = encode_call(check_version, Stop())
    with pytest.raises(ProtocolError, match="Hello"):
        decode_call(name, arguments)
    with pytest.raises(ValueError, match="can be imported"):
        encode_call(lambda: None)


def test_a_command_of_a_server_arrives() -> None:
    assert isinstance(sent(Stop(), EngineCommand), Stop)
