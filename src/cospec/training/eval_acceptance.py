"""Measures every drafter's acceptance on every domain with the engine, as in table 2 of CoSine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cospec.sampling_params import SamplingParams

DEPTH, LENGTH = 4, 128  # tokens of a draft, tokens of an output

# Domain -> measured values.
Figures = Mapping[str, Mapping[str, float]]


def acceptances(
    target: Path, drafters: Sequence[Path], prompts: Mapping[str, list[list[int]]], temperatures: Sequence[float]
) -> dict[str, dict[str, Figures]]:
    """Return acceptance by temperature, drafter and domain.

    Drafts are chains of four; above temperature 0 the acceptance method is ``rejection``.

    Args:
        target: a model folder, like the ``drafters``; the last part of a path is the drafter's name.
        prompts: token ids by domain.

    Returns:
        ``acceptance_length``: mean tokens per draft, the target's token included. ``draft_acceptance_rate``:
        accepted over proposed tokens. ``tokens``: proposed.
    """
    found: dict[str, dict[str, Figures]] = {f"{temperature:g}": {} for temperature in temperatures}
    for drafter in drafters:
        measured = _accepted(target, drafter, prompts, temperatures)
        for temperature, figures in measured.items():
            found[temperature][drafter.name] = figures
    return found


def _accepted(
    target: Path, drafter: Path, prompts: Mapping[str, list[list[int]]], temperatures: Sequence[float]
) -> dict[str, Figures]:
    from cospec.llm import LLM

    options = {
        "method": "draft_model",
        "model": str(drafter),
        "num_speculative_tokens": DEPTH,
        "policy": "fixed",
        "acceptance_method": "rejection",
    }
    llm = LLM(str(target), options)
    found: dict[str, Figures] = {}
    for temperature in temperatures:
        figures = {}
        for domain, domain_prompts in prompts.items():
            params = [
                SamplingParams(temperature=temperature, max_tokens=LENGTH, seed=i) for i in range(len(domain_prompts))
            ]
            stats = [output.stats for output in llm.generate(domain_prompts, params)]
            drafts, drafted, accepted = (
                sum(getattr(s, key) for s in stats) for key in ("drafts", "drafted", "accepted")
            )
            figures[domain] = {
                "acceptance_length": round(1 + accepted / max(1, drafts), 4),
                "draft_acceptance_rate": round(accepted / max(1, drafted), 4),
                "tokens": drafted,
            }
        found[f"{temperature:g}"] = figures
    return found
