"""Interfaces of models, blends, verifiers, execution modes and executors; ``plugins`` has those of plug-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from cospec.core.model_io import RolloutOutput, RolloutParams, TokenBatch
from cospec.core.plugins import AcceptanceMethod, Drafter, Policy
from cospec.core.stats import ExecutionInfo, ModelCall, StepTimes
from cospec.core.types import (
    Commit,
    Draft,
    DraftContext,
    RequestState,
    ScheduledRequest,
    SchedulerOutput,
    StepOutput,
)
from cospec.native.library import NativeBlend
from cospec.options import Options as PluginOptions

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

    def match_prefix(self, id: str, tokens: Sequence[int]) -> int:
        """Open a sequence and reuse cached pages of its prefix; returns how many tokens are already there."""

    def can_allocate(self, lengths: Iterable[tuple[str, int]]) -> bool:
        """Whether there is room for so many tokens of all these sequences together; changes nothing."""

    def allocate(self, id: str, length: int) -> bool:
        """Make room for ``length`` tokens in all; False, with nothing changed, when there is none."""

    def cache_blocks(self, id: str, tokens: Sequence[int], computed: int) -> None:
        """Offer the full pages of ``tokens[:computed]``, computed and committed, for reuse by other sequences."""

    def free(self, id: str) -> None:
        """Give back a sequence's pages. Unknown ids are ignored."""

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a page is leaked, shared by mistake or counted wrongly."""


class NativeForward(Protocol):
    """A forward in native code on one cache, without packed batches.

    Attributes:
        names: the native library's handles of the model and the cache.
        vocab_size: columns of the logits.
    """

    names: tuple[int, int]
    vocab_size: int

    def pages(self, id: str) -> tuple[int, int]:
        """Return the address of a sequence's page table, and the number of pages."""

    def score(self, batch: TokenBatch) -> Tensor:
        """Return float32 logits ``[R, V]``; raises as ``Model.forward``, with nothing done."""

    def rollout(self, batch: TokenBatch, picks: Sequence[RolloutParams]) -> RolloutOutput:
        """Choose and feed tokens of each segment, see ``Model.rollout``; raises as above."""


class Model(Protocol):
    """A causal language model that scores packed batches against its own KV cache."""

    name: str
    vocab_size: int
    max_len: int  # tokens of one sequence
    dtype: torch.dtype
    device: torch.device  # of its logits and states
    states: Tensor | None  # [R, hidden], what the latest forward's logits were read from; None unless loaded to tell

    @property
    def pages(self) -> BlockManager: ...

    @property
    def direct(self) -> NativeForward | None:
        """The whole forward in native code; None where the model has none, or where the states are read."""

    @property
    def has_rollout(self) -> bool: ...

    def forward(self, batch: TokenBatch) -> Tensor:
        """Logits ``[R, V]`` for the rows that the segments ask for, in order; writes the cache after ``start``.

        Room must have been reserved through ``pages``. Entries after ``start`` are overwritten."""

    def rollout(self, batch: TokenBatch, picks: Sequence[RolloutParams]) -> RolloutOutput:
        """Score the batch, then choose and feed tokens of each segment one by one, the last one unfed.

        The picks say how many; the longest come first. Every segment asks for its last row and has room for all that
        the first one feeds. Only with ``has_rollout``."""

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep accepted nodes: moves their cache entries together when a path is not a prefix of its tree."""

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""


class VocabMapping(Protocol):
    """What a drafter's tokens are to the target's."""

    same: bool  # ids and rows are the target's own
    rows: int  # number of last rows of logits that ``behind`` needs of a sequence; a short sequence has fewer

    def read(self, context: DraftContext) -> tuple[Sequence[int], int] | None:
        """Return the sequence in the drafter's ids, and the length of the prefix unchanged since the last call: the ids
        of that call, followed by what ``to_own`` makes of the tokens since. None: it cannot be read at this token."""

    def settled(self, context: DraftContext) -> int:
        """How many leading tokens of a sequence that was read will never be read otherwise."""

    def behind(self, texts: Sequence[Sequence[int]], logits: Tensor) -> Tensor:
        """Rows ``[S, V]`` over the target's ids after ``texts [S]``, from the last rows of each, text after text."""

    def to_own(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Draft tokens in the drafter's ids."""

    def to_target(self, logits: Tensor) -> Tensor:
        """Rows over the drafter's ids to rows ``[R, V]`` over the target's, minus infinity where it has no token."""

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""


class TargetInfo(Protocol):
    """What drafters know of the target, wherever they run. A ``Model`` implements it."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...


class DrafterBuildContext(Protocol):
    """What the engine offers to a drafter that is being built."""

    @property
    def target(self) -> TargetInfo:
        """What the drafts are for."""

    target_path: Path | None  # the folder of its weights, when it has one
    default_drafter: str | None  # the drafter that belongs to the target, when it has one
    default_heads: str | None  # the heads that belong to the target, when it has some
    native: bool  # whether native drafting is allowed

    def load_drafter(self, name: str) -> Model:
        """A model with the target's vocabulary; raises ``InvalidInput`` when it has another."""

    def load_translated(self, name: str) -> tuple[Model, VocabMapping]:
        """A model with any vocabulary, and what that is to the target's; ``InvalidInput`` where they share nothing."""


class Blend(Protocol):
    """Joins the logits of several models, row by row. Pure. ``cls.build(options, count)`` makes it for ``count``."""

    name: str  # as responses declare it
    members: tuple[int, ...]  # the models whose logits the blend reads
    recipe: NativeBlend | None  # the same for the native library, bit by bit; None: it has no such blend

    def combine(self, logits: Sequence[Tensor]) -> Tensor:
        """``[R, V]`` per member, in their order, to ``[R, V]``; only differences within a row count."""


class BlendFactory(Protocol):
    """What the table of blends holds: a class of blends, or a function that takes the place of the class."""

    Options: ClassVar[type[PluginOptions]]

    def build(self, options: Any, count: int) -> Blend:
        """The blend of ``count`` models."""


class Verifier(Protocol):
    """Scores drafts with the target and applies each request's acceptance method; the engine's verifier."""

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        """The acceptance method that this sequence's request is verified by."""

    def verify(self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]) -> list[StepOutput]:
        """One outcome per entry, in order; entries without a draft are computed all the same."""

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep what was accepted in the caches of the models that verify."""

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""


class Future(Protocol):
    """A result that may still be on its way; ``concurrent.futures.Future`` is one."""

    def done(self) -> bool:
        """Whether ``result`` comes without waiting."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for it.

        Raises:
            TimeoutError: it did not come within ``timeout`` seconds.
            DrafterLost: it never will.
        """


class Executor(Protocol):
    """A drafter that works somewhere: in this thread, another one, another process or another machine.

    What is submitted is done in the order of submission.
    """

    parallel: bool  # whether overlapping is worth a try: the target's own threads and locks are not in its way
    busy: float  # seconds that it has worked so far, as far as it is known here

    @property
    def present(self) -> bool:
        """Whether it can be asked now; what is asked of one that cannot is lost at once."""

    def submit(self, method: str, *args: Any) -> Future:
        """Have ``propose``, ``commit`` or ``free`` called."""

    def close(self) -> None:
        """End the thread or process that it works in; it is asked for nothing any more."""


class ProposerSchedule(Protocol):
    """Which members of an ensemble propose how many tokens, and in which order (CoS section 3)."""

    @property
    def gammas(self) -> tuple[int, ...]:
        """Tokens of a proposal, per model."""

    @property
    def order(self) -> tuple[int, ...]:
        """Models in the order of their turns; the first is the default proposer."""

    @property
    def alternate(self) -> bool:
        """Whether scorers go on proposing; otherwise only the default proposer proposes."""

    @property
    def proposes(self) -> bool:
        """Whether anybody does."""


class ProposerPolicy(Protocol):
    """Chooses the proposer schedule from measured calls, turns and acceptances."""

    @property
    def proposer_schedule(self) -> ProposerSchedule:
        """For the next turn."""

    def observe_call(self, model: int, call: ModelCall, seconds: float) -> None:
        """A call of the model took so long."""

    def observe_turn(self, model: int, call: ModelCall, seconds: float) -> None:
        """A turn of the model took so long, with all that came with it; ``call`` adds its calls up."""

    def observe_step(self, turns: int, seconds: float) -> None:
        """Record the seconds of a step outside of its ``turns``."""

    def observe_acceptance(self, proposer: int, accepted: bool) -> None:
        """Record whether a proposal of the model was accepted."""


DraftToVerify = tuple[ScheduledRequest, Draft | None]


class Ensemble(Protocol):
    """Several models, one distribution: members score, a blend joins logits, acceptance methods verify."""

    @property
    def models(self) -> Sequence[Model]:
        """In the order of the configuration."""

    @property
    def names(self) -> Sequence[str]:
        """Of the models, each once."""

    @property
    def policy(self) -> ProposerPolicy:
        """Who proposes."""

    def proposal_queue(self, sequence: RequestState) -> Any:
        """What the models have computed of a sequence: an ``ensemble.proposal_queue.ProposalQueue``."""

    def blend(self, sequence: RequestState) -> Blend:
        """The blend that the sequence's request is written by."""

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        """The acceptance method that the sequence's request is verified by."""

    def decide(
        self, blend: Blend, cases: Sequence[DraftToVerify], counts: Sequence[int], queues: Sequence[Tensor]
    ) -> list[StepOutput]:
        """One outcome per case, by ``queues [R, V]`` of every member of the blend.

        The last ``counts[i]`` rows of a case are those that its draft is verified by; only a single case has other
        rows. A blend that cannot be computed gives outcomes with an error.
        """

    def limit_torch_threads(self) -> AbstractContextManager[None]:
        """The context that a step runs in."""

    def score_in_parallel(self, score: Callable[[int], None]) -> None:
        """Have all models score at the same time, where that is how they are run; otherwise do nothing."""

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""


class MultiStepRunner(Protocol):
    """Drafts, scores and verifies as one call, for several steps if no request ends."""

    wakeup_fd: int  # a file descriptor; no further step begins while the descriptor is readable. Negative: none

    def supports(self, plan: SchedulerOutput) -> dict[str, str]:
        """Return why a part of a request's step runs the readable way, by id; empty where no part does.

        The call cannot draft for these requests, or the verifier verifies their drafts. Pure: reserves nothing.
        """

    def run(
        self, entries: Sequence[ScheduledRequest], steps: int, drafts: Mapping[str, Draft | None]
    ) -> tuple[list[StepOutput], StepTimes]:
        """Return the outputs of up to ``steps`` steps, until a request may have ended.

        Args:
            drafts: by id, of the requests that the call does not draft for; None for a request without a draft. The
                call then runs one step.
        """

    def free(self, ids: Sequence[str]) -> None:
        """Forget requests. Unknown ids are ignored."""


@dataclass(frozen=True, slots=True)
class StepContext:
    """The components that a step uses.

    Attributes:
        executor: runs the same drafter while drafts are verified; None: the drafter runs in the engine thread.
        members: for steps in which several models form one distribution.
        multi_step: drafts and verifies in one call; None: no such runner, for the reason ``why_no_multi_step``.
        native: whether models may draft by ``Model.rollout``.
    """

    drafter: Drafter | None
    verifier: Verifier
    policy: Policy
    clock: Clock
    executor: Executor | None = None
    members: Ensemble | None = None
    multi_step: MultiStepRunner | None = None
    why_no_multi_step: str = "native off"
    native: bool = True


class ExecutionMode(Protocol):
    """The only place that orders drafting against verification; built from a ``StepContext``."""

    components: StepContext
    learns: ClassVar[bool]  # whether the order follows what earlier drafts gained, where drafter and target can overlap
    times: StepTimes  # of the latest run
    info: ExecutionInfo
    readable: Mapping[str, str]  # why parts of the latest run were not native, by the id of the request

    def __init__(self, components: StepContext) -> None: ...

    def run(self, plan: SchedulerOutput) -> list[StepOutput]:
        """Outcomes of the entries that were verified, in order; entries left out come again with a later plan."""

    def commit(self, commits: Sequence[Commit]) -> None:
        """Broadcast what each sequence gained to all components."""

    def free(self, ids: Sequence[str]) -> None:
        """Drop sequences from all components. Unknown ids are ignored."""

    def close(self) -> None:
        """Let the drafter come to rest; nothing that it was asked for is used."""
