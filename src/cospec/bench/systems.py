"""The systems of a comparison: an interface, a table of kinds, and the parsing of command-line names.

A system is given as ``NAME=WHAT``. ``WHAT`` is the URL of an OpenAI-compatible server, a JSON object, the path of a
JSON or YAML file, or an entry of ``SYSTEMS``. The object's ``system`` is such an entry, by default ``cospec``, the
engine in this process. The other keys are options of the entry. ``model`` defaults to the command's model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from cospec.bench.counters import SpeculationCounters
from cospec.bench.request_record import Params, Prompt, Timing
from cospec.config import read_file, read_json
from cospec.errors import InvalidInput
from cospec.registry import Declares, PluginTable

# A new kind of system is one file and one line here.
SYSTEMS: PluginTable[Buildable] = PluginTable(
    "system",
    {
        "cospec": "cospec.bench.engine_system:EngineSystem",
        "url": "cospec.bench.url_system:UrlSystem",
        "llama-cpp": "cospec.bench.llama_cpp_system:LlamaCppSystem",
        "transformers": "cospec.bench.transformers_systems:GENERATE",
        "transformers-assisted": "cospec.bench.transformers_systems:ASSISTED",
        "transformers-lookup": "cospec.bench.transformers_systems:LOOKUP",
        "transformers-continuous": "cospec.bench.transformers_systems:CONTINUOUS",
    },
    Declares("system", "cospec.bench.systems:Buildable"),
)


class System(Protocol):
    """A system that completes prompts. ``SYSTEMS`` names classes with ``build``."""

    name: str

    def start(self) -> None:
        """Load models or connect, untimed."""

    def run(self, prompts: Sequence[Prompt], params: Params) -> list[Timing]:
        """Complete all ``prompts`` together; return one timing each, in order, on a clock that starts at the call.

        A failed request is a timing with ``error`` and does not end the others. Token counts stay 0.
        """

    def counters(self) -> SpeculationCounters | None:
        """Return speculation counters since the start; None if not reported."""

    def cost_per_hour(self) -> float:
        """Return the declared price of the machines that run now; 0 if none is declared."""

    def stop(self) -> None:
        """Free memory and connections. ``start`` may follow."""


class Buildable(Protocol):
    """An entry of ``SYSTEMS``: a class that builds a system from its options."""

    def build(self, name: str, options: Mapping[str, Any]) -> System:
        """Check ``options``, which include ``model``; load nothing.

        Raises:
            InvalidInput: an option is unknown or out of bounds.
        """


@dataclass(frozen=True, slots=True)
class SystemSpec:
    """A system as given on the command line; stored with the results."""

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, model: str) -> SystemSpec:
        """Parse ``NAME=WHAT``; a bare URL is its own name.

        Raises:
            InvalidInput: the text has another form, or the kind is not in the table.
        """
        name, what = _split(text)
        if what.startswith(("http://", "https://")):
            return cls(name, "url", {"model": model, "url": what})
        options = {"model": model, **(read_json(what, f"system {name}") if what.startswith("{") else _file(name, what))}
        kind = options.pop("system", "cospec")
        SYSTEMS.check(kind)
        return cls(name, kind, options)

    def build(self) -> System:
        """Build the system without starting."""
        return SYSTEMS.load(self.kind).build(self.name, self.options)


def _split(text: str) -> tuple[str, str]:
    if text.startswith(("http://", "https://")):
        return text, text
    found = re.fullmatch(r"([^={}\s]+)=(.+)", text, re.DOTALL)
    if found is None:
        raise InvalidInput(
            "system", text, "NAME=WHAT, where WHAT is a URL, a JSON object, a JSON or YAML file, or a kind"
        )
    return found[1], found[2].strip()


def _file(name: str, path: str) -> dict[str, Any]:
    if path in SYSTEMS:  # a kind without options may stand alone
        return {"system": path}
    if not Path(path).is_file():
        allowed = "a URL, a JSON object, a JSON or YAML file, or one of " + ", ".join(SYSTEMS)
        raise InvalidInput(f"system {name}", path, allowed)
    try:
        return read_file(Path(path))
    except InvalidInput as error:
        raise error.within(f"system {name}") from None


def as_json(spec: SystemSpec) -> str:
    """Return the spec as one line for reports, without API keys."""
    shown = {key: "..." if key == "api_key" else value for key, value in spec.options.items()}
    return json.dumps({"system": spec.kind, **shown}, sort_keys=True)
