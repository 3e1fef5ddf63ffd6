"""Training Medusa heads on a frozen target (Cai et al. 2024, section 2.2.1).

The target has read its lessons already, so a step needs no forward pass of it: the head that guesses ``i + 1`` places
further learns, from the state at one place, what the target said from the state ``i + 1`` places on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from cospec.errors import InvalidInput, words
from cospec.models.medusa_heads import MedusaHeads, MedusaModule
from cospec.training.distill import divergence
from cospec.training.distill_data import DistillBatches, DistillData, DistillOptions
from cospec.training.export import amend
from cospec.training.family import load_trained, prepare
from cospec.training.generate import Writer
from cospec.training.recipe import TrainingRecipe
from cospec.training.trainer import Trainer

RANKS = 8  # guesses of a head whose accuracy is measured
HELD_OUT = 16  # every so many lessons are measured by and not learnt from
STRIDE = 4  # of the places that a step learns at: neighbours teach much the same


@dataclass(frozen=True)
class HeadsLoss:
    """KL from each head to the target that stands where it guesses; ``embedding`` is ``[V, hidden]``."""

    materials: Sequence[DistillBatches]
    embedding: Tensor
    count: int

    def __call__(self, model: nn.Module, numbers: Tensor) -> Tensor:
        """Mean nats per guess, for ``numbers [B, 2]`` of material and lesson."""
        states = take(self.materials, numbers, self.embedding.device)
        first = int(numbers.sum()) % STRIDE
        loss = states.new_zeros(())
        for head in range(self.count):
            ahead = head + 1
            here = states[:, first : -ahead or None : STRIDE]
            with torch.no_grad():
                teacher = states[:, first + ahead :: STRIDE].flatten(0, 1) @ self.embedding.T
            student = model(here.flatten(0, 1), head) @ self.embedding.T
            loss = loss + divergence(student[: len(teacher)], teacher[: len(student)])
        return loss / self.count


def take(materials: Sequence[DistillBatches], numbers: Tensor, device: torch.device) -> Tensor:
    """States ``float32 [B, T, hidden]`` of lessons by ``[B, 2]`` numbers of material and lesson."""
    rows = [np.asarray(materials[m].lessons.states[lesson]) for m, lesson in numbers.tolist()]
    return torch.from_numpy(np.stack(rows)).to(device).float()


def learnt(material: DistillBatches) -> np.ndarray:
    """Numbers of the lessons that are learnt from."""
    numbers = np.arange(len(material.lessons.tokens))
    return np.asarray(numbers[numbers % HELD_OUT != 0])


@torch.no_grad()
def accuracy(module: MedusaModule, materials: Sequence[DistillBatches], embedding: Tensor) -> list[list[float]]:
    """``[H][RANKS]``: how often each guess was what the target, on its held-out own text, holds likeliest."""
    hits, places = torch.zeros(len(module.blocks), RANKS), 0
    for material in materials:
        written = range(material.pools[0], len(material.lessons.tokens))
        for number in (n for n in written if n % HELD_OUT == 0):
            states = torch.from_numpy(np.array(material.lessons.states[number])).to(embedding.device).float()
            said = (states @ embedding.T).argmax(-1)
            last = len(states) - len(module.blocks)
            places += last
            for head in range(len(module.blocks)):
                guesses = (module(states[:last], head) @ embedding.T).topk(RANKS).indices
                right = guesses == said[head + 1 : head + 1 + last, None]
                hits[head] += right.sum(0).cpu()
    return [[round(float(value) / max(1, places), 4) for value in row] for row in hits]


def train_heads(recipe: TrainingRecipe, data: Path, out: Path, to: Path, writer: Writer | None = None) -> MedusaHeads:
    """Train heads on the target in ``out`` with its specialists' lessons, and write them to ``to``. Resumes.

    Raises:
        InvalidInput: the recipe says nothing of heads or of specialists, whose lessons they learn from.
    """
    if recipe.heads is None or recipe.specialists is None:
        raise InvalidInput("recipe.heads", words("missing"), "a count and a schedule, beside specialists")
    tokenizer, corpus = prepare(recipe, data, out)
    target = load_trained(recipe, "target", tokenizer, out)
    course = (
        DistillData(tokenizer, corpus, out / "lessons", writer)
        if writer
        else DistillData.open(target, tokenizer, corpus, out)
    )
    options, schedule = recipe.specialists.distillation, recipe.heads.schedule
    length = recipe.specialists.schedule.sequence
    materials = [
        course.make(target, DistillOptions({name: 1.0}, options, length, recipe.seed), name) for name in recipe.mixture
    ]
    pools = [learnt(material) for material in materials]
    weights = np.array(list(recipe.mixture.values())) / sum(recipe.mixture.values())

    def batches(step: int) -> np.ndarray:
        draw = np.random.default_rng((recipe.seed, 3, step))
        chosen = draw.choice(len(pools), schedule.rows, p=weights)
        return np.array([[m, draw.choice(pools[m])] for m in chosen], dtype=np.int64)

    embedding = target.lm_head.weight.detach()
    module = MedusaModule(recipe.heads.count, embedding.shape[1])
    trainer = Trainer(module, schedule, HeadsLoss(materials, embedding, recipe.heads.count), batches, out / "heads")
    trainer.run()
    module.eval()
    heads = module.heads(accuracy(module, materials, embedding))
    heads.save(to / "heads")
    size = heads.weight.numel() + heads.bias.numel()
    amend(
        to,
        heads={"parameters": size, "steps": trainer.step, "hours": trainer.seconds / 3600, "accuracy": heads.accuracy},
    )
    return heads
