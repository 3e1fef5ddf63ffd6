"""The messages between the verifier and a drafter node, and their frames.

The verifier owns every request. A node keeps copies of tokens, and answers with drafts, scores and single tokens. A
frame is a header (magic, version of the protocol, checksum) and one MessagePack message. The decoder builds data only:
no message names code.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec

from cospec.core.types import Commit, DraftBudget
from cospec.errors import CospecError
from cospec.rng.random_streams import StreamKind
from cospec.runtime.codec import Codec, ProtocolError
from cospec.runtime.messages import ContextStart

VERSION = 6  # of all messages of this file; a change to any field, or to the name of a message, changes the number
MAGIC = b"cn"
HEADER = struct.Struct("<2sBI")  # magic, version, checksum of the payload
MAX_BYTES = 4 << 20  # of one frame
MAX_ENCRYPTED_BYTES = MAX_BYTES + 64  # CurveZMQ adds 33 bytes to a frame
LONGEST_NAME = 64
LONGEST_REASON = 500  # of a refusal; an error may quote a message of 4 MiB


class DamagedFrame(CospecError):
    """A frame whose checksum is wrong. The receiver drops the frame."""


class NodeMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class NodeHello(NodeMessage, frozen=True):
    """A node offers a drafter. ``Welcome`` or ``Refused`` answers.

    Attributes:
        node: the node's own name, for people.
        drafter: the name of the drafter in the configuration of the verifier.
        method: a name in the table of drafters.
        vocab_size: of the target for which the node drafts.
        cost_per_hour: what the node costs, in any currency.
        scores: the node answers ``AskScores``.
        steps: the node answers ``AskSteps``.
    """

    node: str
    drafter: str
    method: str
    vocab_size: int
    cost_per_hour: float = 0.0
    scores: bool = False
    steps: bool = False


class Welcome(NodeMessage, frozen=True):
    """The verifier will ask the node for drafts."""


class Refused(NodeMessage, frozen=True):
    """The verifier ignores the node, for ``reason``, for ``seconds`` from now on."""

    reason: str
    seconds: float


class HelloRequest(NodeMessage, frozen=True):
    """The verifier does not know the sender: the node is to send ``NodeHello``."""


class TokensUpdate(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of a request, as the difference from the previous update of the same epoch.

    Attributes:
        epoch: a new epoch begins with all tokens and ``start``.
        sequence: number of the update in its epoch, from 0.
        base: tokens of the previous update that stay.
        tokens: the tokens after ``base``.
        assumed: last tokens that belong to a draft under verification.
        seed: for the drafter's draws; only ``StreamKind.TARGET`` has the seed of the request.
    """

    id: str
    epoch: int
    sequence: int
    base: int
    tokens: Sequence[int]
    assumed: int
    seed: int
    stream_kind: StreamKind
    start: ContextStart | None

    @property
    def committed_len(self) -> int:
        """Number of tokens before the assumed tokens."""
        return self.known - self.assumed

    @property
    def known(self) -> int:
        """Number of all tokens."""
        return self.base + len(self.tokens)


class NodeCall(NodeMessage, frozen=True):
    """Base of node calls; an answer has the same number. Numbers of a connection only grow."""

    number: int
    updates: list[TokensUpdate]


class AskDrafts(NodeCall, frozen=True):
    """Asks for drafts; ``NodeDrafts`` answers."""

    budgets: list[DraftBudget]


class AskScores(NodeCall, frozen=True):
    """Asks how probable the latest known tokens are; ``NodeScores`` answers."""


class AskSteps(NodeCall, frozen=True):
    """Asks for one token after each of the requests; ``NodeSteps`` answers.

    Attributes:
        distributions: whether the answer has the distribution that the drafter draws from.
    """

    distributions: bool


class NodeCommits(NodeMessage, frozen=True):
    """What requests gained in one step. No answer."""

    number: int
    commits: list[Commit]


class NodeFree(NodeMessage, frozen=True):
    """Requests to be forgotten. No answer."""

    number: int
    ids: list[str]


class SparseRow(msgspec.Struct, frozen=True, array_like=True):
    """One distribution: token ids in ascending order, and their probabilities as float64 bytes."""

    ids: list[int]
    probs: bytes


class NodeItem(msgspec.Struct, frozen=True, array_like=True):
    """Base of the parts of an answer, one per request.

    Attributes:
        base: known tokens that the part is about, the assumed tokens included.
    """

    id: str
    epoch: int
    base: int


class NodeDraft(NodeItem, frozen=True, array_like=True):
    """A draft for one request.

    Attributes:
        q: a row per token, the distribution that the token was drawn from; None: chosen, or not asked for.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    confidence: tuple[float, ...] | None
    q: tuple[SparseRow, ...] | None


class NodeScore(NodeItem, frozen=True, array_like=True):
    """The probability of the latest known tokens of one request, see ``TokenScores``."""

    chance: float
    tokens: int


class NodeStep(NodeItem, frozen=True, array_like=True):
    """One token for one request, see ``Candidate``.

    Attributes:
        token: -1 without a draw.
        second: the second choice and its probability.
        q: the distribution of the token; None where no distribution was asked for, and for greedy requests.
    """

    token: int
    confidence: float
    second: tuple[int, float] | None
    q: SparseRow | None


class NodeAnswer(NodeMessage, frozen=True):
    """Base of answers.

    Attributes:
        resync: requests that the node cannot follow; the verifier begins a new epoch for these.
        seconds: time of the drafter for this answer.
        waiting: messages that wait at the node.
        error: what the drafter raised; empty without an error.
    """

    number: int
    resync: list[str]
    seconds: float
    waiting: int = 0
    error: str = ""


class NodeDrafts(NodeAnswer, frozen=True):
    """Answers ``AskDrafts``."""

    found: list[NodeDraft] = []


class NodeScores(NodeAnswer, frozen=True):
    """Answers ``AskScores``."""

    found: list[NodeScore] = []


class NodeSteps(NodeAnswer, frozen=True):
    """Answers ``AskSteps``."""

    found: list[NodeStep] = []


class NodeHeartbeat(NodeMessage, frozen=True):
    """The node is alive; sent where nothing else was sent for a second."""

    waiting: int = 0


class NodeLeave(NodeMessage, frozen=True):
    """The node leaves; the verifier asks no more."""


Call = AskDrafts | AskScores | AskSteps
Answer = NodeDrafts | NodeScores | NodeSteps
ToNode = Welcome | Refused | HelloRequest | Call | NodeCommits | NodeFree
ToVerifier = NodeHello | Answer | NodeHeartbeat | NodeLeave


class FrameCodec:
    """Encodes messages into frames, and decodes the frames of one direction.

    Args:
        accepts: the type, or union of types, of the messages to be decoded.
    """

    def __init__(self, accepts: Any) -> None:
        self._codec = Codec(accepts)

    def encode(self, message: NodeMessage) -> bytes:
        """The frame of a message.

        Raises:
            ProtocolError: the frame is too large.
        """
        payload, *_ = self._codec.encode(message)
        if len(payload) + HEADER.size > MAX_BYTES:
            raise ProtocolError(f"A message has {len(payload)} bytes; at most {MAX_BYTES} bytes are allowed.")
        return HEADER.pack(MAGIC, VERSION, zlib.crc32(payload)) + bytes(payload)

    def decode(self, frame: bytes) -> Any:
        """The message of a frame.

        Raises:
            DamagedFrame: the checksum is wrong.
            ProtocolError: the frame has another version or is too large, or is no message that this side accepts.
        """
        if not HEADER.size < len(frame) <= MAX_BYTES:
            raise ProtocolError(f"A frame has {len(frame)} bytes; at most {MAX_BYTES} bytes are allowed.")
        magic, version, checksum = HEADER.unpack_from(frame)
        payload = frame[HEADER.size :]
        if zlib.crc32(payload, 0) != checksum:
            raise DamagedFrame("The checksum of a frame is wrong.")
        if magic != MAGIC:
            raise ProtocolError("The peer sent bytes that are no message.")
        if version != VERSION:
            raise ProtocolError(f"The peer speaks version {version} of the protocol; allowed is version {VERSION}.")
        return self._codec.decode([payload])
