"""Verifies with a target that computes several batches at a time, such as pipeline stages in other processes.

Logits are large: four bytes for each token of the vocabulary and each row. The target therefore draws the tokens of all
requests that need no more than tokens, and returns logits for the other requests of the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from cospec.acceptance.python_verification import VerifyTask
from cospec.core.interfaces import PipelinedModel
from cospec.core.model_io import BatchOutput, RowSampling, SequenceSlice, TokenBatch
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.submitted_step import CancellableFuture
from cospec.core.types import Commit, Draft, RequestState, ScheduledRequest, StepOutput
from cospec.core.verifier import TargetVerifier


class PipelineParallelVerifier:
    """Lays batches out and decides as ``verifier`` does; ``model`` computes the batches between.

    Args:
        model: the target of ``verifier``.
    """

    def __init__(self, model: PipelinedModel, verifier: TargetVerifier) -> None:
        self._model, self._verifier = model, verifier
        self.max_in_flight = model.max_in_flight

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        """See ``Verifier``."""
        return self._verifier.acceptance_method(sequence)

    def submit(
        self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]
    ) -> CancellableFuture[list[StepOutput]]:
        """Send the batch to the target; the drafts are verified when the result is collected."""
        tasks, slices = self._verifier.lay_out(entries, drafts)
        drawn = [self._verifier.draws_suffice(task) for task in tasks]
        parts = (_sampled(task, part) if own else part for task, part, own in zip(tasks, slices, drawn, strict=True))
        return _Outputs(self._verifier, tasks, drawn, self._model.submit(TokenBatch(tuple(parts))))

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep accepted nodes in the target's caches; other sequences may be in flight."""
        self._verifier.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        self._verifier.free(ids)


class _Outputs:
    """The outputs of a submission, computed from tokens and logits that may arrive later.

    Args:
        drawn: ``[len(tasks)]``, whether the target draws the tokens of the task.
    """

    def __init__(
        self,
        verifier: TargetVerifier,
        tasks: Sequence[VerifyTask],
        drawn: Sequence[bool],
        output: CancellableFuture[BatchOutput],
    ) -> None:
        self._verifier, self._tasks, self._drawn, self._output = verifier, tasks, drawn, output

    def done(self) -> bool:
        """Whether the target's output is here, or lost."""
        return self._output.done()

    def result(self, timeout: float | None = None) -> list[StepOutput]:
        """Verify the drafts of entries that hold; raises what the target raises."""
        output = self._output.result(timeout)
        by_token, by_logits = (self._rows(drawn) for drawn in (True, False))
        accepted = iter(self._verifier.accept(by_token, output.tokens))
        decided = iter(self._verifier.decide(by_logits, output.logits) if by_logits else ())
        return [
            next(accepted if drawn else decided) if task.entry.holds else StepOutput(task.entry, None, None)
            for task, drawn in zip(self._tasks, self._drawn, strict=True)
        ]

    def cancel(self) -> None:
        """Cancel the target's work."""
        self._output.cancel()

    def _rows(self, drawn: bool) -> list[VerifyTask]:
        """Return the tasks of one kind that hold, with their places among the rows of this kind."""
        own = (task for task, each in zip(self._tasks, self._drawn, strict=True) if each is drawn)
        return [task for task in _packed(own) if task.entry.holds]


def _packed(tasks: Iterable[VerifyTask]) -> Iterable[VerifyTask]:
    row = 0
    for task in tasks:
        last = row + task.last - task.first
        yield replace(task, first=row, last=last)
        row = last


def _sampled(task: VerifyTask, part: SequenceSlice) -> SequenceSlice:
    """Return the slice with the request's sampling, where the slice has rows."""
    request = task.entry.sequence.request
    return replace(part, sampling=RowSampling(request.sampling, request.seed)) if task.count else part
