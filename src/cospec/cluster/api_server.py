"""The HTTP server of a cluster: the application of ``server.app`` as an ingress of Ray Serve."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from ray.serve.handle import DeploymentHandle

from cospec.cluster.config import ClusterConfig
from cospec.cluster.ray_replicas import RayReplicas
from cospec.cluster.replicated_engine import ReplicatedEngine
from cospec.server.admission import AdmissionLimits
from cospec.server.auth import read_keys
from cospec.server.run import make_app
from cospec.text.tokenizer import import_tokenizers

if TYPE_CHECKING:
    from fastapi import FastAPI


class ApiServer:
    """Tokenizes, submits to the replicas, and replays requests of lost replicas.

    Args:
        drafters: deployments that belong to the application; the API server calls none of them.
    """

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits constructors
        self, config: ClusterConfig, target: DeploymentHandle[Any], *drafters: DeploymentHandle[Any]
    ) -> None:
        replicas = RayReplicas(target)
        info, _ = await asyncio.gather(replicas.info(), asyncio.to_thread(import_tokenizers))
        settings = read_keys(config.server)
        sequences = config.target.engine.max_num_seqs * config.target.scale.max
        engine = ReplicatedEngine(replicas, info)
        limits = AdmissionLimits.of(settings, sequences)
        self._app = await make_app(engine, settings, limits, config.target.engine.prices)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Ray Serve after the constructor."""
        return self._app
