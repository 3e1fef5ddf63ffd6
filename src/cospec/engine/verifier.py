"""Scores drafts with the target and judges them: one packed forward for every sequence of the round."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from cospec.draws import Draws
from cospec.protocols import Blend, Model, Rule
from cospec.sampling import History, choices, law, logprobs
from cospec.tree import path_to
from cospec.types import (
    Draft,
    Outcome,
    PlanEntry,
    Scores,
    Segment,
    Sequence,
    TokenBatch,
    TokenLogprobs,
    Verdict,
)


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
        """Score and judge. A draft that does not continue the sequence as it stands is stale and left out."""
        used = [_fresh(entry, drafts.get(entry.sequence.id)) for entry in entries]
        segments = tuple(_segment(entry, draft) for entry, draft in zip(entries, used, strict=True))
        logits = self.blend.combine([self.model.forward(TokenBatch(segments))])
        best = logits.max(-1) if len(logits) else None
        values, indices = (best.values.tolist(), best.indices.tolist()) if best else ([], [])
        outcomes, row = [], 0
        for entry, draft, segment in zip(entries, used, segments, strict=True):
            end = row + len(segment.tokens) - segment.logits_from
            if any(value != value for value in values[row:end]):  # NaN
                outcomes.append(Outcome(entry, draft, None, error="the model's logits are not numbers at this prompt"))
            else:
                outcomes.append(self._judge(entry, draft, logits[row:end], indices[row:end]))
            row = end
        return outcomes

    def _judge(self, entry: PlanEntry, draft: Draft | None, logits: Tensor, best: list[int]) -> Outcome:
        """``logits [R, V]``: rows of prompt positions where asked for, then the ``N + 1`` rows of the draft."""
        sequence = entry.sequence
        prompt = self._prompt_logprobs(entry, logits)
        if not entry.reaches_end:
            return Outcome(entry, None, None, prompt_logprobs=prompt)
        rows = 1 + (len(draft) if draft else 0)
        logits, best = logits[-rows:], best[-rows:]
        scores = self._scores(sequence, draft, logits, best)
        draws = Draws(sequence.request.seed)
        if draft is None:
            verdict = Verdict((), scores.draw(0, len(sequence.tokens), draws), bonus=False)
        else:
            verdict = self.rule(sequence).judge(draft, scores, draws)
        return Outcome(entry, draft, verdict, _logprobs(sequence, draft, verdict, logits), prompt)

    def _scores(self, sequence: Sequence, draft: Draft | None, logits: Tensor, best: list[int]) -> Scores:
        params = sequence.request.sampling
        plain = params.greedy and not params.edits_logits
        reads_law = draft is not None and self.rule(sequence).reads_law
        if plain and not reads_law:
            return Scores(chosen=tuple(best))
        history = History(sequence.tokens, sequence.prompt_len, _paths(draft))
        chosen = tuple(choices(logits, params, history)) if params.greedy else None
        return Scores(chosen, law(logits, params, history) if reads_law or not params.greedy else None)

    def _prompt_logprobs(self, entry: PlanEntry, logits: Tensor) -> tuple[TokenLogprobs, ...]:
        """Of the prompt tokens that follow the positions computed in this round and have none yet."""
        sequence = entry.sequence
        if not _wants_prompt_rows(sequence):
            return ()
        first = max(sequence.computed + 1, len(sequence.prompt_logprobs) + (not sequence.prompt_logprobs))
        last = min(sequence.computed + entry.tokens, sequence.prompt_len - 1)
        if last < first:
            return ()
        offset = sequence.computed + 1
        rows = logits[first - offset : last - offset + 1]
        return logprobs(rows, sequence.tokens[first : last + 1], sequence.request.sampling.prompt_logprobs or 0)


def _fresh(entry: PlanEntry, draft: Draft | None) -> Draft | None:
    known = len(entry.sequence.tokens)
    return draft if draft and len(draft) and draft.base_len == known and entry.reaches_end else None


def _segment(entry: PlanEntry, draft: Draft | None) -> Segment:
    sequence, n = entry.sequence, entry.tokens
    tokens = tuple(sequence.tokens[sequence.computed : sequence.computed + n])
    first_row = n - 1 if entry.reaches_end else n
    if _wants_prompt_rows(sequence):
        first_row = 0
    parents = draft.parents if draft else ()
    return Segment(sequence.id, sequence.computed, tokens + (draft.tokens if draft else ()), parents, first_row)


def _wants_prompt_rows(sequence: Sequence) -> bool:
    wanted = sequence.request.sampling.prompt_logprobs is not None
    return wanted and sequence.computed < sequence.prompt_len - 1


def _paths(draft: Draft | None) -> list[list[int]]:
    """The draft tokens before each row of scores."""
    if draft is None:
        return [[]]
    nodes = range(-1, len(draft))
    return [[draft.tokens[node] for node in path_to(draft.parents, end)] for end in nodes]


def _logprobs(
    sequence: Sequence, draft: Draft | None, verdict: Verdict, logits: Tensor
) -> tuple[TokenLogprobs, ...]:
    """Of the accepted tokens and the one after them, where the request asks for them."""
    wanted = sequence.request.sampling.logprobs
    if wanted is None:
        return ()
    rows = torch.tensor([0, *(node + 1 for node in verdict.path)], device=logits.device)
    tokens = [*(draft.tokens[node] for node in verdict.path)] if draft else []
    return logprobs(logits[rows], [*tokens, verdict.token], wanted)
