"""From logits to verdicts: the law at each row that a verdict may need, then each request's rule.

Works on every device and in every precision; where the native library can do it ``cospec.native.verifier`` does.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cospec.core.plugins import AcceptanceMethod
from cospec.core.rng import Floats, RandomStreams, StreamKind, exponential_sample
from cospec.core.sampling import History, RowBlock, edit, likeliest, shaped
from cospec.core.tree import path_to
from cospec.core.types import Draft, ScheduledRequest, TargetProbs, VerifyResult
from cospec.errors import failure

NO_NUMBERS = "The model's logits are not numbers at this prompt."
VerifiedDraft = VerifyResult | str
"""A verdict, or the sentence that says why this request ends without one."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """One entry with its draft, and where its rows stand in the round's logits.

    Attributes:
        first, last: its rows, ``last`` is one behind.
        count: the rows at the end that the draft is judged by: ``N + 1``, or ``N`` where the law behind the last node
            is not known; 0 while known tokens remain to be computed.
    """

    entry: ScheduledRequest
    draft: Draft | None
    first: int
    last: int
    count: int

    @property
    def judged(self) -> slice:
        """The rows that the draft is judged by."""
        return slice(self.last - self.count, self.last)

    @property
    def block(self) -> RowBlock:
        """The judged rows with the draft tokens before each of them."""
        sequence, draft = self.entry.sequence, self.draft
        paths: list[list[int]] = [[]]
        if draft is not None:
            paths += [[draft.tokens[above] for above in path_to(draft.parents, node)] for node in range(self.count - 1)]
        return RowBlock(sequence.request.sampling, History(sequence.tokens, sequence.prompt_len, paths))


def verify_drafts(
    tasks: Sequence[VerifyTask], acceptance_methods: Sequence[AcceptanceMethod], logits: Tensor
) -> list[VerifiedDraft]:
    """The verdict of each task by its own rule, from ``logits [R, V]`` of the law.

    A sentence where the verdict rests on logits that are no numbers, or where the request's own part raises. A task
    without judged rows has the verdict of no token.
    """
    logits, raised = edited(tasks, logits)
    best = likeliest(logits)
    distributions = _laws(tasks, acceptance_methods, logits, best)
    drawn = _drawn(tasks, distributions)
    found: list[VerifiedDraft] = []
    for task, acceptance_method in zip(tasks, acceptance_methods, strict=True):
        id = task.entry.sequence.id
        if id in raised:
            found.append(raised[id])
            continue
        chosen = (drawn[id],) if id in drawn else _greedy(task, best)
        try:
            verdict = _verdict(task, acceptance_method, TargetProbs(chosen, distributions.get(id)))
        except Exception as error:  # the neighbours' verdicts do not depend on this request
            log.exception("request %s could not be judged", id)
            found.append(failure(error))
        else:
            found.append(verdict if _rests_on_numbers(task, verdict, best) else NO_NUMBERS)
    return found


def edited(tasks: Sequence[VerifyTask], logits: Tensor) -> tuple[Tensor, dict[str, str]]:
    """The logits with what requests change about them, and why a request's changes could not be made, by sequence.

    The given tensor is left as it was.
    """
    editing = [task for task in tasks if task.count and task.entry.sequence.request.sampling.edits_logits]
    if not editing:
        return logits, {}
    logits, raised = logits.clone(), dict[str, str]()
    for task in editing:
        try:
            block = task.block
            logits[task.judged] = edit(logits[task.judged], block.params, block.history)
        except Exception as error:  # the neighbours' rows do not depend on this request
            log.exception("the logits of request %s could not be edited", task.entry.sequence.id)
            raised[task.entry.sequence.id] = failure(error)
    return logits, raised


def _verdict(task: VerifyTask, acceptance_method: AcceptanceMethod, scores: TargetProbs) -> VerifyResult:
    request, base = task.entry.sequence.request, len(task.entry.sequence.tokens)
    if not task.count:
        return VerifyResult((), None, bonus=False)
    draws = RandomStreams(request.seed, base)
    if task.draft is None:
        return VerifyResult((), scores.draw(0, base, draws), bonus=False)
    return acceptance_method.verify(task.draft, scores, draws)


def _laws(
    tasks: Sequence[VerifyTask],
    acceptance_methods: Sequence[AcceptanceMethod],
    logits: Tensor,
    best: Sequence[int | None],
) -> dict[str, Floats]:
    """The laws of all sequences whose rule or temperature needs one, from edited logits, by sequence."""
    chosen = [
        task
        for task, acceptance_method in zip(tasks, acceptance_methods, strict=True)
        if task.count and _needs_law(task, acceptance_method)
    ]
    if not chosen:
        return {}
    blocks = [task.block for task in chosen]
    rows = [row for task in chosen for row in range(*task.judged.indices(len(logits)))]
    found = shaped(logits if len(rows) == len(logits) else logits[rows], blocks)
    broken = [place for place, row in enumerate(rows) if best[row] is None]
    if broken:
        found[broken] = 1.0 / found.shape[-1]  # any law will do: nothing behind such a row is committed
    result, start = {}, 0
    for task, block in zip(chosen, blocks, strict=True):
        result[task.entry.sequence.id] = found[start : start + block.rows]
        start += block.rows
    return result


def _needs_law(task: VerifyTask, acceptance_method: AcceptanceMethod) -> bool:
    return not task.entry.sequence.request.sampling.greedy or (task.draft is not None and acceptance_method.needs_probs)


def _greedy(task: VerifyTask, best: Sequence[int | None]) -> tuple[int, ...] | None:
    """Each judged row's token under a greedy law, None for other laws. Rows that are no numbers give any token."""
    if not task.entry.sequence.request.sampling.greedy or not task.count:
        return None
    return tuple(token or 0 for token in best[task.judged])


def _drawn(tasks: Sequence[VerifyTask], distributions: Mapping[str, Floats]) -> dict[str, int]:
    """The next tokens of the sequences that have a law and no draft, by sequence: one race for all."""
    found = {task.entry.sequence.id: task.entry.sequence for task in tasks if task.draft is None}
    drawing = [(id, sequence) for id, sequence in found.items() if id in distributions]
    if not drawing:
        return {}
    weights = np.concatenate([distributions[id] for id, _ in drawing])
    bases = [
        (RandomStreams(sequence.request.seed, len(sequence.tokens)), len(sequence.tokens)) for _, sequence in drawing
    ]
    tokens = exponential_sample(weights, [draws.stream(base, StreamKind.TARGET) for draws, base in bases])
    return {id: token for (id, _), token in zip(drawing, tokens, strict=True)}


def _rests_on_numbers(task: VerifyTask, verdict: VerifyResult, best: Sequence[int | None]) -> bool:
    """Rows of rejected nodes do not count: what a drafter makes up must not end a request."""
    rows = [*range(task.first, min(task.judged.start + 1, task.last))]
    rows += [task.judged.start + 1 + node for node in verdict.path]
    return all(best[row] is not None for row in rows if row < task.last)
