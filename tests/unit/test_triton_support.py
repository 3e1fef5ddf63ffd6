"""Reasons against Triton's kernels are given before the first launch."""

from __future__ import annotations

import shutil

import pytest
import torch

from cospec import triton_support

GPU = torch.device("cuda")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine on which the kernels run."""
    monkeypatch.setattr(triton_support, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/gcc" if name == "gcc" else None)
    monkeypatch.delenv("CC", raising=False)
    return monkeypatch


def test_a_gpu_with_a_compiler_runs_the_kernels(machine: pytest.MonkeyPatch) -> None:
    assert triton_support.why_not(GPU) == ""
    machine.setenv("CC", "/opt/cc")
    machine.setattr(shutil, "which", lambda name: None)
    assert triton_support.why_not(GPU) == ""


def test_what_is_missing_is_named(machine: pytest.MonkeyPatch) -> None:
    assert "do not run on mps" in triton_support.why_not(torch.device("mps"))
    machine.setattr(shutil, "which", lambda name: None)
    assert triton_support.why_not(GPU) == "Triton finds no C compiler"
    machine.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert triton_support.why_not(GPU) == "the GPU has compute capability 7.5, and the kernels need 8.0"
    machine.setattr(torch.cuda, "is_available", lambda: False)
    assert triton_support.why_not(GPU) == "torch sees no GPU"
    machine.setattr(triton_support, "find_spec", lambda name: None)
    assert "not installed" in triton_support.why_not(GPU)


def test_a_cpu_needs_the_interpreter(machine: pytest.MonkeyPatch) -> None:
    machine.setenv("TRITON_INTERPRET", "1")
    assert triton_support.why_not(torch.device("cpu")) == ""
    machine.setenv("TRITON_INTERPRET", "0")
    assert "interpreter" in triton_support.why_not(torch.device("cpu"))
