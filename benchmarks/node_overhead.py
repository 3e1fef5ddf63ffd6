"""Measures a round through a drafter node on this machine, over the same drafter in a process of its own.

Run ``python -m benchmarks.node_overhead``, which measures ``draft_model`` and ``ngram``. A round is what an engine does
in a step: it reports commits, asks for drafts, and waits. Rounds alternate between the executors. The overhead is the
time of a round without the time of the drafter, as the drafter's process reports that time.
"""

from __future__ import annotations

import argparse
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import prompts, write
from cospec.assembly.build import default_drafter, load_options
from cospec.assembly.drafters import EngineHost, TargetFacts, build_drafter, hub_of, set_threads
from cospec.assembly.drafters_of_node import vocab_size_of
from cospec.cluster.nodes.keys import make_keys
from cospec.config import EngineConfig, speculative_config
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, DraftBudget, DraftContext
from cospec.models.loading import load_tokenizer, resolve
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams

LENGTH = 4  # tokens per draft
DRAFTERS = {"draft_model": {"model": "zoo:drafter"}, "ngram": {}}


def free_address() -> str:
    """An address of this machine that nothing uses."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"tcp://127.0.0.1:{found.getsockname()[1]}"


@contextmanager
def node_process(address: str, method: str, keys: Path | None) -> Iterator[None]:
    """A drafter node in a process of its own, as its command line starts one."""
    command = [sys.executable, "-m", "cospec", "node", "join", address, "--drafter", method, "--threads", "1"]
    process = subprocess.Popen([*command, *(["--keys", str(keys)] if keys else [])], stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(20)


def build(method: str, **speculative: Any) -> Drafter:
    """The drafter where ``speculative`` says."""
    given = {"method": method, **speculative}
    if given["drafter_executor"] == "process":
        given |= DRAFTERS[method]
    chosen, config = speculative_config(given), EngineConfig(threads=1)
    path = resolve("zoo")
    import torch

    target = TargetFacts(vocab_size_of(path), torch.device("cpu"))
    host = EngineHost(target, path, default_drafter("zoo"), None, load_options(config))
    drafter = build_drafter(chosen, replace(host, nodes=hub_of(chosen, target)), config)
    assert drafter is not None and drafter.executor is not None
    end = time.monotonic() + 60
    while not drafter.executor.present:
        assert time.monotonic() < end, "no drafter after a minute"
        time.sleep(0.05)
    return drafter


class Rounds:
    """The rounds of one drafter with some sequences."""

    def __init__(self, drafter: Drafter, texts: list[list[int]]) -> None:
        self.drafter, self.texts = drafter, [list(text) for text in texts]
        self.prompts = [len(text) for text in texts]
        self.ids = [f"{secrets.token_hex(4)}-{number}" for number in range(len(texts))]
        self.params = SamplingParams(temperature=0)
        self.seconds: list[float] = []
        self.overhead: list[float] = []

    def run(self) -> None:
        """One round."""
        executor = self.drafter.executor
        assert executor is not None
        contexts = [
            DraftContext(id, text, length, self.params, 0, StreamKind.TARGET)
            for id, text, length in zip(self.ids, self.texts, self.prompts, strict=True)
        ]
        executor.submit("free", ["none"])  # reads what was said since
        busy, started = executor.busy, time.perf_counter()
        drafts = executor.submit("propose", contexts, [DraftBudget(LENGTH, LENGTH)] * len(contexts)).result(10.0)
        seconds = time.perf_counter() - started
        found, commits = {draft.id: draft.tokens for draft in drafts}, []
        for id, text in zip(self.ids, self.texts, strict=True):
            tokens = (*found.get(id, ())[:2], 5)
            commits.append(Commit(id, len(text), tokens, tuple(range(len(tokens) - 1)), len(text)))
            text += tokens
        executor.submit("commit", commits)
        time.sleep(0.002)  # the commits are read before the next round
        executor.submit("free", ["none"])
        self.seconds.append(seconds)
        self.overhead.append(seconds - (executor.busy - busy))

    def close(self) -> None:
        """End the drafter."""
        self.drafter.free(self.ids)
        self.drafter.close()


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--drafters", nargs="+", choices=list(DRAFTERS), default=list(DRAFTERS))
    options = parser.parse_args()
    set_threads(1)
    tokenizer = load_tokenizer(resolve("zoo"))
    table, rows = Table("drafter", "batch", "executor", "ms per round", "ms overhead", "lowest tenth"), []
    for method in options.drafters:
        for batch in options.batches:
            texts = [tokenizer.encode(text)[:200] for text in prompts("code", batch)]
            for name, figures in measure(method, texts, options.rounds).items():
                table.add_row(method, str(batch), name, *(f"{1e3 * value:.2f}" for value in figures.values()))
                rows.append({"drafter": method, "batch": batch, "executor": name, **figures})
    Console().print(table)
    print(write("node_overhead", {"length": LENGTH, "rounds": options.rounds, "rows": rows}))


def measure(method: str, texts: list[list[int]], rounds: int) -> dict[str, dict[str, float]]:
    """By executor: the medians of a round and of the overhead, and the overhead that a tenth of the rounds is below."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder)
        make_keys(keys, ["node"])
        plain, secret = free_address(), free_address()
        with node_process(plain, method, None), node_process(secret, method, keys):
            places: dict[str, dict[str, Any]] = {
                "process": {"drafter_executor": "process"},
                "node": {"drafter_executor": "node", "drafter_nodes": {"bind": plain}},
                "node, encrypted": {
                    "drafter_executor": "node",
                    "drafter_nodes": {"bind": secret, "keys": str(keys)},
                },
            }
            running = {name: Rounds(build(method, **place), texts) for name, place in places.items()}
            for _ in range(rounds):
                for each in running.values():
                    each.run()
            for each in running.values():
                each.close()
    skipped = rounds // 5  # caches and prompts
    return {
        name: {
            "seconds": median(each.seconds[skipped:]),
            "overhead": median(each.overhead[skipped:]),
            "overhead_low": float(np.quantile(each.overhead[skipped:], 0.1)),
        }
        for name, each in running.items()
    }


if __name__ == "__main__":
    main()
