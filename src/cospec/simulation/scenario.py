"""Scenarios: machines, requests, and the variants to compare; read from YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from cospec.config import LONGEST_DRAFT, CollaborationConfig, LinkConfig, SpeculativeConfig, read_file
from cospec.errors import InvalidInput, reason, words
from cospec.plugin_options import OFF, Options, parse
from cospec.policies.latency.forward import ForwardLatency
from cospec.registry import EXECUTION_MODES, POLICIES

SIMULATOR_ONLY = ("oracle", "random")  # policies of a simulation
Rate = Annotated[float, Field(ge=0, le=1, strict=False)]
Amount = Annotated[float, Field(ge=0, strict=False)]
Positive = Annotated[float, Field(gt=0, strict=False)]


def _link(given: object) -> object:
    """Return the options of a link; a number is its delay in seconds."""
    return {"delay": given} if isinstance(given, int | float) else given


SimulatedLink = Annotated[LinkConfig, BeforeValidator(_link)]


class LatencyConfig(Options):
    """Coefficients of the time model in seconds, or a file of ``cospec profile`` with the coefficients.

    Attributes:
        context: per token in the cache, α_M.
        slopes: per computed token, γ_M, one for each piece between the ``knees``.
        sequence: per sequence.
        fixed: of every pass, δ_M.
        start: of every draft, for any length.
        profile: JSON of ``cospec profile``; ``model`` names an entry, default is the first.
        factor: multiplies all times.
    """

    context: Amount = 0.0
    slopes: tuple[Amount, ...] = Field(default=(0.0,), strict=False)
    knees: tuple[Amount, ...] = Field(default=(), strict=False)
    sequence: Amount = 0.0
    fixed: Amount = 0.0
    start: Amount = 0.0
    profile: str | None = None
    model: str | None = None
    factor: Positive = 1.0

    def built(self, folder: Path) -> ForwardLatency:
        """Build the time model; ``folder`` is the base of a relative profile path.

        Raises:
            InvalidInput: the profile is unreadable, or lacks the model.
        """
        if self.profile is None:
            cost = ForwardLatency(self.context, self.slopes, self.knees, self.sequence, self.fixed, self.start)
            return cost.scaled(self.factor)
        try:
            profiles = json.loads((folder / self.profile).read_text(encoding="utf-8"))["profiles"]
            names = [str(each["name"]) for each in profiles]
            place = 0 if self.model is None else names.index(self.model)
            return ForwardLatency.from_json(profiles[place]["fit"]).scaled(self.factor)
        except (OSError, KeyError, ValueError, TypeError, IndexError) as error:
            raise InvalidInput(
                "profile", words(f"{self.profile} ({reason(error)})"), "a JSON file of cospec profile"
            ) from None


class OutageConfig(Options):
    """A node is not there from ``at`` on, for ``seconds``."""

    at: Amount
    seconds: Positive

    @property
    def span(self) -> tuple[float, float]:
        """Begin and end in seconds."""
        return self.at, self.at + self.seconds


class TargetOutageConfig(OutageConfig):
    """A machine of the target is lost.

    Attributes:
        part: ``replica``: a whole engine, whose requests go on from their tokens on the other engines, or wait.
            ``stage``: a stage. The engine loses its caches, and waits until all stages run again.
        replica: the number of the engine.
    """

    part: Literal["replica", "stage"]
    replica: int = Field(default=0, ge=0)


class MemberConfig(Options):
    """A drafter of the scenario's recording.

    Attributes:
        name: as the recording names the drafter; ``ngram`` is prompt lookup over the recorded tokens.
        cost: instead of the cost of ``DrafterConfig``.
        link: between the member's node and the target, in each direction.
        outages: of the member's node, in order.
    """

    name: str
    cost: LatencyConfig | None = None
    link: SimulatedLink | None = None
    outages: tuple[OutageConfig, ...] = Field(default=(), strict=False)


class DrafterConfig(Options):
    """The drafter and its latency.

    Attributes:
        kind: ``model`` runs one pass per token; ``heads`` give all levels, and trees, in one pass; ``lookup`` costs
            nothing; ``recorded`` proposes what the drafters of the scenario's recording proposed.
        nodes: machines of the drafter, for execution modes that overlap drafter and target.
        cost_per_hour: the price of one machine, in the currency of the target.
        members: recorded drafters; several need a ``combiner``.
        combiner, routing, routing_options, at_most, deadline: of the pool, as in ``speculative_config``.
        parallel: every member drafts on hardware of its own: in a process on the target's machine, or on a node.
    """

    kind: Literal["model", "heads", "lookup", "recorded"] = "model"
    cost: LatencyConfig = LatencyConfig()
    nodes: int = Field(default=1, ge=1)
    cost_per_hour: Amount = 0.0
    members: tuple[MemberConfig, ...] = Field(default=(), strict=False)
    combiner: str | None = None
    routing: str = "hedge"
    routing_options: dict[str, Any] = Field(default={})
    at_most: int | None = Field(default=None, ge=1)
    deadline: Positive | None = None
    parallel: Literal["process", "node"] | None = None

    @model_validator(mode="after")
    def _fits(self) -> DrafterConfig:
        if bool(self.members) != (self.kind == "recorded"):
            raise ValueError("kind 'recorded' with members, and no members with another kind")
        if len(self.members) > 1 and self.combiner is None:
            raise ValueError("a combiner for several members")
        if self.parallel is not None and self.combiner is None:
            raise ValueError("a combiner for parallel members")
        remote = any(each.link not in (None, LinkConfig()) or each.outages for each in self.members)
        if remote and self.parallel != "node":
            raise ValueError("parallel: node, where members have links or outages")
        return self

    @property
    def machines(self) -> int:
        """Machines that have a price."""
        return self.nodes if self.parallel is None else len(self.members)


class ModelConfig(Options):
    """A model of an ensemble.

    Attributes:
        cost: instead of the cost of ``TargetConfig``.
        acceptance: α, the probability that the model's likeliest token is the ensemble's; None: as the model of this
            name in the scenario's recording, position by position.
    """

    name: str
    cost: LatencyConfig | None = None
    acceptance: Rate | None = None


class TargetConfig(Options):
    """The verification server.

    Attributes:
        members: the models of an ensemble, all on one machine; empty for one target.
        ensemble: the blend of the members, as the engine's option.
        stages: of a pipeline; each step is divided into microbatches that keep all stages busy.
        steps_in_flight: steps in the pipeline at a time; with as many as stages, each step is one microbatch.
        link: between two stages.
        bytes_per_token: of the message between two stages, for a link with a bandwidth.
        overhead: seconds of every step outside of drafting and verification.
        replicas: number of engines; a request goes to the engine with the fewest requests.
        cost_per_hour: the price of one engine's target, in any currency.
    """

    cost: LatencyConfig
    members: tuple[ModelConfig, ...] = Field(default=(), strict=False)
    ensemble: dict[str, Any] = Field(default={"method": "weighted"})
    stages: int = Field(default=1, ge=1)
    steps_in_flight: int = Field(default=1, ge=1)
    link: SimulatedLink = LinkConfig()
    bytes_per_token: Amount = 0.0
    overhead: Amount = 0.0
    replicas: int = Field(default=1, ge=1)
    cost_per_hour: Amount = 0.0

    @model_validator(mode="after")
    def _fits(self) -> TargetConfig:
        if self.members and (self.stages > 1 or self.steps_in_flight > 1 or self.overhead or self.link != LinkConfig()):
            raise ValueError("members without stages, steps_in_flight, overhead and link")
        return self


class SpeedConfig(Options):
    """The machines' speed for a while: work of ``seconds`` takes ``factor`` times as long."""

    seconds: Positive
    factor: Positive


class LengthConfig(Options):
    """Numbers of tokens: log-normal with mean and coefficient of variation, cut at both ends; variation 0 is fixed."""

    mean: Positive
    variation: Amount = 0.0
    least: int = Field(default=1, ge=1)
    most: int = Field(default=4096, ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> LengthConfig:
        if self.least > self.most:
            raise ValueError("least must not exceed most")
        return self


class DomainConfig(Options):
    """A kind of request.

    Attributes:
        weight: share of the requests.
        acceptance: α, the probability that a draft token is correct after correct tokens: one number, or one per draft
            position. The last number holds for all later positions.
        siblings: the same for a further choice at a position, after wrong ones; None is the acceptance of the first.
        trace: a file with one JSON list of 0 and 1 per request: whether the drafter predicts each output token
            correctly. Requests use the lists in turn.
    """

    name: str = "all"
    weight: Positive = 1.0
    acceptance: Rate | Annotated[tuple[Rate, ...], Field(min_length=1, strict=False)] = 0.7
    siblings: Rate | None = None
    trace: str | None = None
    prompt: LengthConfig = LengthConfig(mean=128)
    output: LengthConfig = LengthConfig(mean=128)


class RateSegment(Options):
    """A number of requests per second for a number of seconds."""

    rate: Positive
    seconds: Positive


class ArrivalConfig(Options):
    """The arrival process of requests.

    Attributes:
        kind: ``open``: by rate, Poisson for ``burstiness`` 1. ``closed``: ``concurrency`` requests at any time.
            ``trace``: recorded times. ``segments``: Poisson at repeated segments of changing rate.
        rates: requests per second, one run per rate. For ``trace`` and ``segments``: factors that speed time up, one
            run per factor.
    """

    kind: Literal["open", "closed", "trace", "segments"] = "open"
    rates: tuple[Positive, ...] = Field(default=(1.0,), min_length=1, strict=False)
    burstiness: Positive = 1.0
    concurrency: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(8,), min_length=1, strict=False)
    trace: str | None = None
    segments: tuple[RateSegment, ...] = Field(default=(), strict=False)

    @model_validator(mode="after")
    def _complete(self) -> ArrivalConfig:
        if self.kind == "segments" and not self.segments:
            raise ValueError("at least one segment for kind segments")
        if self.kind == "trace" and self.trace is None:
            raise ValueError("a trace file for kind trace")
        return self


class ScenarioVariant(Options):
    """One configuration to compare: ``speculative_config`` and other differences.

    Attributes:
        policy: a policy's name, ``oracle`` or ``random``.
        collaboration: how the target's members propose, as the engine's option; None: the drafter proposes.
        drafting: instead of the scenario's.
        acceptance: by domain name, instead of the domains' values.
        max_num_seqs: instead of the scenario's.
        steps_in_flight: instead of the target's.
        outages: of machines of the target.
    """

    name: Annotated[str, OFF]
    policy: Annotated[str, OFF] = "auto"
    num_speculative_tokens: Annotated[int, Field(ge=0, le=LONGEST_DRAFT)] | Literal["auto"] = "auto"
    policy_options: Mapping[str, Any] = Field(default_factory=dict)
    widths: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(), strict=False)
    max_nodes: int | None = Field(default=None, ge=1, le=LONGEST_DRAFT)
    execution_mode: str = "sequential"
    collaboration: CollaborationConfig | None = None
    drafting: DrafterConfig | None = None
    acceptance: Mapping[str, Rate] = Field(default_factory=dict)
    max_num_seqs: int | None = Field(default=None, ge=1)
    steps_in_flight: int | None = Field(default=None, ge=1)
    outages: tuple[TargetOutageConfig, ...] = Field(default=(), strict=False)

    def check_names(self, where: str) -> None:
        """Raise ``InvalidInput`` about an unknown execution mode, policy or option of the policy.

        Args:
            where: prefix of the field names in errors.
        """
        EXECUTION_MODES.check(self.execution_mode, field=f"{where}execution_mode")
        POLICIES.check(self.policy, "auto", *SIMULATOR_ONLY, field=f"{where}policy")
        if self.policy in SIMULATOR_ONLY:
            if self.policy_options:
                raise InvalidInput(f"{where}policy_options", dict(self.policy_options), f"absent for {self.policy}")
            return
        name = SpeculativeConfig(
            policy=self.policy, num_speculative_tokens=self.num_speculative_tokens, widths=self.widths
        ).policy_name
        parse(POLICIES.load(name).Options, self.policy_options, f"{where}policy_options.")


class Scenario(Options):
    """A simulation.

    Attributes:
        kv_tokens: capacity of the target's cache in tokens.
        requests: of each run.
        recording: a file of ``cospec bench record``. Requests are then recorded requests in turn; each domain is a
            domain of the recording, or ``all``.
        pace: repeated speeds of every replica; drafters on their own nodes keep full speed.
    """

    description: str = ""
    seed: int = Field(default=0, ge=0)
    requests: int = Field(default=500, ge=1)
    max_num_seqs: int = Field(default=64, ge=1)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    kv_tokens: int = Field(default=1_000_000, ge=64)
    recording: str | None = None
    target: TargetConfig
    drafting: DrafterConfig = DrafterConfig()
    domains: tuple[DomainConfig, ...] = Field(default=(DomainConfig(),), min_length=1, strict=False)
    arrivals: ArrivalConfig = ArrivalConfig()
    pace: tuple[SpeedConfig, ...] = Field(default=(), strict=False)
    variants: tuple[ScenarioVariant, ...] = Field(min_length=1, strict=False)

    @classmethod
    def read(cls, path: Path) -> Scenario:
        """Read a YAML file.

        Raises:
            InvalidInput: the file is unreadable, or a key or value is wrong. The error names the field.
        """
        return parse(cls, read_file(path))

    def check(self) -> None:
        """Check that the parts fit together.

        Raises:
            InvalidInput: a name is unknown or used twice.
        """
        for kind in ("domains", "variants"):
            names = [each.name for each in getattr(self, kind)]
            for name in names:
                if names.count(name) > 1:
                    raise InvalidInput(f"{kind}.name", name, "a unique name")
        if self.pace and self.target.steps_in_flight > 1:
            raise InvalidInput("target.steps_in_flight", self.target.steps_in_flight, "1 with pace")
        for number, each in enumerate(self.variants):
            each.check_names(f"variants[{number}].")
            if (self.pace or self.target.members) and each.steps_in_flight is not None:
                field = f"steps_in_flight of variant {each.name}"
                raise InvalidInput(field, each.steps_in_flight, "absent with pace or target.members")
            self._check_outages(each)
        if not self.target.members and (found := [each.name for each in self.variants if each.collaboration]):
            raise InvalidInput(f"collaboration of variant {found[0]}", words("given"), "absent without target.members")
        domains = [domain.name for domain in self.domains]
        drafters = self.drafting, *(each.drafting for each in self.variants if each.drafting is not None)
        if self.recording is None and any(each.kind == "recorded" for each in drafters):
            raise InvalidInput("recording", words("missing"), "a file of cospec bench record for recorded drafters")
        for variant in self.variants:
            for name in variant.acceptance:
                if name not in domains:
                    raise InvalidInput(f"acceptance of variant {variant.name}", name, f"for {', '.join(domains)}")

    def _check_outages(self, variant: ScenarioVariant) -> None:
        """Refuse outages of machines that the target has not."""
        for number, each in enumerate(variant.outages):
            field = f"outages[{number}] of variant {variant.name}"
            if each.replica >= self.target.replicas:
                raise InvalidInput(f"{field}.replica", each.replica, f"a number below {self.target.replicas}")
            if each.part == "stage" and (self.pace or self.target.members):
                raise InvalidInput(f"{field}.part", each.part, "replica with pace or target.members")
