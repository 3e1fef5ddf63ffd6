"""Medusa heads as a drafter: the target's last hidden state predicts several tokens in one pass.

The state comes with the commit, so a draft costs two small products and no KV cache. A head predicts its position
without knowledge of the earlier heads' choices. The predictions of a level therefore follow every node of the level
above. The result is a level tree of given widths, or a sparse tree. The sparse tree holds the most probable paths by
the measured accuracy of each head and rank (Cai et al. 2024, section 2.1.2; SmartSpec section 7.2.2).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from pydantic import field_validator
from pydantic_core import PydanticCustomError
from torch import Tensor

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.plugin_base import Drafter
from cospec.core.sampling import History, RowBlock, target_probs
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.interfaces import DrafterBuildContext
from cospec.errors import InvalidInput, words
from cospec.models.medusa_heads import (
    WEIGHTS,
    MedusaHeads,
    MedusaRunner,
    heads_format,
    output_embedding,
    resolve_medusa_heads,
)
from cospec.plugin_options import WeightOptions
from cospec.rng.random_streams import RandomStreams, StreamKind, exponential_sample

Paths = tuple[tuple[int, ...], ...]
"""Nodes of a tree, parents first; each node is the ranks from the root down to it."""


class MedusaOptions(WeightOptions):
    """Options of ``heads``.

    Without ``dtype`` and ``quantization`` the heads and their copy of the output embedding are bfloat16, as the files.

    Attributes:
        heads: a folder that ``cospec train heads`` wrote, or ``zoo:NAME``; None takes the target's own heads.
    """

    heads: str | None = None

    @field_validator("heads")
    @classmethod
    def _check_folder(cls, name: str | None) -> str | None:
        if name is not None and not (resolve_medusa_heads(name) / WEIGHTS).is_file():
            wanted = "a folder with {weights}, such as `cospec train heads` writes, or zoo:heads"
            raise PydanticCustomError("folder", wanted, {"weights": WEIGHTS})
        return name


@lru_cache(maxsize=256)
def level_paths(widths: tuple[int, ...], max_nodes: int) -> Paths:
    """Return the first ``max_nodes`` nodes, level by level, of the tree whose level ``i`` has ``widths[i]``
    children."""
    found: list[tuple[int, ...]] = []
    level: list[tuple[int, ...]] = [()]
    for width in widths:
        level = [(*path, rank) for path in level for rank in range(width)]
        found += level
    return tuple(found[:max_nodes])


@lru_cache(maxsize=256)
def sparse_paths(accuracy: tuple[tuple[float, ...], ...], depth: int, max_nodes: int) -> Paths:
    """Return the ``max_nodes`` most probable paths; guess ``r`` of head ``h`` is right with ``accuracy[h][r]``.

    A path is never more probable than its parent or than the same path with a better rank, so a heap finds the best
    paths.
    """
    heap: list[tuple[float, tuple[int, ...]]] = [(-accuracy[0][0], (0,))]
    found: list[tuple[int, ...]] = []
    while heap and len(found) < max_nodes:
        value, path = heapq.heappop(heap)
        found.append(path)
        at, rank = len(path) - 1, path[-1]
        if rank + 1 < len(accuracy[at]) and accuracy[at][rank] > 0:
            heapq.heappush(heap, (value / accuracy[at][rank] * accuracy[at][rank + 1], (*path[:-1], rank + 1)))
        if at + 1 < min(depth, len(accuracy)):
            heapq.heappush(heap, (value * accuracy[at + 1][0], (*path, 0)))
    return tuple(found)


class MedusaDrafter(Drafter):
    """Drafts with Medusa heads. Tokens are chosen, not drawn; under ``match`` the target's noise selects the first
    choice.

    Args:
        runner: computes the heads' products.
        accuracy: ``MedusaHeads.accuracy``.
    """

    samples = False
    reads_hidden_states = True
    drafts_ahead = False
    learns = False
    capabilities = DrafterCapabilities(single_pass=True, trees=True)
    Options: ClassVar[type[MedusaOptions]] = MedusaOptions

    def __init__(self, runner: MedusaRunner, accuracy: tuple[tuple[float, ...], ...], name: str = "heads") -> None:
        self.runner, self.accuracy, self.name = runner, accuracy, name
        self._states: dict[str, tuple[int, Tensor]] = {}  # the state, and the length of the sequence that it follows

    @classmethod
    def build(cls, options: MedusaOptions, build_context: DrafterBuildContext) -> MedusaDrafter:
        """Load the heads and the target's output embedding.

        Raises:
            InvalidInput: the target has no known heads, or the heads' width differs from its states'.
        """
        name = options.heads or build_context.default_heads
        if name is None or build_context.target_path is None:
            raise InvalidInput("speculative_config.heads", options.heads, "the folder of heads for this target")
        heads, embedding = MedusaHeads.load(resolve_medusa_heads(name)), output_embedding(build_context.target_path)
        if heads.weight.shape[-1] != embedding.shape[1]:
            given = words(f"{name}, whose states have {heads.weight.shape[-1]} entries")
            raise InvalidInput("speculative_config.heads", given, f"heads for states of {embedding.shape[1]} entries")
        device = build_context.target.device
        return cls(MedusaRunner(heads, embedding, device, heads_format(options, device)), heads.accuracy)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return a tree, or a chain for a budget without spare nodes, for each context whose last state is known."""
        ready = []
        for context, budget in zip(contexts, budgets, strict=True):
            length, state = self._states.get(context.id, (-1, None))
            if state is not None and length == len(context.tokens) and min(budget.depth, budget.max_nodes) > 0:
                ready.append((context, self._paths(budget), state))
        if not ready:
            return []
        depth = max(len(path) for _, paths, _ in ready for path in paths)
        logits = self.runner.logits(torch.stack([state for *_, state in ready]), depth)
        widest = 1 + max(rank for _, paths, _ in ready for path in paths for rank in path)
        best = logits.topk(widest, dim=-1).indices.tolist()
        return [
            self._draft(context, paths, _sample_first(context, guesses, logits[row]))
            for row, ((context, paths, _), guesses) in enumerate(zip(ready, best, strict=True))
        ]

    def commit(self, commits: Sequence[Commit]) -> None:
        """Store the newest state of each sequence."""
        for commit in commits:
            if isinstance(commit.hidden_state, Tensor):
                self._states[commit.id] = (commit.base_len + len(commit.tokens), commit.hidden_state)

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences."""
        for id in ids:
            self._states.pop(id, None)

    def _paths(self, budget: DraftBudget) -> Paths:
        depth = min(budget.depth, self.runner.count)
        if budget.widths:
            return level_paths(budget.widths[:depth], budget.max_nodes)
        if budget.max_nodes > budget.depth:
            return sparse_paths(self.accuracy, depth, budget.max_nodes)
        return level_paths((1,) * depth, budget.max_nodes)

    def _draft(self, context: DraftContext, paths: Paths, guesses: list[list[int]]) -> Draft:
        places = {path: node for node, path in enumerate(paths)}
        ranks = [(len(path) - 1, path[-1]) for path in paths]
        table = self.accuracy
        confidence = [table[h][min(r, len(table[h]) - 1)] for h, r in ranks]
        return Draft(
            context.id,
            len(context.tokens),
            tuple(guesses[h][r] for h, r in ranks),
            tuple(places.get(path[:-1], -1) for path in paths),
            (self.name,) * len(paths),
            confidence=np.array(confidence),
        )


def _sample_first(context: DraftContext, guesses: list[list[int]], logits: Tensor) -> list[list[int]]:
    """Return ``guesses [depth][widest]``, best first; under ``match`` the token drawn with the target's noise goes
    first.
    """
    params = context.sampling
    if params.greedy or context.stream_kind is not StreamKind.TARGET:
        return guesses
    base = len(context.tokens)
    draws = RandomStreams(context.seed, base)
    # A head does not know the draft tokens before its position; only committed tokens are the history.
    probs = target_probs(logits, [RowBlock(params, History.of_context(context, [[] for _ in guesses]))])
    winners = exponential_sample(
        probs, [draws.stream(base + place, context.stream_kind) for place in range(len(guesses))]
    )
    return [
        [winner, *(token for token in best if token != winner)][: len(best)] if winner >= 0 else best
        for winner, best in zip(winners, guesses, strict=True)
    ]
