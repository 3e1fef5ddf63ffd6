"""Second rung: greedy tokens with speculation, without it, and from ``transformers.generate``, one for one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from cospec.core.types import Speculation
from cospec.sampling_params import SamplingParams
from cospec.text.input_processor import make_requests
from cospec.verify.checks import Check
from cospec.verify.context import CheckContext, Words, draft_tokens, run

LENGTH = 4  # of drafts, so that a policy that would not draft here does not leave the rung without any


def run_checks(subject: CheckContext) -> Iterator[Check]:
    """Speculation against plain decoding and against transformers."""
    params = SamplingParams(temperature=0.0, max_tokens=subject.effort.tokens, ignore_eos=True)
    before = draft_tokens(subject.llm.engine)
    drafted = _outputs(subject, params, Speculation(length=LENGTH))
    after = draft_tokens(subject.llm.engine)
    told = f"{after[0] - before[0]} of {after[1] - before[1]} draft tokens were accepted"
    plain = _outputs(subject, params, Speculation(enabled=False))
    configured = _outputs(subject, params, Speculation())
    yield compare(subject, "greedy identity", "as configured = plain decoding", params, Pair(configured, plain))
    theirs = {id: subject.reference.generate(subject.prompts[int(id)], params.max_tokens or 1) for id in plain}
    for name, other in (("plain decoding", plain), ("transformers.generate", theirs)):
        check = compare(subject, "greedy identity", f"length {LENGTH} = {name}", params, Pair(drafted, other))
        yield replace(check, notes=(told, *check.notes))


def _outputs(subject: CheckContext, params: SamplingParams, speculation: Speculation) -> dict[str, Words]:
    requests = [
        request
        for number, prompt in enumerate(subject.prompts)
        for request in make_requests(str(number), prompt, params, speculation)
    ]
    return {id.partition("-")[0]: tokens for id, tokens in run(subject.llm.engine, requests).items()}


@dataclass(frozen=True, slots=True)
class Pair:
    """Outputs of two ways of decoding, by prompt number; ``seed`` is the one they share."""

    ours: Mapping[str, Words]
    other: Mapping[str, Words]
    seed: int = 0


def compare(subject: CheckContext, check_group: str, name: str, params: SamplingParams, pair: Pair) -> Check:
    """Equal token for token, but for near-ties.

    Where two outputs part, each of them is read again by the reference forward: it passes when all its tokens are first
    at their place or nearer to the first than the tolerance. So a near-tie excuses one difference, nothing behind it.
    """
    notes: list[str] = []
    wrong = same = total = 0
    for id, ours in pair.ours.items():
        other = pair.other[id]
        total += len(ours)
        if ours == other:
            same += len(ours)
            continue
        place = _parting(ours, other)
        same += place
        gaps = [max(_shortfalls(subject, int(id), tokens, params, pair.seed), default=0.0) for tokens in (ours, other)]
        excused = len(ours) == len(other) and max(gaps) < subject.tolerance
        wrong += not excused
        notes.append(
            f"prompt {id}, token {place + 1}: {ours[place : place + 1]} and {other[place : place + 1]}, "
            f"gap {max(gaps):.1e}: {'a near-tie, excused' if excused else 'NOT a near-tie'}"
        )
    found = f"{same} of {total} tokens equal, {len(notes) - wrong} near-ties"
    return Check(check_group, name, found, f"equal but for gaps < {subject.tolerance:g}", not wrong, tuple(notes))


def _shortfalls(subject: CheckContext, number: int, output: Words, params: SamplingParams, seed: int) -> list[float]:
    return subject.reference.shortfalls(subject.prompts[number], output, params, seed)


def _parting(first: Words, second: Words) -> int:
    pairs = zip(first, second, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
