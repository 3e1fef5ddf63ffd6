"""What a training run does, read from one YAML file: the recipe that the model card prints."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from cospec.errors import InvalidInput, words
from cospec.options import Options, parse


class ModelShape(Options):
    """A Llama-architecture model. Sizes are in units of one weight column, head or layer."""

    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)


class TrainingSchedule(Options):
    """Learning-rate and batch plan; lengths are in tokens. A resumed run may raise or lower ``tokens``."""

    tokens: int = Field(gt=0)
    batch_tokens: int = Field(default=8192, gt=0)
    sequence: int = Field(default=1024, gt=0)
    matrix_lr: float = Field(default=0.02, gt=0)
    other_lr: float = Field(default=0.003, gt=0)
    warmup: float = Field(default=0.02, ge=0, le=1)
    decay: float = Field(default=0.5, ge=0, le=1)

    @property
    def rows(self) -> int:
        """Sequences of one batch."""
        return max(1, self.batch_tokens // self.sequence)


class Distillation(Options):
    """What a drafter learns from its target.

    Attributes:
        corpus_tokens: tokens of the corpus that the target reads once; the drafter sees them several times.
        written_tokens: tokens that the target writes itself, which it reads like the corpus.
        written_share: share of a batch's rows that come from what the target wrote.
        temperatures: the target writes an equal part at each; 0 is greedy.
        sharpness: the drafter learns the target's logits times this; above 1 it cares more for the likeliest token.
        truth: weight of the cross-entropy of the text itself, against the divergence from the target.
    """

    corpus_tokens: int = Field(default=800_000, gt=0)
    written_tokens: int = Field(default=200_000, ge=0)
    written_share: float = Field(default=0.5, ge=0, le=1)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    sharpness: float = Field(default=1.0, gt=0)
    truth: float = Field(default=0.0, ge=0, le=1)


class HeadsPlan(Options):
    """Medusa heads on the target: how many, and how they are trained."""

    count: int = Field(default=4, ge=1, le=16)
    schedule: TrainingSchedule


class Specialists(Options):
    """One drafter per domain of the recipe's mixture, of the generic drafter's shape and starting from its weights."""

    schedule: TrainingSchedule
    distillation: Distillation = Distillation()


class VariantConfig(Options):
    """The target gone on with another mixture, as a low-rank adapter.

    Attributes:
        mixture: weight of each domain.
        rank: of every linear layer's update.
        alpha: the update is scaled by ``alpha / rank``.
    """

    mixture: dict[str, float]
    rank: int = Field(default=16, gt=0)
    alpha: int = Field(default=32, gt=0)
    schedule: TrainingSchedule


class TrainingRecipe(Options):
    """One family: a tokenizer, a target, its drafter, a specialist per domain, variants of the target by name."""

    name: str
    seed: int = 0
    vocab_size: int = Field(gt=256, le=65536)
    context: int = Field(gt=0)
    mixture: dict[str, float]
    target: ModelShape
    target_schedule: TrainingSchedule
    drafter: ModelShape
    drafter_schedule: TrainingSchedule
    distillation: Distillation = Distillation()
    specialists: Specialists | None = None
    variants: dict[str, VariantConfig] = Field(default_factory=dict)
    heads: HeadsPlan | None = None

    @property
    def members(self) -> tuple[str, ...]:
        """Every model of the family: the target, its drafter, the specialists by domain, the variants by name."""
        specialists = () if self.specialists is None else tuple(self.mixture)
        return ("target", "drafter", *specialists, *self.variants)

    def role(self, member: str) -> str:
        """What a member is, in a few words."""
        if member in self.variants:
            return f"{self.name}:target gone on with another mixture, a LoRA adapter"
        if member == "target":
            return "target, whose distribution outputs follow"
        return f"drafter of {self.name}:target" + ("" if member == "drafter" else f" for {member}")

    def shape(self, member: str) -> ModelShape:
        """Of any member: every one but the target and its variants is a drafter."""
        return self.target if member == "target" or member in self.variants else self.drafter

    def schedule(self, member: str) -> TrainingSchedule:
        """By which a member was trained."""
        if member in self.variants:
            return self.variants[member].schedule
        if self.specialists is not None and member in self.mixture:
            return self.specialists.schedule
        return self.target_schedule if member == "target" else self.drafter_schedule


def load_recipe(name: str) -> TrainingRecipe:
    """A shipped recipe by name, or any YAML file by path.

    Raises:
        InvalidInput: no such recipe, not YAML, or a key that is unknown or out of bounds.
    """
    path = Path(name)
    shipped = resources.files("cospec.training") / "recipes"
    try:
        source = path if path.suffix in {".yaml", ".yml"} else shipped / f"{name}.yaml"
        given = yaml.safe_load(source.read_text(encoding="utf-8"))
    except OSError:
        names = sorted(entry.name.removesuffix(".yaml") for entry in shipped.iterdir() if entry.name.endswith(".yaml"))
        raise InvalidInput("recipe", name, f"one of {', '.join(names)}, or the path of a YAML file") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise InvalidInput("recipe", words(f"{name}, which is not YAML"), "a YAML file") from None
    if not isinstance(given, dict):
        raise InvalidInput("recipe", words(f"{name}, which holds no object"), "a YAML file that holds one object")
    return parse(TrainingRecipe, _tuples(given), "recipe.")


def _tuples(value: Any) -> Any:
    """YAML has lists only; options are frozen and hold tuples."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
