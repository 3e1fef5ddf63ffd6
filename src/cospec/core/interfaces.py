"""Interfaces of models, blends, verifiers, execution modes and executors; ``plugin_base`` has the base classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from cospec.core.model_io import BatchOutput, RolloutOutput, RolloutParams, TokenBatch
from cospec.core.plugin_base import AcceptanceMethod, Drafter, Policy
from cospec.core.stats import ExecutionInfo, StepTimes
from cospec.core.submitted_step import CancellableFuture, Future, StepResult, SubmittedStep
from cospec.core.types import Commit, Draft, RequestState, ScheduledRequest, SchedulerOutput, StepOutput
from cospec.native.library import NativeBlend
from cospec.plugin_options import Options as PluginOptions

if TYPE_CHECKING:  # the scheduler imports no torch
    import torch
    from torch import Tensor

Clock = Callable[[], float]
"""Seconds from an arbitrary start, never backwards: the machine's own clock, or a simulation's."""


class BlockManager(Protocol):
    """The accounting of one model's KV cache; no tensors. The scheduler admits and preempts by it."""

    @property
    def usage(self) -> float:
        """Share of the cache in use by sequences, 0 to 1."""

    @property
    def capacity(self) -> int:
        """Tokens that fit in all."""

    def open_sequence(self, id: str, tokens: Sequence[int]) -> int:
        """Open a sequence and reuse cached pages of its prefix; returns how many tokens are already there."""

    def can_allocate(self, lengths: Iterable[tuple[str, int]]) -> bool:
        """Whether there is room for so many tokens of all these sequences together; changes nothing."""

    def allocate(self, id: str, length: int) -> bool:
        """Make room for ``length`` tokens in all; False, with nothing changed, when there is none."""

    def cache_blocks(self, id: str, tokens: Sequence[int], computed: int) -> None:
        """Offer the full pages of ``tokens[:computed]``, computed and committed, for reuse by other sequences."""

    def free(self, id: str) -> None:
        """Give back a sequence's pages. Unknown ids are ignored."""

    def forget_contents(self) -> None:
        """Offer no page for reuse any more: the contents of all pages are lost."""

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a page is leaked, shared by mistake or counted wrongly."""


class NativeForward(Protocol):
    """A forward in native code on one cache, without packed batches.

    Attributes:
        handles: addresses of the model and of its cache in the native library.
        vocab_size: columns of the logits.
    """

    handles: tuple[int, int]
    vocab_size: int

    def pages(self, id: str) -> tuple[int, int]:
        """Return the address of a sequence's page table, and the number of pages."""

    def score(self, batch: TokenBatch) -> Tensor:
        """Return float32 logits ``[R, V]``; raises as ``Model.forward``, with nothing done."""

    def rollout(self, batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        """Choose and feed tokens of each slice, see ``Model.rollout``; raises as above."""


class Model(Protocol):
    """A causal language model that scores packed batches against its own KV cache."""

    name: str
    vocab_size: int
    max_len: int  # tokens of one sequence
    dtype: torch.dtype
    device: torch.device  # of its logits and states
    hidden_states: Tensor | None  # [R, hidden], before the head, of the latest forward; None: not kept

    @property
    def pages(self) -> BlockManager: ...

    @property
    def native_forward(self) -> NativeForward | None:
        """The whole forward in native code; None where the model has none, or where the states are read."""

    @property
    def has_rollout(self) -> bool: ...

    @property
    def pipelined_model(self) -> PipelinedModel | None:
        """The same model for several batches at a time; None where a batch is computed in the call."""

    def forward(self, batch: TokenBatch) -> Tensor:
        """Return logits ``[R, V]`` of the rows that the slices ask for, in order.

        Overwrites cache entries from ``start`` on. The caller reserves room through ``pages`` first.
        """

    def rollout(self, batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        """Score the batch, then choose and feed tokens of each slice one by one; the last chosen token is not fed.

        Slices with the largest depth come first. Every slice asks for its last row, and the cache has room for the
        depth of the first slice. Rows before the last give ``hits`` alone. Requires ``has_rollout``.
        """

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep accepted nodes: moves their cache entries together when a path is not a prefix of its tree."""

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""


class PipelinedModel(Model, Protocol):
    """A model that computes several batches at a time, in the order of their submission.

    Attributes:
        max_in_flight: batches that may be unfinished at the same time.
    """

    max_in_flight: int

    def submit(self, batch: TokenBatch) -> CancellableFuture[BatchOutput]:
        """Like ``forward``; the output arrives later, with tokens for slices that have ``sampling``.

        Raises as ``forward``, and ``VerifierLost``.
        """


class Blend(Protocol):
    """Joins the logits of several models, row by row. Pure. ``cls.build(options, count)`` makes it for ``count``."""

    name: str  # as responses declare it
    exact: bool  # the blend is what the user asks for; False: it relaxes the first for speed
    members: tuple[int, ...]  # the models whose logits the blend reads
    recipe: NativeBlend | None  # the blend in the native library, with equal bits; None: not in the library

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """``[R, V]`` per member, in their order, to ``[R, V]``; only differences within a row count."""


class BlendFactory(Protocol):
    """What the table of blends holds: a class of blends, or a function that takes the place of the class."""

    Options: ClassVar[type[PluginOptions]]

    def build(self, options: Any, count: int) -> Blend:
        """The blend of ``count`` models."""


class Verifier(Protocol):
    """Scores drafts with the target and applies each request's acceptance method; the engine's verifier.

    Attributes:
        max_in_flight: submissions that may be unfinished at the same time. The verifier computes them in their order.
    """

    @property
    def max_in_flight(self) -> int: ...

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        """The acceptance method that this sequence's request is verified by."""

    def submit(
        self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]
    ) -> CancellableFuture[list[StepOutput]]:
        """Score and verify; the result has one output per entry, in order.

        A sequence does not change before the result of its oldest submission is collected. Its other submissions have
        ``assumed`` tokens; an output whose entry no longer ``holds`` then has no result. After an error the engine
        calls ``free`` for the submission's sequences, and computes them again.
        """

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep accepted nodes in the caches of the target's models; other sequences may be in flight."""

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Nothing reads the outputs of their windows in flight. Unknown ids are ignored."""


class Executor(Protocol):
    """Runs a drafter in this thread, in another thread or in another process. Calls run in the order of submission.

    If ``present`` is false, submitted calls fail at once.
    """

    parallel: bool  # the drafter does not wait for the threads and locks of the target
    busy: float  # seconds of the drafter's calls so far

    @property
    def present(self) -> bool:
        """Whether the drafter can be called now."""

    @property
    def load(self) -> float:
        """Proposals that wait for an answer; of the least loaded machine, where several serve the drafter."""

    def submit(self, method: str, *args: Any) -> Future[Any]:
        """Submit a call of ``propose``, ``commit`` or ``free``."""

    def close(self) -> None:
        """End the drafter's thread or process. No call follows."""


class MultiStepRunner(Protocol):
    """Runs one or several steps as one native call: draft, score, verify."""

    wakeup_fd: int  # a readable descriptor signals pending commands; the call then stops after one step. Negative: none

    def prepare(self, plan: SchedulerOutput) -> None:
        """Let a pool score known tokens where scores are due; afterwards one drafter may draft alone."""

    def supports(self, plan: SchedulerOutput) -> dict[str, str]:
        """Return the reasons why Python drafts or verifies for requests of the plan, by id. Pure: reserves nothing."""

    def run(
        self,
        entries: Sequence[ScheduledRequest],
        steps: int,
        drafts: Mapping[str, Draft | None],
        blend: NativeBlend = ...,
    ) -> tuple[list[StepOutput], StepTimes]:
        """Return the outputs of up to ``steps`` steps. No further step begins after a request may have ended.

        Args:
            drafts: by id, the drafts that Python made; None for a request without a draft. With any entry, the call
                runs one step.
            blend: of target and drafter, by which the requests are verified; by default the target alone. Another
                blend allows no drafts of Python, and no rows of logits.
        """

    def free(self, ids: Sequence[str]) -> None:
        """Forget requests. Unknown ids are ignored."""


@dataclass(frozen=True, slots=True)
class ModeComponents:
    """The components that a step uses.

    Attributes:
        executor: runs the same drafter while drafts are verified; None: the drafter runs in the engine thread.
        multi_step: drafts and verifies in one call; None: no such runner, for the reason ``why_no_multi_step``.
    """

    drafter: Drafter | None
    verifier: Verifier
    policy: Policy
    clock: Clock
    executor: Executor | None = None
    multi_step: MultiStepRunner | None = None
    why_no_multi_step: str = ""


class WindowsAhead(Protocol):
    """Submits further windows of a sequence in flight, as if all of the windows before were accepted (PipeInfer).

    The engine calls these methods while no other sequence is in flight or ready, and the oldest window is computed.
    """

    def draft(self, sequence: RequestState) -> int | None:
        """Have the drafter continue the latest window.

        Returns the number of tokens, known or assumed, before the next window; None where none is to be submitted.
        """

    def submit(self, plan: SchedulerOutput, oldest_done: Callable[[], bool]) -> SubmittedStep:
        """Submit the next window, with ``assumed`` tokens; leaves out an entry without a draft.

        Args:
            oldest_done: whether the oldest window is computed, so that no draft is waited for.
        """


class ExecutionMode(Protocol):
    """Orders drafting and verification; built from a ``ModeComponents``."""

    components: ModeComponents
    learns: ClassVar[bool]  # the order depends on the acceptance of earlier drafts
    info: ExecutionInfo

    def __init__(self, components: ModeComponents) -> None: ...

    @property
    def windows_ahead(self) -> WindowsAhead | None:
        """Submits further windows of sequences in flight; None where a sequence has one window in flight."""

    def submit(self, plan: SchedulerOutput) -> SubmittedStep:
        """Draft, and submit drafts to the verifier. A later plan has the entries that are left out."""

    def collect(self, step: SubmittedStep) -> StepResult:
        """Wait for a submitted step; steps are collected in the order of submission. Raises the verifier's error."""

    def commit(self, commits: Sequence[Commit]) -> None:
        """Report what each sequence gained to the target first, then to the drafter."""

    def free(self, ids: Sequence[str]) -> None:
        """Drop sequences from all components, see ``Verifier.free``. Unknown ids are ignored."""

    def close(self) -> None:
        """Wait for pending calls of the drafter, and drop their results."""
