"""Autoscaling: replicas come with load and machines, with drafter nodes, and leave without; no output changes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from benchmarks.chaos import DRAFTERS, ENGINE, ON_NODES, PROMPTS, Ask, expect
from benchmarks.cluster_process import NODE, REPLICA, ClusterProcess, descendants

from cospec.cluster import state_file
from harness.completions import complete
from harness.waiting import until

pytest.importorskip("ray", reason="the extra cluster is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(150)]

NAME = f"test-machines-{os.getpid()}"
CONFIG: dict[str, Any] = {
    "name": NAME,
    "server": {"port": 0},
    "machine": {"num_cpus": 1},  # room for one replica
    "drafters": [{**DRAFTERS[0], "placement": {"num_cpus": 0}}],
    "target": {
        "engine": {**ENGINE, "speculative_config": ON_NODES},
        "scale": {"min": 1, "max": 2, "requests": 1, "upscale_delay": 0.5, "downscale_delay": 600},
        "placement": {"num_cpus": 1},
    },
}


@contextmanager
def machine(cluster: ClusterProcess, labels: str = "") -> Iterator[psutil.Process]:
    """A second machine of the cluster, which is a second raylet on this machine."""
    running = state_file.read(cluster.name)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": running.token_path}
    command = [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--address",
        running.address,
        "--num-cpus",
        "1",
        *(["--labels", labels] if labels else []),
        "--block",
    ]
    started = subprocess.Popen(
        command, env={**os.environ, **token}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        yield psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait(30)


def replicas(pid: int) -> list[int]:
    """Process ids of the target's replicas below a process."""
    actor = REPLICA.format(name=NAME)
    return [child for child, command in descendants(pid).items() if command.startswith(actor)]


def nodes(pid: int) -> list[int]:
    """Process ids of the drafter nodes below a process."""
    actor = NODE.format(name=NAME)
    return [child for child, command in descendants(pid).items() if command.startswith(actor)]


def engines(pid: int) -> list[int]:
    """Process ids of the engines below a process."""
    return [child for child, command in descendants(pid).items() if "cospec.runtime.engine_process_main" in command]


def engine_seconds(pid: int) -> float:
    """Seconds of processor time of all engines below a process."""
    return sum(sum(psutil.Process(engine).cpu_times()[:2]) for engine in engines(pid))


def nodes_per_engine(cluster: ClusterProcess, second: psutil.Process) -> list[int]:
    """How many drafter nodes are connected to each engine: first those of the first machine."""
    joined = [
        connection.raddr.port
        for node in cluster.nodes()
        for connection in psutil.Process(node).net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED and connection.raddr
    ]
    heard = [
        {each.laddr.port for each in psutil.Process(engine).net_connections("tcp") if each.status == psutil.CONN_LISTEN}
        for engine in [*engines(cluster.process.pid), *engines(second.pid)]
    ]
    return [sum(port in ports for port in joined) for ports in heard]


class Clients:
    """Clients that repeat one prompt each."""

    def __init__(self, cluster: ClusterProcess, asks: Sequence[Ask], pool: ThreadPoolExecutor) -> None:
        self.found: dict[Ask, set[tuple[tuple[int, ...], str]]] = {ask: set() for ask in asks}
        self._cluster, self._ended = cluster, {ask: threading.Event() for ask in asks}
        self._answers = dict.fromkeys(asks, 0)
        self._writing = [pool.submit(self._write, ask) for ask in asks]

    def _write(self, ask: Ask) -> None:
        while not self._ended[ask].is_set():
            tokens, text = complete(self._cluster, ask)
            self.found[ask].add((tuple(tokens), text))
            self._answers[ask] += 1

    def answers_since(self, start: Mapping[Ask, int]) -> bool:
        """Whether each client has had two answers since these counts, so one that was asked for after them."""
        return all(self.counts()[ask] >= count + 2 for ask, count in start.items())

    def counts(self) -> dict[Ask, int]:
        """The number of answers of each client."""
        return dict(self._answers)

    def end(self, asks: Sequence[Ask]) -> None:
        """Let these clients ask no more."""
        for ask in asks:
            self._ended[ask].set()

    def result(self) -> dict[Ask, set[tuple[tuple[int, ...], str]]]:
        """End all clients; returns their different outputs.

        Raises:
            Exception: a request failed.
        """
        self.end(list(self.found))
        for each in self._writing:
            each.result()
        return self.found


def asked_and_expected() -> tuple[list[Ask], dict[Ask, set[tuple[tuple[int, ...], str]]]]:
    asks = [Ask(f"{n}. {prompt}", seed) for n, prompt in enumerate(PROMPTS) for seed in (None, 1, 2)]
    return asks, {ask: {(tuple(tokens), text)} for ask, (tokens, text) in expect(asks).items()}


def cut_power(machine: psutil.Process) -> None:
    """End all processes of a machine at once."""
    for process in [machine, *machine.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def test_a_machine_that_joins_gets_a_replica_and_its_loss_changes_no_token(tmp_path: Path) -> None:
    asks, expected = asked_and_expected()
    with ClusterProcess(CONFIG, tmp_path) as cluster, ThreadPoolExecutor(len(asks)) as pool:
        clients = Clients(cluster, asks, pool)
        try:
            threading.Event().wait(3)  # autoscaling wants a second replica now, and there is no room
            assert len(cluster.replicas()) == 1
            with machine(cluster) as second:
                until(lambda: replicas(second.pid))
                assert [each["alive"] for each in cluster.status()["machines"]] == [True, True]
                until(lambda: engine_seconds(second.pid) > 0)
                before = engine_seconds(second.pid)
                until(lambda: engine_seconds(second.pid) > before + 0.5)
                until(lambda: nodes_per_engine(cluster, second) == [1, 1], "a drafter node for each replica")
                cut_power(second)
                until(lambda: sum(each["alive"] for each in cluster.status()["machines"]) == 1, "the loss")
                before_loss = clients.counts()
                until(lambda: clients.answers_since(before_loss), "answers of the machine that is left")
                assert clients.result() == expected
        finally:
            clients.end(asks)


def test_replicas_and_nodes_come_to_the_cheapest_machine_and_leave_with_the_load(tmp_path: Path) -> None:
    """The first replica takes the dear machine, the only one; the second has a choice. Metrics add up both prices.

    One client goes on while the other replica, or the client's own, ends. Drafter nodes follow their work.
    """
    asks, expected = asked_and_expected()
    target = CONFIG["target"]
    config = {
        **CONFIG,
        "machine": {"num_cpus": 2, "labels": {"tier": "dear"}},
        "drafters": [
            {
                "name": "draft_model",
                "placement": {"num_cpus": 0},
                "scale": {"max": 2, "busy": 0.02, "upscale_delay": 0.5, "downscale_delay": 2},
            }
        ],
        "target": {
            **target,
            "scale": {**target["scale"], "downscale_delay": 2},
            "placement": {"num_cpus": 1, "tier_prices": {"dear": 2.0, "cheap": 0.5}},
        },
    }
    with ClusterProcess(config, tmp_path) as cluster, ThreadPoolExecutor(len(asks)) as pool:
        assert len(cluster.replicas()) == 1
        with machine(cluster, "tier=cheap") as second:
            until(lambda: [each["alive"] for each in cluster.status()["machines"]] == [True, True])
            clients = Clients(cluster, asks, pool)
            try:
                until(lambda: replicas(second.pid), "a replica on the cheap machine")
                until(lambda: len(cluster.nodes()) + len(nodes(second.pid)) == 2, "a second drafter node")
                until(lambda: priced(cluster) == 2.5, "the price of both machines")
                clients.end(asks[1:])
                until(lambda: len(cluster.replicas()) + len(replicas(second.pid)) == 1, "the end of a replica")
                until(lambda: len(cluster.engines()) + len(engines(second.pid)) == 1, "the end of its engine")
                assert clients.result() == expected
                until(lambda: len(cluster.nodes()) + len(nodes(second.pid)) == 1, "the end of a drafter node")
            finally:
                clients.end(asks)


def priced(cluster: ClusterProcess) -> float:
    """The target's price per hour in the metrics."""
    lines = httpx.get(f"{cluster.url}/metrics", timeout=30).text.splitlines()
    (price,) = [line.split()[-1] for line in lines if line.startswith('cospec:cost_per_hour{component="target"')]
    return float(price)
