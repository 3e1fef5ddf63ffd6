"""Several models in the place of one target: synchronized caches, and one verification of a drafter's drafts."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from cospec.acceptance.python_verification import VerifyTask
from cospec.core.interfaces import Blend, BlockManager
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.submitted_step import FinishedFuture
from cospec.core.types import Commit, Draft, RequestState, ScheduledRequest, StepOutput
from cospec.ensemble.ensemble import EnsembleDecoder

Fed = Callable[[str, int], int]
"""Maps a sequence's id and a model's index to the number of tokens with computed entries in the model's cache."""


class EnsembleKVManager:
    """The KV caches of several models as one ``BlockManager``: a request has room in all caches or in none."""

    def __init__(
        self, pools: Sequence[BlockManager], fed: Fed, drop: Callable[[Sequence[str]], None] | None = None
    ) -> None:
        self._pools, self._fed, self._drop = tuple(pools), fed, drop

    @property
    def usage(self) -> float:
        """Usage of the fullest cache."""
        return max(pool.usage for pool in self._pools)

    @property
    def capacity(self) -> int:
        """Tokens that fit in every cache."""
        return min(pool.capacity for pool in self._pools)

    def open_sequence(self, id: str, tokens: Sequence[int]) -> int:
        """Open a sequence in all caches with the longest prefix that every cache has."""
        while True:
            found = [pool.open_sequence(id, tokens) for pool in self._pools]
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
        """Reserve room in all caches; if one cache is full, the sequence keeps its room in the others."""
        return all([pool.allocate(id, length) for pool in self._pools])

    def forget_contents(self) -> None:
        """Offer no page of any member for reuse."""
        for pool in self._pools:
            pool.forget_contents()

    def cache_blocks(self, id: str, tokens: Sequence[int], computed: int) -> None:
        """Offer what each model has computed of ``tokens[:computed]``."""
        for model, pool in enumerate(self._pools):
            pool.cache_blocks(id, tokens, min(computed, self._fed(id, model)))

    def free(self, id: str) -> None:
        """Release a sequence's pages, and drop its proposals."""
        if self._drop is not None:
            self._drop([id])
        for pool in self._pools:
            pool.free(id)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if one of the caches is inconsistent."""
        for pool in self._pools:
            pool.check_integrity()


@dataclass(slots=True)
class _BlendGroup:
    """The sequences of one blend in one step; ``member_logits`` holds the logits ``[R, V]`` of each member."""

    blend: Blend
    tasks: Sequence[VerifyTask]
    slices: Sequence[SequenceSlice]
    member_logits: list[Tensor] = field(default_factory=list)

    @property
    def rows(self) -> int:
        return self.tasks[-1].last


class EnsembleVerifier:
    """Scores drafts with every member of a sequence's blend and verifies them. Implements ``core.interfaces.Verifier``.

    Every execution mode for one target runs on several models through this class.
    """

    max_in_flight: ClassVar[int] = 1

    def __init__(self, decoder: EnsembleDecoder) -> None:
        self._decoder = decoder
        self.pages = EnsembleKVManager([model.pages for model in decoder.models], self._fed)

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        """Return the acceptance method of the sequence's request."""
        return self._decoder.verifier.acceptance_method(sequence)

    def submit(
        self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]
    ) -> FinishedFuture[list[StepOutput]]:
        """Return one output per entry, in order; the result is there at once.

        Each model runs once for all sequences whose blend includes it. The sequences of one blend are verified
        together.
        """
        with self._decoder.limit_torch_threads():
            groups = self._group(entries, drafts)
            for place, model in enumerate(self._decoder.models):
                reading = [group for group in groups if place in group.blend.members]
                if reading:
                    slices = tuple(part for group in reading for part in group.slices)
                    rows = model.forward(TokenBatch(slices)).split([group.rows for group in reading])
                    for group, own in zip(reading, rows, strict=True):
                        group.member_logits.append(own)
            found = {output.entry.sequence.id: output for group in groups for output in self._verify(group)}
        return FinishedFuture([found[entry.sequence.id] for entry in entries])

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep accepted nodes in the caches of the models that were fed them."""
        uses = self._decoder.blends.uses
        for place, model in enumerate(self._decoder.models):
            model.commit([commit for commit in commits if uses(commit.id, place)])

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        self._decoder.free(ids)

    def _fed(self, id: str, model: int) -> int:
        """Return the computed tokens of a sequence in a model: all or none, because a blend includes a model or does
        not.
        """
        return sys.maxsize if self._decoder.blends.uses(id, model) else 0

    def _group(self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]) -> list[_BlendGroup]:
        groups: dict[int, tuple[Blend, list[ScheduledRequest]]] = {}
        for entry in entries:
            blend = self._decoder.blends.of(entry.sequence.request)
            groups.setdefault(id(blend), (blend, []))[1].append(entry)
        return [_BlendGroup(blend, *self._decoder.verifier.lay_out(own, drafts)) for blend, own in groups.values()]

    def _verify(self, group: _BlendGroup) -> list[StepOutput]:
        """Verify one group; without rows the step only computes known tokens, and there is nothing to blend."""
        if group.rows:
            outputs = self._decoder.verify(group.blend, group.tasks, group.member_logits)
        else:
            outputs = [StepOutput(task.entry, None, None) for task in group.tasks]
        calls = {self._decoder.names[member]: 1 for member in group.blend.members}
        return [output._replace(model_calls=calls) for output in outputs]
