"""Logits to the law: every sampling parameter, at every drafted position, in double precision.

The order: penalties, bias and the ban on early stop tokens edit the logits; then temperature; then top-k, top-p and
min-p truncate, each renormalising what is left. A greedy law is a point mass on the likeliest token.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cospec.draws import Floats
from cospec.params import SamplingParams
from cospec.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class History:
    """What stands before each row of logits: the committed tokens, then the row's own draft tokens.

    Attributes:
        tokens: committed tokens, prompt included.
        paths: ``[R]``, the draft tokens between the committed ones and the row.
    """

    tokens: Seq[int]
    prompt_len: int
    paths: Seq[Seq[int]]


def law(logits: Tensor, params: SamplingParams, history: History) -> Floats:
    """The distribution of the next token for each row: ``[R, V]`` logits to ``[R, V]`` probabilities."""
    edited = edit(logits.double(), params, history)
    if params.greedy:
        return _point_mass(edited)
    return _truncate(torch.softmax(edited / params.temperature, -1), params).cpu().numpy()


def choices(logits: Tensor, params: SamplingParams, history: History) -> list[int]:
    """The tokens that a greedy law picks, one per row."""
    chosen: list[int] = (edit(logits, params, history) if params.edits_logits else logits).argmax(-1).tolist()
    return chosen


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
        logits[row] = values - params.frequency_penalty * row_counts - params.presence_penalty * (row_counts > 0)


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
        ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        dropped = torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, order, before >= params.top_p)
        probs = _renormalise(probs.masked_fill(dropped, 0))
    if params.min_p > 0:
        probs = _renormalise(probs.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), 0))
    return probs


def _renormalise(probs: Tensor) -> Tensor:
    return probs / probs.sum(-1, keepdim=True)


def logprobs(logits: Tensor, tokens: Seq[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of ``tokens`` under rows of logits ``[R, V]`` before any processor, with ``top`` alternatives."""
    values = torch.log_softmax(logits.double(), -1)
    own = values.gather(-1, torch.tensor(tokens, device=values.device)[:, None])
    ranks = (values > own).sum(-1) + 1
    best = values.topk(min(top, values.shape[-1]), -1) if top else None
    rows = []
    for row, token in enumerate(tokens):
        pairs = zip(best.indices[row].tolist(), best.values[row].tolist(), strict=True) if best else ()
        rows.append(TokenLogprobs(token, float(own[row]), int(ranks[row]), tuple(pairs)))
    return tuple(rows)
