"""CoSine with a target of four pipeline stages, simulated: what overlapping drafts with the target is worth there."""

from __future__ import annotations

from benchmarks.papers.common import Section
from benchmarks.papers.cosine_nodes import WHOLE_DRAFTS
from benchmarks.papers.scenarios import Runs, scenario
from benchmarks.papers.sources import Results

STAGES = scenario("cosine-stages")
COUPLED = ("plain", "one-drafter", "specinfer", "pipeinfer")
IN_FLIGHT = {name: f"{name} in flight" for name in COUPLED}
PIPELINED, WHOLE = "cosine", "cosine in flight"


def stages(results: Results) -> Section:
    """Throughput and latency over baselines with one step in flight, and with four."""
    rows = [
        results.row(
            "Throughput of CoSine, four steps in flight, over the fastest baseline with one",
            "1.31× (batch 1) to 1.62× (batch 16) over SpecInfer (LLaMA pair), up to 32.5% more at equal cost",
            STAGES,
            lambda found: faster(Runs(found), WHOLE, COUPLED),
        ),
        results.row(
            "Latency of CoSine, four steps in flight, against the best baseline with one",
            "17.9 to 27.1% less (LLaMA pair); up to 23.2% less at equal cost",
            STAGES,
            lambda found: sooner(Runs(found), WHOLE, COUPLED),
        ),
        results.row(
            "Throughput of CoSine, pipelined, over the fastest baseline with one step in flight",
            "1.31× (batch 1) to 1.62× (batch 16) over SpecInfer (LLaMA pair)",
            STAGES,
            lambda found: faster(Runs(found), PIPELINED, COUPLED),
        ),
        results.row(
            "Throughput of CoSine over the fastest baseline, four steps in flight for both",
            "",
            STAGES,
            lambda found: faster(Runs(found), WHOLE, tuple(IN_FLIGHT.values())),
        ),
        *(
            results.row(
                f"Throughput of CoSine, four steps in flight, over SpecInfer with one, by parts, batch {batch}",
                "",
                STAGES,
                lambda found, batch=batch: Runs(found).by_parts(WHOLE, "specinfer", float(batch)),
            )
            for batch in (2, 4, 8, 16)
        ),
        results.row(
            "Time in which no stage works, batch 16",
            "",
            STAGES,
            lambda found: ", ".join(
                f"{name} {Runs(found).at(name, 16.0)['target_idle']:.0%}" for name in Runs(found).variants
            ),
        ),
    ]
    return Section(
        "Figures 6(a) and 6(c) with a target of four stages, simulated",
        tuple(rows),
        "The paper's target is a pipeline of four stages (section 5). Here the target of figures 6(a) and 6(c) is "
        "divided into four equal stages without link time. With one step in flight a step is divided into at most four "
        "microbatches, and the stages drain at its end. With four steps in flight each step is a microbatch, and the "
        "drafters draft for one step while the stages verify the others. The paper has 16 microbatches (section 5). "
        "Stages may rest while another one works, so their own idle time is larger than the last row. "
        f"Drafts, drafters and trees are those of figures 6(a) and 6(c). {WHOLE_DRAFTS} The parts of a throughput "
        f"multiply to its ratio. {results.sentence(STAGES, lambda found: helped(Runs(found)))} "
        f"{results.sentence(STAGES, lambda found: equally_many(Runs(found)))}",
    )


def helped(runs: Runs) -> str:
    """Which systems four steps in flight make faster, and where they do not."""
    pairs = IN_FLIGHT | {PIPELINED: WHOLE}
    lost = [
        f"{name} at batch {batch:g}, {runs.by_parts(own, name, batch)}"
        for name, own in pairs.items()
        for batch in runs.loads
        if round(runs.throughput(own, batch) / runs.throughput(name, batch), 2) <= 1.0
    ]
    if not lost:
        return "Steps in flight help every system."
    return f"Steps in flight help every system, but not {'; '.join(lost)}."


def equally_many(runs: Runs) -> str:
    """Why SpecInfer is faster with as many steps in flight, by the parts of the throughput."""
    other = IN_FLIGHT["specinfer"]
    return (
        f"With four steps in flight for both, at batch 16 CoSine has {runs.by_parts(WHOLE, other, 16.0)} of "
        "SpecInfer's."
    )


def faster(runs: Runs, name: str, others: tuple[str, ...]) -> str:
    """Throughput over that of the fastest of some systems, at each batch."""
    cells = []
    for batch in runs.loads:
        most, best = max((runs.throughput(other, batch), other) for other in others)
        cells.append(f"batch {batch:g}: {runs.throughput(name, batch) / most:.2f}× ({best})")
    return ", ".join(cells)


def sooner(runs: Runs, name: str, others: tuple[str, ...]) -> str:
    """Latency against that of the best of some systems, at each batch."""
    cells = []
    for batch in runs.loads:
        least, best = min((runs.latency(other, batch), other) for other in others)
        cells.append(f"batch {batch:g}: {runs.latency(name, batch) / least - 1:+.1%} ({best})")
    return ", ".join(cells)
