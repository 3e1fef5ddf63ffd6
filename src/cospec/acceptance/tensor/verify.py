"""Verification on the device of the logits; only results go to the host.

The results are those of ``acceptance.python_verification``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module

import torch
from torch import Tensor

from cospec.acceptance.match import Match
from cospec.acceptance.python_verification import NOT_FINITE, VerifiedDraft, VerifyTask, edited, uses_finite_rows
from cospec.acceptance.tensor.batch import batch_of
from cospec.acceptance.tensor.methods import TensorForm
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.tree import path_to
from cospec.core.types import VerifyResult

NO_FORM = "the acceptance method has no tensor form"


def supports(acceptance_method: AcceptanceMethod) -> str | None:
    """Why tensors cannot verify drafts by the method; None where they can. Without a draft all methods are the same."""
    return NO_FORM if acceptance_method.tensor_form is None else None


def verify_drafts(
    tasks: Sequence[VerifyTask], acceptance_methods: Sequence[AcceptanceMethod], logits: Tensor
) -> list[VerifiedDraft]:
    """See ``acceptance.python_verification.verify_drafts``.

    Args:
        tasks: with drafts that ``supports`` has no reason against.
    """
    logits, raised = edited(tasks, logits)
    finite = logits.amax(-1).isfinite()
    groups: dict[tuple[str, bool], list[int]] = {}
    for number, (task, method) in enumerate(zip(tasks, acceptance_methods, strict=True)):
        if task.count:
            groups.setdefault(_form_of(task, method), []).append(number)
    results = [finite.long()]
    for (form, distributions), members in groups.items():
        batch = batch_of([tasks[number] for number in members], logits, finite, distributions)
        results.append(_load(form)(batch).flatten())
    words = torch.cat(results).tolist()  # the only transfer to the host
    verdicts: list[VerifiedDraft] = [VerifyResult((), None, bonus=False)] * len(tasks)
    place = len(logits)
    for members in groups.values():
        for number in members:
            verdicts[number] = _verdict(tasks[number], *words[place : place + 2])
            place += 2
    rows = [0 if each else None for each in words[: len(logits)]]
    return [raised.get(t.entry.sequence.id, _checked(t, v, rows)) for t, v in zip(tasks, verdicts, strict=True)]


def _form_of(task: VerifyTask, method: AcceptanceMethod) -> tuple[str, bool]:
    """Return the name of the form, and whether the form reads distributions."""
    greedy, form = task.entry.sequence.request.sampling.greedy, Match.tensor_form
    if task.draft is not None:
        form, greedy = method.tensor_form, greedy and not method.needs_probs
    assert form is not None, "``supports`` was not asked"
    return form, not greedy


def _verdict(task: VerifyTask, end: int, token: int) -> VerifyResult | str:
    if task.draft is None:
        return VerifyResult((), token, bonus=False) if token >= 0 else NOT_FINITE
    path, bonus = tuple(path_to(task.draft.parents, end)), end not in task.draft.parents
    if end + 1 >= task.count:
        return VerifyResult(path, None, bonus)
    return VerifyResult(path, token, bonus) if token >= 0 else NOT_FINITE


def _checked(task: VerifyTask, verdict: VerifiedDraft, rows: Sequence[int | None]) -> VerifiedDraft:
    return verdict if isinstance(verdict, str) or uses_finite_rows(task, verdict, rows) else NOT_FINITE


@cache
def _load(form: str) -> TensorForm:
    """Import the function that ``module:name`` names."""
    module, _, name = form.partition(":")
    found: TensorForm = getattr(import_module(module), name)
    return found
