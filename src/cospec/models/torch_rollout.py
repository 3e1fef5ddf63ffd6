"""Rollouts by a forward in torch: tokens stay on the device until the last one is chosen.

The host never waits for a token, so the device always has the next step. Positions and pages of the steps are known
before their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cospec.acceptance.device_draft_probs import DeviceProbs
from cospec.core.model_io import RolloutOutput, RolloutParams, SequenceSlice, TokenBatch
from cospec.models.input_batch import InputBatch, check
from cospec.models.kv_cache import KVCache
from cospec.rng.random_streams import StreamKind
from cospec.rng.torch_draws import exponential_sample, first_largest, signed

UNKNOWN = 0  # the token of a batch whose tokens are on the device


class TorchRollout:
    """Chooses and feeds the tokens of sequences, see ``Model.rollout``.

    Args:
        score: the forward, which returns float32 logits ``[R, V]``.
    """

    def __init__(self, score: Callable[[InputBatch], Tensor], cache: KVCache, vocab_size: int, max_len: int) -> None:
        self._score, self._cache = score, cache
        self._vocab_size, self._max_len = vocab_size, max_len

    @torch.no_grad()
    def __call__(self, batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        """See ``Model.rollout``."""
        depth = params[0].depth
        check(batch, self._vocab_size, self._max_len - (depth - 1))
        choice = _Choice(params, self._cache.device)
        logits = self._score(self._cache.pack(batch, ahead=depth - 1))
        ends = np.cumsum([len(part.tokens) - part.logits_from for part in batch.slices])
        whole = len(logits) == len(ends)
        rows = logits if whole else logits[torch.from_numpy(ends - 1).to(logits.device, non_blocking=True)]
        for step in range(depth):
            tokens = choice.add(rows)
            if step + 1 < depth:
                slices = [
                    SequenceSlice(part.id, part.start + len(part.tokens) + step, (UNKNOWN,)) for part in batch.slices
                ]
                packed = self._cache.pack(TokenBatch(tuple(slices)))
                rows = self._score(packed.with_ids(tokens.clamp(min=0)))
        return choice.output(_hits(batch, logits))


class _Choice:
    """The chosen tokens of all steps, on the device."""

    def __init__(self, params: Sequence[RolloutParams], device: torch.device) -> None:
        self._params = params
        self._some_draw = any(own.temperature for own in params)
        self._all_draw = all(own.temperature for own in params)
        self._confident = any(own.confident for own in params)
        self._keeps_q = any(own.temperature and own.stream[1] == StreamKind.DRAFT for own in params)
        words = [(seed, kind, position, base) for seed, kind, _, _, position, base in (own.stream for own in params)]
        numbers = [[signed(word) for word in row] for row in words]
        temperatures, depths = [own.temperature or 1.0 for own in params], [own.depth for own in params]

        def on_device(values: Sequence[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        self._streams = on_device(numbers, torch.int64).T
        self._temperatures = on_device(temperatures, torch.float64)[:, None]
        self._depths, self._shortest = on_device(depths, torch.int64), min(depths)
        self._greedy = on_device([own.temperature == 0.0 for own in params], torch.bool)
        self._tokens: list[Tensor] = []
        self._logits: list[Tensor] = []
        self._q: list[Tensor] = []
        self._chosen: list[Tensor] = []  # the probability of each token under its q
        self._confidence: list[Tensor] = []

    def add(self, rows: Tensor) -> Tensor:
        """Choose a token for each row of logits ``[S, V]``; -1 for a row that is not finite, and after the depth."""
        q = torch.softmax(rows.double() / self._temperatures, -1) if self._some_draw or self._confident else None
        if self._all_draw and q is not None:
            tokens = self._drawn(q)  # -1 for a row that is not finite: its softmax has no numbers
        else:
            tokens = torch.where(rows.amax(-1).isfinite(), first_largest(rows), -1)
            if self._some_draw and q is not None:
                tokens = torch.where(self._greedy | (tokens < 0), tokens, self._drawn(q))
        if q is not None:
            if self._keeps_q:
                self._q.append(q)
                self._chosen.append(q.gather(-1, tokens.clamp(min=0)[:, None])[:, 0])
            if self._confident:
                self._confidence.append(q.amax(-1))
        if any(own.logits for own in self._params):
            self._logits.append(rows)
        if self._shortest <= len(self._tokens):
            tokens = torch.where(self._depths > len(self._tokens), tokens, -1)
        self._tokens.append(tokens)
        return tokens

    def _drawn(self, q: Tensor) -> Tensor:
        """Return the token that each row's stream draws from ``q [S, V]``."""
        seeds, kinds, positions, bases = self._streams
        return exponential_sample(q, seeds, kinds, positions + len(self._tokens), bases)

    def output(self, hits: Sequence[int]) -> RolloutOutput:
        """Copy the results to the host, except distributions."""
        return RolloutOutput(
            torch.stack(self._tokens, 1).tolist(),
            self._probs().as_floats() if self._q else None,
            torch.stack(self._confidence, 1).cpu().numpy() if self._confident else None,
            torch.stack(self._logits) if self._logits else None,
            hits,
        )

    def _probs(self) -> DeviceProbs:
        return DeviceProbs(torch.stack(self._q, 1), torch.stack(self._chosen, 1).cpu().numpy())


def _hits(batch: TokenBatch, logits: Tensor) -> Sequence[int]:
    """Return how many known tokens of each slice were the likeliest; empty if all slices have one row."""
    if len(logits) == len(batch.slices):
        return ()
    best, row, hits = first_largest(logits).tolist(), 0, []
    for part in batch.slices:
        known = part.tokens[part.logits_from + 1 :]
        hits.append(sum(token == guess for token, guess in zip(known, best[row:], strict=False)))
        row += len(known) + 1
    return hits
