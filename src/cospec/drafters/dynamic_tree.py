"""Dynamic draft trees: grow the most probable nodes level by level (EAGLE-2, 2406.16858, section 4).

At every level each frontier node offers its most probable continuations. The value of a continuation is the product of
the confidences on its path; the best ``max_nodes`` nodes and offers are kept. The confidence of a node's ``j``-th child
is the ``j``-th largest probability after the node, regardless of the token. So a confidence is known before the token
is drawn and falls from child to child. The selection never depends on the token itself, as ``recursive`` requires.
Greedy requests take the most probable tokens. Sampled tokens are drawn without replacement. Under ``match`` tokens
come in the order of the target's own random numbers.

A tree may begin with a chain that the target verifies meanwhile (``DraftBudget.outcomes``). All tokens of the chain are
in the first frontier, so the tree continues the likeliest outcomes of the verification.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor

from cospec.core.plugin_base import base_of
from cospec.core.sampling import History, RowBlock, likeliest, target_probs
from cospec.core.tree import MAX_NODES, children, path_to
from cospec.core.types import Draft, DraftBudget, DraftContext
from cospec.drafters.calibration import CalibrationSample
from cospec.rng.random_streams import Floats, RandomStreams, StreamKey, StreamKind, exponential_sample
from cospec.sampling_params import SamplingParams

Calibrate = Callable[[Floats], Floats]
"""Maps probabilities ``[R, W]`` to acceptance rates of such nodes given an accepted parent, ``[R, W]``."""


def branches(budget: DraftBudget) -> bool:
    """Return whether a budget asks for more than a plain chain."""
    return not budget.is_chain or budget.threshold > 0 or budget.outcomes


def room(budget: DraftBudget) -> int:
    """Return the cache entries that a draft needs at most, including fed nodes that better nodes replace."""
    return min(2 * budget.max_nodes, MAX_NODES) if branches(budget) else budget.depth - 1


@dataclass(slots=True)
class DynamicTree:
    """A draft under construction. Lists are per node; ``fed`` lists the nodes in the drafter's cache, in cache
    order."""

    context: DraftContext
    budget: DraftBudget
    # parameters of the confidences: a greedy request's own distribution is a point mass
    params: SamplingParams = field(init=False)
    base: int = field(init=False)  # known tokens when the draft began; the context's list grows
    root: DraftContext = field(init=False)  # the context at the base
    given: int = field(init=False)  # tokens that the tree begins with
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
    grown: int = 0  # nodes before the latest level

    def __post_init__(self) -> None:
        params, budget = self.context.sampling, self.budget
        whole = replace(params, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
        self.params = whole if params.greedy else params
        self.base, self.root = base_of(self.context, budget), self.context
        self.given = len(self.context.tokens) - self.base
        if self.given:
            self.root = replace(self.context, tokens=self.context.tokens[: self.base], assumed=0)
            self.tokens += self.context.tokens[self.base :]
            self.parents += range(-1, self.given - 1)
            self.fed += range(self.given)
            self.frontier += range(self.given)
            self.raw, self.confidence, self.value = ([0.0] * self.given for _ in range(3))
            self.level = self.grown = self.given
        self.most = min(budget.max_nodes + self.given, MAX_NODES)
        share = -(-self.most // budget.depth)
        self.beams = self.most if budget.widths else share if share == 1 else max(2, share)

    @property
    def width(self) -> int:
        """The maximum number of children per node at the current level."""
        widths = self.budget.widths
        if not widths:
            return self.beams
        level = self.level - self.given
        return widths[level] if level < len(widths) else 1

    @property
    def fed_parents(self) -> list[int]:
        """Parents of the fed nodes as indices among the fed nodes, ``[len(fed)]``."""
        place = {node: at for at, node in enumerate(self.fed)}
        return [place.get(self.parents[node], -1) for node in self.fed]

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root down to ``node``."""
        return [self.tokens[above] for above in path_to(self.parents, node)]

    def advance(self) -> bool:
        """Select the nodes to feed next; returns False when the tree is complete."""
        self.level += 1
        if self.level == self.given + self.budget.depth or not self.tokens:
            return False
        best = set(self._best()[: self.most])
        newest = [node for node in range(self.grown, len(self.tokens)) if node in best]
        self.grown = len(self.tokens)
        beams = min(self.beams, room(self.budget) - len(self.fed))
        self.frontier = sorted(sorted(newest, key=lambda node: -self.value[node])[:beams])
        self.fed += self.frontier
        return bool(self.frontier)

    def draft(self, name: str) -> Draft | None:
        """Return the best nodes as a draft; None if there are none."""
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

    def given_child(self, node: int) -> int | None:
        """Return the node of the given chain after a frontier node; None if there is none."""
        return node + 1 if self.level == self.given and node + 1 < self.given else None

    def rate(self, node: int, raw: float, confidence: float) -> None:
        """Set the confidence of a node of the given chain."""
        self.raw[node], self.confidence[node] = raw, confidence
        self.value[node] = confidence * (self.value[node - 1] if node else 1.0)

    def samples(self, tokens: Sequence[int]) -> list[CalibrationSample]:
        """Return samples of the nodes whose parent was committed, or was the last token before ``tokens``."""
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
        """Return all nodes by value, older nodes first on ties, so parents precede their children."""
        return sorted(range(len(self.tokens)), key=lambda node: -self.value[node])


def grow(
    trees: Sequence[DynamicTree], logits: Tensor, feed: Callable[[Sequence[DynamicTree]], Tensor], calibrate: Calibrate
) -> None:
    """Grow all trees to completion.

    Args:
        logits: ``[len(trees), V]``, after the committed tokens.
        feed: returns the logits after the frontier nodes of each tree, tree by tree.
    """
    while True:
        _extend(trees, logits, calibrate)
        trees = [tree for tree in trees if tree.advance()]
        if not trees:
            return
        logits = feed(trees)


def _extend(trees: Sequence[DynamicTree], logits: Tensor, calibrate: Calibrate) -> None:
    """Add children to every frontier node, from its row of ``logits``."""
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
    others = _take_given(trees, q, calibrate)
    widest = min(max(tree.width for tree in trees), q.shape[1])
    first_choices = q.argmax(axis=1)  # the lower id on ties
    if widest == 1:
        ranked = others.max(axis=1, keepdims=True)
    else:
        ranked = -np.sort(np.partition(-others, widest - 1, axis=1)[:, :widest], axis=1)
    shares = np.minimum.accumulate(calibrate(ranked), axis=1) * (ranked > 0)
    first, candidates = 0, list[_Candidate]()
    for tree in trees:
        own = slice(first, first + len(tree.frontier))
        counts = _counts(tree, shares[own])
        for row, node, count in zip(range(own.start, own.stop), tree.frontier, counts, strict=True):
            candidates.append(_Candidate(tree, node, q[row], int(first_choices[row]), ranked[row], shares[row, :count]))
        first = own.stop
    _choose(candidates)


def _take_given(trees: Sequence[DynamicTree], q: Floats, calibrate: Calibrate) -> Floats:
    """Rate the tokens of given chains as first children, and remove these from ``q [rows, V]``.

    Returns:
        ``[rows, V]``, in any order, the probabilities that give other children their confidences. A given token that
        was drawn takes the largest probability, whatever the token.
    """
    rows = [(tree, node) for tree in trees for node in tree.frontier]
    drawn = any(tree.given and not tree.context.sampling.greedy for tree in trees)
    others = q.copy() if drawn else q
    for row, (tree, node) in enumerate(rows):
        child = tree.given_child(node)
        if child is not None:
            token = tree.tokens[child]
            first = token if tree.context.sampling.greedy else int(q[row].argmax())
            raw = others[row, first]
            tree.rate(child, float(raw), float(calibrate(raw[None, None])[0, 0]))
            others[row, first] = q[row, token] = 0.0
    return others


@dataclass(slots=True)
class _Candidate:
    """The ``n`` children to add to one node.

    Attributes:
        q: ``[V]``, the distribution of the children.
        best: the token with the largest probability.
        ranked: ``[W]``, its largest entries in order.
        shares: ``[n]``, confidences of the first ``n`` entries.
    """

    tree: DynamicTree
    parent: int
    q: Floats
    best: int
    ranked: Floats
    shares: Floats

    def stream(self, place: int) -> StreamKey:
        """Return the random stream of the ``place``-th child; nodes share no random numbers, except the target's
        own."""
        context, tree = self.tree.context, self.tree
        number = 0 if self.parent < 0 else tree.fed.index(self.parent) + 1
        draws, depth = RandomStreams(context.seed, tree.base), len(path_to(tree.parents, self.parent))
        return draws.stream(tree.base + depth, context.stream_kind, number * MAX_NODES + place)

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
    """Return the number of children of each frontier node among the tree's best nodes, from ``shares [F, W]``."""
    above = [tree.value[node] if node >= 0 else 1.0 for node in tree.frontier]
    offered = shares[:, : tree.width] * np.array(above)[:, None]
    values = np.concatenate([tree.value, offered.ravel()])
    best = np.argsort(-values, kind="stable")[: tree.most]
    kept = np.zeros(len(values), dtype=bool)
    kept[best] = True
    wanted = kept[len(tree.value) :].reshape(offered.shape) & (offered > 0) & (offered >= tree.budget.threshold)
    return [int(count) for count in wanted.sum(1)]


def _choose(candidates: Sequence[_Candidate]) -> None:
    """Choose the children's tokens, one sibling position at a time; all draws of a position are one call."""
    for candidate in candidates:
        if candidate.tree.context.sampling.greedy:
            count = len(candidate.shares)
            for place, token in enumerate([candidate.best] if count == 1 else _top(candidate.q, count)):
                candidate.add(place, token, None)
    drawing = [candidate for candidate in candidates if not candidate.tree.context.sampling.greedy]
    left = [candidate.q for candidate in drawing]
    for place in range(max((len(candidate.shares) for candidate in drawing), default=0)):
        rows = [row for row, candidate in enumerate(drawing) if place < len(candidate.shares)]
        tokens = exponential_sample(np.stack([left[row] for row in rows]), [drawing[row].stream(place) for row in rows])
        for row, token in zip(rows, tokens, strict=True):
            if token < 0:
                continue  # no token is left to draw
            candidate, weights = drawing[row], left[row]
            drawn = candidate.tree.context.stream_kind is StreamKind.DRAFT
            candidate.add(place, token, weights / weights.sum() if drawn and place else weights if drawn else None)
            left[row] = weights.copy()
            left[row][token] = 0.0


def _top(q: Floats, count: int) -> list[int]:
    """Return the most probable tokens in order; the lower id first on ties."""
    if not count:
        return []
    least = np.partition(q, -count)[-count]
    found = np.flatnonzero(q >= least)
    return [int(token) for token in found[np.argsort(-q[found], kind="stable")][:count]]


def _block(tree: DynamicTree) -> RowBlock:
    paths = [tree.path(node) for node in tree.frontier]
    return RowBlock(tree.params, History.of_context(tree.root, paths))
