"""Several models in one verifier's place: caches kept in step, and all score what another drafter proposed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from cospec.acceptance.reference import VerifyTask
from cospec.core.interfaces import Blend, BlockManager
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.plugins import AcceptanceMethod
from cospec.core.types import Commit, Draft, RequestState, ScheduledRequest, StepOutput
from cospec.ensemble.ensemble import EnsembleDecoder

Fed = Callable[[str, int], int]
"""Up to which of a sequence's tokens, by its id, a model, by its place, has what was computed in its cache."""


class EnsembleKVManager:
    """The KV caches of several models, used as one ``BlockManager``: a request has room in all caches or in none."""

    def __init__(
        self, pools: Sequence[BlockManager], fed: Fed, drop: Callable[[Sequence[str]], None] | None = None
    ) -> None:
        self._pools, self._fed, self._drop = tuple(pools), fed, drop

    @property
    def usage(self) -> float:
        """Of the fullest cache."""
        return max(pool.usage for pool in self._pools)

    @property
    def capacity(self) -> int:
        """Tokens that fit in every cache."""
        return min(pool.capacity for pool in self._pools)

    def match_prefix(self, id: str, tokens: Sequence[int]) -> int:
        """Open a sequence everywhere with the longest prefix that is in every cache."""
        while True:
            found = [pool.match_prefix(id, tokens) for pool in self._pools]
            if min(found) == max(found):
                return found[0]
            for pool in self._pools:
                pool.free(id)
            tokens = tokens[: min(found) + 1]

    def can_allocate(self, lengths: Iterable[tuple[str, int]]) -> bool:
        """Whether every model has the room."""
        asked = list(lengths)
        return all(pool.can_allocate(asked) for pool in self._pools)

    def allocate(self, id: str, length: int) -> bool:
        """Make room everywhere; where one cache has none, the room in the others stays with the sequence."""
        return all([pool.allocate(id, length) for pool in self._pools])

    def cache_blocks(self, id: str, tokens: Sequence[int], computed: int) -> None:
        """Offer what each model has computed of ``tokens[:computed]``."""
        for model, pool in enumerate(self._pools):
            pool.cache_blocks(id, tokens, min(computed, self._fed(id, model)))

    def free(self, id: str) -> None:
        """Give back a sequence's pages, and forget what stood ahead of it."""
        if self._drop is not None:
            self._drop([id])
        for pool in self._pools:
            pool.free(id)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when one of the caches is not in order."""
        for pool in self._pools:
            pool.check_integrity()


@dataclass(slots=True)
class _Part:
    """The sequences of one blend in one round; ``queues`` are the logits of each of its members."""

    blend: Blend
    tasks: Sequence[VerifyTask]
    segments: Sequence[SequenceSlice]
    queues: list[Tensor] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.tasks[-1].last


class EnsembleVerifier:
    """Scores drafts with every member of a sequence's blend and judges them by it. Implements ``protocols.Verifier``.

    With it every round that orders a drafter against one target orders it against several.
    """

    def __init__(self, panel: EnsembleDecoder) -> None:
        self._panel = panel
        self.pages = EnsembleKVManager([model.pages for model in panel.models], self._fed)

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        """The rule of the sequence's request."""
        return self._panel.verifier.acceptance_method(sequence)

    def verify(self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]) -> list[StepOutput]:
        """One call of each model, for all sequences that it has a part in; the sequences of one blend are judged
        together."""
        with self._panel.working():
            parts = self._parts(entries, drafts)
            for place, model in enumerate(self._panel.models):
                reading = [part for part in parts if place in part.blend.members]
                if reading:
                    segments = tuple(segment for part in reading for segment in part.segments)
                    rows = model.forward(TokenBatch(segments)).split([part.rows for part in reading])
                    for part, own in zip(reading, rows, strict=True):
                        part.queues.append(own)
            found = {outcome.entry.sequence.id: outcome for part in parts for outcome in self._judge(part)}
        return [found[entry.sequence.id] for entry in entries]

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep accepted nodes in the caches of the models that were fed them."""
        reads = self._panel.blends.reads
        for place, model in enumerate(self._panel.models):
            model.commit([commit for commit in commits if reads(commit.id, place)])

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        self._panel.free(ids)

    def _fed(self, id: str, model: int) -> int:
        """All that was computed, or nothing: a model has a part in all of a sequence or in none of it."""
        return sys.maxsize if self._panel.blends.reads(id, model) else 0

    def _parts(self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]) -> list[_Part]:
        groups: dict[int, tuple[Blend, list[ScheduledRequest]]] = {}
        for entry in entries:
            blend = self._panel.blends.of(entry.sequence.request)
            groups.setdefault(id(blend), (blend, []))[1].append(entry)
        return [_Part(blend, *self._panel.verifier.lay_out(own, drafts)) for blend, own in groups.values()]

    def _judge(self, part: _Part) -> list[StepOutput]:
        """Where the round only computes known tokens there are no rows, and no blend of them."""
        if part.rows:
            outcomes = self._panel.verify(part.blend, part.tasks, part.queues)
        else:
            outcomes = [StepOutput(task.entry, None, None) for task in part.tasks]
        calls = {self._panel.names[member]: 1 for member in part.blend.members}
        return [replace(outcome, model_calls=calls) for outcome in outcomes]
