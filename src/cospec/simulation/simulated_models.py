"""Replacements of the target: a model that holds pages, and a verifier that knows the outputs and takes time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Protocol

import torch

from cospec.acceptance.match import Match
from cospec.core.interfaces import BlockManager, NativeForward, PipelinedModel
from cospec.core.model_io import RolloutOutput, RolloutParams, TokenBatch
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.submitted_step import CancellableFuture, FinishedFuture
from cospec.core.types import Commit, Draft, RequestState, ScheduledRequest, StepOutput, VerifyResult
from cospec.distributed.links import LinkClock
from cospec.errors import VerifierLost
from cospec.policies.latency.forward import ForwardLatency
from cospec.simulation.clock import NO_OUTAGES, Outages, SimulatedFuture, SimulatedPipeline, VirtualClock
from cospec.simulation.scenario import TargetConfig
from cospec.simulation.workload import SimulatedRequest


class SimulatedForwards(Protocol):
    """The forwards of a simulated model."""

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """See ``Model.forward``."""

    def rollout(self, batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        """See ``Model.rollout``."""


class SimulatedModel:
    """Replaces a model; holds the cache's pages.

    Args:
        forwards: None: the model is never called, because a ``SimulatedVerifier`` needs no logits.
    """

    def __init__(self, pages: BlockManager, vocab_size: int = 2, forwards: SimulatedForwards | None = None) -> None:
        self.pages, self.max_len = pages, 1 << 20
        self.name, self.vocab_size, self.dtype = "simulated", vocab_size, torch.float32
        self.hidden_states: torch.Tensor | None = None
        self.native_forward: NativeForward | None = None
        self.pipelined_model: PipelinedModel | None = None
        self.has_rollout = forwards is not None
        self.device = torch.device("cpu")
        self._forwards = forwards

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """Return the rows of the forwards."""
        assert self._forwards is not None, "the verifier needs no logits"
        return self._forwards.forward(batch)

    def rollout(self, batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        """Return the tokens of the forwards."""
        assert self._forwards is not None, "the verifier needs no logits"
        return self._forwards.rollout(batch, params)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Nothing to do: there is no cache."""

    def free(self, ids: Sequence[str]) -> None:
        """Free the pages."""
        for id in ids:
            self.pages.free(id)


class SimulatedVerifier:
    """Keeps correct tokens, after the time of the target's forward.

    With one step in flight the step blocks the clock. With several, each enters the pipeline and leaves it later.

    Args:
        requests: the requests of the engine, by id.
        outages: of a stage; a step in flight is lost, and the next step waits for the end.
    """

    def __init__(
        self,
        cache: SimulatedModel,
        target: TargetConfig,
        cost: ForwardLatency,
        clock: VirtualClock,
        requests: Mapping[str, SimulatedRequest],
        outages: Outages = NO_OUTAGES,
    ) -> None:
        self._cache, self._target, self._cost, self._clock = cache, target, cost, clock
        self._requests = requests
        self._rule = Match()
        self._busy = 0.0
        self._outages, self._met = outages, 0  # outages after which all caches were lost
        self._lost_at = self._back = 0.0  # begin and end of the last one
        # A single step counts on a clock of its own, whose seconds the speed of the machine then changes.
        self._work = clock if target.steps_in_flight > 1 else VirtualClock()
        self._pipeline = self._stages()
        self.max_in_flight = target.steps_in_flight

    @property
    def busy(self) -> float:
        """Seconds in which the target worked."""
        return self._busy

    def acceptance_method(self, sequence: RequestState) -> AcceptanceMethod:
        """Return the acceptance method of greedy requests."""
        return self._rule

    def submit(
        self, entries: Sequence[ScheduledRequest], drafts: Mapping[str, Draft]
    ) -> CancellableFuture[list[StepOutput]]:
        """Return one output per entry; entries whose assumed tokens are wrong have no result.

        The result raises ``VerifierLost`` where an outage meets the step, or has lost the caches since the step before.
        """
        if self._clock.now < self._lost_at or self._outages.begun(self._clock.now) > self._met:
            return self._lose(max(self._clock.now, self._lost_at))
        self._clock.reach(self._back)
        context = tokens = 0
        outputs = []
        for entry in entries:
            sequence, assumed = entry.sequence, () if entry.assumed is None else entry.assumed.tokens
            draft = drafts.get(sequence.request.id)
            context += sequence.computed + len(assumed)
            tokens += entry.num_tokens
            output, place = self._requests[sequence.request.id].output, entry.base_len - sequence.prompt_len
            if assumed and (tuple(output[place - len(assumed) : place]) != assumed or place >= len(output)):
                tokens += 0 if draft is None else len(draft.tokens)
                outputs.append(StepOutput(entry, draft, None))
                continue
            if not entry.samples_token or draft is None or draft.base_len != entry.base_len or not draft.tokens:
                result = VerifyResult((), output[place], False) if entry.samples_token else None
                outputs.append(StepOutput(entry, None, result))
                continue
            tokens += len(draft.tokens)
            path = _right_path(draft, output[place : place + len(draft)])
            result = VerifyResult(path, output[place + len(path)], _is_full_path(draft, path))
            outputs.append(StepOutput(entry, draft, result))
        # The microbatches of all steps in flight occupy every stage.
        microbatches = min(-(-self._target.stages // self.max_in_flight), max(1, len(entries)))
        seconds = self._cost.seconds(context / microbatches, tokens / microbatches, len(entries) / microbatches)
        num_bytes = round(self._target.bytes_per_token * tokens / microbatches)
        before = max(self._work.now, self._pipeline.free_at)
        moment = self._pipeline.enter(microbatches, seconds / self._target.stages, num_bytes)
        done = self._clock.now + moment - self._work.now
        if (lost := self._outages.first(self._clock.now, done)) is not None:
            self._busy += max(0.0, lost - done + moment - before)
            return self._lose(lost)
        if self.max_in_flight > 1:
            self._busy += moment - before
            self._clock.advance(self._target.overhead)
            return SimulatedFuture(self._clock, moment, outputs)
        self._busy += self._clock.advance(moment - self._work.now)
        self._work.reach(moment)
        self._clock.advance(self._target.overhead)
        return FinishedFuture(outputs)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Nothing to do: there is no cache."""

    def free(self, ids: Sequence[str]) -> None:
        """Free the pages."""
        self._cache.free(ids)

    def _stages(self) -> SimulatedPipeline:
        """Return a pipeline without work."""
        link = self._target.link
        seeds = range(link.seed, link.seed + self._target.stages - 1)
        return SimulatedPipeline(self._work, [LinkClock(link, seed) for seed in seeds])

    def _lose(self, moment: float) -> SimulatedFuture:
        """Start new stages after the outage of ``moment``; returns the result of a lost step."""
        self._met, self._lost_at, self._back = self._outages.begun(moment), moment, self._outages.end(moment)
        self._pipeline = self._stages()
        return SimulatedFuture(self._clock, moment, error=VerifierLost("A stage of the target is lost."))


def _right_path(draft: Draft, output: Sequence[int]) -> tuple[int, ...]:
    """Return the nodes that the output follows."""
    path: list[int] = []
    if draft.is_chain:
        agreed = takewhile(bool, (token == right for token, right in zip(draft.tokens, output, strict=False)))
        return tuple(range(sum(agreed)))
    for node, (token, parent) in enumerate(zip(draft.tokens, draft.parents, strict=True)):
        if len(path) < len(output) and token == output[len(path)] and parent == (path[-1] if path else -1):
            path.append(node)
    return tuple(path)


def _is_full_path(draft: Draft, path: Sequence[int]) -> bool:
    """Whether the path ends at a leaf, so that the next token is a bonus token."""
    return (path[-1] if path else -1) not in draft.parents
