"""The declaration of a cluster: bounds, names and places of errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cospec.cluster.config import ClusterConfig
from cospec.errors import InvalidInput


def test_file_declares_target_and_drafters(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(
        "name: two\n"
        "server: {port: 0}\n"
        "machine: {num_cpus: 4, labels: {zone: home}}\n"
        "target:\n"
        "  engine: {model: zoo, max_num_seqs: 4, cost_per_hour: 2}\n"
        "  scale: {min: 1, max: 2}\n"
        "  placement: {num_cpus: 2, labels: {zone: home}, resources: {big: 1}}\n"
        "drafters:\n"
        "- {name: prose, nodes: 2, drafter: {method: draft_model}, cost_per_hour: 0.1, placement: {num_cpus: 0.5}}\n"
    )
    config = ClusterConfig.read(path)
    assert config.target.engine.max_num_seqs == 4
    assert config.target.placement.actor_options == {
        "num_cpus": 2,
        "resources": {"big": 1},
        "label_selector": {"zone": "home"},
    }
    assert config.drafters[0].placement.actor_options == {"num_cpus": 0.5}
    assert config.drafters[0].cost_per_hour == 0.1
    assert config.target.engine.cost_per_hour == 2


def test_the_cheapest_tier_comes_first() -> None:
    given = {"labels": {"zone": "home"}, "tier_prices": {"owned": 0.5, "reserved": 2, "spot": 0.4}}
    placement = ClusterConfig.build({"target": {"placement": given}}).target.placement
    assert placement.actor_options == {
        "num_cpus": 1,
        "label_selector": {"zone": "home", "tier": "spot"},
        "fallback_strategy": [
            {"label_selector": {"zone": "home", "tier": "owned"}},
            {"label_selector": {"zone": "home", "tier": "reserved"}},
        ],
    }
    assert placement.price({"tier": "reserved"}, 7) == 2
    assert placement.price({}, 7) == 7


def test_no_file_is_one_replica_of_the_built_in_model() -> None:
    config = ClusterConfig.read(None)
    assert (config.target.engine.model, config.target.scale.min, config.target.scale.max) == ("zoo", 1, 1)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"targets": {}}, "targets"),
        ({"name": "Two Words"}, "name"),
        ({"target": {"engine": {"max_num_seqs": 0}}}, "max_num_seqs"),
        ({"target": {"engine": 3}}, "target.engine"),
        ({"target": {"scale": {"min": 3, "max": 2}}}, "target.scale.min"),
        ({"drafters": [{"name": "a", "scale": {"min": 3, "max": 2}}]}, "drafters[0].scale.min"),
        ({"drafters": [{"name": "a", "scale": {"max": 2}, "nodes": 2}]}, "drafters[0].nodes"),
        ({"drafters": [{"name": "a", "scale": {"busy": 1.5}}]}, "drafters[0].scale.busy"),
        ({"target": {"engine": {"cost_per_hour": -1}}}, "cost_per_hour"),
        ({"target": {"placement": {"num_cpus": -1}}}, "target.placement.num_cpus"),
        ({"target": {"stages": {}}}, "target.stages"),
        (
            {"target": {"engine": {"pipeline_parallel_size": 2}, "stages": {"strategy": "NEAR"}}},
            "target.stages.strategy",
        ),
        (
            {"target": {"engine": {"pipeline_parallel_size": 2}, "stages": {"placement": {"num_cpus": 0}}}},
            "target.stages.placement",
        ),
        ({"target": {"placement": {"tier_prices": {"spot": -1}}}}, "target.placement.tier_prices"),
        (
            {
                "target": {
                    "engine": {"pipeline_parallel_size": 2},
                    "stages": {},
                    "placement": {"tier_prices": {"spot": 1}},
                }
            },
            "target.placement.tier_prices",
        ),
        ({"drafters": {}}, "drafters"),
        ({"drafters": [{"nodes": 1}]}, "drafters[0].name"),
        ({"drafters": [{"name": "a"}, {"name": "a"}]}, "drafters"),
        ({"server": {"port": 70_000}}, "server.port"),
        ({"machine": {"num_cpus": 0}}, "machine.num_cpus"),
    ],
)
def test_errors_name_the_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        ClusterConfig.build(given)
    assert field in str(caught.value)
