"""Logits to the target distribution: all sampling parameters, at every drafted position, in double precision.

The order: penalties, bias and the ban on early stop tokens edit the logits; then temperature; then top-k, top-p and
min-p truncate, each renormalising what is left. A greedy distribution is a point mass on the likeliest token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cospec.core.rng import Floats
from cospec.core.stats import TokenLogprobs
from cospec.native import library
from cospec.sampling_params import SamplingParams

NUCLEUS_GUESS = 128  # tokens that top-p usually stays within; sorting all of them costs ten times as much


@dataclass(frozen=True, slots=True)
class History:
    """The tokens before each row of logits: the committed tokens, then the row's own draft tokens.

    Attributes:
        tokens: committed tokens, prompt included.
        paths: ``[R]``, the draft tokens between the committed ones and the row.
    """

    tokens: Sequence[int]
    prompt_len: int
    paths: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class RowBlock:
    """Consecutive rows of logits that belong to one sequence."""

    params: SamplingParams
    history: History

    @property
    def rows(self) -> int:
        return len(self.history.paths)


def target_probs(logits: Tensor, blocks: Sequence[RowBlock]) -> Floats:
    """The distribution of the next token for each row: ``[R, V]`` logits, block after block, to probabilities."""
    if any(block.params.edits_logits for block in blocks):
        spans = zip(blocks, _spans(blocks), strict=True)
        logits = torch.cat([edit(logits[span], block.params, block.history) for block, span in spans])
    return shaped(logits, blocks)


def shaped(logits: Tensor, blocks: Sequence[RowBlock]) -> Floats:
    """The same from logits that are edited already: temperature and truncation. A row without numbers stays so."""
    temperatures = [block.params.temperature or 1.0 for block in blocks for _ in range(block.rows)]
    probs = softmax(logits, temperatures)
    for block, span in zip(blocks, _spans(blocks), strict=True):
        if block.params.greedy:
            probs[span] = _point_mass(logits[span])
        elif block.params.truncates:
            probs[span] = _truncate(torch.from_numpy(probs[span]), block.params).numpy()
    return probs


def target_probs_of(logits: Tensor, params: SamplingParams, history: History) -> Floats:
    """``target_probs`` of a single block."""
    return target_probs(logits, [RowBlock(params, history)])


def softmax(logits: Tensor, temperatures: Sequence[float]) -> Floats:
    """``[R, V]`` probabilities in double precision, each row at its own temperature."""
    if _native(logits):
        return library.softmax_rows(logits, np.array(temperatures, dtype=np.float64))
    scale = torch.tensor(temperatures, dtype=torch.float64, device=logits.device)
    return np.asarray(torch.softmax(logits.double() / scale[:, None], -1).cpu().numpy())


def log_softmax(logits: Tensor) -> Tensor:
    """Log-probabilities ``[R, V]`` in double precision."""
    if not _native(logits):
        return torch.log_softmax(logits.double(), -1)
    wide = logits.double()
    with np.errstate(divide="ignore"):  # what is not likelier than nothing at all is no number, and stays so
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
    """The first of the largest logits of each row; None for a row that is not made of numbers."""
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
    """Penalties, bias and the ban on early stop tokens; the given tensor is left as it was."""
    if not params.edits_logits:
        return logits
    logits = logits.clone()
    if params.has_penalties:
        _penalise(logits, params, history)
    for token, bias in (params.logit_bias or {}).items():
        logits[:, token] += bias
    written = len(history.tokens) - history.prompt_len
    early = [row for row, path in enumerate(history.paths) if written + len(path) < params.min_tokens]
    if early and params.stop_token_ids:
        logits[np.ix_(early, params.stop_token_ids)] = -torch.inf
    return logits


def _penalise(logits: Tensor, params: SamplingParams, history: History) -> None:
    """OpenAI's presence and frequency penalties on the output, CTRL's repetition penalty on prompt and output."""
    vocab = logits.shape[-1]
    seen = torch.zeros(vocab, dtype=torch.bool, device=logits.device)
    seen[list(history.tokens)] = True
    counts = torch.bincount(
        torch.tensor(history.tokens[history.prompt_len :], dtype=torch.long, device=logits.device), minlength=vocab
    ).to(logits.dtype)
    for row, path in enumerate(history.paths):
        row_seen, row_counts = seen.clone(), counts.clone()
        for token in path:
            row_seen[token] = True
            row_counts[token] += 1
        values = logits[row]
        scaled = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        values = torch.where(row_seen, scaled, values)
        present = (row_counts > 0).to(logits.dtype)  # a bool times a float would be a float32
        logits[row] = values - params.frequency_penalty * row_counts - params.presence_penalty * present


def _point_mass(logits: Tensor) -> Floats:
    mass = np.zeros(logits.shape)
    mass[np.arange(len(mass)), logits.argmax(-1).cpu().numpy()] = 1.0
    return mass


def _truncate(probs: Tensor, params: SamplingParams) -> Tensor:
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
    """The smallest probability that top-p keeps, ``[R, 1]``; equal ones are all kept, so no order of ties matters."""
    vocab = probs.shape[-1]
    for size in (min(NUCLEUS_GUESS, vocab), vocab):
        ordered = probs.topk(size, -1).values
        inside = ordered.cumsum(-1) - ordered < top_p
        if size == vocab or not inside[:, -1].any():
            break
    return ordered.gather(-1, inside.sum(-1, keepdim=True) - 1)


def _renormalise(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def logprobs(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of ``tokens`` under rows of logits ``[R, V]`` before any processor, and ``top`` others."""
    values = torch.log_softmax(logits.double(), -1)
    own = values.gather(-1, torch.tensor(tokens, device=values.device)[:, None])
    ranks = (values > own).sum(-1) + 1
    best = values.topk(min(top, values.shape[-1]), -1) if top else None
    rows = []
    for row, token in enumerate(tokens):
        pairs = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True) if best else ()
        rows.append(TokenLogprobs(token, float(own[row]), int(ranks[row]), tuple(pairs)))
    return tuple(rows)
