"""Logits to the target distribution: all sampling parameters, at every drafted position, in double precision.

The order: logits processors change logits, their masks exclude tokens; then temperature; then top-k, top-p and min-p
truncate, each renormalising what is left. A greedy distribution is a point mass on the likeliest token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cospec.core.types import DraftContext
from cospec.logits_processors.bitmask import unpack
from cospec.logits_processors.states import ProcessorStates, RequestProcessors
from cospec.native import library
from cospec.rng.random_streams import Floats
from cospec.sampling_params import SamplingParams

NUCLEUS_GUESS = 128  # tokens that top-p usually stays within; sorting all of them costs ten times as much


@dataclass(frozen=True, slots=True)
class History:
    """The tokens before each row of logits: the tokens of the sequence, then the row's own draft tokens.

    Attributes:
        tokens: of the sequence, prompt included; the last ``assumed`` of these belong to an earlier draft.
        paths: ``[R]``, the draft tokens between ``tokens`` and the row.
        processors: of the request, with the states of earlier steps; None: new processors read all tokens.
        assumed: the number of tokens at the end of ``tokens`` that are not committed.
    """

    tokens: Sequence[int]
    prompt_len: int
    paths: Sequence[Sequence[int]]
    processors: RequestProcessors | None = None
    assumed: int = 0

    @classmethod
    def of_context(cls, context: DraftContext, paths: Sequence[Sequence[int]]) -> History:
        """Return the history of draft tokens ``paths`` after a drafter's context."""
        return cls(context.tokens, context.prompt_len, paths, context.processors, context.assumed)

    def states(self, params: SamplingParams) -> tuple[RequestProcessors, list[ProcessorStates]]:
        """Return the processors that ``params`` ask for, and their states before each row."""
        processors = self.processors or RequestProcessors.of(params, self.tokens[: self.prompt_len])
        return processors, processors.states(self.tokens, len(self.tokens) - self.assumed, self.paths)


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows of logits that belong to one sequence."""

    params: SamplingParams
    history: History

    @property
    def rows(self) -> int:
        return len(self.history.paths)


def target_probs(logits: Tensor, blocks: Sequence[RowBlock]) -> Floats:
    """Return the distribution of the next token after each row, ``[R, V]``; the rows of a block are consecutive."""
    if any(block.params.edits_logits for block in blocks):
        spans = zip(blocks, _spans(blocks), strict=True)
        logits = torch.cat([edit(logits[span], block.params, block.history) for block, span in spans])
    return shaped(logits, blocks)


def shaped(logits: Tensor, blocks: Sequence[RowBlock]) -> Floats:
    """Apply temperature and truncation to edited logits. Rows with NaN stay NaN."""
    temperatures = [block.params.temperature or 1.0 for block in blocks for _ in range(block.rows)]
    probs = softmax(logits, temperatures)
    for block, span in zip(blocks, _spans(blocks), strict=True):
        if block.params.greedy:
            probs[span] = _point_mass(logits[span])
        elif block.params.truncates:
            probs[span] = truncate(torch.from_numpy(probs[span]), block.params).numpy()
    return probs


def softmax(logits: Tensor, temperatures: Sequence[float]) -> Floats:
    """Return ``[R, V]`` probabilities in double precision, each row at its own temperature."""
    if _native(logits):
        return library.softmax_rows(logits, np.array(temperatures, dtype=np.float64))
    scale = torch.tensor(temperatures, dtype=torch.float64, device=logits.device)
    return np.asarray(torch.softmax(logits.double() / scale[:, None], -1).cpu().numpy())


def log_softmax(logits: Tensor) -> Tensor:
    """Return log-probabilities ``[R, V]`` in double precision."""
    if not _native(logits):
        return torch.log_softmax(logits.double(), -1)
    wide = logits.double()
    with np.errstate(divide="ignore"):  # log(0) gives minus infinity
        most = np.log(softmax(wide, [1.0] * len(wide)).max(-1))
    return wide - (wide.amax(-1) - torch.from_numpy(most))[:, None]


def _native(logits: Tensor) -> bool:
    return logits.dtype in (torch.float32, torch.float64) and logits.device.type == "cpu" and library.available()


def _spans(blocks: Sequence[RowBlock]) -> Iterator[slice]:
    start = 0
    for block in blocks:
        yield slice(start, start + block.rows)
        start += block.rows


def likeliest(logits: Tensor) -> list[int | None]:
    """The first of the largest logits of each row; None for a row with NaN or infinity."""
    if not len(logits):
        return []
    if _native(logits) and logits.dtype == torch.float32:
        return [None if token < 0 else token for token in library.argmax_rows(logits)]
    if logits.device.type == "cpu":
        found = logits.numpy()
        first = found.argmax(-1)
        return [token if math.isfinite(row[token]) else None for row, token in zip(found, first.tolist(), strict=True)]
    best = logits.max(-1)
    values, tokens = best.values.tolist(), best.indices.tolist()
    return [token if math.isfinite(value) else None for value, token in zip(values, tokens, strict=True)]


def edit(logits: Tensor, params: SamplingParams, history: History) -> Tensor:
    """Return the logits after the request's processors; the given tensor stays unchanged."""
    if not params.edits_logits:
        return logits
    processors, states = history.states(params)
    logits = logits.clone()
    for place, processor in enumerate(processors.processors):
        if not processor.masks:
            logits = processor.edit(logits, [row[place] for row in states])
    masks = processors.masks(states, logits.shape[-1])
    if masks is None:
        return logits
    return logits.masked_fill(torch.from_numpy(~unpack(masks, logits.shape[-1])).to(logits.device), -torch.inf)


def _point_mass(logits: Tensor) -> Floats:
    mass = np.zeros(logits.shape)
    mass[np.arange(len(mass)), logits.argmax(-1).cpu().numpy()] = 1.0
    return mass


def truncate(probs: Tensor, params: SamplingParams) -> Tensor:
    """Return the distributions ``[R, V]`` after top-k, top-p and min-p, on their device."""
    vocab = probs.shape[-1]
    if 0 < params.top_k < vocab:
        least = probs.topk(params.top_k, -1).values[:, -1:]
        probs = _renormalise(probs.masked_fill(probs < least, 0))
    if params.top_p < 1:
        probs = _renormalise(probs.masked_fill(probs < _least_of_nucleus(probs, params.top_p), 0))
    if params.min_p > 0:
        probs = _renormalise(probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0))
    return probs


def _least_of_nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The smallest probability that top-p keeps, ``[R, 1]``; tied tokens are all kept."""
    vocab = probs.shape[-1]
    for size in (min(NUCLEUS_GUESS, vocab), vocab):
        ordered = probs.topk(size, -1).values
        before = torch.zeros_like(ordered)  # as csrc/spec/verify.cpp sums: a subtraction would round
        before[:, 1:] = ordered.cumsum(-1)[:, :-1]
        inside = before < top_p
        if size == vocab or not inside[:, -1].any():
            break
    return ordered.gather(-1, inside.sum(-1, keepdim=True) - 1)


def _renormalise(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)
