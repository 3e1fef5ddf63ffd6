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
            "speculative_config.drafters[0].prompt_lookup_max is 0; allowed is a whole number from 1 to 32.",
        ),
        (
            {"method": "pool", "drafters": [{"method": "ngram", "executer": "x"}]},
            "key speculative_config.drafters[0].executer is 'x'; allowed is one of method, executor, cores, name, "
            "cost_per_hour, prompt_lookup_max, prompt_lookup_min.",
        ),
        (
            {"method": "pool", "drafters": [{"method": "ngram", "executor": "x"}]},
            "speculative_config.drafters[0].executor is 'x'; allowed is one of inline, thread, process, node.",
        ),
        (
            {"method": "pool", "drafters": [{"method": "nram"}]},
            "speculative_config.drafters[0].method is 'nram'; allowed is one of draft_model, ngram, heads, suffix, "
            "synthetic.",
        ),
        (
            {"method": "pool", "drafters": [{"method": "ngram"}, {"method": "ngram"}]},
            "speculative_config.drafters[1].name is 'ngram'; allowed is a name that nothing else has.",
        ),
        (
            {"method": "pool", "routing_options": {"nosuch": 1}},
            "key speculative_config.routing_options.nosuch is 1; allowed is no key here.",
        ),
        (
            {"method": "pool", "drafters": [{"method": "heads", "heads": "/no/folder"}]},
            "speculative_config.drafters[0].heads is '/no/folder'; allowed is a folder with ",
        ),
        ({"method": "heads", "heads": "/no/folder"}, "speculative_config.heads is '/no/folder'; allowed is a folder "),
        (
            {"method": "ngram", "prompt_lookup_max": 1},
            "speculative_config.prompt_lookup_min is 2; allowed is at most prompt_lookup_max, here 1.",
        ),
        (
            {"method": "ngram", "drafter_nodes": {"bnd": 1}},
            "key speculative_config.drafter_nodes.bnd is 1; allowed is one of bind, keys, quantile, deadline, trusted.",
        ),
        (
            {"method": "ngram", "drafter_nodes": {"bind": "0.0.0.0:5710"}},
            "speculative_config.drafter_nodes.bind is '0.0.0.0:5710'; allowed is tcp://HOST:PORT.",
        ),
        (
            {"method": "ngram", "drafter_nodes": {"bind": "tcp://0.0.0.0:5710"}},
            "speculative_config.drafter_nodes.bind is tcp://0.0.0.0:5710 without keys; allowed is an address of this ",
        ),
        ({"method": "ngram", "policy_options": {"nosuch": 1}}, "key speculative_config.policy_options.nosuch is 1"),
    ],
)
def test_refused(common: Mapping[str, Any], given: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        build.build_engine(EngineConfig.build({**common, "speculative_config": given}))
    assert str(caught.value).startswith(sentence)


def test_off_needs_no_quotes_in_yaml() -> None:
    given = {"method": False, "policy": False, "request_may_choose": [False, "length"]}
    config = EngineConfig.build({"native": False, "speculative_config": given})
    speculative = config.speculative_config
    assert speculative is not None and config.native == speculative.method == speculative.policy == "off"
    assert speculative.request_may_choose == ("off", "length")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"stage_links": [{"dely": 3}]}, "key stage_links[0].dely is 3; allowed is one of delay, jitter, loss, "),
        ({"collaboration": {"gama": 3}, "ensemble": {}}, "key collaboration.gama is 3; allowed is one of proposal, "),
        (
            {"models": [{"modl": "zoo"}], "ensemble": {}},
            "key models[0].modl is 'zoo'; allowed is one of dtype, quantization, kv_cache_dtype, model.",
        ),
        ({"models": [{"dtype": "auto"}], "ensemble": {}}, "models[0].model is missing; allowed is a text."),
    ],
)
def test_keys_of_an_inner_object(given: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        EngineConfig.build(given)
    assert str(caught.value).startswith(sentence)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": "draft_model"}, "speculative_config.model is missing; allowed is the folder or name of a drafter "),
        ({"method": "heads"}, "speculative_config.heads is missing; allowed is the folder of heads for this target."),
        (
            {"method": "pool", "drafters": [{"method": "heads"}]},
            "speculative_config.drafters[0] 'heads': heads is missing; allowed is the folder of heads for this target.",
        ),
    ],
)
def test_a_target_without_drafter_or_heads_of_its_own(given: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        build.build_engine(EngineConfig.build({"model": "zoo:code", "speculative_config": given}))
    assert str(caught.value).startswith(sentence)
