"""Pools of toy drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from cospec.assembly.build import assemble
from cospec.assembly.components import TextInfo
from cospec.config import EngineConfig, SpeculativeConfig
from cospec.core.engine import Engine
from cospec.core.interfaces import Clock, Model
from cospec.core.plugin_base import Drafter
from cospec.drafters.cross_tokenizer import MappedVocab, SharedVocab
from cospec.drafters.interfaces import DrafterBuildContext, VocabMapping
from cospec.drafters.model import ModelDrafter
from cospec.drafters.ngram import NgramDrafter
from cospec.drafters.pool.members import Member
from cospec.drafters.pool.pool import PoolContext, PoolDrafter
from cospec.drafters.pool.routing.routing import Routing
from cospec.drafters.suffix import SuffixDrafter
from cospec.models.toy import ToyModel
from cospec.plugin_options import ENGINE_THREAD, LIKE_TARGET, DrafterPlace, ModelOptions, parse
from cospec.registry import COMBINERS, DRAFTERS, ROUTINGS


class Ticks:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def pool_of(
    drafters: Mapping[str, Drafter],
    combiner: str = "fuse",
    routing: str | Routing = "hedge",
    vocab_size: int = 3,
    clock: Clock | None = None,
    **member: Any,
) -> PoolDrafter:
    """A pool whose clock stands still; ``member`` are ``deadline`` and ``token_steps`` of ``Member.of``."""
    made, clock = COMBINERS.load(combiner)(), clock or Ticks()
    members = [Member.of(name, each, clock, made.is_stepwise, **member) for name, each in drafters.items()]
    chosen: Routing = routing if isinstance(routing, Routing) else ROUTINGS.load(routing)()
    return PoolDrafter(members, made, chosen, PoolContext(vocab_size, clock))


def letters(words: str) -> Tokenizer:
    """One token per letter, in the order given."""
    tokenizer = Tokenizer(models.BPE(vocab={word: id for id, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def toy_drafters(vocab_size: int = 3, names: Sequence[str] = ("first", "second", "copy")) -> dict[str, Drafter]:
    """Two models that differ from each other and from the targets of the tests, prompt lookup, and when they are named
    one with another tokenizer, which counts the tokens backwards, and suffixes."""
    words = "abcdefgh"[:vocab_size]
    vocabulary = MappedVocab(letters(words), letters(words[::-1]), vocab_size, vocab_size)
    made: dict[str, Drafter] = {
        "first": ModelDrafter(ToyModel(vocab_size, order=1, seed=5, sharpness=1.5)),
        "second": ModelDrafter(ToyModel(vocab_size, order=2, seed=7, sharpness=1.0)),
        "copy": NgramDrafter(1, 3),
        "foreign": ModelDrafter(ToyModel(vocab_size, order=1, seed=5, sharpness=1.5), vocabulary=vocabulary),
        "suffix": SuffixDrafter(),
    }
    return {name: made[name] for name in names}


def pool_engine(
    target: Model, drafter: Drafter, acceptance_method: str = "auto", k: int = 3, max_nodes: int = 8,
    widths: tuple[int, ...] = (), **config: Any,
) -> Engine:  # fmt: skip
    """An engine whose drafts are trees where the rule takes them; ``config`` are fields of ``EngineConfig``."""
    speculative = SpeculativeConfig(
        num_speculative_tokens=k, acceptance_method=acceptance_method, max_nodes=max(k, max_nodes), widths=widths
    )
    return Engine(assemble(target, drafter, speculative, EngineConfig(**config), TextInfo()))


@dataclass
class InlineHost:
    """What a drafter is built from, with drafters in this thread.

    Attributes:
        load: returns the model of a name; every model has the target's vocabulary.
    """

    target: Model
    load: Callable[[str], Model]
    target_path: Path | None = None
    default_heads: str | None = None
    default_drafter: str | None = "toy"
    native: bool = True

    def load_drafter(self, name: str, weights: ModelOptions = LIKE_TARGET) -> Model:
        return self.load(name)

    def load_mapped(self, name: str, weights: ModelOptions = LIKE_TARGET) -> tuple[Model, VocabMapping]:
        return self.load(name), SharedVocab()

    def build_drafter(self, method: str, options: Mapping[str, Any], place: DrafterPlace = ENGINE_THREAD) -> Drafter:
        return build_inline(method, options, self)


def build_inline(method: str, options: Mapping[str, Any], host: DrafterBuildContext) -> Drafter:
    """A drafter in this thread, as hosts of tests build it."""
    cls = DRAFTERS.load(method)
    built: Drafter = cls.build(parse(cls.Options, options, "speculative_config."), host)
    return built
