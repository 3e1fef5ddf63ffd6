"""Latencies and rates from streams whose times are known exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cospec.bench.metrics import (
    Selection,
    keeps,
    latency,
    parse_goodput,
    parse_metrics,
    parse_percentiles,
    summarise,
)
from cospec.bench.request_record import Chunk, Timing
from cospec.errors import InvalidInput


def stream(*chunks: tuple[float, int], sent: float = 0.0, **more: Any) -> Timing:
    """A request whose chunks came at these seconds with so many tokens."""
    made = tuple(Chunk(at, "x" * max(tokens, 1), tokens) for at, tokens in chunks)
    end = chunks[-1][0] if chunks else sent
    return Timing(id="r", arrival=sent, sent=sent, end=end, chunks=made, **more)


def test_one_token_a_chunk() -> None:
    found = latency(stream((1.2, 1), (1.25, 1), (1.35, 1), sent=1.0))
    assert found is not None
    assert found.ttft == pytest.approx(0.2)
    assert found.itl == pytest.approx((0.05, 0.1))
    assert found.tpot == pytest.approx(0.075)
    assert found.e2el == pytest.approx(0.35)


def test_tokens_of_a_chunk_share_the_time_before_it() -> None:
    found = latency(stream((0.1, 1), (0.14, 4), (0.17, 3)))
    assert found is not None
    assert found.itl == pytest.approx((0.01,) * 7)
    assert found.tpot == pytest.approx(0.01)


def test_tokens_that_come_with_the_first_token_took_no_time() -> None:
    found = latency(stream((0.1, 3), (0.2, 2)))
    assert found is not None
    assert found.ttft == pytest.approx(0.1)
    assert found.itl == pytest.approx((0.0, 0.0, 0.05, 0.05))
    assert found.tpot == pytest.approx(0.1 / 4)


def test_a_chunk_without_a_beginning_token_counts_with_its_neighbour() -> None:
    between = latency(stream((0.1, 1), (0.15, 0), (0.2, 1)))
    after = latency(stream((0.1, 1), (0.2, 2), (0.3, 0)))
    alone = latency(stream((0.1, 3), (0.3, 0)))
    assert between is not None and after is not None and alone is not None
    assert between.itl == pytest.approx((0.1,))
    assert after.itl == pytest.approx((0.1, 0.1)) and after.e2el == pytest.approx(0.3)
    assert alone.itl == pytest.approx((0.1, 0.1))


@given(
    st.lists(st.tuples(st.floats(0.001, 2.0), st.integers(0, 6)), min_size=1, max_size=20),
    st.integers(1, 5),
)
def test_itl_adds_up_however_a_stream_is_cut(gaps: list[tuple[float, int]], head: int) -> None:
    at, chunks = 0.3, [(0.3, head)]
    for gap, tokens in gaps:
        at += gap
        chunks.append((at, tokens))
    total = head + sum(tokens for _, tokens in gaps)
    found = latency(stream(*chunks))
    assert found is not None and found.ttft is not None
    assert len(found.itl) == total - 1
    if total > 1:
        assert sum(found.itl) == pytest.approx(found.e2el - found.ttft)
        assert found.tpot == pytest.approx(sum(found.itl) / len(found.itl))


def test_what_does_not_stream_has_only_its_end() -> None:
    found = latency(stream((0.5, 8), streamed=False))
    assert found is not None and found.e2el == pytest.approx(0.5)
    assert found.ttft is None and found.tpot is None and found.itl == ()


def test_no_text_gives_no_latency_and_disorder_is_an_error() -> None:
    assert latency(stream()) is None
    with pytest.raises(ValueError, match="order"):
        latency(stream((0.2, 1), (0.1, 1)))


def test_figures_of_a_run_are_right_to_the_millisecond() -> None:
    runs = [
        stream((0.100, 1), (0.140, 4), prompt_tokens=10),
        stream((0.300, 1), (0.500, 2), (0.700, 2), prompt_tokens=20),
        stream((0.200, 1), error="gone", error_kind="connection lost", prompt_tokens=30),
    ]
    selection = Selection(goodput={"ttft": 200.0, "tpot": 50.0})
    found = summarise(runs, 2.0, selection)
    assert found["completed"] == 2 and found["failed"] == 1
    assert found["total_input_tokens"] == 30 and found["total_output_tokens"] == 10
    assert found["request_throughput"] == 1.0 and found["output_throughput"] == 5.0
    assert found["total_token_throughput"] == 20.0
    assert found["mean_ttft_ms"] == pytest.approx(200.0)
    assert found["p99_ttft_ms"] == pytest.approx(298.0)
    assert found["mean_tpot_ms"] == pytest.approx((10.0 + 100.0) / 2)
    assert found["mean_itl_ms"] == pytest.approx((4 * 10.0 + 4 * 100.0) / 8)
    assert found["p50_e2el_ms"] == found["median_e2el_ms"] == pytest.approx(420.0)
    assert found["request_goodput"] == 0.5 and found["goodput_share"] == pytest.approx(1 / 3)


def test_goodput_bounds_are_kept_up_to_and_including_them() -> None:
    one = latency(stream((0.25, 1), (0.3125, 1)))
    assert one is not None
    assert keeps(one, {"ttft": 250.0, "tpot": 62.5, "e2el": 312.5})
    assert not keeps(one, {"tpot": 62.4})
    single = latency(stream((0.25, 1)))
    assert single is not None and keeps(single, {"tpot": 1.0})


def test_options_are_read_as_vllm_reads_them() -> None:
    assert parse_goodput(["ttft:200", "tpot:50"]) == parse_goodput(["ttft:200 tpot:50"]) == {"ttft": 200, "tpot": 50}
    assert parse_metrics("ttft,itl") == ("ttft", "itl")
    assert parse_percentiles("50,99.9") == (50.0, 99.9)
    found = summarise([stream((0.1, 1), (0.2, 1))], 1.0, Selection(("itl",), (90.0,)))
    assert found["p90_itl_ms"] == pytest.approx(100.0) and "mean_ttft_ms" not in found


@pytest.mark.parametrize(
    ("read", "given"),
    [
        (parse_goodput, ["itl:5"]),
        (parse_goodput, ["ttft"]),
        (parse_goodput, ["ttft:nan"]),
        (parse_metrics, "ttft,speed"),
        (parse_percentiles, "101"),
        (parse_percentiles, "high"),
    ],
)
def test_wrong_options_are_named(read: Callable[[Any], object], given: object) -> None:
    with pytest.raises(InvalidInput, match="allowed is"):
        read(given)
