"""Options of a pool and of its drafters; errors name the drafter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from cospec.allowed_values import keys
from cospec.core.plugin_base import Drafter
from cospec.drafters.interfaces import DrafterBuildContext
from cospec.errors import InvalidInput, ModelError, words
from cospec.plugin_options import DrafterPlace, Options, parse, unknown_key
from cospec.registry import COMBINERS, DRAFTERS, EXECUTORS, ROUTINGS, PluginTable

WHERE = "speculative_config.drafters"
RESERVED = ("target", "bonus")  # other sources of tokens


class PoolOptions(Options):
    """Options of ``pool``.

    Attributes:
        combiner: how drafts are combined.
        routing: how drafters are chosen per request.
        routing_options: of the routing itself.
        drafters: each with a ``name``, a ``method`` and the method's own options; ``executor``,
            ``cores`` and ``cost_per_hour`` say where the drafter runs.
        deadline: seconds that a step waits for a drafter; None waits without limit.
        at_most: most drafters per request and step, lookups apart; the policy may take fewer. None leaves
            the number to policy and routing.
        token_steps: drafters on nodes draft token by token with the others, a round trip per token; None: only for
            ``mix``, which cannot use whole drafts of drawn tokens.
    """

    combiner: str = "fuse"
    routing: str = "hedge"
    routing_options: dict[str, Any] = Field(default={})
    drafters: list[dict[str, Any]] = Field(
        default=[{"name": "model", "method": "draft_model"}, {"name": "copy", "method": "ngram"}], min_length=1
    )
    deadline: float | None = Field(default=None, gt=0, strict=False)
    at_most: int | None = Field(default=None, ge=1)
    token_steps: bool | None = None

    @field_validator("combiner", "routing")
    @classmethod
    def _check_name(cls, name: str, info: ValidationInfo) -> str:
        table: PluginTable[Any] = COMBINERS if info.field_name == "combiner" else ROUTINGS
        if not table.knows(name):
            raise PydanticCustomError("name", "one of {names}", {"names": ", ".join(table.names)})
        return name

    @model_validator(mode="after")
    def _check_parts(self) -> PoolOptions:
        """Check the options of the routing and of each drafter, which also happens before weights are loaded."""
        parse(ROUTINGS.load(self.routing).Options, self.routing_options, "speculative_config.routing_options.")
        names: list[str] = []
        for number, given in enumerate(self.drafters):
            names.append(_check_drafter(given, f"{WHERE}[{number}].", names))
        return self


@dataclass(frozen=True, slots=True)
class NamedDrafter:
    """A drafter with its configured name."""

    name: str
    drafter: Drafter


def build_drafters(options: PoolOptions, build_context: DrafterBuildContext) -> list[NamedDrafter]:
    """Build all drafters of the pool.

    Raises:
        InvalidInput: a drafter's options do not suit the target or the device; the error names the drafter.
        ModelError: a drafter's model cannot be loaded; the error names the drafter.
    """
    built: list[NamedDrafter] = []
    try:
        _build_each(options, build_context, built)
    except BaseException:
        for each in built:
            each.drafter.close()
        raise
    return built


def _build_each(options: PoolOptions, build_context: DrafterBuildContext, built: list[NamedDrafter]) -> None:
    """Append each drafter of the pool to ``built``."""
    for number, given in enumerate(options.drafters):
        name = given.get("name", given["method"])
        try:
            built.append(NamedDrafter(name, _build({**given, "name": name}, build_context)))
        except InvalidInput as error:
            raise error.within(called(number, name)) from None
        except ModelError as error:
            raise ModelError(f"{called(number, name)}: {error}") from None


def called(number: int, name: object) -> str:
    """Return the name of a drafter in errors."""
    return f"{WHERE}[{number}] {name!r}"


def check_distributions(drafters: Sequence[NamedDrafter], combiner: str, token_steps: bool = True) -> None:
    """Check that every drafter suits a mixture.

    Raises:
        InvalidInput: a drafter draws whole drafts, which have no known distribution.
    """
    for number, each in enumerate(drafters):
        steps = each.drafter.executor is not None and each.drafter.is_stepwise and token_steps
        if each.drafter.samples and not steps and each.drafter.stepper() is None:
            allowed = f"one that drafts token by token inline or on nodes, or draws nothing, for combiner {combiner!r}"
            raise InvalidInput(f"{WHERE}[{number}]", words(f"{each.name!r}, which draws whole drafts"), allowed)


def _check_drafter(given: Mapping[str, Any], where: str, taken: Sequence[str]) -> str:
    """Check a drafter's keys and options, and return its name.

    Args:
        where: prefix of the field names in errors.
        taken: names of earlier drafters.

    Raises:
        InvalidInput: a key, name or value is wrong.
    """
    name = given["name"] if "name" in given else _method(given, f"{where}method")
    if not isinstance(name, str) or not name.isprintable() or not name.strip():
        raise InvalidInput(f"{where}name", name, "a name of printable characters")
    if name in RESERVED or name in taken:
        raise InvalidInput(f"{where}name", name, "a name that nothing else has")
    cls = DRAFTERS.load(_method(given, f"{where}method")).Options
    known = ["method", *keys(DrafterPlace, ()), *keys(cls, ())]
    for key, value in given.items():
        if key not in known:
            raise unknown_key(f"{where}{key}", value, known)
    own, place = _divide(given)
    placed = parse(DrafterPlace, place, where)
    EXECUTORS.check(placed.executor, field=f"{where}executor")
    check_cores(f"{where}cores", placed.cores, placed.executor)
    parse(cls, own, where)
    return name


def _divide(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of a drafter's method, and of its place."""
    place = {key: given[key] for key in DrafterPlace.model_fields if key in given}
    return {key: value for key, value in given.items() if key not in ("method", *place)}, place


def _build(given: Mapping[str, Any], build_context: DrafterBuildContext) -> Drafter:
    own, place = _divide(given)
    return build_context.build_drafter(given["method"], own, parse(DrafterPlace, place))


def check_cores(field: str, cores: Sequence[int], executor: str) -> None:
    """Raise ``InvalidInput`` about ``field`` if processors are reserved for an executor that takes none."""
    if cores and not EXECUTORS.load(executor).takes_cores:
        takers = " or ".join(repr(name) for name in EXECUTORS.names if EXECUTORS.load(name).takes_cores)
        raise InvalidInput(field, list(cores), f"absent unless executor is {takers}")


def _method(given: Mapping[str, Any], field: str) -> str:
    """Return a drafter's method; raises ``InvalidInput`` about ``field`` for an unknown method, or for a pool."""
    method = given.get("method")
    if isinstance(method, str) and DRAFTERS.knows(method) and not DRAFTERS.load(method).is_pool:
        return method
    allowed = ", ".join(name for name in DRAFTERS.names if not DRAFTERS.load(name).is_pool)
    raise InvalidInput(field, words("missing") if method is None else method, f"one of {allowed}")
