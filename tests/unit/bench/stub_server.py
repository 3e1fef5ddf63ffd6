"""A server that streams what a script says, when it says so, and stamps when it really sent each piece."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

Script = tuple[tuple[float, str], ...]  # seconds to wait, then the text to send


@dataclass
class Stamps:
    """When one request was read, and when each piece of its answer was sent; ``time.perf_counter``."""

    received: float
    sent: list[float] = field(default_factory=list)


class StubServer:
    """Answers ``/v1/models``, ``/v1/completions`` and, when given a page, ``/metrics``.

    Args:
        scripts: by prompt; other prompts are answered with status 400.
        die_after: answers after which it closes its port and every connection, in the middle of the next one.
    """

    def __init__(self, scripts: Mapping[str, Script], metrics: str | None = None, die_after: int | None = None) -> None:
        self._scripts, self._metrics, self._die_after = scripts, metrics, die_after
        self.stamps: dict[str, list[Stamps]] = {}
        self.bodies: list[dict[str, object]] = []
        self.url = ""
        self._finished = 0
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)

    def __enter__(self) -> StubServer:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *raised: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        self._die()

    def _die(self) -> None:
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                path = head.split()[1]
                lengths = [line for line in head.splitlines() if line.lower().startswith("content-length:")]
                body = await reader.readexactly(int(lengths[0].split(":")[1])) if lengths else b""
                await self._answer(path, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/v1/models":
            await _whole(writer, 200, json.dumps({"data": [{"id": "stub"}]}))
        elif path == "/metrics" and self._metrics is not None:
            await _whole(writer, 200, self._metrics)
        elif path == "/v1/completions":
            await self._complete(json.loads(body), writer)
        else:
            await _whole(writer, 404, "no such page")

    async def _complete(self, body: dict[str, object], writer: asyncio.StreamWriter) -> None:
        stamps = Stamps(time.perf_counter())
        prompt = str(body["prompt"])
        self.bodies.append(body)
        self.stamps.setdefault(prompt, []).append(stamps)
        if prompt not in self._scripts:
            await _whole(writer, 400, "no such script")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for number, (wait, text) in enumerate(self._scripts[prompt]):
            await asyncio.sleep(wait)
            if self._die_after is not None and self._finished >= self._die_after and number > 0:
                self._die()
                raise ConnectionResetError
            # Stamped before the write: after it, the client may read before this thread runs again.
            stamps.sent.append(time.perf_counter())
            _event(writer, {"choices": [{"index": 0, "text": text, "finish_reason": None}], "usage": None})
            await writer.drain()
        tokens = sum(len(text) for _, text in self._scripts[prompt])
        _event(writer, {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
        _event(writer, {"choices": [], "usage": {"prompt_tokens": len(prompt), "completion_tokens": tokens}})
        _chunk(writer, b": a comment\n\ndata: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        self._finished += 1


async def _whole(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(text.encode())}\r\n\r\n{text}".encode())
    await writer.drain()


def _event(writer: asyncio.StreamWriter, event: dict[str, object]) -> None:
    _chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
