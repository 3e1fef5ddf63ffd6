"""A relay between a drafter node and its verifier, which can partition the two."""

from __future__ import annotations

import asyncio
import contextlib


class Relay:
    """Passes bytes between one node and the verifier at ``port`` of this machine.

    A partition passes nothing in both directions. At its end the connections break, so what was sent meanwhile is lost,
    and the node connects again.

    Attributes:
        address: what the node connects to.
        connected: connections that pass bytes.
    """

    def __init__(self, port: int) -> None:
        self.address, self.connected = "", 0
        self._port, self._whole = port, asyncio.Event()
        self._whole.set()
        self._server: asyncio.Server | None = None
        self._links: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Listen at a free port."""
        self._server = await asyncio.start_server(self._link, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    @property
    def is_cut(self) -> bool:
        """Whether a partition goes on."""
        return not self._whole.is_set()

    def cut(self) -> None:
        """Begin a partition."""
        self._whole.clear()

    def heal(self) -> None:
        """End the partition: break the connections, and pass everything again."""
        self._break()
        self._whole.set()

    async def close(self) -> None:
        """Stop listening, break all connections, and wait for their end."""
        if self._server is not None:
            self._server.close()
        self.heal()
        if self._serving:
            await asyncio.wait(self._serving)

    async def _link(self, node: asyncio.StreamReader, to_node: asyncio.StreamWriter) -> None:
        """Serve one connection of the node."""
        task = asyncio.ensure_future(self._serve(node, to_node))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        await task

    async def _serve(self, node: asyncio.StreamReader, to_node: asyncio.StreamWriter) -> None:
        self._links.add(to_node)
        try:
            await self._whole.wait()
            verifier, to_verifier = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:  # the verifier is gone
            to_node.transport.abort()
            self._links.discard(to_node)
            return
        self._links.add(to_verifier)
        self.connected += 1
        both = [asyncio.ensure_future(self._pass(*way)) for way in ((node, to_verifier), (verifier, to_node))]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        self.connected -= 1
        for writer in (to_node, to_verifier):
            writer.transport.abort()
            self._links.discard(writer)
        await asyncio.wait(both)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                await self._whole.wait()
                if writer.is_closing():  # the partition broke this connection
                    return
                writer.write(data)
                await writer.drain()

    def _break(self) -> None:
        for writer in self._links:
            writer.transport.abort()
