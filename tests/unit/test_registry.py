"""Plug-ins that programs register and packages offer: what is checked, what is refused, and what is loaded when."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import cospec
from cospec.acceptance.match import Match
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.synthetic import SyntheticDrafter
from cospec.errors import InvalidInput
from cospec.policies.fixed import Fixed
from cospec.registry import ACCEPTANCE_METHODS, DRAFTERS, POLICIES, Declares, PluginTable

GROUP = "cospec.test_things"
REGISTER = {"drafter": cospec.register_drafter, "policy": cospec.register_policy}
REGISTER["acceptance method"] = cospec.register_acceptance_method
WHOLE: dict[str, tuple[PluginTable[Any], type[Any], tuple[str, ...]]] = {
    "drafter": (
        DRAFTERS,
        SyntheticDrafter,
        ("Options", "samples", "drafts_ahead", "reads_hidden_states", "learns", "build", "propose"),
    ),
    "policy": (
        POLICIES,
        Fixed,
        ("Options", "needs_latency", "learns", "build", "plan", "trim", "observe", "gauges"),
    ),
    "acceptance method": (
        ACCEPTANCE_METHODS,
        Match,
        ("name", "exact", "needs_probs", "trees", "stream_kind", "verify"),
    ),
}


def without(whole: type[Any], attribute: str) -> type[Any]:
    """The class without one of its attributes."""
    own = {key: value for key, value in vars(whole).items() if not key.startswith("_") and key != attribute}
    return type("Own", whole.__bases__, own)


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    before = [(table, table.names) for table in (DRAFTERS, POLICIES, ACCEPTANCE_METHODS)]
    yield
    for table, names in before:
        for name in set(table.names) - set(names):
            table.unregister(name)


@pytest.mark.parametrize("kind", WHOLE)
def test_a_class_that_lacks_an_attribute_is_refused_by_its_name(kind: str) -> None:
    table, whole, needed = WHOLE[kind]
    for attribute in needed:
        expected = f"^{kind} 'mine' is .*:Own, which does not declare {attribute}"
        with pytest.raises(InvalidInput, match=expected):
            REGISTER[kind]("mine", without(whole, attribute))
    assert not table.knows("mine")


@pytest.mark.parametrize("kind", WHOLE)
def test_a_registered_class_can_be_named(kind: str) -> None:
    table, whole, _ = WHOLE[kind]
    own = type("Own", (whole,), {"name": "mine"})
    REGISTER[kind]("mine", own)
    assert table.load("mine") is own
    assert "mine" in table.names
    again = type("Again", (whole,), {"name": "mine"})
    REGISTER[kind]("mine", again)
    assert table.load("mine") is again


@pytest.mark.parametrize("kind", WHOLE)
@pytest.mark.parametrize("name", ["auto", "off", "ngram", "fixed", "match"])
def test_a_name_that_is_taken_is_refused(kind: str, name: str) -> None:
    table, whole, _ = WHOLE[kind]
    if name in table or name in ("auto", "off"):
        with pytest.raises(InvalidInput, match=f"{kind} name is '{name}'"):
            REGISTER[kind](name, type("Own", (whole,), {"name": name}))


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"samples": "no"}, "whose samples is 'no'"),
        ({"capabilities": 5}, "whose capabilities is 5"),
        ({"propose": 5}, "whose propose cannot be called"),
        ({"Options": dict}, "whose Options is <class 'dict'>"),
        ({"stream_kinds": "draft"}, "whose stream_kinds is 'draft'"),
    ],
)
def test_a_value_of_another_type_is_refused(changed: dict[str, Any], expected: str) -> None:
    with pytest.raises(InvalidInput, match=expected):
        cospec.register_drafter("mine", type("Own", (NgramDrafter,), changed))


def test_acceptance_method_name() -> None:
    with pytest.raises(InvalidInput, match="whose name is 'match'"):
        cospec.register_acceptance_method("mine", type("Own", (Match,), {}))
    with pytest.raises(InvalidInput, match="allowed is a text"):
        cospec.register_drafter(cast(Any, 5), NgramDrafter)


def capabilities(folder: Path, package: str, **entries: str) -> None:
    """Write what pip leaves of a package: its metadata with entry points."""
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (info / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def table() -> PluginTable[Any]:
    own = {"own": "cospec.acceptance.match:Match"}
    return PluginTable("thing", own, Declares("thing", "harness.plugin:Thing"), GROUP)


def test_a_package_is_loaded_when_its_name_is_asked_for(packages: Path) -> None:
    (packages / "offering.py").write_text("class Thing:\n    exact = True\n    def verify(self): ...\n")
    capabilities(packages, "offering", theirs="offering:Thing")
    made = table()
    assert made.names == ["own", "theirs"] and made.installed == ["theirs"] and list(made) == ["own"]
    made.check("theirs")
    assert "offering" not in sys.modules
    assert made.load("theirs").exact and made.load("theirs") is made.load("theirs")
    with pytest.raises(InvalidInput, match="thing is 'other'"):
        made.load("other")
    with pytest.raises(InvalidInput, match="thing name is 'theirs'"):
        made.register("theirs", Match)


def test_broken_package_is_named(packages: Path) -> None:
    (packages / "raising.py").write_text("raise RuntimeError('two\\nlines')\n")
    (packages / "lacking.py").write_text("class Thing:\n    exact = True\n")
    capabilities(
        packages, "raising", a="raising:Thing", b="no_such_module:Thing", c="lacking:Nothing", d="lacking:Thing"
    )
    made = table()
    assert made.load("own") is Match
    for name, expected in (
        ("a", r"'a' of package raising, which cannot be loaded \(RuntimeError: two lines\)"),
        ("b", r"'b' of package raising, which cannot be loaded \(ModuleNotFoundError: .*no_such_module"),
        ("c", r"'c' of package raising, which cannot be loaded \(AttributeError"),
        ("d", r"thing 'd' is lacking:Thing, which does not declare verify"),
    ):
        with pytest.raises(InvalidInput, match=expected):
            made.load(name)


def test_names_that_two_have(packages: Path, caplog: pytest.LogCaptureFixture) -> None:
    capabilities(packages, "first", twice="a:A", own="a:A")
    capabilities(packages, "second", twice="b:B")
    made = table()
    assert made.names == ["own", "twice"] and made.load("own") is Match
    assert "thing 'own' of package first" in caplog.text
    with pytest.raises(InvalidInput, match=r"which packages (first and second|second and first) offer"):
        made.load("twice")
