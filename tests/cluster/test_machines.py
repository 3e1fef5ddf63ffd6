"""One cluster whose machines, head, replicas and drafter nodes come and go; no output changes.

With its state in Redis, Ray's head restarts under a running request. Replicas and drafter nodes follow the load.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
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
from benchmarks.chaos import ENGINE, ON_NODES, PROMPTS, Ask, expect
from benchmarks.cluster_process import NODE, REPLICA, ClusterProcess, descendants

from cospec.cluster import state_file
from harness.completions import complete, figure
from harness.waiting import until

pytest.importorskip("ray", reason="the extra cluster is not installed")
LOOK_SECONDS = pytest.importorskip("cospec.cluster.application").LOOK_SECONDS  # of the API server
pytestmark = [pytest.mark.ray, pytest.mark.timeout(150)]

NAME = f"test-machines-{os.getpid()}"
DELAY = 0.02  # seconds of a message between engine and drafter node
CONFIG: dict[str, Any] = {
    "name": NAME,
    "server": {"port": 0},
    "health": {"period": 1, "timeout": 3, "grace": 2, "head": 8.0},
    "machine": {"num_cpus": 1, "labels": {"tier": "dear"}},  # room for one replica
    "drafters": [
        {
            "name": "draft_model",
            "placement": {"num_cpus": 0},
            "scale": {"max": 2, "busy": 0.02, "upscale_delay": 0.5, "downscale_delay": 2},
            "link": {"delay": DELAY},  # requests last, and leave the processors to what starts
        }
    ],
    "target": {
        "engine": {**ENGINE, "speculative_config": ON_NODES},
        "scale": {"min": 1, "max": 2, "requests": 1, "upscale_delay": 0.5, "downscale_delay": 2},
        "placement": {"num_cpus": 1, "tier_prices": {"dear": 2.0, "cheap": 0.5}},
    },
}
JOINED = "Ray runtime started"  # what ``ray start`` prints when the machine has joined
QUICK_LOSS = {"RAY_health_check_initial_delay_ms": "0", "RAY_health_check_period_ms": "200"}
REDIS = shutil.which("redis-server")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Ray's variable with the address of an empty Redis; no variable where Redis is not installed."""
    if REDIS is None:
        yield {}
        return
    folder = tmp_path_factory.mktemp("redis")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [REDIS, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with (folder / "redis.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log)
    yield {"RAY_REDIS_ADDRESS": f"127.0.0.1:{port}"}
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def cluster(
    packed_zoo: None, redis: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterProcess]:
    """A cluster of one machine, whose Ray looks at machines more often. The end leaves no process."""
    with ClusterProcess(CONFIG, tmp_path_factory.mktemp("cluster"), QUICK_LOSS | redis) as running:
        yield running
    assert not running.left()


@contextmanager
def machine(cluster: ClusterProcess, tier: str) -> Iterator[psutil.Process]:
    """Another machine of the cluster, which is another raylet on this machine and has joined.

    Machines start one after another: two that start at once on one machine can choose the same socket file.
    """
    running = state_file.read(cluster.name)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": running.token_path}
    command = [
        str(Path(sys.executable).parent / "ray"),
        "start",
        "--address",
        running.address,
        "--num-cpus",
        "1",
        "--labels",
        f"tier={tier}",
        "--block",
    ]
    log = cluster.config_file.with_name(f"{tier}.log")
    with log.open("w") as output:
        started = subprocess.Popen(command, env={**os.environ, **token}, stdout=output, stderr=output)
    try:
        until(lambda: started.poll() is not None or JOINED in log.read_text(errors="replace"), f"machine {tier}")
        assert started.poll() is None, log.read_text(errors="replace")
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


def alive(cluster: ClusterProcess) -> int:
    """The number of machines."""
    return sum(each["alive"] for each in cluster.status()["machines"])


def ports_of(node: int) -> list[int]:
    """The ports that a drafter node is connected to; none of a node that has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        found = psutil.Process(node).net_connections("tcp")
        return [each.raddr.port for each in found if each.status == psutil.CONN_ESTABLISHED and each.raddr]
    return []


def nodes_per_engine(cluster: ClusterProcess, second: psutil.Process) -> list[int]:
    """How many drafter nodes are connected to each engine: first those of the first machine."""
    joined = [port for node in [*cluster.nodes(), *nodes(second.pid)] for port in ports_of(node)]
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
    asks = [Ask(f"{n}. {prompt}", seed) for n, prompt in enumerate(PROMPTS[:2]) for seed in (None, 1)]
    return asks, {ask: {(tuple(tokens), text)} for ask, (tokens, text) in expect(asks).items()}


def cut_power(machine: psutil.Process) -> None:
    """End all processes of a machine at once."""
    for process in [machine, *machine.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


@pytest.mark.skipif(REDIS is None, reason="redis-server is not installed")
def test_requests_go_on_while_the_head_restarts(cluster: ClusterProcess) -> None:
    asks = [Ask(prompt, None) for prompt in PROMPTS]
    expected = expect(asks)
    for _ in range(2):
        (head,) = heads(cluster)
        body = {"prompt": PROMPTS[1], "stream": True, "temperature": 0.0, "max_tokens": 400, "ignore_eos": True}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=90) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(head, signal.SIGKILL)
            assert [line for line in lines if line][-1] == "data: [DONE]", "the running request"
        assert {ask: complete(cluster, ask) for ask in asks} == expected, "requests after the restart"
        await_another(cluster, head)
        found = cluster.status()  # the command asks the head for the machines
        assert [each["alive"] for each in found["machines"]] == [True]
    assert cluster.log.count("Ray's head ended, and was started again") == 2
    until(lambda: figure(cluster, "ray_head_restarts_total") == 2, "the metric")
    until(lambda: figure(cluster, "engine_up") == 1, "reports of the replica")
    until(lambda: healthy(cluster), "healthy deployments, once autoscaling asks for no replica more")
    assert figure(cluster, "replicas_lost_total") == 0
    assert cluster.process.poll() is None


def test_replicas_and_nodes_come_to_the_cheapest_machine_and_leave_with_the_load(cluster: ClusterProcess) -> None:
    """Two machines have room. Metrics add up the prices of the machines that have replicas.

    One client goes on while the other replica, or the client's own, ends. Drafter nodes follow their work.
    """
    asks, expected = asked_and_expected()
    with (
        machine(cluster, "dear") as dear,
        machine(cluster, "cheap") as cheap,
        ThreadPoolExecutor(len(asks)) as pool,
    ):
        clients = Clients(cluster, asks, pool)
        pids = (cluster.process.pid, dear.pid, cheap.pid)
        try:
            until(lambda: replicas(cheap.pid), "a replica on the cheap machine")
            until(lambda: sum(len(nodes(pid)) for pid in pids) == 2, "a second drafter node")
            until(lambda: priced(cluster) == 2.5, "the price of both machines")
            until(lambda: figure(cluster, "drafter_node_latency_seconds") >= 2 * DELAY, "answers over the links")
            clients.end(asks[1:])
            until(lambda: sum(len(replicas(pid)) for pid in pids) == 1, "the end of a replica")
            until(lambda: sum(len(engines(pid)) for pid in pids) == 1, "the end of its engine")
            assert clients.result() == expected
            until(lambda: sum(len(nodes(pid)) for pid in pids) == 1, "the end of a drafter node")
            threading.Event().wait(2 * LOOK_SECONDS)  # the API server counts a loss when it looks
            assert figure(cluster, "replicas_lost_total") == 0, "Ray Serve ended the replica"
        finally:
            clients.end(asks)


def test_a_machine_that_joins_gets_a_replica_and_its_loss_changes_no_token(cluster: ClusterProcess) -> None:
    asks, expected = asked_and_expected()
    until(lambda: alive(cluster) == 1 and len(cluster.engines()) == 1 and cluster.idle())
    with ThreadPoolExecutor(len(asks)) as pool:
        clients = Clients(cluster, asks, pool)
        try:
            threading.Event().wait(3)  # autoscaling wants a second replica now, and there is no room
            assert len(cluster.replicas()) == 1
            with machine(cluster, "cheap") as second:
                until(lambda: replicas(second.pid))
                assert alive(cluster) == 2
                until(lambda: engine_seconds(second.pid) > 0)
                before = engine_seconds(second.pid)
                until(lambda: engine_seconds(second.pid) > before + 0.5)
                until(lambda: min(nodes_per_engine(cluster, second)) > 0, "a drafter node for each replica")
                cut_power(second)
                until(lambda: alive(cluster) == 1, "the loss")
                before_loss = clients.counts()
                until(lambda: clients.answers_since(before_loss), "answers of the machine that is left")
                assert clients.result() == expected
        finally:
            clients.end(asks)


def priced(cluster: ClusterProcess) -> float:
    """The target's price per hour in the metrics."""
    return figure(cluster, "cost_per_hour", 'component="target"')


def healthy(cluster: ClusterProcess) -> bool:
    """Whether Ray Serve calls all deployments healthy."""
    return {each["status"] for each in cluster.status()["deployments"].values()} == {"HEALTHY"}


def heads(cluster: ClusterProcess) -> set[int]:
    """Process ids of Ray's head."""
    return {pid for pid, command in cluster.below().items() if "gcs_server" in command.split()[0]}


def await_another(cluster: ClusterProcess, head: int) -> None:
    until(lambda: len(heads(cluster) - {head}) == 1, "a new head")
