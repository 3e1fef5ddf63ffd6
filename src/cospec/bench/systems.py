"""What can be compared: a small protocol, a table of kinds, and how a command line names one.

A system is given as ``NAME=WHAT``. ``WHAT`` is a URL of an OpenAI-compatible server, a JSON object, the path of a file
that holds one, or an entry of ``SYSTEMS`` by itself. The object's ``system`` is such an entry, and ``cospec``, our
engine in this process, when absent; its other keys belong to that entry. ``model`` is the command's own unless it is
among them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cospec.bench.counters import SpeculationCounters
from cospec.bench.timing import Params, Prompt, Timing
from cospec.config import read_json
from cospec.errors import InvalidInput
from cospec.registry import Declares, PluginTable

# A new kind of system is one file and one line here.
SYSTEMS: PluginTable[Buildable] = PluginTable(
    "system",
    {
        "cospec": "cospec.bench.engine_system:EngineSystem",
        "url": "cospec.bench.url_system:UrlSystem",
        "transformers": "cospec.bench.transformers_systems:GENERATE",
        "transformers-assisted": "cospec.bench.transformers_systems:ASSISTED",
        "transformers-lookup": "cospec.bench.transformers_systems:LOOKUP",
        "transformers-continuous": "cospec.bench.transformers_systems:CONTINUOUS",
    },
    Declares("system", "cospec.bench.systems:Buildable"),
)


class System(Protocol):
    """Something that completes prompts. ``SYSTEMS`` names classes with ``build`` that make one."""

    name: str

    def start(self) -> None:
        """Load models or connect; nothing of it is timed."""

    def run(self, prompts: Sequence[Prompt], params: Params) -> list[Timing]:
        """Complete all ``prompts`` at once; one timing each, in their order, on a clock that starts at the call.

        A request that fails is a timing with ``error``; it does not end the others. Token counts are left at 0.
        """

    def counters(self) -> SpeculationCounters | None:
        """Speculation counters since the start; None where the system reports none."""

    def stop(self) -> None:
        """Give back memory and connections. May be followed by ``start``."""


class Buildable(Protocol):
    """What an entry of ``SYSTEMS`` is: a class that makes a system of its options."""

    def build(self, name: str, options: Mapping[str, Any]) -> System:
        """Check ``options``, which always hold ``model``; load nothing.

        Raises:
            InvalidInput: an option that is unknown or outside its bounds.
        """


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """A system as it was asked for; stored with the results."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, model: str) -> SystemSpec:
        """Read ``NAME=WHAT``; a bare URL is its own name.

        Raises:
            InvalidInput: something else, or a kind that is not in the table.
        """
        name, what = _split(text)
        if what.startswith(("http://", "https://")):
            return cls(name, "url", {"model": model, "url": what})
        options = {"model": model, **(read_json(what, f"system {name}") if what.startswith("{") else _file(name, what))}
        kind = options.pop("system", "cospec")
        SYSTEMS.check(kind)
        return cls(name, kind, options)

    def build(self) -> System:
        """The system itself, not started."""
        return SYSTEMS.load(self.kind).build(self.name, self.options)


def _split(text: str) -> tuple[str, str]:
    if text.startswith(("http://", "https://")):
        return text, text
    found = re.fullmatch(r"([^={}\s]+)=(.+)", text, re.DOTALL)
    if found is None:
        raise InvalidInput("system", text, "NAME=WHAT, where WHAT is a URL, a JSON object or a file that holds one")
    return found[1], found[2].strip()


def _file(name: str, path: str) -> dict[str, Any]:
    if path in SYSTEMS:  # a kind without options may stand by its word alone
        return {"system": path}
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        allowed = "a URL, a JSON object, a readable file that holds one, or one of " + ", ".join(SYSTEMS)
        raise InvalidInput(f"system {name}", path, allowed) from None
    return read_json(text, f"system {name}")


def as_json(spec: SystemSpec) -> str:
    """The spec as one line, for reports; without the key to somebody's server."""
    shown = {key: "..." if key == "api_key" else value for key, value in spec.options.items()}
    return json.dumps({"system": spec.kind, **shown}, sort_keys=True)
