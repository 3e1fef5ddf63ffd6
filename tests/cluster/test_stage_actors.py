"""A replica whose stages run on machines that Ray chooses: two raylets, and the tokens of one process."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmarks.chaos import ENGINE, PROMPTS, Ask, expect
from benchmarks.cluster_process import REPLICA, ClusterProcess, descendants

from harness.completions import complete
from harness.waiting import until

cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra cluster is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(150)]

ACTOR, STAGE = "ray::StageHostActor", "cospec.distributed.stage_worker"
CONFIG = {
    "name": f"test-stages-{os.getpid()}",
    "server": {"port": 0},
    "health": {"period": 1, "timeout": 3, "grace": 1},
    "target": {
        "engine": {**ENGINE, "pipeline_parallel_size": 2, "speculative_config": {"method": "ngram"}},
        "placement": {"num_cpus": 1},
        "stages": {"placement": {"num_cpus": 1, "resources": {"stages": 1}}, "strategy": "SPREAD"},
    },
}


def below(name: str) -> list[int]:
    """Process ids of the processes of this test whose command has a word."""
    return [pid for pid, command in descendants(os.getpid()).items() if name in command]


def token_files() -> set[Path]:
    """Files with a token, of any replica of this machine."""
    return set(Path(tempfile.gettempdir()).glob("*.token"))


@pytest.fixture
def machines() -> Iterator[Any]:
    """Two raylets, each with room for one stage."""
    found = cluster_utils.Cluster(
        initialize_head=True, head_node_args={"num_cpus": 3, "resources": {"stages": 1}, "include_dashboard": False}
    )
    found.add_node(num_cpus=1, resources={"stages": 1})
    try:
        yield found
    finally:
        found.shutdown()


def test_stages_on_two_machines_write_the_tokens_of_one_process(machines: Any, tmp_path: Path) -> None:
    """Also when a stage host is killed: its stage moves to the other host, and the replica starts the host again.

    A killed replica leaves no file with the token, and the next replica has a token of its own.
    """
    files = token_files()
    asks = [Ask(PROMPTS[0], None), Ask(PROMPTS[3], 1)]
    expected = expect(asks)
    with ClusterProcess(CONFIG, tmp_path, address=machines.address) as cluster:
        actors, stages, replica = below(ACTOR), below(STAGE), below(REPLICA.format(name=cluster.name))
        assert (len(actors), len(stages), len(replica)) == (2, 2, 1)
        assert {ask: complete(cluster, ask) for ask in asks} == expected
        os.kill(actors[0], signal.SIGKILL)
        assert {ask: complete(cluster, ask) for ask in asks} == expected
        until(lambda: len(below(ACTOR)) == 2 and not set(stages) & set(below(STAGE)))
        assert below(REPLICA.format(name=cluster.name)) == replica
        os.kill(replica[0], signal.SIGKILL)
        until(lambda: set(below(REPLICA.format(name=cluster.name))) - set(replica))
        assert {ask: complete(cluster, ask) for ask in asks} == expected
    until(lambda: not below(ACTOR) and not below(STAGE))
    assert token_files() == files
