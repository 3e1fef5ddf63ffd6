"""Third rung: sampled tokens of the user's model against transformers' own distribution, and a wrong rule.

A low p-value alone is not a failure. A check fails only if a second, larger sample with fresh seeds gives a low p-value
too. An exact engine fails a check with probability ``FALSE_ALARM`` at most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from cospec.core.engine import Engine
from cospec.core.rng import StreamKind
from cospec.core.types import Request, Speculation
from cospec.registry import ACCEPTANCE_METHODS
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from cospec.verify.checks import Check
from cospec.verify.context import CheckContext, Words, bare_engine, draft_tokens, run
from cospec.verify.controls import EvenDrafter, KeepsAll
from cospec.verify.joint import JointDistribution, Truncation

LIKELY = 1e-4
FALSE_ALARM = (2 * LIKELY) ** 2  # the chi-square approximation gives tails of tables like these up to 1.9 times
FRESH = 4  # times as many outputs in the second sample
LENGTH, TOP_K, DEPTH = 3, 8, 2
SUPPORT = 4  # tokens that the even drafter draws from
AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Fit:
    """How well sampled outputs fit the wanted distribution.

    Attributes:
        p_values: of the first sample and, if that one is low, of the second.
        impossible: sampled outputs that have no probability.
    """

    p_values: tuple[float, ...]
    impossible: tuple[Words, ...] = ()

    @property
    def good(self) -> bool:
        """Whether one of the samples fits."""
        return max(self.p_values) > LIKELY

    def __str__(self) -> str:
        return "p = " + ", then ".join(f"{p:.2g}" for p in self.p_values)


def run_checks(subject: CheckContext) -> Iterator[Check]:
    """Each rule with the user's drafter and with one that is often wrong; then a rule that is wrong."""
    wanted = distribution(subject)
    even = even_drafter(subject, wanted)
    other = bare_engine(subject.model, even, DEPTH)
    for acceptance_method in subject.acceptance_methods:
        for drafter, engine in _engines(subject, acceptance_method, other):
            before = draft_tokens(engine)
            found = fit(wanted, partial(samples, subject, engine, acceptance_method), subject.effort.samples)
            after = draft_tokens(engine)
            told = f"{after[0] - before[0]} of {after[1] - before[1]} draft tokens were accepted"
            notes = (told, *(f"the tokens {tokens} are impossible" for tokens in found.impossible[:3]))
            name = f"rule {acceptance_method}, {drafter}"
            yield Check("chi-square", name, str(found), f"once > {LIKELY:.0e}", found.good, notes, FALSE_ALARM)
    wrong = bare_engine(subject.model, even, DEPTH, {"block": KeepsAll()})
    found = fit(wanted, partial(samples, subject, wrong, "block"), subject.effort.samples)
    yield Check("chi-square", "control: keeps every draft token", str(found), f"twice < {LIKELY:.0e}", not found.good)


def distribution(subject: CheckContext) -> JointDistribution:
    """What the samples have to follow."""
    return subject.reference.joint(subject.prompts[0], Truncation(LENGTH, TOP_K, subject.tolerance))


def even_drafter(subject: CheckContext, wanted: JointDistribution) -> EvenDrafter:
    """A drafter whose tokens are often rejected and often accepted.

    The engine draws the first token without a draft, so the first draft token has place 1.
    """
    return EvenDrafter(wanted.likeliest(1, SUPPORT), subject.model.vocab_size)


def _engines(subject: CheckContext, acceptance_method: str, other: Engine) -> Iterator[tuple[str, Engine]]:
    yield "the engine's drafter", subject.llm.engine
    if (
        ACCEPTANCE_METHODS.load(acceptance_method).stream_kind is StreamKind.DRAFT
    ):  # with the target's noise the same tokens would come again
        yield "an even drafter", other


def fit(wanted: JointDistribution, draw: Callable[[range], list[Words]], count: int) -> Fit:
    """A sample of ``count`` and, if its p-value is low, a second one with ``FRESH`` times as many other seeds.

    Args:
        draw: from seeds to one output each.
    """
    sample = draw(range(count))
    p = wanted.p_value(sample)
    if p > LIKELY:
        return Fit((p,))
    fresh = draw(range(count, (1 + FRESH) * count))
    return Fit((p, wanted.p_value(fresh)), tuple(sorted(wanted.impossible([*sample, *fresh]))))


def samples(subject: CheckContext, engine: Engine, acceptance_method: str, seeds: range) -> list[Words]:
    """The first tokens of one output per seed, ``AT_ONCE`` at a time."""
    params = SamplingParams(temperature=1.0, top_k=TOP_K, max_tokens=LENGTH + 1, ignore_eos=True)
    prompt = subject.prompts[0]
    found: list[Words] = []
    for start in range(0, len(seeds), AT_ONCE):
        some = seeds[start : start + AT_ONCE]
        found += run(engine, [_request(prompt, params, acceptance_method, seed) for seed in some]).values()
    return [tokens[:LENGTH] for tokens in found]


def _request(prompt: Words, params: SamplingParams, acceptance_method: str, seed: int) -> Request:
    (request,) = make_requests(
        str(seed), prompt, params, Speculation(acceptance_method=acceptance_method, length=DEPTH)
    )
    return replace(request, seed=seed)
