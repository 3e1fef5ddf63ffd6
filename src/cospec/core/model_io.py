"""Input and output of models: packed, ragged batches of tokens, and rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cospec.rng.random_streams import Floats, StreamKey
from cospec.sampling_params import SamplingParams

if TYPE_CHECKING:  # the scheduler imports no torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How the token after each row of a slice is drawn, see ``PipelinedModel``.

    Attributes:
        params: of a request whose logits no processor edits.
        seed: of the stream ``TARGET``.
    """

    params: SamplingParams
    seed: int


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """The tokens of one sequence in a packed batch: known tokens first, then the nodes of a draft.

    Attributes:
        start: tokens of the sequence already in the model's cache; the tokens are written after these.
        tokens: ``[n]``.
        parents: ``[N]`` of the draft nodes, the last ``N`` of ``tokens``; empty for none.
        logits_from: rows ``logits_from .. n-1`` get logits.
        sampling: a ``PipelinedModel`` returns drawn tokens for these rows, not logits; other models ignore the field.
    """

    id: str
    start: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    logits_from: int = 0
    sampling: RowSampling | None = None

    @property
    def known(self) -> int:
        """Number of ``tokens`` that are not draft nodes."""
        return len(self.tokens) - len(self.parents)


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """A packed, ragged batch for one forward pass. Logits are concatenated in the order of the slices."""

    slices: tuple[SequenceSlice, ...]


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """What a ``PipelinedModel`` computed.

    Attributes:
        logits: ``[R, V]`` of the slices without ``sampling``, in their order.
        tokens: ``[S]``, one per row of the slices with ``sampling``, in their order. -1 marks a row whose logits are
            not finite, and a row that no path of drawn tokens reaches.
    """

    logits: Tensor
    tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class RolloutParams:
    """How the tokens of one sequence are chosen in a rollout.

    Attributes:
        temperature: 0 takes the likeliest token.
        stream: key of the first token's random numbers; the position rises by one with each token.
        depth: tokens to choose.
        confident: whether the caller reads the confidences; for greedy tokens these need all logits.
        logits: whether the caller needs the logits, besides the chosen tokens.
    """

    temperature: float
    stream: StreamKey
    depth: int
    confident: bool = False
    logits: bool = False


@dataclass(frozen=True, slots=True)
class RolloutOutput:
    """What a rollout chose.

    Attributes:
        tokens: ``[S][depth]`` of the longest; -1 marks NaN logits or the end of a draft. Ignore tokens after -1.
        q: ``[S, depth, V]``, the distributions of tokens that draft streams drew; other rows are undefined. Not None
            if a draft stream drew. On a GPU ``DeviceProbs``.
        confidence: ``[S, depth]``, the largest probability at each step, at temperature 1 for greedy tokens; None if no
            parameters ask for confidences.
        logits: float32 ``[depth, S, V]`` on the model's device, from which each token was chosen; None if no parameters
            ask for logits.
        hits: ``[S]``, how many known tokens after a row were the likeliest; empty if all slices have one row.
    """

    tokens: list[list[int]]
    q: Floats | None
    confidence: Floats | None = None
    logits: Tensor | None = None
    hits: Sequence[int] = ()
