"""Measures a pool on drafter nodes with slow drafters: 1, 2 and 4 nodes, and CoSine's parts left out one by one.

Run ``python -m benchmarks.cosine_nodes``, which takes about five minutes on two cores. A node computes its drafts and
then sleeps, so that each draft token takes ``--token-ms``: the speed of a small machine, without its processor. The
target is the zoo's on one core. All variants write the same requests, and the outputs must be equal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, ROOT, prompts, write
from benchmarks.node_overhead import free_address
from cospec import LLM, SamplingParams
from cospec.assembly.nodes import build_offers
from cospec.cluster.nodes.worker import NodeOptions, OfferedDrafter, run_node
from cospec.config import EngineConfig
from cospec.core.plugins import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext

MODELS = {"drafter": "zoo:drafter", "code": "zoo:code", "math": "zoo:math", "prose": "zoo:prose"}
WHOLE: dict[str, Any] = {"combiner": "fuse", "routing": "hedge", "execution_mode": "pipelined"}
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "no drafts": (0, {}),
    "1 node": (1, WHOLE),
    "2 nodes": (2, WHOLE),
    "4 nodes": (4, WHOLE),
    "4 nodes, without routing": (4, {**WHOLE, "routing": "all"}),
    "4 nodes, without fusion": (4, {**WHOLE, "combiner": "vote"}),
    "4 nodes, without pipelining": (4, {**WHOLE, "execution_mode": "sequential"}),
    "4 nodes, one drafter per request": (4, {**WHOLE, "at_most": 1}),
}


class Slow(Drafter):
    """A drafter that takes at least some seconds per draft token."""

    samples, drafts_ahead, reads_states, learns = True, True, False, True

    def __init__(self, drafter: Drafter, seconds: float) -> None:
        self.name, self._drafter, self._seconds = drafter.name, drafter, seconds

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        started = time.monotonic()
        drafts = self._drafter.propose(contexts, budgets)
        due = started + self._seconds * max([budget.depth for budget in budgets], default=0)
        time.sleep(max(0.0, due - time.monotonic()))
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None:
        self._drafter.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        self._drafter.free(ids)


def run_slow_node(address: str, name: str, seconds: float) -> None:
    """Serve one drafter in this process."""
    drafter = {"name": name, "method": "draft_model", "model": MODELS[name]}
    (offer,) = build_offers(EngineConfig.build({"model": "zoo", "threads": 1}), [drafter])
    slow = OfferedDrafter(offer.name, offer.method, Slow(offer.drafter, seconds), offer.vocab_size)
    run_node(NodeOptions(address, name), [slow], lambda sentence: None)


@contextmanager
def nodes(address: str, names: Sequence[str], token_ms: float) -> Iterator[None]:
    """Slow nodes in processes of their own."""
    command = [sys.executable, "-m", "benchmarks.cosine_nodes", "--token-ms", str(token_ms), "--node", address]
    running = [subprocess.Popen([*command, name]) for name in names]
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(20)


def run_variant(count: int, pool: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Write all requests with one variant."""
    texts = [text for domain in DOMAINS for text in prompts(domain, options.requests // len(DOMAINS))]
    params, names, address = SamplingParams(temperature=0, max_tokens=options.tokens), [*MODELS][:count], free_address()
    speculative: dict[str, Any] = {"method": "off"}
    if count:
        members = [{"name": name, "method": "draft_model", "executor": "node"} for name in names]
        speculative = {
            "method": "pool",
            "drafters": members,
            "num_speculative_tokens": options.length,
            "drafter_executor": "thread",
            "drafter_nodes": {"bind": address},
            **pool,
        }
    with nodes(address, names, options.token_ms), LLM("zoo", speculative, threads=1, max_num_seqs=len(texts)) as llm:
        end = time.monotonic() + 90
        while sum(node["state"] == "ready" for node in llm.engine.metrics().nodes) < count:
            assert time.monotonic() < end, "the nodes do not join"
            time.sleep(0.1)
        llm.generate(texts[:2], params)
        started = time.monotonic()
        found = llm.generate(texts, params)
        seconds = time.monotonic() - started
        engine = llm.engine.metrics()
    tokens = sum(len(each.outputs[0].token_ids) for each in found)
    return {
        "tokens_per_second": tokens / seconds,
        "mean_latency": sum(each.stats.e2e or 0.0 for each in found) / len(found),
        "accepted_per_draft": sum(each.stats.accepted for each in found) / max(1, sum(e.stats.drafts for e in found)),
        "late": sum(node["late"] for node in engine.nodes),
        "outputs": [each.outputs[0].token_ids for each in found],
    }


def stored(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Variants that an earlier command measured with the same settings."""
    path = ROOT / "benchmarks" / "results" / "cosine_nodes.json"
    if not path.exists():
        return {}
    found = json.loads(path.read_text("utf-8"))
    return dict(found["variants"]) if all(found[key] == value for key, value in settings.items()) else {}


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--token-ms", type=float, default=4.0)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--node", nargs=2, metavar=("ADDRESS", "NAME"), help="serve as a node")
    options = parser.parse_args()
    if options.node:
        address, name = options.node
        run_slow_node(address, name, options.token_ms / 1000)
        return
    table, rows, wanted = Table("variant", "tokens/s", "mean latency s", "accepted per draft", "late"), {}, None
    for name in options.only:
        count, pool = VARIANTS[name]
        row = run_variant(count, pool, options)
        outputs = row.pop("outputs")
        wanted = wanted or outputs
        row["same_outputs"] = outputs == wanted
        rows[name] = row
        speed, latency, accepted = row["tokens_per_second"], row["mean_latency"], row["accepted_per_draft"]
        table.add_row(name, f"{speed:.0f}", f"{latency:.2f}", f"{accepted:.2f}", str(row["late"]))
    Console().print(table)
    settings = {key: getattr(options, key) for key in ("token_ms", "length", "requests", "tokens")}
    print(write("cosine_nodes", {**settings, "variants": {**stored(settings), **rows}}))


if __name__ == "__main__":
    main()
