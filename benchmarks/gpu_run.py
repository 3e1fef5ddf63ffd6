"""All measurements of ``benchmarks.gpu`` on one model."""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import alternate
from benchmarks.gpu_models import Shape, fit_overlap, make_drafter, make_model, save
from benchmarks.gpu_systems import Call, Clock, Timed, Work, continuous_call, cospec_call, generate_call, one_line
from benchmarks.gpu_variants import VARIANTS, Variant
from cospec import LLM
from cospec.bench.paired_ratios import paired_ratio

BATCHES = {"static": range(1, 8), "continuous": range(8, 1 << 20)}
"""Batch sizes of transformers' systems; cospec runs at all."""
DRAFTED = 4  # tokens per draft
WARM_CALLS = 2  # of each system: a long run, and the first piece of work
OFF, DRAFT, GOODPUT = "cospec", "cospec, drafts of 4", "cospec, goodput"
LEAST_CACHE = 64 << 20  # bytes
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def works(shape: Shape, batch: int, options: argparse.Namespace, lengths: Sequence[int]) -> list[Work]:
    """Return the work of all turns: for each turn one piece per length, with the same new random prompts."""
    shuffler, pieces = random.Random(batch), []
    for _ in range(options.turns):
        prompts = [
            [shuffler.randrange(2, shape.vocabulary) for _ in range(options.prompt_tokens)] for _ in range(batch)
        ]
        pieces += [Work(prompts, length) for length in lengths]
    return pieces


def ratio(slow: Sequence[float], fast: Sequence[float]) -> dict[str, Any] | None:
    """Return the ratio over the turns that both systems have; None without one, or if noise exceeds a time."""
    pairs = list(zip(slow, fast, strict=False))
    if not pairs or min(map(min, pairs)) <= 0:
        return None
    return paired_ratio([one for one, _ in pairs], [one for _, one in pairs]).as_json()


def figures(seconds: Mapping[str, Sequence[float]], piece: Work, short: int) -> dict[str, dict[str, Any]]:
    """Return each system's figures; with ``short`` 0 each turn has only a long run.

    Args:
        seconds: of the runs of each system, in the order of ``works``, without the calls that warm up.
        piece: a long run.
    """
    stride = 2 if short else 1
    turns = {name: len(own) // stride for name, own in seconds.items()}
    longs = {name: list(own[stride - 1 :: stride]) for name, own in seconds.items()}
    steps = {
        name: [1e3 * (own[2 * turn + 1] - own[2 * turn]) / (piece.tokens - short) for turn in range(turns[name])]
        if short
        else []
        for name, own in seconds.items()
    }
    found: dict[str, dict[str, Any]] = {}
    for name in seconds:
        if not turns[name]:
            found[name] = {}
            continue
        row: dict[str, Any] = {
            "tokens_per_s": len(piece.prompts) * piece.tokens / statistics.median(longs[name]),
            "seconds": longs[name],
        }
        if steps[name]:
            row |= {"step_ms": statistics.median(steps[name]), "step_ms_samples": steps[name]}
        if OFF in seconds and name != OFF:
            row["run_ratio"] = ratio(longs[name], longs[OFF])
            if steps[name]:
                row["step_ratio"] = ratio(steps[name], steps[OFF])
        found[name] = row
    return found


def measure(
    systems: Mapping[str, Call], pieces: Sequence[Work], clock: Clock, label: str, short: int
) -> dict[str, dict[str, Any]]:
    """Run systems in turn, print a line for each, and return their figures or errors."""
    timed = {name: Timed(call, clock) for name, call in systems.items() if clock.allows(name)}
    skipped = {name: {"skipped": f"{clock.left:.0f} s left"} for name in systems if name not in timed}
    if timed:
        for name, own in timed.items():
            own(pieces[-1])  # the longest run first, because a static cache that grows compiles again
            print(label, name, "first run:", own.error or f"{own.seconds[0]:.1f} s", flush=True)
        alternate(timed, pieces, 1)
    found = figures({name: own.seconds[WARM_CALLS:] for name, own in timed.items()}, pieces[-1], short)
    for name, own in timed.items():
        if own.seconds:
            found[name]["warm_up_s"] = own.seconds[0]
        if own.error is not None:
            found[name]["error"] = own.error
        clock.needed(name, sum(own.seconds))
    found |= skipped
    for name, row in found.items():
        print(label, name, *line_of(row), flush=True)
    return found


def line_of(row: Mapping[str, Any]) -> list[str]:
    """Return the parts of the printed line of a system."""
    parts = [f"{row['step_ms']:.3f} ms/step"] if "step_ms" in row else []
    parts += [f"{row['tokens_per_s']:.0f} tokens/s"] if "tokens_per_s" in row else []
    if found := row.get("step_ratio") or row.get("run_ratio"):
        ends = ("" if found[end] is None else f"{found[end]:.2f}" for end in ("low", "high"))
        parts.append(f"{found['ratio']:.2f} x cospec's time ({' to '.join(ends)})")
    return parts + [f"{key}: {row[key]}" for key in ("error", "skipped") if key in row]


class ModelRun:
    """All measurements of one shape; ``result`` grows while they run, and ``store`` is called when it has grown."""

    def __init__(
        self,
        shape: Shape,
        options: argparse.Namespace,
        clock: Clock,
        bytes_per_s: float,
        store: Callable[[dict[str, Any]], None],
    ) -> None:
        self._shape, self._options, self._clock, self._bytes_per_s = shape, options, clock, bytes_per_s
        self._store = store
        self._failed: dict[str, str] = {}
        self.result: dict[str, Any] = {"model": shape.name, "weight_bytes_per_step": 2 * shape.weights_read}

    def run(self) -> None:
        """Make the weights, and measure each batch size without drafts, then each with drafts."""
        options, shape, started = self._options, self._shape, time.monotonic()
        variants = {f"without {name}": VARIANTS[name] for name in options.without}
        with tempfile.TemporaryDirectory(dir=options.folder) as folder, ExitStack() as stack:
            model = make_model(shape, options.device)
            drafter = make_drafter(model, shape, options.device) if options.speculate == shape.name else None
            if drafter is not None:
                scale, overlap = fit_overlap(model, drafter, shape)
                self.result |= {"scale_of_later_layers": scale, "overlap": overlap}
                save(drafter, Path(folder) / "drafter")
            target = save(model, Path(folder) / "target")
            own: dict[str, tuple[LLM, Variant]] = {}
            if OFF in options.systems:
                plain = {name: each for name, each in variants.items() if not each.drafted}
                for name, variant in ({OFF: Variant()} | plain).items():
                    self._open(stack, own, name, target, {"method": "off"}, variant)
            self._ready("preparation_s", started)
            self.result["cells"] = []
            for batch in options.batch:
                self.result["cells"].append(self._cell(model, own, batch))
                self._store(self.result)
            model.destroy_cached_continuous_batching_manager()
            for name in set(own) - {OFF}:
                own.pop(name)[0].close()
            if drafter is None:
                return
            drafted = {DRAFT: Variant(), **{name: each for name, each in variants.items() if each.drafted}}
            speculative = {"method": "draft_model", "model": str(Path(folder) / "drafter")}
            for name, variant in drafted.items():
                fixed = {"num_speculative_tokens": DRAFTED, "acceptance_method": "rejection"}
                self._open(stack, own, name, target, speculative | fixed, variant)
            started = time.monotonic()
            adaptive = {"policy": "goodput", "acceptance_method": "rejection"}
            self._open(stack, own, GOODPUT, target, speculative | adaptive, Variant())
            self._ready("goodput_start_s", started)
            self.result["speculation"] = []
            for batch in options.batch:
                self.result["speculation"].append(self._speculation(model, drafter, own, batch))
                self._store(self.result)

    def _ready(self, key: str, started: float) -> None:
        seconds = self.result[key] = time.monotonic() - started
        print(f"{self._shape.name} {key} {seconds:.1f}", flush=True)

    def _open(
        self,
        stack: ExitStack,
        opened: dict[str, tuple[LLM, Variant]],
        name: str,
        folder: Path,
        speculative: Mapping[str, Any],
        variant: Variant,
    ) -> None:
        """Load cospec under a name, or keep the error."""
        options, shape = self._options, self._shape
        longest = options.prompt_tokens + options.output_tokens + 64
        entries = shape.cache_entries + shape.drafter.cache_entries
        tokens = 2 * max(*options.batch, 16) * longest
        width = 4 if options.device == "cpu" else 2  # bytes of an entry
        try:
            with variant.patched():
                llm = LLM(
                    str(folder), speculative, device=options.device, dtype="bfloat16",
                    max_model_len=longest, enable_prefix_caching=False,
                    kv_cache_memory_bytes=max(LEAST_CACHE, width * tokens * entries), **variant.options,
                )  # fmt: skip
            opened[name] = stack.enter_context(llm), variant
        except Exception as error:
            self._failed[name] = one_line(error)
            print(shape.name, name, "error:", self._failed[name], flush=True)

    def _cell(self, model: Any, own: Mapping[str, tuple[LLM, Variant]], batch: int) -> dict[str, Any]:
        """Measure all systems without drafts at one batch size, greedily."""
        long, prompt = self._options.output_tokens, self._options.prompt_tokens
        short, failed = long // 4, {name: {"error": why} for name, why in self._failed.items()}
        systems = {name: patched_call(cospec_call(llm, 0.0), variant) for name, (llm, variant) in own.items()}
        wanted = [name for name in self._options.systems if batch in BATCHES.get(name, ())]
        if "static" in wanted:
            systems["static"] = generate_call(model, {"do_sample": False, "cache_implementation": "static"})
        if "continuous" in wanted:
            try:
                systems["continuous"] = continuous_call(model, batch, prompt, long)
            except Exception as error:
                failed["continuous"] = {"error": one_line(error)}
        pieces = works(self._shape, batch, self._options, (short, long))
        found = measure(systems, pieces, self._clock, f"{self._shape.name} batch {batch}", short)
        context = batch * (prompt + (long + short) / 2)  # mean tokens in the cache over the steps of the difference
        floor = 2e3 * (self._shape.weights_read + context * self._shape.cache_entries) / self._bytes_per_s
        row: dict[str, Any] = {"batch": batch, "floor_ms": floor, "systems": found | failed}
        if (step := found.get(OFF, {}).get("step_ms", 0)) > 0:
            row["cospec_share_of_floor"] = floor / step
            print(f"{self._shape.name} batch {batch} floor {floor:.3f} ms, {floor / step:.0%} of cospec's step")
        return row

    def _speculation(
        self, model: Any, drafter: Any, own: Mapping[str, tuple[LLM, Variant]], batch: int
    ) -> dict[str, Any]:
        """Measure all systems with and without drafts at one batch size, at temperature 1."""
        drafter.generation_config.num_assistant_tokens = DRAFTED
        drafter.generation_config.num_assistant_tokens_schedule = "constant"
        drafter.generation_config.assistant_confidence_threshold = 0.0
        stats: dict[str, list[Any]] = {name: [] for name in own if name != OFF}
        systems = {
            name: patched_call(cospec_call(llm, 1.0, stats.get(name)), variant) for name, (llm, variant) in own.items()
        }
        calls, forwards = [0], list[tuple[int, int]]()
        counted = model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        assisted = generate_call(model, SAMPLED, assistant_model=drafter)

        def counted_assisted(work: Work) -> list[int]:
            calls[0] = 0
            lengths = assisted(work)
            forwards.append((sum(lengths), calls[0]))
            return lengths

        if batch == 1 and "assisted" in self._options.systems:
            systems |= {"assisted": counted_assisted, "plain": generate_call(model, SAMPLED)}
        pieces = works(self._shape, batch, self._options, (self._options.output_tokens,))
        found = measure(systems, pieces, self._clock, f"{self._shape.name} temperature 1 batch {batch}", 0)
        counted.remove()
        for name, outcomes in stats.items():
            if drafts := sum(one.drafts for one in outcomes):
                mean = found[name]["mean_acceptance_length"] = 1 + sum(one.accepted for one in outcomes) / drafts
                proposed = found[name]["mean_draft_length"] = sum(one.drafted for one in outcomes) / drafts
                print(f"{name}: mean acceptance length {mean:.2f} of {proposed:.2f} drafted tokens", flush=True)
        if forwards and sum(count for _, count in forwards):
            found["assisted"]["tokens_per_forward"] = sum(n for n, _ in forwards) / sum(n for _, n in forwards)
        return {"batch": batch, "systems": found | {name: {"error": why} for name, why in self._failed.items()}}


def patched_call(call: Call, variant: Variant) -> Call:
    """Return a call that runs with what a variant replaces."""

    def patched(work: Work) -> list[int]:
        with variant.patched():
            return call(work)

    return patched
