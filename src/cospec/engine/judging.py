"""From logits to verdicts: the law at each row that a verdict may need, then each request's rule.

Works on every device and in every precision; where the native library can do it ``cospec.engine.compiled`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cospec.draws import Draws, Floats, Purpose, race
from cospec.protocols import Rule
from cospec.sampling import Block, History, choices, laws, likeliest
from cospec.tree import path_to
from cospec.types import Draft, PlanEntry, Scores, Verdict


@dataclass(frozen=True, slots=True)
class Task:
    """One entry with its draft, and where its rows stand in the round's logits.

    Attributes:
        first, last: its rows, ``last`` is one behind.
        count: the rows at the end that the draft is judged by: ``N + 1``, or ``N`` where the law behind the last node
            is not known; 0 while known tokens remain to be computed.
    """

    entry: PlanEntry
    draft: Draft | None
    first: int
    last: int
    count: int

    @property
    def judged(self) -> slice:
        """The rows that the draft is judged by."""
        return slice(self.last - self.count, self.last)

    @property
    def block(self) -> Block:
        """The judged rows with the draft tokens before each of them."""
        sequence, draft = self.entry.sequence, self.draft
        paths: list[list[int]] = [[]]
        if draft is not None:
            paths += [[draft.tokens[above] for above in path_to(draft.parents, node)] for node in range(self.count - 1)]
        return Block(sequence.request.sampling, History(sequence.tokens, sequence.prompt_len, paths))


def judge(tasks: Seq[Task], rules: Seq[Rule], logits: Tensor) -> list[Verdict | None]:
    """The verdict of each task by its own rule, from ``logits [R, V]`` of the law.

    None where it rests on logits that are no numbers. A task without judged rows has the verdict of no token.
    """
    best = likeliest(logits)
    distributions = _laws(tasks, rules, logits, best)
    drawn = _drawn(tasks, distributions)
    verdicts = []
    for task, rule in zip(tasks, rules, strict=True):
        id = task.entry.sequence.id
        chosen = (drawn[id],) if id in drawn else _greedy(task, logits, best)
        verdict = _verdict(task, rule, Scores(chosen, distributions.get(id)))
        verdicts.append(verdict if _rests_on_numbers(task, verdict, best) else None)
    return verdicts


def _verdict(task: Task, rule: Rule, scores: Scores) -> Verdict:
    request, base = task.entry.sequence.request, len(task.entry.sequence.tokens)
    if not task.count:
        return Verdict((), None, bonus=False)
    draws = Draws(request.seed, base)
    if task.draft is None:
        return Verdict((), scores.draw(0, base, draws), bonus=False)
    return rule.judge(task.draft, scores, draws)


def _laws(tasks: Seq[Task], rules: Seq[Rule], logits: Tensor, best: Seq[int | None]) -> dict[str, Floats]:
    """The laws of all sequences whose rule or temperature needs one, computed together, by sequence."""
    chosen = [task for task, rule in zip(tasks, rules, strict=True) if task.count and _needs_law(task, rule)]
    if not chosen:
        return {}
    blocks = [task.block for task in chosen]
    rows = [row for task in chosen for row in range(*task.judged.indices(len(logits)))]
    found = laws(logits if len(rows) == len(logits) else logits[rows], blocks)
    broken = [place for place, row in enumerate(rows) if best[row] is None]
    if broken:
        found[broken] = 1.0 / found.shape[-1]  # any law will do: nothing behind such a row is committed
    result, start = {}, 0
    for task, block in zip(chosen, blocks, strict=True):
        result[task.entry.sequence.id] = found[start : start + block.rows]
        start += block.rows
    return result


def _needs_law(task: Task, rule: Rule) -> bool:
    return not task.entry.sequence.request.sampling.greedy or (task.draft is not None and rule.reads_law)


def _greedy(task: Task, logits: Tensor, best: Seq[int | None]) -> tuple[int, ...] | None:
    """Each judged row's token under a greedy law, None for other laws. Rows that are no numbers give any token."""
    params = task.entry.sequence.request.sampling
    if not params.greedy or not task.count:
        return None
    if params.edits_logits:
        return tuple(choices(logits[task.judged], params, task.block.history))
    return tuple(token or 0 for token in best[task.judged])


def _drawn(tasks: Seq[Task], distributions: Mapping[str, Floats]) -> dict[str, int]:
    """The next tokens of the sequences that have a law and no draft, by sequence: one race for all."""
    found = {task.entry.sequence.id: task.entry.sequence for task in tasks if task.draft is None}
    drawing = [(id, sequence) for id, sequence in found.items() if id in distributions]
    if not drawing:
        return {}
    weights = np.concatenate([distributions[id] for id, _ in drawing])
    bases = [(Draws(sequence.request.seed, len(sequence.tokens)), len(sequence.tokens)) for _, sequence in drawing]
    tokens = race(weights, [draws.stream(base, Purpose.TARGET) for draws, base in bases])
    return {id: token for (id, _), token in zip(drawing, tokens, strict=True)}


def _rests_on_numbers(task: Task, verdict: Verdict, best: Seq[int | None]) -> bool:
    """Rows of rejected nodes do not count: what a drafter makes up must not end a request."""
    rows = [*range(task.first, min(task.judged.start + 1, task.last))]
    rows += [task.judged.start + 1 + node for node in verdict.path]
    return all(best[row] is not None for row in rows if row < task.last)
