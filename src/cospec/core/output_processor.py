"""Turns the outputs of a step into commits and events: appends tokens, ends outputs, detokenizes.

Runs in the engine, after the verifier. Tokens, accepted and rejected tokens end at the same token. All
nodes of the last draft count as drafted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from tokenizers import Tokenizer

from cospec.core.interfaces import Clock
from cospec.core.stats import RequestStats
from cospec.core.tree import sibling_ranks
from cospec.core.types import Commit, DeclaredDistribution, Event, FinishReason, Request, RequestState, StepOutput
from cospec.errors import failure
from cospec.text.detokenizer import IncrementalDetokenizer

TOKEN_SOURCES = ("target", "bonus")  # sources that are no drafters

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ending:
    """Where an output ends: after ``count`` of the new tokens, and why."""

    count: int
    finish: FinishReason
    reason: str | int | None = None


@dataclass(slots=True)
class _Output:
    """One unfinished output.

    Attributes:
        most: known tokens at which the output ends.
        delivered: known tokens of the prompt and of earlier events.
        sources: see ``Event.sources``, of the other tokens.
    """

    text: IncrementalDetokenizer
    stops: frozenset[int]
    most: float
    delivered: int
    sources: list[str] = field(default_factory=list)


class _Update(NamedTuple):
    """What the next event of an output is made from."""

    sequence: RequestState
    output: _Output
    stop_reason: str | int | None = None
    error: str | None = None


class OutputProcessor:
    """Makes commits and events from the outputs of steps.

    Args:
        distribution: what every response declares, unless its request has an ensemble of its own.
        eos: end-of-sequence ids; none of these is a stop *reason*.
        inexact_methods: names of acceptance methods that are not exact, which responses declare.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        distribution: DeclaredDistribution,
        eos: frozenset[int] = frozenset(),
        clock: Clock = time.monotonic,
        inexact_methods: Container[str] = frozenset(),
    ) -> None:
        self._tokenizer, self._distribution, self._eos, self._clock = tokenizer, distribution, eos, clock
        self._inexact_methods = inexact_methods
        self._outputs: dict[str, _Output] = {}

    def commit(self, step_outputs: Sequence[StepOutput]) -> tuple[list[Commit], list[Event]]:
        """Return one commit per output, in order, and an event for each sequence that streams or ended.

        Outputs of several steps give one event per sequence.
        """
        commits, updates = list[Commit](), dict[str, _Update]()
        now = self._clock()
        for step_output in step_outputs:
            try:
                commit, update = self._commit(step_output, now)
            except Exception as error:  # a text that cannot be written ends its own request
                commit, update = self._break(step_output.entry.sequence, error, now)
            commits.append(commit)
            if update is not None:
                updates[commit.id] = update
        events = []
        for id, update in updates.items():
            try:
                events.append(self._event(update))
            except Exception as error:
                _, update = self._break(update.sequence, error, now)
                events.append(self._event(update))
                last = max(place for place, commit in enumerate(commits) if commit.id == id)
                commits[last] = commits[last]._replace(finish=FinishReason.ERROR)
        for event in events:
            if event.finish is not None:
                self.forget(event.id)
        return commits, events

    def forget(self, id: str) -> None:
        """Forget a sequence that ended or was aborted."""
        self._outputs.pop(id, None)

    def _commit(self, step_output: StepOutput, now: float) -> tuple[Commit, _Update | None]:
        entry, draft, result, logprobs, prompt_logprobs, error, divergences, hidden_state, model_calls = step_output
        sequence = entry.sequence
        if sequence.finish is not None:  # an earlier step of the same call has ended it
            return Commit(sequence.id, len(sequence.tokens), (), (), sequence.computed), None
        request, stats, tokens = sequence.request, sequence.stats, sequence.tokens
        stats.target_calls += 1
        _add(stats.model_calls, model_calls)
        if prompt_logprobs:
            sequence.prompt_logprobs.extend(prompt_logprobs)
        if error is not None:
            return self._fail(sequence, error, now)
        base = len(tokens)
        if result is None:
            sequence.computed += entry.num_tokens
            return Commit(request.id, base, (), (), sequence.computed), None
        output = self._outputs.get(request.id) or self._open(sequence)
        path = result.path
        new = [draft.tokens[node] for node in path] if draft is not None else []
        if result.token is not None:
            new.append(result.token)
        ending = self._ending(sequence, new, output)
        if ending is not None:
            new, path, sequence.finish = new[: ending.count], path[: ending.count], ending.finish
        tokens += new
        sequence.computed = base + min(len(path), len(new) - 1)
        if logprobs:
            sequence.logprobs.extend(logprobs[: len(new)])
        if divergences:
            stats.divergence += sum(divergences[: len(new)])
            stats.relaxed_tokens += len(divergences[: len(new)])
        nodes, rejected = 0, False
        ranks: tuple[int, ...] = ()
        if draft is not None:
            nodes, ranks = len(draft.tokens), sibling_ranks(draft.parents, path)
            rejected = not result.bonus and len(path) < len(new)  # otherwise the output ends before the rejection
            _count(stats, nodes, len(path), rejected)
            output.sources += [draft.drafters[node] for node in path]
        if len(path) < len(new):
            output.sources.append("bonus" if result.bonus else "target")
        if stats.ttft is None or ending is not None:
            _note_times(sequence, now)
        commit = Commit(
            request.id,
            base,
            tuple(new),
            path,
            sequence.computed,
            nodes,
            sequence.finish,
            rejected,
            hidden_state,
            ranks,
        )
        if not request.streams and ending is None:
            return commit, None
        return commit, _Update(sequence, output, None if ending is None else ending.reason)

    def _open(self, sequence: RequestState) -> _Output:
        params, prompt = sequence.request.sampling, sequence.request.prompt
        most = float("inf") if params.max_tokens is None else len(prompt) + params.max_tokens
        text, committed = IncrementalDetokenizer(self._tokenizer, params, prompt), sequence.request.resumed_output or ()
        text.resume(committed, params.min_tokens)
        output = _Output(text, frozenset(params.stop_token_ids), most, len(prompt) + len(committed))
        self._outputs[sequence.request.id] = output
        return output

    def _ending(self, sequence: RequestState, new: Sequence[int], output: _Output) -> _Ending | None:
        """Read the new tokens; None where none of them ends the output."""
        text, base = output.text, len(sequence.tokens)
        if base + len(new) < output.most and not text.stops and output.stops.isdisjoint(new):
            text.take(new)
            return None
        params, written = sequence.request.sampling, sequence.output_len
        for count, token in enumerate(new, start=1):
            may_stop = written + count >= params.min_tokens
            if may_stop and token in output.stops:
                return _Ending(count, FinishReason.STOP, None if token in self._eos else token)
            found = text.push(token, may_stop)
            if found is not None:
                return _Ending(count, FinishReason.STOP, found)
            if base + count >= output.most:
                return _Ending(count, FinishReason.LENGTH)
        return None

    def _event(self, update: _Update) -> Event:
        """The tokens and the text since the last event."""
        sequence, output, stop_reason, error = update
        request, finish, start = sequence.request, sequence.finish, output.delivered
        distribution = self._distribution_of(request)
        written = start - len(request.prompt)
        wants_prompt = request.sampling.prompt_logprobs is not None and not written and error is None
        fresh = written - len(request.resumed_output or ())  # an earlier process delivered the log-probabilities before
        text = output.text.release(finish is not None)  # first, because a tokenizer may raise
        sources, stats = tuple(output.sources), sequence.stats
        for name in sources:
            stats.tokens_by_source[name] = stats.tokens_by_source.get(name, 0) + 1
            if name not in TOKEN_SOURCES:
                stats.accepted_by_drafter[name] = stats.accepted_by_drafter.get(name, 0) + 1
        output.sources.clear()
        output.delivered = len(sequence.tokens)
        return Event(
            id=request.id,
            parent=request.parent,
            index=request.index,
            text=text,
            tokens=tuple(sequence.tokens[start:]),
            sources=sources,
            logprobs=tuple(sequence.logprobs[fresh:]) if sequence.logprobs else (),
            prompt_logprobs=(None, *sequence.prompt_logprobs) if wants_prompt else None,
            finish=finish,
            stop_reason=stop_reason,
            stats=replace(stats) if finish is not None else None,
            error=error,
            distribution=distribution.name,
            exact=distribution.exact,
        )

    def _distribution_of(self, request: Request) -> DeclaredDistribution:
        """The request's distribution, inside the name of an acceptance method that is not exact."""
        distribution, chosen = request.distribution or self._distribution, request.speculation
        if chosen.enabled and chosen.acceptance_method in self._inexact_methods:
            return DeclaredDistribution(f"{chosen.acceptance_method}({distribution.name})", exact=False)
        return distribution

    def _break(self, sequence: RequestState, error: Exception, now: float) -> tuple[Commit, _Update]:
        """The end of an output whose text cannot be written; the event has its tokens and no more text."""
        log.error("the text of request %s could not be written", sequence.id, exc_info=error)
        old = self._outputs.get(sequence.id)
        text = IncrementalDetokenizer(None, sequence.request.sampling, ())
        delivered = sequence.prompt_len if old is None else old.delivered
        self._outputs[sequence.id] = _Output(text, frozenset(), 0, delivered, [] if old is None else old.sources)
        return self._fail(sequence, failure(error), now)

    def _fail(self, sequence: RequestState, error: str, now: float) -> tuple[Commit, _Update]:
        """The end of an output that gets no new token."""
        sequence.finish = FinishReason.ERROR
        _note_times(sequence, now)
        commit = Commit(sequence.id, len(sequence.tokens), (), (), sequence.computed, 0, FinishReason.ERROR)
        return commit, _Update(sequence, self._outputs.get(sequence.id) or self._open(sequence), error=error)


def _note_times(sequence: RequestState, now: float) -> None:
    age = now - sequence.request.arrival
    if sequence.stats.ttft is None:
        sequence.stats.ttft = age
    if sequence.finish is not None:
        sequence.stats.e2e = age


def _count(stats: RequestStats, drafted: int, accepted: int, rejected: bool) -> None:
    stats.drafts += 1
    stats.drafted += drafted
    stats.accepted += accepted
    stats.rejections += rejected


def _add(counts: dict[str, int], more: Mapping[str, int]) -> None:
    for name, count in more.items():
        counts[name] = counts.get(name, 0) + count
