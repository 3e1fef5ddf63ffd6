"""The watch over Ray's head, its restarts, failed starts, and the files of running clusters."""

from __future__ import annotations

import os
import signal
import socket
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from benchmarks.cluster_process import descendants

from cospec.cluster import state_file
from cospec.cluster.config import ClusterConfig
from cospec.cluster.ray_cluster import HeadRestarts, RayHead, RayHeadLost, RayHeadWatch
from cospec.cluster.up import deployed
from cospec.errors import InvalidInput
from harness.waiting import until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return state_file.folder()


def test_a_head_that_comes_back_in_time_is_not_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        port = head.getsockname()[1]
        watch = RayHeadWatch(f"127.0.0.1:{port}", patience=3)
        watch.check(1)
    watch.check(1)
    watch.check(1)
    with socket.create_server(("127.0.0.1", port)):
        watch.check(1)
    watch.check(1)
    watch.check(1)
    with pytest.raises(RayHeadLost, match=f"127.0.0.1:{port} has been away for 3 seconds"):
        watch.check(1)


def test_a_head_starts_again_with_its_port_until_the_end() -> None:
    program = "import time; time.sleep(60)"
    dead = psutil.Popen([sys.executable, "-c", program, "--gcs_server_port=0"])
    until(lambda: dead.cmdline()[-1:] == ["--gcs_server_port=0"] and dead.environ(), "a process with its arguments")
    head = RayHead("127.0.0.1:6379")
    restarts = HeadRestarts(head, dead)

    def running() -> set[int]:
        """Process ids of heads with both ports; the last flag counts."""
        ends = f"-c {program} --gcs_server_port=0 --gcs_server_port=6379"
        return {pid for pid, command in descendants(os.getpid()).items() if command.endswith(ends)}

    dead.kill()
    (second,) = until(running, "a second head")  # whose command is empty for a moment, while the process executes it
    os.kill(second, signal.SIGKILL)
    (third,) = until(lambda: running() - {second}, "a third head")
    restarts.stop()
    until(lambda: running() == {third}, "a head, with which alone Ray ends in order")
    restarts.kill()
    until(lambda: not running(), "the end")
    assert third != second
    assert head.restarts == 2


@pytest.mark.parametrize("message", ["", "a long story\nno place"])
def test_a_ray_serve_that_does_not_start_is_one_sentence(message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve = pytest.importorskip("ray.serve", reason="Ray is not installed")

    def start(**_: object) -> None:
        raise TimeoutError(message)

    monkeypatch.setattr(serve, "start", start)
    monkeypatch.setattr(serve, "status", lambda: SimpleNamespace(applications={}))
    config = ClusterConfig.model_validate({"name": "a", "target": {"engine": {"model": "zoo"}}})
    with (
        pytest.raises(InvalidInput, match=r"not started \((no place|Ray Serve gives no reason)\)"),
        deployed(config, 1, lasting=False),
    ):
        pytest.fail("the block ran")


def test_a_running_cluster_is_found_by_its_name(folder: Path) -> None:
    written = state_file.RunningCluster("a", os.getpid(), "127.0.0.1:1", "http://127.0.0.1:2", "token")
    state_file.write(written)
    assert state_file.read("a") == written
    with pytest.raises(InvalidInput, match="one of a"):
        state_file.read("b")
    state_file.remove("a")
    with pytest.raises(InvalidInput, match="that cospec cluster up started"):
        state_file.read("a")


def test_a_dead_cluster_is_not_found(folder: Path) -> None:
    state_file.write(state_file.RunningCluster("a", 2**22 + 1, "x:1", "x"))
    with pytest.raises(InvalidInput):
        state_file.read("a")


def test_only_the_owner_reads_the_token(folder: Path) -> None:
    first = state_file.make_token("a").read_text()
    path = state_file.make_token("a")
    assert path.read_text() != first
    assert len(first) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_a_folder_that_others_read_is_refused(folder: Path) -> None:
    folder.chmod(0o755)
    with pytest.raises(InvalidInput, match="this user alone"):
        state_file.make_token("a")
