"""The processes of a sharded target: start, connections, end."""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from cospec.config import LinkConfig
from cospec.distributed.links import connect
from cospec.distributed.messages import Cancel, Connect, Connected, Listening, SetLink, StageReply, WindowOutput
from cospec.distributed.stage_worker import StagePlan, plan_of
from cospec.errors import InvalidInput, ModelError, VerifierLost
from cospec.models.load_options import LoadOptions
from cospec.models.shard import Shard
from cospec.runtime.codec import ProtocolError, encode_call
from cospec.runtime.drafter_process_executor import Worker
from cospec.runtime.messages import Failed, Hello, Start
from cospec.runtime.transport import Channel, ChannelClosed, ChildProcess

WORKER = "cospec.distributed.stage_worker"
START_SECONDS = 600.0  # for a stage that loads its weights

Launch = Callable[[str, Shard], Worker]
"""Starts the process of a part of the model, whose plan the function of that name builds."""


def launch_here(name: str, shard: Shard) -> Worker:
    """Start the process on this machine."""
    return ChildProcess(WORKER, [name])


def plans(
    model: str,
    options: LoadOptions,
    hosts: Sequence[str],
    links: Sequence[LinkConfig],
    threads: int | None,
    machines: int = 1,
) -> list[StagePlan]:
    """Return the plans of all processes, stage by stage.

    Args:
        options: of the whole target; ``shard`` has the numbers of stages and shards.
        hosts: one per stage, or one for all; empty texts as in ``StagePlan``.
        links: see ``links_of_stages``.
        threads: of each process; None divides the processors of a machine like this one.
        machines: that the stages are spread over.
    """
    shape = options.shard
    own_links = links_of_stages(links, shape.stages)
    own = threads or max(1, (os.cpu_count() or 1) // (math.ceil(shape.stages / machines) * shape.ranks))
    return [
        StagePlan(
            model,
            replace(options, shard=Shard(stage, shape.stages, rank, shape.ranks)),
            hosts[stage % len(hosts)],
            own,
            own_links[stage],
        )
        for stage in range(shape.stages)
        for rank in range(shape.ranks)
    ]


def links_of_stages(links: Sequence[LinkConfig], stages: int) -> list[LinkConfig]:
    """Return the link from each stage to the next stage; the link of the last stage leads to the engine.

    Args:
        links: one per stage, or one for all links between stages, or none.

    Raises:
        InvalidInput: another number of links.
    """
    if len(links) == stages:
        return list(links)
    if len(links) > 1:
        raise InvalidInput("stage_links", len(links), f"one link for all, or {stages}")
    between = links[0] if links else LinkConfig()
    return [*[between] * (stages - 1), LinkConfig()]


class StageProcesses:
    """Running and connected processes.

    Attributes:
        windows: takes ``Window`` messages for the first stage.
        results: brings ``WindowOutput`` from the last stage, in the order of the windows.

    Raises:
        ModelError: a part of the model cannot be loaded; the sentence is the stage's.
        VerifierLost: a process died while the processes were started.
    """

    def __init__(self, plans: Sequence[StagePlan], launch: Launch = launch_here) -> None:
        self._shards = [plan.options.shard for plan in plans]
        self._workers: list[Worker] = []
        self._channels: list[Channel] = []
        try:
            self.windows, self.results = self._start(plans, launch)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the processes, stage by stage."""
        return [worker.pid for worker in self._workers]

    def endings(self) -> str:
        """How the processes that have died ended, as the predicate of a sentence."""
        for number, worker in enumerate(self._workers):
            ending = worker.ending()
            if "signal" in ending or ("code" in ending and not ending.endswith(" 0")):
                return f"process {number} {ending}"
        return "a connection ended"

    def set_links(self, links: Sequence[LinkConfig]) -> None:
        """Change the delays of links, see ``links_of_stages``, while no window is in flight."""
        own_links = links_of_stages(links, self._shards[-1].stages)
        for number, shard in enumerate(self._shards):
            self._channels[number].send(SetLink(own_links[shard.stage]))
            self._answer(number, Connected)

    def cancel(self, number: int) -> None:
        """Tell every stage that it need not compute a window.

        Raises:
            ChannelClosed: a process is gone.
        """
        for channel, shard in zip(self._channels, self._shards, strict=False):
            if shard.rank == 0:
                channel.send(Cancel(number))

    def kill(self) -> None:
        """End all processes by force."""
        for worker in self._workers:
            worker.kill()
        self.close()

    def close(self) -> None:
        """Close all connections, which ends the processes."""
        for channel in self._channels:
            channel.close()
        for worker in self._workers:
            worker.stream.close()
        for worker in self._workers:
            worker.close()

    def _start(self, plans: Sequence[StagePlan], launch: Launch) -> tuple[Channel, Channel]:
        token = secrets.token_hex(16)
        for plan in plans:
            name, arguments = encode_call(plan_of, plan)
            self._workers.append(launch(name, plan.options.shard))
            self._channels.append(Channel(self._workers[-1].stream, StageReply))
            self._channels[-1].send(Start(arguments))
        listening: list[Listening] = [self._answer(number, Listening) for number in range(len(plans))]
        addresses = [each.address for each in listening]
        for number, command in enumerate(_connections(plans, listening, token)):
            self._channels[number].send(command)
        ranks = plans[0].options.shard.ranks
        windows = connect(addresses[0], token, Hello)
        results = connect(addresses[len(plans) - ranks], token, WindowOutput, results=True)
        for number in range(len(plans)):
            self._answer(number, Connected)
        self._channels += [windows, results]
        return windows, results

    def _answer(self, number: int, kind: type[Any]) -> Any:
        """Wait for a process's next message, which is of one kind."""
        try:
            message = self._channels[number].receive(START_SECONDS)
        except (ChannelClosed, ProtocolError) as error:
            ending = self._workers[number].ending()
            raise VerifierLost(f"Process {number} of the target {ending} while it was started.") from error
        if isinstance(message, Failed):
            raise ModelError(message.message)
        if not isinstance(message, kind):
            raise VerifierLost(f"Process {number} of the target did not start within {START_SECONDS:.0f} s.")
        return message


def _connections(plans: Sequence[StagePlan], listening: Sequence[Listening], token: str) -> list[Connect]:
    """Return each process's neighbours; the first shard of a stage sends to the others and to the next stage."""
    found, addresses = list[Connect](), [each.address for each in listening]
    for number, plan in enumerate(plans):
        shard = plan.options.shard
        store = listening[number - shard.rank].store
        others = tuple(addresses[number + 1 : number + shard.ranks]) if shard.rank == 0 else ()
        following = None if shard.last or shard.rank else addresses[number + shard.ranks]
        found.append(Connect(token, following, others, store))
    return found
