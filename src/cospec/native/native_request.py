"""What the native library reads of a request in every step, and why a part of a request's step runs in Python."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from cospec.core.plugin_base import AcceptanceMethod, Drafter, SoleDrafter, context_of
from cospec.core.types import DraftBudget, DraftContext, Request, RequestState, ScheduledRequest
from cospec.native.acceptance import supports, words_of
from cospec.native.native_drafter import NativeDrafter, NativeLookup, NativeModel
from cospec.rng.random_streams import StreamKind

EDITED = "logits processors, such as penalties, bias or masks"
PROMPT_LOGPROBS = "prompt_logprobs"
NO_ROOM = "no room in the drafter's KV cache"
NO_FORWARD = "the drafter has no native forward"


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """What the library reads of a request: the same in every step.

    Attributes:
        edits: whether Python edits the logits before verification.
        draft_reason: why the library cannot draft for the request; None where the library can.
        verifies: whether the library verifies drafts by the request's acceptance method.
        words: ``AcceptanceParams`` in ``csrc/spec/verify.h``.
        stops: ids of stop tokens.
        max_len: known tokens at which the request ends.
        stream_kind: the random stream of drafts.
    """

    request: Request
    edits: bool
    draft_reason: str | None
    verifies: bool
    words: bytes
    stops: array[int]
    max_len: int
    stream_kind: StreamKind

    def tokens_ahead(self, sequence: RequestState, steps: int, longest: int) -> int:
        """Return the most tokens that a call needs in the drafter's cache after the known tokens.

        No draft goes beyond the end of its request. All requests of a call have room for its longest draft.
        """
        return min(steps * (1 + longest), self.max_len - len(sequence.tokens) + longest)

    @classmethod
    def of(cls, request: Request, method: AcceptanceMethod) -> NativeRequest:
        """Read a request that its input processor resolved."""
        params, method_reason = request.sampling, supports(method)
        assert params.max_tokens is not None, "requests are resolved before they are scheduled"
        own = "a policy of its own" if request.speculation.policy is not None else None
        return cls(
            request,
            params.edits_logits,
            own or method_reason,
            method_reason is None,
            words_of(request, method),
            array("q", params.stop_token_ids),
            len(request.prompt) + params.max_tokens,
            method.stream_kind,
        )


class NativeDrafters:
    """The drafters that the library can run: one drafter, or those of a pool that draft alone for a request.

    Attributes:
        reason: why the library drafts for no request; empty where the library may draft.
    """

    def __init__(self, drafter: Drafter | None, whole: bool, member: NativeDrafter | None = None) -> None:
        """Read a drafter.

        Args:
            whole: whether the policy keeps drafts whole.
            member: in place of a drafter, the member of an ensemble that proposes to the target.
        """
        self._drafter, self._member = drafter, member
        self._known: dict[str, NativeDrafter | str] = {}
        self.reason = "" if whole else "the policy cuts drafts"
        if drafter is None and member is None:
            self.reason = "no drafter"
        elif drafter is not None and whole and drafter.is_pool:
            self.reason = drafter.never_alone
        elif drafter is not None and whole:
            one = self._read(SoleDrafter(drafter.name, drafter))
            self.reason = one if isinstance(one, str) else ""

    @property
    def chooses(self) -> bool:
        """Whether requests have different drafters, which a pool chooses."""
        return self._drafter is not None and self._drafter.is_pool

    def of(self, sequence: RequestState, budget: DraftBudget, stream_kind: StreamKind) -> NativeDrafter | str:
        """Return the drafter of a request's next step, or why the library cannot draft. Pure."""
        if self._member is not None:
            return self._member
        if self._drafter is None or self.reason:
            return self.reason
        if not self.chooses:
            return self._known[self._drafter.name]
        sole = self._drafter.drafts_alone(context_of(sequence, stream_kind), budget)
        return sole if isinstance(sole, str) else self._read(sole)

    def prepare(self, entries: Sequence[ScheduledRequest], stream_kinds: Sequence[StreamKind]) -> None:
        """Let the pool score known tokens of requests before ``of`` is asked."""
        assert self._drafter is not None, "a pool chooses"
        self._drafter.prepare(*_draft_inputs(entries, stream_kinds))

    def begin(self, entries: Sequence[ScheduledRequest], stream_kinds: Sequence[StreamKind]) -> None:
        """Tell the pool for which requests the library drafts now."""
        assert self._drafter is not None, "a pool chooses"
        self._drafter.begin_native(*_draft_inputs(entries, stream_kinds))

    def _read(self, sole: SoleDrafter) -> NativeDrafter | str:
        found = self._known.get(sole.name)
        if found is None:
            found = self._known[sole.name] = _native_drafter(sole, self.chooses)
        return found


def _native_drafter(sole: SoleDrafter, chains: bool) -> NativeDrafter | str:
    """Return what runs a drafter in the library, or why nothing does.

    Args:
        chains: whether the drafter drafts chains whatever the budget's shape.
    """
    drafter = sole.drafter
    if drafter.native_lookups is not None:
        return NativeLookup(drafter.native_lookups, sole.name)
    cache = drafter.draft_kv_cache
    forward = None if cache is None else cache.model.native_forward
    return NO_FORWARD if cache is None or forward is None else NativeModel(cache, forward, sole.name, chains)


def _draft_inputs(
    entries: Sequence[ScheduledRequest], stream_kinds: Sequence[StreamKind]
) -> tuple[list[DraftContext], list[DraftBudget]]:
    contexts = [context_of(entry.sequence, kind) for entry, kind in zip(entries, stream_kinds, strict=True)]
    return contexts, [entry.budget for entry in entries]
