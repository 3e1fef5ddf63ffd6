"""Drafts of a given acceptance, so that speed can be measured apart from how good a drafter is.

The first time a request runs it is written without drafts and remembered. When the same request comes again (the same
prompt, parameters and, unless it is greedy, seed) its output is known beforehand, because ``match`` makes it a function
of these alone. The draft is then that output with mistakes: at each position, given that all before were right, the
right token stands with the probability asked for. The verifier knows nothing of this and judges as ever, so the law is
what it always is; where a request is judged by another rule, its output cannot be known, and it goes without drafts.

So a benchmark runs its prompts once to warm up and measures from the second time on. ``seconds_per_token`` stands for
the time a drafter would take: the drafter sleeps that long per step of the round's longest draft.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar
from zlib import crc32

from pydantic import Field

from cospec.core.interfaces import DrafterBuildContext
from cospec.core.plugins import Drafter
from cospec.core.rng import RandomStreams, StreamKind, derive_seed
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext, DrafterCapabilities
from cospec.errors import InvalidInput
from cospec.options import Options

REMEMBERED = 4096  # outputs; the longest unused goes first
Rate = Annotated[float, Field(ge=0, le=1, strict=False)]
Key = tuple[tuple[int, ...], str, int]


class SyntheticOptions(Options):
    """What stands for a drafter.

    Attributes:
        acceptance: the probability that a draft token is right when all before it are: one number for every position,
            or one per position, whose last holds for those behind.
        seconds_per_token: of one drafting step of the whole batch.
    """

    acceptance: Rate | list[Rate] = 0.7
    seconds_per_token: float = Field(default=0.0, ge=0, le=10, strict=False)


@dataclass(slots=True)
class _Open:
    """A request in flight: what it is known by, its output so far, and the seed of its mistakes.

    That seed mixes in the prompt: benchmarks give all their requests one seed, and mistakes at the same places of all
    of them would be no sample of anything.
    """

    key: Key
    prompt_len: int
    seed: int
    output: list[int] = field(default_factory=list)


class SyntheticDrafter(Drafter):
    """Replays remembered outputs with mistakes; exact under every rule, as any drafter is."""

    samples = False
    capabilities = DrafterCapabilities(free=True, chains=True)
    reads_states = False
    drafts_ahead = False
    learns = True
    Options: ClassVar[type[SyntheticOptions]] = SyntheticOptions

    def __init__(self, acceptance: Sequence[float], seconds_per_token: float, vocab_size: int) -> None:
        self.name = "synthetic"
        self._rates, self._seconds, self._vocab = tuple(acceptance), seconds_per_token, vocab_size
        self._open: dict[str, _Open] = {}
        self._known: OrderedDict[Key, tuple[int, ...]] = OrderedDict()

    @classmethod
    def build(cls, options: SyntheticOptions, build_context: DrafterBuildContext) -> SyntheticDrafter:
        """Needs of the host what tokens there are."""
        given = options.acceptance
        rates = given if isinstance(given, list) else [given]
        if not rates:
            raise InvalidInput("speculative_config.acceptance", given, "a number from 0 to 1, or at least one of them")
        return cls(rates, options.seconds_per_token, build_context.target.vocab_size)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """A chain for each request whose output is remembered."""
        pairs = zip(contexts, budgets, strict=True)
        drafts = [draft for context, budget in pairs if (draft := self._draft(context, budget)) is not None]
        if self._seconds and drafts:
            time.sleep(self._seconds * max(len(draft) for draft in drafts))
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None:
        """Write along; remember what ended."""
        for commit in commits:
            one = self._open.get(commit.id)
            if one is None or commit.base_len != one.prompt_len + len(one.output):
                continue
            one.output.extend(commit.tokens)
            if commit.finish is not None:
                self._known[one.key] = tuple(one.output)
                self._known.move_to_end(one.key)
                if len(self._known) > REMEMBERED:
                    self._known.popitem(last=False)

    def free(self, ids: Sequence[str]) -> None:
        """Drop requests that ended; what they wrote is remembered."""
        for id in ids:
            self._open.pop(id, None)

    def _draft(self, context: DraftContext, budget: DraftBudget) -> Draft | None:
        if context.stream_kind is not StreamKind.TARGET:
            return None
        one = self._open.get(context.id)
        if one is None:
            prompt = tuple(context.tokens[: context.prompt_len])
            seed = 0 if context.sampling.greedy else context.seed
            mistakes = derive_seed(context.seed, 1 + crc32(array("q", prompt).tobytes()))
            key = (prompt, repr(context.sampling), seed)
            one = self._open[context.id] = _Open(key, context.prompt_len, mistakes)
        one.output.extend(context.tokens[context.prompt_len + len(one.output) :])
        place, n = len(one.output), min(budget.depth, budget.max_nodes)
        right = self._known.get(one.key, ())[place : place + n]
        if not right:
            return None
        tokens, n = self._spoiled(right, RandomStreams(one.seed, len(context.tokens))), len(right)
        return Draft(context.id, len(context.tokens), tokens, tuple(range(-1, n - 1)), (self.name,) * n)

    def _spoiled(self, right: tuple[int, ...], draws: RandomStreams) -> tuple[int, ...]:
        """``right`` with another token at the first position whose keyed number is not below the rate."""
        numbers = draws.uniforms(draws.base, len(right), StreamKind.DRAFT)
        rates = [self._rates[min(place, len(self._rates) - 1)] for place in range(len(right))]
        wrong = next((place for place, rate in enumerate(rates) if not numbers[place] < rate), None)
        if wrong is None:
            return right
        return (*right[:wrong], (right[wrong] + 1) % self._vocab, *right[wrong + 1 :])
