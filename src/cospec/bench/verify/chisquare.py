"""Third rung: sampled tokens of the user's model against transformers' own law, and a wrong rule beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from cospec.bench.verify.checks import Check
from cospec.bench.verify.controls import EvenDrafter, KeepsAll
from cospec.bench.verify.oracle import Law
from cospec.bench.verify.subject import Subject, Words, bare_engine, draft_tokens, run
from cospec.draws import Purpose
from cospec.engine.engine import Engine
from cospec.engine.requests import make_requests
from cospec.params import SamplingParams
from cospec.registry import RULES
from cospec.types import Request, Speculation

LIKELY, IMPOSSIBLE = 1e-4, 1e-6
LENGTH, TOP_K, DEPTH = 3, 8, 2
LEAST = 5.0  # expected outcomes per cell, below which they are counted together
AT_ONCE = 64


def climb(subject: Subject) -> Iterator[Check]:
    """Each rule with the user's drafter and with one that is often wrong; then a rule that keeps everything."""
    prompt = subject.prompts[0]
    law = subject.reference.law(prompt, LENGTH, TOP_K)
    firsts = [first[0] for first in subject.reference.law(prompt, 1, TOP_K) if isinstance(first, tuple)]
    even = EvenDrafter(firsts, subject.model.vocab_size)
    other = bare_engine(subject.model, even, DEPTH)
    for rule in subject.rules:
        for name, engine in _engines(subject, rule, other):
            before = draft_tokens(engine)
            p = fit(_samples(subject, engine, rule), law)
            after = draft_tokens(engine)
            told = f"{after[0] - before[0]} of {after[1] - before[1]} draft tokens were accepted"
            yield Check("chi-square", f"rule {rule}, {name}", f"p = {p:.2g}", f"> {LIKELY:.0e}", p > LIKELY, (told,))
    wrong = bare_engine(subject.model, even, DEPTH, {"block": KeepsAll()})
    p = fit(_samples(subject, wrong, "block"), law)
    yield Check("chi-square", "control: keeps every draft token", f"p = {p:.2g}", f"< {IMPOSSIBLE:.0e}", p < IMPOSSIBLE)


def _engines(subject: Subject, rule: str, other: Engine) -> Iterator[tuple[str, Engine]]:
    yield "the engine's drafter", subject.llm.engine
    if RULES.load(rule).noise is Purpose.DRAFT:  # with the target's noise the same tokens would come again
        yield "an even drafter", other


def fit(outcomes: Seq[Words], law: Law) -> float:
    """The chi-square p-value; rare outcomes are one cell, and an impossible one gives 0."""
    if any(outcome not in law for outcome in outcomes):
        return 0.0
    counts, n = Counter(outcomes), len(outcomes)
    often = [outcome for outcome, mass in law.items() if mass * n >= LEAST]
    expected = [law[outcome] * n for outcome in often]
    observed = [float(counts[outcome]) for outcome in often]  # type: ignore[index]
    if n - sum(expected) > 1e-9 * n:
        expected.append(n - sum(expected))
        observed.append(n - sum(observed))
    if len(expected) < 2:
        return 1.0
    statistic = sum((o - e) ** 2 / e for o, e in zip(observed, expected, strict=True))
    degrees = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(degrees, torch.tensor(statistic / 2, dtype=torch.float64)))


def _samples(subject: Subject, engine: Engine, rule: str) -> list[Words]:
    """The first tokens of many outputs with seeds from 0 on, ``AT_ONCE`` at a time."""
    params = SamplingParams(temperature=1.0, top_k=TOP_K, max_tokens=LENGTH + 1, ignore_eos=True)
    prompt = subject.prompts[0]
    found: list[Words] = []
    for start in range(0, subject.effort.samples, AT_ONCE):
        seeds = range(start, min(start + AT_ONCE, subject.effort.samples))
        found += run(engine, [_request(prompt, params, rule, seed) for seed in seeds]).values()
    return [tokens[:LENGTH] for tokens in found]


def _request(prompt: Words, params: SamplingParams, rule: str, seed: int) -> Request:
    (request,) = make_requests(str(seed), prompt, params, Speculation(rule=rule, length=DEPTH))
    return replace(request, seed=seed)
