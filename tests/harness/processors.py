"""Logits processors whose state depends on all tokens of a path."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import ClassVar

import torch
from torch import Tensor

from cospec.core.plugin_base import LogitsProcessor
from cospec.logits_processors.bitmask import Bitmask, ban
from cospec.models.toy import ToyModel
from cospec.plugin_options import Options
from cospec.registry import LOGITS_PROCESSORS
from cospec.sampling_params import SamplingParams


class NoOptions(Options):
    """No keys."""


class NoRepeat(LogitsProcessor):
    """Bans the previous token. The state is the previous token."""

    name: ClassVar[str] = "no-repeat"
    masks: ClassVar[bool] = True
    Options: ClassVar[type[NoOptions]] = NoOptions

    @classmethod
    def build(cls, options: NoOptions, sampling: SamplingParams) -> NoRepeat:
        return cls()

    def start(self, prompt: Sequence[int]) -> int:
        return prompt[-1]

    def advance(self, state: int, token: int) -> int:
        return token

    def mask(self, state: int, vocab_size: int) -> Bitmask | None:
        return ban([state], vocab_size)


class ScaleOptions(Options):
    """``scale``: added to the logit of the preferred token."""

    scale: float = 1.0


class PrefersSum(LogitsProcessor):
    """Adds ``scale`` to the token that equals the sum of all tokens, modulo 3."""

    name: ClassVar[str] = "prefers-sum"
    masks: ClassVar[bool] = False
    Options: ClassVar[type[ScaleOptions]] = ScaleOptions

    def __init__(self, scale: float) -> None:
        self._scale = scale

    @classmethod
    def build(cls, options: ScaleOptions, sampling: SamplingParams) -> PrefersSum:
        return cls(options.scale)

    def start(self, prompt: Sequence[int]) -> int:
        return sum(prompt) % 3

    def advance(self, state: int, token: int) -> int:
        return (state + token) % 3

    def edit(self, logits: Tensor, states: Sequence[int]) -> Tensor:
        for row, state in enumerate(states):
            logits[row, state] += self._scale
        return logits


class ProcessedTable:
    """The logits of a toy model after both processors, without their states."""

    def __init__(self, model: ToyModel, names: Sequence[str], scale: float = 1.0) -> None:
        self._model, self._names, self._scale = model, names, scale

    def logits(self, context: Sequence[int]) -> Tensor:
        values = self._model.logits(context).clone()
        if "prefers-sum" in self._names:
            values[sum(context) % 3] += self._scale
        if "no-repeat" in self._names:
            values[context[-1]] = -torch.inf
        return values


@contextmanager
def registered() -> Iterator[None]:
    """Both processors are known to requests."""
    for cls in (NoRepeat, PrefersSum):
        LOGITS_PROCESSORS.register(cls.name, cls)
    yield
    for cls in (NoRepeat, PrefersSum):
        LOGITS_PROCESSORS.unregister(cls.name)
