"""The asyncio face of the engine: starts its process, submits requests, streams their events, aborts and drains.

Life of a stream: ``submit`` registers a queue for its requests and sends them; the reader task puts each event into the
queue of its request; the stream ends after the last request's final event. Whatever ends a stream early (the consumer
stops, the engine refuses or dies, an abort) also aborts what is left of it, so that no KV cache is held for nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import shutil
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from cospec.config import EngineConfig
from cospec.engine.process import (
    Abort,
    Build,
    Command,
    EngineInfo,
    Events,
    Failed,
    Measure,
    Measured,
    Ready,
    Rejected,
    Reply,
    Stop,
    Submit,
    build_engine,
    run_process,
)
from cospec.engine.socket_folder import SOCKET, socket_folder
from cospec.errors import CospecError, EngineStopped, ModelError
from cospec.types import Event, Finish, Request

LAST_WORDS_MS = 200  # how long to wait for messages that a dead process left in the socket
STOP_SECONDS = 5.0  # how long a stopping process may take before it is killed


class RequestRefused(CospecError):
    """The engine does not take a request; the sentence is the engine's, ``field`` is what it is about."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class EngineClient:
    """One engine process, seen from an asyncio program.

    Args:
        build: makes the engine inside its process; must be picklable by reference.
    """

    def __init__(self, build: Build = build_engine) -> None:
        self._build = build
        self._folder = socket_folder()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._streams: dict[str, tuple[Request, asyncio.Queue[Event | CospecError]]] = {}
        self._questions: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()
        self._dead = asyncio.Event()
        self._draining = False
        self._info: EngineInfo | None = None
        self._process: multiprocessing.process.BaseProcess | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self, config: EngineConfig) -> EngineInfo:
        """Start the process and wait until the model is loaded.

        Raises:
            ModelError: the engine could not be built; the sentence is the engine's.
        """
        address = f"ipc://{self._folder / SOCKET}"
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            self._socket.set(option, 0)
        self._socket.bind(address)
        spawn = multiprocessing.get_context("spawn")
        self._process = spawn.Process(
            target=run_process, args=(address, config, self._build), name="cospec-engine", daemon=True
        )
        self._process.start()
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[EngineInfo] = loop.create_future()
        sentinel = self._process.sentinel

        def died() -> None:
            loop.remove_reader(sentinel)
            self._dead.set()

        loop.add_reader(sentinel, died)
        self._reader = asyncio.create_task(self._read(ready))
        try:
            self._info = await ready
        except BaseException:
            await self.close()
            raise
        return self._info

    @property
    def info(self) -> EngineInfo:
        """What the engine said of itself when it was ready.

        Raises:
            EngineStopped: it has not started.
        """
        if self._info is None:
            raise EngineStopped("The engine has not started.")
        return self._info

    @property
    def alive(self) -> bool:
        """Whether the engine is loaded and its process runs."""
        return self._info is not None and not self._dead.is_set()

    @property
    def active(self) -> int:
        """Requests that have not finished."""
        return len(self._streams)

    async def ended(self) -> None:
        """Wait until the process has ended, for whatever reason."""
        await self._dead.wait()

    def check_alive(self) -> None:
        """Raises ``EngineStopped`` when the process has ended."""
        if not self.alive:
            raise EngineStopped(self._epitaph())

    def check(self) -> None:
        """Raises ``EngineStopped`` when new requests are not taken, with the reason."""
        self.check_alive()
        if self._draining:
            raise EngineStopped("The server is draining and takes no new requests.")

    async def submit(self, requests: Sequence[Request]) -> AsyncGenerator[Event, None]:
        """The events of ``requests``, interleaved, until each has finished. Ending the iteration aborts the rest.

        Raises:
            RequestRefused: the engine does not take one of them; the others are aborted.
            EngineStopped: the engine is draining or has ended.
        """
        self.check()
        try:
            message = msgspec.msgpack.encode(Submit(tuple(requests)))
        except (OverflowError, UnicodeEncodeError):
            raise RequestRefused(
                "The request holds a number or text that cannot be sent on; allowed are numbers of 64 bits and text of "
                "whole Unicode characters."
            ) from None
        queue: asyncio.Queue[Event | CospecError] = asyncio.Queue()
        for request in requests:
            self._streams[request.id] = (request, queue)
        self._idle.clear()
        self._socket.send(message)
        open_ids = {request.id for request in requests}
        try:
            while open_ids:
                item = await queue.get()
                if isinstance(item, CospecError):
                    raise item
                if item.finish is not None:
                    open_ids.discard(item.id)
                yield item
        finally:
            self.abort(open_ids)

    def abort(self, ids: Iterable[str]) -> None:
        """Drop requests: their streams end with finish reason ``abort``. Unknown and finished ids are ignored."""
        known = tuple(id for id in ids if id in self._streams)
        if not known:
            return
        if self.alive:
            self._send(Abort(known))
        for id in known:
            request, queue = self._streams[id]
            self._forget(id)
            queue.put_nowait(_aborted(request))

    def abort_all(self) -> None:
        """Drop every request."""
        self.abort(list(self._streams))

    async def metrics(self) -> dict[str, Any]:
        """The engine's counters and gauges, ``EngineMetrics`` as a dictionary.

        Raises:
            EngineStopped: the process has ended.
        """
        if not self.alive:
            raise EngineStopped(self._epitaph())
        question: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._questions.append(question)
        self._send(Measure())
        return await question

    async def drain(self, timeout: float) -> None:
        """Take no more requests, wait up to ``timeout`` seconds for the running ones, abort what is left."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        self.abort_all()

    async def close(self) -> None:
        """Stop the process, by force if it does not answer, and remove the socket."""
        self._draining = True
        process = self._process
        if process is not None and process.is_alive():
            if self._info is not None:  # while it loads it takes no commands
                self._send(Stop())
                await asyncio.to_thread(process.join, STOP_SECONDS)
            if process.is_alive():
                process.kill()
                await asyncio.to_thread(process.join)
        self._dead.set()
        if self._reader is not None:
            self._reader.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reader
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _send(self, command: Command) -> None:
        # The queue has no limit, so the message is handed over at once and there is nothing to wait for.
        self._socket.send(msgspec.msgpack.encode(command))

    async def _read(self, ready: asyncio.Future[EngineInfo]) -> None:
        """Dispatch replies until the process ends, then end every stream."""
        decoder = msgspec.msgpack.Decoder(Reply)
        death = asyncio.create_task(self._dead.wait())
        try:
            while not death.done():
                message = asyncio.ensure_future(self._socket.recv())
                await asyncio.wait({message, death}, return_when=asyncio.FIRST_COMPLETED)
                if message.done():
                    self._dispatch(decoder.decode(message.result()), ready)
                else:
                    message.cancel()
            while await self._socket.poll(LAST_WORDS_MS):
                self._dispatch(decoder.decode(await self._socket.recv()), ready)
        finally:
            death.cancel()
        self._bury(ready)

    def _dispatch(self, reply: Reply, ready: asyncio.Future[EngineInfo]) -> None:
        match reply:
            case Events(events):
                for event in events:
                    self._deliver(event.id, event, final=event.finish is not None)
            case Rejected(id, message, field):
                self._deliver(id, RequestRefused(message, field), final=True)
            case Measured(metrics):
                question = self._questions.popleft()
                if not question.done():
                    question.set_result(metrics)
            case Ready(info):
                ready.set_result(info)
            case Failed(message):
                ready.set_exception(ModelError(message))

    def _deliver(self, id: str, item: Event | CospecError, final: bool) -> None:
        entry = self._streams.get(id)
        if entry is None:  # aborted here while the event was on its way
            return
        entry[1].put_nowait(item)
        if final:
            self._forget(id)

    def _forget(self, id: str) -> None:
        self._streams.pop(id, None)
        if not self._streams:
            self._idle.set()

    def _bury(self, ready: asyncio.Future[EngineInfo]) -> None:
        if not ready.done():
            ready.set_exception(ModelError(self._epitaph()))
        for _, queue in self._streams.values():
            queue.put_nowait(EngineStopped(self._epitaph()))
        self._streams.clear()
        self._idle.set()
        while self._questions:
            question = self._questions.popleft()
            if not question.done():
                question.set_exception(EngineStopped(self._epitaph()))

    def _epitaph(self) -> str:
        code = self._process.exitcode if self._process is not None else None
        return "The engine process has ended" + (f" with exit code {code}." if code is not None else ".")


def _aborted(request: Request) -> Event:
    return Event(
        id=request.id,
        parent=request.parent,
        index=request.index,
        text="",
        tokens=(),
        sources=(),
        finish=Finish.ABORT,
    )
