"""Ensembles of toy models, and reference distributions of the blends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from cospec.assembly.components import TextInfo
from cospec.assembly.ensembles import assemble_ensemble
from cospec.config import CollaborationConfig, EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.interfaces import Model
from cospec.core.model_io import RolloutOutput, RolloutParams, SequenceSlice, TokenBatch
from cospec.core.plugin_base import Drafter
from cospec.ensemble import proposer
from cospec.ensemble.ensemble import LoadedModels
from cospec.models.toy import ToyModel
from harness.enumerated_draws import BranchingRandom
from harness.methods import override
from harness.reference import normalised

SPECULATIVE = (
    "acceptance_method",
    "request_may_choose",
    "max_nodes",
    "widths",
    "execution_mode",
    "drafter_executor",
    "policy",
)
Mix = Callable[[Sequence[Sequence[float]]], list[float]]
"""The probabilities of every model to those of the blend."""


def toys(count: int, vocab: int = 3, order: int = 2, sharpness: float = 1.0) -> tuple[ToyModel, ...]:
    """Different models of one vocabulary."""
    return tuple(ToyModel(vocab, order=order, seed=seed, sharpness=sharpness) for seed in range(1, count + 1))


def rolling(model: ToyModel) -> ToyModel:
    """The model with a loop of its own, as native ones have; its draws are the enumeration's too."""

    def rollout(batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        slices, tokens, depth = list(batch.slices), [list[int]() for _ in params], params[0].depth
        rows, q = [], np.zeros((len(params), depth, model.vocab_size))
        for step in range(depth):
            rows.append(model.forward(TokenBatch(tuple(slices))).numpy())
            for place, own in enumerate(params):
                token = int(rows[-1][place].argmax())
                if own.temperature:
                    ensemble = torch.softmax(torch.from_numpy(rows[-1][place]) / own.temperature, -1)
                    q[place, step] = ensemble.numpy()
                    (token,) = cast(Any, proposer).exponential_sample(
                        q[place, step : step + 1], [_ahead(own.stream, step)]
                    )
                tokens[place].append(token)
                end = slices[place].start + len(slices[place].tokens)
                slices[place] = SequenceSlice(slices[place].id, end, (token,))
        logits = torch.from_numpy(np.stack(rows))
        return RolloutOutput(tokens, q if any(own.temperature for own in params) else None, None, logits)

    override(model, rollout=rollout, has_rollout=True)
    return model


def _ahead(stream: Any, step: int) -> Any:
    """What the token ``step`` places further on is drawn with."""
    place = 1 if isinstance(stream[0], BranchingRandom) else 4
    return (*stream[:place], stream[place] + step, *stream[place + 1 :])


def ensemble_engine(
    models: Sequence[Model],
    ensemble: Mapping[str, Any],
    proposal: str = "alternate",
    gamma: int | list[int] | str = 2,
    **more: Any,
) -> Engine:
    """An engine over ``models``; ``acceptance_method``, ``drafter``, ``proposer`` ... and fields of ``EngineConfig``
    may follow.
    """
    drafter: Drafter | None = more.pop("drafter", None)
    own = {name: more.pop(name) for name in SPECULATIVE if name in more}
    speculative = SpeculativeConfig(num_speculative_tokens=more.pop("k", 2), **own)
    given = {"proposal": proposal, "gamma": gamma, "proposer": more.pop("proposer", None)}
    collaboration = CollaborationConfig.model_validate(given)
    config = EngineConfig(ensemble=ensemble, collaboration=collaboration, speculative_config=speculative, **more)
    names = tuple(f"m{place}" for place in range(len(models)))
    return Engine(assemble_ensemble(LoadedModels(tuple(models), names), drafter, config, TextInfo()))


class Blended:
    """A blend as a table of logits, without the package's blends; for ``reference.joint_distribution_of``."""

    def __init__(self, models: Sequence[ToyModel], mix: Mix) -> None:
        self.models, self.mix = models, mix
        self.order, self.vocab_size = models[0].order, models[0].vocab_size

    def logits(self, context: Sequence[int]) -> Tensor:
        """Log-probabilities ``[V]`` after ``context``."""
        rows = []
        for model in self.models:
            values = model.logits(context).tolist()
            rows.append(normalised([math.exp(value - max(values)) for value in values]))
        mixed = self.mix(rows)
        return torch.tensor([math.log(p) if p > 0 else -math.inf for p in mixed], dtype=torch.float64)


def weighted(*weights: float) -> Mix:
    """Probabilities, summed."""
    return lambda rows: [sum(w * row[t] for w, row in zip(weights, rows, strict=True)) for t in range(len(rows[0]))]


def powers(*weights: float) -> Mix:
    """Probabilities, each to its power, multiplied: linear in the logits."""

    def mix(rows: Sequence[Sequence[float]]) -> list[float]:
        products = [math.prod(row[t] ** w for w, row in zip(weights, rows, strict=True)) for t in range(len(rows[0]))]
        return normalised(products)

    return mix


def contrastive(mu: float, plausibility: float) -> Mix:
    """The strong model's over the weak one's to the power mu, among what the strong one finds plausible."""

    def mix(rows: Sequence[Sequence[float]]) -> list[float]:
        strong, weak = rows
        least = plausibility * max(strong)
        return normalised([s / w**mu if s >= least else 0.0 for s, w in zip(strong, weak, strict=True)])

    return mix


def adaptive(bound: float, entropy: float, apart: float, overlap: float) -> Mix:
    """Moved towards the second where the token is no key token, as far as the bound allows."""

    def mix(rows: Sequence[Sequence[float]]) -> list[float]:
        target, drafter = rows
        shared = sum(map(min, target, drafter))
        h_t, h_d = (-sum(p * math.log(p) for p in row) for row in rows)
        key = [
            h_d / h_t > entropy or shared < overlap or abs(t - d) > apart for t, d in zip(target, drafter, strict=True)
        ]
        tau = 1.0
        for _ in range(6):
            moved = normalised(
                [t if is_key else t ** (1 - tau) * d**tau for t, d, is_key in zip(target, drafter, key, strict=True)]
            )
            distance = sum(abs(m - t) for m, t in zip(moved, target, strict=True)) / 2
            if distance <= bound:
                return moved
            tau *= 0.95 * bound / distance
        return list(target)

    return mix
