"""Every drafter on every domain, by the engine itself: CoSine's table 2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cospec.sampling_params import SamplingParams

DEPTH, LENGTH = 4, 128  # tokens of a draft, tokens of an output

# Domain -> what was counted there.
Figures = Mapping[str, Mapping[str, float]]


def acceptances(
    target: Path, drafters: Sequence[Path], prompts: Mapping[str, list[list[int]]], temperatures: Sequence[float]
) -> dict[str, dict[str, Figures]]:
    """Temperature -> drafter -> domain -> figures.

    Drafts are chains of four; above temperature 0 they are judged by speculative sampling (rule ``rejection``).

    Args:
        target: a model folder, as are the ``drafters``; the last part of each path is the drafter's name.
        prompts: token ids by domain.

    Returns:
        ``acceptance_length``: mean tokens that a draft gave, the target's own included. ``draft_acceptance_rate``:
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
        for domain, asked in prompts.items():
            params = [SamplingParams(temperature=temperature, max_tokens=LENGTH, seed=i) for i in range(len(asked))]
            stats = [output.stats for output in llm.generate(asked, params)]
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
