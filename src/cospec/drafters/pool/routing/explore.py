"""CoSine's routing by confidence and verified accuracy, corrected (CoSine section 4.2, eq. 1 to 3).

Each request has a score per drafter (the routing vector M_r). After a good step (at least tau accepted tokens) the
best drafters are chosen with probability beta, otherwise with the smaller probability alpha; in the other cases random
drafters are chosen. The paper has alpha > beta, which exploits most where exploration is needed. Eq. 2 is undefined at
0 and 1, so confidence c and accuracy d are clipped. d is the cosine of the target's output embeddings of the drafted
and the committed token, at least 0. Where the target has no such weights, d is 1 for the committed token, else 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from cospec.drafters.pool.routing.drafter_weights import DrafterWeights, total
from cospec.drafters.pool.routing.routing import Feedback, Routing, RoutingInput
from cospec.errors import ModelError
from cospec.models.files.source import OUTPUT_EMBEDDINGS, WeightSource
from cospec.models.files.weight_source_selection import open_source
from cospec.models.lora import base_folder
from cospec.plugin_options import Options

CACHED_ROWS = 4096  # rows in memory


class ExploreOptions(Options):
    """Options of ``explore``.

    Attributes:
        alpha: probability of choosing the best drafters after a bad step.
        beta: probability of choosing the best drafters after a good step.
        tau: accepted tokens of a good step.
        epsilon: minimum distance of similarity and confidence from 0 and 1.
        rate: step size of a score, per step.
        embeddings: compare embeddings, where there are some; otherwise tokens.
    """

    alpha: float = Field(default=0.3, ge=0, le=1, strict=False)
    beta: float = Field(default=0.8, ge=0, le=1, strict=False)
    tau: int = Field(default=2, ge=0)
    epsilon: float = Field(default=0.05, gt=0, lt=0.5)
    rate: float = Field(default=0.3, gt=0, le=1, strict=False)
    embeddings: bool = True


class Explore(Routing):
    """Routing ``explore``: half of the drafters, or as many as the policy says."""

    Options: ClassVar[type[ExploreOptions]] = ExploreOptions
    name: ClassVar[str] = "explore"
    scores_known_tokens: ClassVar[bool] = False
    learns: ClassVar[bool] = True
    weighs: ClassVar[bool] = False

    def __init__(self, options: ExploreOptions | None = None) -> None:
        self._options = options or ExploreOptions()
        self.compares = self._options.embeddings

    @classmethod
    def build(cls, options: ExploreOptions) -> Explore:
        """Build the routing from its options."""
        return cls(options)

    def route(self, weights: DrafterWeights, choice: RoutingInput) -> list[int]:
        """Return the best or random drafters, by random numbers of this step; load lowers a score (section 4.2)."""
        count = (len(choice.able) + 1) // 2 if choice.most is None else choice.most
        count = min(max(1, count), len(choice.able))
        uniforms = choice.uniforms(1 + count)
        options = self._options
        if uniforms[0] < (options.beta if weights.accepted >= options.tau else options.alpha):
            loads = choice.loads or [0.0] * len(weights.scores)
            return sorted(choice.able, key=lambda member: -weights.scores[member] / (1.0 + loads[member]))[:count]
        left, chosen = list(choice.able), []
        for uniform in uniforms[1:]:
            place = next((n for n in range(len(left) - 1) if uniform < (n + 1) / len(left)), len(left) - 1)
            chosen.append(left.pop(place))
        return chosen

    def learn(self, weights: DrafterWeights, parts: Mapping[int, Feedback]) -> None:
        """Apply eq. 2, averaged over the positions of a drafter's draft; positions after a mismatch count as wrong."""
        options = self._options
        for member, part in parts.items():
            if part.samples:
                wrong = max(0, part.proposed - len(part.samples)) * _agreement(0.5, 0.0, options.epsilon)
                accuracies = part.similarities or [value for _, value in part.samples]
                pairs = zip(part.samples, accuracies, strict=True)
                right = total(_agreement(sample[0], accuracy, options.epsilon) for sample, accuracy in pairs)
                mean = (right + wrong) / max(part.proposed, len(part.samples))
                weights.scores[member] += options.rate * (mean - weights.scores[member])


def _agreement(confidence: float, accuracy: float, epsilon: float) -> float:
    """Return one term of eq. 2."""
    c, d = (min(max(x, epsilon), 1.0 - epsilon) for x in (confidence, accuracy))
    return c * d / (c * d + (1.0 - c) * (1.0 - d))


class OutputEmbeddings:
    """The target's output embeddings, which tell how similar two tokens are (CoSine eq. 1).

    The rows are read one by one from the files, so the matrix takes no memory.

    Args:
        name: of the matrix ``[V, H]`` in ``source``.
    """

    def __init__(self, source: WeightSource, name: str) -> None:
        self._source, self._name = source, name
        self._row = lru_cache(CACHED_ROWS)(self._read)

    @classmethod
    def find(cls, folder: Path | None) -> OutputEmbeddings | None:
        """Return the embeddings of the model in ``folder``, or of an adapter's base.

        None without such weights, and where reading a row would read them all.
        """
        try:
            source = None if folder is None else open_source(base_folder(folder))
        except (ModelError, OSError):
            return None
        name = None if source is None else next((name for name in OUTPUT_EMBEDDINGS if name in source.shapes), None)
        return None if source is None or name is None or not source.has_rows(name) else cls(source, name)

    def similarity(self, first: int, second: int) -> float:
        """Return the cosine of two tokens' rows, at least 0; 1 for equal tokens."""
        if first == second:
            return 1.0
        return max(0.0, float(self._row(first) @ self._row(second)))

    def _read(self, token: int) -> Tensor:
        row = self._source.row(self._name, token).float()
        unit: Tensor = row / row.norm().clamp_min(1e-12)
        return unit
