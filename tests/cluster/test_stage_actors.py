"""A replica whose stages run on machines that Ray chooses: raylets that are lost, and the tokens of one process."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmarks.chaos import ENGINE, PROMPTS, Ask, expect
from benchmarks.cluster_process import REPLICA, ClusterProcess, descendants

from cospec.cluster.ray_cluster import ENVIRONMENT, NO_METRICS
from harness.completions import complete, figure
from harness.waiting import until

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra cluster is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(150)]

ACTOR, STAGE = "ray::StageHostActor", "cospec.distributed.stage_worker"
QUICK_LOSS = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 200}  # Ray looks at machines more often
CHECK_SECONDS = 2.0
HEAD = {"machine": "head"}  # labels of the machine that holds replica and API server, and no stage
CONFIG: dict[str, Any] = {
    "name": f"test-stages-{os.getpid()}",
    "server": {"port": 0, "max_engine_restarts": 0},
    "health": {"period": 1, "timeout": CHECK_SECONDS, "grace": 1},
    "target": {
        "engine": {
            **ENGINE,
            "pipeline_parallel_size": 2,
            "speculative_config": {"method": "ngram"},
            "stage_timeout": 2.5,
        },
        "placement": {"num_cpus": 1, "labels": HEAD},
        "stages": {"placement": {"num_cpus": 1, "resources": {"stages": 1}}, "strategy": "SPREAD"},
    },
}


def below(name: str) -> list[int]:
    """Process ids of the processes of this test whose command has a word."""
    return [pid for pid, command in descendants(os.getpid()).items() if name in command]


def token_files() -> set[Path]:
    """Files with a token, of any replica of this machine."""
    return set(Path(tempfile.gettempdir()).glob("*.token"))


def raylet_of(machine: Any) -> int:
    """Process id of the raylet of a machine."""
    return int(machine.all_processes["raylet"][0].process.pid)


class Machines:
    """Raylets with addresses of their own: a head, and machines with room for stages."""

    def __init__(self) -> None:
        head = {"num_cpus": 1, "labels": HEAD, "include_dashboard": False, "_system_config": QUICK_LOSS}
        self._raylets = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
        self._holding: list[Any] = []
        self._count = 0
        self.address = self._raylets.address

    def add(self, stages: int = 1) -> None:
        """Start a machine with room for a number of stages."""
        self._count += 1
        room = {"num_cpus": stages, "resources": {"stages": stages}}
        self._holding.append(self._raylets.add_node(node_ip_address=f"127.0.1.{self._count}", **room))

    def loss(self) -> Callable[[], None]:
        """Choose a machine with stages that run. The function that is returned ends all its processes at once."""
        running = set(below(STAGE))
        (lost, *_) = [each for each in self._holding if running & descendants(raylet_of(each)).keys()]
        processes = [raylet_of(lost), *descendants(raylet_of(lost))]

        def lose() -> None:
            for pid in processes:  # processes that Ray ends one after the other would go on for a while
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._holding.remove(lost)
            self._raylets.remove_node(lost, allow_graceful=False)

        return lose

    def stages(self) -> list[int]:
        """The number of stage processes on each machine."""
        running = set(below(STAGE))
        return [len(running & descendants(raylet_of(each)).keys()) for each in self._holding]

    def close(self) -> None:
        """End all machines."""
        self._raylets.shutdown()


@contextlib.contextmanager
def two_machines() -> Iterator[Machines]:
    """A head, and two machines with stages, with Ray's settings of a cluster of our own."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | NO_METRICS).items():
            patch.setenv(name, value)
        found = Machines()
        try:
            found.add()
            found.add()
            yield found
        finally:
            found.close()


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with two_machines() as found:
        yield found


@pytest.fixture(scope="module")
def cluster(packed_zoo: None, machines: Machines, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """One replica with a stage on each machine. The end leaves no stage, and no file with a token."""
    files = token_files()
    with ClusterProcess(CONFIG, tmp_path_factory.mktemp("cluster"), address=machines.address) as running:
        yield running
    until(lambda: not below(ACTOR) and not below(STAGE))
    assert token_files() == files


SILENT = r"127\.0\.1\.\d:\d+ does not answer"
LOST = f"The target's processes cannot be started again: No stage host starts stage 0: {SILENT}, {SILENT}\\."
ASKS = [Ask(PROMPTS[0], None), Ask(PROMPTS[3], 1)]
LONG = {"max_tokens": 300, "ignore_eos": True}  # a second and more


def replicas(cluster: ClusterProcess) -> list[int]:
    return below(REPLICA.format(name=cluster.name))


def disturbed(cluster: ClusterProcess, ask: Ask, disturb: Callable[[], None]) -> list[int]:
    """Token ids of a stream, which is disturbed after 20 tokens."""
    body = {"prompt": ask.prompt, "return_token_ids": True, "stream": True, **ask.sampling, **LONG}
    tokens: list[int] = []
    done = False
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=90) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            found = json.loads(line.removeprefix("data: "))
            assert "error" not in found, found
            tokens += found["choices"][0]["token_ids"]
            if not done and len(tokens) > 20:
                disturb()
                done = True
    return tokens


def test_ranks_of_a_stage_share_a_machine(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Pipeline stages of two tensor ranks write what local processes of this layout write."""
    if not pytestconfig.getoption("--grid"):
        pytest.skip("--grid runs this layout")
    layout = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    expected = expect(ASKS, **layout)
    config = copy.deepcopy(CONFIG)
    config["name"] += "-ranks"
    config["target"]["engine"] |= layout
    with two_machines() as raylets, ClusterProcess(config, tmp_path, address=raylets.address) as cluster:
        assert sorted(raylets.stages()) == [2, 2]
        assert {ask: complete(cluster, ask) for ask in ASKS} == expected
        assert {ask: complete(cluster, ask) for ask in ASKS} == expected, "prefixes are in the caches"
    until(lambda: not below(ACTOR) and not below(STAGE))


def test_a_second_cluster_does_not_take_the_ray_serve_of_the_first(
    machines: Machines, cluster: ClusterProcess, tmp_path: Path
) -> None:
    second = ClusterProcess({**CONFIG, "name": f"{cluster.name}-2"}, tmp_path, address=machines.address)
    second.start()
    assert second.process.wait(60) == 1
    last = second.log.strip().splitlines()[-1]
    assert last.startswith(f"cospec: address is {machines.address}, where Ray Serve runs; allowed is ")
    assert httpx.get(f"{cluster.url}/health", timeout=30).status_code == 200


def test_stages_on_two_machines_write_the_tokens_of_one_process(cluster: ClusterProcess) -> None:
    """Also when a stage host is killed: its stage moves to the other host, and the replica starts the host again."""
    expected = expect(ASKS)
    actors, stages, replica = below(ACTOR), below(STAGE), replicas(cluster)
    assert (len(actors), len(stages), len(replica)) == (2, 2, 1)
    assert {ask: complete(cluster, ask) for ask in ASKS} == expected
    os.kill(actors[0], signal.SIGKILL)
    assert {ask: complete(cluster, ask) for ask in ASKS} == expected
    until(lambda: len(below(ACTOR)) == 2 and not set(stages) & set(below(STAGE)))
    assert replicas(cluster) == replica
    until(lambda: figure(cluster, "stage_host_restarts_total") >= 1, "the start in the metrics")
    until(lambda: figure(cluster, "engine_up") == 1, "reports of the replica")
    assert figure(cluster, "replicas_lost_total") == 0


def test_a_request_outlives_the_machines_of_all_stages(machines: Machines, cluster: ClusterProcess) -> None:
    """The replica serves on the machine that is left. After the loss of both, a new machine gets another replica."""
    replica, (tokens, _) = replicas(cluster), complete(cluster, ASKS[1], **LONG)
    assert disturbed(cluster, ASKS[1], machines.loss()) == tokens
    threading.Event().wait(CHECK_SECONDS + 1)  # a health check that waits for the lost machine is over now
    assert complete(cluster, ASKS[1], **LONG)[0] == tokens
    assert replicas(cluster) == replica
    lose = machines.loss()

    def replace() -> None:
        lose()
        until(lambda: re.search(LOST, cluster.log) is not None, "the sentence of the engine")
        until(lambda: not set(replicas(cluster)) & set(replica), "the end of the replica")
        machines.add(stages=2)

    assert disturbed(cluster, ASKS[1], replace) == tokens
    until(lambda: figure(cluster, "replicas_lost_total") == 1, "the lost replica in the metrics")
    assert {ask: complete(cluster, ask) for ask in ASKS} == expect(ASKS)
