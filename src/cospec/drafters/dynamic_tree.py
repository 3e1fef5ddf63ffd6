"""Trees drafted by a model, level by level: the likeliest nodes by path probability (EAGLE-2, 2406.16858, section 4).

At every level each node at the frontier offers its likeliest continuations. A continuation is worth the product of the
confidences on its path; of all nodes and offers so far the best ``max_nodes`` stay. The confidence of a node's ``j``-th
child is the ``j``-th largest probability behind that node, whichever tokens stand there. So it is known before a token
is drawn and falls from child to child, and what is kept or cut never depends on the token itself, as ``recursive``
demands. Greedy requests take the likeliest tokens; drawn ones are drawn without replacement; under ``match`` they come
in the order of the target's own race.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from cospec.core.rng import Floats, RandomStreams, Stream, StreamKind, exponential_sample
from cospec.core.sampling import History, RowBlock, likeliest, target_probs
from cospec.core.tree import MAX_NODES, children, depths, path_to
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.calibration import CalibrationSample
from cospec.sampling_params import SamplingParams

Calibrate = Callable[[Floats], Floats]
"""Probabilities to the shares of such nodes that are accepted when their parent was, ``[R, W]`` to ``[R, W]``."""


def branches(budget: DraftBudget) -> bool:
    """Whether a budget asks for more than a plain chain."""
    return not budget.is_chain or budget.threshold > 0


def room(budget: DraftBudget) -> int:
    """Cache entries that a draft takes. A tree feeds nodes that better ones replace later, and no more than this."""
    return min(2 * budget.max_nodes, MAX_NODES) if branches(budget) else budget.depth - 1


@dataclass(slots=True)
class DynamicTree:
    """A draft in the making. Lists are per node; ``fed`` are the nodes in the drafter's cache, in its order."""

    context: DraftContext
    budget: DraftBudget
    params: SamplingParams = field(init=False)  # whose law the confidences are: a greedy request's own has no doubts
    base: int = field(init=False)  # known tokens when the draft began; the context's list grows
    most: int = field(init=False)
    beams: int = field(init=False)
    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    raw: list[float] = field(default_factory=list)  # confidences before calibration
    confidence: list[float] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    q: list[Floats] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    frontier: list[int] = field(default_factory=lambda: [-1])
    level: int = 0

    def __post_init__(self) -> None:
        params, budget = self.context.sampling, self.budget
        whole = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        self.params = whole if params.greedy else params
        self.base = len(self.context.tokens)
        self.most = min(budget.max_nodes, MAX_NODES)
        share = -(-self.most // budget.depth)
        self.beams = self.most if budget.widths else share if share == 1 else max(2, share)

    @property
    def width(self) -> int:
        """The most children of a node at the present level."""
        widths = self.budget.widths
        if not widths:
            return self.beams
        return widths[self.level] if self.level < len(widths) else 1

    @property
    def fed_parents(self) -> list[int]:
        """``[len(fed)]``, the tree of the fed nodes by itself."""
        place = {node: at for at, node in enumerate(self.fed)}
        return [place.get(self.parents[node], -1) for node in self.fed]

    def path(self, node: int) -> list[int]:
        """The tokens from the root down to ``node``."""
        return [self.tokens[above] for above in path_to(self.parents, node)]

    def advance(self) -> bool:
        """Choose the nodes that are fed next; False when the tree is done."""
        self.level += 1
        if self.level == self.budget.depth or not self.tokens:
            return False
        best = set(self._best()[: self.most])
        depth = depths(self.parents)
        newest = [node for node in range(len(self.tokens)) if depth[node] == self.level and node in best]
        beams = min(self.beams, room(self.budget) - len(self.fed))
        self.frontier = sorted(sorted(newest, key=lambda node: -self.value[node])[:beams])
        self.fed += self.frontier
        return bool(self.frontier)

    def draft(self, name: str) -> Draft | None:
        """The best nodes, None when there are none."""
        if not self.tokens:
            return None
        kept = sorted(self._best()[: self.most])
        place = {-1: -1} | {node: at for at, node in enumerate(kept)}
        return Draft(
            self.context.id,
            self.base,
            tuple(self.tokens[node] for node in kept),
            tuple(place[self.parents[node]] for node in kept),
            (name,) * len(kept),
            np.stack([self.q[node] for node in kept]) if self.q else None,
            np.array([self.confidence[node] for node in kept]),
        )

    def lessons(self, tokens: Sequence[int]) -> list[CalibrationSample]:
        """Of the nodes whose parent became one of the committed ``tokens``, or was the last one before them."""
        found: list[CalibrationSample] = []
        node = -1
        for token in tokens:
            below = children(self.parents, node)
            node = next((child for child in below if self.tokens[child] == token), -1)
            found += [(self.raw[child], float(child == node)) for child in below]
            if node < 0:
                break
        return found

    def _best(self) -> list[int]:
        """All nodes by value, on ties the elder first: a parent comes before its children."""
        return sorted(range(len(self.tokens)), key=lambda node: -self.value[node])


def grow(
    trees: Sequence[DynamicTree], logits: Tensor, feed: Callable[[Sequence[DynamicTree]], Tensor], calibrate: Calibrate
) -> None:
    """Draft all trees to their end.

    Args:
        logits: ``[len(trees), V]``, behind the committed tokens.
        feed: logits behind the frontier nodes of each tree, tree after tree.
    """
    while True:
        _extend(trees, logits, calibrate)
        trees = [tree for tree in trees if tree.advance()]
        if not trees:
            return
        logits = feed(trees)


def _extend(trees: Sequence[DynamicTree], logits: Tensor, calibrate: Calibrate) -> None:
    """Give every frontier node its children, from its row of ``logits``."""
    numbers = [best is not None for best in likeliest(logits)]
    if not all(numbers):
        usable = iter(numbers)
        for tree in trees:
            tree.frontier = [node for node in tree.frontier if next(usable)]
        logits = logits[[row for row, is_number in enumerate(numbers) if is_number]]
    trees = [tree for tree in trees if tree.frontier]
    if not trees:
        return
    q = target_probs(logits, [_block(tree) for tree in trees])
    widest = min(max(tree.width for tree in trees), q.shape[1])
    ranked = -np.sort(np.partition(-q, widest - 1, axis=1)[:, :widest], axis=1)
    shares = np.minimum.accumulate(calibrate(ranked), axis=1) * (ranked > 0)
    first, candidates = 0, list[_Candidate]()
    for tree in trees:
        own = slice(first, first + len(tree.frontier))
        counts = _counts(tree, shares[own])
        for row, node, count in zip(range(own.start, own.stop), tree.frontier, counts, strict=True):
            candidates.append(_Candidate(tree, node, q[row], ranked[row], shares[row, :count]))
        first = own.stop
    _choose(candidates)


@dataclass(slots=True)
class _Candidate:
    """The ``n`` children that one node is to have.

    Attributes:
        q: ``[V]``, what they come from.
        ranked: ``[W]``, its largest entries in order.
        shares: ``[n]``, confidences: what the first ``n`` of these are worth.
    """

    tree: DynamicTree
    parent: int
    q: Floats
    ranked: Floats
    shares: Floats

    def stream(self, place: int) -> Stream:
        """What the ``place``-th child is drawn with: no two nodes share numbers, but for the target's own noise."""
        context, tree = self.tree.context, self.tree
        number = 0 if self.parent < 0 else tree.fed.index(self.parent) + 1
        draws = RandomStreams(context.seed, tree.base)
        return draws.stream(tree.base + tree.level, context.stream_kind, number * MAX_NODES + place)

    def add(self, place: int, token: int, q: Floats | None) -> None:
        tree, above = self.tree, self.tree.value[self.parent] if self.parent >= 0 else 1.0
        tree.tokens.append(token)
        tree.parents.append(self.parent)
        tree.raw.append(float(self.ranked[place]))
        tree.confidence.append(float(self.shares[place]))
        tree.value.append(above * float(self.shares[place]))
        if q is not None:
            tree.q.append(q)


def _counts(tree: DynamicTree, shares: Floats) -> list[int]:
    """How many children each frontier node gets: those that are among the tree's best nodes. ``shares [F, W]``."""
    above = [tree.value[node] if node >= 0 else 1.0 for node in tree.frontier]
    offered = shares[:, : tree.width] * np.array(above)[:, None]
    values = np.concatenate([tree.value, offered.ravel()])
    best = np.argsort(-values, kind="stable")[: tree.most]
    kept = np.zeros(len(values), dtype=bool)
    kept[best] = True
    wanted = kept[len(tree.value) :].reshape(offered.shape) & (offered > 0) & (offered >= tree.budget.threshold)
    return [int(count) for count in wanted.sum(1)]


def _choose(candidates: Sequence[_Candidate]) -> None:
    """Choose the children's tokens: for one place among siblings after the other, all draws of a place at once."""
    for candidate in candidates:
        if candidate.tree.context.sampling.greedy:
            for place, token in enumerate(_top(candidate.q, len(candidate.shares))):
                candidate.add(place, token, None)
    drawing = [candidate for candidate in candidates if not candidate.tree.context.sampling.greedy]
    left = [candidate.q for candidate in drawing]
    for place in range(max((len(candidate.shares) for candidate in drawing), default=0)):
        rows = [row for row, candidate in enumerate(drawing) if place < len(candidate.shares)]
        tokens = exponential_sample(np.stack([left[row] for row in rows]), [drawing[row].stream(place) for row in rows])
        for row, token in zip(rows, tokens, strict=True):
            if token < 0:
                continue  # nothing is left to draw from
            candidate, weights = drawing[row], left[row]
            drawn = candidate.tree.context.stream_kind is StreamKind.DRAFT
            candidate.add(place, token, weights / weights.sum() if drawn and place else weights if drawn else None)
            left[row] = weights.copy()
            left[row][token] = 0.0


def _top(q: Floats, count: int) -> list[int]:
    """The likeliest tokens in order, the lower id first on ties."""
    if not count:
        return []
    least = np.partition(q, -count)[-count]
    found = np.flatnonzero(q >= least)
    return [int(token) for token in found[np.argsort(-q[found], kind="stable")][:count]]


def _block(tree: DynamicTree) -> RowBlock:
    context = tree.context
    paths = [tree.path(node) for node in tree.frontier]
    return RowBlock(tree.params, History(context.tokens, context.prompt_len, paths))
