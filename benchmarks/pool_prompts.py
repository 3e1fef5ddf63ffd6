"""The prompts of ``benchmarks.pool``: no prompt comes twice, because pools learn from prompts."""

from __future__ import annotations

from math import ceil

from benchmarks.common import DOMAINS, prompts
from cospec.errors import InvalidInput, words

MIXED = "mixed"


def prompts_used(count: int) -> int:
    """Return how many prompts of a domain ``workloads`` uses."""
    return count + ceil(count / len(DOMAINS))


def workloads(first: int, count: int) -> dict[str, list[str]]:
    """Return ``count`` prompts of each domain from number ``first`` on, and as many others of all domains in turn."""
    found = {domain: numbered(domain, first, count) for domain in DOMAINS}
    return found | {MIXED: interleaved(first + count, ceil(count / len(DOMAINS)))[:count]}


def interleaved(first: int, count: int) -> list[str]:
    """Return prompts of each domain in turn, ``count`` of each from number ``first`` on."""
    own = [numbered(domain, first, count) for domain in DOMAINS]
    return [text for texts in zip(*own, strict=True) for text in texts]


def numbered(domain: str, first: int, count: int) -> list[str]:
    """Return ``count`` prompts of a domain from number ``first`` on."""
    found = prompts(domain, first + count)[first:]
    if len(found) < count:
        raise InvalidInput("prompts", words(f"more than {domain} has"), "fewer prompts or repeats")
    return found
