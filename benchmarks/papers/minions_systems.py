"""Minions against other systems: servers (figures 8 and 9) and SpecInfer (figure 13)."""

from __future__ import annotations

from benchmarks.papers.common import Row, Section
from benchmarks.papers.not_run import not_run
from benchmarks.papers.pools import POOL, Pool
from benchmarks.papers.scenarios import Runs, scenario
from benchmarks.papers.sources import Found, Results, Source

VOTE = "vote all"  # every drafter drafts for every request
LENGTHS = scenario("minions-fig12")
DEFAULT = "s=4"  # the paper's default length
MODES = {mode: scenario(f"cosine-{mode}") for mode in ("low", "high", "fluctuating")}
SERVERS = {
    batch: Source(f"servers_batch{batch}", f"python -m benchmarks --run servers_batch{batch}") for batch in (1, 8)
}
REASON = "No model of 13 or 70 billion parameters was run, and neither TensorRT-LLM, FastGen nor TGI."
PAPERS = {
    "Figure 8, latency, Llama2-70B": "vLLM 3.81, 4.06, 3.98× (on average 3.10, 2.86, 2.70×); TensorRT-LLM 3.11, 2.91, "
    "2.84×, below 1 on some sets at batch 32 (model not named); FastGen 7.06, 4.48, 5.62×; TGI 3.70, 3.99, 3.89×",
    "Figure 8, latency, OPT-13B": "vLLM 4.22, 4.33, 3.75×; TensorRT-LLM 2.21, 2.78, 1.99×, below 1 on some sets at "
    "batch 32 (model not named); FastGen 4.99, 4.74, 4.71×; TGI 5.70, 5.88, 5.18×",
    "Figure 9, throughput, Llama2-70B": "vLLM 3.71, 3.95, 3.88× (on average 3.02, 2.76, 2.69×); TensorRT-LLM 3.00, "
    "2.71, 2.71×, below 1 on some sets at batch 32; FastGen 6.84, 4.39, 5.25×; TGI 3.60, 3.88, 3.81×",
    "Figure 9, throughput, OPT-13B": "vLLM 4.18, 4.17, 3.83×; TensorRT-LLM 2.17, 2.64, 2.03×, below 1 on some sets at "
    "batch 32; FastGen 5.01, 4.66, 4.78×; TGI 5.65, 5.61, 5.31×",
}


def servers(results: Results) -> Section:
    """Figures 8 and 9."""
    rows = [
        results.row(
            f"Speed of the cospec server over vLLM on a CPU, {batch} request{'s' if batch > 1 else ''} at a time",
            "",
            source,
            over_vllm,
        )
        for batch, source in SERVERS.items()
    ]
    rows += [not_run(what, said, REASON) for what, said in PAPERS.items()]
    return Section(
        "Figures 8 and 9: against serving systems",
        tuple(rows),
        "The paper's figures are maxima, where no average is named, on the finance, chatbot and dialogue sets. Ours "
        "are of the small target in float32 on two cores, clients included, with the server's defaults. So they "
        f"compare servers, and not Minions' parts. vLLM runs without speculation. {unsped(results)}`sh "
        "benchmarks/other_servers.sh` starts the other servers before the command, and `cospec serve zoo --port 8102 "
        "--dtype float32 --no-enable-prefix-caching` ours. `benchmarks/report/servers.md` has all rows.",
    )


def unsped(results: Results) -> str:
    """What of the rows is speculation's; empty where the servers were not compared."""
    found = [results.sentence(source, lambda found: over_vllm(found, "off")) for source in SERVERS.values()]
    if not all(found):
        return ""
    return f"Without it cospec has {found[0]} vLLM's speed at 1 request, and {found[1]} at 8. "


def over_vllm(found: Found, system: str = "cospec") -> str:
    """Speed of the server, time per token; of ``off`` without speculation.

    Raises:
        KeyError: the servers were not compared.
    """
    for row in found["ratios"]:
        if (row["system"], row["baseline"], row["cost"]) == (system, "vllm", "time_per_token"):
            return "{ratio:.2f}× ({low:.2f} to {high:.2f})".format_map(row)
    raise KeyError("vllm")


def specinfer(results: Results) -> Section:
    """Figure 13."""
    rows: list[Row] = [
        results.row(
            "Throughput of vote over SpecInfer, batch 8",
            "OPT-13B, batch 32: 7.6 to 14.5×, of an implementation that the authors suspect of faulty operators",
            POOL,
            lambda found: Pool(found).speed(VOTE, "union all"),
        )
    ]
    rows += [
        results.row(
            f"Latency of SpecInfer over that of vote, {mode} arrivals",
            "OPT-13B, batch 32: 6.34 to 8.89×",
            source,
            lambda found: f"{Runs(found).latency('specinfer') / Runs(found).latency('cosine'):.2f}×",
            "another load: the paper has a fixed batch of 32; a 70B target with assumed times, recorded drafts; "
            "the row of CoSine's figure 7 again",
        )
        for mode, source in MODES.items()
    ]
    return Section(
        "Figure 13: against SpecInfer",
        tuple(rows),
        "SpecInfer stands for trees of all drafters in turn with verification. The implementation that the paper "
        "measured was not run here. Measured pools have four models and prompt lookup. The simulation is that of "
        "CoSine's figure 7: its vote is pipelined, as Minions'. Minions has neither routing `hedge` nor lengths by "
        "goodput.",
    )
