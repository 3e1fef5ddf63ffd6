"""One engine process, its connection and its progress counter, as an asyncio program sees them."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence

from cospec.config import EngineConfig
from cospec.runtime.codec import encode_call
from cospec.runtime.engine_process_main import LOG_LEVEL, Build, ProgressCounter
from cospec.runtime.messages import EngineCommand, EngineReply, Start, Stop
from cospec.runtime.transport import AsyncChannel, ChildProcess

STOP_SECONDS = 5.0  # how long a stopping process may take before it is killed
WORKER = "cospec.runtime.engine_process_main"


class EngineProcessHandle:
    """A process that runs, and this side of the connection to the process. ``start`` makes one."""

    def __init__(self, child: ChildProcess, channel: AsyncChannel, progress: ProgressCounter) -> None:
        self._child, self._channel, self._progress = child, channel, progress

    @classmethod
    async def start(
        cls, build: Build, config: EngineConfig, files: Sequence[int] = (), log_level: str = LOG_LEVEL
    ) -> EngineProcessHandle:
        """Start a process.

        Args:
            build: makes the engine inside the process, see ``codec.encode_call``.
            files: descriptors that the process inherits.
            log_level: of the process; a name of the module ``logging``.

        Raises:
            ValueError: the process cannot find ``build`` by its name.
            OSError: the system has no room for another process.
        """
        name, arguments = encode_call(build, config)
        with tempfile.TemporaryFile() as file:
            file.truncate(ProgressCounter.SIZE)
            progress = ProgressCounter.of_file(file.fileno())
            child = ChildProcess(WORKER, [str(file.fileno()), log_level, name], [file.fileno(), *files])
        channel = await AsyncChannel.connect(child.stream, EngineReply)
        channel.send(Start(arguments))
        return cls(child, channel, progress)

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return not self._channel.closed

    @property
    def progress(self) -> int:
        """Iterations of the engine's loop so far."""
        return self._progress.value

    async def ending(self) -> str:
        """How a process ended whose ``replies`` are over, in one sentence."""
        return f"The engine process {await asyncio.to_thread(self._child.ending)}."

    def send(self, command: EngineCommand) -> None:
        """Hand over a command. The queue has no limit, so there is nothing to wait for."""
        self._channel.send(command)

    def replies(self) -> AsyncIterator[EngineReply]:
        """What the process sends, until the process has ended and all that it sent is read."""
        return self._channel.messages()

    def kill(self) -> None:
        """End the process by force, whatever state it is in."""
        self._child.kill()

    async def close(self, ask: bool) -> None:
        """End the process, by force unless it is asked and obeys, and close the connection."""
        if ask and self._child.running:
            self.send(Stop())
            await asyncio.to_thread(self._child.wait, STOP_SECONDS)
        if self._child.running:
            self._child.kill()
        self._channel.close()
        await asyncio.to_thread(self._child.close)
