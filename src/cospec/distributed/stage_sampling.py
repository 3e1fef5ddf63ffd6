"""Draws tokens in the last stage, so that tokens instead of logits pass the link to the engine.

The stream ``TARGET`` depends on seed and position alone, so the last stage draws the same tokens as the engine from the
same logits. A row is read only where all draft tokens before the row were drawn too, as ``match`` reads rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cospec.core.model_io import TokenBatch
from cospec.core.sampling import History, RowBlock, likeliest, shaped
from cospec.distributed.messages import Array, Window, WindowOutput
from cospec.models.stage import StageBatch
from cospec.rng.random_streams import RandomStreams, StreamKind, exponential_sample
from cospec.sampling_params import SamplingParams

DRAW = np.dtype(
    [("slice", "<i8"), ("seed", "<u8"), ("top_k", "<i8"), ("temperature", "<f8"), ("top_p", "<f8"), ("min_p", "<f8")]
)
_ONE_ROW = History((), 0, [()])  # of logits that no processor edits


def draws_of(batch: TokenBatch) -> Array | None:
    """Return what the last stage needs to draw the tokens of slices with ``sampling``: int64 ``[D, 6]`` of ``DRAW``."""
    draws = [
        (place, each.seed % 2**64, each.params.top_k, each.params.temperature, each.params.top_p, each.params.min_p)
        for place, each in ((place, part.sampling) for place, part in enumerate(batch.slices))
        if each is not None
    ]
    return np.array(draws, DRAW).view(np.int64).reshape(len(draws), -1) if draws else None


def window_output(window: Window) -> WindowOutput:
    """Return the result of a window whose ``states`` are the logits of all rows."""
    if window.draws is None or window.states is None:
        return WindowOutput(window.number, window.states, error=window.error)
    batch = window.batch
    counts = batch.slices[:, 1] - batch.slices[:, 3]
    drawn = np.zeros(len(counts), bool)
    drawn[window.draws[:, 0]] = True
    rows = np.repeat(drawn, counts)
    tokens = _draw(torch.from_numpy(window.states), _drafts(batch, window.draws, counts.cumsum() - counts))
    return WindowOutput(window.number, None if rows.all() else window.states[~rows], tokens)


@dataclass(frozen=True, slots=True)
class _SampledDraft:
    """A slice to draw tokens for.

    Attributes:
        first: the row after the last known token; the rows after the draft nodes follow.
        base: position of the token after ``first``.
    """

    first: int
    base: int
    tokens: list[int]
    parents: list[int]
    params: SamplingParams
    seed: int

    def child(self, node: int, token: int) -> int | None:
        """Return the first child of ``node`` with this token; None without such a child."""
        nodes = zip(self.tokens, self.parents, strict=True)
        return next((child for child, found in enumerate(nodes) if found == (token, node)), None)


def _drafts(batch: StageBatch, draws: Array, first_rows: Array) -> list[_SampledDraft]:
    """Return the slices of ``draws``, in their order."""
    ends, node_ends = batch.slices[:, 1].cumsum().tolist(), batch.slices[:, 2].cumsum().tolist()
    found = []
    for place, seed, top_k, temperature, top_p, min_p in np.ascontiguousarray(draws).view(DRAW)[:, 0].tolist():
        start, count, nodes = batch.slices[place, :3].tolist()
        tokens = batch.ids[ends[place] - nodes : ends[place]].tolist()
        parents = batch.parents[node_ends[place] - nodes : node_ends[place]].tolist()
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        first, base = int(first_rows[place]), start + count - nodes
        found.append(_SampledDraft(first, base, tokens, parents, params, seed))
    return found


def _draw(logits: Tensor, drafts: list[_SampledDraft]) -> Array:
    """Return the tokens of all rows of ``drafts``, see ``BatchOutput.tokens``; each pass draws one token per draft."""
    found = [[-1] * (1 + len(draft.tokens)) for draft in drafts]
    reached, depth = [(draft, own, -1) for draft, own in zip(drafts, found, strict=True)], 0
    while reached:
        rows = logits.numpy()[[draft.first + 1 + node for draft, _, node in reached]]
        following = []
        for (draft, own, node), token in zip(
            reached, _tokens(torch.from_numpy(rows), [draft for draft, _, _ in reached], depth), strict=True
        ):
            own[1 + node] = token
            child = draft.child(node, token)
            if child is not None:
                following.append((draft, own, child))
        reached, depth = following, depth + 1
    return np.array([token for own in found for token in own], np.int64)


def _tokens(rows: Tensor, drafts: list[_SampledDraft], depth: int) -> list[int]:
    """Return the token ``depth`` after ``base`` of each draft, from its row of logits; -1 for a row that is not
    finite."""
    found = [-1 if token is None else token for token in likeliest(rows)]
    drawing = [place for place, draft in enumerate(drafts) if not draft.params.greedy and found[place] >= 0]
    if drawing:
        weights = shaped(
            torch.from_numpy(rows.numpy()[drawing]), [RowBlock(drafts[i].params, _ONE_ROW) for i in drawing]
        )
        places = [(RandomStreams(drafts[i].seed, drafts[i].base), drafts[i].base + depth) for i in drawing]
        streams = [streams.stream(position, StreamKind.TARGET) for streams, position in places]
        for place, token in zip(drawing, exponential_sample(weights, streams), strict=True):
            found[place] = token
    return found
