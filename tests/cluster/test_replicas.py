"""One cluster of two replicas as a whole: exactness, prefixes, lost replicas, aborts, chaos, and a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from benchmarks.chaos import DRAFTERS, ENGINE, ON_NODES, PROMPTS, Ask, disturb, expect
from benchmarks.cluster_process import ClusterProcess

from cospec.cluster import state_file
from harness.completions import complete, figure
from harness.waiting import until

pytest.importorskip("ray", reason="the extra cluster is not installed")
pytestmark = [pytest.mark.ray, pytest.mark.timeout(150)]

CONFIG: dict[str, Any] = {
    "name": f"test-{os.getpid()}",
    "server": {"port": 0},
    "machine": {"num_cpus": 4},
    "health": {"period": 1, "timeout": 2, "grace": 1, "head": 3},
    "target": {"engine": {**ENGINE, "speculative_config": ON_NODES}, "scale": {"min": 2, "max": 2}},
    "drafters": DRAFTERS,
}


@pytest.fixture(scope="module")
def cluster(packed_zoo: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    with ClusterProcess(CONFIG, tmp_path_factory.mktemp("cluster")) as running:
        yield running
    assert not running.left()


def test_replicas_write_what_one_engine_writes(cluster: ClusterProcess) -> None:
    asks = [Ask(prompt, seed) for prompt in PROMPTS for seed in (None, 1, 2)]
    expected = expect(asks)
    with ThreadPoolExecutor(8) as pool:
        found = dict(zip(asks, pool.map(lambda each: complete(cluster, each), asks), strict=True))
    assert found == expected


def test_engines_run_at_the_usual_priority(cluster: ClusterProcess) -> None:
    """Ray's default is a niceness of 15, at which engines get almost no time next to a busy program."""
    wanted = psutil.Process().nice()
    assert [psutil.Process(pid).nice() for pid in cluster.engines()] == [wanted, wanted]


def test_drafter_nodes_draft_for_both_replicas(cluster: ClusterProcess) -> None:
    def joined() -> list[Any]:
        found = httpx.get(f"{cluster.url}/cluster", timeout=30).json()["nodes"]
        return [node for node in found if node["state"] == "ready"]

    until(lambda: len(joined()) == 2)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda prompt: complete(cluster, Ask(prompt, None)), PROMPTS * 3))
    assert all(node["drafts"] > 0 for node in joined())
    assert figure(cluster, "spec_decode_num_accepted_tokens_total") > 0


def test_a_program_without_the_token_is_refused(cluster: ClusterProcess, tmp_path: Path) -> None:
    """Ray's head takes no stranger; ``ray.init`` would try this connection for 20 seconds."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    address = state_file.read(cluster.name).address
    program = f"from ray._raylet import GcsClient; GcsClient(address={address!r}).internal_kv_keys(b'', namespace=None)"
    found = subprocess.run(
        [sys.executable, "-c", program], env={**environment, "HOME": str(tmp_path)}, capture_output=True, timeout=60
    )
    assert found.returncode != 0 and b"token" in found.stderr.lower()


def test_no_port_for_other_machines_shows_metrics_or_takes_jobs(cluster: ClusterProcess) -> None:
    found = [each for pid in cluster.below() for each in psutil.Process(pid).net_connections("tcp")]
    ports = {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN and each.laddr.ip != "127.0.0.1"}
    assert ports
    for port in ports:
        url = f"http://{state_file.read(cluster.name).address.split(':')[0]}:{port}"
        assert status("GET", f"{url}/metrics") != 200
        for path in ("api/jobs/", "api/job_agent/jobs/"):
            assert status("POST", f"{url}/{path}", json={"entrypoint": "true"}) != 200


def status(method: str, url: str, **options: Any) -> int | None:
    """Of an answer; None from a port that speaks no HTTP."""
    try:
        return httpx.request(method, url, timeout=5, **options).status_code
    except httpx.HTTPError:
        return None


def test_requests_with_a_shared_prefix_meet_in_one_cache(cluster: ClusterProcess) -> None:
    prefix = "Once upon a time there was a little dog. " * 8
    before = figure(cluster, "prefix_cache_hits_total")
    for number in range(6):
        complete(cluster, Ask(f"{prefix}{number}", None), max_tokens=1)
    tokens = httpx.post(f"{cluster.url}/tokenize", json={"prompt": prefix}, timeout=30).json()["count"]
    hits = figure(cluster, "prefix_cache_hits_total") - before  # two caches would miss the prefix twice
    assert hits >= 5 * (tokens // 16 - 1) * 16


def test_a_client_that_leaves_frees_its_request(cluster: ClusterProcess) -> None:
    body = {"prompt": PROMPTS[0], "stream": True, "max_tokens": 900, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    until(lambda: figure(cluster, "num_requests_live") == 0 and figure(cluster, "num_requests_running") == 0)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "paused"])
def test_a_lost_replica_changes_no_token(cluster: ClusterProcess, fault: signal.Signals) -> None:
    # An engine that starts is busy too, and is not the engine of the request.
    until(lambda: len(cluster.engines()) == 2 and cluster.idle())
    lost_before, restarts = figure(cluster, "replicas_lost_total"), figure(cluster, "engine_restarts_total")
    ask, more = Ask(PROMPTS[3], None), {"max_tokens": 500, "ignore_eos": True}
    expected, replayed = complete(cluster, ask, **more), figure(cluster, "requests_replayed_total")
    body = {"prompt": ask.prompt, "return_token_ids": True, "stream": True, **ask.sampling, **more}
    tokens: list[int] = []
    text, lost = "", False
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=90) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            tokens += choice["token_ids"]
            text += choice["text"]
            if not lost and len(tokens) > 20:
                os.kill(cluster.busy_replica(), fault)
                lost = True
    assert (tokens, text) == expected
    assert figure(cluster, "requests_replayed_total") == replayed + 1
    until(lambda: figure(cluster, "replicas_lost_total") == lost_before + 1, "the lost replica in the metrics")
    assert figure(cluster, "engine_restarts_total") == restarts


def test_a_busy_api_server_keeps_its_connections(cluster: ClusterProcess) -> None:
    """The server gives no answer for longer than three health checks of any other actor take."""

    def servers() -> list[int]:
        title = f"ray::ServeReplica:{cluster.name}:api"
        return [pid for pid, command in cluster.below().items() if command.startswith(title)]

    (server,) = servers()
    ask, more = Ask(PROMPTS[3], None), {"max_tokens": 500, "ignore_eos": True}
    expected, checks = complete(cluster, ask, **more), CONFIG["health"]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, cluster, ask, **more)
        until(lambda: figure(cluster, "num_requests_running") == 1)
        os.kill(server, signal.SIGSTOP)
        try:
            threading.Event().wait(3 * (checks["period"] + checks["timeout"]) + 1)
            assert not answer.done()
        finally:
            os.kill(server, signal.SIGCONT)
        assert answer.result() == expected
    assert servers() == [server]


def test_requests_wait_while_every_engine_restarts(cluster: ClusterProcess) -> None:
    until(lambda: len(cluster.engines()) == 2 and cluster.idle())
    asks = [Ask(prompt, seed) for prompt in PROMPTS[:2] for seed in (None, 1)]
    expected, lost = expect(asks), figure(cluster, "replicas_lost_total")
    restarts = figure(cluster, "engine_restarts_total")
    until(lambda: figure(cluster, "engine_up") == 1, "reports of the replicas")
    for engine in cluster.engines():
        os.kill(engine, signal.SIGKILL)
    with ThreadPoolExecutor(4) as pool:
        answers = pool.map(lambda each: complete(cluster, each), asks)
        until(lambda: figure(cluster, "engine_up") == 0, "no engine in the metrics")
        found = dict(zip(asks, answers, strict=True))
    assert found == expected
    until(lambda: figure(cluster, "engine_restarts_total") == restarts + 2, "the restarts in the metrics")
    until(lambda: figure(cluster, "engine_up") == 1, "an engine in the metrics")
    assert figure(cluster, "replicas_lost_total") == lost


def test_chaos_loses_no_request_and_changes_no_token(cluster: ClusterProcess) -> None:
    """A short run of ``python -m benchmarks.chaos``: nodes join, processes are killed and cut off."""
    until(lambda: len(cluster.engines()) == 2 and cluster.idle())
    report = disturb(cluster, seconds=24, requests=200, every=3)
    assert report.requests == 200
    assert (report.lost, report.wrong, report.errors) == (0, 0, [])
    happened = {kind for kind, count in report.faults.items() if count}
    assert happened >= {"join node", "kill node", "pause node", "partition node"}
    assert report.running_after == 0
    assert report.checks and (report.leaks, report.sockets) == (0, [])


def test_without_a_head_the_cluster_stops_with_one_sentence(cluster: ClusterProcess) -> None:
    (head,) = [pid for pid, command in cluster.below().items() if "gcs_server" in command.split()[0]]
    os.kill(head, signal.SIGKILL)
    assert cluster.process.wait(60) == 1
    last = cluster.log.strip().splitlines()[-1]
    assert last.startswith("cospec: The head of the Ray cluster at")
    assert last.endswith("unfinished requests can be submitted again.")
