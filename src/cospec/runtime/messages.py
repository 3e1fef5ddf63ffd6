"""The messages between processes of the project.

A server sends ``EngineCommand`` and gets ``EngineReply``. An engine sends ``DrafterCommand`` to a drafter elsewhere and
gets ``DrafterReply``. Both conversations begin with ``Hello`` in each direction, then ``Start``.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import msgspec

from cospec.core.drafter_capabilities import DrafterCapabilities, TokenScores
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, Event, Request
from cospec.errors import InvalidInput
from cospec.logits_processors.states import RequestProcessors
from cospec.rng.random_streams import StreamKind
from cospec.runtime.codec import ProtocolError
from cospec.sampling_params import SamplingParams

log = logging.getLogger(__name__)

VERSION = 10  # of all messages; a new message, or a change to any field, changes the number


class ProtocolMessage(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages."""


class Hello(ProtocolMessage, frozen=True):
    """The first message in each direction."""

    version: int


class Start(ProtocolMessage, frozen=True):
    """Names what a new process builds: the encoded arguments of the function that its command line names."""

    arguments: tuple[msgspec.Raw, ...]


class Failed(ProtocolMessage, frozen=True):
    """The engine or the drafter could not be built; one sentence."""

    message: str


class EngineInfo(msgspec.Struct, frozen=True):
    """What a server must know of an engine.

    Attributes:
        model_name: the name that requests ask for.
        tokenizer_path: folder or hub name of the tokenizer.
    """

    model_name: str
    tokenizer_path: str
    max_model_len: int
    vocab_size: int


class Submit(ProtocolMessage, frozen=True):
    """Requests to be taken on."""

    requests: tuple[Request, ...]


class Abort(ProtocolMessage, frozen=True):
    """Requests to be dropped; unknown ids are ignored."""

    ids: tuple[str, ...]


class Measure(ProtocolMessage, frozen=True):
    """Asks for ``Measured``; answers come in the order of the questions."""


class Stop(ProtocolMessage, frozen=True):
    """Ends the process."""


class Ready(ProtocolMessage, frozen=True):
    """The engine is loaded."""

    info: EngineInfo


class Events(ProtocolMessage, frozen=True):
    """What one step gave."""

    events: tuple[Event, ...]


class Rejected(ProtocolMessage, frozen=True):
    """A request that the engine does not take: the sentence, and the field that the sentence is about."""

    id: str
    message: str
    field: str | None = None


class Measured(ProtocolMessage, frozen=True):
    """``EngineMetrics`` as plain values."""

    metrics: dict[str, Any]


class DrafterInfo(msgspec.Struct, frozen=True):
    """The declared attributes of a drafter, see ``Drafter``.

    Attributes:
        weights: of a pool's drafters at the start; empty for other drafters.
        is_stepwise: its executor answers ``candidates``: one token after each context.
    """

    name: str
    samples: bool
    drafts_ahead: bool
    reads_hidden_states: bool
    learns: bool
    capabilities: DrafterCapabilities
    stream_kinds: frozenset[StreamKind] | None
    member_names: tuple[str, ...] | None
    weights: dict[str, float]
    scores_known_tokens: bool = False
    is_stepwise: bool = False
    drafts_for_outcomes: bool = False
    trusted: bool = True

    @classmethod
    def of(cls, drafter: Drafter) -> DrafterInfo:
        """Read the attributes of ``drafter``."""
        return cls(
            drafter.name,
            drafter.samples,
            drafter.drafts_ahead,
            drafter.reads_hidden_states,
            drafter.learns,
            drafter.capabilities,
            drafter.stream_kinds,
            drafter.member_names,
            dict(drafter.weights()),
            drafter.scores_known_tokens,
            drafts_for_outcomes=drafter.drafts_for_outcomes,
            trusted=drafter.trusted,
        )


class ContextStart(msgspec.Struct, frozen=True, array_like=True):
    """The part of a ``DraftContext`` that stays the same for all proposals of a sequence."""

    prompt_len: int
    sampling: SamplingParams
    drafters: tuple[str, ...] | None


class ContextUpdate(msgspec.Struct, frozen=True, array_like=True):
    """A ``DraftContext`` as its difference from the previous context of the same sequence.

    Attributes:
        base: tokens of the previous context that this context begins with.
        tokens: the tokens after ``base``.
        start: present where the receiver does not know the sequence.
    """

    id: str
    base: int
    tokens: Sequence[int]
    seed: int
    stream_kind: StreamKind
    assumed: int
    start: ContextStart | None


class Propose(ProtocolMessage, frozen=True):
    """Asks for drafts; ``Drafts`` with the same number answers."""

    number: int
    contexts: list[ContextUpdate]
    budgets: list[DraftBudget]


class Score(ProtocolMessage, frozen=True):
    """Asks for scores of the latest known tokens; ``Scores`` with the same number answers."""

    number: int
    contexts: list[ContextUpdate]


class Commits(ProtocolMessage, frozen=True):
    """What sequences gained in one step. No answer."""

    commits: list[Commit]


class Free(ProtocolMessage, frozen=True):
    """Sequences to be forgotten. No answer."""

    ids: list[str]


class DrafterReady(ProtocolMessage, frozen=True):
    """The drafter is built."""

    info: DrafterInfo


class Weights(ProtocolMessage, frozen=True):
    """The weight of each drafter of a pool, by name."""

    weights: dict[str, float]


class Drafts(ProtocolMessage, frozen=True):
    """Answers the ``Propose`` of that number.

    Attributes:
        busy: seconds that the drafter has worked since its start.
    """

    number: int
    drafts: list[Draft]
    busy: float


class Scores(ProtocolMessage, frozen=True):
    """Answers the ``Score`` of that number; ``busy`` as in ``Drafts``."""

    number: int
    scores: dict[str, TokenScores]
    busy: float


EngineCommand = Start | Submit | Abort | Measure | Stop
EngineReply = Ready | Failed | Events | Rejected | Measured
DrafterCommand = Start | Propose | Score | Commits | Free
DrafterReply = DrafterReady | Failed | Weights | Drafts | Scores


def check_version(message: Any) -> None:
    """Raises ``ProtocolError`` unless the first message of a peer names this ``VERSION``."""
    if not isinstance(message, Hello):
        raise ProtocolError("A connection begins with another message than Hello.")
    if message.version != VERSION:
        raise ProtocolError(
            f"The peer speaks version {message.version} of the protocol; this process speaks version {VERSION}."
        )


class ContextEncoder:
    """Contexts to updates, which hold what changed since the previous context of a sequence."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[int, SamplingParams]] = {}  # committed tokens and parameters, by sequence

    def encode(self, context: DraftContext) -> ContextUpdate:
        """The update. The receiver must get all updates in the order of these calls."""
        base, sampling = self._sent.get(context.id, (0, None))
        start = None
        if sampling is not context.sampling or base > context.committed_len:
            base, start = 0, ContextStart(context.prompt_len, context.sampling, context.drafters)
        self._sent[context.id] = context.committed_len, context.sampling
        rest = context.seed, context.stream_kind, context.assumed, start
        return ContextUpdate(context.id, base, context.tokens[base:], *rest)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        for id in ids:
            self._sent.pop(id, None)


class ContextDecoder:
    """Updates back to contexts."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[list[int], ContextStart, RequestProcessors]] = {}

    def decode(self, update: ContextUpdate) -> DraftContext:
        """The context.

        Raises:
            ProtocolError: the update continues a sequence, or tokens, that never came.
        """
        known, start, processors = self._known.get(update.id, ([], None, None))
        start = update.start or start
        if start is None or not 0 <= update.base <= len(known):
            raise ProtocolError(f"Sequence {update.id!r} goes on after {update.base} tokens that never came.")
        tokens = [*known[: update.base], *update.tokens]
        if processors is None or update.start is not None:
            processors = request_processors(start.sampling, tokens[: start.prompt_len])
        self._known[update.id] = tokens, start, processors
        rest = update.seed, update.stream_kind, update.assumed, start.drafters, processors
        return DraftContext(update.id, tokens, start.prompt_len, start.sampling, *rest)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        for id in ids:
            self._known.pop(id, None)


def request_processors(params: SamplingParams, prompt: Sequence[int]) -> RequestProcessors:
    """The request's logits processors; none if this process does not know all. Drafts then follow other distributions,
    which costs acceptance and changes no output.
    """
    try:
        return RequestProcessors.of(params, prompt)
    except InvalidInput as error:
        log.warning("a request is drafted for without its logits processors: %s", error)
        return RequestProcessors((), prompt)
