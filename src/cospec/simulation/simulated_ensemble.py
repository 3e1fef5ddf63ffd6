"""Simulated models of an ensemble: logits that agree with the outputs as often as declared or recorded.

The engine's own code blends the logits, lets models propose, and verifies. A model's likeliest token is the output's
token, or a wrong token that no other model prefers. After a wrong token come further proposals that verification drops,
so rows depend on the position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cospec.assembly.components import TextInfo, Verification
from cospec.assembly.drafting import Drafting
from cospec.assembly.ensembles import build_verification, propose_by_members
from cospec.config import CollaborationConfig, EngineConfig, SpeculativeConfig
from cospec.core.model_io import RolloutOutput, RolloutParams, TokenBatch
from cospec.core.tree import depths
from cospec.ensemble.blends.registry import build_blend
from cospec.ensemble.ensemble import LoadedModels
from cospec.errors import InvalidInput, words
from cospec.models.block_manager import BlockPool
from cospec.policies.latency.forward import ForwardLatency
from cospec.simulation.clock import VirtualClock
from cospec.simulation.recorded_drafter import RecordedMember
from cospec.simulation.scenario import ModelConfig, TargetConfig
from cospec.simulation.simulated_drafter import DrafterSetting
from cospec.simulation.simulated_models import SimulatedModel
from cospec.simulation.workload import SimulatedRequest

Agrees = Callable[[str, SimulatedRequest, int], bool]  # id, request, and place in the output
ABSENT, LEAD = -30.0, 1e-4  # logit of other tokens; lead of a wrong token before the output's token
BLENDS = ("weighted", "realign")  # positive weights: the output's token wins, whoever is wrong


class MemberForward:
    """The forwards of one model of an ensemble: rows of logits ``[R, V]`` after the seconds of the time model.

    Args:
        wrong: the token that the model prefers where the model disagrees.
        vocab_size: V.

    Attributes:
        busy: seconds of forwards.
    """

    def __init__(
        self, cost: ForwardLatency, agrees: Agrees, wrong: int, vocab_size: int, setting: DrafterSetting
    ) -> None:
        self.busy = 0.0
        self._cost, self._agrees, self._wrong, self._vocab_size = cost, agrees, wrong, vocab_size
        self._clock, self._requests = setting.clock, setting.requests

    def forward(self, batch: TokenBatch) -> Tensor:
        """See ``Model.forward``."""
        self._spend(batch, 1)
        places = [
            (part.id, part.start + part.known + depth)
            for part in batch.slices
            for depth in (*range(1 - part.known, 1), *depths(part.parents))[part.logits_from :]
        ]
        return torch.from_numpy(self._rows(places))

    def rollout(self, batch: TokenBatch, params: Sequence[RolloutParams]) -> RolloutOutput:
        """See ``Model.rollout``; all slices have one depth, and every request is greedy."""
        depth = params[0].depth
        self._spend(batch, depth)
        ends = [(part.id, part.start + len(part.tokens)) for part in batch.slices]
        rows = [self._rows([(id, end + step) for id, end in ends]) for step in range(depth)]
        tokens = np.stack([each.argmax(1) for each in rows], axis=1)
        return RolloutOutput(tokens.tolist(), None, None, torch.from_numpy(np.stack(rows)))

    def _spend(self, batch: TokenBatch, passes: int) -> None:
        """Advance the clock by one call; passes after the first compute one token of each sequence."""
        count = len(batch.slices)
        context = sum(part.start for part in batch.slices)
        tokens = sum(len(part.tokens) for part in batch.slices)
        seconds = self._cost.seconds(context, tokens, count)
        seconds += (passes - 1) * self._cost.each(context + tokens, count)
        self.busy += self._clock.advance(seconds)

    def _rows(self, places: Sequence[tuple[str, int]]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the logits of the tokens at ``places``, each an id and a position in prompt and output."""
        rows = np.full((len(places), self._vocab_size), ABSENT, np.float32)
        for row, (id, position) in zip(rows, places, strict=True):
            request = self._requests[id]
            place = min(position - len(request.prompt), len(request.output) - 1)
            row[request.output[place]] = 0.0
            if place >= 0 and not self._agrees(id, request, place):
                row[self._wrong] = LEAD
        return rows


class SimulatedThreads:
    """Replaces the threads of parallel collaborative decoding: every model works on hardware of its own."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock

    def map(self, work: Callable[[int], None], models: Iterable[int]) -> list[None]:
        """Start all work now, and wait for the slowest model."""
        started, ends = self._clock.now, [self._clock.now]
        for model in models:
            with self._clock.elsewhere(started):
                work(model)
                ends.append(self._clock.now)
        self._clock.reach(max(ends))
        return [None] * (len(ends) - 1)

    def shutdown(self) -> None:
        """Nothing to end."""


def build_ensemble(
    target: TargetConfig,
    collaboration: CollaborationConfig | None,
    setting: DrafterSetting,
    pools: Callable[[], BlockPool],
) -> tuple[Verification, Drafting | None, list[MemberForward]]:
    """Return the verification by all models, what proposes if ``collaboration`` is given, and the models' forwards.

    Args:
        pools: makes the cache of one model.

    Raises:
        InvalidInput: a model has neither acceptance nor recording, or blend and models do not fit each other.
    """
    if target.ensemble.get("method") not in BLENDS:
        allowed = f"one of {', '.join(BLENDS)}; acceptances describe every other blend"
        raise InvalidInput("target.ensemble.method", target.ensemble.get("method"), allowed)
    members = target.members
    own = build_blend(target.ensemble, len(members)).members
    vocab_size = setting.vocab_size + len(members)
    forwards = [
        MemberForward(
            (each.cost or target.cost).built(setting.folder),
            _always if own == (number,) else _agreement(each, setting),  # the blend is this model
            setting.vocab_size + number,
            vocab_size,
            setting,
        )
        for number, each in enumerate(members)
    ]
    loaded = LoadedModels(
        tuple(SimulatedModel(pools(), vocab_size, each) for each in forwards), tuple(each.name for each in members)
    )
    config = EngineConfig(
        ensemble=target.ensemble,
        collaboration=collaboration or CollaborationConfig(),
        native="off",
        speculative_config=SpeculativeConfig(acceptance_method="match"),
    )
    decoder, verification = build_verification(loaded, config, TextInfo())
    if collaboration is None:
        return verification, None, forwards
    threads = SimulatedThreads(setting.clock) if collaboration.proposal == "parallel" else None
    return *propose_by_members(decoder, verification, config, threads, rollouts=True), forwards


def _agreement(member: ModelConfig, setting: DrafterSetting) -> Agrees:
    """Return how often the model's likeliest token is the output's: as declared, or as recorded."""
    rate = member.acceptance
    if rate is not None:
        return lambda id, request, place: request.difficulty[place] < rate
    if setting.recording is None:
        raise InvalidInput(
            f"target.members acceptance of {member.name}", words("missing"), "a rate, or a recording with the model"
        )
    recorded = RecordedMember(setting.recording, member.name, setting.requests)
    return lambda id, request, place: recorded.chain(id, place)[0][0] == request.output[place]


def _always(id: str, request: SimulatedRequest, place: int) -> bool:
    return True
