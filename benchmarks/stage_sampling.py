"""Measures what sampling in the last stage brings on a link of limited bandwidth.

Run ``python -m benchmarks.stage_sampling``. Two stages of a random Llama are processes; ``--bandwidth`` limits the link
between the stages and the link to the engine. The last stage returns tokens for plain requests. A request with
``logit_bias`` needs its logits, and a bias of 0 changes no token. So the same requests with this bias show the time of
logits on the link. The drafter replays stored outputs with mistakes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import write
from benchmarks.dsd import write_model
from benchmarks.papers.dsd_nodes import ALPHA, WINDOW
from cospec import SamplingParams
from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.assembly.sharding import load_target
from cospec.config import EngineConfig, LinkConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.distributed.model import ShardedModel
from cospec.drafters.synthetic import SyntheticDrafter
from cospec.models.loading import LoadOptions
from cospec.text.input_processor import make_requests

KINDS: dict[str, Any] = {"tokens": None, "logits": {0: 0.0}}  # ``logit_bias`` of the requests


def run(engine: Engine, target: ShardedModel, params: SamplingParams, given: argparse.Namespace) -> dict[str, float]:
    """Return milliseconds per token, and bytes from the last stage per window, after the first tokens."""
    vocab_size = given.vocab_size
    for number in range(given.requests):
        prompt = [(17 * number + place) % vocab_size for place in range(8)]
        for request in make_requests(f"{time.monotonic()}-{number}", prompt, params):
            engine.add(request)
    engine.step()
    written, started = 0, time.perf_counter()
    steps, sent = engine.metrics().steps, target.pipeline.result_bytes
    while engine.has_work:
        written += sum(len(event.tokens) for event in engine.step())
    seconds, windows = time.perf_counter() - started, engine.metrics().steps - steps
    return {
        "ms_per_token": 1e3 * seconds / written,
        "bytes_per_window": (target.pipeline.result_bytes - sent) / windows,
        "tokens_per_window": written / windows,
    }


def measure(target: ShardedModel, temperature: float, given: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return the medians of both kinds of requests, which alternate."""
    speculative = SpeculativeConfig(
        method="synthetic", num_speculative_tokens=WINDOW, policy="fixed", acceptance_method="match"
    )
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    engines = {
        kind: Engine(
            assemble(target, SyntheticDrafter((ALPHA,), 0.0, given.vocab_size), speculative, EngineConfig(), TextInfo())
        )
        for kind in KINDS
    }
    for number in range(given.repeats + 1):
        for kind, bias in KINDS.items():
            params = SamplingParams(
                temperature=temperature, max_tokens=given.tokens, ignore_eos=True, seed=1, logit_bias=bias
            )
            found = run(engines[kind], target, params, given)
            if number:  # the first run stores the outputs
                runs[kind].append(found)
    return {kind: {name: median(each[name] for each in own) for name in own[0]} for kind, own in runs.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab-size", type=int, default=32000)
    parser.add_argument("--bandwidth", type=float, default=100e6 / 8, help="bytes per second")
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), given.hidden, given.vocab_size)
        options = LoadOptions(device="cpu", dtype="float32", cache_bytes=64 << 20)
        config = EngineConfig(pipeline_parallel_size=2, threads=1)
        target, close = load_target(config, [(folder, options)], options)
        assert isinstance(target, ShardedModel)
        try:
            for name, limit in (("limited", given.bandwidth), ("local", None)):
                target.pipeline.set_links([LinkConfig(bandwidth=limit)] * 2)
                for temperature in (0.0, 0.8):
                    rows.append(
                        {"link": name, "temperature": temperature, "found": measure(target, temperature, given)}
                    )
        finally:
            close()
    table = Table("link", "temperature", "returned", "ms/token", "bytes/window", "kept", "speed", box=None)
    for row in rows:
        for kind, found in row["found"].items():
            speed = row["found"]["logits"]["ms_per_token"] / found["ms_per_token"]
            table.add_row(
                row["link"], f"{row['temperature']:g}", kind, f"{found['ms_per_token']:.2f}",
                f"{found['bytes_per_window']:,.0f}", f"{found['tokens_per_window']:.2f}", f"{speed:.2f}",
            )  # fmt: skip
    Console().print(table)
    write("stage_sampling", {**vars(given), "acceptance": ALPHA, "window": WINDOW, "rows": rows})


if __name__ == "__main__":
    main()
