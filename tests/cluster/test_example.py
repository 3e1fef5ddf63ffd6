"""The three commands of ``examples/cluster``: a server, a drafter node that joins, and a request."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from harness.waiting import until

pytest.importorskip("zmq")
pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]

FOLDER = Path("examples/cluster")


class Terminal:
    """Runs scripts of the folder, with free ports instead of theirs; the end ends them."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as first, socket.create_server(("127.0.0.1", 0)) as second:
            self._ports = {"8000": str(first.getsockname()[1]), "5710": str(second.getsockname()[1])}
        self.url = f"http://127.0.0.1:{self._ports['8000']}"
        self._running: list[subprocess.Popen[bytes]] = []

    def command(self, script: str) -> list[str]:
        text = (FOLDER / script).read_text(encoding="utf-8")
        for written, port in self._ports.items():
            text = text.replace(written, port)
        return ["env", f"PATH={Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "sh", "-c", text]

    def start(self, script: str) -> None:
        self._running.append(subprocess.Popen(self.command(script)))

    def nodes(self) -> list[str]:
        """The state of each node; empty while no server answers."""
        try:
            return [node["state"] for node in httpx.get(f"{self.url}/cluster", timeout=10).json()["nodes"]]
        except httpx.TransportError:
            return []

    def close(self) -> None:
        for process in reversed(self._running):
            process.terminate()
            process.wait(30)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    made = Terminal()
    yield made
    made.close()


def test_three_commands_draft_on_another_process(terminal: Terminal) -> None:
    terminal.start("1_serve.sh")
    terminal.start("2_join.sh")
    until(lambda: terminal.nodes() == ["ready"], "the drafter node")
    asked = subprocess.run(terminal.command("3_ask.sh"), capture_output=True, text=True, timeout=60, check=True)
    answer, *table = asked.stdout.splitlines()
    assert json.loads(answer)["usage"]["speculation"]["accepted"] > 0
    assert "draft_model" in table[1] and "ready" in table[1]
