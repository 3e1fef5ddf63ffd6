"""Fit the conditions of key tokens on reference answers (DSD 2.3): the most acceptance for a bounded loss of quality.

The paper calibrates lambda1, lambda2 and lambda3 on validation data without saying by what. Here the fit takes the most
expected acceptance among the conditions that lower the log-likelihood of the reference answers by at most a tolerance.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.ensemble.blends.adaptive import Adaptive, AdaptiveOptions
from cospec.errors import InvalidInput, words

LAMBDA1 = (1.0, 2.0, 1e9)  # the last of each list makes no token key
LAMBDA2 = (0.05, 0.1, 0.3, 1.0)
LAMBDA3 = (0.6, 0.3, 0.0)
BOUNDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)  # a fit tries those below the bound that is asked for
AT_ONCE = 256  # rows in double precision at a time


@dataclass(frozen=True, slots=True)
class ReferenceRows:
    """What two models predict at each token of reference answers.

    Attributes:
        target, drafter: logits ``[R, V]`` before each token.
        tokens: ``[R]``, the tokens of the answers.
    """

    target: Tensor
    drafter: Tensor
    tokens: Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    def parts(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield ``AT_ONCE`` rows at a time."""
        return zip(*(rows.split(AT_ONCE) for rows in (self.target, self.drafter, self.tokens)), strict=True)


@dataclass(frozen=True, slots=True)
class BlendQuality:
    """An adaptive blend on reference answers.

    Attributes:
        acceptance: mean of ``sum(min(p, q))`` of blend and drafter: the acceptance rate of rejection sampling.
        divergence: mean total variation from the target.
        loss: by how many nats per token the answers are less likely than under the target.
    """

    options: AdaptiveOptions
    acceptance: float
    divergence: float
    loss: float


def read_answers(models: Sequence[Model], answers: Sequence[tuple[Sequence[int], Sequence[int]]]) -> ReferenceRows:
    """Score reference answers by a target and a drafter.

    Args:
        models: the target, then the drafter.
        answers: prompt and answer, in tokens; longer ones than a model's context are cut.

    Raises:
        InvalidInput: no answer has a token.
    """
    longest = min(model.max_len for model in models) - 1
    texts = [([*prompt, *answer][:longest], len(prompt)) for prompt, answer in answers]
    texts = [(tokens, start) for tokens, start in texts if 0 < start < len(tokens)]
    if not texts:
        raise InvalidInput("references", words("without a token"), "prompts, each with a reference answer")
    target, drafter = (torch.cat([score(model, *text) for text in texts]) for model in models)
    return ReferenceRows(target, drafter, torch.tensor([token for tokens, start in texts for token in tokens[start:]]))


def score(model: Model, tokens: Sequence[int], start: int) -> Tensor:
    """Return the logits ``[len(tokens) - start, V]`` before each token from ``start`` on."""
    id = "calibration"
    model.pages.open_sequence(id, ())
    model.pages.allocate(id, len(tokens))
    try:
        part = SequenceSlice(id, 0, tuple(tokens[:-1]), logits_from=start - 1)
        return model.forward(TokenBatch((part,))).clone()
    finally:
        model.free([id])


def qualities(rows: ReferenceRows, given: Sequence[AdaptiveOptions]) -> list[BlendQuality]:
    """Return acceptance, divergence and loss of each blend."""
    blends, sums = [Adaptive(options) for options in given], torch.zeros(len(given), 3, dtype=torch.float64)
    for target, drafter, tokens in rows.parts():
        own, q = torch.log_softmax(target.double(), -1), torch.softmax(drafter.double(), -1)
        p, places = own.exp(), tokens[:, None]
        for blend, figures in zip(blends, sums, strict=True):
            relaxed = own if blend.exact else blend.combine([target, drafter])
            r = relaxed.exp()
            figures[0] += torch.minimum(r, q).sum()
            figures[1] += (r - p).abs().sum() / 2
            figures[2] += (own - relaxed).gather(-1, places).sum()
    means = (sums / len(rows)).tolist()
    return [BlendQuality(options, *figures) for options, figures in zip(given, means, strict=True)]


def calibrate(rows: ReferenceRows, max_divergence: float, tolerance: float) -> BlendQuality:
    """Return the blend with the most acceptance whose loss is at most ``tolerance`` nats per token.

    Conditions whose loss is too large at the bound are tried again at the smaller ones of ``BOUNDS``. So a larger bound
    relaxes no less than a smaller one of ``BOUNDS``. The target itself always is a candidate.
    """
    (best,) = qualities(rows, [AdaptiveOptions(max_divergence=0.0)])
    bounds = (
        [max_divergence, *(bound for bound in reversed(BOUNDS) if bound < max_divergence)] if max_divergence else []
    )
    conditions = list(itertools.product(LAMBDA1, LAMBDA2, LAMBDA3))
    for bound in bounds:
        found = qualities(rows, [_options(bound, *condition) for condition in conditions])
        best = max([best, *(each for each in found if each.loss <= tolerance)], key=lambda each: each.acceptance)
        conditions = [own for own, each in zip(conditions, found, strict=True) if each.loss > tolerance]
    return best


def _options(bound: float, lambda1: float, lambda2: float, lambda3: float) -> AdaptiveOptions:
    return AdaptiveOptions(max_divergence=bound, lambda1=lambda1, lambda2=lambda2, lambda3=lambda3)
