"""The JSON, the tables and the page that people get."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cospec.bench import report
from cospec.bench.counters import LoadSample, SpeculationCounters, from_engine, from_prometheus
from cospec.bench.metrics import Selection
from cospec.bench.plots import PLOTS, all_plots
from cospec.bench.request_record import Chunk, Timing
from cospec.bench.run_figures import by_load, figures

STATS = {"target_calls": 4, "drafts": 3, "drafted": 12, "accepted": 6, "rejections": 3}


def timing(id: str, category: str, **more: Any) -> Timing:
    chunks = (Chunk(0.1, "a", 1), Chunk(0.2, "bcd", 9))
    given = {"stats": STATS, "reported_tokens": 10, **more}
    return Timing(id=id, arrival=0, sent=0, end=0.2, chunks=chunks, category=category, **given)


def result() -> dict[str, Any]:
    """One that has data for every plot and every remark."""
    counters = SpeculationCounters(10, 40, 25, (9, 8, 5, 3), 20, 30)
    timings = [timing("a", "code"), timing("b", "math"), timing("c", "math", error="x", error_kind="timeout")]
    base = figures(timings, 1.0, Selection(goodput={"ttft": 200.0}), counters)
    loads = [LoadSample(0, 0, 0, SpeculationCounters()), LoadSample(1, 4, 0, counters)]
    runs = [
        {"label": f"<{rate}>", "request_rate": rate, "saturated": rate > 1, "batch": rate, **base} for rate in (1, 2)
    ]
    runs[1] |= {"saturation": {"reasons": ["the queue grew"]}, "interrupted": "by hand", "not_sent": 3}
    runs[1] |= {"length_by_load": by_load(loads)}
    ratio = {"system": "b", "baseline": "a", "cost": "time_per_token", "ratio": 2.0, "low": 1.5, "high": 2.5}
    roofline = {
        "bytes_per_s": 3e10,
        "flops_per_s": 1e11,
        "points": [{"name": "verify", "intensity": 2.0, "flops_per_s": 4e10}],
    }
    measured = {"runs": runs, "ratios": [{**ratio, "pairs": 8}], "roofline": roofline}
    return report.complete("serve", "cospec bench serve", {"token_count": "twice"}, measured)


def test_speculation_is_reported_under_standard_names() -> None:
    found = figures([timing("a", "code")], 1.0, Selection())["speculation"]
    assert found["mean_acceptance_length"] == 3.0 and found["acceptance_rate"] == pytest.approx(6 / 9)
    assert found["draft_acceptance_rate"] == 0.5 and found["target_calls_per_token"] == 0.4
    plain = figures([timing("a", "code", stats={})], 1.0, Selection())["speculation"]
    assert plain == {}


def test_a_servers_counters_serve_where_requests_have_none() -> None:
    counters = SpeculationCounters(10, 40, 25, (9, 8, 5, 3), 20, 40)
    found = figures([timing("a", "code", stats={})], 1.0, Selection(), counters)["speculation"]
    assert found["mean_acceptance_length"] == 3.5 and found["speculation_length"] == 4.0
    assert found["acceptance_per_position"] == [0.9, 0.8, 0.5, 0.3] and found["forwards_per_token"] == 0.5


def test_counters_are_the_same_from_both_sources() -> None:
    engine = {
        "drafts": {"d": 3},
        "draft_tokens": {"d": 9},
        "accepted_tokens": {"d": 5},
        "accepted_per_pos": {"d": [3, 2]},
        "target_calls": 7,
        "generation_tokens": 8,
    }
    page = """# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{model_name="m"} 3
vllm:spec_decode_num_draft_tokens_total{model_name="m"} 9
vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 5
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 3
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 2
vllm:target_calls_total 7
vllm:generation_tokens_total 8
vllm:num_requests_running 2
vllm:num_requests_waiting 1
"""
    load = from_prometheus(page, 1.5)
    assert load == LoadSample(1.5, 2, 1, from_engine(engine))
    assert from_prometheus("# TYPE other gauge\nother 1\n") is None
    assert load.counters - load.counters == SpeculationCounters(0, 0, 0, (0, 0), 0, 0)


def test_the_table_and_the_remarks_tell_what_went_wrong() -> None:
    page = io.StringIO()
    report.show(result(), Console(file=page, width=200))
    text = page.getvalue()
    for words in ("TTFT p99", "goodput", "mean acceptance length", "2.00 x as fast", "1.50 to 2.50", "SATURATED"):
        assert words in text
    assert "INTERRUPTED, by hand" in text and "FAILED (1 x timeout: x)" in text
    assert "nan" not in text.lower()


def test_every_plot_is_drawn_where_there_is_data_and_only_there() -> None:
    drawn = all_plots(result() | {"kind": "compare"})
    assert [title for title, _ in drawn] == list(PLOTS)
    assert all("<svg" in svg for _, svg in drawn)
    assert all_plots({"runs": [{"label": "x", "output_throughput": 1.0}]}) == []


def test_the_page_needs_no_other_file(tmp_path: Path) -> None:
    report.save(result(), tmp_path / "deep" / "r.html")
    text = (tmp_path / "deep" / "r.html").read_text(encoding="utf-8")
    images = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', text)
    assert len(images) == len(PLOTS) and all(b"<svg" in base64.b64decode(image) for image in images)
    outside = re.sub(r'src="data:[^"]+"', "", text)
    assert not re.search(r"(src|href)=|url\(|@import|<script", outside)
    assert "2.00 (1.50 to 2.50)" in text
    assert "&lt;1&gt;" in text and "<1>" not in text, "labels are text, not markup"
    HTMLParser().feed(text)


def test_the_json_stands_alone(tmp_path: Path) -> None:
    report.save(result(), tmp_path / "r.json")
    found = json.loads((tmp_path / "r.json").read_text(encoding="utf-8"))
    assert {"kind", "date", "command", "machine", "settings", "runs"} <= found.keys()
    names = ("request_throughput", "output_throughput", "mean_ttft_ms", "p99_itl_ms", "median_tpot_ms", "mean_e2el_ms")
    assert all(name in found["runs"][0] for name in names)
    assert found["machine"]["processor"] and found["machine"]["cores"] >= 1
