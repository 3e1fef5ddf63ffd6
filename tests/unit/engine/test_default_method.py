"""Which drafter is meant where a configuration names none."""

from __future__ import annotations

from typing import Any

import pytest

from cospec.config import EngineConfig
from cospec.drafters.ngram import NgramDrafter
from cospec.engine.build import _speculation, default_drafter
from cospec.engine.drafters import _check_keys, same_tokens
from cospec.errors import InvalidInput
from cospec.llm import LLM
from cospec.models.adapters import base_folder
from cospec.models.folder import resolve, zoo_members
from cospec.params import SamplingParams
from cospec.types import Speculation


@pytest.mark.parametrize(
    ("model", "given", "method"),
    [
        ("zoo", None, "draft_model"),
        ("zoo", {}, "draft_model"),
        ("zoo", {"num_speculative_tokens": 3}, "draft_model"),
        ("zoo", {"method": "off"}, "off"),
        ("zoo", {"method": "ngram"}, "ngram"),
        ("zoo:target", None, "draft_model"),
        ("zoo:target-prose", None, "draft_model"),
        ("zoo:target-code", {"num_speculative_tokens": 3}, "draft_model"),
        ("zoo:target-code", {"method": "off"}, "off"),
        ("zoo:drafter", None, "off"),
        ("zoo:math", None, "off"),
        ("folder", None, "off"),
        ("folder", {}, "off"),
        ("folder", {"model": "zoo:drafter"}, "draft_model"),
    ],
)
def test_method(model: str, given: dict[str, Any] | None, method: str) -> None:
    found = _speculation(EngineConfig.build({"model": model, "speculative_config": given}))
    assert found.method == method
    assert found.num_speculative_tokens == (given or {}).get("num_speculative_tokens", "auto")


def test_every_target_of_the_zoo_has_the_familys_drafter_and_its_tokens() -> None:
    """Its targets are the one that is shipped whole and every adapter on it; drafters have no drafter."""
    targets = [member for member in zoo_members() if member.startswith("target")]
    assert {"target", "target-prose", "target-code"} <= set(targets)
    for member in zoo_members():
        drafter = default_drafter(f"zoo:{member}")
        assert drafter == ("zoo:drafter" if member in targets else None)
        if drafter is not None:
            assert same_tokens(base_folder(resolve(f"zoo:{member}")), resolve(drafter))


def test_a_variant_of_the_target_is_drafted_for() -> None:
    with LLM("zoo:target-prose", measure_at_start=False, kv_cache_memory_bytes=1 << 22) as llm:
        params = SamplingParams(max_tokens=12, temperature=0)
        (found,) = llm.generate("It was a dark night, and", params, Speculation(length=4))
    assert found.stats.accepted_by_drafter == {"draft_model": found.stats.accepted}
    assert found.stats.accepted > 0


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
