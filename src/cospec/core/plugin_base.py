"""The base classes of drafters, policies, acceptance methods and logits processors: what each declares and does.

A plug-in inherits its base class, declares every attribute that has no default here, and overrides the defaults that
differ. The engine reads these attributes, and tests neither class nor name. Calls are synchronous and batched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cospec.core.drafter_capabilities import DrafterCapabilities, TokenScores
from cospec.core.stats import StepStats
from cospec.core.types import (
    BatchState,
    Commit,
    Draft,
    DraftBudget,
    DraftContext,
    RequestState,
    TargetProbs,
    VerifyResult,
)
from cospec.logits_processors.bitmask import Bitmask
from cospec.plugin_options import Options as PluginOptions
from cospec.rng.random_streams import RandomStreams, StreamKind

if TYPE_CHECKING:  # policies and acceptance methods import no torch
    from torch import Tensor

    from cospec.core.interfaces import Executor
    from cospec.drafters.interfaces import DraftCache, NextLogits, StepwiseDrafter
    from cospec.drafters.lookup import LookupDrafter


def base_of(context: DraftContext, budget: DraftBudget) -> int:
    """Return ``Draft.base_len`` of a draft under a budget: without the assumed tokens if it has ``outcomes``."""
    return context.committed_len if budget.outcomes else len(context.tokens)


def context_of(sequence: RequestState, stream_kind: StreamKind) -> DraftContext:
    """Return what a drafter reads of a sequence; the token list is the sequence's own."""
    request = sequence.request
    return DraftContext(
        sequence.id,
        sequence.tokens,
        sequence.prompt_len,
        request.sampling,
        request.seed,
        stream_kind,
        drafters=request.speculation.drafters,
        processors=sequence.processors,
    )


class SoleDrafter(NamedTuple):
    """The drafter of a pool that alone drafts for a sequence; ``name`` is written on the tokens."""

    name: str
    drafter: Drafter


class Drafter(ABC):
    """Proposes tokens. A drafter leaves out sequences that it cannot draft for.

    Attributes:
        name: written on the tokens of each draft; each instance sets it.
        Options: the drafter's own keys of ``speculative_config``.
        build: ``build(options, build_context)`` makes a drafter, see ``drafters.interfaces``.
        samples: True: draws tokens from a q; False: chooses them (point mass).
        drafts_ahead: continues contexts whose last tokens are assumed (draft-ahead).
        reads_hidden_states: commits have to carry the target's hidden states.
        learns: drafts of one request depend on what other requests wrote.
        trusted: False: runs on machines that may be hostile, so seeds of acceptance tests stay secret.
        capabilities: what a policy may ask for, and what takes time.
        stream_kinds: streams of the acceptance methods that may verify the drafts; None: of every method.
        member_names: names of a pool's drafters; None: the drafter is no pool.
        scores_known_tokens: can tell how likely the known tokens are under its own distribution.
        scoring_seconds: seconds that proposals so far spent on scores of known tokens; only pools score.
        is_stepwise: drafts token by token: ``next_logits`` gives logits; elsewhere the executor answers ``candidates``.
        drafts_for_outcomes: takes budgets with ``outcomes``.
        works_elsewhere: other processes do its work, though it is called in this one.
        has_kv_cache: loads a model with a KV cache, so the start-up budget leaves room for the cache.
        is_pool: consists of other drafters; a pool takes no pool as a member.
        never_alone: of a pool: the reason why several members always draft; empty where one may draft alone.
    """

    name: str
    Options: ClassVar[type[PluginOptions]]
    build: ClassVar[Callable[..., Any]]
    samples: bool
    drafts_ahead: bool
    reads_hidden_states: bool
    learns: bool
    trusted: bool = True
    capabilities: DrafterCapabilities = DrafterCapabilities()
    stream_kinds: frozenset[StreamKind] | None = None
    member_names: tuple[str, ...] | None = None
    scores_known_tokens: bool = False
    scoring_seconds: float = 0.0
    is_stepwise: bool = False
    drafts_for_outcomes: bool = False
    works_elsewhere: bool = False
    has_kv_cache: bool = False
    is_pool: bool = False
    never_alone: str = ""

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> list[Draft]:
        """One draft for each context that the drafter can continue, with the nodes and the depth of its budget."""

    @abstractmethod
    def commit(self, commits: Sequence[Commit]) -> None:
        """Learn what was accepted. Called for every sequence, also for sequences without a draft."""

    @abstractmethod
    def free(self, ids: Sequence[str]) -> None:
        """Forget sequences. Unknown ids are ignored."""

    @property
    def executor(self) -> Executor | None:
        """Runs the drafter's calls elsewhere; None: the drafter works in the thread that calls it."""
        return None

    @property
    def draft_kv_cache(self) -> DraftCache | None:
        """The drafter's model and KV cache, for native code that runs the model; None: ``propose`` alone drafts."""
        return None

    @property
    def native_lookups(self) -> LookupDrafter | None:
        """The drafter, where native code can read its texts and draft for it; None: the drafter is no such lookup."""
        return None

    def drafts_alone(self, context: DraftContext, budget: DraftBudget) -> SoleDrafter | str:
        """The drafter that alone gives the next drafts of a sequence, also in native code, or why none does. Pure."""
        return SoleDrafter(self.name, self)

    def prepare(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> None:  # noqa: B027
        """Score known tokens where scores are due, before ``drafts_alone`` is asked; called for pools."""

    def begin_native(self, contexts: Sequence[DraftContext], budgets: Sequence[DraftBudget]) -> None:  # noqa: B027
        """Note that native code drafts for these sequences as ``drafts_alone`` says; called for pools."""

    def stepper(self) -> StepwiseDrafter | None:
        """A new stepper that drafts token by token instead of ``propose``; None: the drafter has no such stepper."""
        return None

    def score_known_tokens(self, contexts: Sequence[DraftContext]) -> dict[str, TokenScores]:
        """The probability of the latest known tokens, by sequence; called where ``scores_known_tokens`` is True."""
        return {}

    def next_logits(self, contexts: Sequence[DraftContext]) -> NextLogits:
        """The logits after the known tokens of each sequence with room; called where ``is_stepwise`` is True."""
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - most drafters started nothing
        """End the threads and processes that the drafter started."""

    def weights(self) -> Mapping[str, float]:
        """The weight of each drafter of a pool, by name; empty for other drafters. Changes nothing."""
        return {}


class Policy(ABC):
    """Chooses how long the drafts are, and for which sequences. No torch.

    Attributes:
        Options: keys of ``speculative_config.policy_options``.
        build: ``build(options, context)`` makes a policy, see ``policies.policy_build_context``.
        needs_latency: decides by time models, which the engine measures at its start.
        learns: plans depend on what requests wrote.
        keeps_drafts: ``trim`` returns drafts unchanged.
        trees: may ask for trees from drafters that draft chains by default.
    """

    Options: ClassVar[type[PluginOptions]]
    build: ClassVar[Callable[..., Any]]
    needs_latency: ClassVar[bool]
    learns: ClassVar[bool]
    keeps_drafts: ClassVar[bool] = False
    trees: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "trim" in vars(cls):  # a subclass may cut drafts where its base class does not
            cls.keeps_drafts = vars(cls).get("keeps_drafts", False)

    @property
    def horizon(self) -> int:
        """Steps of the same sequences that the latest plan is valid for."""
        return 1

    @abstractmethod
    def plan(self, load: BatchState) -> list[DraftBudget]:
        """A budget for each of ``load.ready``, in order."""

    @abstractmethod
    def trim(self, drafts: list[Draft]) -> list[Draft]:
        """Shorten drafts, only with information available before the removed tokens were sampled."""

    @abstractmethod
    def observe(self, stats: StepStats, commits: Sequence[Commit]) -> None:
        """Note a finished step. A policy may put off learning from the step."""

    def learn(self) -> None:  # noqa: B027 - most policies have nothing to put off
        """Learn from all steps that were observed. The engine calls this while no request waits."""

    @abstractmethod
    def gauges(self) -> Mapping[str, float]:
        """Figures for the metrics, by name, as far as was learned. Changes no state."""


class AcceptanceMethod(ABC):
    """Decides which draft tokens are accepted. Pure: the same arguments give the same result.

    Attributes:
        name: as tables, configurations and responses name the acceptance method.
        exact: outputs follow the target's distribution.
        needs_probs: needs ``TargetProbs.probs`` for greedy requests too.
        trees: verifies trees; False: chains only.
        stream_kind: the stream that drafters draw with under the acceptance method.
        reads_draws: ``verify`` reads ``target.draw`` alone, so the drawn tokens replace the distributions.
        native_id: the method's number in ``csrc/spec/verify.cpp``; None: the method runs in Python.
        tensor_form: ``module:function`` of a ``acceptance.tensor.methods.TensorForm``; None: no such form.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    needs_probs: ClassVar[bool]
    trees: ClassVar[bool]
    stream_kind: ClassVar[StreamKind]
    reads_draws: ClassVar[bool] = False
    native_id: ClassVar[int | None] = None
    tensor_form: ClassVar[str | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.reads_draws = vars(cls).get("reads_draws", False)
        cls.native_id = vars(cls).get("native_id")  # a subclass may verify differently than its base class
        cls.tensor_form = vars(cls).get("tensor_form")

    @abstractmethod
    def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
        """Decide by a row of ``target`` for the root and for each node; the draft has at least one node.

        The row after a chain's last node may be missing, see ``TargetProbs``. ``target.draw`` then returns None.
        """


class LogitsProcessor(ABC):
    """Changes the logits of one request, by a state that follows the tokens of the request.

    The branches of a draft tree share states, and the states of rejected tokens are dropped. Target and drafters apply
    the same processor, in several threads.

    Attributes:
        name: as ``SamplingParams.logits_processors`` names the processor.
        masks: True: ``mask`` excludes tokens, also in native code. False: ``edit`` changes logits.
        Options: the keys of the request's options.
        build: ``build(options, sampling)`` makes the processor of one request, see ``SamplingParams``.
    """

    name: ClassVar[str]
    masks: ClassVar[bool]
    Options: ClassVar[type[PluginOptions]]
    build: ClassVar[Callable[..., Any]]

    @abstractmethod
    def start(self, prompt: Sequence[int]) -> Any:
        """Return the state after the prompt."""

    @abstractmethod
    def advance(self, state: Any, token: int) -> Any:
        """Return the state after one more token of the output; ``state`` stays unchanged."""

    def mask(self, state: Any, vocab_size: int) -> Bitmask | None:
        """Return the tokens that may follow, see ``logits_processors.bitmask``; None: every token may follow."""
        return None

    def edit(self, logits: Tensor, states: Sequence[Any]) -> Tensor:
        """Return the changed logits ``[R, V]`` of rows with these states ``[R]``; ``logits`` may be written."""
        return logits
