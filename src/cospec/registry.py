"""What can be named in a configuration: lazy tables from a name to a class.

A new drafter, rule, blend, policy or round is one file and one line here. What a class needs or offers stands on the
class as data (``Rule.noise``, ``Rule.trees``, ``Drafter.samples``), so that nobody asks for its name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

from cospec.errors import InvalidInput


class Table(Mapping[str, str]):
    """Names to ``module:Class``, imported when first asked for."""

    def __init__(self, field: str, entries: Mapping[str, str]) -> None:
        self._field, self._entries = field, dict(entries)

    def __getitem__(self, name: str) -> str:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def load(self, name: str) -> Any:
        """The class of that name.

        Raises:
            InvalidInput: the table has no such name.
        """
        self.check(name)
        module, _, attribute = self._entries[name].partition(":")
        return getattr(import_module(module), attribute)

    def check(self, name: object, *also: str, field: str | None = None) -> None:
        """Raise ``InvalidInput``, about ``field`` or the table's own, unless ``name`` is in it or among ``also``."""
        if not isinstance(name, str) or (name not in self._entries and name not in also):
            raise InvalidInput(field or self._field, name, "one of " + ", ".join([*self._entries, *also]))


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
