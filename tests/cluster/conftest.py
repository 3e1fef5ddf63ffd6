"""A hub and drafter nodes in processes, for the tests of nodes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.relay import Relay

from cospec.cluster.nodes.hub import NodeHub
from cospec.config import LinkConfig
from harness.nodes import NodeProcess, Start, hub_for_tests
from harness.remote_drafters import toy


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
