"""Measures the time of a step: the models' forwards, and the rest of the engine.

Run ``python -m benchmarks.overhead``. The output includes the share of the memory-bandwidth roofline that plain
decoding reaches: bytes of the target's weights over measured bandwidth, divided by the measured time per token. Steps
of one native call count as single steps; the library reports the time inside the models.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import prompts, timed, write
from cospec import LLM, SamplingParams
from cospec.bench.roofline import bandwidth, cost_of
from cospec.core.interfaces import Model
from cospec.drafters.model import ModelDrafter
from cospec.native.multi_step import NativeMultiStep
from cospec.text.input_processor import make_requests

CACHE_BYTES = 128 << 20
IDLE_SECONDS = 2.0  # in which the engine touches its caches: the first access to memory is slow


@dataclass
class Clock:
    """Seconds inside the forwards of the observed models, and inside the forwards of ``multi_step``."""

    multi_step: NativeMultiStep | None
    seconds: float = 0.0

    def read(self) -> float:
        """Return the seconds so far."""
        return self.seconds + (self.multi_step.working if self.multi_step is not None else 0.0)

    def watch(self, model: Model) -> None:
        """Count the time of every later forward of ``model``."""
        for name in ("forward", "rollout"):
            setattr(model, name, timed(getattr(model, name), self._spend))

    def _spend(self, seconds: float) -> None:
        self.seconds += seconds


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="zoo")
    parser.add_argument("--drafter", default="zoo:drafter")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of the weights")
    parser.add_argument("--name", default="overhead")
    options = parser.parse_args()
    configs = {
        "off": {"method": "off"},
        "draft_model k=4": {"method": "draft_model", "model": options.drafter, "num_speculative_tokens": 4},
        "ngram k=4": {"method": "ngram"},
    }
    table = Table("system", "batch", "temperature", "ms per step", "forwards", "engine", "engine share")
    rows = list[dict[str, Any]]()
    for name, config in configs.items():
        with LLM(options.model, config, dtype=options.dtype, kv_cache_memory_bytes=CACHE_BYTES) as llm:
            clock = watched(llm)
            time.sleep(IDLE_SECONDS)
            shares(llm, clock, SamplingParams(max_tokens=options.tokens, ignore_eos=True), 1, 1)  # caches are cold now
            for batch, temperature in product((1, 8), (0.0, 0.8)):
                params = SamplingParams(temperature=temperature, max_tokens=options.tokens, ignore_eos=True)
                row = shares(llm, clock, params, batch, options.repeats)
                rows.append({"system": name, "batch": batch, "temperature": temperature, **row})
                figures = (f"{row[key]:.3f}" for key in ("round_ms", "forward_ms", "engine_ms"))
                table.add_row(name, str(batch), str(temperature), *figures, f"{row['share']:.1%}")
    Console().print(table)
    roof = roofline(
        options.model, options.dtype, next(float(row["round_ms"]) for row in rows if row["system"] == "off")
    )
    print(roof)
    print("written to", write(options.name, {"rows": rows, "roofline": roof}))


def watched(llm: LLM) -> Clock:
    """A clock of the forwards of target and drafter."""
    multi_step = llm.engine.execution_mode.components.multi_step
    assert multi_step is None or isinstance(multi_step, NativeMultiStep)
    clock = Clock(multi_step)
    clock.watch(llm.engine.parts.model)
    drafter = llm.engine.execution_mode.components.drafter
    if isinstance(drafter, ModelDrafter):
        clock.watch(drafter.model)
    return clock


def shares(llm: LLM, clock: Clock, params: SamplingParams, batch: int, repeats: int) -> dict[str, float]:
    """Return milliseconds per decoding step, inside and outside of forwards: medians over ``repeats``, no prefills."""
    texts = [text for domain in ("code", "math", "prose") for text in prompts(domain, 3)][:batch]
    results = []
    for _ in range(repeats + 1):
        for text in texts:
            for request in make_requests(text[:40], llm.encode(text)[:128], params):
                llm.engine.add(replace(request, streams=False))  # as in ``LLM.generate``
        llm.engine.step()  # the prompts
        before, rounds, started = clock.read(), llm.engine.counters.steps, time.perf_counter()
        while llm.engine.scheduler.running and len(llm.engine.scheduler.running) == batch:
            llm.engine.step()
        total, inside = time.perf_counter() - started, clock.read() - before
        rounds = llm.engine.counters.steps - rounds
        while llm.engine.has_work:
            llm.engine.step()
        results.append((total / rounds * 1e3, inside / rounds * 1e3))
    total, inside = sorted(results[1:])[repeats // 2]
    return {"round_ms": total, "forward_ms": inside, "engine_ms": total - inside, "share": (total - inside) / total}


def roofline(model: str, dtype: str, ms: float) -> dict[str, float]:
    """Return the bytes of the weights, their read time at the measured bandwidth, and the share reached."""
    size = cost_of(model, dtype).weight_bytes
    measured = bandwidth()
    floor = size / measured / 1e6
    return {"weight_mb": size / 1e6, "gb_per_s": measured, "floor_ms": floor, "measured_ms": ms, "share": floor / ms}


if __name__ == "__main__":
    main()
