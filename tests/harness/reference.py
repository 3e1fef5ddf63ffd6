"""The output distribution of the toy model, by slow lines that share no code with the engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from cospec.sampling_params import SamplingParams
from harness.enumerated_draws import OutputDistribution


class Table(Protocol):
    """The logits after a context, such as ``ToyModel`` gives."""

    def logits(self, context: Sequence[int]) -> Tensor: ...


def next_distribution(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int]
) -> list[float]:
    """Probabilities of the next token from raw logits and every parameter."""
    values = [float(value) for value in logits]
    for token in range(len(values)):
        if token in prompt or token in output:
            values[token] *= 1 / params.repetition_penalty if values[token] > 0 else params.repetition_penalty
        count = list(output).count(token)
        values[token] -= params.frequency_penalty * count + (params.presence_penalty if count else 0.0)
        values[token] += (params.logit_bias or {}).get(token, 0.0)
        early = token in params.stop_token_ids and len(output) < params.min_tokens
        if early or token not in (params.allowed_token_ids or [token]) or _ends_bad_words(params, [*output, token]):
            values[token] = -math.inf
    if params.temperature < 1e-5:
        return [float(token == values.index(max(values))) for token in range(len(values))]
    top = max(values)
    return truncated(normalised([math.exp((value - top) / params.temperature) for value in values]), params)


def _ends_bad_words(params: SamplingParams, output: Sequence[int]) -> bool:
    return any(list(output[-len(words) :]) == list(words) for words in params.bad_words_token_ids)


def truncated(p: list[float], params: SamplingParams) -> list[float]:
    """Top-k, then top-p, then min-p, equal probabilities kept together."""
    if 0 < params.top_k < len(p):
        least = sorted(p, reverse=True)[params.top_k - 1]
        p = normalised([value if value >= least else 0.0 for value in p])
    if params.top_p < 1:
        before, least = 0.0, 0.0
        for value in sorted(p, reverse=True):
            if before < params.top_p:
                least = value
            before += value
        p = normalised([value if value >= least else 0.0 for value in p])
    if params.min_p > 0:
        p = normalised([value if value >= params.min_p * max(p) else 0.0 for value in p])
    return p


def normalised(values: Sequence[float]) -> list[float]:
    total = math.fsum(values)
    return [value / total for value in values]


def joint_distribution_of(
    model: Table, params: SamplingParams, prompt: Sequence[int], length: int
) -> OutputDistribution:
    """Of the first ``length`` tokens, fewer where a stop token ends the output before."""
    distribution: OutputDistribution = {(): 1.0}
    for _ in range(length):
        longer: OutputDistribution = {}
        for output, mass in distribution.items():
            assert isinstance(output, tuple)
            if output and output[-1] in params.stop_token_ids:
                longer[output] = mass
                continue
            p = next_distribution(model.logits([*prompt, *output]).tolist(), params, prompt, output)
            longer |= {(*output, token): mass * p[token] for token in range(len(p)) if p[token] > 0}
        distribution = longer
    return distribution
