"""Measures pools on drafter nodes whose speeds are injected, against baselines: CoSine, and its parts left out.

Run ``python -m benchmarks.cosine_nodes``, which takes about six minutes; ``--requests 6 --name cosine_nodes_low`` for
a low load. Figures are medians of ``--repeats``, each with new processes. The target and the nodes compute, and then
sleep until the injected time of a machine of their own has passed. So two cores stand for several machines. A forward
of the target takes ``--target-ms`` and ``--row-ms`` for each token of the batch; a node takes ``--token-ms`` for each
draft step. Processors that compute longer than this need longer times: ``--target-ms 100 --row-ms 0.5 --token-ms 16``.
``--link-delay`` and ``--link-jitter`` add milliseconds to each message between the verifier and the nodes, in each
direction. With eight nodes, each drafter has two nodes, which share the requests. ``--link-delay 0 5 20 --only "CoSine,
4 nodes" "without pipelining" "after outcomes" "one drafter" PipeInfer --repeats 1 --name cosine_nodes_links`` takes
about four minutes. ``--only goodput "goodput without adaptive participation" --warm-tokens 64 --name
cosine_nodes_adaptive`` leaves out the choice of the number of drafters; ``--only auto --warm-tokens 400`` lets the
engine choose the mode. ``--stages 2`` has a target of two pipeline stages in processes of their own, with two steps in
flight. A request that runs alone then has several windows in flight, and stages skip refuted windows: PipeInfer's early
exit, for which ``--batch 1`` writes one request after the other. *Every window* submits also windows ahead that are
likely to be refuted. All variants write the same requests, and the outputs must be equal.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import product
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, prompts, stored, write
from benchmarks.node_overhead import free_address
from benchmarks.slow_target import add_times, slow_llm
from benchmarks.step_times import StepTimes
from cospec import SamplingParams
from cospec.assembly.drafters import set_threads
from cospec.assembly.drafters_of_node import build_offers
from cospec.cluster.nodes.worker import NodeOptions, OfferedDrafter, run_node
from cospec.config import EngineConfig, LinkConfig
from cospec.core.drafter_capabilities import TokenScores
from cospec.core.interfaces import ExecutionMode
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.interfaces import NextLogits
from cospec.execution.windows_in_flight import WindowsInFlight

MODELS = {"drafter": "zoo:drafter", "code": "zoo:code", "math": "zoo:math", "prose": "zoo:prose"}
WHOLE: dict[str, Any] = {"combiner": "fuse", "routing": "hedge", "execution_mode": "pipelined"}
ONE = {**WHOLE, "execution_mode": "sequential"}
AHEAD = {**ONE, "execution_mode": "draft-ahead"}
ADAPTIVE = {**WHOLE, "policy": "goodput", "num_speculative_tokens": "auto"}  # fewer or more drafters by load
SHORT_WINDOWS, EVERY_WINDOW = "PipeInfer, windows of 2", "PipeInfer, every window"
COPY = "-copy"  # the end of the name of a second node with the same drafter
VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    "CoSine, 8 nodes": (8, WHOLE),
    "SpecInfer, 8 nodes": (8, {"combiner": "union", "routing": "all", "execution_mode": "sequential"}),
    "without pipelining, 8 nodes": (8, {**WHOLE, "execution_mode": "sequential"}),
    "CoSine, 4 nodes": (4, WHOLE),
    "SpecInfer, 4 nodes": (4, {"combiner": "union", "routing": "all", "execution_mode": "sequential"}),
    "without routing": (4, {**WHOLE, "routing": "all"}),
    "without fusion": (4, {**WHOLE, "at_most": 1}),
    "fusion token by token": (4, {**WHOLE, "token_steps": True}),
    "fusion token by token, in turn": (4, {**WHOLE, "execution_mode": "sequential", "token_steps": True}),
    "mixture token by token": (4, {**WHOLE, "combiner": "mix", "execution_mode": "sequential"}),
    "without pipelining": (4, {**WHOLE, "execution_mode": "sequential"}),
    "drafting ahead": (4, {**WHOLE, "execution_mode": "draft-ahead"}),
    "after outcomes": (4, {**WHOLE, "execution_mode": "draft-for-outcomes"}),
    "auto": (4, {**WHOLE, "execution_mode": "auto"}),
    "after outcomes, vote": (4, {"combiner": "vote", "routing": "hedge", "execution_mode": "draft-for-outcomes"}),
    "after outcomes, 2 nodes": (2, {**WHOLE, "execution_mode": "draft-for-outcomes"}),
    "after outcomes, one drafter": (1, {**WHOLE, "execution_mode": "draft-for-outcomes"}),
    "goodput": (4, ADAPTIVE),
    "goodput without adaptive participation": (4, {**ADAPTIVE, "policy_options": {"choose_drafters": False}}),
    "CoSine, 2 nodes": (2, WHOLE),
    "CoSine, 1 node": (1, WHOLE),
    "one drafter": (1, ONE),
    "PipeInfer": (1, AHEAD),
    SHORT_WINDOWS: (1, {**AHEAD, "num_speculative_tokens": 2}),
    EVERY_WINDOW: (1, AHEAD),
    "no drafts": (0, {}),
}  # fewer and fewer nodes: a node that a verifier refused stays away for a minute
STAGED = (SHORT_WINDOWS, EVERY_WINDOW)  # need ``--stages``
LEARNING = ("auto", "goodput", "goodput without adaptive participation")  # need more ``--warm-tokens``


class Slow(Drafter):
    """A drafter that takes at least some seconds per draft token."""

    samples, drafts_ahead, reads_hidden_states, learns, drafts_for_outcomes = True, True, False, True, True

    def __init__(self, drafter: Drafter, seconds: float) -> None:
        self.name, self._drafter, self._seconds = drafter.name, drafter, seconds
        self.scores_known_tokens, self.is_stepwise = drafter.scores_known_tokens, drafter.is_stepwise

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        with self._lasting(max([budget.depth for budget in budgets], default=0)):
            return self._drafter.propose(contexts, budgets)

    def next_logits(self, contexts: Sequence[DraftContext]) -> NextLogits:
        with self._lasting(1):
            return self._drafter.next_logits(contexts)

    def score_known_tokens(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        with self._lasting(1):
            return self._drafter.score_known_tokens(contexts)

    def commit(self, commits: Sequence[Commit]) -> None:
        self._drafter.commit(commits)

    def free(self, ids: Sequence[str]) -> None:
        self._drafter.free(ids)

    @contextmanager
    def _lasting(self, steps: int) -> Iterator[None]:
        """Work that takes at least the time of ``steps`` draft tokens."""
        due = time.monotonic() + self._seconds * steps
        yield
        time.sleep(max(0.0, due - time.monotonic()))


def run_slow_node(address: str, name: str, seconds: float, link: LinkConfig) -> None:
    """Serve one drafter in this process."""
    offered = name.removesuffix(COPY)
    drafter = {"name": offered, "method": "draft_model", "model": MODELS[offered]}
    (offer,) = build_offers(EngineConfig.build({"model": "zoo", "threads": 1}), [drafter])
    slow = OfferedDrafter(offer.name, offer.method, Slow(offer.drafter, seconds), offer.vocab_size)
    run_node(NodeOptions(address, name, link=link), [slow], lambda sentence: None)


@contextmanager
def nodes(address: str, names: Sequence[str], options: argparse.Namespace, delay: float) -> Iterator[None]:
    """Slow nodes in processes of their own; ``delay`` in milliseconds."""
    speeds = {"--token-ms": options.token_ms, "--link-delay": delay, "--link-jitter": options.link_jitter}
    given = [str(part) for pair in speeds.items() for part in pair]
    command = [sys.executable, "-m", "benchmarks.cosine_nodes", *given, "--node", address]
    running = [subprocess.Popen([*command, name]) for name in names]
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(20)


def speculative_config(count: int, pool: Mapping[str, Any], address: str, length: int) -> dict[str, Any]:
    """The configuration of a variant."""
    if not count:
        return {"method": "off"}
    return {
        "method": "pool",
        "drafters": [{"name": name, "method": "draft_model", "executor": "node"} for name in [*MODELS][:count]],
        "num_speculative_tokens": length,
        "drafter_executor": "thread",
        "drafter_nodes": {"bind": address},
        **pool,
    }


def submit_every_window(mode: ExecutionMode) -> None:
    """Verify each window ahead as soon as it is drafted, however likely earlier windows are to refute it."""
    assert isinstance(mode.windows_ahead, WindowsInFlight), "the target has one stage; see --stages"
    mode.windows_ahead.least_probability = 0.0


def run_variant(name: str, address: str, options: argparse.Namespace) -> dict[str, Any]:
    """Write all requests with one variant, ``options.batch`` at a time."""
    count, pool = VARIANTS[name]
    speculative = speculative_config(count, pool, address, options.length)
    texts = [text for domain in DOMAINS for text in prompts(domain, options.requests // len(DOMAINS))]
    params = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    batch = options.batch or len(texts)
    with slow_llm(speculative, count, batch, options) as (llm, target):
        if name == EVERY_WINDOW:
            submit_every_window(llm.engine.execution_mode)
        llm.generate(texts, replace(params, max_tokens=options.warm_tokens))  # also the times of the nodes
        times = StepTimes(llm.engine)
        before, busy, skipped = llm.engine.metrics().nodes, target.busy, target.skipped
        started = time.monotonic()
        found = [each for at in range(0, len(texts), batch) for each in llm.generate(texts[at : at + batch], params)]
        seconds = time.monotonic() - started
        after, ahead = llm.engine.metrics().nodes, llm.engine.metrics().drafts_ahead
        stats, tokens = [each.stats for each in found], sum(len(each.outputs[0].token_ids) for each in found)
        parts = times.parts(seconds, tokens, stats)
        busy, exits = target.busy - busy, {"windows": times.cancelled(), "skipped": target.skipped - skipped}

    def gained(key: str) -> float:
        return float(sum(node[key] for node in after) - sum(node[key] for node in before))

    return {
        "tokens_per_second": tokens / seconds,
        "mean_latency": sum(each.e2e or 0.0 for each in stats) / len(stats),
        "accepted_per_draft": sum(each.accepted for each in stats) / max(1, sum(each.drafts for each in stats)),
        "target_idle": 1.0 - busy / seconds,
        "nodes_idle": 1.0 - gained("busy_seconds") / (seconds * count) if count else None,
        "late": gained("late"),
        "drafts": sum(each.drafts for each in stats),
        "drafts_ahead": ahead,
        "parts": asdict(parts),
        "exits": exits,
        "outputs": [each.outputs[0].token_ids for each in found],
    }


def middle(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians of several runs of a variant, and the throughput and the latency of each run.

    The parts of a step, whose product is a throughput, are those of the run with the median throughput.
    """
    numbers = [key for key, value in runs[0].items() if isinstance(value, int | float)]
    medians = {key: median([run[key] for run in runs]) for key in numbers}
    each = {key: [run[key] for run in runs] for key in ("tokens_per_second", "mean_latency")}
    typical = sorted(runs, key=lambda run: float(run["tokens_per_second"]))[len(runs) // 2]
    return {**typical, **medians, "repeats": each}


def named(delay: float, jitter: float) -> str:
    """The end of the name of a row with delayed links."""
    if not delay and not jitter:
        return ""
    return f", {delay:g} ms" if not jitter else f", {delay:g} to {delay + jitter:g} ms"


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_times(parser)
    parser.add_argument("--token-ms", type=float, default=8.0)
    parser.add_argument("--length", type=int, default=4)
    parser.add_argument("--link-delay", type=float, nargs="+", default=[0.0], help="ms; rows for each")
    parser.add_argument("--link-jitter", type=float, default=0.0, help="ms at most, added at random")
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--batch", type=int, help="requests at a time; all by default")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--warm-tokens", type=int, default=8, help="before the measurement; 64 for policies that learn")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--name", default="cosine_nodes", help="of the file of results")
    usual = [name for name in VARIANTS if name not in (*LEARNING, *STAGED)]
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), default=usual)
    parser.add_argument("--node", nargs=2, metavar=("ADDRESS", "NAME"), help="serve as a node")
    options = parser.parse_args()
    staged = [name for name in options.only if name in STAGED]
    if staged and options.stages < 2:
        parser.error(f"--only {staged[0]!r} with --stages {options.stages}; allowed is --stages 2 or more")
    if options.node:
        address, name = options.node
        link = LinkConfig(delay=options.link_delay[0] / 1000, jitter=options.link_jitter / 1000)
        run_slow_node(address, name, options.token_ms / 1000, link)
        return
    set_threads(1)
    runs = dict[str, list[dict[str, Any]]]()
    for _, delay in product(range(options.repeats), options.link_delay):
        address = free_address()
        with nodes(address, list(MODELS), options, delay), ExitStack() as copies:
            copies.enter_context(nodes(address, [name + COPY for name in MODELS], options, delay))
            for name in sorted(options.only, key=lambda name: -VARIANTS[name][0]):
                if VARIANTS[name][0] <= len(MODELS):
                    copies.close()
                row = run_variant(name, address, options)
                row |= {"link_delay_ms": delay, "link_jitter_ms": options.link_jitter}
                runs.setdefault(name + named(delay, options.link_jitter), []).append(row)
    wanted = [row.pop("outputs") for each in runs.values() for row in each]
    same = all(outputs == wanted[0] for outputs in wanted)
    rows = {name: middle(each) for name, each in runs.items()}
    Console().print(table(rows))
    kept = ("target_ms", "row_ms", "token_ms", "length", "stages", "requests", "batch", "tokens", "repeats")
    settings = {key: getattr(options, key) for key in kept}
    variants = {**stored(options.name, settings).get("variants", {}), **rows}
    print(write(options.name, {**settings, "same_outputs": same, "variants": variants}))
    raise SystemExit(not same)


def table(rows: Mapping[str, Mapping[str, Any]]) -> Table:
    """One line per variant."""
    made = Table("variant", "tokens/s", "mean latency s", "accepted per draft", "target idle", "nodes idle", "late")
    for name, row in rows.items():
        idle = "" if row["nodes_idle"] is None else f"{row['nodes_idle']:.0%}"
        figures = f"{row['tokens_per_second']:.0f}", f"{row['mean_latency']:.2f}", f"{row['accepted_per_draft']:.2f}"
        made.add_row(name, *figures, f"{row['target_idle']:.0%}", idle, f"{row['late']:.0f}")
    return made


if __name__ == "__main__":
    main()
