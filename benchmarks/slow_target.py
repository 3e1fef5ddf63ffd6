"""A target on machines that do not exist: in the engine's process, or as pipeline stages in processes of their own.

A forward takes ``--target-ms``, and ``--row-ms`` for each token of the batch. Stages take equal parts of these times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from benchmarks.slow_stage import BUSY, SKIPPED, Pace, launch
from cospec import LLM
from cospec.assembly.build import build_engine
from cospec.config import EngineConfig
from cospec.core.interfaces import Model
from cospec.core.model_io import TokenBatch


class Working(Protocol):
    """What the target has done so far.

    Attributes:
        stages: equal parts of the target.
    """

    stages: int

    @property
    def busy(self) -> float:
        """Seconds of computed windows, the mean of all stages."""

    @property
    def skipped(self) -> float:
        """Windows that a stage need not compute, the sum over all stages."""


class SlowTarget:
    """Makes the forwards of a target in this process slow."""

    stages, skipped = 1, 0.0

    def __init__(self, model: Model, pace: Pace) -> None:
        self.busy, self._forward, self._pace = 0.0, model.forward, pace
        model.forward = self.forward  # type: ignore[method-assign]

    def forward(self, batch: TokenBatch) -> Tensor:
        """``Model.forward``, and a sleep."""
        started = time.monotonic()
        logits = self._forward(batch)
        due = started + self._pace.seconds + self._pace.per_token * sum(len(each.tokens) for each in batch.slices)
        time.sleep(max(0.0, due - time.monotonic()))
        self.busy += time.monotonic() - started
        return logits


class SlowStages:
    """Slow stages in processes of their own, which count in a file of ``folder``."""

    def __init__(self, stages: int, pace: Pace, folder: Path) -> None:
        self.stages, path = stages, folder / "counts"
        self._counts = np.memmap(path, np.float64, "w+", shape=(stages, 2))
        own = Pace(pace.seconds / stages, pace.per_token / stages, str(path))
        self.launch = partial(launch, own)

    @property
    def busy(self) -> float:
        """See ``Working``."""
        return float(self._counts[:, BUSY].mean())

    @property
    def skipped(self) -> float:
        """See ``Working``."""
        return float(self._counts[:, SKIPPED].sum())


def add_times(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``slow_llm``."""
    parser.add_argument("--target-ms", type=float, default=50.0)
    parser.add_argument("--row-ms", type=float, default=0.25)
    parser.add_argument("--stages", type=int, default=1, help="of the target; more than one are processes")


@contextmanager
def slow_llm(
    speculative: Mapping[str, Any], nodes: int, most: int, options: argparse.Namespace
) -> Iterator[tuple[LLM, Working]]:
    """A slow target with at most ``most`` requests at a time, after ``nodes`` drafter nodes have joined."""
    pace = Pace(options.target_ms / 1000, options.row_ms / 1000)
    given = {"model": "zoo", "speculative_config": dict(speculative), "threads": 1, "max_num_seqs": most}
    config = EngineConfig.build({**given, "native": "off", "pipeline_parallel_size": options.stages})
    with TemporaryDirectory() as folder:
        stages = SlowStages(options.stages, pace, Path(folder))
        with LLM.from_engine(build_engine(config, stages.launch)) as llm:
            wait_for_nodes(llm, nodes)
            yield llm, stages if options.stages > 1 else SlowTarget(llm.engine.parts.model, pace)


def wait_for_nodes(llm: LLM, count: int) -> None:
    """Wait until ``count`` nodes have joined."""
    end = time.monotonic() + 90
    while sum(node["state"] == "ready" for node in llm.engine.metrics().nodes) < count:
        assert time.monotonic() < end, "the nodes do not join"
        time.sleep(0.1)
