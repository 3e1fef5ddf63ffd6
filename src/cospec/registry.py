"""Tables of plug-ins: lazy maps from a configuration name to a class.

A new plug-in of cospec is one file and one line here. Each table has an interface. The interface declares what a
class needs or offers (``AcceptanceMethod.stream_kind``, ``Drafter.samples``). The engine reads these attributes and no
names.

A plug-in in another package needs no line here. The package names the class in an entry point of the table's group, or
a program registers the class. In both cases the table checks the declarations of the class.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, Union, get_args, get_origin, get_type_hints

from cospec.errors import InvalidInput, words

if TYPE_CHECKING:  # the tables import an interface when they check a class
    from cospec.core.interfaces import BlendFactory, ExecutionMode
    from cospec.core.plugin_base import AcceptanceMethod, Drafter, LogitsProcessor, Policy
    from cospec.drafters.pool.combiners.combiner import Combiner
    from cospec.drafters.pool.routing.routing import Routing
    from cospec.models.attention.backend import AttentionBackend
    from cospec.models.weights.format import WeightFormat
    from cospec.runtime.executor_base import DrafterExecutor

PluginT = TypeVar("PluginT")

RESERVED = ("auto", "off")  # names with a fixed meaning in configurations

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Declares:
    """The declarations that a table requires of a class: all members of the table's interface.

    Attributes:
        kind: the word for an entry in errors.
        interface: ``module:Class``. A subclass inherits defaults and declares the rest.
        on_instances: attributes that instances set, so that the class may lack them.
        named: whether ``name`` must equal the name in the table.
    """

    kind: str
    interface: str
    on_instances: tuple[str, ...] = ()
    named: bool = False

    def check(self, name: str, made: object) -> None:
        """Raise ``InvalidInput`` about the first attribute of ``made`` that is missing or has another type."""
        interface = _imported(self.interface)
        hints = {key: hint for key, hint in get_type_hints(interface).items() if key not in self.on_instances}
        members = [key for key in vars(interface) if not key.startswith("_") and key not in hints]
        methods = [key for key in members if callable(vars(interface)[key])]  # the others are properties
        problem = _problem(made, [*hints, *members], methods, hints)
        if problem is None and self.named and made.name != name:  # type: ignore[attr-defined]  # just checked
            problem = f"whose name is {made.name!r}"  # type: ignore[attr-defined]
        if problem is not None:
            abstract = [key for key in methods if key in interface.__abstractmethods__] or methods
            needed = [*(key for key in hints if not hasattr(interface, key)), *abstract]
            allowed = f"a subclass of {self.interface} that declares {', '.join(needed)}"
            raise InvalidInput(f"{self.kind} {name!r}", words(f"{_described(made)}, {problem}"), allowed)


class PluginTable(Mapping[str, str], Generic[PluginT]):
    """Names to ``module:Class``; the first ``load`` imports the class.

    As a mapping the table holds the plug-ins of cospec. ``names`` adds the entry points of ``group`` in installed
    packages, and the registered classes.
    """

    def __init__(self, field: str, entries: Mapping[str, str], declares: Declares, group: str | None = None) -> None:
        self.declares = declares
        self._field, self._entries, self._group = field, dict(entries), group
        self._registered: dict[str, PluginT] = {}
        self._loaded: dict[str, PluginT] = {}  # entry points that were loaded

    def __getitem__(self, name: str) -> str:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def names(self) -> list[str]:
        """All names of the table."""
        return [*self._entries, *self._offered, *self._registered]

    @property
    def installed(self) -> list[str]:
        """Names that packages other than cospec offer."""
        return list(self._offered)

    def knows(self, name: object) -> bool:
        """Whether the table has ``name``."""
        return isinstance(name, str) and (name in self._entries or name in self._registered or name in self._offered)

    def load(self, name: str) -> PluginT:
        """Return the class of that name.

        Raises:
            InvalidInput: the table has no such name, or the package of that name cannot be loaded.
        """
        self.check(name)
        if name in self._registered:
            return self._registered[name]
        if name not in self._entries:
            return self._load_offered(name)
        found: PluginT = _imported(self._entries[name])
        return found

    def check(self, name: object, *also: str, field: str | None = None) -> None:
        """Raise ``InvalidInput`` unless the table or ``also`` has ``name``. ``field`` None names the table's field."""
        if name not in also and not self.knows(name):
            raise InvalidInput(field or self._field, name, "one of " + ", ".join([*self.names, *also]))

    def register(self, name: str, made: PluginT) -> None:
        """Register the class ``made`` under ``name``. A later registration of the same name replaces an earlier one.

        Raises:
            InvalidInput: cospec or an installed package has the name, or the class lacks a declaration.
        """
        kind = self.declares.kind
        if not isinstance(name, str) or not name.strip():
            raise InvalidInput(f"{kind} name", name, "a text")
        if name in RESERVED or name in self._entries or name in self._offered:
            raise InvalidInput(f"{kind} name", name, f"a name that no {kind} of cospec or of an installed package has")
        self.declares.check(name, made)
        self._registered[name] = made

    def unregister(self, name: str) -> None:
        """Remove a registered class. Unknown names are ignored."""
        self._registered.pop(name, None)

    @cached_property
    def _offered(self) -> dict[str, list[EntryPoint]]:
        """Entry points by name, not loaded."""
        found: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=self._group) if self._group else ():
            if entry.name in self._entries or entry.name in RESERVED:
                kind, package = self.declares.kind, _package(entry)
                log.warning("%s %r of package %s is left out: cospec has that name", kind, entry.name, package)
            else:
                found.setdefault(entry.name, []).append(entry)
        return found

    def _load_offered(self, name: str) -> PluginT:
        if name in self._loaded:
            return self._loaded[name]
        entry, *others = self._offered[name]
        if others:
            packages = " and ".join(_package(each) for each in (entry, *others))
            raise InvalidInput(
                self._field, words(f"{name!r}, which packages {packages} offer"), "offered by one package"
            )
        try:
            made: PluginT = entry.load()
        except Exception as error:  # the code of another package may raise anything
            raised = f"{type(error).__name__}: {' '.join(str(error).split())}"
            given = words(f"{name!r} of package {_package(entry)}, which cannot be loaded ({raised})")
            raise InvalidInput(self._field, given, "a plug-in that Python can import") from error
        self.declares.check(name, made)
        self._loaded[name] = made
        return made


def import_plugins(modules: Iterable[str]) -> None:
    """Import modules that register plug-ins.

    Raises:
        InvalidInput: a module does not exist, or cannot be imported.
    """
    for name in modules:
        try:
            import_module(name)
        except ImportError as error:
            raise InvalidInput("plugin", words(f"{name} ({error})"), "a module that Python finds") from None


def _package(entry: EntryPoint) -> str:
    """Return the package that offers an entry point."""
    return entry.dist.name if entry.dist is not None else entry.module


def _imported(place: str) -> Any:
    """Import the object that ``module:name`` names."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)


def _problem(made: object, names: Iterable[str], methods: Iterable[str], hints: Mapping[str, Any]) -> str | None:
    """Describe the first attribute that is missing, abstract or of another type; None if all attributes fit."""
    abstract = getattr(made, "__abstractmethods__", ())  # only classes with an abstract base class have the attribute
    for name in names:
        if not hasattr(made, name) or name in abstract:
            return f"which does not declare {name}"
    for name, hint in hints.items():
        if not _fits(value := getattr(made, name), hint):
            return f"whose {name} is {value!r}"
    uncallable = (name for name in methods if not callable(getattr(made, name)))
    return next((f"whose {name} cannot be called" for name in uncallable), None)


def _fits(value: object, hint: Any) -> bool:
    """Whether a value has the type of an annotation; the items of a container are not checked."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (ClassVar, Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is type:
        return isinstance(value, type) and issubclass(value, parts[0])
    return isinstance(value, origin or hint)


def _described(made: object) -> str:
    return f"{made.__module__}:{made.__qualname__}" if isinstance(made, type) else repr(made)


DRAFTERS: PluginTable[type[Drafter]] = PluginTable(
    "speculative_config.method",
    {
        "draft_model": "cospec.drafters.model:ModelDrafter",
        "ngram": "cospec.drafters.ngram:NgramDrafter",
        "heads": "cospec.drafters.medusa:MedusaDrafter",
        "suffix": "cospec.drafters.suffix:SuffixDrafter",
        "synthetic": "cospec.drafters.synthetic:SyntheticDrafter",
        "pool": "cospec.drafters.pool.pool:PoolDrafter",
    },
    Declares("drafter", "cospec.core.plugin_base:Drafter", on_instances=("name",)),
    "cospec.drafters",
)
COMBINERS: PluginTable[type[Combiner]] = PluginTable(
    "speculative_config.combiner",
    {
        "union": "cospec.drafters.pool.combiners.union:Union",
        "vote": "cospec.drafters.pool.combiners.vote:Vote",
        "fuse": "cospec.drafters.pool.combiners.fuse:Fuse",
        "mix": "cospec.drafters.pool.combiners.mix:Mix",
    },
    Declares("combiner", "cospec.drafters.pool.combiners.combiner:Combiner", named=True),
)
ROUTINGS: PluginTable[type[Routing]] = PluginTable(
    "speculative_config.routing",
    {
        "hedge": "cospec.drafters.pool.routing.hedge:Hedge",
        "explore": "cospec.drafters.pool.routing.explore:Explore",
        "all": "cospec.drafters.pool.routing.all:AllDrafters",
    },
    Declares("routing", "cospec.drafters.pool.routing.routing:Routing", named=True),
)
ACCEPTANCE_METHODS: PluginTable[type[AcceptanceMethod]] = PluginTable(
    "speculative_config.acceptance_method",
    {
        "match": "cospec.acceptance.match:Match",
        "rejection": "cospec.acceptance.rejection:Rejection",
        "block": "cospec.acceptance.block:Block",
        "recursive": "cospec.acceptance.recursive:Recursive",
        "typical": "cospec.acceptance.typical:Typical",
    },
    Declares("acceptance method", "cospec.core.plugin_base:AcceptanceMethod", named=True),
    "cospec.acceptance_methods",
)
LOGITS_PROCESSORS: PluginTable[type[LogitsProcessor]] = PluginTable(
    "logits_processors",
    {
        "penalties": "cospec.logits_processors.edits:Penalties",
        "logit_bias": "cospec.logits_processors.edits:LogitBias",
        "min_tokens": "cospec.logits_processors.masks:MinTokens",
        "allowed_token_ids": "cospec.logits_processors.masks:AllowedTokens",
        "bad_words_token_ids": "cospec.logits_processors.masks:BadWords",
    },
    Declares("logits processor", "cospec.core.plugin_base:LogitsProcessor", named=True),
    "cospec.logits_processors",
)
POLICIES: PluginTable[type[Policy]] = PluginTable(
    "speculative_config.policy",
    {
        "fixed": "cospec.policies.fixed:Fixed",
        "off": "cospec.policies.fixed:Off",
        "goodput": "cospec.policies.goodput.controller:Goodput",
        "slope": "cospec.policies.slope:Slope",
        "confidence": "cospec.policies.confidence:Confidence",
        "milp": "cospec.policies.milp:Milp",
    },
    Declares("policy", "cospec.core.plugin_base:Policy"),
    "cospec.policies",
)
BLENDS: PluginTable[BlendFactory] = PluginTable(
    "ensemble.method",
    {
        "single": "cospec.ensemble.blends.weighted:Single",
        "weighted": "cospec.ensemble.blends.weighted:Weighted",
        "contrastive": "cospec.ensemble.blends.contrastive:Contrastive",
        "realign": "cospec.ensemble.blends.weighted:Realign",
        "adaptive": "cospec.ensemble.blends.adaptive:Adaptive",
    },
    Declares("blend", "cospec.core.interfaces:BlendFactory"),
    "cospec.blends",
)
EXECUTION_MODES: PluginTable[type[ExecutionMode]] = PluginTable(
    "speculative_config.execution_mode",
    {
        "auto": "cospec.execution.auto:Auto",
        "sequential": "cospec.execution.sequential:Sequential",
        "pipelined": "cospec.execution.pipelined:Pipelined",
        "draft-ahead": "cospec.execution.draft_ahead:DraftAhead",
        "draft-for-outcomes": "cospec.execution.draft_for_outcomes:DraftForOutcomes",
    },
    Declares(
        "execution mode",
        "cospec.core.interfaces:ExecutionMode",
        on_instances=("components", "info"),
    ),
)
EXECUTORS: PluginTable[type[DrafterExecutor]] = PluginTable(
    "speculative_config.drafter_executor",
    {
        "inline": "cospec.runtime.in_process_executors:InlineExecutor",
        "thread": "cospec.runtime.in_process_executors:ThreadExecutor",
        "process": "cospec.runtime.drafter_process_executor:ProcessExecutor",
        "node": "cospec.cluster.nodes.executor:NodeExecutor",
    },
    Declares(
        "executor",
        "cospec.runtime.executor_base:DrafterExecutor",
        on_instances=("parallel", "busy"),
        named=True,
    ),
)
ATTENTION_BACKENDS: PluginTable[type[AttentionBackend]] = PluginTable(
    "attention_backend",
    {
        "native": "cospec.models.attention.native:NativeAttention",
        "triton": "cospec.models.attention.triton_paged:TritonAttention",
        "sdpa": "cospec.models.attention.sdpa:SdpaAttention",
    },
    Declares("attention back end", "cospec.models.attention.backend:AttentionBackend", named=True),
)
WEIGHT_FORMATS: PluginTable[type[WeightFormat]] = PluginTable(
    "quantization",
    {
        "fp32": "cospec.models.weights.fp32:Fp32",
        "bf16": "cospec.models.weights.bf16:Bf16",
        "fp16": "cospec.models.weights.fp16:Fp16",
        "int8": "cospec.models.weights.int8:Int8",
        "q8_0": "cospec.models.weights.q8_0:Q8_0",
        "q4_0": "cospec.models.weights.q4_0:Q4_0",
        "q4_1": "cospec.models.weights.q4_1:Q4_1",
        "q5_0": "cospec.models.weights.q5_0:Q5_0",
        "q5_1": "cospec.models.weights.q5_1:Q5_1",
        "q4_k": "cospec.models.weights.q4_k:Q4K",
        "q5_k": "cospec.models.weights.q5_k:Q5K",
        "q6_k": "cospec.models.weights.q6_k:Q6K",
        "iq4_nl": "cospec.models.weights.iq4_nl:Iq4Nl",
        "mxfp4": "cospec.models.weights.mxfp4:Mxfp4",
    },
    Declares("weight format", "cospec.models.weights.format:WeightFormat", named=True),
)

UNQUANTIZED = ("fp32", "bf16", "fp16")  # weight formats of a dtype
QUANTIZATION_ALIASES = {"int4": "q4_0"}


def quantizations() -> list[str]:
    """Return the values of the option ``quantization``."""
    return [*(name for name in WEIGHT_FORMATS.names if name not in UNQUANTIZED), *QUANTIZATION_ALIASES]


def check_quantization(name: str, field: str = "quantization") -> None:
    """Raise ``InvalidInput`` about ``field`` if no quantization has the name."""
    if name not in quantizations():
        raise wrong_quantization(name, field)


def wrong_quantization(name: str, field: str) -> InvalidInput:
    """Return the error about a quantization that is unknown, or that the device does not compute with."""
    return InvalidInput(field, name, f"on a CPU one of {', '.join(quantizations())}; otherwise absent")


register_drafter = DRAFTERS.register
register_acceptance_method = ACCEPTANCE_METHODS.register
register_logits_processor = LOGITS_PROCESSORS.register
register_policy = POLICIES.register
