"""Results for people and programs: tables on the terminal, JSON, and one self-contained HTML page.

Every result includes the machine and the versions of the measurement.
"""

from __future__ import annotations

import base64
import datetime
import html
import json
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cospec.bench.plots import all_plots
from cospec.bench.run_figures import against_first
from cospec.machine import processor, usable_processors
from cospec.native.library import available, isa

Result = Mapping[str, Any]

# Rows of the table: key, words, decimals. A row is shown if some run has a value.
ROWS = (
    ("completed", "requests completed", 0),
    ("failed", "requests failed", 0),
    ("not_sent", "requests dropped", 0),
    ("duration", "duration, s", 2),
    ("total_input_tokens", "input tokens", 0),
    ("total_output_tokens", "output tokens", 0),
    ("request_throughput", "requests/s", 2),
    ("request_goodput", "goodput, requests/s", 2),
    ("price_per_million_tokens", "price of a million output tokens", 4),
    ("output_throughput", "output tokens/s", 1),
    ("total_token_throughput", "tokens/s, input and output", 1),
)
SPECULATION = (
    ("mean_acceptance_length", "mean acceptance length", 2),
    ("acceptance_rate", "acceptance rate α", 3),
    ("draft_acceptance_rate", "draft acceptance rate", 3),
    ("speculation_length", "speculation length", 2),
    ("target_calls_per_token", "target calls per token", 3),
    ("forwards_per_token", "forwards of the batch per token", 3),
)
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.15rem .7rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}figure{display:inline-block;margin:.5rem}figcaption{font-weight:600}
.mark{color:#a00;font-weight:600}code{background:#f3f3f3;padding:.1rem .3rem;overflow-wrap:anywhere}"""


def complete(kind: str, command: str, settings: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Return a self-contained result: values, command, environment and date.

    Args:
        measured: ``runs``, a list of values with ``label`` each, and ``ratios`` for a comparison.
    """
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    head = {"kind": kind, "date": date, "command": command, "machine": describe()}
    return {**head, "settings": dict(settings), **measured}


def save(result: Result, path: Path) -> None:
    """Write the result: an HTML page for ``.html``, else JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = page(result) if path.suffix == ".html" else json.dumps(result, indent=1, allow_nan=False) + "\n"
    path.write_text(text, encoding="utf-8")


def show(result: Result, console: Console) -> None:
    """Print tables and remarks on the terminal."""
    table = Table(title=f"cospec bench {result['kind']}")
    head, *rows = cells(result)
    for number, name in enumerate(head):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for remark in remarks(result):
        console.print(remark, markup=False, highlight=False)


def cells(result: Result) -> list[list[str]]:
    """Return the table as text, a column per run; the first row is the head."""
    runs = result["runs"]
    table = [["", *(run["label"] for run in runs)]]
    for key, words, digits in ROWS:
        table += _row(words, [run.get(key) for run in runs], digits)
    for key in _latency_keys(runs):
        statistic, metric, _ = key.split("_")
        table += _row(f"{metric.upper()} {statistic}, ms", [run.get(key) for run in runs], 2)
    for key, words, digits in SPECULATION:
        table += _row(words, [run.get("speculation", {}).get(key) for run in runs], digits)
    table += _row("same text as the first", [run.get("same_text") for run in runs], 3)
    return table


def remarks(result: Result) -> list[str]:
    """Return remarks besides the table: ratios, saturation, failures, interruptions."""
    found: list[str] = []
    for row in against_first(result):
        if row["cost"] == "time_per_token":
            interval = f" (95% interval {row['low']:.2f} to {row['high']:.2f})" if row["low"] is not None else ""
            pairs = f", {row['pairs']} pairs"
            found.append(f"{row['system']} is {row['ratio']:.2f} x as fast as {row['baseline']}{interval}{pairs}.")
    for run in result["runs"]:
        if run.get("interrupted"):
            found.append(f"{run['label']}: INTERRUPTED, {run['interrupted']}; {run['not_sent']} requests were dropped.")
        for reason in run.get("saturation", {}).get("reasons", ()):
            found.append(f"{run['label']}: SATURATED, {reason}; its latencies depend on how long it ran.")
        if run.get("error_kinds"):
            first = run.get("error_examples", {})
            kinds = ", ".join(f"{n} x {kind}: {first.get(kind, '')}" for kind, n in run["error_kinds"].items())
            found.append(f"{run['label']}: {run['failed']} requests FAILED ({kinds}).")
    settings = result.get("settings", {})
    if "token_count" in settings:
        found.append(f"Tokens are counted {settings['token_count']}.")
    return found


def page(result: Result) -> str:
    """Return the HTML report with embedded plots."""
    head, *rows = cells(result)
    machine = ", ".join(f"{name} {value}" for name, value in result["machine"].items())
    body = [
        f"<h1>cospec bench {html.escape(result['kind'])}</h1>",
        f"<p>{html.escape(result['date'])}, on {html.escape(machine)}</p>",
        f"<p><code>{html.escape(result['command'])}</code></p>",
        *(f'<p class="{_class(remark)}">{html.escape(remark)}</p>' for remark in remarks(result)),
        _table(head, rows),
        *_ratios(result),
        *_domains(result),
        *(_figure(title, svg) for title, svg in all_plots(result)),
        "<details><summary>Settings</summary><pre>",
        html.escape(json.dumps(result.get("settings", {}), indent=1)),
        "</pre></details>",
    ]
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>cospec bench</title>'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _ratios(result: Result) -> Iterator[str]:
    """Return the speed of each system relative to the baseline, for every cost."""
    rows: dict[str, dict[str, str]] = {}
    for row in against_first(result):
        interval = "" if row["low"] is None else f" ({row['low']:.2f} to {row['high']:.2f})"
        rows.setdefault(row["system"], {})[row["cost"]] = f"{row['ratio']:.2f}{interval}"
    if rows:
        costs = list(dict.fromkeys(cost for own in rows.values() for cost in own))
        table = [[name, *(own.get(cost, "") for cost in costs)] for name, own in rows.items()]
        baseline = html.escape(result["ratios"][0]["baseline"])
        yield f"<h2>Speed relative to {baseline}, with 95% intervals</h2>" + _table(["", *costs], table)


def _domains(result: Result) -> Iterator[str]:
    """Return mean acceptance lengths by domain, if a run has domains and speculation."""
    runs = [run for run in result["runs"] if run.get("by_category")]
    names = sorted({name for run in runs for name in run["by_category"]})
    rows = [
        [run["label"], *(_number(_acceptance(run["by_category"].get(name, {})), 2) for name in names)] for run in runs
    ]
    if any(cell for row in rows for cell in row[1:]):
        yield "<h2>Mean acceptance length by domain</h2>" + _table(["", *names], rows)


def _acceptance(domain: Mapping[str, Any]) -> float | None:
    value: float | None = domain.get("speculation", {}).get("mean_acceptance_length")
    return value


def _latency_keys(runs: list[Mapping[str, Any]]) -> list[str]:
    """Return keys such as ``p99_ttft_ms``, in the order of the runs."""
    found = dict.fromkeys(key for run in runs for key in run if key.endswith("_ms") and key.count("_") == 2)
    doubled = {key for key in found if key.startswith("p50_")}  # the median under another name
    return [key for key in found if key not in doubled and not key.startswith("std_")]


def _row(words: str, values: list[Any], digits: int) -> list[list[str]]:
    """Return a row; empty if no run has a value."""
    if all(value is None for value in values):
        return []
    return [[words, *(_number(value, digits) for value in values)]]


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _class(remark: str) -> str:
    return "mark" if any(word in remark for word in ("INTERRUPTED", "SATURATED", "FAILED")) else "remark"


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _figure(title: str, svg: str) -> str:
    data = base64.b64encode(svg.encode("utf-8")).decode("ascii")
    image = f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{image}</figure>"


PACKAGES = ("cospec", "torch", "transformers")


def describe() -> dict[str, str | int]:
    """Describe processor, usable cores, operating system, versions, native kernels, and a GPU if torch has one."""
    found: dict[str, str | int] = {
        "processor": processor(),
        "cores": usable_processors(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    gpu = _gpu()
    return found | {"kernels": isa() if available() else "none"} | ({"gpu": gpu} if gpu else {})


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
