"""Compare the speed of this checkout with another checkout, offline and over HTTP.

Run ``python -m benchmarks.same_speed CHECKOUT``. Both checkouts need a built native library. Every cell is one
configuration at one load. Each checkout serves each cell from a process of its own; the two processes take turns with
the same prompts, in random order. ``--restarts`` starts new processes in random order, since two processes of the same
code differ by some percent. A ratio is the time of this checkout over the time of the other checkout: the median over
all turns of the ratios of one turn, with a 95% bootstrap interval that resamples the turns. Below 1, this checkout is
faster.

* ``offline``: ``LLM.generate`` in closed loops of 1 and 8 requests, as ``bench compare`` and ``benchmarks.overhead``.
  Earlier turns use all pages of the KV cache, so that requests get pages of ended requests, as in a running server.
* ``http``: ``cospec serve`` under Poisson arrivals, as ``benchmarks.load``; the time is the mean latency of a turn.
* ``overhead``: ``benchmarks.overhead`` of both checkouts; the time of a step, and its part outside of the forwards.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, ROOT, Samples, prompts, write
from benchmarks.same_outputs import commit, environment, named, server

DRAFTER = {"method": "draft_model", "model": "zoo:drafter"}
POOLS: Mapping[str, Mapping[str, Any]] = {
    f"pool {combiner}": {
        "method": "pool",
        "combiner": combiner,
        "num_speculative_tokens": 4,
        "drafters": [
            {"name": name, "method": "draft_model", "model": f"zoo:{name}"}
            for name in ("drafter", "code", "math", "prose")
        ],
    }
    for combiner in ("vote", "union", "fuse", "mix")
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "off": {"method": "off"},
    "k=4": DRAFTER | {"num_speculative_tokens": 4},
    "auto": DRAFTER | {"num_speculative_tokens": "auto"},
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "suffix": {"method": "suffix", "num_speculative_tokens": 4},
    **POOLS,
}
OVER_HTTP = ("off", "k=4", "auto")
LOADS = ((1, 0.0), (8, 0.0), (8, 0.8))  # requests at once, temperature
FILLING = 6  # turns of eight requests that use all pages of the KV cache once
PAUSE = 0.3  # seconds before each turn: torch's threads of the other process spin for 0.2 s after their last work
WORKER = """
import json, sys, time
from cospec import LLM, SamplingParams
config = json.loads(sys.argv[1])
llm = LLM("zoo", config, max_num_seqs=8, kv_cache_memory_bytes=1 << 27)
print("READY", flush=True)
for line in sys.stdin:
    given = json.loads(line)
    params = SamplingParams(max_tokens=given["tokens"], ignore_eos=True, temperature=given["temperature"], seed=7)
    started = time.perf_counter()
    llm.generate(given["prompts"], params)
    print("TOOK", time.perf_counter() - started, flush=True)
"""


@dataclass
class Worker:
    """One process of one checkout with one configuration."""

    process: subprocess.Popen[str]

    def ask(self, job: Mapping[str, Any]) -> float:
        """Return the seconds that the process took for a job."""
        assert self.process.stdin is not None
        time.sleep(PAUSE)
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return float(self.read("TOOK"))

    def read(self, word: str) -> str:
        """Return the rest of the next line that begins with ``word``."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line[len(word) :]
        raise SystemExit("a process of a checkout ended; its error is printed above")


@contextmanager
def worker(checkout: Path, config: Mapping[str, Any]) -> Iterator[Worker]:
    """A process that imports cospec from ``checkout``."""
    command = [sys.executable, "-c", WORKER, json.dumps(config)]
    process = subprocess.Popen(
        command, env=environment(checkout), cwd=checkout, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        found = Worker(process)
        found.read("READY")
        yield found
    finally:
        process.kill()
        process.wait()


@dataclass
class Cells:
    """Seconds of both checkouts by cell."""

    samples: dict[str, Samples] = field(default_factory=dict)

    def add(self, cell: str, ours: float, theirs: float) -> None:
        """Add one turn."""
        seconds = self.samples.setdefault(cell, Samples({"ours": [], "theirs": []})).seconds
        seconds["ours"].append(ours)
        seconds["theirs"].append(theirs)

    def rows(self) -> list[dict[str, Any]]:
        """Return the ratio of each cell with its interval."""
        found = []
        for cell, samples in self.samples.items():
            ratio, low, high = samples.ratio("ours", "theirs")
            turns = len(samples.seconds["ours"])
            found.append({"cell": cell, "ratio": ratio, "low": low, "high": high, "turns": turns})
        return found


def offline(cells: Cells, checkouts: Mapping[str, Path], options: argparse.Namespace) -> None:
    """Closed loops of 1 and 8 requests, greedy and sampled."""
    shuffler = random.Random(0)
    texts = [text[:400] for domain in DOMAINS for text in prompts(domain, 16)]
    for name in options.configs:
        for _ in range(options.restarts):
            with ExitStack() as stack:
                started = shuffler.sample(list(checkouts.items()), len(checkouts))
                workers = {who: stack.enter_context(worker(path, CONFIGS[name])) for who, path in started}
                for turn in range(-FILLING, options.turns // options.restarts):
                    for batch, temperature in LOADS if turn >= 0 else LOADS[1:2]:
                        chosen = shuffler.sample(texts, batch)
                        job = {"prompts": chosen, "tokens": options.tokens, "temperature": temperature}
                        order = shuffler.sample(list(workers), len(workers))
                        took = {who: workers[who].ask(job) for who in order}
                        if turn >= 0:
                            cells.add(f"offline, {name}, batch {batch}, temperature {temperature}", **took)


def over_http(cells: Cells, checkouts: Mapping[str, Path], options: argparse.Namespace) -> None:
    """Poisson arrivals at each rate; both servers run, and one of them is asked at a time."""
    shuffler = random.Random(0)
    for name in (name for name in OVER_HTTP if name in options.configs):
        for _ in range(options.restarts):
            with ExitStack() as stack:
                urls = {
                    who: stack.enter_context(server(path, dict(CONFIGS[name]), options.port + number))
                    for number, (who, path) in enumerate(shuffler.sample(list(checkouts.items()), len(checkouts)))
                }
                for turn in range(-1, options.turns // options.restarts):
                    for rate in options.rates:
                        seed = shuffler.randrange(1 << 30)
                        order = shuffler.sample(list(urls), len(urls))
                        took = {who: latency(urls[who], rate, seed, options) for who in order}
                        if turn >= 0:
                            cells.add(f"http, {name}, {rate:g} requests/s", **took)


def overhead(cells: Cells, checkouts: Mapping[str, Path], options: argparse.Namespace) -> None:
    """Milliseconds of a step and of its part outside of the forwards; each turn starts a process of each checkout."""
    shuffler, name = random.Random(0), "unfinished_same_speed"
    for _ in range(options.turns):
        found: dict[str, list[dict[str, Any]]] = {}
        for who in shuffler.sample(list(checkouts), len(checkouts)):
            path, stored = checkouts[who], checkouts[who] / "benchmarks" / "results" / f"{name}.json"
            command = [sys.executable, "-m", "benchmarks.overhead", "--repeats", "3", "--name", name]
            subprocess.run(command, env=environment(path), cwd=path, stdout=subprocess.DEVNULL, check=True)
            found[who] = json.loads(stored.read_text(encoding="utf-8"))["rows"]
            stored.unlink()
        for ours, theirs in zip(found["ours"], found["theirs"], strict=True):
            cell = f"overhead, {ours['system']}, batch {ours['batch']}, temperature {ours['temperature']}"
            cells.add(f"{cell}, step", ours["round_ms"], theirs["round_ms"])
            cells.add(f"{cell}, engine", ours["engine_ms"], theirs["engine_ms"])


def latency(url: str, rate: float, seed: int, options: argparse.Namespace) -> float:
    """Return the mean latency of a turn's requests in seconds, each from its due time."""
    draw = np.random.default_rng(seed)
    count = max(4, round(rate * options.seconds))
    due, texts = np.cumsum(draw.exponential(1 / rate, count)), [t[:400] for d in DOMAINS for t in prompts(d, 16)]
    time.sleep(PAUSE)
    jobs = [(float(at), texts[draw.integers(len(texts))], int(draw.integers(16, 49))) for at in due]
    started = time.monotonic()

    def call(client: httpx.Client, at: float, text: str, tokens: int) -> float:
        time.sleep(max(0.0, started + at - time.monotonic()))
        body = {"prompt": text, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        client.post(f"{url}/v1/completions", json=body, timeout=120).raise_for_status()
        return time.monotonic() - started - at

    with httpx.Client() as client, ThreadPoolExecutor(len(jobs)) as threads:
        return float(np.mean([each.result() for each in [threads.submit(call, client, *job) for job in jobs]]))


MODES = {"offline": offline, "http": over_http, "overhead": overhead}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the other checkout, with a built native library")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    parser.add_argument("--configs", nargs="*", default=list(CONFIGS), choices=list(CONFIGS))
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rates", type=float, nargs="*", default=[2.0, 8.0])
    parser.add_argument("--seconds", type=float, default=2.0, help="of arrivals in one turn")
    parser.add_argument("--port", type=int, default=18483)
    parser.add_argument("--name", default="same_speed")
    options = parser.parse_args()
    checkouts, cells = {"ours": ROOT, "theirs": options.checkout.resolve()}, Cells()
    for mode in options.modes:
        MODES[mode](cells, checkouts, options)
    table = Table("cell", "turns", "this checkout / other checkout")
    for row in cells.rows():
        table.add_row(row["cell"], str(row["turns"]), f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})")
    Console(width=120).print(table)
    sys.argv = named(options.checkout)
    settings = {name: value for name, value in vars(options).items() if name != "checkout"}
    found = {"other_commit": commit(checkouts["theirs"]), "options": settings, "rows": cells.rows()}
    print("written to", write(options.name, found))


if __name__ == "__main__":
    main()
