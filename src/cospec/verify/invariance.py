"""Fourth check group: with a seed, ``match`` gives the same tokens for any drafter, draft length and batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cospec.core.engine import Engine
from cospec.core.types import Request, Speculation
from cospec.drafters.ngram import NgramDrafter
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from cospec.verify.context import Check, CheckContext, TokenIds, bare_engine, in_groups
from cospec.verify.identity import Pair, compare

SEED, TEMPERATURE = 7, 0.8


def run_checks(context: CheckContext) -> Iterator[Check]:
    """Check each configuration against plain decoding of single requests."""
    params = SamplingParams(temperature=TEMPERATURE, seed=SEED, max_tokens=context.effort.tokens, ignore_eos=True)
    own = context.llm.engine
    plain = _outputs(context, own, Speculation(enabled=False, acceptance_method="match"), params, 1)
    for name, engine, length, size in _ways(context):
        found = _outputs(context, engine, Speculation(length=length, acceptance_method="match"), params, size)
        yield compare(context, "drafter invariance", name, params, Pair(found, plain, SEED))


def _ways(context: CheckContext) -> Iterator[tuple[str, Engine, int, int]]:
    own = context.llm.engine
    for length, size in ((0, 4), (1, 1), (4, 1), (4, 4)):
        yield f"length {length}, batch {size}", own, length, size
    lookup = bare_engine(context.target, NgramDrafter(1, 3), 4)
    yield "ngram, length 4, batch 4", lookup, 4, 4


def _outputs(
    context: CheckContext, engine: Engine, speculation: Speculation, params: SamplingParams, size: int
) -> dict[str, TokenIds]:
    requests = []
    for number, prompt in enumerate(context.prompts):
        (request,) = make_requests(str(number), prompt, params, speculation)
        requests.append(_named(request, str(number)))
    return in_groups(engine, requests, size)


def _named(request: Request, id: str) -> Request:
    return replace(request, id=id)
