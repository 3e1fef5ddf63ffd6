"""The acceptance methods of an engine: each is made when a request first asks for the method."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass

from cospec.plugins import Rule
from cospec.registry import RULES


class AcceptanceMethods(Mapping[str, Rule]):
    """Name to acceptance method, of cospec and of plug-ins. A plug-in is loaded for its first request.

    Attributes:
        chains_only: the names of methods that judge chains and no trees.
        relaxed: the names of methods that do not follow the law exactly.
    """

    def __init__(self) -> None:
        self._made: dict[str, Rule] = {}
        self.chains_only: Container[str] = _Those(self, lambda rule: not rule.trees)
        self.relaxed: Container[str] = _Those(self, lambda rule: not rule.exact)

    def __getitem__(self, name: str) -> Rule:
        found = self._made.get(name)
        if found is None:
            if not RULES.knows(name):
                raise KeyError(name)
            found = self._made[name] = RULES.load(name)()
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(RULES.names)

    def __len__(self) -> int:
        return len(RULES.names)


@dataclass(frozen=True, slots=True)
class _Those(Container[str]):
    """The names of the methods that something holds of."""

    methods: AcceptanceMethods
    holds: Callable[[Rule], bool]

    def __contains__(self, name: object) -> bool:
        return RULES.knows(name) and self.holds(self.methods[str(name)])
