"""The headline claims of the five papers, each with our figure and a verdict that follows from the figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import claim_figures as ours
from benchmarks.headlines import LOADS

DOUBT = 0.05  # a figure without an interval says nothing this near to 1; the page states the rule
REACHED, SMALLER, LOSS, UNCLEAR = "as the paper", "a smaller gain", "a loss", "no clear difference"
MEASURED, EMULATED, SIMULATED = "measured", "emulated", "simulated"
FIRST = next(iter(LOADS))


@dataclass(frozen=True, slots=True)
class Claim:
    """One headline.

    Attributes:
        said: the paper's range, as factors; above 1 is a gain.
        find: the same factor here, with the ends of its interval where there is one. ``LookupError`` or
            ``FileNotFoundError``: it was not run.
        spread: what follows the figure is the least and the most of several settings, not an interval.
        up_to: the paper claims at most what it says.
        price: what a gain costs here that the paper's gain does not cost.
        comparable: whether both sides are of one kind.
    """

    paper: str
    what: str
    said: tuple[float, float]
    how: str
    find: ours.Find
    spread: bool = False
    up_to: bool = False
    price: str = ""
    comparable: bool = True

    def cells(self) -> tuple[str, ...]:
        """The cells of the table."""
        low, high = self.said
        said = f"{low:.2f}–{high:.2f}×" if low < high else f"{low:g}×" if self.up_to else f"{low:.2f}×"
        said = f"up to {said}" if self.up_to else said
        try:
            found = self.find()
        except (LookupError, FileNotFoundError):
            return self.paper, self.what, said, "", "not run", "not shown"
        form = "[{1:.2f}–{2:.2f}]" if self.spread else "({1:.2f}–{2:.2f})"
        figure = f"{found[0]:.2f}×" + (f" {form.format(*found)}" if len(found) > 1 else "")
        return self.paper, self.what, said, figure, self.how, self.judge(found)

    def judge(self, found: Sequence[float]) -> str:
        """The last cell."""
        if not self.comparable:
            return "not comparable"
        judged = verdict(found, self.said[0])
        return f"a gain, with {self.price}" if self.price and judged in (REACHED, SMALLER) else judged


def verdict(found: Sequence[float], least: float) -> str:
    """What a figure and its interval say of a claim of at least ``least``; the page states the same rule."""
    low, high = (min(found), max(found)) if len(found) > 1 else (found[0] - DOUBT, found[0] + DOUBT)
    if low <= 1.0 <= high:
        return UNCLEAR
    if high < 1.0:
        return LOSS
    return REACHED if found[0] >= least else SMALLER


def claims() -> str:
    """One table."""
    lines = ["| paper | claim | theirs | ours | how | verdict |", "| --- | --- | --- | --- | --- | --- |"]
    lines += ["| " + " | ".join(claim.cells()) + " |" for claim in CLAIMS]
    return "\n".join([*lines, ""])


CLAIMS = (
    *(Claim("SmartSpec", f"latency over no speculation, {rate} rate, {kernels}{', worst run' * (kernels == FIRST)}",
            said, MEASURED, ours.under_load(kernels, place))
      for rate, place, said in (("lowest", 0, (1.2, 3.2)), ("highest", -1, (1.0, 1.0))) for kernels in LOADS),
    Claim("SmartSpec", "latency over the best other length or none, 4 rates in 5 runs", (1.0, 1.0), MEASURED,
          ours.over_best_lengths, spread=True),
    Claim("SmartSpec", "latency over the best other length, worst of these 20", (1.0, 1.0), MEASURED,
          ours.over_best_length),
    Claim("Minions", "vote over one drafter, shared cores", (1.10, 1.60), MEASURED,
          ours.pooled("vote all", "generic")),
    Claim("Minions", "slope over s = 4, machines apart", (1.06, 1.35), SIMULATED,
          ours.throughput("minions-fig12", "slope in turn", "s=4 in turn")),
    *(Claim("Minions", f"slope over s = 4, shared cores, batch {batch}{words}", (1.06, 1.35), MEASURED,
            ours.compared(f"compare_slope_batch{batch}", "slope", "draft-4"))
      for batch, words in ((1, ""), (8, ", both slower than no drafts"))),
    Claim("Minions", "pipeline (32 requests) over turns (16), machines apart", (1.34, 1.55), SIMULATED,
          ours.throughput("minions-fig12", "slope", "slope in turn")),
    Claim("Minions", "pipelines over turns, shared cores", (1.34, 1.55), MEASURED, ours.pipelines, spread=True),
    Claim("CoSine", "throughput of fuse over SpecInfer, shared cores", (1.31, 1.62), MEASURED,
          ours.pooled("fuse hedge", "union all")),
    Claim("CoSine", "throughput over the best baseline, nodes", (1.24, 1.46), EMULATED, ours.on_nodes, spread=True),
    Claim("CoSine", "throughput over plain decoding, batches 1 to 16", (3.15, 4.71), SIMULATED,
          ours.offline("plain"), spread=True),
    Claim("CoSine", "throughput at equal cost", (1.325, 1.325), SIMULATED, ours.at_equal_cost, spread=True, up_to=True),
    Claim("CoSine", "latency at equal cost, except batch 16", (1.302, 1.302), SIMULATED,
          ours.latency_of_baselines, spread=True, up_to=True),
    *(Claim("CoSine", f"latency over SpecInfer, {mode} arrivals", said, SIMULATED, ours.online(mode, "specinfer"))
      for mode, said in (("low", (1.2, 1.5)), ("high", (1.3, 1.6)), ("fluctuating", (1.2, 1.4)))),
    Claim("CoSine", "latency over the fastest other system, these arrivals", (1.2, 1.6), SIMULATED,
          ours.over_fastest, spread=True),
    Claim("DSD", "speed over plain decoding, no links", (1.91, 2.56), MEASURED,
          ours.compared("compare_batch1", "draft-4", "off")),
    Claim("DSD", "speed over plain decoding, 4 and 8 nodes", (1.91, 2.56), EMULATED, ours.over_links,
          spread=True, comparable=False),
    Claim("DSD", "adaptive over ordinary speculation, no clear loss", (1.15, 1.20), MEASURED, ours.relaxed(True),
          up_to=True),
    Claim("DSD", "adaptive over ordinary speculation, any loss", (1.15, 1.20), MEASURED, ours.relaxed(False),
          up_to=True, price="a loss of quality"),
    Claim("CoS", "target and adapter, T = 1, over standard, worse run", (1.34, 1.62), MEASURED,
          ours.blended("weighted-two", 1.0)),
    Claim("CoS", "contrastive, T = 0, over standard, worse run", (1.26, 2.23), MEASURED,
          ours.blended("contrastive", 0.0)),
    Claim("CoS", "contrastive, T = 0, alternating over one proposer", (1.04, 1.16), MEASURED,
          ours.default_over("naive", (0.0,)), spread=True),
    Claim("CoS", "contrastive over plain speculation, both T", (1.01, 1.56), MEASURED,
          ours.default_over("plain", (0.0, 1.0)), spread=True),
)  # fmt: skip
