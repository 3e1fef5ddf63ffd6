"""Processors that change logits: penalties and ``logit_bias``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from cospec.core.plugin_base import LogitsProcessor
from cospec.plugin_options import Options
from cospec.sampling_params import SamplingParams


class FieldOptions(Options):
    """No keys: fields of ``SamplingParams`` set the processor."""


class Penalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties on the output, CTRL's repetition penalty on prompt and output.

    The state maps each token of prompt and output to its count in the output.
    """

    name: ClassVar[str] = "penalties"
    masks: ClassVar[bool] = False
    Options: ClassVar[type[FieldOptions]] = FieldOptions

    def __init__(self, repetition: float, presence: float, frequency: float) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency

    @classmethod
    def build(cls, options: FieldOptions, sampling: SamplingParams) -> Penalties:
        """Read the penalties of the request."""
        return cls(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)

    def start(self, prompt: Sequence[int]) -> Mapping[int, int]:
        """Return the tokens of the prompt, none of them in the output."""
        return dict.fromkeys(prompt, 0)

    def advance(self, state: Mapping[int, int], token: int) -> Mapping[int, int]:
        """Count one more token."""
        return {**state, token: state.get(token, 0) + 1}

    def edit(self, logits: Tensor, states: Sequence[Mapping[int, int]]) -> Tensor:
        """Change the logits of the counted tokens; a penalty leaves all other logits unchanged."""
        for row, counted in enumerate(states):
            tokens = torch.tensor(list(counted), dtype=torch.long, device=logits.device)
            counts = torch.tensor(list(counted.values()), dtype=logits.dtype, device=logits.device)
            values = logits[row, tokens]
            values = torch.where(values > 0, values / self._repetition, values * self._repetition)
            present = (counts > 0).to(logits.dtype)  # a bool times a float would be a float32
            logits[row, tokens] = values - self._frequency * counts - self._presence * present
        return logits


class LogitBias(LogitsProcessor):
    """Adds a number to the logits of some tokens."""

    name: ClassVar[str] = "logit_bias"
    masks: ClassVar[bool] = False
    Options: ClassVar[type[FieldOptions]] = FieldOptions

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._bias = bias

    @classmethod
    def build(cls, options: FieldOptions, sampling: SamplingParams) -> LogitBias:
        """Read the bias of the request."""
        return cls(sampling.logit_bias or {})

    def start(self, prompt: Sequence[int]) -> None:
        """Return no state: a bias depends on no token."""

    def advance(self, state: None, token: int) -> None:
        """Return no state."""

    def edit(self, logits: Tensor, states: Sequence[None]) -> Tensor:
        """Add the bias to each row."""
        for token, bias in self._bias.items():
            logits[:, token] += bias
        return logits
