"""The values that the components of an engine exchange; frozen, apart from ``RequestState``.

Words: a *target* is the model (or ensemble) whose distribution the output follows; a *sequence* is a ``RequestState``;
a *drafter* proposes a *draft*, a token tree for one sequence; a *step* proposes, scores, verifies and commits for a
batch. A *known* token is committed; a *computed* token has its keys and values in the target's KV cache.

Life of one step::

    Scheduler        SchedulerOutput  requests, known tokens to compute, and a draft budget for each
    Drafter          Draft            tokens [N], parents [N], the q that the tokens were drawn from
    Verifier         TargetProbs      distributions after each node; then a VerifyResult: accepted path, next token
    OutputProcessor  Commit           what a sequence gained, for target, drafter, scheduler and policy
    OutputProcessor  Event            new tokens and text, for the user
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

from cospec.core.stats import RequestStats, TokenLogprobs
from cospec.core.tree import depths, is_chain
from cospec.logits_processors.states import RequestProcessors
from cospec.rng.random_streams import Floats, RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams

NO_CALLS: Mapping[str, int] = MappingProxyType({})


class FinishReason(StrEnum):
    """Why an output ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SpeculationParams:
    """The choices of one request for its drafts; None: as the engine is configured."""

    enabled: bool = True
    length: int | None = None
    acceptance_method: str | None = None
    policy: str | None = None
    drafters: tuple[str, ...] | None = None  # of a pool, by name


@dataclass(frozen=True, slots=True)
class DeclaredDistribution:
    """What the tokens of a request follow, as its responses declare.

    Attributes:
        name: ``target``, or the name of a blend, inside the name of an acceptance method that is not exact.
        exact: the tokens follow the target, or the blend in its place, and nothing was relaxed for speed.
    """

    name: str = "target"
    exact: bool = True


TARGET = DeclaredDistribution()


@dataclass(frozen=True, slots=True)
class Request:
    """One requested output. A call with ``n`` outputs makes ``n`` requests that share ``parent``."""

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    seed: int  # always set: drawn at random where the user gave none
    arrival: float = 0.0  # seconds, monotonic clock
    parent: str = ""
    index: int = 0
    speculation: SpeculationParams = SpeculationParams()
    priority: int = 0  # smaller goes first
    ensemble: Mapping[str, Any] | None = None  # a blend of its own, for an ensemble
    distribution: DeclaredDistribution | None = None  # of its own ensemble; filled when the request is resolved
    streams: bool = True  # an event for every step with new tokens; False: one event at the end
    resumed_output: tuple[int, ...] | None = None  # what an earlier engine process delivered; None: there was none


class RequestStatus(Enum):
    """The place of a sequence in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class RequestState:
    """A sequence: the tokens and the mutable state of one request in the engine.

    The output processor writes ``tokens``, ``computed``, ``finish``, ``stats``, ``logprobs`` and ``prompt_logprobs``.
    The scheduler writes ``status``, ``computed`` on admission, preemption and retry, and two counts of ``stats``:
    ``cached_prompt_tokens`` and ``preemptions``. ``Engine.abort`` writes ``finish``.
    Invariant between steps: ``0 <= computed < len(tokens)``; the last token is always known and not computed.
    """

    request: Request
    tokens: list[int]  # prompt, then output
    computed: int = 0
    status: RequestStatus = RequestStatus.WAITING
    finish: FinishReason | None = None
    stats: RequestStats = field(default_factory=RequestStats)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    processors: RequestProcessors = field(init=False)

    def __post_init__(self) -> None:
        self.processors = RequestProcessors.of(self.request.sampling, self.request.prompt)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def output_len(self) -> int:
        return len(self.tokens) - len(self.request.prompt)


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter sees of a sequence. A drafter may keep no reference to ``tokens``, and may not write the list.
    In the mode ``sequential`` the list is the live list of the request; the other execution modes pass a copy.
    """

    id: str
    tokens: Sequence[int]
    prompt_len: int
    sampling: SamplingParams
    seed: int
    stream_kind: StreamKind  # of the drafter's draws, as the request's acceptance method declares
    assumed: int = 0  # number of last tokens that belong to a draft under verification
    drafters: tuple[str, ...] | None = None  # which of a pool may take part; None is all
    processors: RequestProcessors | None = field(default=None, compare=False, repr=False)  # None: made where needed

    @property
    def committed_len(self) -> int:
        """Number of tokens before the assumed tokens; a drafter may learn from these only."""
        return len(self.tokens) - self.assumed


@dataclass(frozen=True, slots=True)
class DraftBudget:
    """The draft that one sequence may have in one step. ``depth`` 0 means no draft.

    Attributes:
        depth: tokens of the longest path.
        max_nodes: tokens in all, those of side branches included; more than ``depth`` asks for a tree.
        widths: children per node at each level; empty leaves the shape of a tree to the drafter.
        drafters: how many members of a pool take part; None: the pool decides.
        threshold: drafting stops where the product of the confidences is less; 0 never stops.
        confident: the draft must have ``confidence``.
        count_hits: the draft should have ``hits``, where the drafter reads the tokens of several steps at once.
        release: the drafter forgets the sequence, so that other sequences get the draft KV cache.
        skip_step: the step leaves the sequence out; a step never leaves out all of its sequences.
        outcomes: the draft begins with the assumed tokens, which do not count, and has a branch after each of them.
    """

    depth: int = 0
    max_nodes: int = 0
    widths: tuple[int, ...] = ()
    drafters: int | None = None
    threshold: float = 0.0
    confident: bool = False
    count_hits: bool = False
    release: bool = False
    skip_step: bool = False
    outcomes: bool = False

    @property
    def is_chain(self) -> bool:
        """Whether the draft is to have one node per level."""
        return not self.widths and self.max_nodes <= self.depth


@dataclass(frozen=True, slots=True)
class BatchState:
    """The batch for which a policy plans.

    Attributes:
        ready: sequences that sample a token in this step and may have a draft, most urgent first.
        other_prefill_tokens: prefill tokens of other running or admissible sequences that this step may compute.
        waiting: requests that have not started.
        token_budget: most tokens that the step may compute in all.
        free_cache_tokens: free tokens of the target's cache.
    """

    ready: Sequence[RequestState]
    other_prefill_tokens: int = 0
    waiting: int = 0
    token_budget: int = 2048
    free_cache_tokens: int = 1 << 30


class AssumedTokens(NamedTuple):
    """Tokens after the ``known`` first tokens of a sequence, which windows in flight verify; the last is a guess."""

    known: int
    tokens: tuple[int, ...]

    @property
    def end(self) -> int:
        """The number of known tokens, if all assumed tokens become known."""
        return self.known + len(self.tokens)


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """One sequence's share of a step: compute ``num_tokens`` known tokens, then up to ``budget.max_nodes`` nodes.

    Attributes:
        assumed: set for a window that follows windows of the same sequence in flight. The window computes the last
            assumed token in place of a known token.
    """

    sequence: RequestState
    num_tokens: int
    budget: DraftBudget
    assumed: AssumedTokens | None = None

    @property
    def samples_token(self) -> bool:
        """Whether the step computes the last known token, so that the request samples a token."""
        return self.assumed is not None or self.sequence.computed + self.num_tokens == len(self.sequence.tokens)

    @property
    def base_len(self) -> int:
        """The number of tokens, known or assumed, that a draft of this step continues."""
        return len(self.sequence.tokens) if self.assumed is None else self.assumed.end

    @property
    def holds(self) -> bool:
        """Whether the sequence goes on after all assumed tokens now; True without assumed tokens."""
        assumed, tokens = self.assumed, self.sequence.tokens
        if assumed is None:
            return True
        follows = len(tokens) == assumed.end and tuple(tokens[assumed.known :]) == assumed.tokens
        return follows and self.sequence.finish is None


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What a step does. ``step`` counts plans from 0; up to ``max_steps`` such steps may run before the next plan."""

    step: int
    entries: tuple[ScheduledRequest, ...]
    max_steps: int = 1


@dataclass(frozen=True, slots=True)
class Draft:
    """A token tree proposed for one sequence; a chain is a tree.

    Attributes:
        base_len: the number of tokens, committed or assumed, that the draft continues; other numbers make it stale.
        tokens: ``[N]``, in an order where parents come first.
        parents: ``[N]``, index of the parent node, -1 for the root (the last committed token).
        drafters: ``[N]``, the name of each node's drafter.
        q: ``[N, V]``, the distribution that each token was *drawn from*; None: chosen (point mass) or for ``match``.
            Of a drafter on a GPU ``DeviceProbs``, which acts as the array.
        confidence: ``[N]``, the estimated probability that a node is accepted after its parent, 0 to 1; None: no
            estimate. Known before the draw of the token, so that every acceptance method allows a cut by confidence.
        hits: of the known tokens read with the draft, the number that were the likeliest, and the number compared.
    """

    id: str
    base_len: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    drafters: tuple[str, ...]
    q: Floats | None = None
    confidence: Floats | None = None
    hits: tuple[int, int] = (0, 0)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return is_chain(self.parents)

    @property
    def depth(self) -> int:
        """Tokens of the longest path."""
        return len(self) if self.is_chain else max(depths(self.parents))


@dataclass(frozen=True, slots=True)
class TargetProbs:
    """The target's distributions for a draft. Row 0 follows the last committed token, row ``i + 1`` follows node ``i``.
    The last row is missing where the distribution after a chain's last node is unknown.

    Attributes:
        chosen: ``[N + 1]``, each row's token of a greedy request, whose distribution is a point mass; None otherwise.
        probs: ``[N + 1, V]``; set by the verifier for requests that are not greedy, and for methods that need it.
    """

    chosen: tuple[int, ...] | None = None
    probs: Floats | None = None

    @property
    def distribution(self) -> Floats:
        """``probs``, for acceptance methods that declare ``needs_probs``."""
        assert self.probs is not None, "the verifier sets probs for every method that needs them"
        return self.probs

    def draw(self, row: int, position: int, draws: RandomStreams) -> int | None:
        """The token at ``position``, drawn from ``row``; None if a member of an ensemble scored no such row."""
        if self.chosen is not None:
            return self.chosen[row] if row < len(self.chosen) else None
        if row >= len(self.distribution):
            return None
        return draws.token(self.distribution[row], position, StreamKind.TARGET)


class VerifyResult(NamedTuple):
    """What an acceptance method decided: the accepted nodes from the root down, and the token after them.
    ``token`` is None if all of a chain was accepted and the distribution after the chain is unknown."""

    path: tuple[int, ...]
    token: int | None
    bonus: bool  # the token follows a whole accepted path; False: it replaces a rejected one, or there was no draft


class StepOutput(NamedTuple):
    """One entry of a plan after its step. ``result`` is None while known tokens remain to be computed."""

    entry: ScheduledRequest
    draft: Draft | None
    result: VerifyResult | None
    logprobs: tuple[TokenLogprobs, ...] = ()  # of the result's tokens, when the request asks for them
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of the prompt positions after those computed before
    error: str | None = None  # why this sequence cannot go on, in one sentence
    divergences: tuple[float, ...] = ()  # of the result's tokens, where a relaxed blend is the target
    hidden_state: object = None  # ``Tensor [H]``, from which the last token was sampled; see ``Model.hidden_states``
    model_calls: Mapping[str, int] = NO_CALLS  # of each model, where several models form an ensemble


class Commit(NamedTuple):
    """What one sequence gained in a step, for the target, the drafter, the scheduler and the policy.

    Attributes:
        base_len: known tokens before.
        tokens: the accepted tokens and the one after them, trimmed at the end of the output.
        path: accepted node indices, trimmed alike; the cache keeps these nodes and drops the others.
        computed: tokens of the sequence in the target's cache from now on.
        drafted: nodes that were verified.
        rejected: a draft token was rejected, so ``len(path)`` is where the draft failed, not where the draft ended.
        ranks: ``[len(path)]``, the place of each accepted node among its siblings; empty for a chain.
        hidden_state: see ``StepOutput.hidden_state``.
    """

    id: str
    base_len: int
    tokens: tuple[int, ...]
    path: tuple[int, ...]
    computed: int
    drafted: int = 0
    finish: FinishReason | None = None
    rejected: bool = False
    hidden_state: object = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of one output, as a stream delivers it; the whole output for a request that does not stream.

    Attributes:
        text: new text; stop strings and incomplete characters are held back.
        sources: ``[len(tokens)]``, the origin of each token: a drafter's name, ``target`` or ``bonus``.
        stats: filled on the last event.
    """

    id: str
    parent: str
    index: int
    text: str
    tokens: tuple[int, ...]
    sources: tuple[str, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    stats: RequestStats | None = None
    error: str | None = None
    distribution: str = "target"
    exact: bool = True  # see ``DeclaredDistribution``
