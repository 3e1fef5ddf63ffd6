"""The acceptance methods of an engine; each is created when a request first asks for the method."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass

from cospec.core.plugins import AcceptanceMethod
from cospec.registry import ACCEPTANCE_METHODS


class AcceptanceMethods(Mapping[str, AcceptanceMethod]):
    """Maps names to acceptance methods of cospec and of plug-ins. A plug-in is loaded for its first request.

    Attributes:
        chains_only: names of methods that verify chains only.
        inexact_methods: names of methods that do not follow the target distribution exactly.
    """

    def __init__(self) -> None:
        self._made: dict[str, AcceptanceMethod] = {}
        self.chains_only: Container[str] = _MethodNames(self, lambda acceptance_method: not acceptance_method.trees)
        self.inexact_methods: Container[str] = _MethodNames(self, lambda acceptance_method: not acceptance_method.exact)

    def __getitem__(self, name: str) -> AcceptanceMethod:
        found = self._made.get(name)
        if found is None:
            if not ACCEPTANCE_METHODS.knows(name):
                raise KeyError(name)
            found = self._made[name] = ACCEPTANCE_METHODS.load(name)()
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(ACCEPTANCE_METHODS.names)

    def __len__(self) -> int:
        return len(ACCEPTANCE_METHODS.names)


@dataclass(frozen=True, slots=True)
class _MethodNames(Container[str]):
    """The names of the methods with a property."""

    methods: AcceptanceMethods
    holds: Callable[[AcceptanceMethod], bool]

    def __contains__(self, name: object) -> bool:
        return ACCEPTANCE_METHODS.knows(name) and self.holds(self.methods[str(name)])
