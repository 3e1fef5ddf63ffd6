"""The asyncio face of the engine: starts its process, submits requests, streams their events, aborts and drains.

Life of a stream: ``submit`` registers a queue for its requests and sends them; the reader task puts each event into the
queue of its request; the stream ends after the last request's final event. Whatever ends a stream early (the consumer
stops, the engine refuses, an abort) also aborts the rest of its requests, which frees their KV cache.

Life of the engine: ``start`` ──ready──► serves ──dies or freezes──► waits ──► restarts ──ready──► serves. A new process
goes on with the requests, see ``request_replay.LiveRequest``. Requests that were in a crash return one after another,
so that a request that crashes the next process too ends alone. An engine that dies too often ends the client for good,
see ``engine_supervision.RestartPolicy``.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from typing import Any

from cospec.config import EngineConfig
from cospec.core.types import Event, Request
from cospec.errors import CospecError, EngineEnded, EngineStopped, ModelError
from cospec.runtime.engine_client import EngineStatus, RequestRefused
from cospec.runtime.engine_process_handle import EngineProcessHandle
from cospec.runtime.engine_process_main import LOG_LEVEL, Build, build_engine
from cospec.runtime.engine_supervision import DEFAULT, ProgressMonitor, RestartPolicy, Supervision
from cospec.runtime.messages import (
    Abort,
    EngineInfo,
    EngineReply,
    Events,
    Failed,
    Measure,
    Measured,
    Ready,
    Rejected,
    Submit,
)
from cospec.runtime.request_replay import LiveRequest, next_event

METRICS_SECONDS = 2.0  # how long the engine may take to answer; scrapers give up after ten
STEPS_ALONE = 2  # of the engine, before the next request returns; the first of these may have begun before
LOOK_SECONDS = 0.02  # between two looks at these steps

log = logging.getLogger(__name__)


class AsyncEngineClient:
    """One engine, seen from an asyncio program.

    Args:
        build: makes the engine inside its process; a function of a module that can be imported.
        log_level: of the process; a name of the module ``logging``.
    """

    def __init__(
        self, build: Build = build_engine, supervision: Supervision = DEFAULT, log_level: str = LOG_LEVEL
    ) -> None:
        self._build, self._supervision, self._log_level = build, supervision, log_level
        self._restart_policy = RestartPolicy(supervision)
        self._monitor = ProgressMonitor(supervision)
        self._restart_limit: float | None = None  # seconds; known after the first start
        self._live: dict[str, LiveRequest] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._question: asyncio.Future[dict[str, Any]] | None = None
        self._draining = False
        self._info: EngineInfo | None = None
        self._process: EngineProcessHandle | None = None  # the process that serves; None while none does
        self._keeper: asyncio.Task[None] | None = None
        self._end: str | None = None  # why there is no engine any more
        self._ended = asyncio.Event()
        self._restarts = self._replayed = 0
        self._returning = set[str]()  # requests that were in a crash, and are not in the new process yet
        self._cleared = set[str]()  # those that returned without a further crash, until all have returned
        self._misled = False  # the latest crash was while requests returned

    async def start(self, config: EngineConfig, files: Sequence[int] = ()) -> EngineInfo:
        """Start the process and wait until the model is loaded.

        Args:
            files: descriptors that every process inherits; they stay open until ``close``.

        Raises:
            ModelError: the engine could not be built; the sentence is the engine's.
        """
        ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._keeper = asyncio.create_task(self._keep(config, files, ready))
        try:
            self._info = await ready
        except BaseException:
            await self.close()
            raise
        return self._info

    @property
    def info(self) -> EngineInfo:
        """The facts that the engine sent when it was ready.

        Raises:
            EngineStopped: it has not started.
        """
        if self._info is None:
            raise EngineStopped("The engine has not started.")
        return self._info

    @property
    def alive(self) -> bool:
        """Whether the engine is loaded, its process runs and makes progress."""
        return self._serving and not self._monitor.frozen

    @property
    def _serving(self) -> bool:
        return self._process is not None and self._process.alive

    @property
    def active(self) -> int:
        """Requests that have not finished."""
        return len(self._live)

    @property
    def status(self) -> EngineStatus:
        """Counts of the client itself."""
        return EngineStatus(self.alive, self._restarts, self._replayed, self.active)

    async def ended(self) -> None:
        """Wait until the engine has ended for good, for whatever reason."""
        await self._ended.wait()

    def check_ended(self) -> None:
        """Raises ``EngineEnded`` when the engine has ended for good."""
        if self._end is not None:
            raise EngineEnded(self._end)

    def check_alive(self) -> None:
        """Raises ``EngineStopped`` when the engine has ended, restarts, or makes no progress."""
        self.check_ended()
        if not self._serving:
            raise EngineStopped("The engine restarts; try again in a moment.")
        if self._monitor.frozen:
            raise EngineStopped(f"The engine has made no progress for {self._supervision.timeout:g} seconds.")

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
        assert self._process is not None
        try:
            self._process.send(Submit(tuple(requests)))
        except (OverflowError, UnicodeEncodeError):
            raise RequestRefused(
                "The request holds a number or text that cannot be sent on; allowed are numbers of 64 bits and text of "
                "whole Unicode characters."
            ) from None
        queue: asyncio.Queue[Event | CospecError] = asyncio.Queue()
        for request in requests:
            self._live[request.id] = LiveRequest(request, queue)
        self._idle.clear()
        open_ids = {request.id for request in requests}
        try:
            while open_ids:
                yield await next_event(queue, open_ids)
        finally:
            self.abort(open_ids)

    def abort(self, ids: Iterable[str]) -> None:
        """Drop requests: their streams end with finish reason ``abort``. Unknown and finished ids are ignored."""
        known = tuple(id for id in ids if id in self._live)
        if not known:
            return
        if self._process is not None and self._serving:
            self._process.send(Abort(known))
        for id in known:
            self._live[id].abort()
            self._forget(id)

    def abort_all(self) -> None:
        """Drop every request."""
        self.abort(list(self._live))

    async def metrics(self, timeout: float = METRICS_SECONDS) -> dict[str, Any]:
        """The engine's counters and gauges, ``EngineMetrics`` as a dictionary.

        Raises:
            EngineStopped: the process has ended, or does not answer within ``timeout`` seconds.
        """
        self.check_alive()
        assert self._process is not None
        # One question at a time: a frozen engine must not find thousands of questions when the engine goes on.
        if self._question is None:
            self._question = asyncio.get_running_loop().create_future()
            self._process.send(Measure())
        try:
            return await asyncio.wait_for(asyncio.shield(self._question), timeout)
        except TimeoutError:
            raise EngineStopped(f"The engine has not answered for {timeout:g} seconds.") from None

    async def drain(self, timeout: float) -> None:
        """Take no more requests, wait up to ``timeout`` seconds for the running ones, abort what is left."""
        self._draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        self.abort_all()

    async def close(self) -> None:
        """Stop the process, by force if it does not answer."""
        self._draining = True
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        self._finish("The engine process has ended.")

    async def _keep(self, config: EngineConfig, files: Sequence[int], ready: asyncio.Future[EngineInfo]) -> None:
        """Run processes one after another; says why when there will be no further process."""
        try:
            reason = await self._run(config, files, ready)
        except Exception as error:  # the system refuses a process or a socket, or a message is not readable
            log.exception("the engine cannot be kept alive")
            reason = f"The engine cannot be kept alive: {type(error).__name__}: {error}."
        if not ready.done():
            ready.set_exception(ModelError(reason))
        self._finish(reason)

    async def _run(self, config: EngineConfig, files: Sequence[int], ready: asyncio.Future[EngineInfo]) -> str:
        """Run one process after another until one cannot start or the processes die too often; returns the reason."""
        while True:
            process = await EngineProcessHandle.start(self._build, config, files, self._log_level)
            try:
                started, cause = await self._follow(process, ready)
                reason = cause or await process.ending()
            finally:
                await process.close(ask=self._process is process)
                self._process = None
            if not ready.done():
                return reason
            self._drop_question(reason)
            if started is not None:  # else no request was in the process
                self._orphan(reason, crashed=cause is None)
            served = 0.0 if started is None else time.monotonic() - started
            delay = self._restart_policy.died(served)
            if delay is None:
                return f"The engine has died {self._restart_policy.deaths} times in a row. {reason}"
            log.warning("%s A new process starts in %g seconds.", reason, delay)
            await asyncio.sleep(delay)
            self._restarts += 1

    async def _follow(
        self, process: EngineProcessHandle, ready: asyncio.Future[EngineInfo]
    ) -> tuple[float | None, str | None]:
        """Dispatch the replies of one process until it has ended; when it was ready, and its reason for the end."""
        begun, started, reason = time.monotonic(), None, None
        watch, replay = asyncio.create_task(self._watch_start(process)), None
        try:
            async for reply in process.replies():
                match reply:
                    case Ready(info):
                        started = time.monotonic()
                        if self._restart_limit is None:
                            self._restart_limit = self._supervision.restart_limit(started - begun)
                        watch.cancel()
                        self._monitor = ProgressMonitor(self._supervision)
                        watch = asyncio.create_task(self._watch(process))
                        self._process = process
                        replay = asyncio.create_task(self._replay(process))
                        if not ready.done():
                            ready.set_result(info)
                    case Failed(message):
                        reason = message
                    case _:
                        self._dispatch(reply)
        finally:
            watch.cancel()
            if replay is not None:
                replay.cancel()
        return started, reason

    async def _watch_start(self, process: EngineProcessHandle) -> None:
        """Kill a process whose start takes much longer than the first start."""
        if self._restart_limit is not None:
            await asyncio.sleep(self._restart_limit)
            log.error("The engine is not ready after %.0f seconds; its process is killed.", self._restart_limit)
            process.kill()

    async def _watch(self, process: EngineProcessHandle) -> None:
        """Look at the progress of a process, and kill a process that makes none for long."""
        while not self._monitor.hopeless:
            self._monitor.observe(process.progress)
            await asyncio.sleep(self._supervision.tick)
        log.error("The engine makes no progress; its process is killed.")
        process.kill()

    async def _replay(self, process: EngineProcessHandle) -> None:
        """Give a new process the requests that survived the old one; those that were in a crash one after another.

        The next one follows after two steps, and after the first tokens of a request that streams.
        """
        survivors = list(self._live.values())
        if survivors:
            log.warning("The new engine process goes on with %d requests.", len(survivors))
        self._returning = {live.request.id for live in survivors if live.crashes}
        self._cleared.clear()
        self._send([live for live in survivors if not live.crashes], process)
        for live in survivors:
            id, known = live.request.id, len(live.tokens)
            if id in self._returning and id in self._live:
                self._returning.remove(id)
                self._send([live], process)
                sent = process.progress
                while id in self._live and (
                    process.progress < sent + STEPS_ALONE or (live.request.streams and len(live.tokens) == known)
                ):
                    await asyncio.sleep(LOOK_SECONDS)
                self._cleared.add(id)
        self._returning.clear()
        self._cleared.clear()
        self._misled = False

    def _send(self, survivors: Sequence[LiveRequest], process: EngineProcessHandle) -> None:
        """Have a new process go on with requests."""
        self._replayed += len(survivors)
        if survivors:
            process.send(Submit(tuple(live.resumed() for live in survivors)))

    def _orphan(self, reason: str, crashed: bool) -> None:
        """The process has ended: end what was in too many crashes. A process with a reason has not crashed.

        While requests return, a crash is the fault of the latest, or of a new request. If that was wrong, the next
        crash may be the fault of each request in the process.
        """
        cleared = set[str]() if self._misled else self._cleared
        for id, live in list(self._live.items()):
            if id not in self._returning and not live.survives(crashed=crashed and id not in cleared):
                live.fail(EngineStopped(reason))
                self._forget(id)
        self._misled = crashed and bool(self._returning or self._cleared)

    def _finish(self, reason: str) -> None:
        """There is no engine any more."""
        if self._end is not None:
            return
        self._end = reason
        for id, live in list(self._live.items()):
            live.fail(EngineEnded(reason))
            self._forget(id)
        self._drop_question(reason)
        self._ended.set()

    def _dispatch(self, reply: EngineReply) -> None:
        match reply:
            case Events(events):
                now = time.monotonic()
                for event in events:
                    live = self._live.get(event.id)
                    if live is None:  # aborted here while the event was on its way
                        continue
                    live.deliver(event, now)
                    if event.finish is not None:
                        self._forget(event.id)
            case Rejected(id, message, field):
                if id in self._live:
                    self._live[id].fail(RequestRefused(message, field))
                    self._forget(id)
            case Measured(metrics):
                if self._question is not None:
                    self._question.set_result(metrics)
                    self._question = None

    def _drop_question(self, reason: str) -> None:
        if self._question is not None:
            self._question.set_exception(EngineStopped(reason))
            self._question.exception()  # marks the error as read where no caller waits any more
            self._question = None

    def _forget(self, id: str) -> None:
        self._live.pop(id, None)
        if not self._live:
            self._idle.set()
