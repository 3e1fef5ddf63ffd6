"""Acceptance methods in the native library: one call verifies the drafts of all requests of a step.

The results are those of ``cospec.acceptance`` with the distributions of ``cospec.core.sampling``, see
``csrc/spec/verify.cpp``. The library reads a row of logits only where the result depends on the row.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cospec.acceptance.match import Match
from cospec.acceptance.python_verification import NOT_FINITE, VerifiedDraft, VerifyTask, edited, masks_of
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import Request, RequestState, VerifyResult
from cospec.native import library, structs
from cospec.native.library import Source, start
from cospec.rng.random_streams import Floats

_TASK, _PARAMS = structs.packer(structs.VerifyTask, without="params"), structs.packer(structs.AcceptanceParams)
_RESULT_WORDS = structs.words(structs.VerifyResult)
_WORD = 2**64
NO_METHOD = "the acceptance method has no native code"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the library reads of a request: the same in every step."""

    request: Request
    words: bytes


class NativeAcceptance:
    """Verifies by the native library, and keeps the constant fields of each request."""

    def __init__(self) -> None:
        self._asked: dict[str, _Asked] = {}
        self._source: Source | None = None
        self._found = array("q")

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        for id in ids:
            self._asked.pop(id, None)

    def verify(
        self, tasks: Sequence[VerifyTask], method_of: Callable[[RequestState], AcceptanceMethod], logits: Tensor
    ) -> list[VerifiedDraft]:
        """See ``acceptance.python_verification.verify_drafts``.

        Args:
            tasks: with drafts that ``supports`` has no reason against.
            logits: ``[R, V]`` that ``library.reads``.
        """
        asked = [self._read(task.entry.sequence, method_of) for task in tasks]
        editing = [task for task in tasks if not task.entry.sequence.processors.only_masks]
        logits, raised = edited(editing, logits)
        if self._source is None:
            self._source = Source([logits])
        else:
            self._source.turn_to(logits)
        return self._verify(tasks, asked, self._source, raised)

    def verify_by(
        self, tasks: Sequence[VerifyTask], method_of: Callable[[RequestState], AcceptanceMethod], source: Source
    ) -> list[VerifiedDraft]:
        """The same by a blend; the library computes only the rows that the results depend on. No task edits logits."""
        return self._verify(tasks, [self._read(task.entry.sequence, method_of) for task in tasks], source, {})

    def _read(self, sequence: RequestState, method_of: Callable[[RequestState], AcceptanceMethod]) -> _Asked:
        request = sequence.request
        asked = self._asked.get(request.id)
        if asked is None or asked.request is not request:
            acceptance_method = method_of(sequence)
            asked = self._asked[request.id] = _Asked(request, words_of(request, acceptance_method))
        return asked

    def _verify(
        self, tasks: Sequence[VerifyTask], asked: Sequence[_Asked], source: Source, raised: dict[str, str]
    ) -> list[VerifiedDraft]:
        masks, failed = masks_of(tasks, source.shape[1])
        raised |= failed
        cases, nodes = bytearray(), array("q")
        held: list[Floats] = []  # the tasks point to these
        for task, request in zip(tasks, asked, strict=True):
            draft, place, count, q = task.draft, len(nodes), 0, 0
            if draft is not None:
                count = len(draft.tokens)
                nodes.extend(draft.tokens)
                nodes.extend(draft.parents)
                if draft.q is not None:
                    held.append(np.ascontiguousarray(draft.q, dtype=np.float64))
                    q = library.address(held[-1])
            rows = task.first, task.last - task.count, task.count
            own = masks.get(task.entry.sequence.id)
            mask = 0 if own is None else library.address(own)
            cases += _TASK.pack(*rows, place, count, q, mask, len(task.entry.sequence.tokens))
            cases += request.words
        found, paths = self._found, _RESULT_WORDS * len(tasks)
        missing = paths + len(nodes) - len(found)
        if missing > 0:
            found.extend([0] * missing)
        library.cdll().cospec_verify(source.packed, bytes(cases), len(tasks), start(nodes), start(found))
        results: list[VerifiedDraft] = []
        place = 0
        for task in tasks:
            length, token, broken = found[place], found[place + 1], found[place + 3]
            path: tuple[int, ...] = ()
            if task.draft is not None:
                path = tuple(found[paths : paths + length])
                paths += 2 * len(task.draft.tokens)
            results.append(
                NOT_FINITE if broken else VerifyResult(path, None if token < 0 else token, found[place + 2] == 1)
            )
            place += _RESULT_WORDS
        if raised:
            return [raised.get(task.entry.sequence.id, one) for task, one in zip(tasks, results, strict=True)]
        return results


def supports(acceptance_method: AcceptanceMethod) -> str | None:
    """Why the library cannot verify drafts by the method; None where the library can.

    Without a draft all methods are the same.
    """
    return NO_METHOD if acceptance_method.native_id is None else None


def words_of(request: Request, acceptance_method: AcceptanceMethod) -> bytes:
    """``AcceptanceParams`` in ``csrc/spec/verify.h``; ``match`` replaces a method without native code."""
    params, code = (
        request.sampling,
        Match.native_id if acceptance_method.native_id is None else acceptance_method.native_id,
    )
    temperature = 0.0 if params.greedy else params.temperature
    return _PARAMS.pack(code, request.seed % _WORD, temperature, params.top_p, params.min_p, params.top_k)
