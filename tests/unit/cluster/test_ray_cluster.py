"""The watch over Ray's head, its restarts, and the files of running clusters; none needs Ray."""

from __future__ import annotations

import os
import socket
import stat
import sys
from pathlib import Path

import psutil
import pytest

from cospec.cluster import state_file
from cospec.cluster.ray_cluster import HeadRestarts, RayHeadLost, RayHeadWatch
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
    restarts = HeadRestarts(dead, "127.0.0.1:6379")

    def running() -> list[psutil.Process]:
        below = psutil.Process().children()
        return [
            each for each in below if each.cmdline()[2:] == [program, "--gcs_server_port=0", "--gcs_server_port=6379"]
        ]

    dead.kill()
    until(running, "a new head")
    running()[0].kill()
    until(running, "a third head")
    restarts.close()
    until(lambda: not running(), "the end")


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
