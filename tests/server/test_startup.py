"""What ``cospec serve`` says while it starts: plain lines in a pipe, a bar on a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cospec.native import library
from server.served import write_llama


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama")
    write_llama(made)
    return made


def started(stderr: int | None, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cospec", "serve", "--port", "0", *arguments]
    return subprocess.Popen(command, stderr=stderr, text=True, start_new_session=True)


def end(process: subprocess.Popen[str]) -> int:
    os.killpg(process.pid, signal.SIGTERM)
    return process.wait(60)


def test_a_pipe_gets_a_line_for_each_step(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("linear_backend: torch\nattention_backend: sdpa\nmeasure_at_start: false\n")
    process = started(subprocess.PIPE, str(folder), "--config", str(tmp_path / "c.yaml"), "--dtype", "float32")
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line.strip())
        if "http://" in line:
            break
    assert end(process) == 0
    process.stderr.close()
    wanted = (
        f"starts and loads {folder}",
        "imports torch",
        f"loading weights of {folder}, 0.1 MB",
        f"loaded weights of {folder}",
        f"model: {folder} (0.0 M parameters)",
        "device: cpu",
        "weights: fp32",
        "kernels: torch's",
        "speculation: ",
        "KV cache: 8,192 tokens of float32; a sequence has at most 128",
        f"cospec serves {folder} at http://127.0.0.1:",
    )
    places = [next((number for number, line in enumerate(lines) if part in line), -1) for part in wanted]
    assert -1 not in places, lines
    assert places == sorted(places)
    assert not any("\x1b" in line for line in lines)


@pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")
def test_a_terminal_gets_a_bar_and_the_instruction_set(folder: Path) -> None:
    reader, writer = pty.openpty()
    options = ("--speculative-config", '{"method": "off"}', "--weight-cache-bytes", "0")  # weights are packed again
    process = started(writer, str(folder), *options)
    os.close(writer)
    said = b""
    while b"http://" not in said:
        said += os.read(reader, 4096)
    assert end(process) == 0
    os.close(reader)
    text = said.decode()
    assert "100%" in text and "loading weights " in text and "packing weights " in text
    assert f"kernels: native, {library.isa()}" in text
    assert "speculation: off" in text


def test_a_program_gets_a_bar_on_a_terminal_alone(folder: Path) -> None:
    program = "from cospec import LLM; import sys; LLM(sys.argv[1], weight_cache_bytes=0, measure_at_start=False)"
    command = [sys.executable, "-c", program, str(folder)]
    assert not subprocess.run(command, stderr=subprocess.PIPE, check=True).stderr
    reader, writer = pty.openpty()
    process = subprocess.Popen(command, stderr=writer)
    os.close(writer)
    said = b""
    with contextlib.suppress(OSError):  # Linux' answer at the end of a terminal
        while part := os.read(reader, 4096):
            said += part
    os.close(reader)
    assert process.wait(60) == 0
    assert b"100%" in said and b" weights " in said


@pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")
def test_the_debug_level_names_the_request_that_takes_the_python_path(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("measure_at_start: false\nspeculative_config: {method: off}\n")
    process = started(subprocess.PIPE, str(folder), "--config", str(tmp_path / "c.yaml"), "--log-level", "debug")
    assert process.stderr is not None
    url = next(line for line in process.stderr if "http://" in line).split()[-1]
    body = {"prompt": "ab", "max_tokens": 2, "repetition_penalty": 1.5}
    id = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["id"]
    assert end(process) == 0
    lines = [line for line in process.stderr if "uses the Python path: " in line]
    process.stderr.close()
    assert len(lines) == 1 and f"request {id}-" in lines[0], lines
