"""What the operating system reports: on Linux, in a container with limits, on Arm, on macOS, on Windows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cospec import machine

GIB = 1 << 30
WINDOWS = "import platform, subprocess, pathlib, sys; sys.platform = 'win32'; "


@pytest.fixture
def files(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes files of a machine into a folder."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return tmp_path

    return write


@pytest.fixture
def macos(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No choice of processors, no ``/proc``, and a ``sysctl`` that answers as on an Apple processor."""
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    tool = tmp_path / "bin" / "sysctl"
    tool.parent.mkdir()
    answers = "machdep.cpu.brand_string) echo Apple M2;; hw.perflevel0.logicalcpu) echo 4;; *) exit 1;;"
    tool.write_text(f"#!/bin/sh\ncase $2 in {answers} esac\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent))


def test_linux_names_its_processor(files: Callable[[str, str], Path]) -> None:
    root = files("proc/cpuinfo", "processor\t: 0\nmodel name\t: Fast 9\n\nprocessor\t: 1\nmodel name\t: Fast 9\n")
    assert machine.processor(root) == "Fast 9"


def test_x86_processors_behind_one_vendor_name_have_two_names(files: Callable[[str, str], Path]) -> None:
    names = set()
    for family, model in ((25, 1), (25, 17), (26, 1)):
        root = files("proc/cpuinfo", f"cpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: AMD EPYC\n")
        names.add(machine.processor(root))
    assert len(names) == 3


def test_arm_processors_of_two_kinds_have_two_names(files: Callable[[str, str], Path]) -> None:
    names = set()
    for part in ("0xd0c", "0xd40"):
        root = files("proc/cpuinfo", f"processor\t: 0\nCPU implementer\t: 0x41\nCPU part\t: {part}\n")
        names.add(machine.processor(root))
        assert part in machine.processor(root)
    assert len(names) == 2


def test_a_container_has_the_processors_of_its_limit(
    files: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for limit, count in (("max 100000\n", 64), ("200000 100000\n", 2), ("250000 100000\n", 3), ("1000 100000\n", 1)):
        assert machine.usable_processors(files("sys/fs/cgroup/cpu.max", limit)) == count


def test_memory_is_the_less_of_machine_and_container(files: Callable[[str, str], Path]) -> None:
    root = files("proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {48 << 20} kB\n")
    assert machine.available_memory(root) == 48 * GIB
    files("sys/fs/cgroup/memory.current", f"{3 * GIB}\n")
    files("sys/fs/cgroup/memory.stat", f"anon {GIB}\ninactive_file {GIB}\n")
    files("sys/fs/cgroup/memory.max", "max\n")
    assert machine.available_memory(root) == 48 * GIB
    files("sys/fs/cgroup/memory.max", f"{4 * GIB}\n")
    assert machine.available_memory(root) == 2 * GIB
    files("sys/fs/cgroup/memory.max", f"{GIB}\n")
    assert machine.available_memory(root) == 0


@pytest.mark.usefixtures("macos")
def test_macos_has_a_processor_its_fast_cores_and_half_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert machine.processor(tmp_path) == "Apple M2"
    assert machine.usable_processors(tmp_path) == 4
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 32 * GIB >> 14, "SC_PAGE_SIZE": 1 << 14}.__getitem__)
    assert machine.available_memory(tmp_path) == 16 * GIB


@pytest.mark.usefixtures("macos")
def test_a_system_without_sysctl_has_an_answer_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    assert machine.processor(tmp_path)
    assert machine.usable_processors(tmp_path) == 8


@pytest.mark.parametrize("how", ["from cospec import LLM", "import cospec; cospec.SamplingParams"])
def test_windows_is_refused_when_the_package_is_used(how: str) -> None:
    ended = subprocess.run([sys.executable, "-c", WINDOWS + how], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith("ImportError: Windows is not supported; ")


def test_windows_is_refused_in_one_sentence_when_the_command_starts() -> None:
    start = WINDOWS + "from cospec.cli.main import main; main()"
    ended = subprocess.run([sys.executable, "-c", start, "serve"], capture_output=True, text=True)
    assert ended.returncode == 1
    sentence = "Windows is not supported; run cospec in WSL2, the Linux inside Windows (wsl --install)."
    assert ended.stderr == f"cospec: {sentence}\n"
