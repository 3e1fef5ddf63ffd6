"""CoSine on drafter nodes with injected speeds: baselines, and CoSine without each of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.papers.common import How, Row, Section
from benchmarks.papers.sources import Found, Results, Source

NODES = ("cosine_nodes_low", "cosine_nodes")  # six requests, and twenty-four
SOURCES = {
    6: Source("cosine_nodes_low", "python -m benchmarks.cosine_nodes --requests 6", How.EMULATED),
    24: Source("cosine_nodes", "python -m benchmarks.cosine_nodes", How.EMULATED),
}
WHOLE = "CoSine, 4 nodes"
BASELINES = {
    "SpecInfer, 4 nodes": ("SpecInfer", "1.31 to 1.62× throughput (LLaMA pair)"),
    "PipeInfer": ("PipeInfer", "1.24 to 1.46× throughput (LLaMA pair)"),
    "one drafter": ("one drafter in turn (vanilla)", ""),
    "no drafts": ("no drafts (vLLM)", "3.15 to 4.71× throughput (LLaMA pair)"),
}
PARTS = {
    "without routing": "29 to 33% less throughput; at 8 devices 1.18 against 1.72",
    "without fusion": "17 to 34% less throughput; at 8 devices 1.13 against 1.72",
    "without pipelining": "",
    "drafting ahead": "",
    "fusion token by token": "",
}
COUNTS = {1: "CoSine, 1 node", 2: "CoSine, 2 nodes", 4: WHOLE, 8: "CoSine, 8 nodes"}


@dataclass(frozen=True, slots=True)
class Nodes:
    """Variants of one stored file."""

    found: Found

    def value(self, figure: str, variant: str) -> float:
        """One figure.

        Raises:
            KeyError: the variant was not run.
        """
        return float(self.found["variants"][variant][figure])

    def over(self, other: str, variant: str = WHOLE) -> float:
        """Throughput of a variant over that of another."""
        return self.value("tokens_per_second", variant) / self.value("tokens_per_second", other)

    def both(self, other: str) -> str:
        """How many times the throughput of another system, and by how much the latency differs."""
        latency = self.value("mean_latency", WHOLE) / self.value("mean_latency", other) - 1
        return f"{self.over(other):.2f}× throughput, {latency:+.0%} latency"

    def lost(self, variant: str) -> str:
        """Change of throughput and acceptance length without a part."""
        length = (1 + self.value("accepted_per_draft", variant)) / (1 + self.value("accepted_per_draft", WHOLE)) - 1
        return f"{self.over(WHOLE, variant) - 1:+.0%} throughput, {length:+.0%} acceptance length"

    def scaled(self, variant: str) -> str:
        """Acceptance length, and throughput over one drafter in turn."""
        length = 1 + self.value("accepted_per_draft", variant)
        return f"acceptance length {length:.2f}, {self.over('one drafter', variant):.2f}× one drafter in turn"


def section(results: Results) -> Section:
    """Figures 6(a) and 6(c), the ablation, and the acceptance by nodes."""
    rows: list[Row] = []
    for requests, source in SOURCES.items():
        at = f"{requests} requests"
        rows += [
            results.row(f"CoSine over {words}, {at}", said, source, lambda f, name=name: Nodes(f).both(name))
            for name, (words, said) in BASELINES.items()
        ]
        rows += [
            results.row(f"{name}, {at}", said, source, lambda f, name=name: Nodes(f).lost(name))
            for name, said in PARTS.items()
        ]
        rows += [
            results.row(
                f"{count} cooperative node{'s' if count > 1 else ''}, {at}",
                "acceptance improves with the nodes, without numbers",
                source,
                lambda f, name=name: Nodes(f).scaled(name),
            )
            for count, name in COUNTS.items()
        ]
    return Section(
        "Figures 6(a) and 6(c), ablation and second figure 6: drafters on nodes, emulated",
        tuple(rows),
        "Nodes are processes of the zoo's drafters. Target and nodes compute and then sleep to injected times. A "
        "forward of the target takes 50 ms and 0.25 ms a token, a draft step of a node 8 ms. Chains and trees, "
        "SpecInfer's too, have at most four tokens in all; elsewhere trees have eight or ten. Decoding is greedy. "
        "CoSine is `fuse` with routing `hedge` (arXiv 2510.20064), pipelined, which halves the target's batch; the "
        "paper's adaptive speculation (algorithm 2) is left out. Routing `all` stands for no routing, one drafter per "
        "request for no fusion. With eight nodes each drafter has two, which share its requests, so eight nodes draft "
        "no other tokens than four. All variants wrote the same texts. Throughput counts one batch until its last "
        "request ends; latency is the mean over requests. The paper's first part is the whole cooperative generation, "
        "which is more than routing. Each variant ran once, so the figures have no intervals.",
    )
