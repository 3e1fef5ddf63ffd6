"""What can be named in a configuration: lazy tables from a name to a class.

A new drafter, rule, blend, policy or round is one file and one line here. What a class needs or offers stands on the
class as data (``Rule.noise``, ``Rule.trees``, ``Drafter.samples``), so that nobody asks for its name.

A plug-in in a package of its own needs no line here. The package names the class in an entry point of the table's
group, or a program registers the class; either way the table checks what the class declares.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from cospec.draws import Purpose
from cospec.errors import InvalidInput, words
from cospec.options import Options
from cospec.types import Offer

RESERVED = ("auto", "off")  # names that have a meaning of their own in configurations

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Declares:
    """What a class has to declare before a table takes the class.

    Attributes:
        kind: what errors call an entry.
        values: attributes, and the types of their values.
        methods: attributes that can be called.
        optional: attributes that may be left out, and the types of their values.
        named: whether ``name`` has to be the name in the table.
    """

    kind: str
    values: Mapping[str, type] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    optional: Mapping[str, type] = field(default_factory=dict)
    named: bool = False

    def check(self, name: str, made: object) -> None:
        """Raise ``InvalidInput`` about the first attribute of ``made`` that is missing or of another type."""
        problem = self._problem(name, made)
        if problem is not None:
            given = words(f"{_described(made)}, {problem}")
            values = [f"{attribute} ({kind.__name__})" for attribute, kind in self.values.items()]
            raise InvalidInput(
                f"{self.kind} {name!r}", given, f"a class that declares {', '.join([*values, *self.methods])}"
            )

    def _problem(self, name: str, made: object) -> str | None:
        for attribute in (*self.values, *self.methods):
            if not hasattr(made, attribute):
                return f"which does not declare {attribute}"
        kinds = {**self.values, **self.optional}
        found = {attribute: getattr(made, attribute) for attribute in kinds if hasattr(made, attribute)}
        for attribute, value in found.items():
            if not isinstance(value, kinds[attribute]):
                return f"whose {attribute} is {value!r}"
        for attribute in self.methods:
            if not callable(getattr(made, attribute)):
                return f"whose {attribute} cannot be called"
        if "Options" in found and not issubclass(found["Options"], Options):
            return "whose Options is no cospec.options.Options"
        if self.named and found["name"] != name:
            return f"whose name is {found['name']!r}"
        return None


class Table(Mapping[str, str]):
    """Names to ``module:Class``, imported when first asked for.

    As a mapping the table holds what comes with cospec. ``names`` adds what installed packages offer as entry points of
    ``group``, and what programs registered.
    """

    def __init__(
        self, field: str, entries: Mapping[str, str], declares: Declares | None = None, group: str | None = None
    ) -> None:
        self._field, self._entries, self._group = field, dict(entries), group
        self._declares = declares or Declares("entry")
        self._registered: dict[str, Any] = {}
        self._loaded: dict[str, Any] = {}  # entry points that were asked for

    def __getitem__(self, name: str) -> str:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def names(self) -> list[str]:
        """All that can be named."""
        return [*self._entries, *self._offered, *self._registered]

    @property
    def installed(self) -> list[str]:
        """What packages other than cospec offer."""
        return list(self._offered)

    def knows(self, name: object) -> bool:
        """Whether ``name`` can be named."""
        return isinstance(name, str) and (name in self._entries or name in self._registered or name in self._offered)

    def load(self, name: str) -> Any:
        """The class of that name.

        Raises:
            InvalidInput: the table has no such name, or the package that offers the name cannot be loaded.
        """
        self.check(name)
        if name in self._registered:
            return self._registered[name]
        if name not in self._entries:
            return self._load_offered(name)
        module, _, attribute = self._entries[name].partition(":")
        return getattr(import_module(module), attribute)

    def check(self, name: object, *also: str, field: str | None = None) -> None:
        """Raise ``InvalidInput``, about ``field`` or the table's own, unless ``name`` is in it or among ``also``."""
        if name not in also and not self.knows(name):
            raise InvalidInput(field or self._field, name, "one of " + ", ".join([*self.names, *also]))

    def register(self, name: str, made: Any) -> None:
        """Let ``name`` mean the class ``made``. A later registration of the same name replaces an earlier one.

        Raises:
            InvalidInput: cospec or an installed package has the name, or the class lacks what the table asks for.
        """
        kind = self._declares.kind
        if not isinstance(name, str) or not name.strip():
            raise InvalidInput(f"{kind} name", name, "a text")
        if name in RESERVED or name in self._entries or name in self._offered:
            raise InvalidInput(f"{kind} name", name, f"a name that no {kind} of cospec or of an installed package has")
        self._declares.check(name, made)
        self._registered[name] = made

    @cached_property
    def _offered(self) -> dict[str, list[EntryPoint]]:
        """Entry points by name, not loaded."""
        found: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=self._group) if self._group else ():
            if entry.name in self._entries or entry.name in RESERVED:
                kind, package = self._declares.kind, _package(entry)
                log.warning("%s %r of package %s is left out: cospec has that name", kind, entry.name, package)
            else:
                found.setdefault(entry.name, []).append(entry)
        return found

    def _load_offered(self, name: str) -> Any:
        if name in self._loaded:
            return self._loaded[name]
        entry, *others = self._offered[name]
        if others:
            packages = " and ".join(_package(each) for each in (entry, *others))
            raise InvalidInput(
                self._field, words(f"{name!r}, which packages {packages} offer"), "offered by one package"
            )
        try:
            made = entry.load()
        except Exception as error:  # whatever the code of another package raises
            raised = f"{type(error).__name__}: {' '.join(str(error).split())}"
            given = words(f"{name!r} of package {_package(entry)}, which cannot be loaded ({raised})")
            raise InvalidInput(self._field, given, "a plug-in that Python can import") from error
        self._declares.check(name, made)
        self._loaded[name] = made
        return made


def import_plugins(modules: Iterable[str]) -> None:
    """Import modules that register plug-ins.

    Raises:
        InvalidInput: there is no such module.
    """
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise InvalidInput("plugins", words(f"{name} ({error})"), "modules that Python finds") from None


def _package(entry: EntryPoint) -> str:
    """The package that offers an entry point."""
    return entry.dist.name if entry.dist is not None else entry.module


def _described(made: object) -> str:
    return f"{made.__module__}:{made.__qualname__}" if isinstance(made, type) else repr(made)


DRAFTERS = Table(
    "speculative_config.method",
    {
        "draft_model": "cospec.drafters.model:ModelDrafter",
        "ngram": "cospec.drafters.ngram:NgramDrafter",
        "heads": "cospec.drafters.heads:HeadsDrafter",
        "suffix": "cospec.drafters.suffix:SuffixDrafter",
        "synthetic": "cospec.drafters.synthetic:SyntheticDrafter",
        "pool": "cospec.drafters.pool.pool:PoolDrafter",
    },
    Declares(
        "drafter",
        values={"Options": type, "samples": bool, "drafts_ahead": bool, "reads_states": bool, "learns": bool},
        methods=("build", "propose", "commit", "free"),
        optional={"offer": Offer, "keeps_cache": bool},
    ),
    "cospec.drafters",
)
COMBINERS = Table(
    "speculative_config.combiner",
    {
        "union": "cospec.drafters.combiners.union:Union",
        "vote": "cospec.drafters.combiners.vote:Vote",
        "fuse": "cospec.drafters.combiners.fuse:Fuse",
        "mix": "cospec.drafters.combiners.mix:Mix",
    },
)
ROUTINGS = Table(
    "speculative_config.routing",
    {
        "hedge": "cospec.drafters.routing.hedge:Hedge",
        "explore": "cospec.drafters.routing.explore:Explore",
        "all": "cospec.drafters.routing.everyone:Everyone",
    },
)
RULES = Table(
    "speculative_config.rule",
    {
        "match": "cospec.rules.match:Match",
        "rejection": "cospec.rules.rejection:Rejection",
        "block": "cospec.rules.block:Block",
        "recursive": "cospec.rules.recursive:Recursive",
        "typical": "cospec.rules.typical:Typical",
    },
    Declares(
        "acceptance method",
        values={"name": str, "exact": bool, "reads_law": bool, "trees": bool, "noise": Purpose},
        methods=("judge",),
        named=True,
    ),
    "cospec.acceptance_methods",
)
POLICIES = Table(
    "speculative_config.policy",
    {
        "fixed": "cospec.policies.fixed:Fixed",
        "off": "cospec.policies.off:Off",
        "goodput": "cospec.policies.goodput:Goodput",
        "slope": "cospec.policies.slope:Slope",
        "confidence": "cospec.policies.confidence:Confidence",
        "milp": "cospec.policies.milp:Milp",
    },
    Declares(
        "policy",
        values={"Options": type, "reads_costs": bool, "learns": bool},
        methods=("build", "plan", "trim", "observe", "gauges"),
        optional={"keeps_drafts": bool},
    ),
    "cospec.policies",
)
BLENDS = Table(
    "law.blend",
    {
        "single": "cospec.blends.single:Single",
        "weighted": "cospec.blends.weighted:Weighted",
        "contrastive": "cospec.blends.contrastive:Contrastive",
        "realign": "cospec.blends.realign:Realign",
        "adaptive": "cospec.blends.adaptive:Adaptive",
    },
    Declares("blend", values={"Options": type}, methods=("build",)),
    "cospec.blends",
)
ROUNDS = Table(
    "speculative_config.round",
    {
        "auto": "cospec.rounds.auto:Auto",
        "sequential": "cospec.rounds.sequential:Sequential",
        "pipelined": "cospec.rounds.pipelined:Pipelined",
        "draft-ahead": "cospec.rounds.ahead:DraftAhead",
    },
)

register_drafter = DRAFTERS.register
register_acceptance_method = RULES.register
register_policy = POLICIES.register
