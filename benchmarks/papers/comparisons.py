"""Reading ``cospec bench compare`` by batch size and domain, and the bounds of adaptive verification."""

from __future__ import annotations

from benchmarks.papers.sources import Found, Source

COMPARED = {
    batch: Source(f"compare_batch{batch}", f"python -m benchmarks --run compare_batch{batch}") for batch in (1, 8)
}
EIGHT_TOKENS = Source("compare_draft8_t1", "python -m benchmarks --run compare_draft8_t1")
PLAIN, DRAFTED = "off", "draft-4"


def over_plain(found: Found, drafted: str = DRAFTED) -> str:
    """Time per token without speculation over that with drafted tokens, and its interval.

    Raises:
        KeyError: the comparison has no such pair.
    """
    for row in found["ratios"]:
        if (row["system"], row["baseline"], row["cost"]) == (drafted, PLAIN, "time_per_token"):
            return "{ratio:.2f}× ({low:.2f} to {high:.2f})".format_map(row)
    raise KeyError(drafted)


def in_domain(found: Found, domain: str, drafted: str = DRAFTED) -> str:
    """The same of one domain's requests: mean seconds over mean seconds, as all write equally many tokens."""
    runs = {run["label"]: run["by_category"][domain] for run in found["runs"]}
    length = runs[drafted]["speculation"]["mean_acceptance_length"]
    ratio = runs[PLAIN]["mean_e2el_ms"] / runs[drafted]["mean_e2el_ms"]
    return f"{ratio:.2f}× (acceptance length {length:.2f})"


def fastest_relaxed(found: Found, speed: str = "speed", lossless: bool = False) -> Found:
    """The fastest of the bounds whose distribution differs from the target's; bound 0 is the reference.

    A bound with the options of a smaller bound is the same configuration again and does not count.

    Args:
        lossless: only of bounds whose loss on reference answers has an interval that reaches zero.

    Raises:
        LookupError: no bound relaxes.
    """
    options = [row["options"] for row in found["rows"]]
    rows = [row for place, row in enumerate(found["rows"]) if row["options"] not in options[:place]]
    rows = [row for row in rows if row["max_divergence"] > 0 and row["divergence"] > 0]
    rows = [row for row in rows if not lossless or row["loss"]["low"] <= 0]
    if not rows:
        raise LookupError("bounds")
    return dict(max(rows, key=lambda row: float(row[speed]["ratio"])))
