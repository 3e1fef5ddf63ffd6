"""Every class in every table declares all that the interface of the table has, with values of the right types."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from cospec.acceptance.match import Match
from cospec.bench.systems import SYSTEMS
from cospec.core.plugin_base import AcceptanceMethod
from cospec.core.types import Draft, TargetProbs, VerifyResult
from cospec.errors import InvalidInput
from cospec.registry import (
    ACCEPTANCE_METHODS,
    ATTENTION_BACKENDS,
    BLENDS,
    COMBINERS,
    DRAFTERS,
    EXECUTION_MODES,
    EXECUTORS,
    LOGITS_PROCESSORS,
    POLICIES,
    ROUTINGS,
    WEIGHT_FORMATS,
    PluginTable,
)
from cospec.rng.random_streams import RandomStreams, StreamKind
from harness.plugin import every

TABLES: dict[str, PluginTable[Any]] = {
    "drafters": DRAFTERS,
    "combiners": COMBINERS,
    "routings": ROUTINGS,
    "acceptance_methods": ACCEPTANCE_METHODS,
    "logits_processors": LOGITS_PROCESSORS,
    "policies": POLICIES,
    "blends": BLENDS,
    "execution_modes": EXECUTION_MODES,
    "executors": EXECUTORS,
    "systems": SYSTEMS,
    "weight_formats": WEIGHT_FORMATS,
    "attention_backends": ATTENTION_BACKENDS,
}
REQUIRED = {  # what an interface gives no default for, and a value of another type
    "drafters": ("samples", "no"),
    "combiners": ("is_stepwise", None),
    "routings": ("weighs", 1.0),
    "acceptance_methods": ("stream_kind", "target"),
    "logits_processors": ("masks", "yes"),
    "policies": ("needs_latency", "yes"),
    "blends": ("Options", dict),
    "execution_modes": ("learns", "often"),
    "executors": ("builds_inline", "no"),
    "systems": ("build", "nothing"),
    "weight_formats": ("encode", 8),
    "attention_backends": ("by_head", None),
}
OVERRIDDEN = {  # what an interface gives a default for, and a value of another type
    "drafters": ("capabilities", {"costless": True}),
    "acceptance_methods": ("native_id", "match"),
    "policies": ("keeps_drafts", "always"),
    "weight_formats": ("kernel", 1),
    "attention_backends": ("capture_entries", "all"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_every_class_declares_its_interface(kind: str) -> None:
    table = TABLES[kind]
    names = every(table)
    assert names
    for name in names:
        table.declares.check(name, table.load(name))


@pytest.mark.parametrize("kind", TABLES)
def test_a_declaration_of_another_type_is_found(kind: str) -> None:
    table = TABLES[kind]
    name = next(iter(table))
    for attribute, value in [REQUIRED[kind], *([OVERRIDDEN[kind]] if kind in OVERRIDDEN else [])]:
        wrong = type("Wrong", (table.load(name),), {attribute: value})
        with pytest.raises(InvalidInput, match=rf"Wrong, whose {attribute} "):
            table.declares.check(name, wrong)


@pytest.mark.parametrize("kind", TABLES)
def test_a_missing_declaration_is_found(kind: str) -> None:
    table = TABLES[kind]
    with pytest.raises(InvalidInput, match=r"Empty, which does not declare .*; allowed is a subclass of cospec\."):
        table.declares.check("empty", type("Empty", (), {}))


def test_native_code_runs_no_subclass_of_a_known_class() -> None:
    table: PluginTable[Any] = ACCEPTANCE_METHODS
    native = [table.load(name) for name in table if table.load(name).native_id is not None]
    assert len({each.native_id for each in native}) == len(native) >= 3
    for each in native:
        changed: Any = type("Changed", (each,), {})
        same: Any = type("Same", (each,), {"native_id": each.native_id})
        assert changed.native_id is None
        assert same.native_id == each.native_id


def test_native_code_drafts_for_no_policy_that_cuts_drafts() -> None:
    for name in POLICIES:
        base = POLICIES.load(name)
        same: Any = type("Same", (base,), {})
        cuts: Any = type("Cuts", (base,), {"trim": lambda self, drafts: drafts[:1]})
        assert same.keeps_drafts == base.keeps_drafts
        assert not cuts.keeps_drafts


def test_a_rule_that_changes_how_match_judges_is_obeyed() -> None:
    """``supports`` reads ``native_id``, so a subclass goes through its own ``verify``."""
    from cospec.native.acceptance import NO_METHOD, supports

    class Refuses(Match):
        name: ClassVar[str] = "refuses"

        def verify(self, draft: Draft, target: TargetProbs, draws: RandomStreams) -> VerifyResult:
            return VerifyResult((), target.draw(0, draft.base_len, draws), bonus=False)

    assert supports(Match()) is None and supports(Refuses()) == NO_METHOD
    assert issubclass(Refuses, AcceptanceMethod) and Refuses.stream_kind is StreamKind.TARGET
