"""The machine as the operating system describes it: processors, memory, and whether cospec supports the system.

Linux answers in files, macOS through ``sysctl``. A container reports its own limits (cgroup v2), because the machine's
figures cover all containers.
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
_X86 = ("cpu family", "family"), ("model", "model")


def cache_directory() -> Path:
    """Return the user's directory of files that cospec can make again (XDG)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cospec"


def unsupported() -> str | None:
    """Return one sentence why cospec does not run on this operating system; None if cospec runs."""
    if sys.platform == "win32":
        return "Windows is not supported; run cospec in WSL2, the Linux inside Windows (wsl --install)."
    return None


def processor(root: Path = ROOT) -> str:
    """Return the name of the processor; different kinds of processors have different names.

    Args:
        root: folder that holds ``proc``.
    """
    facts: dict[str, str] = {}
    for line in _lines(root / "proc" / "cpuinfo"):
        name, _, value = line.partition(":")
        facts.setdefault(name.strip(), value.strip())
    if "model name" in facts:  # a virtual machine may hide all but the vendor's name there
        return ", ".join([facts["model name"], *(f"{name} {facts[key]}" for key, name in _X86 if key in facts)])
    arm = [f"{name.removeprefix('CPU ')} {facts[name]}" for name in ("CPU implementer", "CPU part") if name in facts]
    if arm:  # Arm processors have numbers instead of a name
        return f"{platform.machine()} ({', '.join(arm)})"
    return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def usable_processors(root: Path = ROOT) -> int:
    """Return the number of processors for this process, at least 1. On Apple processors only fast cores count.

    Args:
        root: folder that holds ``sys``.
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        # Threads synchronise after each product, so slow cores delay fast cores; torch counts the same way.
        fast = _sysctl("hw.perflevel0.logicalcpu")
        count = int(fast) if fast.isdecimal() else os.cpu_count() or 1
    limit = " ".join(_lines(root / "sys/fs/cgroup/cpu.max")).split()  # microseconds per period, and the period
    if len(limit) == 2 and limit[0].isdecimal():
        count = min(count, math.ceil(int(limit[0]) / int(limit[1])))
    return max(count, 1)


def available_memory(root: Path = ROOT) -> int:
    """Return the bytes available without swapping; half of all memory if the system has no such figure.

    Args:
        root: folder that holds ``proc`` and ``sys``.
    """
    found = [int(line.split()[1]) << 10 for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    if not found:
        known = {"SC_PHYS_PAGES", "SC_PAGE_SIZE"} <= os.sysconf_names.keys()
        found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if known else _UNKNOWN_MEMORY]
    return min(found + _memory_limit(root / "sys/fs/cgroup"))


def _memory_limit(group: Path) -> list[int]:
    """Return the bytes that the container may still allocate; empty without a limit."""
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if not limit or not used or not limit[0].isdecimal():
        return []
    # Cached file pages count as used until the memory is needed.
    files = sum(int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith("inactive_file "))
    return [max(int(limit[0]) - int(used[0]) + files, 0)]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # another operating system, or no limit
        return []


def _sysctl(name: str) -> str:
    """Return the macOS value of ``name``; empty on other systems."""
    command = shutil.which("sysctl") if sys.platform == "darwin" else None
    if command is None:
        return ""
    return subprocess.run([command, "-n", name], capture_output=True, text=True, check=False).stdout.strip()
