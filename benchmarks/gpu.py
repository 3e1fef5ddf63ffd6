"""Decoding on one GPU: cospec and transformers on the same random weights in the shapes of Qwen3.

Run ``python -m benchmarks.gpu [--models Qwen3-8B] [--batch 1 8 32] [--seconds 280]``. A dry run without a GPU is
``python -m benchmarks.gpu --device cpu --models tiny --output /tmp/dry.json``.

All systems decode greedily, to a fixed length. ``static`` is ``generate`` of transformers with a static cache, which
compiles the forward on a GPU. ``continuous`` is its continuous batching. In each turn the systems run in random order,
once with all output tokens and once with a quarter of them. The difference divided by the number of further steps is
the time of a step; it includes no prompt and no fixed cost of a call. A ratio is a system's time over cospec's.
``floor_ms`` is the time in which the device copies as many bytes as a step reads.

One model also runs with a drafter, at temperature 1 and batch 1; ``benchmarks.gpu_models`` says how both models are
made. ``assisted`` is assisted generation of transformers, and ``plain`` its generation without a drafter. These
figures include the prompt.

The results are written after each batch size. A system that fails has its error in the results, and the others go on.
Before each cell a system is skipped if fewer seconds are left than it needed in the cell before.
``HF_HUB_OFFLINE=1`` keeps transformers from looking for kernels on the network.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib.metadata
import random
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import alternate, write
from benchmarks.gpu_models import SHAPES, Shape, fit_overlap, make_drafter, make_model, save
from benchmarks.gpu_systems import (
    Call,
    Clock,
    Timed,
    Work,
    continuous_call,
    cospec_call,
    generate_call,
    one_line,
    synchronize,
)
from cospec import LLM
from cospec.bench.paired_ratios import paired_ratio
from cospec.bench.roofline import bandwidth

BATCHES = {"static": range(1, 9), "continuous": range(8, 1 << 20)}
"""Batch sizes of transformers' systems; cospec runs at all."""
DRAFTED = 4  # tokens per draft
COPY_BYTES = 2 << 30
WARM_CALLS = 2  # of each system: a long run, and the first piece of work
BASE = "cospec"  # the system of the ratios
LEAST_CACHE = 64 << 20  # bytes
OVERTIME = 60.0  # seconds after the end, for the call that runs then
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}


def free() -> None:
    """Free unused memory of closed models, and compiled code, which refers to its model."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def copy_bandwidth(device: str) -> float:
    """Return bytes read and written per second by copies within the device's memory; on a CPU only bytes read."""
    if device == "cpu":
        return bandwidth() * 1e9
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target, best = torch.empty_like(source), float("inf")
    for _ in range(6):
        synchronize()
        started = time.perf_counter()
        for _ in range(4):
            target.copy_(source)
        synchronize()
        best = min(best, (time.perf_counter() - started) / 4)
    return 2 * COPY_BYTES / best


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


def figures(seconds: Mapping[str, Sequence[float]], piece: Work, short: int, base: str) -> dict[str, dict[str, Any]]:
    """Return each system's figures; with ``short`` 0 each turn has only a long run.

    Args:
        seconds: of the runs of each system, in the order of ``works``, without the calls that warm up.
        piece: a long run.
        base: the system of the ratios.
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
        if base in seconds and name != base:
            row["run_ratio"] = ratio(longs[name], longs[base])
            if steps[name]:
                row["step_ratio"] = ratio(steps[name], steps[base])
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
    counts = {name: own.seconds[WARM_CALLS:] for name, own in timed.items()}
    found = figures(counts, pieces[-1], short, BASE if short else f"{BASE}-off")
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
        self, shape: Shape, options: argparse.Namespace, clock: Clock, bytes_per_s: float, store: Callable[[], None]
    ) -> None:
        self._shape, self._options, self._clock, self._bytes_per_s = shape, options, clock, bytes_per_s
        self._store = store
        self._llms: dict[str, LLM] = {}
        self._failed: dict[str, str] = {}
        self.result: dict[str, Any] = {"model": shape.name, "weight_bytes_per_step": 2 * shape.weights_read}

    def run(self) -> None:
        """Make the weights, and measure each batch size, then speculation."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self._options.folder) as folder, ExitStack() as stack:
            model = make_model(self._shape, self._options.device)
            drafter = None
            if self._options.speculate == self._shape.name:
                drafter = make_drafter(model, self._shape, self._options.device)
                scale, overlap = fit_overlap(model, drafter, self._shape)
                self.result |= {"scale_of_later_layers": scale, "overlap": overlap}
                save(drafter, Path(folder) / "drafter")
            target = save(model, Path(folder) / "target")
            for backend in ("auto", *self._options.attention):
                name = "cospec" if backend == "auto" else f"cospec-{backend}"
                if name.partition("-")[0] in self._options.systems:
                    self._open(stack, name, target, {"method": "off"}, attention_backend=backend)
            self.result["preparation_s"] = time.monotonic() - started
            print(f"{self._shape.name} is ready after {self.result['preparation_s']:.1f} s", flush=True)
            self.result["cells"] = []
            for batch in self._options.batch:
                self.result["cells"].append(self._cell(model, batch))
                self._store()
            model.destroy_cached_continuous_batching_manager()
            if drafter is not None:
                self.result["speculation"] = self._speculation(stack, model, drafter, Path(folder))
        self._clock.needed("model", self.result["preparation_s"], self._shape.weights_read)

    def _open(self, stack: ExitStack, name: str, folder: Path, speculative: Mapping[str, Any], **options: Any) -> None:
        """Load cospec under a name, or keep the error."""
        longest = self._options.prompt_tokens + self._options.output_tokens + 16
        entries = self._shape.cache_entries + self._shape.drafter.cache_entries
        tokens = 2 * max(self._options.batch) * longest
        width = 4 if self._options.device == "cpu" else 2  # bytes of an entry
        try:
            self._llms[name] = stack.enter_context(
                LLM(
                    str(folder), speculative, device=self._options.device, dtype="bfloat16",
                    max_model_len=longest, enable_prefix_caching=False,
                    kv_cache_memory_bytes=max(LEAST_CACHE, width * tokens * entries), **options,
                )
            )  # fmt: skip
        except Exception as error:
            self._failed[name] = one_line(error)
            print(self._shape.name, name, "error:", self._failed[name], flush=True)

    def _cell(self, model: Any, batch: int) -> dict[str, Any]:
        """Measure all systems at one batch size."""
        long, prompt = self._options.output_tokens, self._options.prompt_tokens
        short, failed = long // 4, {name: {"error": why} for name, why in self._failed.items() if "draft" not in name}
        systems = {name: cospec_call(llm, 0.0) for name, llm in self._llms.items() if "draft" not in name}
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
        if (own := found.get("cospec", {}).get("step_ms", 0)) > 0:
            row["cospec_share_of_floor"] = floor / own
            print(
                f"{self._shape.name} batch {batch} floor {floor:.3f} ms, {floor / own:.0%} of cospec's step", flush=True
            )
        return row

    def _speculation(self, stack: ExitStack, model: Any, drafter: Any, folder: Path) -> dict[str, Any]:
        """Measure with and without a drafter, at temperature 1."""
        speculative = {
            "method": "draft_model",
            "model": str(folder / "drafter"),
            "num_speculative_tokens": DRAFTED,
            "acceptance_method": "rejection",
        }
        drafter.generation_config.num_assistant_tokens = DRAFTED
        drafter.generation_config.num_assistant_tokens_schedule = "constant"
        drafter.generation_config.assistant_confidence_threshold = 0.0
        calls, stats = [0], list[Any]()
        counted = model.register_forward_hook(lambda *_: calls.__setitem__(0, calls[0] + 1))
        assisted = generate_call(model, SAMPLED, assistant_model=drafter)
        forwards: list[tuple[int, int]] = []

        def counted_assisted(work: Work) -> list[int]:
            calls[0] = 0
            lengths = assisted(work)
            forwards.append((sum(lengths), calls[0]))
            return lengths

        with ExitStack() as own:
            own.callback(counted.remove)
            self._open(own, "cospec-draft", folder / "target", speculative)
            systems: dict[str, Call] = {}
            if "cospec" in self._llms:
                systems["cospec-off"] = cospec_call(self._llms["cospec"], 1.0)
            if "cospec-draft" in self._llms:
                systems["cospec-draft"] = cospec_call(self._llms["cospec-draft"], 1.0, stats)
            systems |= {"assisted": counted_assisted, "plain": generate_call(model, SAMPLED)}
            pieces = works(self._shape, 1, self._options, (self._options.output_tokens,))
            found = measure(systems, pieces, self._clock, f"{self._shape.name} temperature 1", 0)
            self._llms.pop("cospec-draft", None)
        if (failed := self._failed.pop("cospec-draft", None)) is not None:
            found["cospec-draft"] = {"error": failed}
        if drafts := sum(one.drafts for one in stats):
            found["cospec-draft"]["mean_acceptance_length"] = 1 + sum(one.accepted for one in stats) / drafts
            print(f"mean acceptance length {found['cospec-draft']['mean_acceptance_length']:.2f}", flush=True)
        if forwards and sum(count for _, count in forwards):
            found["assisted"]["tokens_per_forward"] = sum(n for n, _ in forwards) / sum(n for _, n in forwards)
        return found


def device_facts(device: str) -> dict[str, Any]:
    """Return the GPU's name, driver and memory, and Triton's version."""
    facts: dict[str, Any] = {"name": "cpu"}
    if device != "cpu":
        facts = {"name": torch.cuda.get_device_name(), "memory_bytes": torch.cuda.mem_get_info()[1]}
        if shutil.which("nvidia-smi"):
            query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
            facts["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    try:
        facts["triton"] = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        facts["triton"] = None
    return facts


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["Qwen3-8B", "Qwen3-0.6B", "Qwen3-1.7B"]
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=names, help="in this order")
    parser.add_argument("--speculate", choices=[*SHAPES, "none"], help="the model with a drafter; default: the largest")
    parser.add_argument("--systems", nargs="+", choices=["cospec", *BATCHES], default=["cospec", *BATCHES])
    parser.add_argument("--attention", nargs="*", default=[], help="further attention backends of cospec")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=128, help="at least 4")
    parser.add_argument("--seconds", type=float, default=280.0, help="for the whole run")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--folder", type=Path, help="of the temporary weights")
    parser.add_argument("--output", type=Path, help="of the results; default: benchmarks/results/gpu/DEVICE.json")
    options = parser.parse_args()
    options.speculate = options.speculate or max(options.models, key=lambda name: SHAPES[name].weights_read)
    return options


def main() -> None:
    """Measure, print, store."""
    options = parse()
    faulthandler.dump_traceback_later(options.seconds + OVERTIME, exit=True)  # shows a call that does not return
    clock, facts, rate = Clock(options.seconds), device_facts(options.device), copy_bandwidth(options.device)
    print(f"{facts['name']}: {rate / 1e9:.0f} GB/s", flush=True)
    slug = re.sub(r"[^a-z0-9]+", "-", facts["name"].lower()).strip("-")
    name = f"gpu/{slug}" if options.output is None else str(options.output.resolve().with_suffix(""))
    settings = {key: value for key, value in vars(options).items() if key not in {"folder", "output"}}
    models: list[dict[str, Any]] = []

    def store() -> None:
        write(name, {"device": facts, "bytes_per_s": rate, "options": settings, "models": models})

    for each in options.models:
        free()
        if not clock.allows("model", SHAPES[each].weights_read):
            print(f"{each} skipped: {clock.left:.0f} s left")
            models.append({"model": each, "skipped": f"{clock.left:.0f} s left"})
            continue
        run = ModelRun(SHAPES[each], options, clock, rate, store)
        models.append(run.result)
        try:
            run.run()
        except Exception as error:
            run.result["error"] = one_line(error)
            print(each, "error:", run.result["error"], flush=True)
        del run
        store()


if __name__ == "__main__":
    main()
