"""A hub and drafter nodes in processes, and packed weights of the zoo for clusters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.relay import Relay

from cospec.cluster.nodes.hub import NodeHub
from cospec.config import LinkConfig
from cospec.models.load_options import LoadOptions
from cospec.models.weight_cache import WeightCache
from harness.nodes import NodeProcess, Start, hub_for_tests
from harness.remote_drafters import toy
from harness.sharded_targets import pack_parts


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With ``--dist loadfile``, run the files that start Ray first: they take longest, and short files fill the end."""
    if config.getoption("dist", "no") == "loadfile":
        sizes = Counter(item.path for item in items)
        items.sort(key=lambda item: (item.get_closest_marker("ray") is None, -sizes[item.path], item.path))


@pytest.fixture(scope="session")
def packed_zoo() -> None:
    """The packed weights and configurations of the zoo in the cache. Else each process would import transformers."""
    options = LoadOptions(device="cpu", weight_cache=WeightCache(1 << 30))
    for model, stages in (("zoo", 1), ("zoo:drafter", 1), ("zoo", 2)):
        pack_parts(model, options, stages, ranks=1)


@pytest.fixture
def hub() -> Iterator[NodeHub]:
    made = hub_for_tests()
    yield made
    for slot in list(made.slots.values()):
        made.remove(slot)


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a node at the address of a hub or of a relay, and ends all nodes after the test."""
    made: list[NodeProcess] = []

    def start_one(
        to: NodeHub | Relay, *names: str, keys: Path | None = None, link: LinkConfig = LinkConfig()
    ) -> NodeProcess:
        made.append(NodeProcess(to.address, [(name, toy(name)) for name in names], keys, link=link))
        return made[-1]

    yield start_one
    for node in made:
        node.close()
