"""What a plug-in must do. Everything is synchronous and batched; what a plug-in needs or offers is data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from cospec.draws import Draws, Purpose
from cospec.types import (
    Budget,
    Commit,
    Context,
    Draft,
    Load,
    Outcome,
    Pick,
    Plan,
    PlanEntry,
    Rolled,
    RoundStats,
    RoundTimes,
    Scores,
    Sequence,
    TokenBatch,
    Verdict,
)

Clock = Callable[[], float]
"""Seconds from an arbitrary start, never backwards: the machine's own clock, or a simulation's."""


class Pages(Protocol):
    """The accounting of one model's KV cache; no tensors. The scheduler admits and preempts by it."""

    @property
    def usage(self) -> float:
        """Share of the cache in use by sequences, 0 to 1."""

    @property
    def capacity(self) -> int:
        """Tokens that fit in all."""

    def attach(self, id: str, tokens: Seq[int]) -> int:
        """Open a sequence and reuse cached pages of its prefix; returns how many tokens are already there."""

    def reserve(self, id: str, length: int) -> bool:
        """Make room for ``length`` tokens in all; False, with nothing changed, when there is none."""

    def keep(self, id: str, tokens: Seq[int], computed: int) -> None:
        """Offer the full pages of ``tokens[:computed]``, computed and committed, for reuse by other sequences."""

    def free(self, id: str) -> None:
        """Give back a sequence's pages. Unknown ids are ignored."""

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when a page is leaked, shared by mistake or counted wrongly."""


class Model(Protocol):
    """A causal language model that scores packed batches against its own KV cache."""

    name: str
    vocab_size: int
    max_len: int  # tokens of one sequence
    dtype: torch.dtype
    pages: Pages

    def forward(self, batch: TokenBatch) -> Tensor:
        """Logits ``[R, V]`` for the rows that the segments ask for, in order; writes the cache behind ``start``.

        Room must have been reserved through ``pages``. What lies behind ``start`` is overwritten, so a rollback is
        free.
        """

    def rollout(self, batch: TokenBatch, picks: Seq[Pick], depth: int) -> Rolled | None:
        """Score the batch, then choose and feed ``depth`` tokens of each segment one by one, the last one unfed.

        Every segment asks for its last row and has room for ``depth - 1`` tokens more. None, with nothing done, where
        the model has no such loop of its own and the caller has to step.
        """

    def commit(self, commits: Seq[Commit]) -> None:
        """Keep accepted nodes: moves their cache entries together when a path is not a prefix of its tree."""

    def free(self, ids: Seq[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""


class Host(Protocol):
    """What the engine offers to a drafter that is being built."""

    target: Model
    default_drafter: str | None  # the drafter that belongs to the target, when it has one

    def load_drafter(self, name: str) -> Model:
        """A model with the target's vocabulary; raises ``InvalidInput`` when it has another."""


class Drafter(Protocol):
    """Whatever proposes tokens. A drafter that cannot draft for a sequence leaves it out."""

    name: str
    samples: ClassVar[bool]  # True: draws tokens from a q; False: chooses them (point mass)

    def propose(self, contexts: Seq[Context], budgets: Seq[Budget]) -> list[Draft]:
        """One draft for each context that it has something for; ``len(draft) <= max_nodes``, depth as budgeted."""

    def commit(self, commits: Seq[Commit]) -> None:
        """Learn what was accepted. Called for every sequence, also those it did not draft for."""

    def free(self, ids: Seq[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""


class Rule(Protocol):
    """Decides which draft tokens are kept. Pure: the same arguments give the same verdict."""

    name: ClassVar[str]
    exact: ClassVar[bool]
    reads_law: ClassVar[bool]  # whether it needs ``Scores.law`` for greedy requests too
    trees: ClassVar[bool]  # False: chains only
    noise: ClassVar[Purpose]  # the stream that drafters draw with under this rule

    def judge(self, draft: Draft, scores: Scores, draws: Draws) -> Verdict:
        """``scores`` has one row more than the draft has nodes; the draft has at least one node."""


class Blend(Protocol):
    """Joins the logits of several models into those of the law. Pure."""

    name: str

    def combine(self, logits: Seq[Tensor]) -> Tensor:
        """``[R, V]`` per model to ``[R, V]``."""


class Policy(Protocol):
    """How long to speculate, for whom. No torch."""

    def plan(self, load: Load) -> list[Budget]:
        """A budget for each of ``load.ready``, in order."""

    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """What of the drafts is worth verifying, by what was known before the cut tokens were drawn."""

    def observe(self, stats: RoundStats, commits: Seq[Commit]) -> None:
        """Learn from a finished round."""


class Judge(Protocol):
    """Scores drafts with the target and applies each request's rule; the engine's verifier."""

    def rule(self, sequence: Sequence) -> Rule:
        """The rule that this sequence's request is judged by."""

    def verify(self, entries: Seq[PlanEntry], drafts: Mapping[str, Draft]) -> list[Outcome]:
        """One outcome per entry, in order; entries without a draft are computed all the same."""

    def commit(self, commits: Seq[Commit]) -> None:
        """Keep what was accepted in the caches of the models that judge."""

    def free(self, ids: Seq[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""


@dataclass(frozen=True, slots=True)
class Crew:
    """Who works in a round."""

    drafter: Drafter | None
    judge: Judge
    policy: Policy
    clock: Clock


class Round(Protocol):
    """The only place that orders drafting against verification; built from a ``Crew``."""

    times: RoundTimes  # of the latest run

    def run(self, plan: Plan) -> list[Outcome]:
        """Outcomes of the entries that were verified, in order; entries left out come again with a later plan."""

    def commit(self, commits: Seq[Commit]) -> None:
        """Tell everybody in the crew what the sequences gained."""

    def free(self, ids: Seq[str]) -> None:
        """Tell everybody in the crew which sequences are gone. Unknown ids are ignored."""
