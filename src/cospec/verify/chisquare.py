"""Third check group: sampled tokens against transformers' distribution, and a wrong acceptance method as control.

A low p-value alone is no failure. A check fails only if a second, larger sample with fresh seeds also has a low
p-value. An exact engine fails a check with probability ``FALSE_ALARM`` at most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from cospec.core.engine import Engine
from cospec.core.types import Request, SpeculationParams
from cospec.registry import ACCEPTANCE_METHODS
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from cospec.verify.context import Check, CheckContext, TokenIds, bare_engine, draft_tokens, run
from cospec.verify.controls import EvenDrafter, KeepsAll
from cospec.verify.joint_distribution import JointDistribution, Truncation

LIKELY = 1e-4
FALSE_ALARM = (2 * LIKELY) ** 2  # for such tables the chi-square approximation can give tails twice as large
FRESH = 4  # factor of the second sample's size
LENGTH, TOP_K, DEPTH = 3, 8, 2
SUPPORT = 4  # number of tokens that the even drafter draws from
AT_ONCE = 64
LEAST = 5.0  # expected outcomes per cell; rarer outcomes share a cell
NO_DRAFTS = "the engine drafted no token, so this check says nothing about its drafts"


@dataclass(frozen=True, slots=True)
class Fit:
    """The fit of sampled outputs to the required distribution.

    Attributes:
        p_values: of the first sample and, if low, of the second.
        impossible: sampled outputs of probability 0.
    """

    p_values: tuple[float, ...]
    impossible: tuple[TokenIds, ...] = ()

    @property
    def good(self) -> bool:
        """Whether one of the samples fits."""
        return max(self.p_values) > LIKELY

    def __str__(self) -> str:
        return "p = " + ", then ".join(f"{p:.2g}" for p in self.p_values)


def run_checks(context: CheckContext) -> Iterator[Check]:
    """Check each acceptance method with the user's drafter and with an inaccurate drafter, then a wrong method."""
    wanted = distribution(context)
    even = even_drafter(context, wanted)
    other = bare_engine(context.target, even, DEPTH)
    for acceptance_method in context.acceptance_methods:
        for drafter, engine in _engines(context, acceptance_method, other):
            before = draft_tokens(engine)
            found = fit(wanted, partial(samples, context, engine, acceptance_method), context.effort.samples)
            after = draft_tokens(engine)
            accepted, drafted = after[0] - before[0], after[1] - before[1]
            acceptance_note = f"{accepted} of {drafted} draft tokens were accepted" if drafted else NO_DRAFTS
            notes = (acceptance_note, *(f"the tokens {tokens} are impossible" for tokens in found.impossible[:3]))
            name = f"acceptance method {acceptance_method}, {drafter}"
            yield Check("chi-square", name, str(found), f"once > {LIKELY:.0e}", found.good, notes, FALSE_ALARM)
    wrong = bare_engine(context.target, even, DEPTH, {"block": KeepsAll()})
    found = fit(wanted, partial(samples, context, wrong, "block"), context.effort.samples)
    yield Check("chi-square", "control: keeps every draft token", str(found), f"twice < {LIKELY:.0e}", not found.good)


def distribution(context: CheckContext) -> JointDistribution:
    """Return the distribution that the samples have to follow."""
    return context.reference.joint(context.prompts[0], Truncation(LENGTH, TOP_K, context.tolerance))


def even_drafter(context: CheckContext, wanted: JointDistribution) -> EvenDrafter:
    """Return a drafter whose tokens are often rejected and often accepted.

    The engine draws the first token without a draft, so the first draft token has position 1.
    """
    return EvenDrafter(wanted.likeliest(1, SUPPORT), context.target.vocab_size)


def _engines(context: CheckContext, acceptance_method: str, other: Engine) -> Iterator[tuple[str, Engine]]:
    yield "the engine's drafter", context.llm.engine
    if (
        ACCEPTANCE_METHODS.load(acceptance_method).stream_kind is StreamKind.DRAFT
    ):  # with the target's random stream the same tokens would come again
        yield "an even drafter", other


def fit(wanted: JointDistribution, draw: Callable[[range], list[TokenIds]], count: int) -> Fit:
    """Draw a sample of ``count``; if its p-value is low, draw a second of ``FRESH`` times the size with other seeds.

    Args:
        draw: returns one output per seed.
    """
    sample = draw(range(count))
    p = p_value(wanted, sample)
    if p > LIKELY:
        return Fit((p,))
    fresh = draw(range(count, (1 + FRESH) * count))
    return Fit((p, p_value(wanted, fresh)), tuple(sorted(wanted.impossible([*sample, *fresh]))))


def p_value(wanted: JointDistribution, samples: Sequence[TokenIds]) -> float:
    """Return the p-value of the chi-square test. An impossible sample gives 0."""
    if wanted.impossible(samples):
        return 0.0
    counts, n = Counter(map(wanted.outcome_of, samples)), len(samples)
    cells = _cells(wanted, LEAST / n)
    expected = [n * sum(wanted.masses[outcome] for outcome in cell) for cell in cells]
    observed = [sum(counts[outcome] for outcome in cell) for cell in cells]
    if len(expected) < 2:
        return 1.0
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


def _cells(wanted: JointDistribution, least: float) -> list[list[TokenIds]]:
    """Return the outcomes in cells of probability ``least`` or more; the last cell may have less.

    Rare outcomes of the same first tokens share a cell, so that tests of many outcomes still see wrong tokens.
    """
    groups = {outcome: [outcome] for outcome in wanted.masses}
    for length in range(LENGTH, 0, -1):
        for prefix in [prefix for prefix in groups if len(prefix) == length]:
            if sum(wanted.masses[outcome] for outcome in groups[prefix]) < least:
                groups.setdefault(prefix[:-1], []).extend(groups.pop(prefix))
    return list(groups.values())


def samples(context: CheckContext, engine: Engine, acceptance_method: str, seeds: range) -> list[TokenIds]:
    """Return the first tokens of one output per seed, with ``AT_ONCE`` requests together."""
    params = SamplingParams(temperature=1.0, top_k=TOP_K, max_tokens=LENGTH + 1, ignore_eos=True)
    prompt = context.prompts[0]
    found: list[TokenIds] = []
    for start in range(0, len(seeds), AT_ONCE):
        some = seeds[start : start + AT_ONCE]
        found += run(engine, [_request(prompt, params, acceptance_method, seed) for seed in some]).values()
    return [tokens[:LENGTH] for tokens in found]


def _request(prompt: TokenIds, params: SamplingParams, acceptance_method: str, seed: int) -> Request:
    (request,) = make_requests(
        str(seed), prompt, params, SpeculationParams(acceptance_method=acceptance_method, length=DEPTH)
    )
    return replace(request, seed=seed)
