"""Tables of decoding on one GPU."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.table_lines import Found, heading, interval, line

LENGTHS = (("mean_acceptance_length", "tokens_per_forward"), ("mean_draft_length", ""))  # of cospec, of transformers


def gpu(found: Found) -> Iterator[str]:
    """Times of a step without drafts, then speeds with drafts; what failed or was skipped is left out."""
    yield from heading("batch", "system", "step, ms", "least, ms", "tokens/s", "step over cospec's")
    for cell in found.get("cells", ()):
        for name, row in cell["systems"].items():
            if "step_ms" in row:
                least = f"{cell['floor_ms']:.2f}" if name == "cospec" else ""
                words = [f"{row['step_ms']:.2f}", least, f"{row['tokens_per_s']:.0f}"]
                yield line(str(cell["batch"]), f"`{name}`", *words, interval(row.get("step_ratio")))
    drafted = [
        cell for cell in found.get("speculation", ()) if any("seconds" in row for row in cell["systems"].values())
    ]
    if not drafted:
        return
    yield ""
    yield from heading(
        "batch", "system at temperature 1", "tokens/s", "time over `cospec`", "acceptance length", "draft"
    )
    for cell in drafted:
        for name, row in cell["systems"].items():
            if "seconds" in row:
                lengths = [row.get(key, row.get(other)) for key, other in LENGTHS]
                words = ["" if length is None else f"{length:.2f}" for length in lengths]
                speed = f"{row['tokens_per_s']:.0f}"
                yield line(str(cell["batch"]), f"`{name}`", speed, interval(row.get("run_ratio")), *words)
