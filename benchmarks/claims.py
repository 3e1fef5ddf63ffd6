"""The headline claims of the five papers, each with our figures and a verdict that follows from the figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from textwrap import fill

from benchmarks import claim_figures as ours
from benchmarks.papers.cosine_nodes import AFTER_OUTCOMES, WHOLE
from benchmarks.papers.cosine_offline import SIZED
from benchmarks.papers.cosine_online import AFTER, COSINE, SPECINFER
from benchmarks.papers.smartspec_rates import MEASURED as LOAD_RUNS

DOUBT = 0.05  # a figure without an interval says nothing this near to 1; the page states the rule
REACHED, SMALLER, LOSS, UNCLEAR = "as the paper", "a smaller gain", "a loss", "no clear difference"
MEASURED, EMULATED, SIMULATED = "measured", "emulated", "simulated"
KERNELS = "bf16", "AVX-512", "AVX2"
FIRST = KERNELS[0]


@dataclass(frozen=True, slots=True)
class Claim:
    """One headline.

    Attributes:
        said: the paper's range, as factors; above 1 is a gain.
        find: the same factor here, with the ends of its interval where there is one; one for each setting.
            ``LookupError`` or ``FileNotFoundError``: it was not run.
        besides: what else the paper has for the claim.
        up_to: the paper claims at most what it says.
        price: what a gain costs here that the paper's gain does not cost.
        comparable: whether both sides are of one kind.
    """

    paper: str
    what: str
    said: tuple[float, float]
    how: str
    find: ours.Find
    besides: str = ""
    up_to: bool = False
    price: str = ""
    comparable: bool = True

    def cells(self) -> tuple[str, ...]:
        """The cells of the table."""
        low, high = self.said
        said = f"{low:.2f}–{high:.2f}×" if low < high else f"{low:g}×" if self.up_to else f"{low:.2f}×"
        said = (f"up to {said}" if self.up_to else said) + self.besides
        try:
            found = self.find()
        except (LookupError, FileNotFoundError):
            return self.paper, self.what, said, "", "not run", "not shown"
        return self.paper, self.what, said, figure(found), self.how, self.judge(found)

    def judge(self, found: Sequence[ours.Figure]) -> str:
        """The last cell; where settings differ, how many have which verdict, apart from those without a difference."""
        if not self.comparable:
            return "not comparable"
        counts = Counter(verdict(each, self.said[0]) for each in found)
        if len(counts) == 1:
            (judged,) = counts
            return f"a gain, with {self.price}" if self.price and judged in (REACHED, SMALLER) else judged
        clear = [f"{judged} in {count}" for judged, count in counts.most_common() if judged != UNCLEAR]
        return f"{', '.join(clear)} of {len(found)}"


def figure(found: Sequence[ours.Figure]) -> str:
    """One figure and its interval in round brackets; of several the median, the least and the most in square ones."""
    if len(found) == 1:
        middle, *ends = found[0]
        return f"{middle:.2f}×" + (" ({:.2f}–{:.2f})".format(*ends) if ends else "")
    middles = [each[0] for each in found]
    return f"{median(middles):.2f}× [{min(middles):.2f}–{max(middles):.2f}]"


def verdict(found: Sequence[float], least: float) -> str:
    """What a figure and its interval say of a claim of at least ``least``; the page states the same rule."""
    low, high = (min(found), max(found)) if len(found) > 1 else (found[0] - DOUBT, found[0] + DOUBT)
    if low <= 1.0 <= high:
        return UNCLEAR
    if high < 1.0:
        return LOSS
    return REACHED if found[0] >= least else SMALLER


def claims() -> str:
    """One table with a paper's name in its first row, and what figures need to be read, as points of a list."""
    lines = ["| paper | claim | theirs | ours | how | verdict |", "|---|---|---|---|---|---|"]
    papers = [claim.paper for claim in CLAIMS]
    for before, claim in zip(["", *papers], CLAIMS, strict=False):
        paper, *cells = claim.cells()
        lines.append("| " + " | ".join(("" if paper == before else paper, *cells)) + " |")
    points = [fill(f"* {point}", 120, subsequent_indent="  ") for point in ours.notes() if point]
    return "\n".join([*lines, "", *points, ""])


CLAIMS = (
    *(Claim("SmartSpec", f"{what}, {rate} rate, {kernels}" if kernels == FIRST else f"the same, {kernels}",
            said, MEASURED, ours.under_load(kernels, place))
      for what, rate, place, said in (("latency over no speculation", "lowest", 0, (1.2, 3.2)),
                                      ("the same", "highest", -1, (1.0, 1.0))) for kernels in KERNELS),
    Claim("SmartSpec", f"the same, rates between, {len(LOAD_RUNS)} undisturbed runs", (1.0, 1.0), MEASURED,
          ours.between),
    Claim("SmartSpec", "mean latency over the best other, 4 rates, these runs", (1.0, 1.0), MEASURED,
          ours.over_best_lengths),
    Claim("Minions", "vote over one drafter, shared cores", (1.10, 1.60), MEASURED,
          ours.pooled("generic", "vote all")),
    Claim("Minions", "slope over s = 4, machines apart", (1.06, 1.35), SIMULATED,
          ours.throughput("minions-fig12", "slope in turn", "s=4 in turn")),
    *(Claim("Minions", f"the same, {words}", (1.06, 1.35), MEASURED,
            ours.compared(f"compare_slope_batch{batch}", "slope", "draft-4"))
      for batch, words in ((1, "shared cores, batch 1"), (8, "batch 8, both slower than no drafts"))),
    Claim("Minions", "pipeline over turns, machines apart", (1.34, 1.55), SIMULATED,
          ours.throughput("minions-fig12", "slope", "slope in turn")),
    Claim("Minions", "the same, shared cores", (1.34, 1.55), MEASURED, ours.pipelines),
    Claim("CoSine", "fuse over SpecInfer, shared cores, two routings", (1.31, 1.62), MEASURED,
          ours.pooled("union all", "fuse hedge", "fuse explore")),
    Claim("CoSine", "throughput over SpecInfer, nodes", (1.31, 1.62), EMULATED, ours.on_nodes(ours.SIZES, 6, 24)),
    Claim("CoSine", "the same, after outcomes, 6 requests", (1.31, 1.62), EMULATED, ours.on_nodes(ours.AFTER, 6)),
    Claim("CoSine", "the same, 24 requests (theirs batch 16)", (1.62, 1.62), EMULATED, ours.on_nodes(ours.AFTER, 24)),
    *(Claim("CoSine", words, said, EMULATED, find)
      for words, said, find in (
          ("latency over the best baseline, nodes", (1.22, 1.37), ours.latency_on_nodes(ours.SIZES, 6, 24)),
          ("the same, after outcomes, 6 requests", (1.22, 1.37), ours.latency_on_nodes(ours.AFTER, 6)),
          ("the same, 24 requests (theirs over PipeInfer)", (1.29, 1.29), ours.latency_on_nodes(ours.AFTER, 24)),
          ("latency over SpecInfer, nodes, three arrivals", (1.2, 1.6), ours.online_nodes(WHOLE)),
          ("the same, after outcomes", (1.2, 1.6), ours.online_nodes(AFTER_OUTCOMES)))),
    Claim("CoSine", "throughput over plain decoding, batches 1 to 16", (3.15, 4.71), SIMULATED,
          ours.offline("plain")),
    Claim("CoSine", "throughput at equal cost, over the best baseline", (1.325, 1.325), SIMULATED,
          ours.at_equal_cost(), up_to=True),
    Claim("CoSine", "the same, after outcomes, goodput", (1.325, 1.325), SIMULATED, ours.at_equal_cost(SIZED),
          up_to=True),
    Claim("CoSine", "the same, 0.4 ms a draft token", (1.325, 1.325), SIMULATED,
          ours.at_equal_cost(SIZED, "computed"), up_to=True),
    *(Claim("CoSine", what, (1.2, 1.6), SIMULATED, ours.online(system, *others))
      for words, others in (("SpecInfer", (SPECINFER,)), ("the fastest (theirs SpecInfer)", ()))
      for what, system in ((f"latency over {words}, three arrivals", COSINE),
                           ("the same, after outcomes, goodput", AFTER))),
    Claim("DSD", "speed over plain decoding, no links, γ = 8, T = 1", (1.91, 2.56), MEASURED,
          ours.compared("compare_draft8_t1", "draft-8", "off"), besides="; table 1 1.33–4.80×", comparable=False),
    Claim("DSD", "the same, 4 and 8 nodes, links", (1.91, 2.56), EMULATED, ours.over_links,
          comparable=False),
    Claim("DSD", "adaptive over ordinary speculation, no clear loss", (1.15, 1.20), MEASURED, ours.relaxed(True),
          up_to=True, besides="; tables 0.98–1.07×; over Eagle3 1.11–1.21×"),
    Claim("DSD", "the same, any loss", (1.15, 1.20), MEASURED, ours.relaxed(False),
          up_to=True, price="a loss of quality"),
    Claim("CoS", "target and adapter, T = 1, over standard, worse run", (1.34, 1.62), MEASURED,
          ours.blended("weighted-two", 1.0)),
    Claim("CoS", "the same, three models", (1.27, 1.85), MEASURED, ours.blended("weighted-three", 1.0)),
    Claim("CoS", "contrastive, T = 0, over standard, worse run", (1.26, 2.23), MEASURED,
          ours.blended("contrastive", 0.0)),
    Claim("CoS", "the same, T = 1", (1.11, 1.65), MEASURED, ours.blended("contrastive", 1.0)),
    *(Claim("CoS", f"{what} over {words}", said, MEASURED, ours.default_over(other, *settings))
      for other, words, both in (("naive", "one proposer", ((0.99, 1.29), (1.08, 1.16))),
                                 ("plain", "plain speculation", ((1.01, 1.56), (1.18, 1.43))))
      for what, said, settings in (("contrastive, both T,", both[0], (("contrastive", 0.0), ("contrastive", 1.0))),
                                   ("target and adapter", both[1], ((ours.ADAPTED, 1.0),)))),
    Claim("CoS", "three models over plain speculation", (1.34, 1.93), MEASURED,
          ours.default_over("plain", ("weighted-three", 1.0))),
    Claim("CoS", "least speed over standard, 8 requests", (1.0, 1.0), MEASURED, ours.least_blended),
)  # fmt: skip
