"""Tables of pools: drafters alone and together, and where the time of one drafter per request goes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.table_lines import Found, heading, line

ONE = "vote hedge, one"


def pool(found: Found) -> Iterator[str]:
    """The mixed workload; ``hedge``; pools and trees of one drafter; specialists on their domains."""
    heats = sorted({row["temperature"] for row in found["rows"]})
    mixed = {(row["system"], row["temperature"]): row for row in found["rows"] if row["workload"] == "mixed"}
    figures = {"acceptance": "acceptance", "tokens_per_call": "per call", "verified": "verified"}
    yield "Three domains mixed:\n"
    yield from heading(
        "", *(f"{name}, T = {temperature:g}" for temperature in heats for name in (*figures.values(), "tokens/s"))
    )
    for name in dict.fromkeys(system for system, _ in mixed if not system[0].isdigit()):
        cells: list[str] = []
        for row in (mixed[name, temperature] for temperature in heats):
            cells += ["{:.2f} ({:.2f} to {:.2f})".format(*row[key]) for key in figures]
            cells += ["{:.0f} ({:.0f} to {:.0f})".format(*row["tokens_per_s"])]
        yield line(name, *cells)
    yield "\n`hedge`, acceptance lengths over those of the best drafter alone / of `all` / of `explore`:\n"
    yield from _by_workload(found["hedge"], ("best alone", "all", "explore"))
    if "same_nodes" in found:
        yield "\nPools under `hedge`, acceptance lengths over that of the best drafter's tree of as many nodes:\n"
        yield from _by_workload(found["same_nodes"], ("best tree",))
    yield "\nSpecialists on their domains, accepted of drafted tokens over that of each other drafter:\n"
    others = list(dict.fromkeys(name for row in found["specialists"] for name in row if isinstance(row[name], list)))
    yield from heading("", "T", *others)
    for row in found["specialists"]:
        shown_ratio = ["{:.2f} ({:.2f} to {:.2f})".format(*row[name]) if name in row else "" for name in others]
        yield line(row["specialist"], f"{row['temperature']:g}", *shown_ratio)
    yield "\nOne drafter per request over the best member for these prompts, specialists included:\n"
    yield from heading("prompts", "T", "best member", "acceptance", "tokens/s")
    for row in found["one"]:
        ratios = ["{:.2f} ({:.2f} to {:.2f})".format(*row[key]) for key in ("acceptance", "tokens/s")]
        yield line(row["workload"], f"{row['temperature']:g}", row["of"], *ratios)


def pool_one(found: Found) -> Iterator[str]:
    """Pools with one drafter per request over the generic drafter: acceptance, speed, and where the time goes."""
    parts = list(found["rows"][0]["ms_per_token"])
    yield from heading("system", "prompts", "T", "acceptance", "tokens/s", *(f"{part}, ms a token" for part in parts))
    for row in found["rows"]:
        times = [f"{row['ms_per_token'][part]:.3f}" for part in parts]
        figures = [
            f"{row['temperature']:g}",
            f"{row['acceptance'][0]:.2f}",
            "{:.0f} ({:.0f} to {:.0f})".format(*row["tokens_per_s"]),
        ]
        yield line(row["system"], row["workload"], *figures, *times)
    yield "\nOne drafter per request over single drafters; the aim of the speed over the best member is 1.05:\n"
    times_of = {(row["system"], row["workload"], row["temperature"]): row["ms_per_token"] for row in found["rows"]}
    keys = ("acceptance", "tokens/s")
    yield from heading("prompts", "T", "single drafter", *keys, "tokens/s at most")
    for row in found["one"]:
        ratios = ["{:.2f} ({:.2f} to {:.2f})".format(*row[key]) for key in keys]
        place = row["workload"], row["temperature"]
        alone = times_of[row["of"], *place]
        most = sum(alone.values()) / (alone["drafting"] + times_of[ONE, *place]["target"] + alone["rest"])
        yield line(row["workload"], f"{row['temperature']:g}", row["of"], *ratios, f"{most:.2f}")


def _by_workload(ratios: Sequence[Found], names: Sequence[str]) -> Iterator[str]:
    """One line per combiner and temperature; an interval where a cell has one ratio."""
    workloads = list(dict.fromkeys(row["workload"] for row in ratios))
    cells = {(row["combiner"], row["temperature"], row["workload"]): row for row in ratios}
    yield from heading("", "T", *workloads)
    for combiner, temperature in dict.fromkeys(key[:2] for key in cells):
        rows = [cells[combiner, temperature, workload] for workload in workloads]
        only = ["{:.2f} ({:.2f} to {:.2f})".format(*row[names[0]]) for row in rows]
        several = [" / ".join(f"{row[name][0]:.2f}" if name in row else "" for name in names) for row in rows]
        yield line(combiner, f"{temperature:g}", *(only if len(names) == 1 else several))
