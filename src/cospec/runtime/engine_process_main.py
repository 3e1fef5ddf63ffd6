"""The engine in a process of its own: commands come in over a socket, events go out, one message per step.

The server talks to this process through ``async_engine.AsyncEngineClient``, in the messages of ``messages``. A request
that the engine refuses gets ``Rejected`` with the sentence. A step that raises ends the requests that the step was
about and no others. The process ends with its parent, and with an engine that cannot compute any more.
"""

from __future__ import annotations

import dataclasses
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from cospec.config import EngineConfig
from cospec.core.types import Event, FinishReason, Request
from cospec.errors import CospecError, EngineEnded, RequestsFailed, failure
from cospec.process_utils import fast_exit, freeze_gc
from cospec.runtime.codec import ProtocolError, decode_call
from cospec.runtime.messages import (
    Abort,
    EngineCommand,
    EngineInfo,
    Events,
    Failed,
    Measure,
    Measured,
    Ready,
    Rejected,
    Start,
    Stop,
    Submit,
)
from cospec.runtime.transport import Channel, ChannelClosed, inherited

IDLE_SECONDS = 1.0  # how often an idle engine looks whether its parent is still there
LOG_LEVEL = "INFO"  # which execution mode works and why, what a drafter does
LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

log = logging.getLogger(__name__)


class EngineLike(Protocol):
    """What the loop needs of an engine; ``engine.Engine`` is one."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def tokenizer(self) -> Any: ...
    @property
    def model_path(self) -> Path | None: ...
    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def has_work(self) -> bool: ...
    @property
    def ended(self) -> str | None: ...
    def add(self, request: Request) -> None: ...
    def abort(self, ids: Iterable[str]) -> None: ...
    def step(self) -> list[Event]: ...
    def set_wakeup_fd(self, descriptor: int) -> None: ...
    def on_idle(self) -> None: ...
    def metrics(self) -> Any: ...
    def check_integrity(self) -> None: ...
    def close(self) -> None: ...


Build = Callable[[EngineConfig], EngineLike]


def build_engine(config: EngineConfig) -> EngineLike:
    """The real engine; imported here, so that the server's process never loads the models' code."""
    from cospec.assembly.build import build_engine as build

    log.info("the engine's process imports torch and transformers")
    return build(config)


def main(arguments: list[str]) -> None:
    """Main function of the engine process: build, report, serve until the command to stop arrives.

    Args:
        arguments: the descriptors of the connection and of the progress counter, the log level, then the name of the
            function that builds the engine.
    """
    descriptor, counter, level, name = arguments
    with fast_exit():
        stream = inherited(descriptor)
        logging.basicConfig(format=LOG_FORMAT)
        logging.getLogger("cospec").setLevel(level)
        channel = Channel(stream, EngineCommand)
        try:
            _serve(channel, name, ProgressCounter.of_file(int(counter)))
        except ChannelClosed:
            log.warning("the server is gone, and the engine ends")
        finally:
            channel.close()


def _serve(channel: Channel, name: str, progress: ProgressCounter) -> None:
    try:
        start = channel.receive()
        if not isinstance(start, Start):
            raise ProtocolError("An engine process gets another command before it knows its engine.")
        engine: EngineLike = decode_call(name, start.arguments)
    except CospecError as error:
        channel.send(Failed(str(error)))
        return
    except ChannelClosed:
        raise
    except Exception as error:  # the sentence must reach the user; the log keeps the rest
        log.exception("the engine could not be built")
        channel.send(Failed(f"The engine could not start: {type(error).__name__}: {error}."))
        return
    freeze_gc()
    try:
        EngineCoreProc(engine, channel, progress).run()
    except EngineEnded as error:
        log.error("the engine ends: %s", error)
        channel.send(Failed(str(error)))
    finally:
        engine.close()


class ProgressCounter:
    """A counter in memory of ``SIZE`` bytes. Processes share the counter if they share the memory.

    Args:
        memory: of ``SIZE`` bytes, writable.
    """

    SIZE = 8

    def __init__(self, memory: bytearray | mmap.mmap) -> None:
        self._words = memoryview(memory).cast("Q")

    @classmethod
    def of_file(cls, descriptor: int) -> ProgressCounter:
        """Return the counter of all processes that map the same file of ``SIZE`` bytes."""
        return cls(mmap.mmap(descriptor, cls.SIZE))

    @property
    def value(self) -> int:
        """The steps so far."""
        return self._words[0]

    def count(self) -> None:
        """Add a step."""
        self._words[0] += 1


class Commands(Protocol):
    """What the loop needs of a connection; ``Channel`` is one."""

    def fileno(self) -> int: ...
    def poll(self, seconds: float = 0.0) -> bool: ...
    def receive(self, seconds: float | None = None) -> Any: ...
    def send(self, message: Any) -> None: ...


class EngineCoreProc:
    """Takes commands while there are any, steps while there is work.

    Args:
        progress: shared with the server, which takes a counter that stands still for a frozen engine.
    """

    def __init__(self, engine: EngineLike, channel: Commands, progress: ProgressCounter) -> None:
        self._progress = progress
        self._engine = engine
        self._channel = channel
        self._live: dict[str, Request] = {}
        self._checked = True  # nothing has happened yet that could have lost something
        self._checks = {"integrity_checks": 0, "integrity_errors": 0}

    def run(self) -> None:
        """Serve until ``Stop`` comes or the parent is gone.

        Raises:
            EngineEnded: the engine cannot compute any more. A new process can go on with the live requests.
        """
        self._engine.set_wakeup_fd(self._channel.fileno())
        self._channel.send(Ready(_describe(self._engine)))
        parent = os.getppid()
        while os.getppid() == parent:
            self._progress.count()
            if not self._take_commands():
                return
            if self._engine.has_work:
                self._step()

    def _take_commands(self) -> bool:
        """Handle all waiting commands; without work, wait for a command. False after the command to stop."""
        wait = 0.0 if self._engine.has_work else IDLE_SECONDS
        if wait and not self._checked and not self._channel.poll(0.0):
            self._checked = True
            self._engine.on_idle()
            self._check()
        while (command := self._channel.receive(wait)) is not None:
            match command:
                case Submit(requests):
                    for request in requests:
                        self._add(request)
                case Abort(ids):
                    self._abort(ids)
                case Measure():
                    self._channel.send(Measured(dataclasses.asdict(self._engine.metrics()) | self._checks))
                case Stop():
                    return False
                case Start():
                    raise ProtocolError("An engine process is started twice.")
            wait = 0.0
        return True

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except CospecError as error:
            self._channel.send(Rejected(request.id, str(error), error.field))
        except Exception as error:  # one odd request must not end its neighbours
            log.exception("request %s could not be added", request.id)
            self._engine.abort([request.id])
            self._channel.send(Events((_failure(request, error),)))
        else:
            self._live[request.id] = request

    def _check(self) -> None:
        """An engine that has become idle looks whether anything was lost; the log has it, and service goes on."""
        self._checks["integrity_checks"] += 1
        try:
            self._engine.check_integrity()
        except AssertionError:
            self._checks["integrity_errors"] += 1
            log.exception("the idle engine's books do not balance")

    def _abort(self, ids: Sequence[str]) -> None:
        self._engine.abort(ids)
        for id in ids:
            self._live.pop(id, None)

    def _step(self) -> None:
        self._checked = False
        try:
            events = self._engine.step()
        except Exception as error:  # ends the requests it touched; re-raised when it touched none
            events = self._fail(error)
        if self._engine.ended is not None:
            raise EngineEnded(self._engine.ended)
        for event in events:
            if event.finish is not None:
                self._live.pop(event.id, None)
        if events:
            self._channel.send(Events(tuple(events)))

    def _fail(self, error: Exception) -> list[Event]:
        """End the requests that a failed step was about.

        ``RequestsFailed`` names them. Otherwise all of them end: a step that broke off may have written
        some sequences and not others, so later tokens might not follow the target distribution.
        """
        named = error.ids if isinstance(error, RequestsFailed) else self._live
        requests = [self._live[id] for id in named if id in self._live]
        if not requests:
            raise error
        log.error("a step failed, %d requests end with an error", len(requests), exc_info=error)
        self._abort([request.id for request in requests])
        return [_failure(request, error) for request in requests]


def _describe(engine: EngineLike) -> EngineInfo:
    return EngineInfo(
        model_name=engine.model_name,
        tokenizer_path=str(getattr(engine.tokenizer, "name_or_path", "") or engine.model_path or ""),
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
    )


def _failure(request: Request, error: Exception) -> Event:
    return Event(
        id=request.id,
        parent=request.parent,
        index=request.index,
        text="",
        tokens=(),
        sources=(),
        finish=FinishReason.ERROR,
        error=failure(error),
    )
