"""The file that declares a cluster: target replicas, drafter nodes, their places and prices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from cospec.config import EngineConfig, LinkConfig, read_file
from cospec.errors import InvalidInput, words
from cospec.plugin_options import Options, parse
from cospec.server.settings import ServerSettings

TIER = "tier"  # the label of a machine that says its price
Price = Annotated[float, Field(ge=0, strict=False)]


class Placement(Options):
    """Where an actor may run; Ray finds a machine that declares all of this.

    Attributes:
        num_cpus, num_gpus: processors that the actor reserves; a part of a processor is allowed.
        resources: amounts of custom resources, declared by ``ray start --resources``.
        labels: label expressions of the machine, such as ``{"zone": "home"}``, declared by ``ray start --labels``.
        tier_prices: prices per hour of machines by their label ``tier``. The actor runs on the cheapest tier with room,
            and metrics count this price. Empty: on any machine, at ``cost_per_hour``.
    """

    num_cpus: float = Field(default=1, ge=0, strict=False)
    num_gpus: float = Field(default=0, ge=0, strict=False)
    resources: Mapping[str, float] = Field(default_factory=dict)
    labels: Mapping[str, str] = Field(default_factory=dict)
    tier_prices: Mapping[str, Price] = Field(default_factory=dict)

    @property
    def actor_options(self) -> dict[str, Any]:
        """The options in Ray's names."""
        found: dict[str, Any] = {"num_cpus": self.num_cpus}
        if self.num_gpus:
            found["num_gpus"] = self.num_gpus
        if self.resources:
            found["resources"] = dict(self.resources)
        tiers = sorted(self.tier_prices, key=lambda tier: self.tier_prices[tier])
        selectors = [{**self.labels, TIER: tier} for tier in tiers] or [dict(self.labels)]
        if selectors[0]:
            found["label_selector"] = selectors[0]
        if selectors[1:]:
            found["fallback_strategy"] = [{"label_selector": each} for each in selectors[1:]]
        return found

    @property
    def companion_options(self) -> dict[str, Any]:
        """The options of an actor without resources on the same machines, such as the API server with its keys."""
        return {"num_cpus": 0, **({"label_selector": dict(self.labels)} if self.labels else {})}

    def price(self, labels: Mapping[str, str], otherwise: float) -> float:
        """The price per hour on a machine with these labels; ``otherwise`` without tiers."""
        return self.tier_prices.get(labels.get(TIER, ""), otherwise)

    @property
    def bundle(self) -> dict[str, float]:
        """The resources as a bundle of a placement group."""
        amounts = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {key: amount for key, amount in amounts.items() if amount}


class Scale(Options):
    """How many actors of a kind run.

    Attributes:
        min, max: bounds; equal bounds fix the number.
        upscale_delay, downscale_delay: seconds that the load must last before the number changes.
    """

    min: int = Field(default=1, ge=1)
    max: int = Field(default=1, ge=1)
    upscale_delay: float = Field(default=10, ge=0, strict=False)
    downscale_delay: float = Field(default=60, ge=0, strict=False)

    def check(self, where: str) -> None:
        """Refuse bounds in the wrong order."""
        if self.min > self.max:
            raise InvalidInput(f"{where}min", self.min, f"at most {where}max, {self.max}")


class ReplicaCount(Scale):
    """How many replicas run.

    Attributes:
        requests: running requests per replica that autoscaling aims at.
    """

    requests: float = Field(default=8, gt=0, strict=False)


class NodeCount(Scale):
    """How many drafter nodes run.

    Attributes:
        busy: share of the time in which a node works that autoscaling aims at. Messages take the rest, so a busy node
            never reaches 1.
    """

    busy: float = Field(default=0.7, gt=0, le=0.9, strict=False)


class Health(Options):
    """How actors are watched; seconds.

    Attributes:
        period: between two health checks.
        timeout: for an answer; three checks without an answer end the actor, and Ray starts another.
        api: the same of the API server, at least ``timeout``; its end breaks every connection.
        grace: for the running requests of an actor that is ended.
        head: without Ray's head, after which the cluster stops.
    """

    period: float = Field(default=5, gt=0, strict=False)
    timeout: float = Field(default=10, gt=0, strict=False)
    api: float = Field(default=30, gt=0, strict=False)
    grace: float = Field(default=30, ge=0, strict=False)
    head: float = Field(default=20, gt=0, strict=False)


class StageOptions(Options):
    """Stages of the target on machines that Ray chooses.

    Attributes:
        placement: of one stage with all its shards.
        strategy: ``SPREAD`` prefers different machines for replica and stages, ``PACK`` the same machine;
            ``STRICT_SPREAD`` and ``STRICT_PACK`` allow nothing else.
    """

    placement: Placement = Placement()
    strategy: Literal["SPREAD", "PACK", "STRICT_SPREAD", "STRICT_PACK"] = "SPREAD"


class TargetOptions(Options):
    """The target and its replicas.

    Attributes:
        engine: options of the engine, as in ``cospec serve --config``; ``cost_per_hour`` is the price of one replica.
        stages: where the stages of ``engine.pipeline_parallel_size`` run; None: as processes of the replica's machine.
    """

    engine: EngineConfig = EngineConfig()
    scale: ReplicaCount = ReplicaCount()
    placement: Placement = Placement()
    stages: StageOptions | None = None


class DrafterOptions(Options):
    """Drafter nodes of one kind.

    Attributes:
        name: the drafter's name in ``target.engine.speculative_config``.
        nodes: how many run.
        scale: the number follows the load, in place of ``nodes``.
        drafter: options of the drafter, as in ``cospec node join --drafter``.
        cost_per_hour: the price of one node, in the currency of the target.
        link: delays that are added to the links of these nodes, for tests and measurements.
    """

    name: str = Field(min_length=1, max_length=64)
    nodes: int = Field(default=1, ge=0)
    scale: NodeCount | None = None
    drafter: Mapping[str, Any] = Field(default_factory=dict)
    placement: Placement = Placement()
    cost_per_hour: float = Field(default=0, ge=0, strict=False)
    link: LinkConfig = LinkConfig()


class Machine(Options):
    """What this machine declares where ``cospec cluster up`` starts Ray itself; None: what Ray finds.

    Attributes:
        num_cpus, num_gpus: processors; more processors than exist let small actors share.
        resources: amounts of custom resources.
        labels: labels of the machine, such as ``{"zone": "home"}``.
        object_store_memory: bytes of shared memory for Ray's objects; cospec stores few and small objects.
    """

    num_cpus: int | None = Field(default=None, ge=1)
    num_gpus: int | None = Field(default=None, ge=0)
    resources: Mapping[str, float] = Field(default_factory=dict)
    labels: Mapping[str, str] = Field(default_factory=dict)
    object_store_memory: int = Field(default=128 * 2**20, ge=80 * 2**20)


class ClusterConfig(Options):
    """Everything that ``cospec cluster up`` starts.

    Attributes:
        name: of the Ray Serve application.
        drafters: nodes for drafters that ``speculative_config`` gives the executor ``node``.
        drafter_keys: a folder of ``cospec node keys`` that every machine has; None: all drafters on one machine.
        server: address, keys and limits; connections are Ray Serve's, so the time-outs of connections do not apply.
    """

    name: str = Field(default="cospec", pattern=r"^[a-z][a-z0-9-]{0,62}$")
    server: ServerSettings = ServerSettings()
    machine: Machine = Machine()
    target: TargetOptions = TargetOptions()
    drafters: tuple[DrafterOptions, ...] = Field(default=(), strict=False)
    drafter_keys: Path | None = Field(default=None, strict=False)
    health: Health = Health()

    @classmethod
    def build(cls, given: Mapping[str, Any]) -> ClusterConfig:
        """Build from plain keys.

        Raises:
            InvalidInput: a key is unknown, or a value is out of bounds. The error names the field.
        """
        values = dict(given)
        for key, kind in (("server", ServerSettings), ("machine", Machine), ("health", Health)):
            if key in values:
                values[key] = _section(kind, values[key], f"{key}.")
        values["target"] = _target(values.get("target", {}))
        drafters = values.get("drafters", ())
        if not isinstance(drafters, list | tuple):
            raise InvalidInput("drafters", drafters, "a list of drafters")
        values["drafters"] = tuple(_drafter(each, f"drafters[{number}].") for number, each in enumerate(drafters))
        config = parse(cls, values)
        names = [each.name for each in config.drafters]
        if len(set(names)) < len(names):
            raise InvalidInput(
                "drafters", words(f"named {', '.join(names)}"), "a list of drafters with different names"
            )
        return config

    @classmethod
    def read(cls, path: Path | None) -> ClusterConfig:
        """Read a JSON or YAML file; None is the built-in model on one replica."""
        return cls.build({} if path is None else read_file(path))


def _section(kind: type[Any], given: Any, where: str) -> Any:
    if not isinstance(given, Mapping):
        raise InvalidInput(where.rstrip("."), given, "an object of options")
    return parse(kind, dict(given), where)


def _target(given: Any) -> TargetOptions:
    if not isinstance(given, Mapping):
        raise InvalidInput("target", given, "an object of options")
    values = dict(given)
    if "engine" in values:
        if not isinstance(values["engine"], Mapping):
            raise InvalidInput("target.engine", values["engine"], "an object of options")
        try:
            values["engine"] = EngineConfig.build(values["engine"])
        except InvalidInput as error:
            raise error.within("target.engine") from None
    for key, kind in (("scale", ReplicaCount), ("placement", Placement)):
        if key in values:
            values[key] = _section(kind, values[key], f"target.{key}.")
    if values.get("stages") is not None:
        values["stages"] = _stages(values["stages"])
    target = parse(TargetOptions, values, "target.")
    _check_stages(target)
    target.scale.check("target.scale.")
    return target


def _stages(given: Any) -> StageOptions:
    values = dict(given) if isinstance(given, Mapping) else given
    if isinstance(values, dict) and "placement" in values:
        values["placement"] = _section(Placement, values["placement"], "target.stages.placement.")
    stages: StageOptions = _section(StageOptions, values, "target.stages.")
    return stages


def _check_stages(target: TargetOptions) -> None:
    """Refuse stages that Ray cannot place."""
    if target.stages is None:
        return
    if target.engine.pipeline_parallel_size == target.engine.tensor_parallel_size == 1:
        raise InvalidInput("target.stages", words("given for one process"), "absent, or engine.pipeline_parallel_size")
    for field, placement in (("stages.placement", target.stages.placement), ("placement", target.placement)):
        if not placement.bundle:
            raise InvalidInput(f"target.{field}", words("without resources"), "a part of a processor or more")
        if placement.tier_prices:
            raise InvalidInput(f"target.{field}.tier_prices", words("given with target.stages"), "absent")


def _drafter(given: Any, where: str) -> DrafterOptions:
    if not isinstance(given, Mapping):
        raise InvalidInput(where.rstrip("."), given, "an object of options")
    values = dict(given)
    if "placement" in values:
        values["placement"] = _section(Placement, values["placement"], f"{where}placement.")
    if values.get("scale") is not None:
        values["scale"] = _section(NodeCount, values["scale"], f"{where}scale.")
        values["scale"].check(f"{where}scale.")
        if "nodes" in values:
            raise InvalidInput(f"{where}nodes", values["nodes"], f"absent with {where}scale")
    drafter: DrafterOptions = parse(DrafterOptions, values, where)
    return drafter
