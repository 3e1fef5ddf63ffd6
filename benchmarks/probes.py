"""Probes of a server from inside and outside: pauses of an event loop, and the latency of ``/health``.

``python -m benchmarks.probes serve FILE ENGINE SETTINGS`` serves like ``cospec serve``. A task in the server's event
loop sleeps for ``PERIOD`` and records the delay of its wake-up. ``... control FILE`` does the same in an idle loop,
which shows the pauses of the machine. ``... health FILE URL`` requests ``/health`` every ``POLL`` seconds. Each probe
writes its findings to FILE once a second.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PERIOD = 0.01  # seconds
POLL = 0.02
LONG = 0.05  # longer pauses are listed individually
LISTED = 2000


def _save(path: str, found: dict[str, Any]) -> None:
    partial = Path(f"{path}.part")
    partial.write_text(json.dumps(found), "utf-8")
    partial.replace(path)


async def watch_pauses(path: str) -> None:
    """Record the delays of this event loop.

    ``own`` is the part of a pause in which the process had a processor: the whole pause if the process computed, and 0
    if the system ran other processes.
    """
    found: dict[str, Any] = {"wakes": 0, "longest": 0.0, "longest_own": 0.0, "over_100_ms": 0, "pauses": []}
    saved = time.monotonic()
    while True:
        before, computed = time.monotonic(), time.process_time()
        await asyncio.sleep(PERIOD)
        now = time.monotonic()
        late = now - before - PERIOD
        own = min(late, time.process_time() - computed)
        found["wakes"] += 1
        found["longest"], found["longest_own"] = max(found["longest"], late), max(found["longest_own"], own)
        found["over_100_ms"] += own > 0.1
        if late > LONG and len(found["pauses"]) < LISTED:
            found["pauses"].append([now, late, own])
        if now - saved > 1:
            saved = now
            _save(path, found)


def poll_health(path: str, url: str) -> None:
    """Request ``/health`` until the parent process ends."""
    where, parent, saved = urlsplit(url), os.getppid(), 0.0
    latencies: list[float] = []
    statuses: list[list[float]] = []  # time and status of each change
    last = connection = None
    while os.getppid() == parent:
        started = time.monotonic()
        try:
            connection = connection or http.client.HTTPConnection(where.hostname or "", where.port, timeout=30)
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            status = response.status
        except (OSError, http.client.HTTPException):
            connection, status = None, 0
        now = time.monotonic()
        latencies.append(now - started)
        if status != last:
            statuses.append([started, now, status])
            last = status
        if now - saved > 1:
            saved = now
            _save(path, {"latencies": latencies, "statuses": statuses})
        time.sleep(max(0.0, POLL - (now - started)))


def serve(path: str, engine: str, settings: str) -> None:
    """Serve with default options except ``engine`` and ``settings``, both JSON."""
    from cospec.config import EngineConfig
    from cospec.server.run import run
    from cospec.server.settings import ServerSettings

    tasks: list[asyncio.Task[None]] = []

    def announce(url: str) -> None:  # runs in the server's event loop
        tasks.append(asyncio.get_running_loop().create_task(watch_pauses(path)))
        print(url, flush=True)

    run(EngineConfig.build(json.loads(engine)), ServerSettings(**json.loads(settings)), announce)


def main() -> None:
    what, path, *rest = sys.argv[1:]
    if what == "serve":
        serve(path, *rest)
    elif what == "health":
        poll_health(path, *rest)
    else:
        asyncio.run(watch_pauses(path))


if __name__ == "__main__":
    main()
