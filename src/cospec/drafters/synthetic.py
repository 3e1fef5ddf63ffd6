"""Drafts with a given acceptance rate, to measure speed independently of a drafter's quality.

The first run of a request is made without drafts, and its output is stored. When the same request returns (the same
prompt, parameters and, unless greedy, seed), its output is known: ``match`` makes the output a function of these alone.
The draft is this output with mistakes. Given right tokens before, each token is right with the given probability. A
draft ahead continues the output at its place, as if the draft under verification were right. The verifier treats the
draft like any other, so the output distribution is unchanged. With another acceptance method the output cannot be
known, and the request gets no draft.

So a benchmark runs its prompts once to warm up, and measures from the second time on. ``seconds_per_token`` simulates
drafting time: the drafter sleeps this long per token of the step's longest draft.
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

from cospec.core.drafter_capabilities import DrafterCapabilities
from cospec.core.plugin_base import Drafter
from cospec.core.types import Commit, Draft, DraftBudget, DraftContext
from cospec.drafters.interfaces import DrafterBuildContext
from cospec.errors import InvalidInput
from cospec.plugin_options import Options
from cospec.rng.random_streams import RandomStreams, StreamKind, derive_seed

MAX_STORED = 4096  # outputs; the least recently used is dropped first
Rate = Annotated[float, Field(ge=0, le=1, strict=False)]
Key = tuple[tuple[int, ...], str, int]


class SyntheticOptions(Options):
    """Options of ``synthetic``.

    Attributes:
        acceptance: probability that a draft token is right given right tokens before: one number for all positions, or
            a number per position, whose last also holds for later positions.
        seconds_per_token: of one drafting step of the whole batch.
    """

    acceptance: Rate | list[Rate] = 0.7
    seconds_per_token: float = Field(default=0.0, ge=0, le=10, strict=False)


@dataclass(slots=True)
class _ActiveRequest:
    """A request in flight: its key, its output so far, and the seed of its mistakes.

    The seed includes the prompt. Benchmarks give all requests one seed; mistakes at equal positions of all requests
    would not be a random sample.
    """

    key: Key
    prompt_len: int
    seed: int
    output: list[int] = field(default_factory=list)


class SyntheticDrafter(Drafter):
    """Replays stored outputs with mistakes; exact under every acceptance method, like any drafter."""

    samples = False
    capabilities = DrafterCapabilities(costless=True, chains=True)
    reads_hidden_states = False
    drafts_ahead = True
    learns = True
    Options: ClassVar[type[SyntheticOptions]] = SyntheticOptions

    def __init__(self, acceptance: Sequence[float], seconds_per_token: float, vocab_size: int) -> None:
        self.name = "synthetic"
        self._rates, self._seconds, self._vocab = tuple(acceptance), seconds_per_token, vocab_size
        self._open: dict[str, _ActiveRequest] = {}
        self._known: OrderedDict[Key, tuple[int, ...]] = OrderedDict()

    @classmethod
    def build(cls, options: SyntheticOptions, build_context: DrafterBuildContext) -> SyntheticDrafter:
        """Build the drafter; needs only the target's vocabulary size."""
        given = options.acceptance
        rates = given if isinstance(given, list) else [given]
        if not rates:
            raise InvalidInput("speculative_config.acceptance", given, "a number from 0 to 1, or at least one of them")
        return cls(rates, options.seconds_per_token, build_context.target.vocab_size)

    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """Return a chain for each request whose output is stored."""
        pairs = zip(contexts, budgets, strict=True)
        drafts = [draft for context, budget in pairs if (draft := self._draft(context, budget)) is not None]
        if self._seconds and drafts:
            time.sleep(self._seconds * max(len(draft) for draft in drafts))
        return drafts

    def commit(self, commits: Sequence[Commit]) -> None:
        """Record outputs; store those of finished requests."""
        for commit in commits:
            one = self._open.get(commit.id)
            if one is None or commit.base_len != one.prompt_len + len(one.output):
                continue
            one.output.extend(commit.tokens)
            if commit.finish is not None:
                self._known[one.key] = tuple(one.output)
                self._known.move_to_end(one.key)
                if len(self._known) > MAX_STORED:
                    self._known.popitem(last=False)

    def free(self, ids: Sequence[str]) -> None:
        """Drop finished requests; their outputs stay stored."""
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
            one = self._open[context.id] = _ActiveRequest(key, context.prompt_len, mistakes)
        one.output.extend(context.tokens[context.prompt_len + len(one.output) : context.committed_len])
        place, n = len(context.tokens) - context.prompt_len, min(budget.depth, budget.max_nodes)
        right = self._known.get(one.key, ())[place : place + n]
        if not right:
            return None
        tokens, n = self._with_mistake(right, RandomStreams(one.seed, len(context.tokens))), len(right)
        return Draft(context.id, len(context.tokens), tokens, tuple(range(-1, n - 1)), (self.name,) * n)

    def _with_mistake(self, right: tuple[int, ...], draws: RandomStreams) -> tuple[int, ...]:
        """Return ``right`` with a wrong token at the first position whose keyed number is not below the rate."""
        numbers = draws.uniforms(draws.base, len(right), StreamKind.DRAFT)
        rates = [self._rates[min(place, len(self._rates) - 1)] for place in range(len(right))]
        wrong = next((place for place, rate in enumerate(rates) if not numbers[place] < rate), None)
        if wrong is None:
            return right
        return (*right[:wrong], (right[wrong] + 1) % self._vocab, *right[wrong + 1 :])
