"""Tokens per second on one pair of models: transformers, assisted generation, and this engine with and without drafts.

Run ``python -m benchmarks.latency``; every system runs on the same prompts in one process, in random order. All of
them write exactly ``--tokens`` tokens per prompt, greedily, so that equal work is compared. ``--batch`` prompts run at
once; assisted generation takes one only.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, Samples, alternate, prompts, write
from cospec import LLM, SamplingParams
from cospec.models.loading import resolve

Ids = list[list[int]]


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="zoo")
    parser.add_argument("--drafter", default="zoo:drafter")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--batch", type=int, default=1, help="prompts at once")
    parser.add_argument("--prompts", type=int, default=4, help="batches per domain")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--lengths", type=int, nargs="*", default=[2, 4, 6])
    parser.add_argument("--dtype", default="auto", help="of our weights; transformers runs in float32")
    parser.add_argument("--name", default="latency")
    options = parser.parse_args()
    with torch.inference_mode():
        figures = measure(options)
    print("written to", write(options.name, figures))


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every system on every domain; see ``systems``."""
    chosen, engines = systems(options)
    figures: dict[str, Any] = {"options": vars(options), "tokens_per_second": {}, "ratios": {}, "acceptance_length": {}}
    table = Table(f"tokens/s, {options.batch} at once", *DOMAINS, "all")
    tokens = options.tokens * options.batch
    together = Samples({name: [] for name in chosen})
    for domain in DOMAINS:
        ids = [engines["off"].encode(text)[:192] for text in prompts(domain, options.prompts * options.batch)]
        work = [ids[start : start + options.batch] for start in range(0, len(ids), options.batch)]
        samples = alternate(chosen, work, options.repeats)
        for name in chosen:
            together.seconds[name] += samples.seconds[name]
            figures["tokens_per_second"].setdefault(name, {})[domain] = tokens / samples.median(name)
        for name, llm in engines.items():
            outputs = llm.generate(ids, params(options.tokens))
            mean = sum(output.stats.mean_acceptance_length for output in outputs) / len(outputs)
            figures["acceptance_length"].setdefault(name, {})[domain] = round(mean, 2)
    for name, speeds in figures["tokens_per_second"].items():
        speeds["all"] = tokens / together.median(name)
        table.add_row(name, *(f"{speed:.1f}" for speed in speeds.values()))
    Console().print(table)
    for slow in [name for name in chosen if name not in engines] + ["off"]:
        for fast in engines:
            middle, low, high = together.ratio(slow, fast)
            figures["ratios"][f"{fast} / {slow}"] = [round(value, 2) for value in (middle, low, high)]
            print(f"{fast} is {middle:.2f} x as fast as {slow} (95% interval {low:.2f} to {high:.2f})")
    print("mean acceptance length:", figures["acceptance_length"])
    return figures


def systems(options: argparse.Namespace) -> tuple[dict[str, Callable[[Ids], object]], dict[str, LLM]]:
    """The systems by name, and those of them that are our own engine."""
    from transformers import AutoModelForCausalLM

    load = functools.partial(AutoModelForCausalLM.from_pretrained, dtype=torch.float32)
    target, drafter = load(resolve(options.model)).eval(), load(resolve(options.drafter)).eval()

    def theirs(ids: Ids, **extra: Any) -> object:
        longest = max(map(len, ids))
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
        return target.generate(
            torch.tensor([[0] * (longest - len(row)) + row for row in ids]),
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=options.tokens,
            max_new_tokens=options.tokens,
            **extra,
        )

    llm = functools.partial(LLM, options.model, dtype=options.dtype)
    draft = {"method": "draft_model", "model": options.drafter}
    engines = {"off": llm({"method": "off"})}
    for length in options.lengths:
        engines[f"draft_model k={length}"] = llm({**draft, "num_speculative_tokens": length})
    engines["ngram k=4"] = llm({"method": "ngram"})
    chosen: dict[str, Callable[[Ids], object]] = {"transformers.generate": theirs}
    if options.batch == 1:
        chosen["transformers assisted"] = functools.partial(theirs, assistant_model=drafter)
    for name, llm in engines.items():
        chosen[name] = functools.partial(_ours, llm, params(options.tokens))
    return chosen, engines


def _ours(llm: LLM, sampling: SamplingParams, ids: Ids) -> object:
    return llm.generate(ids, sampling)


def params(tokens: int) -> SamplingParams:
    """Greedy, to a fixed length."""
    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


if __name__ == "__main__":
    main()
