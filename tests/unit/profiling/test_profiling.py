"""Measuring, keeping and reporting, on models whose forwards take what a time model says."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest
import torch

from cospec.core.interfaces import Model
from cospec.core.model_io import TokenBatch
from cospec.drafters.model import ModelDrafter
from cospec.errors import ModelError
from cospec.models.block_manager import BlockPool
from cospec.models.toy import ToyModel
from cospec.native import library
from cospec.policies.latency.forward import ForwardLatency, LatencySample, fit
from cospec.policies.latency.step import LatencyModels
from cospec.profiling import start, store
from cospec.profiling.fit_errors import Profile, plot
from cospec.profiling.measure import MeasurementGrid, measure_forwards, measure_multi_steps, measure_steps
from harness.toys import with_pool

TRUE = ForwardLatency(context=2e-7, slopes=(2e-5, 1.5e-4), knees=(32.0,), sequence=2e-5, fixed=1.2e-3)
SMALL = MeasurementGrid(contexts=(8, 32, 64), sequences=(1, 2, 4, 8, 16), tokens=(1, 2, 4), chunks=(16,))


class Timed:
    """A model whose forwards move a clock by what ``cost`` says, and now and then by much more."""

    def __init__(self, pages: int = 2000, cost: ForwardLatency = TRUE) -> None:
        self.cost, self.points = cost, list[int]()
        self.toy = with_pool(ToyModel(5, seed=1), pages, 4)
        self.name, self.vocab_size, self.max_len = "timed", 5, 512
        self.now, self.calls = 0.0, 0

    @property
    def pages(self) -> BlockPool:
        return self.toy.pages

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        self.calls += 1
        context, tokens = sum(s.start for s in batch.slices), sum(len(s.tokens) for s in batch.slices)
        self.points.append(id(batch))
        seconds = self.cost.seconds(context, tokens, len(batch.slices))
        self.now += seconds * (3.0 if self.calls % 5 == 0 else 1.0)  # another process had the processor
        return torch.zeros(0)

    def free(self, ids: Sequence[str]) -> None:
        self.toy.free(ids)

    def clock(self) -> float:
        return self.now


def test_the_true_cost_is_found_in_spite_of_interruptions() -> None:
    model = Timed()
    samples = measure_forwards(cast(Model, model), SMALL, 60.0, model.clock)
    assert len(samples) == 3 * 5 * 3 + 1
    assert fit(samples).errors(samples).max() < 0.02
    assert fit(samples).knees == (32.0,)
    profile = Profile.of("timed", samples)
    assert profile.error < 0.1
    assert len(profile.held_out) == 15
    assert model.pages.usage == 0
    model.pages.check_integrity()


def test_time_and_room_bound_a_measurement() -> None:
    model = Timed()
    few = measure_forwards(cast(Model, model), SMALL, 0.05, model.clock)
    assert 6 <= len(few) < 20
    assert few[0].sequences == few[0].tokens == 1, "the corners come first, the cheapest before the dear"
    tight = Timed(pages=25)
    assert {s.sequences for s in measure_forwards(cast(Model, tight), SMALL, 60.0, tight.clock)} == {1}
    with pytest.raises(ModelError, match="needs 6 or more"):
        Profile.of("tight", few[:5])


def test_steps_of_the_kernels_are_found() -> None:
    """One more row may cost as much as many others; points a power of two apart make a slope of that."""
    grid = replace(SMALL, rows=(3, 5, 6, 7, 8))
    model = Timed(cost=ForwardLatency(1e-7, (2e-5, 6e-4, 5e-5), (6.0, 7.0), 1e-5, 1e-3))
    samples = measure_forwards(cast(Model, model), grid, 60.0, model.clock)
    alone = {sample.tokens: sample.seconds for sample in samples if sample.sequences == 1 and sample.context == 8}
    assert set(range(1, 9)) <= set(alone)
    assert alone[7] - alone[6] > 5 * (alone[6] - alone[1])
    found = start.fitted(samples)
    assert found.errors(samples).max() < 0.05
    assert found.tokens(7) - found.tokens(6) == pytest.approx(6e-4, rel=0.2)


def test_no_point_always_follows_the_same_one() -> None:
    """The processor's caches are as the call before left them."""
    model = Timed()
    measure_forwards(cast(Model, model), SMALL, 60.0, model.clock)
    before = defaultdict(set)
    for one, two in pairwise(model.points):
        before[two].add(one)
    assert min(map(len, before.values())) > 2
    assert all(point in found for point, found in before.items()), "every other time it follows itself"


def test_steps_of_a_drafter() -> None:
    model = with_pool(ToyModel(5, seed=2), 2000, 4)
    samples = measure_steps(ModelDrafter(model), 5, MeasurementGrid((8, 32), (1, 4), (2, 4), ()), 5.0)
    assert len(samples) == 8
    assert all(sample.seconds > 0 and sample.tokens == sample.sequences for sample in samples)
    assert model.pages.usage == 0
    model.pages.check_integrity()


def test_forwards_and_drafts_by_turns() -> None:
    """Every point is a round: forwards of all rows, drafts of one token fewer for each sequence."""
    target, drafter = with_pool(ToyModel(5, seed=1), 2000, 4), ModelDrafter(with_pool(ToyModel(5, seed=2), 2000, 4))
    grid = MeasurementGrid((8, 32), (1, 4), (1, 3), (16,))
    forwards, drafts = measure_multi_steps(target, drafter, grid, 5.0)
    assert {(s.context, s.tokens, s.sequences) for s in forwards} == {
        *((c * n, t * n, n) for c in (8, 32) for n in (1, 4) for t in (1, 3)),
        (8, 16, 1),
    }
    assert {(s.context, s.tokens, s.passes) for s in drafts} == {(c * n, n, 2) for c in (8, 32) for n in (1, 4)}
    assert target.pages.usage == drafter.model.pages.usage == 0
    drafter.model.pages.check_integrity()


def test_a_slope_for_every_doubling_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are free up to 4, dear up to 16, cheaper after that: two knees cannot say where drafts stop paying."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    true = ForwardLatency(
        slopes=(1e-5, 2e-4, 5e-4, 3e-4, 1e-4), knees=(4.0, 8.0, 16.0, 32.0), sequence=1e-5, fixed=1e-3
    )
    points = [(c, t, n) for c in (64, 256) for n in (1, 2, 4, 8, 16) for t in (1, 2, 3, 5)]
    forwards = [LatencySample(c * n, t * n, n, true.seconds(c * n, t * n, n)) for c, t, n in points]
    monkeypatch.setattr(start, "measure_multi_steps", lambda *_: (forwards, forwards))
    found = start.costs_at_start(ToyModel(5, seed=1), ModelDrafter(ToyModel(5, seed=2)), tmp_path, {}, "small").target
    assert found is not None
    assert found.errors(forwards).max() < 0.05


def test_fits_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    key = {"weights": "a", "threads": 2}
    assert store.load(key) is None
    store.save(key, TRUE)
    assert store.load(key) == TRUE
    assert store.load({**key, "threads": 1}) is None
    (file,) = store.directory().iterdir()
    file.write_text("{", encoding="utf-8")
    assert store.load(key) is None
    assert "is measured again" in caplog.text
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # no directory can be made there
    store.save(key, TRUE)
    assert "is not stored" in caplog.text


def test_the_key_is_the_weights(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights" + name.encode())
    one, two = (store.weights(tmp_path / name)["weights"] for name in ("one", "two"))
    assert one != two
    assert "threads" in store.machine("cpu")


def test_an_engine_measures_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    asked: list[str] = []

    def measured(wrong: float) -> list[LatencySample]:
        points = [(c, t) for c in (0, 100) for t in (1, 2, 4, 8, 16)]
        return [
            LatencySample(c, t, 1, TRUE.seconds(c, t, 1) * (wrong if n % 2 else 1)) for n, (c, t) in enumerate(points)
        ]

    def begin(wrong: float = 1.0) -> LatencyModels:
        def rounds(*_: object) -> tuple[list[LatencySample], list[LatencySample]]:
            asked.append("rounds")
            return measured(1.0), measured(wrong)

        monkeypatch.setattr(start, "measure_multi_steps", rounds)
        return start.costs_at_start(target, drafter, tmp_path, {"device": "cpu"}, "small")

    target = ToyModel(5, seed=1)
    drafter = ModelDrafter(ToyModel(5, seed=2))
    begin(wrong=9.0)
    assert "busy machine" in caplog.text
    first = begin()
    assert first.target is not None
    assert first.draft is not None
    assert len(asked) == 2, "what was measured badly is measured again"
    assert begin() == first
    assert len(asked) == 2
    monkeypatch.setattr(library, "build", lambda: "other kernels")
    begin()
    assert len(asked) == 3, "other kernels take other times"


def test_an_engine_measures_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    target = with_pool(ToyModel(5, seed=1), 4000, 4)
    drafter = ModelDrafter(with_pool(ToyModel(5, seed=2), 4000, 4))
    found = start.costs_at_start(target, drafter, tmp_path, {"device": "cpu"}, "small")
    assert found.target is not None
    assert found.draft is not None
    assert target.pages.usage == drafter.model.pages.usage == 0


def test_the_plot_and_the_json(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    samples = [LatencySample(c, t, 1, TRUE.seconds(c, t, 1)) for c in (0, 100) for t in (1, 2, 4, 8, 16, 64)]
    profile = Profile.of("timed", samples)
    plot([profile, profile], tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    stored = json.loads(json.dumps(profile.to_json()))
    assert ForwardLatency.from_json(stored["fit"]) == profile.fitted
    assert stored["held_out"]["points"] == 4
    assert len(stored["samples"]) == 12
