"""The recipe of a training run, read from one YAML file; the model card prints the recipe."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, field_validator

from cospec.errors import InvalidInput, words
from cospec.plugin_options import Options, parse


class ModelShape(Options):
    """A Llama-architecture model. Sizes count columns, heads or layers."""

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


class AnswerRule(Options):
    """How questions and final answers are found in the documents of a domain.

    Attributes:
        marker: ends the question; the answer follows.
        pattern: regular expression; the first group of the last match in an answer is the final answer.
    """

    domain: str = "math"
    marker: str = Field(default="\nAnswer:", min_length=1)
    pattern: str = r"(-?\d[\d,]*(?:\.\d+)?)"

    @field_validator("pattern")
    @classmethod
    def _has_a_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            raise ValueError(f"a regular expression ({error})") from None
        if groups < 1:
            raise ValueError("a regular expression with a group")
        return pattern


class Distillation(Options):
    """The training data of a drafter.

    Attributes:
        corpus_tokens: corpus tokens that the target reads once; the drafter sees the tokens several times.
        written_tokens: tokens that the target generates and then reads like the corpus.
        written_share: share of a batch's rows from generated text.
        temperatures: the target generates an equal part at each; 0 is greedy.
        sharpness: factor of the target's logits as training goal; values above 1 emphasise the likeliest token.
        truth: weight of the text's cross-entropy, against the divergence from the target.
        answers: the generated text of one domain answers its questions, and has right final answers; None: any text.
    """

    corpus_tokens: int = Field(default=800_000, gt=0)
    written_tokens: int = Field(default=200_000, ge=0)
    written_share: float = Field(default=0.5, ge=0, le=1)
    temperatures: tuple[float, ...] = (0.0, 1.0)
    sharpness: float = Field(default=1.0, gt=0)
    truth: float = Field(default=0.0, ge=0, le=1)
    answers: AnswerRule | None = None


class HeadsPlan(Options):
    """Medusa heads on the target: their number and training."""

    count: int = Field(default=4, ge=1, le=16)
    schedule: TrainingSchedule


class Specialists(Options):
    """One drafter per domain of the recipe's mixture, with the generic drafter's shape and initial weights."""

    schedule: TrainingSchedule
    distillation: Distillation = Distillation()


class VariantConfig(Options):
    """The target trained on another mixture, as a low-rank adapter.

    Attributes:
        mixture: weight of each domain.
        rank: of every linear layer's update.
        alpha: ``alpha / rank`` scales the update.
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
        """Return a member's role in a few words."""
        if member in self.variants:
            return f"{self.name}:target trained on another mixture, a LoRA adapter"
        if member == "target":
            return "target, which defines the output distribution"
        return f"drafter of {self.name}:target" + ("" if member == "drafter" else f" for {member}")

    def shape(self, member: str) -> ModelShape:
        """Return the shape of a member: every member except the target and its variants is a drafter."""
        return self.target if member == "target" or member in self.variants else self.drafter

    def schedule(self, member: str) -> TrainingSchedule:
        """Return the schedule of a member's training."""
        if member in self.variants:
            return self.variants[member].schedule
        if self.specialists is not None and member in self.mixture:
            return self.specialists.schedule
        return self.target_schedule if member == "target" else self.drafter_schedule


def load_recipe(name: str) -> TrainingRecipe:
    """Load a shipped recipe by name, or any YAML file by path.

    Raises:
        InvalidInput: the recipe is unknown, not YAML, or has a key that is unknown or out of bounds.
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
    """Convert lists to tuples: YAML has lists only, and frozen options hold tuples."""
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
