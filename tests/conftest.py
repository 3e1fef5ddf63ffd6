"""Shared by all tests."""

from __future__ import annotations

import atexit
import faulthandler
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Models of the tests are tiny, and several threads only wait for each other. Read by the kernels, by torch and by the
# processes that tests start; tests of threads set a number.
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import pytest
import torch

from cospec.process_utils import freeze_gc

hypothesis.settings.register_profile("cospec", deadline=None)  # no test asserts time
hypothesis.settings.load_profile("cospec")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when Triton is imported

# Engines keep packed weights and what they measured; a test must neither read nor leave any of the user's. The workers
# of ``pytest -n`` have the folder of the process that started them.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _CACHE = tempfile.mkdtemp(prefix="cospec-tests-")
    os.environ["XDG_CACHE_HOME"] = _CACHE
    atexit.register(shutil.rmtree, _CACHE, ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--native off`` runs the tests without the native library; tests of the library skip themselves.

    ``--grid`` runs the tests of sharded targets with every layout of up to four stages and two ranks.
    """
    parser.addoption("--native", choices=("auto", "off"), default="auto", help="off: run without the native library")
    parser.addoption("--grid", action="store_true", help="run the tests of sharded targets with every layout")


def pytest_configure(config: pytest.Config) -> None:
    """Switch the library off for this process, and for the processes that the tests start."""
    if config.getoption("--native") == "off":
        os.environ["COSPEC_NATIVE"] = "off"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude modules and tests from garbage collections: one scans a million objects, and ``LLM.close`` starts one."""
    gc.disable()
    try:
        return (yield)
    finally:
        freeze_gc()
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def short_measurement() -> Iterator[None]:
    """Engines of this process measure themselves for less than three seconds at their start."""
    from cospec.profiling import start

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "SECONDS", 0.3)
        yield


@pytest.fixture
def small_second_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chi-square of ``cospec verify`` repeats a suspicious sample in its own size, not in four times the size.

    A control that is caught by the smaller sample is caught by the larger one.
    """
    monkeypatch.setattr("cospec.verify.chisquare.FRESH", 1)


@pytest.fixture
def restored_kernels() -> Iterator[None]:
    """Restore the instruction set and the threads of the kernels, which a test may change."""
    from cospec.native import library

    isa, threads = library.isa(), library.threads()
    yield
    library.set_isa(isa)
    library.set_threads(threads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a small Llama and of a similar drafter."""
    from harness.llamas import write_pair  # most tests need no transformers

    found = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("drafter")
    write_pair(*found)
    return found


@pytest.fixture(scope="module")
def spelled(folders: tuple[Path, Path]) -> tuple[Path, Path]:
    """``folders``, with tokenizers."""
    from harness.llamas import write_tokenizer

    for folder in folders:
        write_tokenizer(folder)
    return folders


GRACE = 30.0  # seconds past the time limit
_STDERR = os.fdopen(os.dup(sys.__stderr__.fileno() if sys.__stderr__ else 2), "w")  # pytest captures the other one


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """End a process that hangs in native code: such a call takes no signal, so the time limit cannot fail the test.

    A thread of faulthandler, which needs no interpreter lock, prints all stacks and ends the process. ``pytest -n``
    then reports the test as failed and starts another worker.
    """
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker and marker.args else item.config.getini("timeout"))
    faulthandler.dump_traceback_later(limit + GRACE, exit=True, file=_STDERR)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
