"""Steps of a target with one proposing member as native calls, for the requests whose blend has native code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from cospec.core.interfaces import Blend, ModeComponents, Model, MultiStepRunner
from cospec.core.stats import StepTimes
from cospec.core.types import DraftBudget, ScheduledRequest, SchedulerOutput, StepOutput
from cospec.ensemble.ensemble import EnsembleDecoder, ProposingEnsemble
from cospec.ensemble.proposed_tokens import ProposalChains
from cospec.native.library import PLAIN
from cospec.native.multi_step import NativeMultiStep, why_not
from cospec.native.native_drafter import NativeModel
from cospec.native.native_request import NativeDrafters
from cospec.policies.latency.call_latency import ModelCall

TARGET, PROPOSER = 0, 1
SEVERAL_MODELS = "several models"
KNOWN_TOKENS = "known tokens of several models"
LOGPROBS = "log-probabilities of several models"


class MemberCache:
    """The proposer's cache, whose pages the scheduler reserves. Implements ``drafters.interfaces.DraftCache``."""

    def __init__(self, model: Model, chains: ProposalChains) -> None:
        self.model, self._chains = model, chains

    def backlog_len(self, id: str, known: int) -> int:
        """Return 0: a member is fed all known tokens at once, as in its turns."""
        return 0

    def reserve(self, id: str, tokens: Sequence[int], ahead: int) -> int:
        """See ``DraftCache``; there always is room."""
        return min(self._chains.fed(id, PROPOSER), len(tokens) - 1)

    def report_written(self, id: str, fed: int) -> None:
        """See ``DraftCache``."""
        self._chains.set_fed(id, PROPOSER, fed)


def member_runner(decoder: EnsembleDecoder, chains: ProposalChains) -> NativeMultiStep | None:
    """Return what runs steps of two models, of which the second proposes; None where their code is not native."""
    if len(decoder.models) != 2 or any(why_not(model) for model in decoder.models):
        return None
    target, proposer = (model.native_forward for model in decoder.models)
    if target is None or proposer is None:
        return None
    cache = MemberCache(decoder.models[PROPOSER], chains)
    member = NativeModel(cache, proposer, decoder.names[PROPOSER], chains=True)
    return NativeMultiStep(target, decoder.verifier, NativeDrafters(None, True, member))


class NativePart(NamedTuple):
    """The part of a plan that ran natively.

    Attributes:
        outputs: one per native request and step.
        python_path: the other requests of the plan, each with the reason.
    """

    outputs: list[StepOutput]
    times: StepTimes
    python_path: dict[str, str]


class NativeMemberSteps:
    """Chooses the requests of a plan that ``runner`` can run, and runs them: one call per blend."""

    def __init__(self, members: ProposingEnsemble, components: ModeComponents) -> None:
        self._members, self._runner = members, components.multi_step
        self._why_not = components.why_no_multi_step or SEVERAL_MODELS
        self.calls: dict[str, int] = {}  # forward passes of each model in the latest step

    def run(self, plan: SchedulerOutput) -> NativePart:
        """Run the steps of all requests without a reason against them."""
        self.calls = {}
        runner, schedule = self._runner, self._members.policy.proposer_schedule
        if runner is None or schedule.alternate or schedule.order[0] != PROPOSER or not schedule.proposes:
            ids = [entry.sequence.id for entry in plan.entries]
            return NativePart([], StepTimes(), dict.fromkeys(ids, self._why_not))
        short = replace(plan, entries=tuple([_at_most(entry, schedule.gammas[PROPOSER]) for entry in plan.entries]))
        reasons = self._reasons(runner, short)
        outputs, times = list[StepOutput](), list[StepTimes]()
        groups: dict[int, tuple[Blend, list[ScheduledRequest]]] = {}
        for entry in short.entries:
            if entry.sequence.id not in reasons:
                blend = self._members.blend(entry.sequence)
                groups.setdefault(id(blend), (blend, []))[1].append(entry)
        steps = 1 if reasons or len(groups) > 1 else plan.max_steps
        for blend, entries in groups.values():
            found, own = runner.run(entries, steps, {}, blend.recipe or PLAIN)
            times.append(own)
            outputs += self._noted(blend, entries, found, own)
        each = times[0].each if len(times) == 1 else ()
        seconds = StepTimes(sum([own.draft for own in times]), sum([own.target for own in times]), each)
        return NativePart(outputs, seconds, reasons)

    def _reasons(self, runner: MultiStepRunner, plan: SchedulerOutput) -> dict[str, str]:
        """Return the reasons why Python runs requests of the plan, by id."""
        reasons = {entry.sequence.id: reason for entry in plan.entries if (reason := self._reason(entry))}
        able = tuple([entry for entry in plan.entries if entry.sequence.id not in reasons])
        return reasons | runner.supports(replace(plan, entries=able)) if able else reasons

    def _reason(self, entry: ScheduledRequest) -> str | None:
        """Return why Python runs an entry's step, apart from the runner's own reasons."""
        sequence, blend = entry.sequence, self._members.blend(entry.sequence)
        if sequence.request.sampling.logprobs is not None:
            return LOGPROBS
        if blend.recipe is None or (blend.exact and blend.members != (TARGET,)):
            return SEVERAL_MODELS
        chain = self._members.proposal_chain(sequence)
        unread = chain.fed[TARGET] < sequence.computed or bool(chain.pending)
        return KNOWN_TOKENS if unread or not entry.samples_token else None

    def _noted(
        self, blend: Blend, entries: Sequence[ScheduledRequest], outputs: Sequence[StepOutput], times: StepTimes
    ) -> list[StepOutput]:
        """Move the chains to the new tokens, and return the outputs with the calls of each model."""
        members, found = self._members, list[StepOutput]()
        target, proposer = members.names
        lengths = {entry.sequence.id: len(entry.sequence.tokens) for entry in entries}
        passes, rows = [0] * times.steps, 0
        for number, output in enumerate(outputs):
            result, drafted = output.result, 0 if output.draft is None else len(output.draft.tokens)
            accepted = 0 if result is None else len(result.path)
            for place in range(min(accepted + 1, drafted)):
                members.policy.observe_acceptance(PROPOSER, place < accepted)
            own = drafted + (len(blend.members) > 1 and accepted == drafted)
            step, rows = number // len(entries), rows + drafted + 1
            passes[step] = max(passes[step], own)
            found.append(output._replace(model_calls={target: 1} | ({proposer: own} if own else {})))
            if result is not None:
                lengths[output.entry.sequence.id] += accepted + 1
        for id, length in lengths.items():
            members.chains.move_to(id, length, TARGET)
        self._count(target, times.steps)
        self._count(proposer, sum(passes))
        if times.steps == 1:
            self._observe(PROPOSER, ModelCall(len(entries), len(entries), passes[0]), times.draft)
            self._observe(TARGET, ModelCall(rows, len(entries)), times.target)
        return found

    def _count(self, name: str, calls: int) -> None:
        self.calls[name] = self.calls.get(name, 0) + calls

    def _observe(self, model: int, call: ModelCall, seconds: float) -> None:
        if call.passes:
            self._members.policy.observe_call(model, call, seconds)
            self._members.policy.observe_turn(model, call, seconds)


def _at_most(entry: ScheduledRequest, depth: int) -> ScheduledRequest:
    """Return the entry with a budget of one proposal; a collaborative step may need room for several."""
    depth = min(entry.budget.depth, depth)
    return replace(entry, budget=DraftBudget(depth=depth, max_nodes=depth))
