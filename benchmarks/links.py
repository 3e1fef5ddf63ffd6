"""Measures what one window costs between two nodes: a message over TCP, and two tensors over torch.distributed.

Run ``python -m benchmarks.netns --delay 0.01 -- python -m benchmarks.links`` for two namespaces with a slow link, or
``python -m benchmarks.links --here`` for two processes without a delay. The receiver of a window does not know the size
of the window. So torch.distributed sends a header of fixed size first, then the states.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from statistics import median
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from benchmarks.common import write
from benchmarks.netns import address, device, inside
from cospec.distributed.links import Address, accept, connect
from cospec.distributed.messages import Window
from cospec.models.stage import StageBatch

PORT, TURNS, HIDDEN = 29611, 20, 2048
ROWS = (1, 9, 64)


def window(rows: int) -> Window:
    """Return a window of one sequence."""
    batch = StageBatch(
        np.array([[0, rows, 0, 0, 1]]), np.zeros(rows, np.int64), np.zeros(0, np.int64), np.zeros(1, np.int32)
    )
    none = np.zeros(0, np.int64)
    states = np.zeros((rows, HIDDEN), np.float32)
    return msgspec.structs.replace(Window.of(0, batch, (none, none)), states=states)


def by_message(first: bool, host: str) -> Callable[[int], None]:
    """Return a function that sends a window and waits for the window's return."""
    if first:
        time.sleep(1.0)
        channel = connect(Address(host, PORT), "benchmark", Window)
    else:
        ((channel, _),) = accept(socket.create_server((host, PORT)), "benchmark", Window)

    def turn(rows: int) -> None:
        if first:
            channel.send(window(rows))
            channel.receive()
        else:
            channel.send(channel.receive())

    return turn


def by_tensors(first: bool, host: str) -> Callable[[int], None]:
    """Return the same function for torch.distributed with gloo."""
    if host == address(1):
        os.environ["GLOO_SOCKET_IFNAME"] = device(0 if first else 1)
    init = f"tcp://{host}:{PORT + 1}"
    rank = 1 if first else 0  # rank 0 listens
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=2, timeout=timedelta(seconds=60))

    def send(rows: int) -> None:
        dist.send(torch.tensor([rows, HIDDEN]), 1 - rank)
        dist.send(torch.zeros(rows, HIDDEN), 1 - rank)

    def receive() -> int:
        header = torch.zeros(2, dtype=torch.int64)
        dist.recv(header, 1 - rank)
        rows = int(header[0])
        dist.recv(torch.empty(rows, HIDDEN), 1 - rank)
        return rows

    def turn(rows: int) -> None:
        if first:
            send(rows)
            receive()
        else:
            send(receive())

    return turn


TRANSPORTS = {"message": by_message, "tensors": by_tensors}


def serve(name: str, first: bool, host: str) -> dict[int, float]:
    """Return seconds of one direction by rows; the second process returns what it waited."""
    turn, found = TRANSPORTS[name](first, host), {}
    for rows in ROWS:
        times = []
        for _ in range(TURNS):
            started = time.perf_counter()
            turn(rows)
            times.append((time.perf_counter() - started) / 2)
        found[rows] = median(times[3:])
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--here", action="store_true")
    parser.add_argument("--answer", choices=list(TRANSPORTS))
    parser.add_argument("--delay", type=float, default=0.01, help="of the link, for the record")
    given = parser.parse_args(arguments)
    host = "127.0.0.1" if given.here else address(1)
    if given.answer:
        serve(given.answer, False, host)
        return
    where = ["--here"] if given.here else []
    found: dict[str, Any] = {}
    for name in TRANSPORTS:
        command = [sys.executable, "-m", "benchmarks.links", "--answer", name, *where]
        with subprocess.Popen(command if given.here else [*inside(1), *command]) as answering:
            time.sleep(0.0 if name == "tensors" else 4.0)
            found[name] = serve(name, True, host)
            answering.wait()
    print(json.dumps(found, indent=1))
    delay = 0.0 if given.here else given.delay
    write("links" if delay else "links_here", {"delay": delay, "hidden": HIDDEN, "seconds": found})


if __name__ == "__main__":
    main()
