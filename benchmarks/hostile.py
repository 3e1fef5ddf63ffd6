"""Tests a server with mutated and hostile requests next to regular requests with known texts.

Run ``python -m benchmarks.hostile --requests 10000``. A server with default options serves the zoo. Neighbours send
greedy and seeded requests, whose texts an earlier undisturbed run recorded. ``hostile_requests`` sends mutated bodies,
raw bytes, known attacks, early closes and slow bodies. The benchmark kills the engine process ``--kills`` times. The
report counts statuses, pauses of the server's event loop, changed texts of neighbours, memory, and the size of the log.
The exit status is 1 if a check fails. ``--results ''`` writes no file.

A pause counts only while the server's process had a processor. ``longest`` includes the pauses of a busy machine, like
``idle_loop``, an event loop without work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import ROOT, prompts, write
from benchmarks.hostile_requests import HostileRequest, SendMode, requests

SENDERS, NEIGHBOURS = 24, 3
ANSWER_SECONDS = 75.0  # above the time limit of a body
ATTEMPTS = 100  # of a request with status 503
SLOW_PIECES, SLOW_SECONDS, HELD_SECONDS = 4, 0.25, 1.0
RESTART_MARGIN = 1.5  # seconds around a restart of /health in which status 503 is allowed
PAUSE = 0.1
UNANSWERED = ("no answer", "no answer in time", "connection lost")

Body = dict[str, Any]


@dataclass
class Findings:
    """The counts; ``refused`` are the times of status 503."""

    statuses: dict[str, Counter[str]] = field(default_factory=dict)
    refused: list[float] = field(default_factory=list)
    broken: list[dict[str, Any]] = field(default_factory=list)
    neighbours: Counter[str] = field(default_factory=Counter)
    neighbour_seconds: list[float] = field(default_factory=list)
    changed: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=lambda: {"server": [], "engine": []})

    def note(self, request: HostileRequest, label: str) -> None:
        """Count the result of a hostile request."""
        self.statuses.setdefault(request.family, Counter())[label] += 1
        if label.startswith("503"):
            self.refused.append(time.monotonic())
        if (label.startswith("500") or label in UNANSWERED) and len(self.broken) < 50:
            head = request.body[:1000].decode("utf-8", "replace")
            self.broken.append({"family": request.family, "path": request.path, "status": label, "body": head})


class Server:
    """The served zoo in its own process, with its probes and its log."""

    def __init__(self, folder: Path, engine: str, settings: str) -> None:
        self.folder, self.log = folder, folder / "log"
        self._started: list[subprocess.Popen[bytes]] = []
        with self.log.open("wb") as log:
            given = json.dumps({"port": 0, **json.loads(settings)})
            self.process = self._probe("serve", engine, given, stdout=subprocess.PIPE, stderr=log)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().decode().strip()
        if not self.url:
            raise SystemExit(self.log.read_text("utf-8"))

    def watch(self) -> None:
        """Start the external probes."""
        self._probe("control")
        self._probe("health", self.url)

    def found(self, probe: str) -> dict[str, Any]:
        """Return the records of a probe."""
        path = self.folder / probe
        return dict(json.loads(path.read_text("utf-8"))) if path.exists() else {}

    @property
    def engine(self) -> int | None:
        """Return the process id of the engine; None without an engine."""
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if b"engine_process_main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return int(child)
        return None

    def stop(self) -> None:
        """End all started processes."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        for process in self._started:
            process.kill()
            process.wait()

    def _probe(self, what: str, *rest: str, **streams: Any) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "benchmarks.probes", what, str(self.folder / what), *rest]
        self._started.append(subprocess.Popen(command, cwd=ROOT, **streams))
        return self._started[-1]


def resident(pid: int | None) -> int:
    """Return resident memory in bytes; 0 if the process does not exist."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmRSS"):
                return int(line.split()[1]) * 1024
    return 0


def neighbour_bodies() -> list[Body]:
    """Return requests that determine their text."""
    texts = [text[:60] for domain in ("prose", "code", "math") for text in prompts(domain, 2)]
    found: list[Body] = []
    for number, text in enumerate(texts):
        body: Body = {"prompt": text, "max_tokens": 24, "stream": number % 2 == 0}
        own: Body = {"temperature": 0} if number < 3 else {"temperature": 0.8, "seed": number}
        found.append({**body, **own, "frequency_penalty": 0.3 * (number % 3), "logprobs": None if number % 2 else 1})
    return found


async def text_of(client: httpx.AsyncClient, body: Body) -> tuple[int, str]:
    """Return status and text of a completion; an error in a stream counts as a status."""
    response = await client.post("/v1/completions", json=body)
    if response.status_code != 200 or not body["stream"]:
        return response.status_code, "" if response.status_code != 200 else response.json()["choices"][0]["text"]
    text = ""
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                return (503 if chunk["error"]["type"] == "service_unavailable" else 500), text
            text += "".join(choice["text"] for choice in chunk["choices"])
    return 200, text


async def neighbour(client: httpx.AsyncClient, expected: Sequence[tuple[Body, str]], found: Findings) -> None:
    """Request known texts until cancelled."""
    while True:
        for body, text in expected:
            started = time.monotonic()
            status: int | str
            try:
                status, got = await text_of(client, body)
            except httpx.HTTPError as error:
                status, got = type(error).__name__, ""
            found.neighbours[str(status)] += 1
            if status in (429, 503):  # the server asks for a retry
                if status == 503:
                    found.refused.append(time.monotonic())
                await asyncio.sleep(0.2)
                continue
            found.neighbour_seconds.append(time.monotonic() - started)
            if (status, got) != (200, text):
                found.changed.append({"body": body, "status": status, "expected": text, "got": got})


async def label_of(url: str, request: HostileRequest) -> str:
    """Return the result of a request in a few words."""
    try:
        return await asyncio.wait_for(send(url, request), ANSWER_SECONDS)
    except TimeoutError:
        return "no answer in time"
    except OSError:  # a server that answers before the end of the request may close so early that the answer is lost
        partly = request.send_mode is SendMode.SLOW or len(request.body) > 2**12
        return "closed by server" if partly else "connection lost"


async def send(url: str, request: HostileRequest) -> str:
    """Send one request in its mode; return the result in a few words."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head, body, half = request.head(), request.body, len(request.body) // 2
        match request.send_mode:
            case SendMode.HALF_OPEN:
                writer.write(head[:-2])
                await asyncio.sleep(HELD_SECONDS)
                return "closed by sender"
            case SendMode.CLOSE_INSIDE:
                writer.write(head + body[:half])
                await writer.drain()
                return "closed by sender"
            case SendMode.SLOW:
                writer.write(head)
                size = len(body) // SLOW_PIECES + 1
                for start in range(0, len(body), size):
                    await asyncio.sleep(SLOW_SECONDS)
                    writer.write(body[start : start + size])
            case _:
                writer.write(head + body)
        with contextlib.suppress(ConnectionError):  # an answer may arrive before the server has read the whole request
            await writer.drain()
        if request.send_mode is SendMode.CLOSE_EARLY:
            return "closed by sender"
        return _label(await reader.read(-1))
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def _label(answer: bytes) -> str:
    """Return the status, and whether a stream ended with an error."""
    if not answer.startswith(b"HTTP/"):
        return "no answer"
    status = answer.split(b" ", 2)[1].decode()
    if b'data: {"error"' in answer:
        return ("503" if b'"service_unavailable"' in answer else "500") + " in a stream"
    return status


async def attack(server: Server, given: Sequence[HostileRequest], kills: int, seconds: float) -> Findings:
    """Send all requests, or as many as fit into ``seconds``, while neighbours send theirs."""
    end = time.monotonic() + seconds
    found, todo = Findings(), list(enumerate(given))[::-1]
    strikes = {len(given) * (kill + 1) // (kills + 1) for kill in range(kills)}

    async def sender() -> None:
        while todo and server.process.poll() is None and time.monotonic() < end:
            number, request = todo.pop()
            if number in strikes and (engine := server.engine) is not None:
                os.kill(engine, signal.SIGKILL)
            if number % 200 == 0:
                print(f"{number} of {len(given)} requests", flush=True)
            for _ in range(ATTEMPTS):
                label = await label_of(server.url, request)
                found.note(request, label)
                if label != "503":
                    break
                await asyncio.sleep(0.5)  # the server asks for a retry

    async def memory() -> None:
        while True:
            found.memory["server"].append(resident(server.process.pid))
            found.memory["engine"].append(resident(server.engine))
            await asyncio.sleep(0.5)

    limits = httpx.Limits(max_connections=NEIGHBOURS)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        expected = []
        for body in neighbour_bodies():
            status, text = await text_of(client, body)
            assert status == 200, f"an undisturbed request got {status}"
            expected.append((body, text))
        server.watch()
        neighbour_tasks = [asyncio.create_task(neighbour(client, expected, found)) for _ in range(NEIGHBOURS)]
        neighbour_tasks.append(asyncio.create_task(memory()))
        await asyncio.gather(*(sender() for _ in range(SENDERS)))
        await asyncio.sleep(2)  # neighbours that wait for a restart finish, probes write
        for task in neighbour_tasks:
            task.cancel()
        await asyncio.gather(*neighbour_tasks, return_exceptions=True)
    return found


def _restarts(health: dict[str, Any]) -> list[tuple[float, float]]:
    """Return the time spans with status 503 of /health."""
    spans, begun = [], None
    for started, _, status in health.get("statuses", ()):
        if status != 200 and begun is None:
            begun = started
        elif status == 200 and begun is not None:
            spans.append((begun - RESTART_MARGIN, started + RESTART_MARGIN))
            begun = None
    return [*spans, *([(begun - RESTART_MARGIN, float("inf"))] if begun is not None else [])]


def evaluate(server: Server, found: Findings) -> dict[str, Any]:
    """Compute figures and checks."""
    total: Counter[str] = sum(found.statuses.values(), Counter())
    loop, control, health = (server.found(probe) for probe in ("serve", "control", "health"))
    spans = _restarts(health)
    stray = sum(not any(begin <= at <= end for begin, end in spans) for at in found.refused)
    log, latencies = server.log.read_bytes(), np.array(health.get("latencies") or [np.inf])
    alive = False
    with contextlib.suppress(httpx.HTTPError):
        alive = httpx.get(f"{server.url}/health").status_code == 200
    memory = {name: [sizes[0], max(sizes), sizes[-1]] for name, sizes in found.memory.items() if sizes}
    return {
        "statuses": dict(sorted(total.items())),
        "by_family": {family: dict(sorted(counts.items())) for family, counts in sorted(found.statuses.items())},
        "restarts": len(spans),
        "refused_outside_restarts": stray,
        "broken": found.broken,
        "neighbours": {"requests": dict(found.neighbours), "changed": found.changed[:20]},
        "neighbour_seconds": _quantiles(np.array(found.neighbour_seconds or [np.inf])),
        "event_loop": {key: loop.get(key) for key in ("wakes", "longest", "longest_own", "over_100_ms")},
        "idle_loop": {key: control.get(key) for key in ("wakes", "longest", "longest_own")},
        "health_seconds": _quantiles(latencies),
        "memory_bytes": memory,
        "log": {"bytes": len(log), "tracebacks": log.count(b"Traceback")},
        "checks": {
            "no status 500": not any(label.startswith("500") for label in total),
            "503 only while an engine restarts": not stray,
            "no event-loop pause above 100 ms": loop.get("longest_own", np.inf) <= PAUSE,
            "no neighbour's text changed": not found.changed and len(found.neighbour_seconds) > 0,
            "every request is answered": not any(total[label] for label in UNANSWERED),
            "no traceback in the log": b"Traceback" not in log,
            "the server lives": alive,
        },
    }


def _quantiles(values: Any) -> dict[str, float]:
    return {name: float(np.quantile(values, q)) for name, q in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}


def show(figures: dict[str, Any], console: Console) -> None:
    """Print the findings."""
    labels = list(figures["statuses"])
    table = Table("family", *labels, title="Results of the requests")
    for family, counts in figures["by_family"].items():
        table.add_row(family, *(str(counts.get(label, "")) for label in labels))
    table.add_row("all", *map(str, figures["statuses"].values()))
    console.print(table)
    for name in ("event_loop", "idle_loop", "health_seconds", "neighbour_seconds", "memory_bytes", "log", "restarts"):
        console.print(f"{name}: {figures[name]}")
    console.print(f"neighbours: {figures['neighbours']['requests']}, changed: {len(figures['neighbours']['changed'])}")
    for broken in figures["broken"][:10]:
        print(json.dumps(broken)[:250])
    for check, held in figures["checks"].items():
        console.print(f"{'holds' if held else 'FAILS'}: {check}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=2, help="how often the engine process is killed")
    parser.add_argument("--seconds", type=float, default=3600.0, help="after which no more requests are sent")
    parser.add_argument("--attacks-every", type=int, default=250, help="requests between two costly attacks")
    parser.add_argument("--engine", default='{"model": "zoo"}', help="configuration of the engine, JSON")
    parser.add_argument("--settings", default="{}", help="of the server, JSON")
    parser.add_argument("--results", default="hostile", help="name of the file in benchmarks/results")
    parser.add_argument("--json", type=Path, help="another file for the figures")
    given, console = parser.parse_args(), Console()
    with tempfile.TemporaryDirectory() as folder:
        drawn = requests(given.requests, given.seed, given.attacks_every)
        server = Server(Path(folder), given.engine, given.settings)
        started = time.monotonic()
        try:
            found = asyncio.run(attack(server, drawn, given.kills, given.seconds))
            figures = {"seconds": time.monotonic() - started, **evaluate(server, found)}
        finally:
            server.stop()
    show(figures, console)
    if given.results:
        write(given.results, {"seed": given.seed, "kills": given.kills, **figures})
    if given.json:
        given.json.write_text(json.dumps(figures), "utf-8")
    sys.exit(not all(figures["checks"].values()))


if __name__ == "__main__":
    main()
