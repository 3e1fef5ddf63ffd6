"""``ray symmetric-run``, as ``docs/howto/deploy.md`` shows: its dashboard takes no program without the token.

``ray stop`` ends every Ray process that it sees, so the command sees only processes of its own namespace.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
import yaml
from benchmarks.chaos import ENGINE
from benchmarks.cluster_process import READY, descendants

from harness.waiting import until

pytest.importorskip("ray", reason="the extra cluster is not installed")
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
FIRST = ["sh", "-c", '"$@"; exit $?', "sh"]  # a first process that collects ended ones, for which ``ray stop`` waits
pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        shutil.which("unshare") is None or subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode != 0,
        reason="this user makes no namespaces of processes",
    ),
]

CONFIG = {
    "name": "test-symmetric",
    "server": {"port": 0},
    "target": {"engine": {**ENGINE, "speculative_config": {"method": "off"}}, "placement": {"num_cpus": 1}},
}


def free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
        return first.getsockname()[1], second.getsockname()[1]


def test_the_dashboard_of_the_command_needs_the_token(tmp_path: Path) -> None:
    (head, dashboard), token, log = free_ports(), secrets.token_hex(32), tmp_path / "log"
    (tmp_path / "token").write_text(token)
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(CONFIG))
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:  # sockets have short paths
        environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
            "RAY_TMPDIR": folder,
            "XDG_RUNTIME_DIR": str(tmp_path),
        }
        ray = ["ray", "symmetric-run", "--address", f"127.0.0.1:{head}", "--min-nodes", "1", "--num-cpus", "2"]
        up = ["cospec", "cluster", "up", str(tmp_path / "cluster.yaml"), "--address", "auto"]
        with log.open("w") as file:
            command = [*NAMESPACE, *FIRST, *ray, "--dashboard-port", str(dashboard), "--", *up]
            process = subprocess.Popen(command, env=environment, stdout=file, stderr=file)
        try:
            until(lambda: READY.search(log.read_text()) or process.poll() is not None, "the cluster")
            assert (found := READY.search(log.read_text())), log.read_text()[-4000:]
            assert httpx.get(f"{found[1]}/health", timeout=30).status_code == 200
            jobs, job = f"http://127.0.0.1:{dashboard}/api/jobs/", {"entrypoint": f"touch {tmp_path / 'ran'}"}
            assert httpx.post(jobs, json=job, timeout=30).status_code in (401, 403)
            assert httpx.get(jobs, headers={"Authorization": f"Bearer {token}"}, timeout=30).status_code == 200
            (pid,) = [pid for pid, line in descendants(process.pid).items() if "bin/cospec cluster up" in line]
            os.kill(pid, signal.SIGTERM)
            assert process.wait(40) == 0, log.read_text()[-4000:]
        finally:
            process.kill()
            process.wait()
    assert not (tmp_path / "ran").exists()
