"""Training of Medusa heads on a frozen target (Cai et al. 2024, section 2.2.1).

The target's states are cached, so a step needs no forward of the target. The head that predicts ``i + 1`` places
further reads the state at a position. It learns the target's output ``i + 1`` positions later.
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

RANKS = 8  # ranks of a head's predictions with measured accuracy
HELD_OUT = 16  # every ``HELD_OUT``-th window is for measurement instead of training
STRIDE = 4  # distance of the positions of a step: neighbours are similar


@dataclass(frozen=True)
class MedusaLoss:
    """KL from each head to the target's output at the predicted position; ``embedding`` is ``[V, hidden]``."""

    all_batches: Sequence[DistillBatches]
    embedding: Tensor
    count: int

    def __call__(self, model: nn.Module, numbers: Tensor) -> Tensor:
        """Return mean nats per prediction, for ``numbers [B, 2]`` of domain and window."""
        states = take(self.all_batches, numbers, self.embedding.device)
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


def take(all_batches: Sequence[DistillBatches], numbers: Tensor, device: torch.device) -> Tensor:
    """Return states ``float32 [B, T, hidden]`` of windows by ``[B, 2]`` numbers of domain and window."""
    rows = [np.asarray(all_batches[m].teacher_cache.states[window]) for m, window in numbers.tolist()]
    return torch.from_numpy(np.stack(rows)).to(device).float()


def training_windows(distill_batches: DistillBatches) -> np.ndarray:
    """Return the numbers of the training windows."""
    numbers = np.arange(len(distill_batches.teacher_cache.tokens))
    return np.asarray(numbers[numbers % HELD_OUT != 0])


@torch.no_grad()
def accuracy(module: MedusaModule, all_batches: Sequence[DistillBatches], embedding: Tensor) -> list[list[float]]:
    """Return ``[H][RANKS]``: the share of predictions that are the target's likeliest token, on held-out text."""
    hits, places = torch.zeros(len(module.blocks), RANKS), 0
    for distill_batches in all_batches:
        written = range(distill_batches.pools[0], len(distill_batches.teacher_cache.tokens))
        for number in (n for n in written if n % HELD_OUT == 0):
            states = (
                torch.from_numpy(np.array(distill_batches.teacher_cache.states[number])).to(embedding.device).float()
            )
            target_tokens = (states @ embedding.T).argmax(-1)
            last = len(states) - len(module.blocks)
            places += last
            for head in range(len(module.blocks)):
                guesses = (module(states[:last], head) @ embedding.T).topk(RANKS).indices
                right = guesses == target_tokens[head + 1 : head + 1 + last, None]
                hits[head] += right.sum(0).cpu()
    return [[round(float(value) / max(1, places), 4) for value in row] for row in hits]


def train_heads(recipe: TrainingRecipe, data: Path, out: Path, to: Path, writer: Writer | None = None) -> MedusaHeads:
    """Train heads on the target in ``out`` with the specialists' data; save the heads to ``to``. Resumes.

    Raises:
        InvalidInput: the recipe lacks heads, or lacks specialists, whose data the heads use.
    """
    if recipe.heads is None or recipe.specialists is None:
        raise InvalidInput("recipe.heads", words("missing"), "a count and a schedule, with specialists")
    tokenizer, corpus = prepare(recipe, data, out)
    target = load_trained(recipe, "target", tokenizer, out)
    distill_data = (
        DistillData(tokenizer, corpus, out / "lessons", writer)
        if writer
        else DistillData.open(target, tokenizer, corpus, out)
    )
    options, schedule = recipe.specialists.distillation, recipe.heads.schedule
    length = recipe.specialists.schedule.sequence
    all_batches = [
        distill_data.make(target, DistillOptions({name: 1.0}, options, length, recipe.seed), name)
        for name in recipe.mixture
    ]
    pools = [training_windows(distill_batches) for distill_batches in all_batches]
    weights = np.array(list(recipe.mixture.values())) / sum(recipe.mixture.values())

    def batches(step: int) -> np.ndarray:
        draw = np.random.default_rng((recipe.seed, 3, step))
        chosen = draw.choice(len(pools), schedule.rows, p=weights)
        return np.array([[m, draw.choice(pools[m])] for m in chosen], dtype=np.int64)

    embedding = target.lm_head.weight.detach()
    module = MedusaModule(recipe.heads.count, embedding.shape[1])
    trainer = Trainer(module, schedule, MedusaLoss(all_batches, embedding, recipe.heads.count), batches, out / "heads")
    trainer.run()
    module.eval()
    heads = module.heads(accuracy(module, all_batches, embedding))
    heads.save(to / "heads")
    size = heads.weight.numel() + heads.bias.numel()
    amend(
        to,
        heads={"parameters": size, "steps": trainer.step, "hours": trainer.seconds / 3600, "accuracy": heads.accuracy},
    )
    return heads
