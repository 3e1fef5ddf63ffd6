"""A pool's options, and its drafters' among them, with errors that name the drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field

from cospec.core.interfaces import DrafterBuildContext
from cospec.core.plugins import Drafter
from cospec.errors import InvalidInput, ModelError, words
from cospec.options import Options, parse
from cospec.registry import DRAFTERS

WHERE = "speculative_config.drafters"
RESERVED = ("target", "bonus")  # who else may have written a token


class PoolOptions(Options):
    """How drafters work together.

    Attributes:
        combiner: how their drafts become one.
        routing: who works for which request.
        drafters: each with a ``name``, a ``method`` and that method's own options.
        deadline: seconds that a round waits for a drafter; None waits.
        at_most: drafters that take part for a request in a round, those that cost nothing not counted, unless the
            policy says how many; None leaves it to the routing.
    """

    combiner: str = "fuse"
    routing: str = "hedge"
    drafters: list[dict[str, Any]] = Field(
        default=[{"name": "model", "method": "draft_model"}, {"name": "copy", "method": "ngram"}], min_length=1
    )
    deadline: float | None = Field(default=None, gt=0, strict=False)
    at_most: int | None = Field(default=None, ge=1)


@dataclass(frozen=True, slots=True)
class Named:
    """A drafter that was built, under the name that the configuration gives it."""

    name: str
    drafter: Drafter


def build_drafters(options: PoolOptions, build_context: DrafterBuildContext) -> list[Named]:
    """All drafters of the pool.

    Raises:
        InvalidInput: one sentence that says which drafter is wrong.
        ModelError: a drafter's model cannot be loaded; the sentence says whose.
    """
    built: list[Named] = []
    for number, given in enumerate(options.drafters):
        name = given["name"] if "name" in given else _method(given, f"{WHERE}[{number}].method")
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            raise InvalidInput(f"{WHERE}[{number}].name", name, "a name of printable characters")
        if name in RESERVED or name in (each.name for each in built):
            raise InvalidInput(f"{WHERE}[{number}].name", name, "a name that nothing else has")
        try:
            built.append(Named(name, _build(given, build_context)))
        except InvalidInput as error:
            raise error.within(called(number, name)) from None
        except ModelError as error:
            raise ModelError(f"{called(number, name)}: {error}") from None
    return built


def called(number: int, name: object) -> str:
    """How errors call a drafter of the pool."""
    return f"{WHERE}[{number}] {name!r}"


def check_distributions(drafters: list[Named], combiner: str) -> None:
    """Raise ``InvalidInput`` for a drafter that draws whole drafts, from which no mixture can be made."""
    for number, each in enumerate(drafters):
        if each.drafter.samples and each.drafter.stepper() is None:
            allowed = f"one that can be led token by token or draws nothing, for combiner {combiner!r}"
            raise InvalidInput(f"{WHERE}[{number}]", words(f"{each.name!r}, which draws its drafts by itself"), allowed)


def _build(given: Mapping[str, Any], build_context: DrafterBuildContext) -> Drafter:
    own = {key: value for key, value in given.items() if key not in ("name", "method")}
    cls = DRAFTERS.load(_method(given, "method"))
    drafter: Drafter = cls.build(parse(cls.Options, own), build_context)
    return drafter


def _method(given: Mapping[str, Any], field: str) -> str:
    """A drafter's method; raises ``InvalidInput`` about ``field`` where it is none, or a pool."""
    method = given.get("method")
    if isinstance(method, str) and DRAFTERS.knows(method) and not DRAFTERS.load(method).is_pool:
        return method
    allowed = f"one of {', '.join(DRAFTERS.names)}, but no pool"
    raise InvalidInput(field, words("missing") if method is None else method, allowed)
