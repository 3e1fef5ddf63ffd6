"""cospec: collaborative speculative decoding, exact and fast."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cospec.machine import unsupported

if TYPE_CHECKING:
    from cospec.core.types import SpeculationParams
    from cospec.ensemble.blends.custom import register_blend
    from cospec.errors import CospecError, InvalidInput
    from cospec.llm import LLM
    from cospec.outputs import CompletionOutput, RequestOutput
    from cospec.registry import (
        register_acceptance_method,
        register_drafter,
        register_logits_processor,
        register_policy,
    )
    from cospec.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "CompletionOutput",
    "CospecError",
    "InvalidInput",
    "RequestOutput",
    "SamplingParams",
    "SpeculationParams",
    "register_acceptance_method",
    "register_blend",
    "register_drafter",
    "register_logits_processor",
    "register_policy",
]

_HOMES = {
    "LLM": "cospec.llm",
    "CompletionOutput": "cospec.outputs",
    "RequestOutput": "cospec.outputs",
    "CospecError": "cospec.errors",
    "InvalidInput": "cospec.errors",
    "SamplingParams": "cospec.sampling_params",
    "SpeculationParams": "cospec.core.types",
    "register_acceptance_method": "cospec.registry",
    "register_blend": "cospec.ensemble.blends.custom",
    "register_drafter": "cospec.registry",
    "register_logits_processor": "cospec.registry",
    "register_policy": "cospec.registry",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that the command line starts without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'cospec' has no attribute {name!r}")
    if sentence := unsupported():
        raise ImportError(sentence)
    return getattr(import_module(_HOMES[name]), name)
