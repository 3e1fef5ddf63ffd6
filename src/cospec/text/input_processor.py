"""What a user asked for, checked and resolved: one request per output, with its seed, stop tokens, limit and rule."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from cospec.core.rng import StreamKind, derive_seed
from cospec.core.types import Request, Speculation
from cospec.errors import InvalidInput, words
from cospec.options import parse
from cospec.registry import ACCEPTANCE_METHODS, POLICIES
from cospec.sampling_params import SamplingParams

# What of the sampling parameters shapes the law, beside ``logit_bias``.
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


def make_requests(
    id: str,
    prompt: Sequence[int],
    params: SamplingParams,
    speculation: Speculation = Speculation(),
    arrival: float = 0.0,
) -> list[Request]:
    """One request per output of a call; they share ``parent`` and differ in ``index`` and seed.

    Without a seed a random one is drawn here, so that every later draw is keyed all the same.
    """
    seed = secrets.randbits(64) if params.seed is None else params.seed
    return [
        Request(
            id=f"{id}-{index}",
            prompt=tuple(prompt),
            sampling=params,
            seed=derive_seed(seed, index),
            arrival=arrival,
            parent=id,
            index=index,
            speculation=speculation,
        )
        for index in range(params.n)
    ]


def acceptance_method_of(request: Request, configured: str, sampled: str) -> str:
    """The rule of a request: the request's own, or ``configured``; ``auto`` gives ``match`` or ``sampled``."""
    acceptance_method, params = request.speculation.acceptance_method or configured, request.sampling
    if acceptance_method != "auto":
        return acceptance_method
    return "match" if params.greedy or params.seed is not None else sampled


def own_seed(request: Request, number: int = 0) -> int:
    """The seed of a request whose drafts are drawn and tested: made of its seed, prompt, law, speculation and number.

    What drafters and policies learn from one request goes into the next one's drafts. If users gave both one seed, the
    numbers that made the first's output would test a draft that was chosen by that output, and the second would not
    follow its law. So no two requests share numbers. A request that is made again has the same seed, prompt and law;
    only its ``number``, how many requests the engine took before, tells it from the first where anything has learned.
    """
    params = request.sampling
    shape = [getattr(params, name) for name in SHAPING]
    bias = sorted((params.logit_bias or {}).items())
    said = repr((request.prompt, shape, bias, request.speculation, request.ensemble))
    return derive_seed(
        derive_seed(request.seed, int.from_bytes(blake2b(said.encode(), digest_size=8).digest())), number
    )


@dataclass(frozen=True, slots=True)
class InputProcessor:
    """Checks requests against a loaded model and fills what depends on it.

    Attributes:
        eos: ids that end an output unless it ignores them.
        rule: the configured rule; ``auto`` judges greedy and seeded requests by ``match``, others by
            ``sampled_method``.
        max_depth: the longest draft that a request may ask for.
        may_choose: what of ``Speculation`` a request may choose for itself.
        drafts: whether there is a drafter; without one no request is speculated for, whatever it asks.
        laws: checks a law that a request asks for and gives its name; None where requests may not ask.
        noises: of the rules that may judge what the drafter makes; None for all. ``auto`` keeps to them.
        drafters: names of a pool's drafters; None without a pool.
        learns: whether drafts depend on what earlier requests wrote, by the drafter, the policy or the round.

    Raises:
        InvalidInput: the configured rule may not judge what the drafter makes.
    """

    vocab_size: int
    max_len: int
    eos: frozenset[int]
    acceptance_method: str
    max_depth: int
    drafts: bool = True
    may_choose: frozenset[str] = frozenset(("off", "length", "policy", "drafters", "acceptance_method"))
    ensembles: Callable[[Mapping[str, Any]], str] | None = None
    stream_kinds: frozenset[StreamKind] | None = None
    drafters: tuple[str, ...] | None = None
    sampled_method: str = "block"
    learns: bool = True

    def __post_init__(self) -> None:
        if self.acceptance_method != "auto":
            self._check_method("speculative_config.acceptance_method", self.acceptance_method)

    @property
    def acceptance_methods(self) -> tuple[str, str]:
        """The configured rule, and the rule of sampled requests under ``auto``: see ``acceptance_method``."""
        return self.acceptance_method, self.sampled_method if self._judges(self.sampled_method) else "match"

    def resolve(self, request: Request, number: int = 0) -> Request:
        """The request as the engine runs it, after ``number`` others.

        Raises:
            InvalidInput: an empty or too long prompt, a token id outside the vocabulary, an unknown rule.
        """
        self._check(request)
        params, n = request.sampling, len(request.prompt)
        room = self.max_len - n
        limit = room if params.max_tokens is None else min(params.max_tokens, room)
        stops = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *sorted(self.eos))
        if params.min_tokens > 0 and len(set(stops)) >= self.vocab_size:
            raise InvalidInput("stop_token_ids", words("every token"), "fewer, so that min_tokens can be reached")
        sampling = replace(params, max_tokens=limit, min_tokens=min(params.min_tokens, limit), stop_token_ids=stops)
        asked = request.speculation.acceptance_method or self.acceptance_method
        ACCEPTANCE_METHODS.check(asked, "auto", field="speculation.acceptance_method")
        if asked != "auto" and request.speculation.enabled:
            self._check_method("speculation.acceptance_method", asked)
        acceptance_method = acceptance_method_of(request, *self.acceptance_methods)
        speculation = replace(
            request.speculation,
            acceptance_method=acceptance_method,
            enabled=request.speculation.enabled and self.drafts,
        )
        resolved = replace(
            request, sampling=sampling, speculation=speculation, distribution=self._distribution(request)
        )
        # Drawn seeds differ anyway, and what the target's own noise decides is the same with and without drafts.
        shared = (
            params.seed is not None
            and speculation.enabled
            and ACCEPTANCE_METHODS.load(acceptance_method).stream_kind is not StreamKind.TARGET
        )
        if not shared:
            return resolved
        learns = self.learns or (speculation.policy is not None and POLICIES.load(speculation.policy).learns)
        return replace(resolved, seed=own_seed(resolved, number if learns else 0))

    def _distribution(self, request: Request) -> str:
        """What the request's own law is declared as; empty where it has none."""
        if request.ensemble is None:
            return ""
        if self.ensembles is None:
            raise InvalidInput("ensemble", request.ensemble, "left out; requests have no say in it here")
        return self.ensembles(request.ensemble)

    def _check(self, request: Request) -> None:
        params, n, depth = request.sampling, len(request.prompt), request.speculation.length
        if n == 0:
            raise InvalidInput("prompt", words("empty"), "at least one token")
        if n >= self.max_len:
            allowed = f"at most {self.max_len - 1} tokens, one less than the model's context"
            raise InvalidInput("prompt", words(f"{n} tokens long"), allowed)
        ids = {"prompt": request.prompt, "logit_bias": params.logit_bias or (), "stop_token_ids": params.stop_token_ids}
        for field, tokens in ids.items():
            wrong = next((token for token in tokens if not 0 <= token < self.vocab_size), None)
            if wrong is not None:
                refused = InvalidInput(f"{field} token id", wrong, f"a whole number from 0 to {self.vocab_size - 1}")
                refused.field = field
                raise refused
        self._check_choices(request.speculation)
        if depth is not None and not (type(depth) is int and 0 <= depth <= self.max_depth):
            raise InvalidInput("speculation.length", depth, f"a whole number from 0 to {self.max_depth}")

    def _judges(self, acceptance_method: str) -> bool:
        """Whether the rule may judge what the drafter makes."""
        return self.stream_kinds is None or ACCEPTANCE_METHODS.load(acceptance_method).stream_kind in self.stream_kinds

    def _check_method(self, field: str, acceptance_method: str) -> None:
        if not self._judges(acceptance_method):
            able = ", ".join(name for name in ACCEPTANCE_METHODS if self._judges(name))
            given = words(f"{acceptance_method!r}, which needs the distribution that each draft token was drawn from")
            raise InvalidInput(field, given, f"one of {able}, because this pool compares drawn tokens")

    def _check_drafters(self, chosen: tuple[str, ...] | None) -> None:
        unknown = [name for name in chosen or () if name not in (self.drafters or ())]
        if unknown or chosen == ():
            allowed = "some of " + ", ".join(self.drafters) if self.drafters else "absent, because there is no pool"
            raise InvalidInput("speculation.drafters", unknown[0] if unknown else words("empty"), allowed)

    def _check_choices(self, chosen: Speculation) -> None:
        """Raise ``InvalidInput`` for a policy that does not exist, or a choice that is not the request's to make."""
        if chosen.policy is not None:
            POLICIES.check(chosen.policy, field="speculation.policy")
            parse(POLICIES.load(chosen.policy).Options, {}, f"options of policy {chosen.policy!r}: ")
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
                raise InvalidInput(field, value, "absent: this server does not let requests choose it")
