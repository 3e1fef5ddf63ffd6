"""The token of stage hosts reaches engine processes, and leaves no file when a process is killed."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import psutil

from cospec.distributed.stage_host import TokenFile, read_token
from harness.waiting import until
from server.fake_engine import write_tokenizer

TOKEN = "a token of thirty-two characters"
PARENT = """
import asyncio, sys
from cospec.config import EngineConfig
from cospec.distributed.stage_host import TokenFile
from cospec.runtime.async_engine import AsyncEngineClient
from server.fake_engine import FakeEngine

async def main():
    held = TokenFile(sys.stdin.readline().strip())
    config = EngineConfig(model="fake", tokenizer=sys.argv[1], stage_token_file=held.path)
    clients = [AsyncEngineClient(FakeEngine.build_with_token) for _ in range(2)]
    names = [(await client.start(config, [held.descriptor])).model_name for client in clients]
    print(*names, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_token_file_has_no_name_and_one_user() -> None:
    held = TokenFile(TOKEN)
    found = os.fstat(held.descriptor)
    assert (found.st_nlink, stat.S_IMODE(found.st_mode)) == (0, 0o600)
    assert [read_token(held.path) for _ in range(2)] == [TOKEN] * 2
    held.close()


def test_a_killed_process_leaves_no_token(tmp_path: Path) -> None:
    """Two engine processes, the second as after a restart, read the token; no command and no variable has it."""
    temporary, tokenizer = tmp_path / "temporary", tmp_path / "tokenizer"
    temporary.mkdir()
    write_tokenizer(tokenizer)
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", PARENT, str(tokenizer)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(f"{TOKEN}\n")
        parent.stdin.flush()
        assert parent.stdout.readline().split() == [hashlib.sha256(TOKEN.encode()).hexdigest()] * 2
        processes = [psutil.Process(parent.pid), *psutil.Process(parent.pid).children(recursive=True)]
        assert len(processes) >= 3
        visible = [text for each in processes for text in (*each.cmdline(), *each.environ().values())]
        assert not any(TOKEN in text for text in visible)
        assert not list(temporary.iterdir())
        parent.kill()
    until(lambda: not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in processes))
    assert not list(temporary.iterdir())
