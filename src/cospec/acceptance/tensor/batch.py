"""The drafts that one acceptance method verifies in a step, as tensors on the device of the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cospec.acceptance.device_draft_probs import DeviceProbs
from cospec.acceptance.python_verification import VerifyTask
from cospec.core.sampling import truncate
from cospec.core.tree import depths, sibling_ranks
from cospec.core.types import Draft, RequestState
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind
from cospec.rng.torch_draws import exponential_sample, first_largest, signed

PADDING = -2  # the parent of a node that only fills a row


@dataclass(frozen=True, slots=True)
class TensorBatch:
    """``B`` drafts, padded to ``N`` nodes.

    The host launches all operations while the target's forward still runs. Only top-p, masks of logits, and a q that
    the host has make the host wait.

    Attributes:
        tasks: ``[B]``, whose drafts these are.
        first: ``[B]``, the row of each request's root among the rows of the batch.
        last: ``[B]``, the last row of each request.
        lengths: ``[B]``, nodes of each draft.
        tokens, parents, depths: ``[B, N]``.
        seeds, bases: ``[B]``.
        probs: ``[R, V]`` float64; empty for greedy requests whose method reads no distribution.
        greedy_tokens: ``[R]``, the likeliest token of each row of such requests; empty otherwise.
        q: ``[B, N, V]`` float64, point masses for drafts without q.
    """

    tasks: Sequence[VerifyTask]
    first: Tensor
    last: Tensor
    lengths: Tensor
    tokens: Tensor
    parents: Tensor
    depths: Tensor
    seeds: Tensor
    bases: Tensor
    probs: Tensor
    greedy_tokens: Tensor
    q: Tensor

    @property
    def num_nodes(self) -> int:
        """Nodes of the longest draft."""
        return self.tokens.shape[1]

    def rows_after(self, nodes: Tensor) -> Tensor:
        """Return the row after each node of ``[B]`` or ``[B, N]``, -1 for the root; an absent row is the last row."""
        first, last = (self.first, self.last) if nodes.dim() == 1 else (self.first[:, None], self.last[:, None])
        return torch.minimum(first + nodes + 1, last)

    def uniforms(self) -> Tensor:
        """Return the uniform number that each node is tested with, ``[B, N]``, 0 for padding; drawn by the host."""
        numbers = np.zeros(tuple(self.tokens.shape))
        for row, task in zip(numbers, self.tasks, strict=True):
            if task.draft is not None:
                row[: len(task.draft)] = _uniforms(task.draft, task.entry.sequence)
        return _to_device(numbers, self.tokens.device)

    def drafted_probs(self) -> tuple[Tensor, Tensor]:
        """Return the probability of each draft token under the target and under the drafter, ``[B, N]``."""
        target = self.probs[self.rows_after(self.parents.clamp(min=-1)), self.tokens]
        return target, self.q.gather(-1, self.tokens[..., None])[..., 0]

    def target_tokens(self) -> Tensor:
        """Return the token that the target draws after every row, ``[R]``."""
        if not len(self.probs):
            return self.greedy_tokens
        counts = self.last - self.first + 1
        numbers, rows = torch.arange(len(counts), device=counts.device), len(self.probs)
        task = torch.repeat_interleave(numbers, counts, output_size=rows)  # otherwise the host waits for the sum
        nodes = torch.arange(len(task), device=task.device) - self.first[task] - 1
        own = torch.cat([torch.zeros_like(self.bases)[:, None], self.depths], 1)[task, nodes + 1]
        kinds = torch.full_like(task, StreamKind.TARGET)
        return exponential_sample(self.probs, self.seeds[task], kinds, self.bases[task] + own, 0 * task)

    def draw(self, weights: Tensor, lengths: Tensor, recovers: Tensor) -> Tensor:
        """Return the token after ``lengths [B]`` accepted nodes, from ``weights [B, V]``.

        Args:
            recovers: ``[B]``, whether the token replaces a rejected token.
        """
        kinds = torch.where(recovers, int(StreamKind.RECOVER), int(StreamKind.TARGET))
        bases = torch.where(recovers, self.bases, 0)
        return exponential_sample(weights, self.seeds, kinds, self.bases + lengths, bases)


def batch_of(tasks: Sequence[VerifyTask], logits: Tensor, finite: Tensor, distributions: bool) -> TensorBatch:
    """Lay out tasks that have verified rows.

    Args:
        logits: ``[R, V]`` of the step, after all edits.
        finite: ``[R]``, whether a row's largest logit is a number.
        distributions: whether the method reads distributions; otherwise all requests are greedy.
    """
    places = np.concatenate([np.arange(*task.verified_rows.indices(len(logits))) for task in tasks])
    rows, nodes, scalars = _on_device([places, _nodes(tasks), _scalars(tasks)], logits.device)
    whole = len(places) == len(logits)  # tasks are in the order of their rows
    own, finite = (logits, finite) if whole else (logits[rows], finite[rows])
    tokens, parents, level = nodes
    first, last, lengths, seeds, bases = scalars
    return TensorBatch(
        tasks,
        first,
        last,
        lengths,
        tokens,
        parents,
        level,
        seeds,
        bases,
        _target_probs(tasks, own, finite) if distributions else own[:0].double(),
        rows[:0] if distributions else first_largest(own),
        _draft_probs(tasks, tokens, logits.shape[-1]) if distributions else own.new_zeros(0, 0, 0),
    )


def _on_device(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[Tensor]:
    """Copy arrays to a device in one transfer."""
    flat = _to_device(np.concatenate([array.ravel() for array in arrays]), device)
    parts = flat.split([array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def _to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy a small array to a device, as a rule without waiting for the device's earlier work."""
    return torch.from_numpy(array).to(device, non_blocking=True)


def _uniforms(draft: Draft, sequence: RequestState) -> Floats:
    """Return the uniform number of each node, as the methods in Python draw them."""
    draws = RandomStreams(sequence.request.seed, len(sequence.tokens))
    levels = np.array(depths(draft.parents)) - 1
    ranks = np.array(sibling_ranks(draft.parents, range(len(draft))) or 0 * levels)
    count = 1 + int(levels.max())
    rows = [draws.uniforms(draft.base_len, count, StreamKind.ACCEPT, rank) for rank in range(1 + int(ranks.max()))]
    numbers: Floats = np.stack(rows)[ranks, levels]
    return numbers


def _nodes(tasks: Sequence[VerifyTask]) -> NDArray[np.int64]:
    """Return tokens, parents and depths of the nodes, ``[3, B, N]``."""
    drafts = [task.draft for task in tasks]
    width = max(0 if draft is None else len(draft) for draft in drafts)
    table = np.zeros((3, len(tasks), width), dtype=np.int64)
    table[1] = PADDING
    for row, draft in enumerate(drafts):
        if draft is not None:
            table[:, row, : len(draft)] = draft.tokens, draft.parents, depths(draft.parents)
    return table


def _scalars(tasks: Sequence[VerifyTask]) -> NDArray[np.int64]:
    """Return the first row, the last row, nodes, seed and committed tokens of each request, ``[5, B]``."""
    ends = np.cumsum([task.count for task in tasks])
    firsts = [0, *ends[:-1]]
    lengths = [0 if task.draft is None else len(task.draft) for task in tasks]
    sequences = [task.entry.sequence for task in tasks]
    seeds = [signed(sequence.request.seed) for sequence in sequences]
    return np.array([firsts, ends - 1, lengths, seeds, [len(each.tokens) for each in sequences]], dtype=np.int64)


def _target_probs(tasks: Sequence[VerifyTask], logits: Tensor, finite: Tensor) -> Tensor:
    """Return the target distributions of rows ``[R, V]``; one call truncates all rows with equal parameters."""
    samplings = [task.entry.sequence.request.sampling for task in tasks for _ in range(task.count)]
    temperatures = [1.0 if params.greedy else params.temperature for params in samplings]
    scale = _to_device(np.array(temperatures), logits.device)
    probs = torch.softmax(logits.double() / scale[:, None], -1)
    alike: dict[tuple[bool, int, float, float], list[int]] = {}
    for row, params in enumerate(samplings):
        if params.greedy or params.truncates:
            alike.setdefault((params.greedy, params.top_k, params.top_p, params.min_p), []).append(row)
    for (greedy, *_), places in alike.items():
        rows = _to_device(np.array(places), logits.device)
        if greedy:
            probs[rows] = nn.functional.one_hot(
                first_largest(logits[rows]) % logits.shape[-1], logits.shape[-1]
            ).double()
        else:
            probs[rows] = truncate(probs[rows], samplings[places[0]])
    return torch.where(finite[:, None], probs, 1.0 / probs.shape[-1])  # no token after another row is committed


def _draft_probs(tasks: Sequence[VerifyTask], tokens: Tensor, vocab_size: int) -> Tensor:
    """Return the q of each node, ``[B, N, V]``."""
    found = tokens.new_zeros(*tokens.shape, vocab_size, dtype=torch.float64)
    found.scatter_(-1, tokens[..., None], 1.0)
    for row, task in enumerate(tasks):
        if task.draft is not None and task.draft.q is not None:
            q = task.draft.q
            rows = q.rows if isinstance(q, DeviceProbs) else torch.from_numpy(np.ascontiguousarray(q))
            found[row, : len(task.draft)] = rows.to(found.device)
    return found
