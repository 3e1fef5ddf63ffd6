"""Options of drafters are refused before any weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from cospec.assembly import build
from cospec.config import EngineConfig
from cospec.errors import InvalidInput


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the engine plans the memory or loads the target."""

    def fail(*given: object) -> None:
        raise AssertionError("the load began")

    monkeypatch.setattr(build, "cache_budget", fail)
    monkeypatch.setattr(build, "load_target", fail)


@pytest.mark.parametrize("common", [{}, {"models": ["zoo", "zoo:drafter"], "ensemble": {"method": "weighted"}}])
@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "ngram", "nosuch": 1}, "key speculative_config.nosuch is 1; allowed is one of acceptance_method, "),
        (
            {"method": "pool", "combiner": "x"},
            "speculative_config.combiner is 'x'; allowed is one of union, vote, fuse, mix.",
        ),
        (
            {"method": "pool", "routing": "x"},
            "speculative_config.routing is 'x'; allowed is one of hedge, explore, all.",
        ),
        (
            {"method": "pool", "drafters": [{"method": "ngram", "prompt_lookup_max": 0}]},
            "speculative_config.drafters[0] 'ngram': prompt_lookup_max is 0; allowed is a whole number from 1 to ",
        ),
        ({"method": "ngram", "policy_options": {"nosuch": 1}}, "key speculative_config.policy_options.nosuch is 1"),
    ],
)
def test_refused(common: Mapping[str, Any], given: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        build.build_engine(EngineConfig.build({**common, "speculative_config": given}))
    assert str(caught.value).startswith(sentence)
