"""Fourth rung: with a seed, ``match`` writes the same tokens whatever is drafted, how far, and in which company."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cospec.core.engine import Engine
from cospec.core.types import Request, Speculation
from cospec.drafters.ngram import NgramDrafter
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from cospec.verify.checks import Check
from cospec.verify.context import CheckContext, Words, bare_engine, in_groups
from cospec.verify.identity import Pair, compare

SEED, TEMPERATURE = 7, 0.8


def run_checks(subject: CheckContext) -> Iterator[Check]:
    """Each way against plain decoding of one request at a time."""
    params = SamplingParams(temperature=TEMPERATURE, seed=SEED, max_tokens=subject.effort.tokens, ignore_eos=True)
    own = subject.llm.engine
    plain = _outputs(subject, own, Speculation(enabled=False, acceptance_method="match"), params, 1)
    for name, engine, length, size in _ways(subject):
        found = _outputs(subject, engine, Speculation(length=length, acceptance_method="match"), params, size)
        yield compare(subject, "drafter invariance", name, params, Pair(found, plain, SEED))


def _ways(subject: CheckContext) -> Iterator[tuple[str, Engine, int, int]]:
    own = subject.llm.engine
    for length, size in ((0, 4), (1, 1), (4, 1), (4, 4)):
        yield f"length {length}, batch {size}", own, length, size
    lookup = bare_engine(subject.model, NgramDrafter(1, 3), 4)
    yield "ngram, length 4, batch 4", lookup, 4, 4


def _outputs(
    subject: CheckContext, engine: Engine, speculation: Speculation, params: SamplingParams, size: int
) -> dict[str, Words]:
    requests = []
    for number, prompt in enumerate(subject.prompts):
        (request,) = make_requests(str(number), prompt, params, speculation)
        requests.append(_named(request, str(number)))
    return in_groups(engine, requests, size)


def _named(request: Request, id: str) -> Request:
    return replace(request, id=id)
