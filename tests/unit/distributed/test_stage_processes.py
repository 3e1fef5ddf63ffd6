"""Each stage has one link: to the next stage, or to the engine."""

from __future__ import annotations

import pytest

from cospec.config import EngineConfig, LinkConfig
from cospec.distributed.stage_processes import links_of_stages
from cospec.errors import InvalidInput

NONE, SLOW, SLOWER = LinkConfig(), LinkConfig(delay=0.1), LinkConfig(delay=0.2)


@pytest.mark.parametrize(
    ("given", "stages", "links"),
    [
        ([], 2, [NONE, NONE]),
        ([SLOW], 1, [SLOW]),
        ([SLOW], 3, [SLOW, SLOW, NONE]),
        ([SLOW, NONE, SLOWER], 3, [SLOW, NONE, SLOWER]),
    ],
)
def test_links_of_stages(given: list[LinkConfig], stages: int, links: list[LinkConfig]) -> None:
    config = EngineConfig(stage_links=tuple(given))
    assert links_of_stages(config.stage_links, stages) == links


@pytest.mark.parametrize(("given", "stages"), [([SLOW, SLOW], 3), ([SLOW, SLOW], 1)])
def test_another_number_of_links_is_refused(given: list[LinkConfig], stages: int) -> None:
    with pytest.raises(InvalidInput, match=f"stage_links is 2; allowed is one link for all, or {stages}"):
        links_of_stages(given, stages)
