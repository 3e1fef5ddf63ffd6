"""Medusa heads: the accuracy of each head, and the best tree of their predictions.

Run ``python -m benchmarks.heads``. The first table has the accuracy of each head and rank on held-out text of the
target, from training (``heads.json``). The other tables draft on the shipped prompts of three domains, greedy and at
temperature 0.8. Compared are the full tree of given widths, the sparse tree with the same number of nodes, the chain,
prompt lookup and the generic drafter. A sparse tree holds the likeliest paths.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.common import DOMAINS, prompts, write
from cospec import LLM, SamplingParams
from cospec.drafters.medusa import level_paths
from cospec.models.medusa_heads import MedusaHeads, resolve_medusa_heads

TEMPERATURES = {"rows": 0.0, "sampled": 0.8}  # temperatures by their names in the results
WIDTHS = ((2, 2), (3, 2), (2, 2, 2), (3, 2, 2), (4, 3, 2))


def systems(depth: int) -> dict[str, dict[str, Any]]:
    """Return the compared ``speculative_config`` by name."""
    heads = {"method": "heads", "policy": "fixed"}
    found = {f"chain of {n}": {**heads, "num_speculative_tokens": n} for n in range(1, depth + 1)}
    for widths in WIDTHS:
        nodes = len(level_paths(widths, 64))
        shape = ",".join(map(str, widths))
        found[f"full {shape} ({nodes})"] = {
            **heads, "num_speculative_tokens": len(widths), "widths": list(widths), "max_nodes": nodes,
        }  # fmt: skip
        found[f"sparse ({nodes}), as deep as {shape}"] = {
            **heads, "num_speculative_tokens": len(widths), "max_nodes": nodes,
        }  # fmt: skip
        found[f"sparse ({nodes})"] = {**heads, "num_speculative_tokens": depth, "max_nodes": nodes}
    found["draft_model k=4"] = {"method": "draft_model", "num_speculative_tokens": 4}
    found["ngram k=4"] = {"method": "ngram", "num_speculative_tokens": 4}
    return found


def measure(llm: LLM, texts: list[str], params: SamplingParams, batch: int) -> dict[str, Any]:
    """Measure the acceptance length with a 95% bootstrap interval over prompts, and its speed."""
    llm.generate(texts[:batch], params)
    before = llm.engine.metrics().step_seconds
    outputs = llm.generate(texts, params)
    seconds = llm.engine.metrics().step_seconds - before
    stats = [output.stats for output in outputs]
    sums = np.array([[s.accepted, s.drafts, s.drafted, s.target_calls] for s in stats], dtype=float)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    draws = np.random.default_rng(0).integers(0, len(sums), (2000, len(sums)))
    resampled = sums[draws].sum(1)
    low, high = np.quantile(1 + resampled[:, 0] / resampled[:, 1], [0.025, 0.975])
    accepted, drafts, drafted, calls = sums.sum(0)
    return {
        "acceptance_length": [1 + accepted / drafts, low, high],
        "nodes": drafted / drafts,
        "tokens_per_call": tokens / calls,
        "verified_per_token": (drafted + calls) / tokens,
        "tokens_per_s": tokens / seconds,
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=8, help="of each domain")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--name", default="heads")
    options = parser.parse_args()
    accuracy = MedusaHeads.load(resolve_medusa_heads("zoo:heads")).accuracy
    first = Table(
        "head", *(f"width {k}" for k in range(1, len(accuracy[0]) + 1)), title="accuracy of the first k predictions"
    )
    for number, ranks in enumerate(accuracy, start=1):
        first.add_row(str(number), *(f"{share:.1%}" for share in itertools.accumulate(ranks)))
    texts = [text for group in zip(*(prompts(d, options.prompts) for d in DOMAINS), strict=True) for text in group]
    found: dict[str, dict[str, dict[str, Any]]] = {kind: {} for kind in TEMPERATURES}
    for name, config in systems(len(accuracy)).items():
        llm = LLM("zoo", config, max_num_seqs=options.batch)
        for kind, temperature in TEMPERATURES.items():
            params = SamplingParams(temperature=temperature, seed=1, max_tokens=options.tokens, ignore_eos=True)
            found[kind][name] = measure(llm, texts, params, options.batch)
    Console().print(first)
    for kind, temperature in TEMPERATURES.items():
        show(f"temperature {temperature:g}, three domains", found[kind])
    print(
        "written to",
        write(options.name, {"options": vars(options), "accuracy": accuracy, "temperatures": TEMPERATURES, **found}),
    )


def show(title: str, rows: Mapping[str, Mapping[str, Any]]) -> None:
    """Print a row for each system."""
    heads = ("drafts", "nodes", "acceptance length", "tokens per call", "verified per token", "tokens/s")
    table = Table(*heads, title=title)
    for name, row in rows.items():
        table.add_row(
            name,
            f"{row['nodes']:.1f}",
            "{:.2f} ({:.2f} to {:.2f})".format(*row["acceptance_length"]),
            f"{row['tokens_per_call']:.2f}",
            f"{row['verified_per_token']:.2f}",
            f"{row['tokens_per_s']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
