"""Checks and resolves requests: seed, stop tokens, length limit and acceptance method; one request per output."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import chain
from typing import Any

from cospec.core.types import DeclaredDistribution, Request, SpeculationParams
from cospec.errors import InvalidInput, words
from cospec.plugin_options import parse
from cospec.registry import ACCEPTANCE_METHODS, LOGITS_PROCESSORS, POLICIES
from cospec.rng.random_streams import StreamKind, derive_seed
from cospec.sampling_params import SamplingParams

# The sampling parameters that shape the target distribution, besides ``logit_bias``.
SHAPING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)
# The same; a parameter that is not set does not count, so that seeds of other requests stay as they were.
OPTIONAL_SHAPING = ("allowed_token_ids", "bad_words_token_ids", "logits_processors")


def make_requests(
    id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    speculation: SpeculationParams = SpeculationParams(),
    arrival: float = 0.0,
) -> list[Request]:
    """Build one request per output of a call. The requests share ``parent`` and differ in ``index`` and seed.

    Without a seed this function draws a random seed, so that every later draw has a key. Only the first output has the
    log-probabilities of the prompt, because those of the others are the same.
    """
    seed = secrets.randbits(64) if params.seed is None else params.seed
    others = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
    return [
        Request(
            id=f"{id}-{index}",
            prompt=tuple(prompt),
            sampling=others if index else params,
            seed=derive_seed(seed, index),
            arrival=arrival,
            parent=id,
            index=index,
            speculation=speculation,
        )
        for index in range(params.n)
    ]


def acceptance_method_of(request: Request, configured: str, sampled: str) -> str:
    """Return the acceptance method: the request's own or ``configured``; ``auto`` is ``match`` or ``sampled``."""
    acceptance_method, params = request.speculation.acceptance_method or configured, request.sampling
    if acceptance_method != "auto":
        return acceptance_method
    return "match" if params.greedy or params.seed is not None else sampled


def own_seed(request: Request, number: int = 0) -> int:
    """Derive the seed of a request with sampled drafts from seed, prompt, parameters, speculation and number.

    A request that goes on after the loss of its engine has another seed than before. Drafter nodes, and other requests,
    may have seen what the lost engine drew with the former seed.

    Drafters and policies learn from one request and use the result for the next. If two requests had one seed, the
    random numbers of the first output would test a draft that depends on this output. The second output would then not
    follow its distribution. Therefore no two requests share random numbers. A repeated request has the same seed,
    prompt and parameters. Only ``number``, the count of earlier requests, distinguishes the repetition if drafts
    are learned.
    """
    params = request.sampling
    shape = [getattr(params, name) for name in SHAPING]
    bias = sorted((params.logit_bias or {}).items())
    described = repr((request.prompt, shape, bias, request.speculation, request.ensemble))
    described += "" if request.resumed_output is None else repr(request.resumed_output)
    chosen = [(name, getattr(params, name)) for name in OPTIONAL_SHAPING if getattr(params, name)]
    described += repr(chosen) if chosen else ""
    return derive_seed(
        derive_seed(request.seed, int.from_bytes(blake2b(described.encode(), digest_size=8).digest())), number
    )


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """Checks requests against a loaded model and fills the fields that depend on the model.

    Attributes:
        eos: token ids that end an output, unless the request ignores these ids.
        acceptance_method: the configured method. ``auto`` is ``match`` for greedy and seeded requests, else
            ``sampled_method``.
        max_depth: the longest draft that a request may choose.
        may_choose: the fields of ``SpeculationParams`` that a request may set.
        drafts: whether the engine has a drafter. Without a drafter no request is speculated for.
        ensembles: checks the ensemble of a request and returns its distribution; None if requests may not choose.
        stream_kinds: of the acceptance methods that can verify the drafter's drafts; None for all. ``auto`` takes only
            these methods.
        drafters: names of a pool's drafters; None without a pool.
        learns: whether drafts depend on earlier requests, through the drafter, the policy or the execution mode.
        trusted_drafter: False: the drafter's machines read the users' seeds, and may derive other seeds from these.

    Raises:
        InvalidInput: the configured acceptance method cannot verify the drafter's drafts.
    """

    vocab_size: int
    max_len: int
    eos: frozenset[int]
    acceptance_method: str
    max_depth: int
    drafts: bool = True
    may_choose: frozenset[str] = frozenset(("off", "length", "policy", "drafters", "acceptance_method"))
    ensembles: Callable[[Mapping[str, Any]], DeclaredDistribution] | None = None
    stream_kinds: frozenset[StreamKind] | None = None
    drafters: tuple[str, ...] | None = None
    sampled_method: str = "block"
    learns: bool = True
    trusted_drafter: bool = True

    def __post_init__(self) -> None:
        if self.acceptance_method != "auto":
            self._check_method("speculative_config.acceptance_method", self.acceptance_method)

    @property
    def acceptance_methods(self) -> tuple[str, str]:
        """The configured acceptance method, and the method of sampled requests under ``auto``."""
        return self.acceptance_method, self.sampled_method if self._can_verify(self.sampled_method) else "match"

    def resolve(self, request: Request, number: int = 0) -> Request:
        """Return the request in the form that the engine runs, after ``number`` earlier requests.

        Raises:
            InvalidInput: the prompt is empty or too long, a token id is outside the vocabulary, or a method is unknown.
        """
        self._check(request)
        params, n = request.sampling, len(request.prompt)
        room = self.max_len - n
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        stops = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *sorted(self.eos))
        self._check_masks(params, stops)
        sampling = replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit), stop_token_ids=stops)
        requested = request.speculation.acceptance_method or self.acceptance_method
        ACCEPTANCE_METHODS.check(requested, "auto", field="speculation.acceptance_method")
        if requested != "auto" and request.speculation.enabled:
            self._check_method("speculation.acceptance_method", requested)
        acceptance_method = acceptance_method_of(request, *self.acceptance_methods)
        speculation = replace(
            request.speculation,
            acceptance_method=acceptance_method,
            enabled=request.speculation.enabled and self.drafts,
        )
        resolved = replace(
            request, sampling=sampling, speculation=speculation, distribution=self._distribution(request)
        )
        # Random seeds differ in any case. With ``StreamKind.TARGET`` the outputs with and without drafts are equal.
        shared = (
            (params.seed is not None or request.resumed_output is not None)
            and speculation.enabled
            and ACCEPTANCE_METHODS.load(acceptance_method).stream_kind is not StreamKind.TARGET
        )
        if not shared:
            return resolved
        if not self.trusted_drafter:
            return replace(resolved, seed=secrets.randbits(64))
        learns = self.learns or (speculation.policy is not None and POLICIES.load(speculation.policy).learns)
        return replace(resolved, seed=own_seed(resolved, number if learns else 0))

    def _distribution(self, request: Request) -> DeclaredDistribution | None:
        """Return the distribution of the request's own ensemble; None if the request sets no ensemble."""
        if request.ensemble is None:
            return None
        if self.ensembles is None:
            raise InvalidInput("ensemble", request.ensemble, "left out, because requests may not choose the ensemble")
        return self.ensembles(request.ensemble)

    def _check(self, request: Request) -> None:
        params, n, depth = request.sampling, len(request.prompt), request.speculation.length
        if n == 0:
            raise InvalidInput("prompt", words("empty"), "at least one token")
        if n >= self.max_len:
            allowed = f"at most {self.max_len - 1} tokens, one less than the model's context"
            raise InvalidInput("prompt", words(f"{n} tokens long"), allowed)
        ids = {
            "prompt": request.prompt,
            "logit_bias": params.logit_bias or (),
            "stop_token_ids": params.stop_token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "bad_words_token_ids": tuple(chain.from_iterable(params.bad_words_token_ids)),
        }
        for field, tokens in ids.items():
            if tokens and not 0 <= min(tokens) <= max(tokens) < self.vocab_size:  # faster than a loop over long prompts
                wrong = next(token for token in tokens if not 0 <= token < self.vocab_size)
                refused = InvalidInput(f"{field} token id", wrong, f"a whole number from 0 to {self.vocab_size - 1}")
                refused.field = field
                raise refused
        self._check_choices(request.speculation)
        if depth is not None and not (type(depth) is int and 0 <= depth <= self.max_depth):
            raise InvalidInput("speculation.length", depth, f"a whole number from 0 to {self.max_depth}")

    def _check_masks(self, params: SamplingParams, stops: Sequence[int]) -> None:
        """Raise ``InvalidInput`` if no token may follow, or a logits processor is no plug-in."""
        plugins = [name for name in LOGITS_PROCESSORS.names if name not in LOGITS_PROCESSORS]
        for name in params.logits_processors or ():
            if name not in plugins:  # the fields of a request set the processors of cospec
                allowed = f"one of {', '.join(plugins)}" if plugins else "absent, because no plug-in is installed"
                raise InvalidInput("logits_processors", name, allowed)
        banned = {sequence[0] for sequence in params.bad_words_token_ids if len(sequence) == 1}
        if self._excludes_all(params, banned):
            raise InvalidInput("bad_words_token_ids", words("every allowed token"), "fewer, so that a token may follow")
        if params.min_tokens > 0 and self._excludes_all(params, banned.union(stops)):
            raise InvalidInput("stop_token_ids", words("every token"), "fewer, so that min_tokens can be reached")

    def _excludes_all(self, params: SamplingParams, banned: set[int]) -> bool:
        allowed = params.allowed_token_ids
        return len(banned) >= self.vocab_size if allowed is None else banned.issuperset(allowed)

    def _can_verify(self, acceptance_method: str) -> bool:
        """Whether the acceptance method can verify the drafter's drafts."""
        return self.stream_kinds is None or ACCEPTANCE_METHODS.load(acceptance_method).stream_kind in self.stream_kinds

    def _check_method(self, field: str, acceptance_method: str) -> None:
        if not self._can_verify(acceptance_method):
            able = ", ".join(name for name in ACCEPTANCE_METHODS if self._can_verify(name))
            given = words(f"{acceptance_method!r}, which needs the distribution that each draft token was drawn from")
            raise InvalidInput(field, given, f"one of {able}, because this pool compares drawn tokens")

    def _check_drafters(self, chosen: tuple[str, ...] | None) -> None:
        unknown = [name for name in chosen or () if name not in (self.drafters or ())]
        if unknown or chosen == ():
            allowed = "some of " + ", ".join(self.drafters) if self.drafters else "absent, because there is no pool"
            raise InvalidInput("speculation.drafters", unknown[0] if unknown else words("empty"), allowed)

    def _check_choices(self, chosen: SpeculationParams) -> None:
        """Raise ``InvalidInput`` for an unknown policy, or a choice that requests may not make."""
        if chosen.policy is not None:
            POLICIES.check(chosen.policy, field="speculation.policy")
            parse(POLICIES.load(chosen.policy).Options, {}, f"options of policy {chosen.policy!r}: ")
            if chosen.length and chosen.policy == "off":
                raise InvalidInput("speculation.length", chosen.length, "0 or absent with policy 'off'")
        self._check_drafters(chosen.drafters)
        made = {
            "off": None if chosen.enabled else False,
            "length": chosen.length,
            "policy": chosen.policy,
            "drafters": chosen.drafters,
            "acceptance_method": chosen.acceptance_method,
        }
        for name, value in made.items():
            if value is not None and name not in self.may_choose:
                field = "speculation.enabled" if name == "off" else f"speculation.{name}"
                raise InvalidInput(field, value, "absent: this server does not allow the choice")
