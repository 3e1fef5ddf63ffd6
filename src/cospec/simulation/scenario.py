"""What is simulated: machines, requests, and the variants to compare; read from YAML."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from cospec.config import LONGEST_DRAFT, read_file
from cospec.errors import InvalidInput, words
from cospec.options import Options, parse
from cospec.policies.latency.forward import ForwardLatency

Rate = Annotated[float, Field(ge=0, le=1, strict=False)]
Amount = Annotated[float, Field(ge=0, strict=False)]
Positive = Annotated[float, Field(gt=0, strict=False)]


class LatencyConfig(Options):
    """Coefficients of the time model in seconds, or a file of ``cospec profile`` to take them from.

    Attributes:
        context: per token in the cache, α_M.
        slopes: per token computed, γ_M, one for each piece between the ``knees``.
        sequence: per sequence.
        fixed: of every pass, δ_M.
        start: of every draft, whatever its length.
        profile: JSON of ``cospec profile``; ``model`` names one of its entries, the first one is taken otherwise.
        factor: how many times as slow.
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
        """The time model; a profile is looked for beside the scenario.

        Raises:
            InvalidInput: the profile cannot be read, or has no such model.
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
            raise InvalidInput("profile", words(f"{self.profile} ({error})"), "a JSON file of cospec profile") from None


class DrafterConfig(Options):
    """Who drafts, and what that takes.

    Attributes:
        kind: a model steps once per token; heads give all levels, and trees, in one pass; a lookup costs nothing.
        nodes: machines of its own that it runs on, where the round lets it work beside the target.
    """

    kind: Literal["model", "heads", "lookup"] = "model"
    cost: LatencyConfig = LatencyConfig()
    nodes: int = Field(default=1, ge=1)


class TargetConfig(Options):
    """The verification server.

    Attributes:
        stages: of a pipeline; a batch crosses them in microbatches, which keep all of them busy.
        link: seconds between two stages.
        overhead: of every round outside of drafting and verification.
        replicas: whole engines; a request goes to the one with the fewest.
    """

    cost: LatencyConfig
    stages: int = Field(default=1, ge=1)
    link: Amount = 0.0
    overhead: Amount = 0.0
    replicas: int = Field(default=1, ge=1)


class SpeedConfig(Options):
    """How fast the machines are for a while: work of so many ``seconds`` takes ``factor`` times as long."""

    seconds: Positive
    factor: Positive


class LengthConfig(Options):
    """Tokens: a log-normal distribution with this mean and coefficient of variation, cut at both ends; 0 is fixed."""

    mean: Positive
    variation: Amount = 0.0
    least: int = Field(default=1, ge=1)
    most: int = Field(default=4096, ge=1)

    @model_validator(mode="after")
    def _in_order(self) -> LengthConfig:
        if self.least > self.most:
            raise ValueError("least up to most")
        return self


class DomainConfig(Options):
    """A kind of request.

    Attributes:
        weight: its share.
        acceptance: α: the chance that a draft token is right when those before it are; one number, or one per position
            in the draft, whose last holds for those behind.
        trace: a file with one JSON list of 0 and 1 per request instead: whether the drafter would get each token of the
            output right. Requests take them in turn.
    """

    name: str = "all"
    weight: Positive = 1.0
    acceptance: Rate | Annotated[tuple[Rate, ...], Field(min_length=1, strict=False)] = 0.7
    trace: str | None = None
    prompt: LengthConfig = LengthConfig(mean=128)
    output: LengthConfig = LengthConfig(mean=128)


class RateSegment(Options):
    """So many requests per second for so many seconds."""

    rate: Positive
    seconds: Positive


class ArrivalConfig(Options):
    """How requests come.

    Attributes:
        kind: ``open`` by rate, 1 being Poisson in ``burstiness``; ``closed``: always ``concurrency`` of them;
            ``trace``: recorded times; ``segments``: Poisson at rates that change, again and again.
        rates: requests per second; each is a run of its own. Elsewhere a run for each factor that speeds time up.
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
            raise ValueError("at least one segment where arrivals come in segments")
        if self.kind == "trace" and self.trace is None:
            raise ValueError("the file of a trace where arrivals are recorded")
        return self


class ScenarioVariant(Options):
    """One way of serving: what ``speculative_config`` says, and what else differs.

    Attributes:
        policy: also ``oracle``, which knows what will be accepted, and ``random``.
        drafting: instead of the scenario's.
        acceptance: instead of the domains' own, by name.
        max_num_seqs: instead of the scenario's.
    """

    name: str
    policy: str = "auto"
    num_speculative_tokens: Annotated[int, Field(ge=0, le=LONGEST_DRAFT)] | Literal["auto"] = "auto"
    policy_options: Mapping[str, Any] = Field(default_factory=dict)
    widths: tuple[Annotated[int, Field(ge=1)], ...] = Field(default=(), strict=False)
    max_nodes: int | None = Field(default=None, ge=1, le=LONGEST_DRAFT)
    execution_mode: str = "sequential"
    drafting: DrafterConfig | None = None
    acceptance: Mapping[str, Rate] = Field(default_factory=dict)
    max_num_seqs: int | None = Field(default=None, ge=1)


class Scenario(Options):
    """A simulation.

    Attributes:
        kv_tokens: tokens that the target's cache holds.
        requests: of each run.
        pace: of every replica, one after the other, again and again; drafters on nodes of their own keep theirs.
    """

    description: str = ""
    seed: int = Field(default=0, ge=0)
    requests: int = Field(default=500, ge=1)
    max_num_seqs: int = Field(default=64, ge=1)
    max_num_batched_tokens: int = Field(default=2048, ge=1)
    kv_tokens: int = Field(default=1_000_000, ge=64)
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
            InvalidInput: it cannot be read, or a key or value is wrong, by name.
        """
        return parse(cls, read_file(path))

    def check(self) -> None:
        """Whether its parts fit together.

        Raises:
            InvalidInput: a name stands for two of them, or for none.
        """
        for kind in ("domains", "variants"):
            names = [each.name for each in getattr(self, kind)]
            for name in names:
                if names.count(name) > 1:
                    raise InvalidInput(f"{kind}.name", name, "a name that no other of them has")
        domains = [domain.name for domain in self.domains]
        for variant in self.variants:
            for name in variant.acceptance:
                if name not in domains:
                    raise InvalidInput(f"acceptance of variant {variant.name}", name, f"for {', '.join(domains)}")
