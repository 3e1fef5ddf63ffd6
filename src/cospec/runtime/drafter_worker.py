"""The process that a drafter has for itself; ``drafter_process_executor`` starts the process and talks to it.

The process ends when its connection ends or the engine's process is gone, whatever the drafter does at the time. An
engine that was killed therefore leaves no process. An error in the drafter ends the process too, with a traceback:
the state of a drafter that raised is not known.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from queue import SimpleQueue
from types import TracebackType

from cospec.core.plugin_base import Drafter
from cospec.errors import CospecError
from cospec.process_utils import freeze_gc, keep_to
from cospec.runtime.codec import ProtocolError, decode_call
from cospec.runtime.messages import (
    Commits,
    ContextDecoder,
    DrafterCommand,
    DrafterInfo,
    DrafterReady,
    Drafts,
    Failed,
    Free,
    Propose,
    Score,
    Scores,
    Start,
    Weights,
)
from cospec.runtime.transport import Channel, ChannelClosed, inherited

LOOK_SECONDS = 1.0  # how often an idle process looks whether the engine's process is there
WEIGHTS_SECONDS = 0.2  # between two messages with a pool's weights


def main(arguments: list[str]) -> None:
    """Serve the engine that started this process.

    Args:
        arguments: the connection's file descriptor, the name of the function that builds the drafter, then the
            processors to keep to; none for all.
    """
    sys.excepthook = _end_at_once
    descriptor, name, *cores = arguments
    stream = inherited(descriptor)
    if cores:
        keep_to({int(core) for core in cores})
    run(stream, name)


def run(stream: socket.socket, name: str) -> None:
    """Build the drafter, then serve one command after another until the connection ends, which ends the process.

    Args:
        stream: a connection to the engine.
        name: of the function that builds the drafter.
    """
    channel = Channel(stream, DrafterCommand)
    commands: SimpleQueue[DrafterCommand] = SimpleQueue()
    threading.Thread(target=_listen, args=(channel, commands, os.getppid()), daemon=True).start()
    start = commands.get()
    if not isinstance(start, Start):
        raise ProtocolError("A drafter's process gets another command before it knows its drafter.")
    try:
        drafter: Drafter = decode_call(name, start.arguments)
    except CospecError as error:
        channel.send(Failed(str(error)))
        return
    freeze_gc()
    channel.send(DrafterReady(DrafterInfo.of(drafter)))
    _serve(drafter, commands, channel)


def _serve(drafter: Drafter, commands: SimpleQueue[DrafterCommand], channel: Channel) -> None:
    busy, due = 0.0, 0.0
    contexts = ContextDecoder()
    while True:
        command = commands.get()
        started = time.monotonic()
        match command:
            case Propose(number, updates, budgets):
                drafts = drafter.propose([contexts.decode(update) for update in updates], budgets)
                ended = time.monotonic()
                busy += ended - started
                if drafter.member_names is not None and ended >= due:
                    due = ended + WEIGHTS_SECONDS
                    channel.send(Weights(dict(drafter.weights())))
                channel.send(Drafts(number, drafts, busy))
            case Score(number, updates):
                scores = drafter.score_known_tokens([contexts.decode(update) for update in updates])
                busy += time.monotonic() - started
                channel.send(Scores(number, scores, busy))
            case Commits(commits):
                drafter.commit(commits)
                busy += time.monotonic() - started
            case Free(ids):
                contexts.free(ids)
                drafter.free(ids)
                busy += time.monotonic() - started
            case Start():
                raise ProtocolError("A drafter's process is started twice.")


def _end_at_once(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """The engine is waiting, and libraries take their time to end."""
    sys.__excepthook__(kind, error, trace)
    os._exit(1)


def _listen(channel: Channel, commands: SimpleQueue[DrafterCommand], parent: int) -> None:
    """Take in commands at once, so that the engine never waits for a busy drafter; end with the engine."""
    try:
        while True:
            command = channel.receive(LOOK_SECONDS)
            if command is not None:
                commands.put(command)
            elif os.getppid() != parent:
                os._exit(0)
    except ChannelClosed:
        os._exit(0)
    except ProtocolError as error:
        print(f"The drafter's process ends: {error}", file=sys.stderr, flush=True)
        os._exit(1)
