"""A pool with one drafter per request drafts in the multi-step call: same tokens, each request by its own drafter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cospec.core.engine import Engine
from cospec.core.types import DraftBudget, DraftContext, Request, SpeculationParams
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.pool.pool import PoolContext, PoolDrafter
from cospec.native import library
from cospec.rng.random_streams import StreamKind
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from harness.llamas import llama_engine, load
from harness.methods import override
from harness.native_steps import SHAPES, calls, requests, uneven, written
from harness.pools import pool_engine, pool_of

pytestmark = [
    pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels"),
    pytest.mark.usefixtures("no_time_limit"),
]
K = 3


def pool(folders: tuple[Path, Path], combiner: str = "vote", pages: int = 200) -> PoolDrafter:
    """One drafter per request, of a drafter that is the target, of a similar one, and of prompt lookup."""
    drafters = {
        "near": ModelDrafter(load(folders[1], pages=pages)),
        "itself": ModelDrafter(load(folders[0], pages=pages)),
    }
    made = pool_of({**drafters, "copy": NgramDrafter(2, 4)}, combiner, "hedge", 64)
    return PoolDrafter(made.members, made.combiner, made.routing, PoolContext(64, made.setting.clock, at_most=1))


def engine(folders: tuple[Path, Path], drafter: PoolDrafter) -> Engine:
    return pool_engine(load(folders[0]), drafter, k=K, max_nodes=8)


def tokens(found: dict[str, list[Any]]) -> dict[str, list[int]]:
    return {id: output[0] for id, output in found.items()}


def by_one(asked: Sequence[Request], *names: str) -> list[Request]:
    """Requests that name one drafter each, in turn."""
    return [
        replace(each, speculation=replace(each.speculation, drafters=(names[n % len(names)],)))
        for n, each in enumerate(asked)
    ]


@pytest.mark.parametrize("shape", ["greedy", "seeded", "sampled", "stopped", "truncated", "edited"])
def test_same_tokens_in_several_steps(folders: tuple[Path, Path], shape: str) -> None:
    asked = [replace(each, sampling=replace(each.sampling, seed=3)) for each in requests(SHAPES[shape], streams=True)]
    plain = llama_engine(load(folders[0]), None, k=0, acceptance_method="match")
    made = engine(folders, pool(folders))
    noted = calls(made)
    assert tokens(written(made, asked)) == tokens(written(plain, asked))
    assert sum(made.metrics().accepted_tokens.values()) > 20
    if shape not in ("truncated", "edited"):  # such drafts are made in Python
        assert max(steps for _, steps in noted) > 1


@pytest.mark.parametrize("shape", ["greedy", "seeded"])
def test_each_request_has_its_own_drafter_in_one_call(folders: tuple[Path, Path], shape: str) -> None:
    """Only the drafter that is the target is always right: another model or cache in its place would be wrong."""
    asked = by_one(requests(SHAPES[shape], streams=True), "itself", "near")
    made = engine(folders, pool(folders))
    noted = calls(made)
    found = written(made, asked)
    stats = {id: output[5] for id, output in found.items()}
    for number, each in enumerate(asked):
        source = ("itself", "near")[number % 2]
        assert set(found[each.id][1]) <= {source, "target", "bonus"}
        assert (stats[each.id].rejections == 0) == (source == "itself")
    assert max(steps for _, steps in noted) > 1
    assert made.metrics().kv_cache_usage == 0


def test_drafts_of_different_lengths(folders: tuple[Path, Path]) -> None:
    """The longest draft of one drafter is shorter than that of another."""
    asked = [
        replace(
            each, speculation=SpeculationParams(length=1 if n % 2 else K, drafters=("near" if n % 2 else "itself",))
        )
        for n, each in enumerate(uneven(requests(SHAPES["greedy"], streams=True), K))
    ]
    made, plain = engine(folders, pool(folders)), llama_engine(load(folders[0]), None, k=0)
    noted = calls(made)
    found = written(made, asked)
    assert tokens(found) == tokens(written(plain, [replace(each, speculation=SpeculationParams()) for each in asked]))
    assert max(steps for _, steps in noted) > 1


def test_the_pool_learns_from_native_drafts(folders: tuple[Path, Path]) -> None:
    """The drafter that is the target gets most weight; a pool that observes no native draft learns nothing."""
    asked = by_one(requests(SHAPES["greedy"], streams=True), "itself", "near")
    rates = []
    for silent in (False, True):
        made = pool(folders)
        if silent:
            override(made, begin_native=lambda contexts, budgets: None)
        written(engine(folders, made), asked)
        rates.append(dict(zip(made.member_names, made.pool_stats.prior.rates, strict=True)))
    observed, unobserved = rates
    assert observed["itself"] > observed["near"]
    assert observed["itself"] - 0.5 > 2 * abs(unobserved["itself"] - 0.5)


def test_asking_changes_nothing(folders: tuple[Path, Path]) -> None:
    """``drafts_alone`` is pure; combiners that need every draft have no drafter that drafts alone."""
    asked = requests(SHAPES["greedy"], streams=True)[0]
    context = DraftContext(asked.id, list(asked.prompt), len(asked.prompt), asked.sampling, 1, StreamKind.TARGET)
    budget = DraftBudget(K, K)
    for combiner, alone in (("vote", True), ("union", False)):
        made = pool(folders, combiner)
        assert isinstance(made.drafts_alone(context, budget), str)  # known tokens are not scored yet
        made.propose([context], [budget])
        record = made.records[asked.id]
        before = record.weights.steps, list(record.weights.idle), record.base, dict(record.candidate_sets)
        answers = [made.drafts_alone(context, budget) for _ in range(2)]
        assert answers[0] == answers[1] and isinstance(answers[0], str) != alone
        assert before == (record.weights.steps, record.weights.idle, record.base, record.candidate_sets)


def arrivals(number: int) -> list[Request]:
    """Requests of many lengths, some of which Python edits."""
    draw, asked = random.Random(number), list[Request]()
    for place in range(10):
        bias = {1: 0.5} if draw.random() < 0.3 else None
        params = SamplingParams(temperature=0, max_tokens=draw.randint(20, 60), logit_bias=bias)
        prompt = [draw.randrange(64) for _ in range(draw.randint(3, 40))]
        asked += [replace(each, streams=True) for each in make_requests(f"q{place}", prompt, params)]
    return asked


@pytest.mark.parametrize("number", [0, 1])
def test_drafts_in_python_may_take_the_pages_of_native_drafts(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """``supports`` counts free pages before Python drafts for other requests of the step."""
    asked = arrivals(number)
    plain = written(llama_engine(load(folders[0]), None, k=0), asked)
    for pages in (12, 20, 30):
        made = pool_engine(load(folders[0]), pool(folders, pages=pages), k=K, max_nodes=8)
        assert tokens(written(made, asked, gap=2)) == tokens(plain)
    assert not [each for each in caplog.records if each.exc_info]


def test_a_failing_drafter_costs_the_others_no_step(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """A drafter raises while Python drafts for one request; the native drafts of the same step were planned before."""
    asked = requests(SHAPES["greedy"], streams=True)
    last = replace(asked[-1], sampling=replace(asked[-1].sampling, logit_bias={1: 0.5}, max_tokens=40))
    asked = [*asked[:-1], last]
    plain = written(llama_engine(load(folders[0]), None, k=0), asked)
    drafter = pool(folders)
    for member in drafter.members:

        def fail(contexts: Any, budgets: Any, propose: Any = member.drafter.propose) -> Any:
            if any(context.id == last.id for context in contexts):
                raise RuntimeError("this request breaks the drafter")
            return propose(contexts, budgets)

        override(member.drafter, propose=fail)
    assert tokens(written(engine(folders, drafter), asked, gap=2)) == tokens(plain)
    assert not [each for each in caplog.records if each.exc_info and each.name == "cospec.core.engine"]
