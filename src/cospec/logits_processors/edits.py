"""Processors that change logits: penalties and ``logit_bias``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from cospec.core.plugin_base import LogitsProcessor
from cospec.plugin_options import Options
from cospec.sampling_params import SamplingParams

MAX_RECENT = 64  # tokens that a state of penalties copies for each new token


class FieldOptions(Options):
    """No keys: fields of ``SamplingParams`` set the processor."""


@dataclass(frozen=True, slots=True)
class _Counts:
    """Counts by token, and the tensors of tokens and counts that ``edit`` reads."""

    by_token: Mapping[int, int]
    _tensors: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def tensors(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[n]`` tokens and ``[n]`` counts on the device and in the dtype of ``logits``."""
        kind = logits.device, logits.dtype
        found = self._tensors.get(kind)
        if found is None:
            tokens = torch.tensor(list(self.by_token), dtype=torch.long, device=logits.device)
            counts = torch.tensor(list(self.by_token.values()), dtype=logits.dtype, device=logits.device)
            found = self._tensors[kind] = tokens, counts
        return found


class Counted(NamedTuple):
    """The state of ``Penalties``: the count in the output of each token of prompt and output.

    States share ``older``, so that a new token copies few counts.

    Attributes:
        recent: counts of the latest tokens, which replace the counts in ``older``.
    """

    older: _Counts
    recent: Mapping[int, int]


class Penalties(LogitsProcessor):
    """OpenAI's presence and frequency penalties on the output, CTRL's repetition penalty on prompt and output."""

    name: ClassVar[str] = "penalties"
    masks: ClassVar[bool] = False
    Options: ClassVar[type[FieldOptions]] = FieldOptions

    def __init__(self, repetition: float, presence: float, frequency: float) -> None:
        self._repetition, self._presence, self._frequency = repetition, presence, frequency

    @classmethod
    def build(cls, options: FieldOptions, sampling: SamplingParams) -> Penalties:
        """Read the penalties of the request."""
        return cls(sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)

    def start(self, prompt: Sequence[int]) -> Counted:
        """Return the tokens of the prompt, none of them in the output."""
        return Counted(_Counts(dict.fromkeys(prompt, 0)), {})

    def advance(self, state: Counted, token: int) -> Counted:
        """Count one more token."""
        older, recent = state
        count = recent.get(token, older.by_token.get(token, 0)) + 1
        recent = {**recent, token: count}
        if len(recent) < MAX_RECENT:
            return Counted(older, recent)
        return Counted(_Counts({**older.by_token, **recent}), {})

    def edit(self, logits: Tensor, states: Sequence[Counted]) -> Tensor:
        """Change the logits of the counted tokens; a penalty leaves all other logits unchanged."""
        recent = [(row, *item) for row, state in enumerate(states) for item in state.recent.items()]
        rows, tokens, counts = torch.tensor(recent, dtype=torch.long, device=logits.device).reshape(len(recent), 3).T
        values = logits[rows, tokens]  # read first, because ``older`` may have the same tokens
        end = 0
        for _, group in groupby(states, key=lambda state: id(state.older)):
            first, same = end, list(group)
            end += len(same)
            older, older_counts = same[0].older.tensors(logits)
            logits[first:end, older] = self._penalised(logits[first:end, older], older_counts)
        logits[rows, tokens] = self._penalised(values, counts.to(logits.dtype))
        return logits

    def _penalised(self, values: Tensor, counts: Tensor) -> Tensor:
        values = torch.where(values > 0, values / self._repetition, values * self._repetition)
        present = (counts > 0).to(values.dtype)  # a bool times a float would be a float32
        return values - self._frequency * counts - self._presence * present


class LogitBias(LogitsProcessor):
    """Adds a number to the logits of some tokens."""

    name: ClassVar[str] = "logit_bias"
    masks: ClassVar[bool] = False
    Options: ClassVar[type[FieldOptions]] = FieldOptions

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._tokens = torch.tensor(list(bias), dtype=torch.long)
        self._biases = torch.tensor(list(bias.values()), dtype=torch.float64)

    @classmethod
    def build(cls, options: FieldOptions, sampling: SamplingParams) -> LogitBias:
        """Read the bias of the request."""
        return cls(sampling.logit_bias or {})

    def start(self, prompt: Sequence[int]) -> None:
        """Return no state: a bias depends on no token."""

    def advance(self, state: None, token: int) -> None:
        """Return no state."""

    def edit(self, logits: Tensor, states: Sequence[None]) -> Tensor:
        """Add the bias to each row, in single precision or the precision of the logits."""
        tokens, wide = self._tokens.to(logits.device), torch.promote_types(logits.dtype, torch.float32)
        biases = self._biases.to(logits.device, wide)
        logits[:, tokens] = (logits[:, tokens] + biases).to(logits.dtype)
        return logits
