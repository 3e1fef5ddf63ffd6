"""Engines that draft on nodes, the requests they run, and what they must write."""

from __future__ import annotations

from collections.abc import Callable

from cospec.cluster.nodes.hub import NodeHub
from cospec.core.engine import Engine
from cospec.core.types import Request
from cospec.models.toy import ToyModel
from cospec.runtime.drafter_proxy import DrafterProxy
from cospec.sampling_params import SamplingParams
from harness.nodes import on_nodes
from harness.remote_drafters import VOCAB
from harness.toys import make_request, run_all, tokens_of, toy_engine, with_pool

GREEDY = SamplingParams(temperature=0, max_tokens=40)
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=40)


def target() -> ToyModel:
    return with_pool(ToyModel(VOCAB, order=2, seed=1, sharpness=2.0), 512, 4)


def requests(prefix: str = "r") -> list[Request]:
    shared = [(3 * n + i * i) % VOCAB for n in range(3) for i in range(4)]
    made = []
    for kind, params in (("greedy", GREEDY), ("seeded", SEEDED)):
        made += [make_request(f"{prefix}{kind}{n}", shared[: 3 + n], params) for n in range(4)]
    return made


def plain(found: list[Request]) -> dict[str, tuple[int, ...]]:
    return tokens_of(run_all(toy_engine(target(), None), found))


def rows(hub: NodeHub, state: str) -> int:
    return sum(row["state"] == state for row in hub.status())


def nodes_of(hub: NodeHub) -> set[str]:
    return {row["node"] for row in hub.status()}


def accepted(engine: Engine) -> int:
    return sum(engine.metrics().accepted_tokens.values())


def writes_the_same(engine: Engine, prefix: str, before: Callable[[int], object] = lambda step: None) -> None:
    """``before``: see ``run_all``."""
    found = requests(prefix)
    assert tokens_of(run_all(engine, found, before=before)) == plain(found)


def alone(hub: NodeHub) -> tuple[DrafterProxy, Engine]:
    drafter, _ = on_nodes(hub, "itself")
    return drafter, toy_engine(target(), drafter, k=3)
