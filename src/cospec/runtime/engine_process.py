"""One engine process, its socket and its progress counter, as an asyncio program sees them."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawValue
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from cospec.config import EngineConfig
from cospec.runtime.engine_core import Build, Command, Reply, Stop, run_engine_core

LAST_WORDS_MS = 200  # how long to wait for messages that a dead process left in the socket
STOP_SECONDS = 5.0  # how long a stopping process may take before it is killed


@dataclass(frozen=True, slots=True)
class Launch:
    """What an engine process is started from.

    Attributes:
        build: makes the engine inside its process; must be picklable by reference.
    """

    build: Build
    config: EngineConfig


class EngineProcess:
    """Starts the process.

    Args:
        path: of the socket, which must not exist.
    """

    def __init__(self, context: zmq.asyncio.Context, path: Path, launch: Launch) -> None:
        self._socket = context.socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.set(option, 0)
        address = f"ipc://{path}"
        self._socket.bind(address)
        self._progress = RawValue("Q", 0)
        spawn = multiprocessing.get_context("spawn")
        arguments = (address, launch.config, launch.build, self._progress)
        self._process = spawn.Process(target=run_engine_core, args=arguments, name="cospec-engine", daemon=True)
        self._process.start()
        self._dead = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._process.sentinel, self._note_death)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return not self._dead.is_set()

    @property
    def progress(self) -> int:
        """Iterations of the engine's loop so far."""
        return int(self._progress.value)

    @property
    def epitaph(self) -> str:
        """How the process ended, in one sentence."""
        code = self._process.exitcode
        return "The engine process has ended" + (f" with exit code {code}." if code is not None else ".")

    def send(self, command: Command) -> None:
        """Hand over a command. The queue has no limit, so there is nothing to wait for."""
        self._socket.send(msgspec.msgpack.encode(command))

    async def replies(self) -> AsyncIterator[Reply]:
        """What the process sends, until it has ended and all that it sent is read."""
        decoder = msgspec.msgpack.Decoder(Reply)
        death = asyncio.create_task(self._dead.wait())
        try:
            while not death.done():
                message = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait({message, death}, return_when=asyncio.FIRST_COMPLETED)
                if message.done():
                    yield decoder.decode(message.result())
                else:
                    message.cancel()
            while await self._socket.poll(LAST_WORDS_MS):
                yield decoder.decode(await self._socket.recv())
        finally:
            death.cancel()

    def kill(self) -> None:
        """End the process by force, whatever state it is in."""
        self._process.kill()

    async def close(self, ask: bool) -> None:
        """End the process, by force unless it is asked and obeys, and close the socket."""
        if self._process.is_alive() and ask:
            self.send(Stop())
            await asyncio.to_thread(self._process.join, STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
        await asyncio.to_thread(self._process.join)
        self._note_death()
        self._socket.close(linger=0)

    def _note_death(self) -> None:
        self._loop.remove_reader(self._process.sentinel)
        self._dead.set()
