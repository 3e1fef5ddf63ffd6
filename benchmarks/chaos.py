"""Requests on a cluster whose processes are killed and paused: how many are lost, and how many are wrong.

    python -m benchmarks.chaos --minutes 60

Nodes also join while requests run, by ``cospec node join`` through a relay, and are cut off from their verifier. With
``--stages 2`` each replica has its target in two processes, which are killed too.

The expected tokens are those of one engine in this process. The report goes to ``benchmarks/results/chaos.json``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx

from benchmarks.cluster_process import ClusterProcess
from benchmarks.common import write
from benchmarks.relay import Relay
from cospec import LLM, SamplingParams

ENGINE: dict[str, Any] = {
    "model": "zoo",
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 40_000_000,
    "measure_at_start": False,
}
PROMPTS = (
    "The sum of 2 and 3 is",
    "Question: Anna has 4 apples and buys 5 more. How many apples does she have?\nAnswer:",
    "def add(a, b):\n    return",
    "Once upon a time there was a little",
)
MAX_TOKENS = 40
FAULTS = (
    "join node",
    "kill node",
    "pause node",
    "partition node",
    "kill replica",
    "kill engine",
    "pause replica",
)
NODE_FAULTS = sum(kind.endswith(" node") for kind in FAULTS)  # which come first
DISTURBED_SECONDS = 60.0  # for the faults of nodes, after the last answer
STAGE_FAULT = "kill stage"
PARTITION_SECONDS = 7.0  # longer than the heartbeats of a connection
CONNECT_SECONDS = 30.0  # for a node that joins, before its partition
MOST_JOINED = 2  # nodes that joined; a further node takes the place of the oldest
ON_NODES = {"method": "draft_model", "drafter_executor": "node", "num_speculative_tokens": 4}
DRAFTERS = [{"name": "draft_model", "nodes": 2, "placement": {"num_cpus": 0.5}, "cost_per_hour": 0.1}]
SETTLE_SECONDS = 15.0  # for checks of idle engines and the end of connections
SECONDS = 180.0  # a request that takes longer is lost


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: greedy without a seed, else sampled.

    Attributes:
        random: sampled without a seed and without drafts, under ``block``; only the number of its tokens is known.
    """

    prompt: str
    seed: int | None
    random: bool = False

    @property
    def sampling(self) -> dict[str, Any]:
        """The request's parameters; all but the random ones make a ``match`` request."""
        if self.random:
            return {"max_tokens": MAX_TOKENS, "temperature": 1.0, "ignore_eos": True}
        return {"max_tokens": MAX_TOKENS} | (
            {"temperature": 0.0} if self.seed is None else {"temperature": 1.0, "seed": self.seed}
        )


@dataclass(slots=True)
class Report:
    """What happened.

    Attributes:
        lost, wrong: requests without a whole answer, and with other tokens or another text than expected, or another
            number of random tokens.
        refused: answers that the server's queue is full; the client asks again, as the answer says.
        replayed: requests that went on on another replica.
        longest_pause: seconds between two events of a stream.
        checks: checks of idle engines for leaked pages and states, since their latest start.
        leaks: checks that found one.
        sockets: connections of engines whose other end has gone.
        left: command lines of processes that outlived the cluster.
    """

    seconds: float = 0.0
    requests: int = 0
    lost: int = 0
    wrong: int = 0
    refused: int = 0
    replayed: float = 0.0
    longest_pause: float = 0.0
    running_after: float = 0.0
    checks: float = 0.0
    leaks: float = 0.0
    sockets: list[str] = field(default_factory=list)
    faults: dict[str, int] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def expect(asks: Sequence[Ask], **options: Any) -> dict[Ask, tuple[list[int], str]]:
    """Tokens and text of each request that is not random, from one engine without faults.

    Args:
        options: further ones of ``LLM``.
    """
    with LLM(**ENGINE, **options) as llm:
        several = [each for each in dict.fromkeys(asks) if not each.random]
        outputs = llm.generate([each.prompt for each in several], [SamplingParams(**each.sampling) for each in several])
        return {
            each: (list(output.outputs[0].token_ids), output.outputs[0].text)
            for each, output in zip(several, outputs, strict=True)
        }


async def ask(client: httpx.AsyncClient, each: Ask, report: Report) -> tuple[list[int], str] | None:
    """Stream one request; returns tokens and text, or None for a request without a whole answer."""
    body: dict[str, Any] = {"prompt": each.prompt, "stream": True, "return_token_ids": True, **each.sampling}
    if each.random:
        body["speculation"] = {"acceptance_method": "block", "enabled": False}
    tokens: list[int] = []
    text, finished, last = "", False, time.monotonic()
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != HTTPStatus.OK:
                await answer.aread()
                if answer.status_code == HTTPStatus.TOO_MANY_REQUESTS:
                    raise _Refused(float(answer.headers["retry-after"]))
                report.errors.append(f"{answer.status_code}: {answer.text}")
                return None
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.monotonic()
                report.longest_pause, last = max(report.longest_pause, now - last), now
                data = json.loads(line.removeprefix("data: "))
                if "choices" not in data:
                    report.errors.append(line)
                    return None
                (choice,) = data["choices"]
                tokens += choice["token_ids"]
                text += choice["text"]
                finished = choice["finish_reason"] is not None
    except httpx.HTTPError as error:
        report.errors.append(f"{type(error).__name__}: {error}")
        return None
    return (tokens, text) if finished else None


class _Refused(Exception):
    """The server's queue is full; the argument is the time after which the client may ask again, in seconds."""


async def insist(client: httpx.AsyncClient, each: Ask, report: Report) -> tuple[list[int], str] | None:
    """``ask``, again and again while the server's queue is full."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            return await ask(client, each, report)
        except _Refused as refused:
            report.refused += 1
            await asyncio.sleep(refused.args[0])
    return None


async def load(cluster: ClusterProcess, asks: Sequence[Ask], seconds: float, report: Report) -> None:
    """Send the requests evenly over ``seconds`` and compare the answers."""
    expected = expect(asks)
    client = httpx.AsyncClient(base_url=cluster.url, timeout=SECONDS, limits=httpx.Limits(max_connections=None))

    async def one(number: int, each: Ask) -> None:
        await asyncio.sleep(seconds * number / len(asks))
        found = await insist(client, each, report)
        report.requests += 1
        report.lost += found is None
        if found is not None:
            report.wrong += len(found[0]) != MAX_TOKENS if each.random else found != expected[each]

    async with client:
        await asyncio.gather(*(one(number, each) for number, each in enumerate(asks)))
        figures = await _settled(client)
    report.replayed = _figure(figures, "cospec:requests_replayed_total")
    report.running_after = _figure(figures, "cospec:num_requests_live")
    report.checks = _figure(figures, "cospec:integrity_checks_total")
    report.leaks = _figure(figures, "cospec:integrity_errors_total")


async def _settled(client: httpx.AsyncClient) -> str:
    """The metrics after a check of an idle engine."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        figures = (await client.get("/metrics")).text
        if _figure(figures, "cospec:integrity_checks_total") or time.monotonic() > end:
            return figures
        await asyncio.sleep(0.5)


@dataclass(slots=True)
class Joined:
    """Nodes that joined the running cluster, each through a relay; oldest first.

    Attributes:
        disturbed: whether all faults of nodes have happened once.
    """

    folder: Path
    nodes: list[tuple[subprocess.Popen[bytes], Relay]] = field(default_factory=list)
    disturbed: asyncio.Event = field(default_factory=asyncio.Event)

    async def join(self, engines: Sequence[int], choose: random.Random) -> bool:
        """Start a node for one of the engines with these process ids; False where none listens."""
        ports = [port for engine in engines if (port := _listens(engine)) is not None]
        if not ports:
            return False
        if len(self.nodes) == MOST_JOINED:
            await self._leave(*self.nodes.pop(0))
        relay = Relay(choose.choice(ports))
        await relay.open()
        command = [sys.executable, "-m", "cospec", "node", "join", relay.address, "--threads", "1"]
        with (self.folder / "joined.log").open("ab") as log:
            self.nodes.append((subprocess.Popen(command, stdout=log, stderr=log), relay))
        return True

    async def partition(self) -> bool:
        """Cut a connected node off; its relay heals after some seconds. False without such a node."""
        end = time.monotonic() + CONNECT_SECONDS
        while not (connected := [relay for _, relay in self.nodes if relay.connected and not relay.is_cut]):
            if time.monotonic() > end:
                return False
            await asyncio.sleep(0.2)
        connected[0].cut()
        asyncio.get_running_loop().call_later(PARTITION_SECONDS, connected[0].heal)
        return True

    async def close(self) -> None:
        """End the nodes."""
        while self.nodes:
            await self._leave(*self.nodes.pop())

    async def _leave(self, process: subprocess.Popen[bytes], relay: Relay) -> None:
        process.kill()
        process.wait()
        await relay.close()


def _listens(engine: int) -> int | None:
    """The port at which an engine waits for drafter nodes."""
    import psutil

    try:
        found = psutil.Process(engine).net_connections("tcp")
    except psutil.Error:  # the engine has ended
        return None
    return next((each.laddr.port for each in found if each.status == psutil.CONN_LISTEN), None)


def half_open(engines: Sequence[int]) -> list[str]:
    """Connections that an engine has not closed after the end of the other process."""
    import psutil

    found: list[str] = []
    for engine in engines:
        with contextlib.suppress(psutil.Error):  # the engine has ended
            connections = psutil.Process(engine).net_connections("tcp")
            found += [f"{engine}: {each.laddr}" for each in connections if each.status == psutil.CONN_CLOSE_WAIT]
    return found


async def trouble(cluster: ClusterProcess, every: float, report: Report, choose: random.Random, joined: Joined) -> None:
    """Do something to a process at once and every few seconds, until cancelled; one replica is always left."""
    for number, kind in enumerate(itertools.cycle((*FAULTS, STAGE_FAULT) if cluster.stages() else FAULTS)):
        if number == NODE_FAULTS:
            joined.disturbed.set()
        await asyncio.sleep(every if number else 0.0)
        how, what = kind.split()
        if how in ("join", "partition"):
            done = await (joined.partition() if how == "partition" else joined.join(cluster.engines(), choose))
            report.faults[kind] = report.faults.get(kind, 0) + done
            continue
        if what != "node" and len(cluster.engines()) < 2:
            continue  # the last fault is not repaired yet, and requests would only wait
        processes = {"replica": cluster.replicas, "node": cluster.nodes, "engine": cluster.engines}
        found = (processes | {"stage": cluster.stages})[what]()
        if found:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself
                os.kill(choose.choice(found), signal.SIGSTOP if how == "pause" else signal.SIGKILL)
                report.faults[kind] = report.faults.get(kind, 0) + 1


def run(seconds: float, requests: int, every: float, stages: int, folder: Path) -> Report:
    """One whole run: cluster, load, faults, shutdown; the target of each replica has a number of stages."""
    engine = {**ENGINE, "speculative_config": ON_NODES, "pipeline_parallel_size": stages}
    config = {
        "name": f"chaos-{os.getpid()}",
        "server": {"port": 0},
        "machine": {"num_cpus": 8},
        "health": {"period": 1, "timeout": 2, "grace": 2},
        "target": {"engine": engine, "scale": {"min": 2, "max": 2}},
        "drafters": DRAFTERS,
    }
    started = time.monotonic()
    with ClusterProcess(config, folder) as cluster:
        report = disturb(cluster, seconds, requests, every)
    report.left = list(cluster.left().values())
    report.seconds = time.monotonic() - started
    return report


def disturb(cluster: ClusterProcess, seconds: float, requests: int, every: float) -> Report:
    """Load and faults on a cluster of two replicas that runs, with drafter nodes."""
    asks = [Ask(PROMPTS[number % len(PROMPTS)], number % 5 or None, number % 6 == 5) for number in range(requests)]
    report, joined = Report(), Joined(cluster.log_file.parent)
    asyncio.run(_both(cluster, asks, (seconds, every), (report, random.Random(0), joined)))
    return report


async def _both(
    cluster: ClusterProcess,
    asks: Sequence[Ask],
    times: tuple[float, float],
    notes: tuple[Report, random.Random, Joined],
) -> None:
    seconds, every = times
    faults = asyncio.create_task(trouble(cluster, every, *notes))
    try:
        await load(cluster, asks, seconds, notes[0])
        with contextlib.suppress(TimeoutError):  # a slow machine needs longer for a node that joins
            await asyncio.wait_for(notes[2].disturbed.wait(), DISTURBED_SECONDS)
    finally:
        faults.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await faults
        finally:
            await notes[2].close()
    end = time.monotonic() + SETTLE_SECONDS
    while (found := half_open(cluster.engines())) and time.monotonic() < end:
        await asyncio.sleep(0.5)
    notes[0].sockets = found


def _figure(text: str, name: str) -> float:
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--requests", type=int, help="default: 200 per minute")
    parser.add_argument("--every", type=float, default=6.0, help="seconds between faults")
    parser.add_argument("--stages", type=int, default=1, help="processes of each target")
    parser.add_argument("--name", default="chaos", help="of the file in benchmarks/results")
    given = parser.parse_args()
    requests = given.requests or round(200 * given.minutes)
    with tempfile.TemporaryDirectory() as folder:
        report = run(given.minutes * 60, requests, given.every, given.stages, Path(folder))
    print(write(given.name, asdict(report)).read_text(encoding="utf-8"), end="")
    raise SystemExit(bool(report.lost or report.wrong or report.left or report.leaks or report.sockets))


if __name__ == "__main__":
    main()
