"""The tokens of requests at a node, and what the verifier knows of these copies.

The verifier sends differences. Updates of an epoch are numbered, so a node notices a lost update, and asks for a new
epoch. A new epoch sends all tokens. Stale and repeated updates are ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cospec.cluster.nodes.wire import TokensUpdate
from cospec.core.types import DraftContext
from cospec.logits_processors.states import RequestProcessors
from cospec.rng.random_streams import StreamKind, derive_seed
from cospec.runtime.messages import ContextStart, request_processors
from cospec.sampling_params import SamplingParams

DRAFT_SEEDS = 1 << 33  # derived seeds from this number on are those of nodes
MOST_COPIES = 4096  # requests at one node


@dataclass(frozen=True, slots=True)
class SentTokens:
    """What the verifier sent of one request."""

    epoch: int
    sequence: int
    committed_len: int
    sampling: SamplingParams


class TokenSender:
    """The verifier's side, for one node: contexts to updates."""

    def __init__(self) -> None:
        self._sent: dict[str, SentTokens] = {}
        self._epochs = 0

    def __contains__(self, id: object) -> bool:
        return id in self._sent

    def update(self, context: DraftContext) -> TokensUpdate:
        """The update that brings a node up to ``context``, if no update was lost."""
        before, start = self._sent.get(context.id), None
        if before is None or before.sampling is not context.sampling or before.committed_len > context.committed_len:
            self._epochs += 1
            before = SentTokens(self._epochs, -1, 0, context.sampling)
            start = ContextStart(context.prompt_len, context.sampling, context.drafters)
        now = SentTokens(before.epoch, before.sequence + 1, context.committed_len, context.sampling)
        self._sent[context.id] = now
        return TokensUpdate(
            context.id,
            now.epoch,
            now.sequence,
            before.committed_len,
            context.tokens[before.committed_len :],
            context.assumed,
            node_seed(context),
            context.stream_kind,
            start,
        )

    def forget(self, ids: Sequence[str]) -> list[str]:
        """The next update of each of these requests begins a new epoch; returns the known ids."""
        return [id for id in ids if self._sent.pop(id, None) is not None]

    def clear(self) -> None:
        """Forget all requests. Numbers of epochs are not used again."""
        self._sent.clear()


def node_seed(context: DraftContext) -> int:
    """The seed that a node may know. Draws that decide on acceptance must stay unknown to what proposes tokens.

    The stream ``TARGET`` needs the seed of the request: a drafter then races with the noise of the target. Under this
    stream no draft changes the output.
    """
    if context.stream_kind is StreamKind.TARGET:
        return context.seed
    return derive_seed(context.seed, DRAFT_SEEDS)


@dataclass(frozen=True, slots=True)
class TokenCopy:
    """The copy of one request at a node."""

    epoch: int
    sequence: int
    tokens: Sequence[int]
    start: ContextStart
    processors: RequestProcessors

    def precedes(self, update: TokensUpdate) -> bool:
        """Whether ``update`` is the next update of the epoch."""
        next_one = self.epoch, self.sequence + 1
        return next_one == (update.epoch, update.sequence) and 0 <= update.base <= len(self.tokens)


class TokenCopies:
    """The node's side: updates to contexts.

    Attributes:
        replaced: requests whose tokens may have changed, and requests that were pushed out; the drafter forgets these.
    """

    def __init__(self, most: int = MOST_COPIES) -> None:
        self.replaced: list[str] = []
        self._copies: dict[str, TokenCopy] = {}
        self._most = most

    def __contains__(self, id: object) -> bool:
        return id in self._copies

    def apply(self, update: TokensUpdate) -> tuple[DraftContext | None, bool]:
        """The context after an update, or None; then whether the verifier has to begin a new epoch."""
        copy = before = self._copies.get(update.id)
        if copy is not None and (update.epoch, update.sequence) <= (copy.epoch, copy.sequence):
            return None, False  # repeated or late
        if update.start is not None:
            tokens = list(update.tokens)
            if update.base or not 0 < update.start.prompt_len <= len(tokens):
                return None, True
            copy = TokenCopy(
                update.epoch,
                update.sequence,
                tokens,
                update.start,
                request_processors(update.start.sampling, tokens[: update.start.prompt_len]),
            )
            if before is not None:
                self.replaced.append(update.id)
            self._make_room()
        elif copy is None or not copy.precedes(update):
            return None, True
        else:
            tokens = [*copy.tokens[: update.base], *update.tokens]
            copy = TokenCopy(copy.epoch, update.sequence, tokens, copy.start, copy.processors)
        if not 0 <= update.assumed < len(copy.tokens):
            return None, True
        self._copies[update.id] = copy
        return self._context(update, copy), False

    def forget(self, ids: Sequence[str]) -> None:
        """Forget requests. Unknown ids are ignored."""
        for id in ids:
            self._copies.pop(id, None)

    def clear(self) -> list[str]:
        """Forget all requests; returns their ids."""
        ids = list(self._copies)
        self._copies.clear()
        return ids

    def _make_room(self) -> None:
        """Push out the oldest requests, whose ``NodeFree`` may have been lost."""
        while len(self._copies) >= self._most:
            oldest = next(iter(self._copies))
            del self._copies[oldest]
            self.replaced.append(oldest)

    def _context(self, update: TokensUpdate, copy: TokenCopy) -> DraftContext:
        return DraftContext(
            update.id,
            copy.tokens,
            copy.start.prompt_len,
            copy.start.sampling,
            update.seed,
            update.stream_kind,
            update.assumed,
            copy.start.drafters,
            copy.processors,
        )
