"""A small causal language model as a drafter of chains and trees, with its own KV cache.

Chains of plain sampling are one call (``Model.rollout``) where the model supports it, otherwise one call per step.
Trees, and drafts that stop by confidence, grow level by level (``drafters/dynamic_tree.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from cospec.core.drafter_capabilities import TokenScores
from cospec.core.interfaces import Model
from cospec.core.model_io import RolloutOutput, RolloutParams, SequenceSlice, TokenBatch
from cospec.core.plugin_base import Drafter
from cospec.core.sampling import History, RowBlock, edit, likeliest, softmax, target_probs
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.calibration import Calibration
from cospec.drafters.cross_tokenizer import SharedVocab
from cospec.drafters.draft_kv_cache import DraftKVCache
from cospec.drafters.dynamic_tree import DynamicTree, branches, grow
from cospec.drafters.interfaces import DrafterBuildContext, NextLogits, VocabMapping
from cospec.drafters.known_token_scores import score_known_tokens, take_last_rows
from cospec.drafters.stepwise import ModelStepwiseDrafter
from cospec.errors import InvalidInput
from cospec.native.operators import one_torch_thread
from cospec.plugin_options import ModelOptions
from cospec.rng.random_streams import Floats, RandomStreams, StreamKey, StreamKind, exponential_sample


class ModelDrafterOptions(ModelOptions):
    """Options of ``draft_model``.

    Attributes:
        model: a zoo member, folder or hub name; None takes the target's own drafter.
        draft_top_k: chains are drawn from so many of the likeliest tokens only; None draws from all tokens. The
            distributions of drafts are then short messages.
    """

    model: str | None = None
    draft_top_k: int | None = Field(default=None, ge=1)


@dataclass(slots=True)
class _Chain:
    """A chain under construction."""

    context: DraftContext
    depth: int
    confident: bool = False  # whether confidences are wanted
    counts_hits: bool = False
    tokens: list[int] = field(default_factory=list)
    q: Floats | list[Floats] = field(default_factory=list)  # of each token, if tokens are drawn
    confidence: list[float] = field(default_factory=list)
    hits: tuple[int, int] = (0, 0)


class ModelDrafter(Drafter):
    """Draws chains and trees with the random stream of the acceptance method, under the request's own parameters.

    Args:
        vocabulary: what its tokens are to the target's; None for the same ones.
        calibration: corrects the drafter's confidences; None: confidences stay unchanged.
        native: whether chains may be drafted by ``Model.rollout``.
        top_k: see ``ModelDrafterOptions.draft_top_k``.
    """

    samples = True
    reads_hidden_states = False
    drafts_ahead = True
    learns = True  # widths of trees; an instance without a calibration learns nothing
    scores_known_tokens = True
    is_stepwise = True
    drafts_for_outcomes = True
    has_kv_cache = True
    Options: ClassVar[type[ModelDrafterOptions]] = ModelDrafterOptions

    def __init__(
        self,
        model: Model,
        name: str = "draft_model",
        vocabulary: VocabMapping | None = None,
        calibration: Calibration | None = None,
        native: bool = True,
        *,
        top_k: int | None = None,
    ) -> None:
        self.model, self.name = model, name
        self._vocabulary, self._calibration = vocabulary or SharedVocab(), calibration
        self._kv_cache = DraftKVCache(model, self._vocabulary)
        self._rolls = native and model.has_rollout and self._vocabulary.same and top_k is None
        self._top_k = top_k
        self.learns = calibration is not None  # widths of trees
        self.scores_known_tokens = self.is_stepwise = self.drafts_for_outcomes = self._vocabulary.same
        self._drafted: dict[
            str, DynamicTree
        ] = {}  # trees of the current step, whose confidences are verified at commit

    @classmethod
    def build(cls, options: ModelDrafterOptions, build_context: DrafterBuildContext) -> ModelDrafter:
        """Load the drafter.

        Raises:
            InvalidInput: its vocabulary shares no token with the target's.
        """
        path = options.model or build_context.default_drafter
        if path is None:
            raise InvalidInput("speculative_config.model", None, "the folder or name of a drafter for this target")
        model, vocabulary = build_context.load_mapped(path, options)
        native, top_k = build_context.native, options.draft_top_k
        return cls(model, vocabulary=vocabulary, calibration=Calibration(), native=native, top_k=top_k)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return one draft per context whose cache fits; all contexts run as one batch at every step."""
        chains: list[_Chain] = []
        trees: list[DynamicTree] = []
        for context, asked in zip(contexts, budgets, strict=True):
            budget = self._kv_cache.open(context, asked)
            if budget is None:
                continue
            if branches(budget):
                trees.append(DynamicTree(context, budget))
            else:
                chains.append(_Chain(context, budget.depth, budget.confident, budget.count_hits))
        return [*self._propose_chains(chains), *self._propose_trees(trees)]

    def commit(self, commits: Sequence[Commit]) -> None:
        """Keep fed tokens that were committed; the next proposal overwrites the rest."""
        self._kv_cache.commit(commits)
        for commit in commits:
            tree = self._drafted.pop(commit.id, None)
            if tree is not None and self._calibration is not None and commit.base_len == tree.base:
                self._calibration.learn(tree.samples(commit.tokens))

    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences and release their cache."""
        for id in ids:
            self._drafted.pop(id, None)
        self._kv_cache.free(ids)

    @property
    def draft_kv_cache(self) -> DraftKVCache | None:
        """The model with its cache; None if the vocabularies differ, or ``draft_top_k`` cuts distributions."""
        return self._kv_cache if self._vocabulary.same and self._top_k is None else None

    def stepper(self) -> ModelStepwiseDrafter | None:
        """Return the stepwise interface in the target's ids; None if the vocabularies differ."""
        return ModelStepwiseDrafter(self.model) if self._vocabulary.same else None

    def score_known_tokens(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        """Return scores of the latest known tokens, see ``drafters.known_token_scores``."""
        return score_known_tokens(self.model, self._kv_cache, contexts) if self._vocabulary.same else {}

    def next_logits(self, contexts: Sequence[DraftContext]) -> NextLogits:
        """Return the logits after the known tokens, from the KV cache that ``propose`` uses."""
        return ModelStepwiseDrafter(self.model, self._kv_cache).open(contexts, [1] * len(contexts))

    def _score(self, batch: TokenBatch) -> Tensor:
        """Return rows over the target's ids."""
        return self._vocabulary.to_target(self.model.forward(batch))

    def _propose_trees(self, trees: Sequence[DynamicTree]) -> list[Draft]:
        if not trees:
            return []
        logits, hits = self._read_backlog([(tree.context, tree.budget.count_hits) for tree in trees])
        grow(trees, logits, lambda active: self._score(self._frontiers(active)), self._calibration or _identity)
        drafts = []
        for tree, own in zip(trees, hits, strict=True):
            self._kv_cache.keep(tree.context, [tree.tokens[node] for node in tree.fed], tree.fed_parents)
            draft = tree.draft(self.name)
            if draft is not None:
                drafts.append(replace(draft, hits=own) if own[1] else draft)
                self._drafted[draft.id] = tree
        return drafts

    def _frontiers(self, trees: Sequence[DynamicTree]) -> TokenBatch:
        """Return the fed nodes and the frontier nodes of each tree; only the frontier gets logits.

        Fed nodes are computed again: a slice holds its whole tree, and a few more rows cost a drafter little.
        """
        slices = []
        for tree in trees:
            id = tree.context.id
            tokens = self._vocabulary.to_own([tree.tokens[node] for node in tree.fed])
            before = len(tokens) - len(tree.frontier)
            slices.append(SequenceSlice(id, self._kv_cache.known(id), tokens, tuple(tree.fed_parents), before))
        return TokenBatch(tuple(slices))

    def _propose_chains(self, chains: Sequence[_Chain]) -> list[Draft]:
        if not chains:
            return []
        chains = sorted(chains, key=lambda chain: -chain.depth)  # rollouts need the longest first
        if self._rolls and all(map(_plainly_drawn, chains)) and self._fit(chains):
            self._rollout(chains)
        else:
            with one_torch_thread(self.model.has_rollout):
                logits, hits = self._read_backlog([(chain.context, chain.counts_hits) for chain in chains])
                for chain, own in zip(chains, hits, strict=True):
                    chain.hits = own
                self._step(chains, logits)
        for chain in chains:
            nodes = chain.tokens[:-1]
            self._kv_cache.keep(chain.context, nodes, range(-1, len(nodes) - 1))
        return [self._close(chain) for chain in chains if chain.tokens]

    def _fit(self, chains: Sequence[_Chain]) -> bool:
        """Whether every chain has the room of the longest, the first one, as rollouts need."""
        longest, stretch = chains[0].depth, self._kv_cache.stretch
        return chains[-1].depth == longest or all(stretch(chain.context.id, longest - 1) for chain in chains)

    def _rollout(self, chains: Sequence[_Chain]) -> None:
        """All steps as one call; the longest chain comes first."""
        params = [chain.context.sampling for chain in chains]
        rollouts = [
            RolloutParams(
                0.0 if p.greedy else p.temperature, _stream(chain), chain.depth, chain.confident or _drawn(chain)
            )
            for p, chain in zip(params, chains, strict=True)
        ]
        counted = [chain.context.id for chain in chains if chain.counts_hits]
        batch = self._kv_cache.backlog([chain.context for chain in chains], counted)
        rolled = self.model.rollout(batch, rollouts)
        _apply_rollout(chains, rolled)
        if rolled.hits:
            for chain, right, part in zip(chains, rolled.hits, batch.slices, strict=True):
                chain.hits = right, len(part.tokens) - part.logits_from - 1

    def _read_backlog(self, sequences: Sequence[tuple[DraftContext, bool]]) -> tuple[Tensor, Sequence[tuple[int, int]]]:
        """Return the logits after the known tokens, and ``Draft.hits`` of the sequences that ask for them."""
        contexts, counted = [context for context, _ in sequences], [context.id for context, asks in sequences if asks]
        if not (counted and self._vocabulary.same):
            return self._kv_cache.logits_after_known(contexts), [(0, 0)] * len(contexts)
        batch = self._kv_cache.backlog(contexts, counted)
        logits, right = take_last_rows(batch, self.model.forward(batch))
        compared = [len(part.tokens) - part.logits_from - 1 for part in batch.slices]
        return logits, list(zip(right, compared, strict=True))

    def _step(self, chains: Sequence[_Chain], logits: Tensor) -> None:
        """Extend chains one token at a time; ``logits [len(chains), V]`` follow the committed tokens."""
        active = chains
        while True:
            _extend(active, logits, self._top_k)
            active = [chain for chain in active if len(chain.tokens) < chain.depth]
            if not active:
                return
            logits = self._score(TokenBatch(tuple(self._next(chain) for chain in active)))

    def _next(self, chain: _Chain) -> SequenceSlice:
        """Return the slice that feeds a chain's newest token."""
        id = chain.context.id
        place = self._kv_cache.known(id) + len(chain.tokens) - 1
        return SequenceSlice(id, place, self._vocabulary.to_own(chain.tokens[-1:]))

    def _close(self, chain: _Chain) -> Draft:
        context, n = chain.context, len(chain.tokens)
        q = (np.asarray(chain.q) if isinstance(chain.q, list) else chain.q) if len(chain.q) else None
        confidence = np.array(chain.confidence) if chain.confidence else None
        names, parents = (self.name,) * n, tuple(range(-1, n - 1))
        return Draft(context.id, len(context.tokens), tuple(chain.tokens), parents, names, q, confidence, chain.hits)


def _identity(raw: Floats) -> Floats:
    return raw


def _extend(chains: Sequence[_Chain], logits: Tensor, top_k: int | None = None) -> None:
    """Choose one more token for each chain from its row of ``logits``; all draws of the step are one call.

    Args:
        top_k: likeliest tokens that tokens are drawn from; None for all.
    """
    best = likeliest(logits)
    drawing = [(row, chain) for row, chain in enumerate(chains) if best[row] is not None and not _plain(chain)]
    if drawing:
        rows = torch.stack([logits[row] for row, _ in drawing])  # an index tensor would start torch's threads
        q = target_probs(rows, [_block(chain) for _, chain in drawing])
        if top_k is not None:
            q = likeliest_of(q, top_k)
        tokens = exponential_sample(q, [_stream(chain) for _, chain in drawing])
        for place, (row, chain) in enumerate(drawing):
            best[row] = None if tokens[place] < 0 else tokens[place]
            if tokens[place] < 0:
                continue  # the request's parameters exclude every token
            own = _drawn(chain)
            if own:
                chain.q = [*chain.q, q[place]]
            if own or (chain.confident and not chain.context.sampling.greedy):
                chain.confidence.append(float(q[place].max()))
    for row, (token, chain) in enumerate(zip(best, chains, strict=True)):
        if token is None:
            chain.depth = len(chain.tokens)  # logits are not finite: the draft ends here
            continue
        if chain.confident and chain.context.sampling.greedy:
            chain.confidence.append(_greedy_probability(logits[row : row + 1], chain))
        chain.tokens.append(token)


def likeliest_of(q: Floats, top_k: int) -> Floats:
    """The distributions ``[R, V]`` of the ``top_k`` likeliest tokens of each row."""
    if top_k >= q.shape[1]:
        return q
    kept = np.zeros_like(q)
    best = np.argpartition(-q, top_k - 1, axis=1)[:, :top_k]
    np.put_along_axis(kept, best, np.take_along_axis(q, best, 1), 1)
    totals = kept.sum(1, keepdims=True)
    np.divide(kept, totals, out=kept, where=totals > 0)
    return kept


def _apply_rollout(chains: Sequence[_Chain], rolled: RolloutOutput) -> None:
    """Add a rollout's tokens to each chain, up to logits that are not finite."""
    for row, chain in enumerate(chains):
        chosen = rolled.tokens[row]
        chain.tokens = chosen[: chosen.index(-1)] if -1 in chosen else chosen
        if rolled.confidence is not None and (chain.confident or _drawn(chain)):
            chain.confidence = rolled.confidence[row, : len(chain.tokens)].tolist()
        if rolled.q is not None and _drawn(chain):
            chain.q = rolled.q[row, : len(chain.tokens)]


def _drawn(chain: _Chain) -> bool:
    """Return whether tokens have their own q, whose largest entry is free."""
    return chain.context.stream_kind is StreamKind.DRAFT and not chain.context.sampling.greedy


def _greedy_probability(logits: Tensor, chain: _Chain) -> float:
    """Return the probability of a greedy request's token at temperature 1, from its row ``[1, V]``."""
    block = _block(chain)
    return float(softmax(edit(logits, block.params, block.history), [1.0]).max())


def _plain(chain: _Chain) -> bool:
    """Return whether the request takes the most probable token of unedited logits."""
    params = chain.context.sampling
    return params.greedy and not params.edits_logits


def _block(chain: _Chain) -> RowBlock:
    context = chain.context
    return RowBlock(context.sampling, History.of_context(context, [chain.tokens]))


def _plainly_drawn(chain: _Chain) -> bool:
    """Whether ``Model.rollout`` draws as the request asks: by temperature alone."""
    params = chain.context.sampling
    return not params.edits_logits and (params.greedy or not params.truncates)


def _stream(chain: _Chain) -> StreamKey:
    """Return the random stream of the chain's next token, as the acceptance method requires."""
    context = chain.context
    base = len(context.tokens)
    return RandomStreams(context.seed, base).stream(base + len(chain.tokens), context.stream_kind)
