"""CoSine on drafter nodes with injected speeds: baselines, and CoSine without each of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.cosine_nodes import VARIANTS
from benchmarks.cosine_online import DRAFTER_PRICE, TARGET_PRICE
from benchmarks.papers.common import PLOT, How, Row, Section, paragraph
from benchmarks.papers.sources import Found, Results, Source

NODES = ("cosine_nodes_low", "cosine_nodes")  # six requests, and twenty-four
SOURCES = {
    6: Source("cosine_nodes_low", "python -m benchmarks.cosine_nodes --requests 6", How.EMULATED),
    24: Source("cosine_nodes", "python -m benchmarks.cosine_nodes", How.EMULATED),
}
CHOSEN, ALL = "goodput", "goodput without adaptive participation"
ADAPTIVE = {
    requests: Source(
        f"cosine_nodes_adaptive{low}", f"python -m benchmarks.cosine_nodes --requests {requests}", How.EMULATED
    )
    for requests, low in ((6, "_low"), (24, ""))
}
WHOLE, EIGHT = "CoSine, 4 nodes", "CoSine, 8 nodes"
AFTER_OUTCOMES = "after outcomes"  # in place of the pipeline
SPECINFER, IN_TURN = "SpecInfer, 4 nodes", "without pipelining"
BASELINES = {
    SPECINFER: (
        "SpecInfer",
        "1.31× (batch 1) to 1.62× (batch 16) throughput; 17.9 to 27.1% less latency than the strongest baseline "
        "(LLaMA pair)",
    ),
    "PipeInfer": (
        "PipeInfer",
        "1.24× (batch 1) to 1.46× (batch 16) throughput; 22.4% less latency at large batches (LLaMA pair)",
    ),
    "one drafter": ("one drafter in turn (vanilla)", PLOT),
    "no drafts": ("no drafts (vLLM)", "3.15 to 4.71× throughput (LLaMA pair)"),
}
AT_EIGHT = (
    "SpecInfer, 8 nodes",
    *(name for name in BASELINES if name != SPECINFER),
)  # the others have one node or none
PARTS = {
    "without routing": "29 to 33% less throughput; at 8 devices 1.18 against 1.72",
    "without fusion": "17 to 34% less throughput; at 8 devices 1.13 against 1.72",
    IN_TURN: "",
}
INSTEAD = {  # variants, and the part that each has in place of another
    "drafting ahead": "drafting ahead, instead of the pipeline",
    AFTER_OUTCOMES: "drafting after outcomes, instead of the pipeline",
    "fusion token by token": "fusion token by token, instead of whole drafts",
    "fusion token by token, in turn": "fusion token by token, in turn, instead of whole drafts and the pipeline",
}
WHOLE_DRAFTS = (  # for every section whose drafters are not in the target's process
    "Drafters on nodes write whole drafts, and `fuse` joins these afterwards. The paper's drafters go on from the "
    "fused token at every step (algorithm 1), and by equation 4 from their own token too."
)
LEFT_OUT = "The paper's load control (algorithm 2) is left out, so the trees of `fuse` have one size at every load"
SIZES = (
    f"{LEFT_OUT}; in rows *of goodput* the policy `goodput` has its place. Recorded drafters replay first and second "
    "choices; third choices count as wrong."
)
COUNTS = {1: "CoSine, 1 node", 2: "CoSine, 2 nodes", 4: WHOLE, 8: EIGHT}


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

    def ratios(self, figure: str, variant: str, other: str) -> list[float]:
        """A figure of a variant over that of another, in each run."""
        own, base = (self._runs(figure, name) for name in (variant, other))
        return [one / two for one, two in zip(own, base, strict=True)]

    def _runs(self, figure: str, variant: str) -> Sequence[float]:
        row = self.found["variants"][variant]
        return tuple(row["repeats"][figure]) if "repeats" in row else (row[figure],)

    def over(self, other: str, variant: str = WHOLE) -> float:
        """Throughput of a variant over that of another."""
        return median(self.ratios("tokens_per_second", variant, other))

    def priced(self, other: str, variant: str = WHOLE) -> str:
        """How many times the tokens of another system for the same price."""
        own, base = (TARGET_PRICE + VARIANTS[name][0] * DRAFTER_PRICE for name in (variant, other))
        return f"{self.over(other, variant) * base / own:.2f}×"

    def both(self, other: str, variant: str = WHOLE) -> str:
        """How many times the throughput of another system, and by how much the latency differs."""
        speed = self.ratios("tokens_per_second", variant, other)
        latency = [each - 1 for each in self.ratios("mean_latency", variant, other)]
        return (
            f"{median(speed):.2f}× throughput [{min(speed):.2f} to {max(speed):.2f}], "
            f"{median(latency):+.0%} latency [{min(latency):+.0%} to {max(latency):+.0%}]"
        )

    def lost(self, variant: str, whole: str = WHOLE) -> str:
        """Change of throughput and acceptance length without a part."""
        length = (1 + self.value("accepted_per_draft", variant)) / (1 + self.value("accepted_per_draft", whole)) - 1
        return f"{self.over(whole, variant) - 1:+.0%} throughput, {length:+.0%} acceptance length"

    def unchosen(self) -> str:
        """Change without a choice of the number of drafters, and how long the nodes are idle with and without it."""
        latency = self.value("mean_latency", ALL) / self.value("mean_latency", CHOSEN) - 1
        idle = " → ".join(f"{self.value('nodes_idle', variant):.0%}" for variant in (CHOSEN, ALL))
        return f"{self.lost(ALL, CHOSEN)}, {latency:+.0%} latency; nodes idle {idle}"

    def scaled(self, variant: str) -> str:
        """Acceptance length, and throughput over one drafter in turn."""
        length = 1 + self.value("accepted_per_draft", variant)
        return f"acceptance length {length:.2f}, {self.over('one drafter', variant):.2f}× one drafter in turn"


def over_baselines(results: Results, source: Source, at: str) -> list[Row]:
    """CoSine and CoSine after outcomes over each baseline, then the latter for the same price."""
    whole = [
        results.row(f"CoSine over {words}, {at}", said, source, lambda f, name=name: Nodes(f).both(name))
        for name, (words, said) in BASELINES.items()
    ]
    after = [
        results.row(
            f"CoSine after outcomes over {words}, {at}",
            said,
            source,
            lambda f, name=name: Nodes(f).both(name, AFTER_OUTCOMES),
        )
        for name, (words, said) in BASELINES.items()
    ]
    priced = [
        results.row(
            f"tokens for the same price, CoSine after outcomes over {words}, {at}",
            "",
            source,
            lambda f, name=name: Nodes(f).priced(name, AFTER_OUTCOMES),
        )
        for name, (words, _) in BASELINES.items()
    ]
    return [*whole, *after, *priced]


def section(results: Results) -> Section:
    """Figures 6(a) and 6(c), the ablation, and the acceptance by nodes."""
    rows: list[Row] = []
    for requests, source in SOURCES.items():
        at = f"{requests} requests"
        rows += over_baselines(results, source, at)
        rows.append(
            results.row(
                f"CoSine over SpecInfer, 8 nodes each, {at}",
                BASELINES[SPECINFER][1],
                source,
                lambda f: Nodes(f).both("SpecInfer, 8 nodes", EIGHT),
            )
        )
        rows += [
            results.row(f"{name}, {at}", said, source, lambda f, name=name: Nodes(f).lost(name))
            for name, said in PARTS.items()
        ]
        rows += [
            results.row(f"{words}, {at}", "", source, lambda f, name=name: Nodes(f).lost(name))
            for name, words in INSTEAD.items()
        ]
        rows.append(
            results.row(f"without adaptive participation, {at}", "", ADAPTIVE[requests], lambda f: Nodes(f).unchosen())
        )
        rows.append(
            results.row(f"{IN_TURN}, 8 nodes, {at}", "", source, lambda f: Nodes(f).lost(f"{IN_TURN}, 8 nodes", EIGHT))
        )
        rows += [
            results.row(
                f"{count} cooperative node{'s' if count > 1 else ''}, {at}",
                "acceptance improves with the nodes, without numbers",
                source,
                lambda f, name=name: Nodes(f).scaled(name),
                "two nodes for each drafter" if count == 8 else "",
            )
            for count, name in COUNTS.items()
        ]
    return Section(
        "Figures 6(a) and 6(c), ablation and second figure 6: drafters on nodes, emulated",
        tuple(rows),
        paragraph(
            "Nodes are processes of the zoo's drafters. Target and nodes compute and then sleep to injected times: "
            f"{results.sentence(SOURCES[24], injected)}. In the rows of adaptive participation "
            f"{results.sentence(ADAPTIVE[24], injected)}.",
            "Chains and trees, SpecInfer's too, have at most four tokens in all. In the rows of adaptive participation "
            "goodput chooses the length. In other sections trees have eight or ten. Decoding is greedy. CoSine is "
            "`fuse` with routing `hedge` (arXiv 2510.20064), pipelined, which halves the target's batch.",
            f"{LEFT_OUT}. Only the rows of adaptive participation have goodput, in runs of their own.",
            "Links take 0 ms; `benchmarks/report/execution_modes.md` has slow links.",
            "The paper's gains over SpecInfer and PipeInfer grow from batch 1 to batch 16 (6.2), so the upper ends are "
            "of batch 16; 24 requests are beyond them.",
            WHOLE_DRAFTS,
            "*Fusion token by token* goes on from the fused token alone, with a round trip per token. Routing `all` "
            "stands for no routing, one drafter per request for no fusion. So the second takes away the join of whole "
            "drafts, and not the paper's fusion. All changes are against CoSine with as many nodes. With eight nodes "
            "each drafter has two nodes, which share its requests, so the tokens are those of four. A draft step "
            "takes the same time for any number of requests. So eight nodes cannot be faster than four here. All "
            "variants wrote the same texts. Throughput counts one batch until its last request ends; latency is the "
            "mean over requests. The paper's first part is the whole cooperative generation, which is more than "
            "routing.",
            "*After outcomes* is the mode `draft-for-outcomes` in place of the pipeline, which no paper here has: "
            "drafters branch after each token of the draft that the target verifies, and guess the next token of the "
            "target.",
            "Adaptive participation (section 4.3) is policy `goodput`, which chooses the lengths and the number of "
            "drafters. Without it, the same policy leaves the number to the routing (`choose_drafters: false`). "
            "Goodput drafts more for requests whose drafts are accepted. These end early, and few requests are left in "
            "the last steps, so the last request of a batch ends later than the mean suggests.",
            f"Prices per hour are assumed: {TARGET_PRICE:g} for the target, {DRAFTER_PRICE:g} for each node.",
            results.sentence(SOURCES[24], repeated),
            loss(results),
        ),
    )


def injected(found: Found) -> str:
    """The times of a run, as a clause."""
    return (
        f"a forward of the target takes {found['target_ms']:g} ms and {found['row_ms']:g} ms a token, a draft step of "
        f"a node {found['token_ms']:g} ms"
    )


def repeated(found: Found) -> str:
    """How often the variants ran."""
    return f"Figures are medians over {found['repeats']} runs, each with new processes; brackets have the extremes."


def loss(results: Results) -> str:
    """Why CoSine is slower than SpecInfer and than no drafts; empty where a load was not run."""
    low, high = (results.read(source) for source in SOURCES.values())
    if not (low and high):
        return ""
    four, eight = Nodes(low).over(SPECINFER, IN_TURN), Nodes(low).over("SpecInfer, 8 nodes", f"{IN_TURN}, 8 nodes")
    lost, rest = 1.0 - Nodes(high).over(SPECINFER), Nodes(high).over(SPECINFER, IN_TURN)
    return paragraph(
        "At six requests most of the loss to SpecInfer is the pipeline's. Without the pipeline CoSine has "
        f"{four:.2f} times SpecInfer's throughput with four nodes, and {eight:.2f} times with eight.",
        f"At 24 requests the loss of {lost:.0%} is the pipeline's too: without it the ratio is {rest:.2f}.",
        results.sentence(SOURCES[24], undrafted),
    )


def undrafted(found: Found) -> str:
    """Why no drafts have the most throughput; empty where they have not."""
    load = Nodes(found)
    if min(BASELINES, key=load.over) != "no drafts":
        return ""
    whole, turn = (median(load.ratios("mean_latency", name, "no drafts")) for name in (WHOLE, IN_TURN))
    late, last = (end_of_last(found, name) / load.value("mean_latency", name) for name in (WHOLE, "no drafts"))
    return (
        f"Of the baselines, no drafts have the most throughput at 24 requests, because throughput counts until the "
        "last request ends. "
        f"With CoSine the last one ends {late:.2f} times as late as the mean, without drafts {last:.2f} times. Mean "
        f"latency is {1 - whole:.0%} lower with CoSine than without drafts, and {1 - turn:.0%} lower "
        "without its pipeline."
    )


def end_of_last(found: Found, variant: str) -> float:
    """Seconds until the last request of the batch ended."""
    return float(found["requests"] * found["tokens"]) / Nodes(found).value("tokens_per_second", variant)
