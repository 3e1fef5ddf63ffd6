"""A small causal language model that drafts chains.

It keeps a KV cache of its own and chases the committed tokens by itself: whatever it has not fed yet (the prompt, the
recovered or bonus token, what was committed while it was not asked) is fed at the front of its next proposal.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from torch import Tensor

from cospec.draws import Draws, Floats, Purpose, Stream, race
from cospec.errors import InvalidInput
from cospec.options import Options
from cospec.protocols import Host, Model
from cospec.sampling import Block, History, laws, likeliest
from cospec.types import Budget, Commit, Context, Draft, Pick, Rolled, Segment, TokenBatch

CATCH_UP_TOKENS = 2048  # fed in one forward; longer backlogs are fed in pieces so that memory stays bounded


class ModelDrafterOptions(Options):
    """``model``: a zoo member, folder or hub name; None takes the drafter that belongs to the target."""

    model: str | None = None


@dataclass(slots=True)
class _Chain:
    """A draft in the making."""

    context: Context
    depth: int
    tokens: list[int] = field(default_factory=list)
    q: list[Floats] = field(default_factory=list)


class ModelDrafter:
    """Spec section 4, ``model``. Draws with the noise that the rule asks for, under the request's own parameters."""

    samples: ClassVar[bool] = True
    Options: ClassVar[type[ModelDrafterOptions]] = ModelDrafterOptions

    def __init__(self, model: Model, name: str = "draft_model") -> None:
        self.model, self.name = model, name
        self._fed: dict[str, int] = {}
        self._ahead: dict[str, tuple[int, tuple[int, ...]]] = {}  # draft tokens in the cache, behind which length

    @classmethod
    def build(cls, options: ModelDrafterOptions, host: Host) -> ModelDrafter:
        """Load the drafter; refuse one whose vocabulary is not the target's."""
        path = options.model or host.default_drafter
        if path is None:
            raise InvalidInput("speculative_config.model", None, "the folder or name of a drafter for this target")
        model = host.load_drafter(path)
        return cls(model)

    def propose(self, contexts: Seq[Context], budgets: Seq[Budget]) -> list[Draft]:
        """One chain per context whose cache fits, all contexts batched at every step."""
        chains = [chain for pair in zip(contexts, budgets, strict=True) if (chain := self._open(*pair))]
        if not chains:
            return []
        backlog = self._backlog(chains)
        rolled = self._rollout(chains, backlog)
        if rolled is None:
            self._step(chains, self.model.forward(backlog))
        else:
            _take(chains, rolled)
        for chain in chains:
            tokens = chain.context.tokens
            self._fed[chain.context.id] = len(tokens)
            self.model.pages.keep(chain.context.id, tokens, len(tokens))
        return [self._close(chain) for chain in chains if chain.tokens]

    def commit(self, commits: Seq[Commit]) -> None:
        """Keep what was fed and turned out committed; the rest is overwritten by the next proposal."""
        for commit in commits:
            base, drafted = self._ahead.pop(commit.id, (commit.base_len, ()))
            if base == commit.base_len:
                agreed = 0
                while agreed < min(len(drafted), len(commit.tokens)) and drafted[agreed] == commit.tokens[agreed]:
                    agreed += 1
                if drafted:
                    self._fed[commit.id] = base + agreed

    def free(self, ids: Seq[str]) -> None:
        """Forget sequences and give back their cache."""
        for id in ids:
            self._fed.pop(id, None)
            self._ahead.pop(id, None)
        self.model.free(ids)

    def _open(self, context: Context, budget: Budget) -> _Chain | None:
        known, pages = len(context.tokens), self.model.pages
        depth = min(budget.depth, budget.max_nodes, self.model.max_len - known)
        if depth < 1:
            return None
        if context.id not in self._fed:
            self._fed[context.id] = pages.attach(context.id, context.tokens)
        if not pages.reserve(context.id, known + depth - 1):
            self.free([context.id])  # no room: this sequence goes without drafts until there is
            return None
        return _Chain(context, depth)

    def _backlog(self, chains: Seq[_Chain]) -> TokenBatch:
        """Every committed token that is not in the cache, as one batch that asks for the rows behind the last ones."""
        segments: list[Segment] = []
        for chain in chains:
            context = chain.context
            start, known = self._fed[context.id], len(context.tokens)
            while known - start > CATCH_UP_TOKENS:
                piece = tuple(context.tokens[start : start + CATCH_UP_TOKENS])
                self.model.forward(TokenBatch((Segment(context.id, start, piece, logits_from=len(piece)),)))
                start += CATCH_UP_TOKENS
            tokens = tuple(context.tokens[start:known])
            segments.append(Segment(context.id, start, tokens, logits_from=len(tokens) - 1))
        return TokenBatch(tuple(segments))

    def _rollout(self, chains: Seq[_Chain], backlog: TokenBatch) -> Rolled | None:
        """All steps as one call, where the model has one and every chain is drawn by temperature alone."""
        params = [chain.context.sampling for chain in chains]
        same = all(chain.depth == chains[0].depth for chain in chains)
        if not same or any(p.edits_logits or (p.truncates and not p.greedy) for p in params):
            return None
        picks = [
            Pick(0.0 if p.greedy else p.temperature, _stream(chain)) for p, chain in zip(params, chains, strict=True)
        ]
        return self.model.rollout(backlog, picks, chains[0].depth)

    def _step(self, chains: Seq[_Chain], logits: Tensor) -> None:
        """Extend by one token at a time; ``logits [len(chains), V]`` stand behind the committed tokens."""
        active = chains
        while True:
            self._extend(active, logits)
            active = [chain for chain in active if len(chain.tokens) < chain.depth]
            if not active:
                return
            logits = self.model.forward(TokenBatch(tuple(_next(chain) for chain in active)))

    def _extend(self, chains: Seq[_Chain], logits: Tensor) -> None:
        """Choose one more token for each chain from its row of ``logits``; all draws of the step are one call."""
        best = likeliest(logits)
        drawing = [(row, chain) for row, chain in enumerate(chains) if best[row] is not None and not _plain(chain)]
        if drawing:
            q = laws(logits[[row for row, _ in drawing]], [_block(chain) for _, chain in drawing])
            tokens = race(q, [_stream(chain) for _, chain in drawing])
            for place, (row, chain) in enumerate(drawing):
                best[row] = tokens[place]
                if chain.context.noise is Purpose.DRAFT:
                    chain.q.append(q[place])
        for token, chain in zip(best, chains, strict=True):
            if token is None:
                chain.depth = len(chain.tokens)  # no numbers to choose by: the draft ends here
            else:
                chain.tokens.append(token)

    def _close(self, chain: _Chain) -> Draft:
        id, base = chain.context.id, len(chain.context.tokens)
        n = len(chain.tokens)
        self._ahead[id] = (base, tuple(chain.tokens[:-1]))
        q = np.stack(chain.q) if chain.q else None
        return Draft(id, base, tuple(chain.tokens), tuple(range(-1, n - 1)), (self.name,) * n, q)


def _take(chains: Seq[_Chain], rolled: Rolled) -> None:
    """Give each chain what a rollout chose for it, up to where the logits were no numbers."""
    for row, chain in enumerate(chains):
        chosen = rolled.tokens[row]
        chain.tokens = chosen[: chosen.index(-1)] if -1 in chosen else chosen
        context = chain.context
        if rolled.q is not None and context.noise is Purpose.DRAFT and not context.sampling.greedy:
            chain.q = list(rolled.q[row, : len(chain.tokens)])


def _plain(chain: _Chain) -> bool:
    """Whether the likeliest token is what the request's law picks."""
    params = chain.context.sampling
    return params.greedy and not params.edits_logits


def _block(chain: _Chain) -> Block:
    context = chain.context
    return Block(context.sampling, History(context.tokens, context.prompt_len, [chain.tokens]))


def _stream(chain: _Chain) -> Stream:
    """What the chain's next token is drawn with: the noise that the request's rule asks for."""
    context = chain.context
    base = len(context.tokens)
    return Draws(context.seed, base).stream(base + len(chain.tokens), context.noise)


def _next(chain: _Chain) -> Segment:
    """The segment that feeds a chain's newest token."""
    return Segment(chain.context.id, len(chain.context.tokens) + len(chain.tokens) - 1, (chain.tokens[-1],))
