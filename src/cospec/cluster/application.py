"""From a cluster's declaration to the deployments of a Ray Serve application.

Ray Serve places each deployment's actors by their resources and labels, and checks their health. Ray Serve also
replaces dead actors with back-off, and scales the target on its queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from cospec.cluster.config import ClusterConfig, DrafterOptions, NodeCount, ReplicaCount, Scale, TargetOptions
from cospec.cluster.node_actor import NodeActor, NodePolicy
from cospec.cluster.prefix_router import PrefixRouter
from cospec.cluster.ray_transport import RayTransport
from cospec.cluster.replica import REPORT_PERIOD, REPORT_SECONDS, EngineReplica, NodeBinding
from cospec.cluster.replica_reports import ReplicaReport, ReplicaReports
from cospec.cluster.replicated_engine import ReplicatedEngine
from cospec.config import EngineConfig
from cospec.models.hf_tokenizer import import_libraries
from cospec.runtime.engine_process_main import Build, build_engine
from cospec.runtime.engine_supervision import Supervision
from cospec.server.admission import AdmissionLimits
from cospec.server.auth import read_keys
from cospec.server.run import make_app

if TYPE_CHECKING:
    from fastapi import FastAPI

TARGET, API, DRAFTERS = "target", "api", "drafter-{name}"  # names of deployments
ONGOING = 4096  # calls of the API server that run together; ``server.max_concurrent_requests`` is the smaller bound
LOOK_SECONDS = 1.0  # between two looks for replicas that ended
QUEUE_PER_SEQUENCE = 4  # requests that a replica takes per running sequence
LOGGING = LoggingConfig(log_level="WARNING", enable_access_log=False)


class ApiServer:
    """The HTTP server of a cluster: tokenizes, submits to the replicas, and replays requests of lost replicas.

    Args:
        drafters: deployments that belong to the application; the API server calls none of them.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits constructors
        self, config: ClusterConfig, target: DeploymentHandle[Any], *drafters: DeploymentHandle[Any]
    ) -> None:
        replicas = RayTransport(target)
        info, _ = await asyncio.gather(replicas.info(), asyncio.to_thread(import_libraries))
        settings = read_keys(config.server)
        sequences = config.target.engine.max_num_seqs * config.target.scale.max
        self._reports = ReplicaReports(
            max(config.health.period + config.health.timeout, REPORT_PERIOD + REPORT_SECONDS)
        )
        self._engine = engine = ReplicatedEngine(replicas, info, self._reports)
        limits = AdmissionLimits.of(settings, sequences)
        self._app = await make_app(engine, settings, limits)
        self._watching = asyncio.create_task(self._watch(replicas))  # the loop keeps no task

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve after the constructor."""
        return self._app

    async def note_head_restarts(self, count: int) -> None:
        """Show ``count`` restarts of Ray's head in the metrics."""
        self._engine.head_restarts = count

    async def note_replica(self, report: ReplicaReport) -> None:
        """Show the report of a replica in the metrics."""
        self._reports.note(report)

    async def _watch(self, replicas: RayTransport) -> None:
        """Look for replicas that ended, until the task is cancelled; without Ray's head nothing is known."""
        while True:
            with contextlib.suppress(RayError, RuntimeError, OSError):
                self._reports.keep(await replicas.running())
            await asyncio.sleep(LOOK_SECONDS)


def build_app(args: Mapping[str, Any]) -> serve.Application:
    """Build from plain keys. ``serve run`` and KubeRay call this function by its import path.

    Raises:
        InvalidInput: a key is unknown, or a value is out of bounds.
    """
    return application(ClusterConfig.build(args))


def application(config: ClusterConfig, build: Build = build_engine) -> serve.Application:
    """The API server over the replicas of the target, and the drafter nodes."""
    watched: dict[str, Any] = {
        "health_check_period_s": config.health.period,
        "health_check_timeout_s": config.health.timeout,
        "graceful_shutdown_timeout_s": config.health.grace,
        "graceful_shutdown_wait_loop_s": min(2.0, config.health.grace / 4),
        "logging_config": LOGGING,
    }
    router: dict[str, Any] = {"request_router_class": PrefixRouter}
    engine = _threaded(config)
    server = config.server
    replica = _deployment(
        EngineReplica,
        name=TARGET,
        **_placement_options(config.target),
        max_ongoing_requests=QUEUE_PER_SEQUENCE * engine.max_num_seqs,
        request_router_config=RequestRouterConfig(**router),
        **_replicas(config.target.scale),
        **watched,
    )
    supervision = Supervision(server.engine_timeout, server.max_engine_restarts)
    plan = NodeBinding(config.drafter_keys) if config.drafters else None
    target = replica.bind(engine, supervision, plan, config.target, build)
    api = _deployment(
        serve.ingress()(ApiServer),
        name=API,
        ray_actor_options=config.target.placement.companion_options,
        max_ongoing_requests=ONGOING,
        **watched | {"health_check_timeout_s": max(config.health.timeout, config.health.api)},
    )
    nodes = [_drafter(each, watched).bind(engine, each, config.drafter_keys, target) for each in config.drafters]
    bound: serve.Application = api.bind(config, target, *nodes)
    return bound


def _drafter(drafter: DrafterOptions, watched: Mapping[str, Any]) -> serve.Deployment:
    """Drafter nodes of one kind; they take no calls."""
    return _deployment(
        NodeActor,
        name=DRAFTERS.format(name=drafter.name),
        **({"num_replicas": drafter.nodes} if drafter.scale is None else _node_count(drafter.scale)),
        ray_actor_options=drafter.placement.actor_options,
        **watched,
    )


def _deployment(actor: Any, **options: Any) -> serve.Deployment:
    """Ray Serve's function without its overloads, which know no class with options."""
    made: Any = serve.deployment(actor, **options)
    deployment: serve.Deployment = made
    return deployment


def _threaded(config: ClusterConfig) -> EngineConfig:
    """One thread per reserved processor, unless the engine's options name a number."""
    engine, stages = config.target.engine, config.target.stages
    if engine.threads is not None:
        return engine
    own = config.target.placement if stages is None else stages.placement
    processes = 1 if stages is None else engine.tensor_parallel_size
    return engine.model_copy(update={"threads": max(1, math.floor(own.num_cpus / processes))})


def _placement_options(target: TargetOptions) -> dict[str, Any]:
    """Where a replica runs: the replica alone, or a placement group whose further bundles are for its stages."""
    own = target.placement
    if target.stages is None:
        return {"ray_actor_options": own.actor_options}
    bundles = [own, *[target.stages.placement] * target.engine.pipeline_parallel_size]
    found: dict[str, Any] = {
        "ray_actor_options": {key: value for key, value in own.actor_options.items() if key != "label_selector"},
        "placement_group_bundles": [each.bundle for each in bundles],
        "placement_group_strategy": target.stages.strategy,
    }
    if any(each.labels for each in bundles):
        found["placement_group_bundle_label_selector"] = [dict(each.labels) for each in bundles]
    return found


def _replicas(scale: ReplicaCount) -> dict[str, Any]:
    return _scaled(scale, target_ongoing_requests=scale.requests)


def _node_count(scale: NodeCount) -> dict[str, Any]:
    return _scaled(scale, policy=AutoscalingPolicy(policy_function=NodePolicy, policy_kwargs={"busy": scale.busy}))


def _scaled(scale: Scale, **by: Any) -> dict[str, Any]:
    """A fixed number of actors, or autoscaling ``by`` options of Ray Serve."""
    if scale.min == scale.max:
        return {"num_replicas": scale.min}
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scale.min,
            max_replicas=scale.max,
            upscale_delay_s=scale.upscale_delay,
            downscale_delay_s=scale.downscale_delay,
            metrics_interval_s=min(1.0, scale.upscale_delay / 2) or 0.1,
            look_back_period_s=max(2.0, scale.upscale_delay),
            **by,
        )
    }
