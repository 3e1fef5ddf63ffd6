"""The engine in a process of its own: commands come in over a socket, events go out, one message per round.

The server talks to this process through ``serving.AsyncEngineClient``. Messages are msgpack; what they carry are the
frozen dataclasses of ``types``. A request that the engine refuses gets ``Rejected`` with the sentence; a round that
raises ends the requests it was about and no others; when the parent process is gone this one ends too.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_ulonglong
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from cospec.config import EngineConfig
from cospec.core.types import Event, FinishReason, Request
from cospec.errors import CospecError, RequestsFailed, failure
from cospec.process_utils import fast_exit, freeze_gc

IDLE_POLL_MS = 1000  # how often an idle engine looks whether its parent is still there
LINGER_MS = 1000
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
    def acceptance_methods(self) -> tuple[str, str]: ...
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
    from cospec.core.engine import Engine

    log.info("the engine's process imports torch and transformers")
    return Engine.build(config)


class EngineInfo(msgspec.Struct, frozen=True):
    """What a server must know of an engine.

    Attributes:
        model_name: the name that requests ask for.
        tokenizer_path: folder or hub name of the tokenizer.
        rules: the configured rule and the rule of sampled requests, see ``requests.acceptance_method``.
    """

    model_name: str
    tokenizer_path: str
    max_model_len: int
    vocab_size: int
    acceptance_methods: tuple[str, str]


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Requests to be taken on."""

    requests: tuple[Request, ...]


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Requests to be dropped; unknown ids are ignored."""

    ids: tuple[str, ...]


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Asks for ``Measured``; answers come in the order of the questions."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Ends the process."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine is loaded."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The engine could not be built; one sentence."""

    message: str


class Events(msgspec.Struct, frozen=True, tag=True):
    """What one round gave."""

    events: tuple[Event, ...]


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """A request that the engine does not take: the sentence, and the field it is about."""

    id: str
    message: str
    field: str | None = None


class Measured(msgspec.Struct, frozen=True, tag=True):
    """``EngineMetrics`` as plain values."""

    metrics: dict[str, Any]


Command = Submit | Abort | Measure | Stop
Reply = Ready | Failed | Events | Rejected | Measured


def run_engine_core(address: str, config: EngineConfig, build: Build, progress: c_ulonglong) -> None:
    """Main function of the engine process: build, report, serve until told to stop."""
    with fast_exit():
        _run(address, config, build, progress)


def _run(address: str, config: EngineConfig, build: Build, progress: c_ulonglong) -> None:
    # Signals go to the whole group of a terminal or a container; the server decides when the engine ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(format=LOG_FORMAT)
    logging.getLogger("cospec").setLevel(logging.INFO)  # which round is at work and why, what a drafter does
    with zmq.Context() as context, context.socket(zmq.PAIR) as socket:
        socket.set(zmq.LINGER, LINGER_MS)
        socket.set(zmq.SNDHWM, 0)
        socket.connect(address)
        try:
            engine = build(config)
        except CospecError as error:
            socket.send(msgspec.msgpack.encode(Failed(str(error))))
            return
        except Exception as error:  # the sentence must reach the user; the log keeps the rest
            log.exception("the engine could not be built")
            socket.send(msgspec.msgpack.encode(Failed(f"The engine could not start: {type(error).__name__}: {error}.")))
            return
        freeze_gc()
        try:
            EngineCoreProc(engine, socket, progress).run()
        finally:
            engine.close()


class EngineCoreProc:
    """Takes commands while there are any, steps while there is work.

    Args:
        progress: shared with the server, which takes a counter that stands still for a frozen engine.
    """

    def __init__(self, engine: EngineLike, socket: zmq.Socket[bytes], progress: c_ulonglong) -> None:
        self._progress = progress
        self._engine = engine
        self._socket = socket
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._encoder = msgspec.msgpack.Encoder()
        self._live: dict[str, Request] = {}
        self._checked = True  # nothing has happened yet that could have lost something

    def run(self) -> None:
        """Serve until ``Stop`` comes or the parent is gone."""
        self._engine.set_wakeup_fd(int(self._socket.get(zmq.FD)))
        self._send(Ready(_describe(self._engine)))
        parent = os.getppid()
        while os.getppid() == parent:
            self._progress.value += 1
            if not self._take_commands():
                return
            if self._engine.has_work:
                self._step()

    def _take_commands(self) -> bool:
        """Handle all waiting commands; without work, wait for one. False when told to stop."""
        wait = 0 if self._engine.has_work else IDLE_POLL_MS
        if wait and not self._checked and not self._socket.poll(0):
            self._checked = True
            self._engine.on_idle()
            self._check()
        while self._socket.poll(wait):
            command = self._decoder.decode(self._socket.recv())
            match command:
                case Submit(requests):
                    for request in requests:
                        self._add(request)
                case Abort(ids):
                    self._abort(ids)
                case Measure():
                    self._send(Measured(dataclasses.asdict(self._engine.metrics())))
                case Stop():
                    return False
            wait = 0
        return True

    def _add(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except CospecError as error:
            self._send(Rejected(request.id, str(error), error.field))
        except Exception as error:  # one odd request must not end its neighbours
            log.exception("request %s could not be added", request.id)
            self._engine.abort([request.id])
            self._send(Events((_failure(request, error),)))
        else:
            self._live[request.id] = request

    def _check(self) -> None:
        """An engine that has become idle looks whether anything was lost; the log has it, and service goes on."""
        try:
            self._engine.check_integrity()
        except AssertionError:
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
        for event in events:
            if event.finish is not None:
                self._live.pop(event.id, None)
        if events:
            self._send(Events(tuple(events)))

    def _fail(self, error: Exception) -> list[Event]:
        """End the requests that a failed round was about.

        ``RequestsFailed`` names them. Otherwise all of them end: a round that broke off may have written
        some sequences and not others, and going on from there could give tokens that do not follow the law.
        """
        named = error.ids if isinstance(error, RequestsFailed) else self._live
        requests = [self._live[id] for id in named if id in self._live]
        if not requests:
            raise error
        log.error("a round failed, %d requests end with an error", len(requests), exc_info=error)
        self._abort([request.id for request in requests])
        return [_failure(request, error) for request in requests]

    def _send(self, reply: Reply) -> None:
        self._socket.send(self._encoder.encode(reply))


def _describe(engine: EngineLike) -> EngineInfo:
    return EngineInfo(
        model_name=engine.model_name,
        tokenizer_path=str(getattr(engine.tokenizer, "name_or_path", "") or engine.model_path or ""),
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        acceptance_methods=engine.acceptance_methods,
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
