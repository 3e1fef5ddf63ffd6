"""What the native library reads of a request in every step, and why a part of a request's step runs in Python."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from cospec.core.interfaces import NativeForward
from cospec.core.plugin_base import AcceptanceMethod, Drafter
from cospec.core.types import Request, ScheduledRequest
from cospec.drafters.draft_kv_cache import CATCH_UP_TOKENS
from cospec.drafters.interfaces import DraftCache
from cospec.native.verifier import supports, words_of

EDITED = "logits processors, such as penalties, bias or masks"
PROMPT_LOGPROBS = "prompt_logprobs"
TREE = "tree draft"
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
    stream_kind: int

    @classmethod
    def of(cls, request: Request, method: AcceptanceMethod) -> NativeRequest:
        """Read a request that its input processor resolved."""
        params, method_reason = request.sampling, supports(method)
        assert params.max_tokens is not None, "requests are resolved before they are scheduled"
        cut = "truncated sampling" if params.truncates and not params.greedy else None
        own = "a policy of its own" if request.speculation.policy is not None else None
        return cls(
            request,
            params.edits_logits,
            cut or own or method_reason,
            method_reason is None,
            words_of(request, method),
            array("q", params.stop_token_ids),
            len(request.prompt) + params.max_tokens,
            method.stream_kind,
        )


@dataclass(frozen=True, slots=True)
class NativeDrafter:
    """A drafter that the library runs: its cache, its forward and its name."""

    kv_cache: DraftCache
    forward: NativeForward
    name: str

    def reason_against(self, entry: ScheduledRequest, ahead: int) -> str | None:
        """Return why the library cannot draft for an entry; None where the library can. Pure.

        Args:
            ahead: tokens after the known tokens that the drafter's cache must have room for.
        """
        sequence, budget, known = entry.sequence, entry.budget, len(entry.sequence.tokens)
        if not budget.is_chain:
            return TREE
        if budget.confident or budget.threshold:
            return "a draft whose length depends on its confidence"
        if self.kv_cache.backlog_len(sequence.id, known) > CATCH_UP_TOKENS:
            return "the drafter has a long backlog"
        return NO_ROOM if known + ahead > self.kv_cache.model.max_len else None


def native_drafter(drafter: Drafter | None, whole: bool) -> NativeDrafter | str:
    """Return the drafter for the library, or the reason why the library cannot run the drafter.

    Args:
        whole: whether the policy keeps drafts whole.
    """
    if drafter is None:
        return "no drafter"
    if not whole:
        return "the policy cuts drafts"
    own = drafter.draft_kv_cache
    forward = None if own is None else own.model.native_forward
    return NO_FORWARD if own is None or forward is None else NativeDrafter(own, forward, drafter.name)
