"""Variants of cospec without one of its faster implementations on a GPU, for ``benchmarks.gpu``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from cospec.models.pointwise import TorchPointwise


@dataclass(frozen=True, slots=True)
class Variant:
    """How a variant differs from cospec.

    Attributes:
        options: further keywords of ``LLM``.
        patched: replaces an implementation while the variant is loaded and while it generates.
        drafted: whether the difference shows only in sampling, so that the variant runs with drafts.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    patched: Callable[[], AbstractContextManager[Any]] = nullcontext
    drafted: bool = False


VARIANTS = {
    "attention": Variant({"attention_backend": "sdpa"}),
    "pointwise": Variant(patched=lambda: patch("cospec.models.llama.pointwise_on", lambda device: TorchPointwise())),
    "graphs": Variant(patched=lambda: patch("cospec.models.llama.GraphRunner", lambda runner, recorder: runner)),
    "race": Variant(
        patched=lambda: patch("cospec.rng.torch_draws.races_by_triton", lambda device: False), drafted=True
    ),
}
"""By what the variant lacks: Triton's attention, Triton's norms and gates, CUDA graphs, Triton's draws."""
