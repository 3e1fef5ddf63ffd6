"""The target distribution of one sequence's rows."""

from __future__ import annotations

from torch import Tensor

from cospec.core.sampling import History, RowBlock, target_probs
from cospec.rng.random_streams import Floats
from cospec.sampling_params import SamplingParams


def target_probs_of(logits: Tensor, params: SamplingParams, history: History) -> Floats:
    """``target_probs`` of a single block."""
    return target_probs(logits, [RowBlock(params, history)])
