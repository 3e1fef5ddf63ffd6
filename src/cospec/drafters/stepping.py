"""Drafting one token at a time, so that several drafters can continue from the same token (CoSine section 4.2).

A drafter that offers a ``Stepper`` is opened on a batch of sequences, gives logits behind what is committed, and is
then fed one token after the other, which somebody else chose. What it was fed meets what was committed in ``commit``.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

from torch import Tensor

from cospec.batches import Segment, TokenBatch
from cospec.drafters.following import Follower
from cospec.drafters.vocabulary import SharedVocabulary
from cospec.protocols import Model
from cospec.sampling import likeliest
from cospec.types import Budget, Commit, Context

LOOKBACK = 32  # known tokens at the end of a backlog that the drafter's own choice is compared with


@dataclass(frozen=True, slots=True)
class Opening:
    """What a stepper says behind the committed tokens.

    Attributes:
        ids: the sequences that it has room for, in the order they were given.
        logits: ``[len(ids), V]``.
        agreed: for sequences where it read known tokens that it had not guessed at before, how many of them are its
            likeliest, and of how many. It comes with catching up, so it costs no forward of its own.
    """

    ids: tuple[str, ...]
    logits: Tensor
    agreed: Mapping[str, tuple[int, int]]


class Stepper(Protocol):
    """A drafter that can be led token by token."""

    def open(self, contexts: Seq[Context], depths: Seq[int]) -> Opening | None:
        """Catch up on the committed tokens and make room for ``depths`` more; None when there is room for nobody."""

    def feed(self, ids: Seq[str], tokens: Seq[int]) -> Tensor:
        """Logits ``[len(ids), V]`` behind one more token of each of the sequences, which were opened before."""

    def commit(self, commits: Seq[Commit]) -> None:
        """Keep of what was fed the part that was committed. Unknown ids are ignored."""

    def free(self, ids: Seq[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""


@runtime_checkable
class Steps(Protocol):
    """A drafter that offers a stepper, to be used instead of its ``propose``."""

    def stepper(self) -> Stepper | None:
        """A stepper with a state of its own; None where it cannot be led after all, and proposes by itself."""


class ModelStepper:
    """Leads a causal language model with a KV cache, whose token ids are the target's."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._follower = Follower(model, SharedVocabulary())

    def open(self, contexts: Seq[Context], depths: Seq[int]) -> Opening | None:
        """One forward over what was committed since, all sequences together."""
        fitting = [context for context, depth in zip(contexts, depths, strict=True) if self._fits(context, depth)]
        if not fitting:
            return None
        segments = [_looking_back(segment) for segment in self._follower.backlog(fitting).segments]
        logits = self.model.forward(TokenBatch(tuple(segments)))
        last, first = [], 0
        for segment in segments:
            first += len(segment.tokens) - segment.logits_from
            last.append(first - 1)
        for context in fitting:
            self._follower.keep(context, (), ())
        ids = tuple(context.id for context in fitting)
        if len(last) == len(logits):
            return Opening(ids, logits, {})
        return Opening(ids, logits[last], _agreement(segments, likeliest(logits)))

    def feed(self, ids: Seq[str], tokens: Seq[int]) -> Tensor:
        """One forward of one token for each sequence."""
        pairs = zip(ids, tokens, strict=True)
        return self.model.forward(
            TokenBatch(tuple(Segment(id, self._follower.extend(id, token), (token,)) for id, token in pairs))
        )

    def commit(self, commits: Seq[Commit]) -> None:
        """What was fed and not committed is overwritten by the next opening."""
        self._follower.commit(commits)

    def free(self, ids: Seq[str]) -> None:
        """Forget sequences and give back their cache."""
        self._follower.free(ids)

    def _fits(self, context: Context, depth: int) -> bool:
        """Whether there is room for all of the spine; a drafter that cannot go all the way does not begin."""
        budget = self._follower.open(context, Budget(depth, depth))
        return budget is not None and budget.depth == depth


def _looking_back(segment: Segment) -> Segment:
    return replace(segment, logits_from=max(0, len(segment.tokens) - 1 - LOOKBACK))


def _agreement(segments: Seq[Segment], best: Seq[int | None]) -> dict[str, tuple[int, int]]:
    """How many known tokens were the likeliest behind the row before them, and of how many."""
    found, first = {}, 0
    for segment in segments:
        known = segment.tokens[segment.logits_from + 1 :]
        if known:
            chosen = best[first : first + len(known)]
            found[segment.id] = (sum(map(int.__eq__, known, (-1 if x is None else x for x in chosen))), len(known))
        first += len(known) + 1
    return found
