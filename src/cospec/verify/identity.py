"""Check groups that compare tokens of two decodings.

Second group: greedy tokens with and without speculation equal those of ``transformers.generate``. Fourth group: with a
seed, ``match`` gives the same tokens for any drafter, draft length and batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cospec.core.engine import Engine
from cospec.core.types import SpeculationParams
from cospec.drafters.ngram import NgramDrafter
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from cospec.verify.context import Check, CheckContext, TokenIds, bare_engine, draft_tokens, in_groups, run

LENGTH = 4  # of drafts, so that drafts exist for a policy that would not draft here
SEED, TEMPERATURE = 7, 0.8


def greedy_checks(context: CheckContext) -> Iterator[Check]:
    """Check speculation against plain decoding and against transformers."""
    params = SamplingParams(temperature=0.0, max_tokens=context.effort.tokens, ignore_eos=True)
    before = draft_tokens(context.llm.engine)
    drafted = prompt_outputs(context, params, SpeculationParams(length=LENGTH))
    after = draft_tokens(context.llm.engine)
    acceptance_note = f"{after[0] - before[0]} of {after[1] - before[1]} draft tokens were accepted"
    plain = prompt_outputs(context, params, SpeculationParams(enabled=False))
    configured = prompt_outputs(context, params, SpeculationParams())
    yield compare(context, "greedy identity", "as configured = plain decoding", params, DecodingPair(configured, plain))
    theirs = {id: context.reference.generate(context.prompts[int(id)], params.max_tokens or 1) for id in plain}
    for name, other in (("plain decoding", plain), ("transformers.generate", theirs)):
        check = compare(context, "greedy identity", f"length {LENGTH} = {name}", params, DecodingPair(drafted, other))
        yield replace(check, notes=(acceptance_note, *check.notes))


def prompt_outputs(
    context: CheckContext, params: SamplingParams, speculation: SpeculationParams
) -> dict[str, TokenIds]:
    """Return the outputs of all prompts, which run together, by the number of the prompt."""
    requests = [
        request
        for number, prompt in enumerate(context.prompts)
        for request in make_requests(str(number), prompt, params, speculation)
    ]
    return {id.partition("-")[0]: tokens for id, tokens in run(context.llm.engine, requests).items()}


def invariance_checks(context: CheckContext) -> Iterator[Check]:
    """Check each configuration against plain decoding of single requests."""
    params = SamplingParams(temperature=TEMPERATURE, seed=SEED, max_tokens=context.effort.tokens, ignore_eos=True)
    own = context.llm.engine
    plain = _grouped_outputs(context, own, SpeculationParams(enabled=False, acceptance_method="match"), params, 1)
    for name, engine, length, size in _ways(context):
        found = _grouped_outputs(
            context, engine, SpeculationParams(length=length, acceptance_method="match"), params, size
        )
        yield compare(context, "drafter invariance", name, params, DecodingPair(found, plain, SEED))


def _ways(context: CheckContext) -> Iterator[tuple[str, Engine, int, int]]:
    own = context.llm.engine
    for length, size in ((0, 4), (1, 1), (4, 1), (4, 4)):
        yield f"length {length}, batch {size}", own, length, size
    lookup = bare_engine(context.target, NgramDrafter(1, 3), 4)
    yield "ngram, length 4, batch 4", lookup, 4, 4


def _grouped_outputs(
    context: CheckContext, engine: Engine, speculation: SpeculationParams, params: SamplingParams, size: int
) -> dict[str, TokenIds]:
    requests = []
    for number, prompt in enumerate(context.prompts):
        (request,) = make_requests(str(number), prompt, params, speculation)
        requests.append(replace(request, id=str(number)))
    return in_groups(engine, requests, size)


@dataclass(frozen=True, slots=True)
class DecodingPair:
    """Outputs of two decodings, by prompt number; ``seed`` is the common seed."""

    ours: Mapping[str, TokenIds]
    other: Mapping[str, TokenIds]
    seed: int = 0


def compare(context: CheckContext, check_group: str, name: str, params: SamplingParams, pair: DecodingPair) -> Check:
    """Check that outputs are equal token for token, except near-ties.

    If two outputs differ, the reference forward scores both outputs. An output passes if each of its tokens is the best
    at its position, or within the tolerance of the best. So a near-tie excuses one difference and nothing after it.
    """
    notes: list[str] = []
    wrong = same = total = 0
    for id, ours in pair.ours.items():
        other = pair.other[id]
        total += len(ours)
        if ours == other:
            same += len(ours)
            continue
        place = _first_difference(ours, other)
        same += place
        gaps = [max(_shortfalls(context, int(id), tokens, params, pair.seed), default=0.0) for tokens in (ours, other)]
        excused = len(ours) == len(other) and max(gaps) < context.tolerance
        wrong += not excused
        notes.append(
            f"prompt {id}, token {place + 1}: {ours[place : place + 1]} and {other[place : place + 1]}, "
            f"gap {max(gaps):.1e}: {'a near-tie, excused' if excused else 'NOT a near-tie'}"
        )
    found = f"{same} of {total} tokens equal, {len(notes) - wrong} near-ties"
    return Check(check_group, name, found, f"equal but for gaps < {context.tolerance:g}", not wrong, tuple(notes))


def _shortfalls(context: CheckContext, number: int, output: TokenIds, params: SamplingParams, seed: int) -> list[float]:
    return context.reference.shortfalls(context.prompts[number], output, params, seed)


def _first_difference(first: TokenIds, second: TokenIds) -> int:
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
