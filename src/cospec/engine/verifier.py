"""Scores drafts with the target and judges them: one packed forward for every sequence of the round."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cospec.batches import Segment, TokenBatch
from cospec.draws import Draws, Floats, Purpose, race
from cospec.protocols import Blend, Model, Rule
from cospec.sampling import Block, History, choices, laws, likeliest, logprobs
from cospec.stats import TokenLogprobs
from cospec.tree import path_to
from cospec.types import Commit, Draft, Outcome, PlanEntry, Scores, Sequence, Verdict


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


class Verifier:
    """The law of the output is ``blend`` of the target's logits, after each request's processors.

    Args:
        rules: by name; a request's ``speculation.rule`` picks one.
    """

    def __init__(self, model: Model, blend: Blend, rules: Mapping[str, Rule]) -> None:
        self.model, self.blend, self.rules = model, blend, rules

    def rule(self, sequence: Sequence) -> Rule:
        """The rule that the request resolved to when it was added."""
        name = sequence.request.speculation.rule
        assert name is not None, "requests are resolved before they are scheduled"
        return self.rules[name]

    def verify(self, entries: Seq[PlanEntry], drafts: Mapping[str, Draft]) -> list[Outcome]:
        """Score and judge. A stale draft, or one of a shape that its request's rule cannot judge, is left out."""
        tasks: list[Task] = []
        segments: list[Segment] = []
        for entry in entries:
            draft = self._usable(entry, drafts.get(entry.sequence.id))
            segment = _segment(entry, draft)
            first = tasks[-1].last if tasks else 0
            count = 1 + (len(draft) if draft else 0) if entry.reaches_end else 0
            tasks.append(Task(entry, draft, first, first + len(segment.tokens) - segment.logits_from, count))
            segments.append(segment)
        return self.decide(tasks, self.blend.combine([self.model.forward(TokenBatch(tuple(segments)))]))

    def decide(self, tasks: Seq[Task], logits: Tensor) -> list[Outcome]:
        """Judge by logits of the law, ``[R, V]``: one outcome per task, in order. Nothing is scored."""
        best = likeliest(logits)
        distributions = self._laws(tasks, logits, best)
        drawn = _drawn(tasks, distributions)
        outcomes = []
        for task in tasks:
            id = task.entry.sequence.id
            chosen = (drawn[id],) if id in drawn else _greedy(task, logits, best)
            outcome = self._judge(task, logits, Scores(chosen, distributions.get(id)))
            outcomes.append(_without_broken_rows(task, outcome, best))
        return outcomes

    def commit(self, commits: Seq[Commit]) -> None:
        """Keep accepted nodes in the target's cache."""
        self.model.commit(commits)

    def free(self, ids: Seq[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        self.model.free(ids)

    def _usable(self, entry: PlanEntry, draft: Draft | None) -> Draft | None:
        """The draft, if it continues the sequence as it stands and the request's rule can judge its shape."""
        if not draft or not len(draft) or draft.base_len != len(entry.sequence.tokens) or not entry.reaches_end:
            return None
        return draft if self.rule(entry.sequence).trees or draft.is_chain else None

    def _laws(self, tasks: Seq[Task], logits: Tensor, best: Seq[int | None]) -> dict[str, Floats]:
        """The laws of all sequences whose rule or temperature needs one, computed together, by sequence."""
        chosen = [task for task in tasks if task.entry.reaches_end and self._needs_law(task)]
        if not chosen:
            return {}
        blocks = [_block(task) for task in chosen]
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

    def _needs_law(self, task: Task) -> bool:
        sequence = task.entry.sequence
        greedy = sequence.request.sampling.greedy
        return not greedy or (task.draft is not None and self.rule(sequence).reads_law)

    def _judge(self, task: Task, logits: Tensor, scores: Scores) -> Outcome:
        sequence, draft = task.entry.sequence, task.draft
        prompt = _prompt_logprobs(task, logits)
        if not task.entry.reaches_end:
            return Outcome(task.entry, None, None, prompt_logprobs=prompt)
        base = len(sequence.tokens)
        draws = Draws(sequence.request.seed, base)
        if draft is None:
            verdict = Verdict((), scores.draw(0, base, draws), bonus=False)
        else:
            verdict = self.rule(sequence).judge(draft, scores, draws)
        state = None
        if self.model.states is not None:
            state = self.model.states[task.judged.start + 1 + verdict.path[-1] if verdict.path else task.judged.start]
        return Outcome(task.entry, draft, verdict, _logprobs(task, verdict, logits), prompt, state=state)


def _greedy(task: Task, logits: Tensor, best: Seq[int | None]) -> tuple[int, ...] | None:
    """Each judged row's token under a greedy law, None for other laws. Rows that are no numbers give any token."""
    params = task.entry.sequence.request.sampling
    if not params.greedy or not task.entry.reaches_end:
        return None
    if params.edits_logits:
        return tuple(choices(logits[task.judged], params, _block(task).history))
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


def _without_broken_rows(task: Task, outcome: Outcome, best: Seq[int | None]) -> Outcome:
    """The outcome, or an error when it rests on logits that are not numbers.

    Rows of rejected nodes do not count: what a drafter makes up must not end a request.
    """
    rows = [*range(task.first, min(task.judged.start + 1, task.last))]
    if outcome.verdict is not None:
        rows += [task.judged.start + 1 + node for node in outcome.verdict.path]
    if all(best[row] is not None for row in rows if row < task.last):
        return outcome
    return Outcome(task.entry, task.draft, None, error="the model's logits are not numbers at this prompt")


def _segment(entry: PlanEntry, draft: Draft | None) -> Segment:
    sequence, n = entry.sequence, entry.tokens
    tokens = tuple(sequence.tokens[sequence.computed : sequence.computed + n])
    first_row = n - 1 if entry.reaches_end else n
    if _wants_prompt_rows(sequence):
        first_row = 0
    if draft is None:
        return Segment(sequence.id, sequence.computed, tokens, (), first_row)
    return Segment(sequence.id, sequence.computed, tokens + draft.tokens, draft.parents, first_row)


def _block(task: Task) -> Block:
    """The judged rows with the draft tokens before each of them."""
    sequence, draft = task.entry.sequence, task.draft
    paths: list[list[int]] = [[]]
    if draft is not None:
        paths += [[draft.tokens[above] for above in path_to(draft.parents, node)] for node in range(task.count - 1)]
    return Block(sequence.request.sampling, History(sequence.tokens, sequence.prompt_len, paths))


def _wants_prompt_rows(sequence: Sequence) -> bool:
    wanted = sequence.request.sampling.prompt_logprobs is not None
    return wanted and sequence.computed < sequence.prompt_len - 1


def _prompt_logprobs(task: Task, logits: Tensor) -> tuple[TokenLogprobs, ...]:
    """Of the prompt tokens that follow the positions computed in this round and have none yet."""
    sequence = task.entry.sequence
    if not _wants_prompt_rows(sequence):
        return ()
    offset = sequence.computed + 1  # the position that the first row speaks of
    first = max(offset, len(sequence.prompt_logprobs) + 1)
    behind = min(sequence.computed + task.entry.tokens, sequence.prompt_len - 1) + 1
    if behind <= first:
        return ()
    rows = logits[task.first + first - offset : task.first + behind - offset]
    return logprobs(rows, sequence.tokens[first:behind], sequence.request.sampling.prompt_logprobs or 0)


def _logprobs(task: Task, verdict: Verdict, logits: Tensor) -> tuple[TokenLogprobs, ...]:
    """Of the accepted tokens and the one after them, where the request asks for them."""
    wanted = task.entry.sequence.request.sampling.logprobs
    if wanted is None:
        return ()
    tokens = [task.draft.tokens[node] for node in verdict.path] if task.draft else []
    tokens += [] if verdict.token is None else [verdict.token]
    rows = torch.tensor([0, *(node + 1 for node in verdict.path)][: len(tokens)], device=logits.device)
    return logprobs(logits[rows + task.judged.start], tokens, wanted)
