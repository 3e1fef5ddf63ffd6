"""Clusters that do not start: a sentence says why, and nothing of such a cluster stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.chaos import DRAFTERS, ENGINE, ON_NODES
from benchmarks.cluster_process import ClusterProcess, descendants

from harness.waiting import until

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra cluster is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(200)]

NAME = f"test-start-{os.getpid()}"
CONFIG = {
    "name": NAME,
    "server": {"port": 0},
    "machine": {"num_cpus": 1},
    "target": {"engine": ENGINE, "placement": {"labels": {"zone": "mars"}}},
}
USER = """
import sys, time, ray
ray.init(address=sys.argv[1], namespace="user")
class Counter:
    value = 0
    def count(self):
        self.value += 1
        return self.value
counter = ray.remote(Counter).options(name="counter", num_cpus=0).remote()
print(ray.get(counter.count.remote()), flush=True)
input()
found = lambda: ([each["name"] for each in ray.util.list_named_actors(all_namespaces=True)], free())
free = lambda: ray.available_resources().get("CPU")
end = time.monotonic() + 30
while found() != (["counter"], 1.0) and time.monotonic() < end:  # Ray notices an end after a while
    time.sleep(0.1)
print(ray.get(counter.count.remote()), found())
"""  # a program of the user, whose actor counts up to 2


def start(name: str) -> subprocess.Popen[bytes]:
    """Run ``cospec cluster status`` or ``down``."""
    arguments = [sys.executable, "-m", "cospec", "cluster", name, "--name", NAME]
    return subprocess.Popen(arguments, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def placeless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    """A cluster without a place for its target; its wait goes on while the first test runs."""
    cluster = ClusterProcess(CONFIG, tmp_path_factory.mktemp("placeless"))
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.close()
    assert not cluster.left()


def test_a_deployment_that_fails_leaves_the_joined_ray_cluster_to_its_user(
    placeless: ClusterProcess, tmp_path: Path
) -> None:
    """The model does not exist, and drafter nodes have no place. The sentence is the replica's."""

    def of_cluster() -> list[str]:
        """Command lines of Ray Serve and of engines below this process, without those of the other cluster."""
        words, others = ("ray::Serve", "ray::Proxy", "cospec.runtime"), placeless.below()
        found = {pid: line for pid, line in descendants(os.getpid()).items() if pid not in others}
        return [line for line in found.values() if any(word in line for word in words)]

    ray = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    config = {
        "name": f"{NAME}-2",
        "server": {"port": 0},
        "health": {"grace": 1},
        "target": {"engine": {**ENGINE, "model": "/no/model", "speculative_config": ON_NODES}},
        "drafters": [{**DRAFTERS[0], "placement": {"labels": {"zone": "mars"}}}],
    }
    cluster = ClusterProcess(config, tmp_path, address=ray.address)
    cluster.start()
    arguments = [sys.executable, "-c", USER, ray.address]
    user = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        until(of_cluster, "Ray Serve")
        assert cluster.process.wait(120) == 1
        last = cluster.log.strip().splitlines()[-1]
        assert last.startswith("cospec: the cluster is not started (ModelError: model is '/no/model', which is not an ")
        until(lambda: not of_cluster(), "the end of Ray Serve")
        assert user.communicate("\n", 60)[0].splitlines() == ["1", "2 (['counter'], 1.0)"]
    finally:
        user.kill()
        cluster.close()
        ray.shutdown()
    assert not cluster.left()


def test_a_start_without_a_place_is_explained_and_stopped(placeless: ClusterProcess) -> None:
    until(lambda: start("status").wait(60) == 0 or placeless.process.poll() is not None, "a running cluster")
    # A slow machine may first name deployments that start a moment later.
    sentence = f'cospec cluster {NAME} waits for target ({{"num_cpus": 1, "labels": {{"zone": "mars"}}}})'
    until(lambda: sentence in placeless.log or placeless.process.poll() is not None, sentence, 100)
    assert sentence in placeless.log
    placeless.below()
    down = start("down")
    assert placeless.process.wait(60) == 0, placeless.log
    assert down.wait(60) == 0
