"""``cospec serve`` over the fake engine, as a program: a tokenizer's folder and the server's settings as JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from cospec.config import EngineConfig
from cospec.errors import EngineStopped
from cospec.server.run import run
from cospec.server.settings import ServerSettings
from server.fake_engine import FakeEngine


class FakeServed:
    """The program, started and answering."""

    def __init__(self, tokenizer: Path, **settings: Any) -> None:
        command = [sys.executable, "-m", "server.fake_server", str(tokenizer), json.dumps({"port": 0, **settings})]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True, cwd=Path(__file__).parents[1]
        )
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        self.http = httpx.Client(base_url=self.url, timeout=60)

    def stop(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


if __name__ == "__main__":
    try:
        run(
            EngineConfig(model="fake", tokenizer=sys.argv[1]),
            ServerSettings(**json.loads(sys.argv[2])),
            lambda url: print(url, flush=True),
            FakeEngine.build,
        )
    except EngineStopped as error:
        print(error, flush=True)
        sys.exit(1)
