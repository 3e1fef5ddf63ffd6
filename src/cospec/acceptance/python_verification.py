"""From logits to verification results, in Python: target distributions first, then each request's acceptance method.

Runs on every device and in every precision. ``cospec.native.acceptance`` replaces it where the native library can.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.sampling import History, RowBlock, edit, likeliest, shaped
from cospec.core.tree import path_to
from cospec.core.types import Draft, ScheduledRequest, TargetProbs, VerifyResult
from cospec.errors import failure
from cospec.logits_processors.bitmask import Bitmask
from cospec.logits_processors.states import ProcessorStates
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind, exponential_sample

NOT_FINITE = "The model's logits are not numbers at this prompt."
VerifiedDraft = VerifyResult | str
"""A verification result, or the error text of a request that ends without a result."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class VerifyTask:
    """One entry with its draft, and the position of its rows in the step's logits.

    Attributes:
        first, last: the range of its rows; ``last`` is exclusive.
        count: rows at the end that verify the draft: ``N + 1``; ``N`` where the distribution after the last node is
            unknown; 0 while known tokens remain to be computed.
    """

    entry: ScheduledRequest
    draft: Draft | None
    first: int
    last: int
    count: int

    @property
    def verified_rows(self) -> slice:
        """The rows that verify the draft."""
        return slice(self.last - self.count, self.last)

    @property
    def states(self) -> list[ProcessorStates]:
        """The states of the request's logits processors before each verified row."""
        block = self.block
        return block.history.states(block.params)[1]

    @property
    def block(self) -> RowBlock:
        """The verified rows, with the draft tokens that precede each row."""
        sequence, draft = self.entry.sequence, self.draft
        paths: list[list[int]] = [[]]
        if draft is not None:
            paths += [[draft.tokens[above] for above in path_to(draft.parents, node)] for node in range(self.count - 1)]
        history = History(sequence.tokens, sequence.prompt_len, paths, sequence.processors)
        return RowBlock(sequence.request.sampling, history)


def verify_drafts(
    tasks: Sequence[VerifyTask], acceptance_methods: Sequence[AcceptanceMethod], logits: Tensor
) -> list[VerifiedDraft]:
    """Return the result of each task by its own acceptance method, from target logits ``[R, V]``.

    An error text replaces the result if the result depends on logits that are not finite, or if the request's own code
    raises. A task without verified rows has a result without tokens.
    """
    logits, raised = edited(tasks, logits)
    best = likeliest(logits)
    distributions = _target_probs(tasks, acceptance_methods, logits, best)
    drawn = _sample(tasks, distributions)
    found: list[VerifiedDraft] = []
    for task, acceptance_method in zip(tasks, acceptance_methods, strict=True):
        id = task.entry.sequence.id
        if id in raised:
            found.append(raised[id])
            continue
        chosen = (drawn[id],) if id in drawn else _greedy(task, best)
        found.append(_verified(task, acceptance_method, TargetProbs(chosen, distributions.get(id)), best))
    return found


def verify_drawn(
    tasks: Sequence[VerifyTask], acceptance_methods: Sequence[AcceptanceMethod], tokens: Sequence[int]
) -> list[VerifiedDraft]:
    """Return the results, as ``verify_drafts``, by drawn tokens ``[R]``, see ``BatchOutput``.

    The acceptance methods have ``reads_draws``.
    """
    finite = [None if token < 0 else token for token in tokens]
    chosen = [TargetProbs(tuple(tokens[task.verified_rows])) for task in tasks]
    return [_verified(*each, finite) for each in zip(tasks, acceptance_methods, chosen, strict=True)]


def _verified(
    task: VerifyTask, acceptance_method: AcceptanceMethod, probs: TargetProbs, best: Sequence[int | None]
) -> VerifiedDraft:
    """Return one result; ``best`` is None for rows of all tasks that are not finite."""
    try:
        result = _verify(task, acceptance_method, probs)
    except Exception as error:  # other requests' results do not depend on this request
        log.exception("request %s could not be verified", task.entry.sequence.id)
        return failure(error)
    return result if uses_finite_rows(task, result, best) else NOT_FINITE


def edited(tasks: Sequence[VerifyTask], logits: Tensor) -> tuple[Tensor, dict[str, str]]:
    """Return the logits after the requests' edits, and error texts by id for edits that failed.

    The given tensor stays unchanged.
    """
    editing = [task for task in tasks if task.count and task.entry.sequence.request.sampling.edits_logits]
    if not editing:
        return logits, {}
    logits, raised = logits.clone(), dict[str, str]()
    for task in editing:
        try:
            block = task.block
            logits[task.verified_rows] = edit(logits[task.verified_rows], block.params, block.history)
        except Exception as error:  # other requests' rows do not depend on this request
            log.exception("the logits of request %s could not be edited", task.entry.sequence.id)
            raised[task.entry.sequence.id] = failure(error)
    return logits, raised


def masks_of(tasks: Sequence[VerifyTask], vocab_size: int) -> tuple[dict[str, Bitmask], dict[str, str]]:
    """Return the masks of requests that have masks and no other processors, by id, and error texts as ``edited``.

    A mask has the shape ``[task.count, ceil(vocab_size / 32)]``.
    """
    found, raised = dict[str, Bitmask](), dict[str, str]()
    for task in tasks:
        processors, id = task.entry.sequence.processors, task.entry.sequence.id
        if not (processors.processors and processors.only_masks and task.count):
            continue
        try:
            masks = processors.masks(task.states, vocab_size)
        except Exception as error:  # other requests' rows do not depend on this request
            log.exception("the masks of request %s could not be made", id)
            raised[id] = failure(error)
        else:
            found |= {} if masks is None else {id: masks}
    return found, raised


def _verify(task: VerifyTask, acceptance_method: AcceptanceMethod, target: TargetProbs) -> VerifyResult:
    request, base = task.entry.sequence.request, len(task.entry.sequence.tokens)
    if not task.count:
        return VerifyResult((), None, bonus=False)
    draws = RandomStreams(request.seed, base)
    if task.draft is None:
        return VerifyResult((), target.draw(0, base, draws), bonus=False)
    return acceptance_method.verify(task.draft, target, draws)


def _target_probs(
    tasks: Sequence[VerifyTask],
    acceptance_methods: Sequence[AcceptanceMethod],
    logits: Tensor,
    best: Sequence[int | None],
) -> dict[str, Floats]:
    """Return target distributions from edited logits, by id, for all sequences whose method or temperature needs
    them."""
    chosen = [
        task
        for task, acceptance_method in zip(tasks, acceptance_methods, strict=True)
        if task.count and _needs_probs(task, acceptance_method)
    ]
    if not chosen:
        return {}
    blocks = [task.block for task in chosen]
    rows = [row for task in chosen for row in range(*task.verified_rows.indices(len(logits)))]
    found = shaped(logits if len(rows) == len(logits) else logits[rows], blocks)
    broken = [place for place, row in enumerate(rows) if best[row] is None]
    if broken:
        found[broken] = 1.0 / found.shape[-1]  # any distribution will do: no token after such a row is committed
    result, start = {}, 0
    for task, block in zip(chosen, blocks, strict=True):
        result[task.entry.sequence.id] = found[start : start + block.rows]
        start += block.rows
    return result


def _needs_probs(task: VerifyTask, acceptance_method: AcceptanceMethod) -> bool:
    return not task.entry.sequence.request.sampling.greedy or (task.draft is not None and acceptance_method.needs_probs)


def _greedy(task: VerifyTask, best: Sequence[int | None]) -> tuple[int, ...] | None:
    """Return each verified row's greedy token; None if the request samples. Rows that are not finite give any token."""
    if not task.entry.sequence.request.sampling.greedy or not task.count:
        return None
    return tuple(token or 0 for token in best[task.verified_rows])


def _sample(tasks: Sequence[VerifyTask], distributions: Mapping[str, Floats]) -> dict[str, int]:
    """Sample the next tokens of all sequences that have a distribution and no draft, by id, in one call."""
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


def uses_finite_rows(task: VerifyTask, result: VerifyResult, best: Sequence[int | None]) -> bool:
    """Return whether all rows of the accepted path are finite.

    Rows of rejected nodes do not count: a drafter's tokens must not end a request.
    """
    rows = [*range(task.first, min(task.verified_rows.start + 1, task.last))]
    rows += [task.verified_rows.start + 1 + node for node in result.path]
    return all(best[row] is not None for row in rows if row < task.last)
