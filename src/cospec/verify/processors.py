"""Check group for logits processors of the user: drafts change no token, and neither does an earlier state.

The engine keeps states from step to step, and draft paths share them. The reference builds new processors for every
token, which read the whole text. So a processor that writes into a state, or remembers rejected tokens, is caught.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cospec.core.types import SpeculationParams
from cospec.sampling_params import SamplingParams
from cospec.verify.context import Check, CheckContext
from cospec.verify.identity import LENGTH, SEED, TEMPERATURE, DecodingPair, compare, prompt_outputs

GROUP = "logits processors"


def run_checks(context: CheckContext) -> Iterator[Check]:
    """Check greedy and seeded outputs with and without drafts, and both against transformers."""
    if not context.processors:
        return
    length, names = context.effort.tokens, dict(context.processors)
    greedy = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, logits_processors=names)
    seeded = replace(greedy, temperature=TEMPERATURE, seed=SEED)
    for kind, params in (("greedy", greedy), ("seeded", seeded)):
        plain, drafted = (
            prompt_outputs(context, params, SpeculationParams(acceptance_method="match", **how))
            for how in ({"enabled": False}, {"length": LENGTH})
        )
        pair = DecodingPair(drafted, plain, SEED)
        yield compare(context, GROUP, f"{kind}, drafts of {LENGTH} = plain decoding", params, pair)
        for name, outputs in (("plain decoding", plain), (f"drafts of {LENGTH}", drafted)):
            gaps = [
                gap
                for id, tokens in outputs.items()
                for gap in context.reference.shortfalls(context.prompts[int(id)], tokens, params, SEED)
            ]
            passed = all(gap < context.tolerance for gap in gaps)  # a gap that is no number fails
            found = f"largest gap to the best token {max(gaps, default=0.0):.1e}"
            yield Check(GROUP, f"{kind}, {name} = transformers", found, f"below {context.tolerance:g}", passed)
