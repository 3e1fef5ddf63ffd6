"""Run a program in a process of its own, with limits of time, memory and files, and without sockets.

The limits stop mistakes of programs. The limits are no security boundary: the process has the rights of its user. Run
programs of an untrusted model in a virtual machine or a container.
"""

from __future__ import annotations

import os
import resource
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

# The audit hook stays until the process ends, so that the program makes no socket. The program ends the process without
# the last line if a test fails, or if the program leaves early.
RUNNER = """
import sys
def refuse(event, arguments):
    if event.startswith("socket."):
        raise OSError("sockets are off")
sys.addaudithook(refuse)
mark, program = sys.stdin.readline().strip(), sys.stdin.read()
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
print(mark)
"""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """Bounds of one program.

    Attributes:
        seconds: of the clock, and of the processor rounded up.
        memory_bytes: address space.
        file_bytes: of each file that the program writes.
    """

    seconds: float = 10.0
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


USUAL = SandboxLimits()


def run_program(program: str, limits: SandboxLimits = USUAL) -> str:
    """Run ``program`` to the end of its last line; return why this failed, in a few words, empty for success."""
    mark = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", RUNNER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            cwd=folder,
            env={},
            start_new_session=True,
            preexec_fn=partial(_limit, limits),
        )
        try:
            written, errors = process.communicate(f"{mark}\n{program}", limits.seconds)
        except subprocess.TimeoutExpired:
            return f"more than {limits.seconds:g} s"
        finally:
            _end(process)
    if written.rstrip().endswith(mark):
        return ""
    lines = errors.strip().splitlines()
    return lines[-1] if lines else f"exit status {process.returncode}"


def _limit(limits: SandboxLimits) -> None:
    seconds = int(limits.seconds) + 1
    for kind, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


def _end(process: subprocess.Popen[str]) -> None:
    """End the process, and the processes that the program started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
