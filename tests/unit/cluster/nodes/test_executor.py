"""What a drafter on nodes declares, which drafters nodes may run, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cospec.assembly.drafters_of_node import build_offers
from cospec.cluster.nodes.executor import node_info
from cospec.cluster.nodes.hub_options import NodesOptions
from cospec.config import EngineConfig
from cospec.errors import CospecError, InvalidInput
from cospec.rng.random_streams import StreamKind
from harness.remote_drafters import recipe_of, refusing


def info(method: str, options: dict[str, Any], **node_options: Any) -> Any:
    recipe = replace(recipe_of(refusing), name="away", method=method, options=options)
    return node_info(recipe, NodesOptions(**node_options))


def test_drawn_tokens_are_verified_by_match_unless_nodes_are_trusted() -> None:
    assert info("draft_model", {}).stream_kinds == frozenset({StreamKind.TARGET})
    assert info("draft_model", {}, trusted=True).stream_kinds is None
    assert info("ngram", {}).stream_kinds is None, "chosen tokens suit every acceptance method"
    assert not info("ngram", {}).capabilities.costless, "a message takes time"
    assert info("draft_model", {"model": None}).name == "away"


def test_nodes_are_trusted_as_configured() -> None:
    for method in ("draft_model", "ngram"):
        assert info(method, {}, trusted=True).trusted and not info(method, {}).trusted


@pytest.mark.parametrize(
    ("method", "options", "sentence"),
    [
        ("heads", {}, "reads hidden states"),
        ("pool", {}, "is a pool"),
        ("draft_model", {"model": "zoo:code"}, "model is 'zoo:code'; allowed is absent with executor 'node'"),
    ],
)
def test_drafters_that_cannot_be_on_nodes(method: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidInput, match=sentence):
        info(method, options)


def test_offers_are_built_from_the_command_line() -> None:
    (offer,) = build_offers(EngineConfig.build({"model": "zoo"}), [{"method": "ngram", "name": "copy"}])
    assert (offer.name, offer.method, offer.drafter.name) == ("copy", "ngram", "ngram")
    assert offer.vocab_size > 1000


@pytest.mark.parametrize(
    ("drafters", "sentence"),
    [
        ([{"method": "guess"}], "drafter: method is 'guess'"),
        ([{"method": "pool"}], "method is 'pool'; allowed is one of draft_model, ngram, suffix, synthetic"),
        ([{"method": "ngram", "name": ""}], "drafter: name is ''"),
        ([{"method": "ngram"}, {"method": "ngram"}], "drafters with different names"),
        ([{"method": "ngram", "prompt_lookup_max": 99}], "prompt_lookup_max is 99"),
    ],
)
def test_wrong_offers_are_one_sentence(drafters: list[dict[str, Any]], sentence: str) -> None:
    with pytest.raises(CospecError, match=sentence):
        build_offers(EngineConfig.build({"model": "zoo"}), drafters)
