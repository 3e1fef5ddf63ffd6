"""From a configuration to a drafter: in this process, or in one of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from cospec.cluster.nodes.hub import NodeHub
from cospec.cluster.nodes.hub_options import BIND, NodesOptions, check_address
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.interfaces import Model
from cospec.core.plugin_base import Drafter
from cospec.drafters.cross_tokenizer import MappedVocab, SharedVocab
from cospec.drafters.interfaces import TargetInfo, VocabMapping
from cospec.drafters.pool.options import called
from cospec.errors import InvalidInput, words
from cospec.models.loading import LoadOptions, load_model, resolve
from cospec.models.model_folder import read_object
from cospec.native import library
from cospec.plugin_options import ENGINE_THREAD, LIKE_TARGET, DrafterPlace, ModelOptions, parse, unknown_key
from cospec.process_utils import keep_to, others
from cospec.registry import DRAFTERS, EXECUTORS, import_plugins
from cospec.runtime.executor_base import DrafterRecipe


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """A target that is in another process."""

    vocab_size: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class EngineHost:
    """What drafters may ask of the engine while they are built.

    Attributes:
        nodes: the verifier's end of the connections to drafter nodes; None in a drafter's process.
    """

    target: TargetInfo
    target_path: Path
    default_drafter: str | None
    default_heads: str | None
    options: LoadOptions
    native: bool = True
    threads: int | None = None
    plugins: tuple[str, ...] = ()
    nodes: NodeHub | None = None

    def build_drafter(self, method: str, options: Mapping[str, Any], place: DrafterPlace = ENGINE_THREAD) -> Drafter:
        """See ``DrafterBuildContext``."""
        cls = DRAFTERS.load(method)
        parsed = parse(cls.Options, options, "speculative_config.")
        recipe = DrafterRecipe(
            name=place.name or method,
            method=method,
            options=options,
            build=partial(cls.build, parsed, self),
            elsewhere=partial(_build_alone, method, dict(options), self.remote(place.cores)),
            device=self.target.device,
            cores=place.cores,
            nodes=self.nodes,
        )
        return EXECUTORS.load(place.executor).place(recipe)

    def remote(self, cores: Sequence[int]) -> RemoteHost:
        """Describe this host to a drafter's process on ``cores``; empty for all."""
        target = TargetFacts(self.target.vocab_size, self.target.device)
        defaults = self.default_drafter, self.default_heads
        threads = len(cores) or self.threads
        return RemoteHost(target, self.target_path, *defaults, self.options, self.native, threads, self.plugins)

    def load_drafter(self, name: str, weights: ModelOptions = LIKE_TARGET) -> Model:
        """A model that shares the target's vocabulary.

        Raises:
            InvalidInput: it has another one, so its token ids would mean other words.
        """
        model, path = self._load(name, weights)
        if not self._same(model, path):
            given = words(f"{name}, whose vocabulary of {model.vocab_size} tokens is not the target's")
            allowed = f"a drafter with the target's vocabulary of {self.target.vocab_size} tokens"
            raise InvalidInput("speculative_config.model", given, allowed)
        return model

    def load_mapped(self, name: str, weights: ModelOptions = LIKE_TARGET) -> tuple[Model, VocabMapping]:
        """A model with any vocabulary, and what that is to the target's.

        Raises:
            InvalidInput: it has another vocabulary and no tokenizer, or shares no token with the target.
        """
        model, path = self._load(name, weights)
        if self._same(model, path):
            return model, SharedVocab()
        files = [folder / "tokenizer.json" for folder in (self.target_path, path)]
        missing = next((file for file in files if not file.exists()), None)
        if missing is not None:
            given = words(f"{name}, whose vocabulary is not the target's, while {missing} is missing")
            allowed = "a drafter with the target's vocabulary, or two models with their tokenizers"
            raise InvalidInput("speculative_config.model", given, allowed)
        target, own = (Tokenizer.from_file(str(file)) for file in files)
        return model, MappedVocab(target, own, self.target.vocab_size, model.vocab_size)

    def _load(self, name: str, weights: ModelOptions) -> tuple[Model, Path]:
        path = resolve(name)
        return load_model(str(path), self.options.of_model(weights)), path

    def _same(self, model: Model, path: Path) -> bool:
        return model.vocab_size == self.target.vocab_size and same_tokens(path, self.target_path)


@dataclass(frozen=True, slots=True)
class RemoteHost(EngineHost):
    """The same for a drafter in another process; every field travels as a message."""

    target: TargetFacts

    def build_drafter(self, method: str, options: Mapping[str, Any], place: DrafterPlace = ENGINE_THREAD) -> Drafter:
        """See ``DrafterBuildContext``; a drafter's process starts no other places."""
        if place.executor != ENGINE_THREAD.executor:
            raise InvalidInput("executor", place.executor, "'inline', because the pool has a process of its own")
        return EngineHost.build_drafter(self, method, options)


def build_drafter(speculative: SpeculativeConfig, build_context: EngineHost, config: EngineConfig) -> Drafter | None:
    """The configured drafter, where it is configured to work; None where nothing is drafted.

    A drafter in a thread is built inline: ``DrafterExecutor.overlap`` starts the thread for the modes that overlap.

    Raises:
        CospecError: it cannot be built, in one sentence.
    """
    if not speculative.drafts:
        return None
    host = replace(build_context, threads=config.threads, plugins=config.plugins)
    given, executor = _given_options(speculative), speculative.drafter_executor
    if EXECUTORS.load(executor).builds_inline:
        executor = ENGINE_THREAD.executor
    place = DrafterPlace(executor=executor, cores=speculative.drafter_cores)
    return host.build_drafter(speculative.method, given, place)


def hub_of(speculative: SpeculativeConfig, target: TargetInfo) -> NodeHub:
    """The verifier's end of the connections to drafter nodes. The first drafter on nodes opens the socket."""
    options = parse(NodesOptions, speculative.drafter_nodes, "speculative_config.drafter_nodes.")
    return NodeHub(options, target.vocab_size)


@contextmanager
def closed_on_error(drafter: Drafter | None) -> Iterator[None]:
    """End the threads and processes of a drafter if a later step of the start fails."""
    try:
        yield
    except BaseException:
        if drafter is not None:
            drafter.close()
        raise


def share_cores(config: EngineConfig) -> None:
    """Set the threads of this process, and leave their processors to the drafters that have some."""
    reserved = config.speculative_config.reserved_cores if config.speculative_config else {}
    if not reserved:
        set_threads(config.threads)
        return
    for field, cores in reserved.items():
        others(cores, field)
    left = others([core for cores in reserved.values() for core in cores], ", ".join(reserved))
    keep_to(left)
    set_threads(config.threads or len(left))


def set_threads(threads: int | None) -> None:
    """Run models on so many threads; None leaves them all."""
    if threads is not None:
        torch.set_num_threads(threads)
        if library.available():
            library.set_threads(threads)


def same_tokens(first: Path, second: Path) -> bool:
    """Whether two model folders give the same ids to the same words; folders without a tokenizer are not compared."""
    files = [folder / "tokenizer.json" for folder in (first, second)]
    if not all(file.exists() for file in files):
        return True
    vocabularies = [read_object(file).get("model", {}).get("vocab") for file in files]
    return bool(vocabularies[0] == vocabularies[1])


def check_drafters(speculative: SpeculativeConfig) -> None:
    """Refuse wrong options of the drafter, of a pool's members, and of nodes, before any weight is read."""
    nodes = parse(NodesOptions, speculative.drafter_nodes, "speculative_config.drafter_nodes.")
    check_address(BIND, nodes.bind, nodes.keys)
    if not speculative.drafts:
        return
    drafter = DRAFTERS.load(speculative.method)
    parse(drafter.Options, _given_options(speculative), "speculative_config.")
    if speculative.widths and drafter.capabilities.chains:
        allowed = f"left out for {speculative.method}, which drafts chains"
        raise InvalidInput("speculative_config.widths", list(speculative.widths), allowed)


def methods(speculative: SpeculativeConfig) -> list[tuple[str, str, Mapping[str, Any]]]:
    """How errors call it, method and options of the drafter and of a pool's members; what is no method is left out."""
    if not speculative.drafts:
        return []
    fields = DRAFTERS.load(speculative.method).Options.model_fields
    members = speculative.options.get("drafters", fields["drafters"].default if "drafters" in fields else None)
    found: list[tuple[str, str, Mapping[str, Any]]] = [("", speculative.method, speculative.options)]
    for number, member in enumerate(members if isinstance(members, list) else []):
        method = member.get("method") if isinstance(member, dict) else None
        if isinstance(method, str) and DRAFTERS.knows(method):
            found.append((called(number, member.get("name", method)), method, member))
    return found


def _given_options(speculative: SpeculativeConfig) -> dict[str, Any]:
    """The keys of the configured drafter's method, also those that every configuration has."""
    cls = DRAFTERS.load(speculative.method)
    common = {
        key: getattr(speculative, key) for key in SpeculativeConfig.model_fields if key in cls.Options.model_fields
    }
    check_keys(speculative, cls)
    return {key: value for key, value in common.items() if value is not None} | dict(speculative.options)


def _build_alone(method: str, options: dict[str, Any], host: RemoteHost) -> Drafter:
    """Set up the drafter's own process, and build the drafter there."""
    set_threads(host.threads)
    library.use_instruction_set(host.options.instruction_set)
    import_plugins(host.plugins)
    return host.build_drafter(method, options)


def check_keys(speculative: SpeculativeConfig, cls: type[Any]) -> None:
    """Refuse a key that neither the method nor every configuration has; the sentence names all of both."""
    own = {name: field.alias or name for name, field in cls.Options.model_fields.items()}
    known = sorted({*own.values(), *SpeculativeConfig.model_fields} - {"options"})
    for key, value in speculative.options.items():
        if key not in own and key not in known:
            raise unknown_key(f"speculative_config.{key}", value, known)
