"""The process of one stage, or of one shard of a stage; ``stage_processes`` starts the process and talks to it.

Life of the process: load the part of the model ──Listening──► connect to the neighbours ──Connected──► compute windows
in their order, until a connection or the engine's process ends. Nothing is left of a pipeline whose engine was killed.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import Tensor

from cospec.config import LinkConfig
from cospec.distributed.links import Address, Link, accept, connect, listen
from cospec.distributed.messages import (
    Cancel,
    Connect,
    Connected,
    Listening,
    SetLink,
    StageCommand,
    Window,
    WindowOutput,
)
from cospec.distributed.shard_sum import LOOPBACK, ShardGroup
from cospec.distributed.stage_sampling import window_output
from cospec.errors import CospecError, failure
from cospec.models.load_options import LoadOptions
from cospec.models.loading import load_stage
from cospec.models.stage import StageForward
from cospec.native import library
from cospec.process_utils import freeze_gc
from cospec.runtime.codec import ProtocolError, decode_call
from cospec.runtime.messages import Failed, Hello, Start
from cospec.runtime.transport import Channel, ChannelClosed, inherited

LOOK_SECONDS = 1.0  # how often an idle process looks whether the engine's process is there

Surround = Callable[[Window], AbstractContextManager[Any]]
"""Enters the context in which a stage computes a window; one with an ``error`` is not computed."""


@dataclass(frozen=True, slots=True)
class StagePlan:
    """What one process does.

    Attributes:
        model: the name, see ``model_folder.resolve``.
        options: of the part's weights and KV cache; ``shard`` is the part.
        host: the address to listen on; empty for the address at which the engine has reached this process.
        threads: of the CPU kernels.
        link: delays that are added to the link to the next stage, or to the engine.
    """

    model: str
    options: LoadOptions
    host: str
    threads: int
    link: LinkConfig


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """The connections of a process: windows come in; the first shard passes windows on."""

    windows: Channel
    next: Link | None
    results: Link | None
    shards: tuple[Channel, ...]


def plan_of(plan: StagePlan) -> StagePlan:
    """The function that the command line names; the decoder checks the plan's types."""
    return plan


def main(arguments: list[str]) -> None:
    """Serve the engine that started this process.

    Args:
        arguments: the file descriptor of the connection to the parent process, and the name of ``plan_of``; from a
            stage host also the descriptor of the connection to the engine.
    """
    descriptor, name, *accepted = arguments
    stream = inherited(descriptor)
    if accepted:
        threading.Thread(target=_end_with_host, args=(stream,), daemon=True).start()
        stream = socket.socket(fileno=int(accepted[0]))
    run(stream, name)


def run(stream: socket.socket, name: str, surround: Surround = nullcontext) -> None:
    """Load the part, connect, and compute windows until a connection ends, which ends the process.

    Args:
        surround: of each window, for measurements that stand for another processor.
    """
    control = Channel(stream, StageCommand)
    start = control.receive()
    if not isinstance(start, Start):
        raise ProtocolError("A stage gets another command before it knows its part of the model.")
    plan: StagePlan = decode_call(name, start.arguments)
    if torch.cuda.is_available() and plan.options.device != "cpu":
        shard = plan.options.shard
        torch.cuda.set_device((shard.stage * shard.ranks + shard.rank) % torch.cuda.device_count())
    torch.set_num_threads(plan.threads)
    if library.available():
        library.use_instruction_set(plan.options.instruction_set)
        library.set_threads(plan.threads)
    stage = _Stage(plan, surround)
    try:
        stage.load()
    except CospecError as error:
        control.send(Failed(str(error)))
        return
    freeze_gc()
    host = plan.host or stream.getsockname()[0]
    listener, address = listen(host)
    shard = plan.options.shard
    meeting, store = listen(LOOPBACK) if shard.ranks > 1 and not shard.rank else (None, None)
    control.send(Listening(address, store))
    command = control.receive()
    if not isinstance(command, Connect):
        raise ProtocolError("A stage gets another command before it knows its neighbours.")
    try:
        neighbours = _connect(plan, listener, command)
        if command.store is not None:
            stage.join(command.store, meeting)
    except ChannelClosed as error:
        control.send(Failed(f"Stage {shard.stage} of the target is not connected. {error}"))
        return
    control.send(Connected())
    threading.Thread(target=_watch, args=(control, neighbours, os.getppid(), stage), daemon=True).start()
    try:
        stage.serve(neighbours)
    except ChannelClosed:
        os._exit(0)  # the neighbours see the end of their connections
    except ProtocolError as error:
        print(f"A stage ends: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _connect(plan: StagePlan, listener: socket.socket, command: Connect) -> _Neighbours:
    """Connect to the next stage and to the other shards, and wait for the connections of the others."""
    shard, link = plan.options.shard, plan.link
    seed = link.seed * 1000 + shard.stage
    following = None if command.next is None else connect(command.next, command.token, Hello)
    shards = tuple(connect(each, command.token, Hello) for each in command.shards)
    joined = accept(listener, command.token, Window, 2 if shard.last and not shard.rank else 1)
    listener.close()
    windows = next(channel for channel, takes_results in joined if not takes_results)
    results = next((Link(channel, link, seed) for channel, takes in joined if takes), None)
    return _Neighbours(windows, None if following is None else Link(following, link, seed), results, shards)


class _Stage:
    """A part of the model, and the group of its shards."""

    def __init__(self, plan: StagePlan, surround: Surround) -> None:
        self._plan, self._surround = plan, surround
        self._group: ShardGroup | None = None
        self._forward: StageForward | None = None
        self._cancelled: dict[int, float] = {}  # windows that nothing reads, and from which moment that is known

    def cancel(self, number: int, delay: float) -> None:
        """Skip a window that is not computed yet; called by another thread.

        Args:
            delay: injected seconds of a link. The first stage is where the engine is, the others are one link away.
        """
        away = delay if self._plan.options.shard.stage else 0.0
        self._cancelled[number] = time.monotonic() + away

    def load(self) -> None:
        """Load the part; raises ``CospecError``."""
        sharded = self._plan.options.shard.ranks > 1
        self._forward = load_stage(self._plan.model, self._plan.options, self._sum if sharded else None)

    def join(self, store: Address, listener: socket.socket | None) -> None:
        """Meet the other shards of the stage; see ``ShardGroup``."""
        assert self._forward is not None, "a stage is loaded before the stage is connected"
        self._group = ShardGroup(self._plan.options.shard, store, listener, self._forward.cache.device)

    def _sum(self, product: Tensor) -> None:
        assert self._group is not None, "a stage computes after its shards are connected"
        self._group.sum(product)

    def serve(self, neighbours: _Neighbours) -> None:
        """Compute windows in their order.

        Raises:
            ChannelClosed: a neighbour is gone.
            ProtocolError: a neighbour sent bytes that are no window.
        """
        while True:
            window = neighbours.windows.receive()
            if self._is_cancelled(window.number):
                window = msgspec.structs.replace(window, states=None, error="nothing reads the result")
            for shard in neighbours.shards:
                shard.send(window)
            with self._surround(window):
                result = self._answer(window)
                output = None if neighbours.results is None else _output(result)
            if neighbours.next is not None:
                neighbours.next.send(result)
            elif neighbours.results is not None and output is not None:
                neighbours.results.send(output)

    def _is_cancelled(self, number: int) -> bool:
        """Whether nothing reads the result of a window; forgets earlier windows."""
        known_at = self._cancelled.pop(number, None)
        for earlier in [each for each in tuple(self._cancelled) if each < number]:
            del self._cancelled[earlier]
        return known_at is not None and known_at <= time.monotonic()

    def _answer(self, window: Window) -> Window:
        """Return the window after the layers of this stage."""
        assert self._forward is not None
        self._forward.cache.copy(window.sources.tolist(), window.targets.tolist())
        if window.error is not None:
            return window
        shard = self._plan.options.shard
        try:
            states = None if window.states is None else torch.from_numpy(window.states.copy())
            found = self._forward.run(window.batch, states)
        except Exception as error:
            if shard.ranks > 1:
                raise  # the other shards wait for this one
            return msgspec.structs.replace(window, states=None, error=failure(error))
        return msgspec.structs.replace(window, states=None if found is None else found.numpy())


def _output(window: Window) -> WindowOutput:
    """Return what the last stage sends to the engine."""
    try:
        return window_output(window)
    except Exception as error:
        return WindowOutput(window.number, error=failure(error))


def _end_with_host(parent: socket.socket) -> None:
    """End with the stage host, also while weights are loaded."""
    parent.recv(1)
    os._exit(0)


def _watch(control: Channel, neighbours: _Neighbours, parent: int, stage: _Stage) -> None:
    """End with the engine; change the link and cancel windows meanwhile."""
    links = [link for link in (neighbours.next, neighbours.results) if link is not None]
    try:
        while os.getppid() == parent:
            command = control.receive(LOOK_SECONDS)
            if isinstance(command, SetLink):
                for link in links:
                    link.change(command.link)
                control.send(Connected())
            elif isinstance(command, Cancel):
                stage.cancel(command.number, max([link.delay for link in links], default=0.0))
    except (ChannelClosed, ProtocolError):
        pass
    os._exit(0)
