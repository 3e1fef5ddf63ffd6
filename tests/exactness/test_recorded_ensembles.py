"""A simulated ensemble of recorded models takes the steps of the engine with the same models on the same prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cospec.bench.record import record
from cospec.bench.step_recorder import recorded
from cospec.core.engine import Engine
from cospec.core.types import Request
from cospec.models.toy import ToyModel
from cospec.plugin_options import parse
from cospec.sampling_params import SamplingParams
from cospec.simulation.recorded_drafts import Recording, read_recording
from cospec.simulation.run import World, serve_all
from cospec.simulation.scenario import Scenario
from harness.ensembles import ensemble_engine
from harness.toys import run_all, tokens_of, with_pool

VOCAB, LENGTH = 12, 40
GREEDY = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
PROMPTS = [(n, 1, 2, n, 4, n)[: n + 2] for n in range(5)]
WEIGHTS = [0.5, 0.3, 0.2]
Steps = list[tuple[int, int, int, int]]
SCHEDULES: list[dict[str, Any]] = [
    {"proposal": "naive", "gamma": 3, "proposer": 1},
    {"proposal": "naive", "gamma": [1, 1, 5], "proposer": 2},
    {"proposal": "alternate", "gamma": 1, "proposer": 0},
    {"proposal": "alternate", "gamma": [1, 3, 2], "proposer": 1},
    {"proposal": "standard"},
]


def models() -> tuple[ToyModel, ...]:
    """Models that agree at times."""
    shapes = (2, 1), (2, 5), (2, 3)
    return tuple(with_pool(ToyModel(VOCAB, order=order, seed=seed), 64) for order, seed in shapes)


def ensemble_of(blend: dict[str, Any], schedule: dict[str, Any]) -> Engine:
    return ensemble_engine(models(), blend, max_num_seqs=3, max_num_batched_tokens=32, **{"gamma": 1, **schedule})


def requests() -> list[Request]:
    return [Request(str(n), prompt, GREEDY, n, parent=str(n)) for n, prompt in enumerate(PROMPTS)]


def recording_of(blend: dict[str, Any]) -> Recording:
    outputs = tokens_of(run_all(ensemble_of(blend, {"proposal": "standard"}), requests()))
    written = [("all", prompt, outputs[str(n)]) for n, prompt in enumerate(PROMPTS)]
    return record({f"m{n}": model for n, model in enumerate(models())}, written, VOCAB, 1)


BLENDS: list[dict[str, Any]] = [{"method": "weighted", "weights": WEIGHTS}, {"method": "realign", "weights": WEIGHTS}]


def engine_steps(blend: dict[str, Any], schedule: dict[str, Any]) -> Steps:
    """Sequences, proposed, accepted and committed tokens of every step."""
    engine = ensemble_of(blend, schedule)
    parts, recorder = recorded(engine.parts)
    run_all(Engine(parts, engine.config), requests())
    return [(s.sequences, s.proposed, s.accepted, s.committed) for s in recorder.steps]


def simulated_steps(recording: Recording, folder: Path, schedule: dict[str, Any]) -> Steps:
    made = parse(
        Scenario,
        {
            "requests": len(PROMPTS), "max_num_seqs": 3, "max_num_batched_tokens": 32, "recording": "toy.npz",
            "target": {
                "cost": {"fixed": 1.0}, "ensemble": {"method": "weighted", "weights": WEIGHTS},
                "members": [{"name": f"m{n}"} for n in range(3)],
            },
            "arrivals": {"kind": "closed", "concurrency": [len(PROMPTS)]},
            "variants": [{"name": "own", "collaboration": schedule}],
        },
    )  # fmt: skip
    read_recording.cache_clear()
    recording.save(folder / "toy.npz")
    _, (replica,) = serve_all(World(made, made.variants[0], folder), float(len(PROMPTS)))
    replica.engine.check_integrity()
    return [(row[0], *row[2:]) for row in replica.steps.rows]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda each: str(list(each.values())))
def test_steps_are_those_of_the_engine(schedule: dict[str, Any], tmp_path: Path) -> None:
    for blend in BLENDS:
        wanted = engine_steps(blend, schedule)
        assert simulated_steps(recording_of(blend), tmp_path, schedule) == wanted
        if schedule["proposal"] != "standard":
            accepted = sum(row[2] for row in wanted)
            assert 5 < accepted < sum(row[1] for row in wanted), "proposals are right at times"


def test_other_acceptances_take_other_steps(tmp_path: Path) -> None:
    """The control: acceptances of another model, or of the position before, are noticed."""
    recording, schedule = recording_of(BLENDS[0]), SCHEDULES[3]
    wanted = engine_steps(BLENDS[0], schedule)
    for changed in (np.roll(recording.tokens, 1, axis=0), np.roll(recording.tokens, 1, axis=1)):
        assert simulated_steps(replace(recording, tokens=changed), tmp_path, schedule) != wanted
