"""The only writer of a Sequence: appends what was accepted, ends outputs, and trims everything at the same token."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from cospec.engine.detokenizer import TextStream
from cospec.protocols import Clock
from cospec.types import Commit, Draft, Event, Finish, Outcome, Request, Sequence, Verdict


@dataclass(frozen=True, slots=True)
class _Ending:
    """Where an output ends: after ``count`` of the new tokens, and why."""

    count: int
    finish: Finish | None = None
    reason: str | int | None = None


class Committer:
    """Turns outcomes into commits and events.

    Args:
        law: what every response declares about its distribution.
        relaxed: names of the rules that do not follow it exactly, which a response declares as well.
        eos: end-of-sequence ids, which are no stop *reason* of the user's.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        law: str,
        eos: frozenset[int] = frozenset(),
        clock: Clock = time.monotonic,
        relaxed: frozenset[str] = frozenset(),
    ) -> None:
        self._tokenizer, self._law, self._eos, self._clock = tokenizer, law, eos, clock
        self._relaxed = relaxed
        self._texts: dict[str, TextStream] = {}

    def commit(self, outcomes: Seq[Outcome]) -> tuple[list[Commit], list[Event]]:
        """One commit per outcome, in order, and an event for each sequence that a user should hear of."""
        commits, events = [], []
        now = self._clock()
        for outcome in outcomes:
            commit, event = self._commit(outcome, now)
            commits.append(commit)
            if event is not None:
                events.append(event)
            if commit.finish is not None:
                self.forget(commit.id)
        return commits, events

    def forget(self, id: str) -> None:
        """Drop the text state of a sequence that ended or was aborted."""
        self._texts.pop(id, None)

    def _commit(self, outcome: Outcome, now: float) -> tuple[Commit, Event | None]:
        sequence, draft, verdict = outcome.entry.sequence, outcome.draft, outcome.verdict
        sequence.stats.target_calls += 1
        if outcome.model_calls:
            _add(sequence.stats.model_calls, outcome.model_calls)
        if outcome.prompt_logprobs:
            sequence.prompt_logprobs.extend(outcome.prompt_logprobs)
        if outcome.error is not None:
            return self._fail(sequence, outcome.error, now)
        base = len(sequence.tokens)
        if verdict is None:
            sequence.computed += outcome.entry.tokens
            return Commit(sequence.id, base, (), (), sequence.computed), None
        new = [draft.tokens[node] for node in verdict.path] if draft else []
        new += [] if verdict.token is None else [verdict.token]
        text = self._texts.get(sequence.id)
        if text is None:
            request = sequence.request
            text = self._texts[sequence.id] = TextStream(self._tokenizer, request.sampling, request.prompt)
        ending = self._ending(sequence, new, text)
        tokens, path = tuple(new[: ending.count]), verdict.path[: ending.count]
        sequence.tokens.extend(tokens)
        sequence.computed = base + min(len(path), ending.count - 1)
        sequence.finish = ending.finish
        if outcome.logprobs:
            sequence.logprobs.extend(outcome.logprobs[: ending.count])
        sources = _sources(draft, verdict, path, len(tokens))
        self._count(sequence, draft, verdict, path)
        _tally(sequence.stats.tokens_by_source, sources)
        _note_times(sequence, now)
        rejected = draft is not None and not verdict.bonus and len(path) == len(verdict.path) < len(tokens)
        nodes = len(draft) if draft else 0
        commit = Commit(
            sequence.id, base, tokens, path, sequence.computed, nodes, ending.finish, rejected, outcome.state
        )
        event = self._event(outcome, commit, ending, sources, text.release(ending.finish is not None))
        return commit, event

    def _ending(self, sequence: Sequence, new: Seq[int], text: TextStream) -> _Ending:
        """Read the new tokens in order until one ends the output."""
        params = sequence.request.sampling
        written = sequence.output_len
        for count, token in enumerate(new, start=1):
            may_stop = written + count >= params.min_tokens
            if may_stop and token in params.stop_token_ids:
                return _Ending(count, Finish.STOP, None if token in self._eos else token)
            found = text.push(token, may_stop)
            if found is not None:
                return _Ending(count, Finish.STOP, found)
            if params.max_tokens is not None and written + count >= params.max_tokens:
                return _Ending(count, Finish.LENGTH)
        return _Ending(len(new))

    @staticmethod
    def _count(sequence: Sequence, draft: Draft | None, verdict: Verdict, path: Seq[int]) -> None:
        if draft is None:
            return
        stats = sequence.stats
        stats.drafts += 1
        stats.drafted += len(draft)
        stats.accepted += len(path)
        stats.rejections += not verdict.bonus and len(path) == len(verdict.path)
        _tally(stats.accepted_by_drafter, (draft.drafters[node] for node in path))

    def _event(self, outcome: Outcome, commit: Commit, ending: _Ending, sources: tuple[str, ...], text: str) -> Event:
        sequence = outcome.entry.sequence
        request = sequence.request
        first = len(sequence.tokens) - len(commit.tokens) == sequence.prompt_len
        wants_prompt = request.sampling.prompt_logprobs is not None and first
        return Event(
            id=sequence.id,
            parent=request.parent,
            index=request.index,
            text=text,
            tokens=commit.tokens,
            sources=sources,
            logprobs=outcome.logprobs[: ending.count],
            prompt_logprobs=(None, *sequence.prompt_logprobs) if wants_prompt else None,
            finish=ending.finish,
            stop_reason=ending.reason,
            stats=replace(sequence.stats) if ending.finish is not None else None,
            law=self._law_of(request),
        )

    def _law_of(self, request: Request) -> str:
        """What the request's tokens follow; a rule that is not exact stands around it."""
        law, chosen = request.law_name or self._law, request.speculation
        return f"{chosen.rule}({law})" if chosen.enabled and chosen.rule in self._relaxed else law

    def _fail(self, sequence: Sequence, error: str, now: float) -> tuple[Commit, Event]:
        sequence.finish = Finish.ERROR
        _note_times(sequence, now)
        commit = Commit(sequence.id, len(sequence.tokens), (), (), sequence.computed, 0, Finish.ERROR)
        return commit, self.ended(sequence, Finish.ERROR, error)

    def ended(self, sequence: Sequence, finish: Finish, error: str | None = None) -> Event:
        """The last event of an output that ends without a new token."""
        request = sequence.request
        stats = replace(sequence.stats)
        return Event(
            sequence.id,
            request.parent,
            request.index,
            "",
            (),
            (),
            finish=finish,
            stats=stats,
            error=error,
            law=self._law_of(request),
        )


def _note_times(sequence: Sequence, now: float) -> None:
    age = now - sequence.request.arrival
    if sequence.stats.ttft is None:
        sequence.stats.ttft = age
    if sequence.finish is not None:
        sequence.stats.e2e = age


def _sources(draft: Draft | None, verdict: Verdict, path: Seq[int], count: int) -> tuple[str, ...]:
    """Who produced each of ``count`` committed tokens: the drafters of ``path``, then the target."""
    sources = [draft.drafters[node] for node in path] if draft else []
    if len(sources) < count:
        sources.append("bonus" if verdict.bonus else "target")
    return tuple(sources)


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count


def _tally(counts: dict[str, int], names: Iterable[str]) -> None:
    for name in names:
        counts[name] = counts.get(name, 0) + 1
