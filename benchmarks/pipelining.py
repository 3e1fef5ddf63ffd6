"""Drafting beside verification on this machine: overlap efficiency and throughput of every round, at batch 8 and 16.

Run ``python -m benchmarks.pipelining``. Overlap efficiency is the sum of the seconds that drafter and target worked,
over the seconds that passed: 1 is taking turns without a gap, 2 would be two machines that never wait. On shared cores
two stages that overlap slow each other down, so that their busy seconds grow and throughput need not.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, prompts, write
from cospec import LLM, SamplingParams

ROUNDS = ("sequential", "pipelined", "draft-ahead", "auto")


def measure(llm: LLM, texts: Sequence[str], params: SamplingParams) -> dict[str, float]:
    """One batch to its end: tokens per second and overlap efficiency."""
    before = llm.engine.metrics()
    started = time.perf_counter()
    outputs = llm.generate(texts, params)
    seconds = time.perf_counter() - started
    after = llm.engine.metrics()
    busy = after.draft_seconds - before.draft_seconds + after.target_seconds - before.target_seconds
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"tokens_per_second": tokens / seconds, "overlap": busy / seconds, "seconds": seconds}


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure all rounds by turns, print and store the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="zoo")
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--rounds", nargs="+", default=list(ROUNDS), choices=ROUNDS)
    given = parser.parse_args(arguments)
    speculative = {"method": "draft_model", "num_speculative_tokens": given.length}
    llms = {
        name: LLM(given.model, {**speculative, "round": name}, kv_cache_memory_bytes=256 << 20) for name in given.rounds
    }
    params = SamplingParams(temperature=0.0, max_tokens=given.tokens, ignore_eos=True)
    table = Table("batch", "round", "tokens/s", "against sequential", "overlap", "at work", box=None)
    found: dict[str, Any] = {}
    for batch in given.batches:
        per = -(-batch // len(DOMAINS))
        texts = [text for domain in DOMAINS for text in prompts(domain, per)][:batch]
        rows: dict[str, list[dict[str, float]]] = {name: [] for name in llms}
        for repeat in range(given.repeats + 1):
            for name, llm in llms.items():
                row = measure(llm, texts, params)
                if repeat:  # the first one warms up
                    rows[name].append(row)
        middle = {name: _median(own) for name, own in rows.items()}
        for name, row in middle.items():
            base = middle.get("sequential", row)["tokens_per_second"]
            info = llms[name].engine.round.info
            figures = (
                f"{row['tokens_per_second']:.0f}",
                f"{row['tokens_per_second'] / base:.2f}",
                f"{row['overlap']:.2f}",
            )
            table.add_row(str(batch), name, *figures, f"{info.name}: {info.reason}")
        found[str(batch)] = middle
    Console().print(table)
    write("pipelining", found)
    return found


def _median(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    """The row of median throughput."""
    return sorted(rows, key=lambda row: row["tokens_per_second"])[len(rows) // 2]


if __name__ == "__main__":
    main()
