"""Verifies with a target that computes several batches at a time, such as pipeline stages in other processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from cospec.acceptance.reference import VerifyTask
from cospec.core.interfaces import PipelinedModel
from cospec.core.model_io import TokenBatch
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.submitted_step import Future
from cospec.core.types import Commit, Draft, RequestState, ScheduledRequest, StepOutput
from cospec.core.verifier import TargetVerifier


class PipelinedVerifier:
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

    def submit(self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]) -> Future[list[StepOutput]]:
        """Send the batch to the target; the drafts are verified when the result is collected."""
        tasks, slices = self._verifier.lay_out(entries, drafts)
        return _Outputs(self._verifier, tasks, self._model.submit(TokenBatch(tuple(slices))))

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep accepted nodes in the target's caches; other sequences may be in flight."""
        self._verifier.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""
        self._verifier.free(ids)


class _Outputs:
    """The outputs of a submission, computed from logits that may arrive later."""

    def __init__(self, verifier: TargetVerifier, tasks: Sequence[VerifyTask], logits: Future[Tensor]) -> None:
        self._verifier, self._tasks, self._logits = verifier, tasks, logits

    def done(self) -> bool:
        """Whether the logits are here, or lost."""
        return self._logits.done()

    def result(self, timeout: float | None = None) -> list[StepOutput]:
        """Verify the drafts; raises what the target raises."""
        logits = self._verifier.blend.combine([self._logits.result(timeout)])
        return self._verifier.decide(self._tasks, logits)
