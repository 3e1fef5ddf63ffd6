"""The check suite: the check groups in order, fastest first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cospec.assembly.ensembles import blend_options_of
from cospec.ensemble.blends.registry import build_blend
from cospec.ensemble.blends.weighted import Single
from cospec.errors import InvalidInput
from cospec.llm import LLM
from cospec.logits_processors.states import RequestProcessors
from cospec.registry import ACCEPTANCE_METHODS
from cospec.sampling_params import SamplingParams
from cospec.verify import chisquare, enumeration, pool_enumeration, processors
from cospec.verify.context import FULL, QUICK, Check, CheckContext, RequestFailed
from cospec.verify.enumerated_draws import Unsound
from cospec.verify.identity import greedy_checks, invariance_checks
from cospec.verify.reference import Reference, tolerance_of

CHUNK = 64  # most tokens of a prompt
TEXTS = (
    "The answer is",
    "def mean(values):\n    return",
    "Question: A box holds 12 pencils. How many pencils are in 7 boxes?\nAnswer:",
    "It was a dark evening, and the rain",
    "import json\nimport os\n\n\ndef read(path):\n",
    "Three friends share 24 apples evenly. Each of them",
    "She opened the letter and read:",
    "class Queue:\n    def __init__(self):\n",
    "The history of the city begins with",
    "If x is 5 and y is 8, then x + y =",
    "for i in range(10):\n    print(",
    "One, two, three, one, two, three, one,",
)


def enumeration_checks(context: CheckContext) -> Iterator[Check]:
    """Check acceptance methods, and the pool where one is configured, on toy models."""
    yield from enumeration.run_checks(context)
    yield from pool_enumeration.run_checks(context)


CHECK_GROUPS = (enumeration_checks, greedy_checks, chisquare.run_checks, invariance_checks, processors.run_checks)


def run_checks(context: CheckContext) -> Iterator[Check]:
    """Yield every check of every group when finished.

    A request that fails ends its group with a failed check, and so does a random number that cannot be enumerated.
    """
    for checks in CHECK_GROUPS:
        try:
            yield from checks(context)
        except RequestFailed as failure:
            yield Check("requests", "no request fails", "a request failed", "none", False, (str(failure),))
        except Unsound as failure:
            yield Check("enumeration", "random numbers", "a path cannot be enumerated", "none", False, (str(failure),))


def context_of_llm(
    models: Sequence[str],
    speculative: Mapping[str, Any] | None,
    quick: bool,
    logits_processors: Mapping[str, Mapping[str, Any]] | None = None,
    **options: Any,
) -> CheckContext:
    """Load the user's models as an engine, and the weights into transformers.

    Args:
        logits_processors: to check, by name, with their options.

    Raises:
        CospecError: a model or option cannot be served.
        InvalidInput: transformers has no model with the weights or the KV cache of the engine, or a logits processor
            is unknown or refuses its options.
    """
    several = list(models) if len(models) > 1 else None
    llm = LLM(models[0], dict(speculative) if speculative is not None else None, several, **options)
    if llm.engine.config.quantization is not None:
        raise InvalidInput("quantization", llm.engine.config.quantization, "absent: transformers has no such weights")
    if llm.engine.config.kv_cache_dtype != "auto":
        allowed = "'auto': transformers rounds no keys and values"
        raise InvalidInput("kv_cache_dtype", llm.engine.config.kv_cache_dtype, allowed)
    effort = QUICK if quick else FULL
    prompts = tuple(tuple(llm.encode(text)[:CHUNK]) for text in TEXTS[: effort.prompts])
    input_processor = llm.engine.parts.input_processor
    acceptance_methods = (
        tuple(dict.fromkeys(("match", input_processor.acceptance_methods[1])))
        if input_processor.acceptance_method == "auto"
        else (input_processor.acceptance_method,)
    )
    for acceptance_method in acceptance_methods:
        ACCEPTANCE_METHODS.check(acceptance_method)
    parts = llm.engine.parts
    loaded, ensemble = parts.models or (parts.model,), blend_options_of(llm.engine.config) if parts.models else None
    blend = Single() if ensemble is None else build_blend(ensemble, len(loaded))
    reference = Reference(llm, blend)
    tolerance = tolerance_of(reference.dtype)
    edits = dict(logits_processors or {})
    RequestProcessors.of(SamplingParams(logits_processors=edits), prompts[0])  # refuses wrong options
    return CheckContext(llm, loaded, ensemble, reference, prompts, acceptance_methods, tolerance, effort, edits)
