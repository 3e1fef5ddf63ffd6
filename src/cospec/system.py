"""What the operating system says of the machine: processors, memory, and whether cospec runs there.

Linux answers in files, macOS through ``sysctl``. A container with a limit answers with its limit (cgroup v2), since the
machine's own figures are those of all containers together.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path("/")
_UNKNOWN_MEMORY = 4 << 30


def unsupported() -> str | None:
    """Why cospec does not run on this operating system, as one sentence; None where cospec runs."""
    if sys.platform == "win32":
        return "Windows is not supported; run cospec in WSL2, the Linux inside Windows (wsl --install)."
    return None


def processor(root: Path = ROOT) -> str:
    """The name of the processor; two kinds of processors have two names.

    Args:
        root: folder that holds ``proc``.
    """
    facts: dict[str, str] = {}
    for line in _lines(root / "proc" / "cpuinfo"):
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    if "model name" in facts:
        return facts["model name"]
    arm = [f"{name.removeprefix('CPU ')} {facts[name]}" for name in ("CPU implementer", "CPU part") if name in facts]
    if arm:  # Arm processors have numbers in place of a name
        return f"{platform.machine()} ({', '.join(arm)})"
    return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def usable_processors(root: Path = ROOT) -> int:
    """How many processors this process may keep busy, at least 1; of Apple's processors the fast ones.

    Args:
        root: folder that holds ``sys``.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        # Threads meet after each product, so slow cores would hold up fast ones; torch counts the same way.
        fast = _sysctl("hw.perflevel0.logicalcpu")
        count = int(fast) if fast.isdecimal() else os.cpu_count() or 1
    limit = " ".join(_lines(root / "sys/fs/cgroup/cpu.max")).split()  # microseconds, and the period they are for
    if len(limit) == 2 and limit[0].isdecimal():
        count = min(count, math.ceil(int(limit[0]) / int(limit[1])))
    return max(count, 1)


def available_memory(root: Path = ROOT) -> int:
    """Bytes that can be had without swapping; half of all memory where the system gives no such figure.

    Args:
        root: folder that holds ``proc`` and ``sys``.
    """
    found = [int(line.split()[1]) << 10 for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    if not found:
        known = {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= os.sysconf_names.keys()
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if known else _UNKNOWN_MEMORY]
    return min(found + _memory_limit(root / "sys/fs/cgroup"))


def _memory_limit(group: Path) -> list[int]:
    """Bytes that the container may still take; nothing where there is no limit."""
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if not limit or not used or not limit[0].isdecimal():
        return []
    # Files that were read count as used until the memory is needed.
    files = sum(int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith("inactive_file "))
    return [max(int(limit[0]) - int(used[0]) + files, 0)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another operating system, or no such limit
        return []


def _sysctl(name: str) -> str:
    """A value that macOS keeps under ``name``; empty elsewhere."""
    command = shutil.which("sysctl") if sys.platform == "darwin" else None
    if command is None:
        return ""
    return subprocess.run([command, "-n", name], capture_output=True, text=True, check=False).stdout.strip()
