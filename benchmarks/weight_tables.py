"""Tables of weight formats: forwards on GGUF files, other engines, bandwidth and start."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.table_lines import Found, heading, interval, line

IN_MEMORY = {"ctranslate2": "int8, converted from bf16"}  # the file's weights are stored in the results


def gguf(found: Found) -> Iterator[str]:
    """Times of both systems on one file, and the least time of reading the file."""
    yield from heading("type", "rows", "floor, ms", "cospec, ms", "llama.cpp, ms", "ratio", "least ratio", "× one row")
    for row in found["rows"]:
        times = [f"{row[f'{system}_ms']:.1f}" for system in ("cospec", "llama_cpp")]
        ratio = "{ratio:.2f} ({low:.2f} to {high:.2f})".format(**row)
        over = f"{row['over_one_row']:.2f}" if "over_one_row" in row else ""
        least = f"{row['floor_ms'] / row['llama_cpp_ms']:.2f}" if str(row["rows"]) == "1" else ""
        yield line(row["type"], row["rows"], f"{row['floor_ms']:.1f}", *times, ratio, least, over)


def gguf_server(found: Found) -> Iterator[str]:
    """Tokens per second of both servers, and ratios with and without drafts."""
    systems = list(found["rows"][0]["tokens_per_second"])
    ratios_of = ("ratio, off", "ratio, draft", "cospec, draft over off")
    yield from heading("draft model", "requests", *systems, *ratios_of, "accepted", "same text")
    for row in found["rows"]:
        speeds = [f"{row['tokens_per_second'][name]:.0f}" for name in systems]
        ratios = [interval(row[key]) for key in ("without_drafts", "with_drafts", "cospec_gain")]
        accepted = ", ".join(f"{share:.0%}" for share in row["accepted_of_drafted"].values() if share is not None)
        yield line(row["draft"], str(row["requests"]), *speeds, *ratios, accepted, f"{row['same_text']:.0%}")


def peers(found: Found) -> Iterator[str]:
    """Tokens per second of each engine and of cospec on the same shape."""
    yield from heading("engine", "its weights", "cospec's weights", "batch", "tokens/s", "cospec, tokens/s", "ratio")
    for row in found["rows"]:
        speeds = [f"{row[key]:.0f}" for key in ("peer_tokens_per_second", "own_tokens_per_second")]
        kinds = [IN_MEMORY.get(row["peer"], row["weights"]), row["own_weights"]]
        yield line(f"{row['peer']} {row['version']}", *kinds, str(row["batch"]), *speeds, interval(row))


def weight_bandwidth(found: Found) -> Iterator[str]:
    """Bytes of the weights over the time of one row, and the share of the measured bandwidth."""
    yield from heading("format", "MB", "one row, ms", "bandwidth, GB/s", "share", "aim")
    for row in found["rows"]:
        share = f"{row['share']:.2f} ({row['least']:.2f} to {row['most']:.2f})"
        figures = [f"{row['megabytes']:.0f}", f"{row['ms']:.1f}", f"{row['gb_per_s']:.1f}", share, f"{row['aim']:g}"]
        yield line(row["format"], *figures)


def load_time(found: Found) -> Iterator[str]:
    """Seconds of a process until its first token, and its highest own memory over the weights."""
    yield from heading(
        "weights", "cache of packed weights", "start, s", "loading, s", "weights, GB", "peak over weights"
    )
    for row in found["rows"]:
        figures = [f"{row[key]:.1f}" for key in ("total_s", "load_s", "weights_gb")]
        yield line(row["weights"], row["cache"], *figures, f"{row['peak_share']:.2f}")


def prompt_products(found: Found) -> Iterator[str]:
    """GFLOP/s of products with a weight [2048, 2048]."""
    counts = list(dict.fromkeys(row["rows"] for row in found["rows"]))
    yield from heading("weights", *(f"{count} rows, GFLOP/s" for count in counts))
    for name in dict.fromkeys(row["weights"] for row in found["rows"]):
        speeds = {row["rows"]: row["gflop_per_s"] for row in found["rows"] if row["weights"] == name}
        yield line(name, *(f"{speeds[count]:.0f}" for count in counts))


def attention(found: Found) -> Iterator[str]:
    """Milliseconds of one layer by rows, and their share of the least time."""
    counts = list(found["rows"][0]["ms_per_layer"])
    heads = [f"{count} rows, ms" if count != "1" else "1 row, ms" for count in counts]
    yield from heading("model", "dtype", "context", *heads, f"share of the least time, {', '.join(counts)} rows")
    for row in found["rows"]:
        shares = ", ".join(f"{row['share_of_least'][count]:.2f}" for count in counts)
        cells = [f"{row['ms_per_layer'][count]:.2f}" for count in counts]
        yield line(row["model"], row["dtype"], str(row["context"]), *cells, shares)
