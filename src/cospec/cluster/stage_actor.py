"""Stage hosts as actors: Ray reserves a bundle for each stage of a replica, and ends the actors with the replica.

Ray hands out the addresses; windows pass between the stage processes and not through Ray. The health check of a replica
starts a lost host again at its address. Where a machine is lost, the engine runs all stages on the other machines. The
replica becomes unhealthy when no host is left, or when Ray starts the host on a new machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from cospec.cluster.config import Placement
from cospec.config import EngineConfig
from cospec.distributed.links import Address
from cospec.distributed.stage_host import StageHost, TokenFile, parse_address
from cospec.errors import VerifierLost

CLOSE_SECONDS = 5.0  # for the stages of a host
RESTART_SECONDS = 0.5  # between the first two starts of a host; later pauses are twice as long each
LONGEST_PAUSE = 8.0

log = logging.getLogger(__name__)


class StageHostActor:
    """One stage host, which listens on the address that Ray knows the machine by.

    Args:
        port: 0 takes a free port.
    """

    def __init__(self, token: str, port: int) -> None:
        self._host = StageHost(Address(ray.util.get_node_ip_address(), port), token)
        threading.Thread(target=self._host.serve, daemon=True).start()

    def address(self) -> str:
        """``HOST:PORT``."""
        return str(self._host.address)

    def close(self) -> None:
        """End all stages."""
        self._host.close()


class ReplicaStages:
    """The stage hosts of one replica, in the bundles after the replica's own bundle.

    Attributes:
        restarts: starts of hosts after the first ones.
    """

    def __init__(self, placement: Placement, count: int) -> None:
        self._options = {key: value for key, value in placement.actor_options.items() if key != "label_selector"}
        self._token = secrets.token_hex(32)
        self._token_file, self._addresses = TokenFile(self._token), list[str]()
        self._actors = [self._start(stage, 0) for stage in range(count)]
        self._checks = list[asyncio.Task[None]]()
        self.restarts = 0

    @property
    def files(self) -> tuple[int, ...]:
        """Descriptors that the engine process inherits; one holds the token."""
        return (self._token_file.descriptor,)

    async def engine_config(self, config: EngineConfig) -> EngineConfig:
        """Wait for the hosts, and return the configuration of an engine whose stages run there."""
        self._addresses = [await actor.address.remote() for actor in self._actors]
        return config.model_copy(
            update={"stage_machines": tuple(self._addresses), "stage_token_file": self._token_file.path}
        )

    async def check(self) -> None:
        """Start lost hosts again; return when one host answers, because a lost machine may have no successor.

        Answers that came after the last check say nothing about the present.

        Raises:
            VerifierLost: a host is on another machine now, which the engine does not know.
        """
        if not self._checks:
            self._checks = [asyncio.create_task(self._check(stage)) for stage in range(len(self._actors))]
        for stage, each in enumerate(self._checks):
            if each.done():
                await each
                self._checks[stage] = asyncio.create_task(self._check(stage))
        ended, _ = await asyncio.wait(self._checks, return_when=asyncio.FIRST_COMPLETED)
        for each in ended:  # no check follows a loss
            await each

    async def _check(self, stage: int) -> None:
        """Wait for the answer of a host. Ray would take an actor's error for the end of the replica."""
        address, found, pause = self._addresses[stage], "", RESTART_SECONDS
        while not found:
            try:
                found = await self._actors[stage].address.remote()
            except RayActorError as error:  # also of an actor that was to start on a machine that Ray took for alive
                reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
                log.warning("the stage host %s is lost and is started again (%s)", address, reason)
                self._actors[stage] = self._start(stage, parse_address("stage_machines", address).port)
                self.restarts += 1
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        if found != address:
            raise VerifierLost(f"The stage host {address} is at {found} now.")

    async def close(self) -> None:
        """End the hosts and their stages."""
        self._token_file.close()
        for each in self._checks:
            each.cancel()
        for actor in self._actors:
            with contextlib.suppress(RayError, TimeoutError):
                await asyncio.wait_for(_answer(actor.close.remote()), CLOSE_SECONDS)
            ray.kill(actor)

    def _start(self, stage: int, port: int) -> Any:
        """Start the actor of a stage."""
        group = ray.util.get_current_placement_group()
        assert group is not None, "Ray Serve places a replica with stages in a group"
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=1 + stage)
        make: Any = ray.remote(StageHostActor)
        return make.options(**self._options, scheduling_strategy=strategy).remote(self._token, port)


async def _answer(reference: Any) -> Any:
    return await reference
