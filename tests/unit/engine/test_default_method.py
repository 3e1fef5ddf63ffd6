"""Which drafter is meant where a configuration names none."""

from __future__ import annotations

from typing import Any

import pytest

from cospec.config import EngineConfig
from cospec.drafters.ngram import NgramDrafter
from cospec.engine.build import _speculation
from cospec.engine.drafters import _check_keys
from cospec.errors import InvalidInput


@pytest.mark.parametrize(
    ("model", "given", "method"),
    [
        ("zoo", None, "draft_model"),
        ("zoo", {}, "draft_model"),
        ("zoo", {"num_speculative_tokens": 3}, "draft_model"),
        ("zoo", {"method": "off"}, "off"),
        ("zoo", {"method": "ngram"}, "ngram"),
        ("folder", None, "off"),
        ("folder", {}, "off"),
        ("folder", {"model": "zoo:drafter"}, "draft_model"),
    ],
)
def test_method(model: str, given: dict[str, Any] | None, method: str) -> None:
    found = _speculation(EngineConfig.build({"model": model, "speculative_config": given}))
    assert found.method == method
    assert found.num_speculative_tokens == (given or {}).get("num_speculative_tokens", "auto")


def test_options_of_no_method_are_not_dropped() -> None:
    config = EngineConfig.build({"model": "folder", "speculative_config": {"num_speculative_tokens": 3}})
    with pytest.raises(InvalidInput, match=r"speculative_config.method is missing; allowed is one of .*off"):
        _speculation(config)


def test_an_unknown_key_is_told_of_the_common_ones_too() -> None:
    given = {"method": "ngram", "num_speculativ_tokens": 3, "prompt_lookup_max": 4}
    config = _speculation(EngineConfig.build({"speculative_config": given}))
    with pytest.raises(InvalidInput) as caught:
        _check_keys(config, NgramDrafter)
    assert str(caught.value).startswith("key speculative_config.num_speculativ_tokens is 3; allowed is one of ")
    for name in ("num_speculative_tokens", "policy", "prompt_lookup_max"):
        assert f" {name}," in str(caught.value)
