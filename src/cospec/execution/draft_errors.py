"""Isolate errors of a drafter: an error in one request ends this request alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cospec.core.types import Draft, DraftBudget, DraftContext, ScheduledRequest, StepOutput
from cospec.errors import DrafterLost, failure

Call = Callable[..., Any]
"""Calls a method of the drafter by name with arguments, and waits for the result."""

log = logging.getLogger(__name__)


def propose_one_by_one(
    call: Call, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]
) -> tuple[list[Draft], dict[str, str]]:
    """Repeat a failed batch one request at a time; returns the drafts, and an error text by id for each failing
    request.

    The drafter forgets the batch first, because an error leaves its state undefined. Repeated draws use the same random
    numbers. No draft of the first call was used, so no number serves twice.

    Raises:
        DrafterLost, TimeoutError: the drafter is lost, or answers too late; no request is at fault.
    """
    call("free", [context.id for context in contexts])
    drafts, failures = list[Draft](), dict[str, str]()
    for context, budget in zip(contexts, budgets, strict=True):
        try:
            drafts += call("propose", [context], [budget])
        except (DrafterLost, TimeoutError):
            raise
        except Exception as error:  # the other requests are still drafted
            log.exception("drafting failed for request %s", context.id)
            failures[context.id] = failure(error)
            call("free", [context.id])
    return drafts, failures


def failed_outputs(entries: Sequence[ScheduledRequest], failures: Mapping[str, str]) -> list[StepOutput]:
    """Return an output with an error for each entry whose drafting failed; ``failures`` has the errors by id."""
    failed = [entry for entry in entries if entry.sequence.id in failures]
    return [StepOutput(entry, None, None, error=failures[entry.sequence.id]) for entry in failed]
