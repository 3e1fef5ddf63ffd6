"""Knowledge distillation from a target into a small drafter.

The drafter minimises KL(target ‖ drafter) on corpus text and on text that the target generated. Low divergence gives
high acceptance, which is the overlap of the two distributions. The drafter's embedding starts as the best low-rank
approximation of the target's. So the drafter need not learn 4,096 tokens again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from cospec.errors import InvalidInput, words
from cospec.training.distill_data import DistillBatches, DistillData, DistillOptions
from cospec.training.family import load_trained, new_model, origin, prepare
from cospec.training.generate import Writer
from cospec.training.recipe import Distillation, TrainingRecipe, TrainingSchedule
from cospec.training.teacher_cache import TeacherCache
from cospec.training.trainer import Trainer


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Return the mean over rows of KL(teacher ‖ student) in nats, from logits ``[R, V]`` each."""
    log_p = nn.functional.log_softmax(teacher.float(), dim=-1)
    log_q = nn.functional.log_softmax(student.float(), dim=-1)
    return nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum() / len(log_p)


@dataclass(frozen=True)
class DistillationLoss:
    """Distillation loss of numbered rows of ``teacher_cache``; ``head [V, H]`` is the target's output embedding."""

    teacher_cache: TeacherCache
    head: Tensor
    options: Distillation

    def __call__(self, model: nn.Module, numbers: Tensor) -> Tensor:
        """Return nats per token for the rows ``numbers [B]``."""
        tokens, states = self.teacher_cache.take(numbers, self.head.device)
        student = model(input_ids=tokens[:, :-1]).logits.flatten(0, 1)
        with torch.no_grad():
            teacher = self.options.sharpness * (states.flatten(0, 1) @ self.head.T)
        loss = divergence(student, teacher)
        if self.options.truth:
            truth = nn.functional.cross_entropy(student.float(), tokens[:, 1:].flatten())
            loss = (1 - self.options.truth) * loss + self.options.truth * truth
        return loss


def low_rank_embedding(head: Tensor, states: Tensor, size: int) -> Tensor:
    """Return the ``[V, size]`` matrix ``E`` for which ``E @ x`` is closest to the logits of ``states [R, H]``.

    The best approximation of rank ``size`` has the leading singular vectors of ``head @ moment^(1/2)``, with the
    states' second moment. The matching ``x`` have unit variance, like normalised hidden states. Thus the logits' scale
    is right from the first step.
    """
    rows = states.double()
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    root = vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.T
    left, weights, _ = torch.linalg.svd(head.double() @ root, full_matrices=False)
    return torch.as_tensor(left[:, :size] * weights[:size], dtype=torch.float32)


def initialise(student: LlamaForCausalLM, head: Tensor, states: Tensor) -> None:
    """Give ``student`` a low-rank copy of the target's embedding ``head [V, H]``, fitted to ``states [R, H]``."""
    copy = low_rank_embedding(head.cpu(), states, student.config.hidden_size)
    with torch.no_grad():
        student.model.embed_tokens.weight.copy_(copy)


def train_drafter(
    recipe: TrainingRecipe, data: Path, out: Path, compiled: bool = False, writer: Writer | None = None
) -> Trainer:
    """Distil the target in ``out`` into the recipe's drafter; resume from a checkpoint in ``out``.

    The drafter starts from a low-rank copy of the target's embedding, or from the weights of ``continue_training``.
    """
    tokenizer, target, distill_data = _open(recipe, data, out, writer)
    schedule = recipe.drafter_schedule
    distill_batches = distill_data.make(
        target, DistillOptions(recipe.mixture, recipe.distillation, schedule.sequence, recipe.seed)
    )
    if origin("drafter", out) is None:
        states = torch.from_numpy(np.array(distill_batches.teacher_cache.states[::8, ::16])).flatten(0, 1).float()
        student = new_model(recipe.drafter, recipe, tokenizer, recipe.seed)
        initialise(student, target.lm_head.weight.detach(), states)
    else:
        student = load_trained(recipe, "drafter", tokenizer, out).requires_grad_(True)
    trainer = _trainer(student, target, distill_batches, schedule, out / "drafter")
    trainer.run(compiled=compiled)
    return trainer


def train_specialists(
    recipe: TrainingRecipe, data: Path, out: Path, names: Sequence[str] = (), writer: Writer | None = None
) -> dict[str, Trainer]:
    """Distil one drafter per domain from the target in ``out``.

    Each starts from the generic drafter, or from the weights of ``continue_training`` and then learns from other text.

    Minions, section 4: a small model trained on its target's outputs for one task agrees far more often with the target
    there. Resumes from checkpoints in ``out``.

    Args:
        names: domains; empty means every domain of the recipe's mixture.

    Raises:
        InvalidInput: the recipe has no specialists, or a name is not one of its domains.
    """
    if recipe.specialists is None:
        raise InvalidInput("recipe.specialists", words("missing"), "a schedule and a distillation")
    for name in names:
        if name not in recipe.mixture:
            raise InvalidInput("domain", name, f"one of {', '.join(recipe.mixture)}")
    tokenizer, target, distill_data = _open(recipe, data, out, writer)
    schedule, options = recipe.specialists.schedule, recipe.specialists.distillation
    trainers = {}
    for name in names or recipe.mixture:
        before = origin(name, out)
        seed = recipe.seed + (before or {}).get("steps", 0)  # the weights have learned from the text of smaller seeds
        distill_batches = distill_data.make(target, DistillOptions({name: 1.0}, options, schedule.sequence, seed), name)
        first = "drafter" if before is None else name
        student = load_trained(recipe, first, tokenizer, out).requires_grad_(True)
        trainers[name] = _trainer(student, target, distill_batches, schedule, out / name)
        trainers[name].run()
    return trainers


def _open(
    recipe: TrainingRecipe, data: Path, out: Path, writer: Writer | None
) -> tuple[Tokenizer, LlamaForCausalLM, DistillData]:
    tokenizer, corpus = prepare(recipe, data, out)
    target = load_trained(recipe, "target", tokenizer, out)
    if writer is None:
        return tokenizer, target, DistillData.open(target, tokenizer, corpus, out)
    return tokenizer, target, DistillData(tokenizer, corpus, out / "lessons", writer)


def _trainer(
    student: LlamaForCausalLM,
    target: LlamaForCausalLM,
    distill_batches: DistillBatches,
    schedule: TrainingSchedule,
    folder: Path,
) -> Trainer:
    loss = DistillationLoss(
        distill_batches.teacher_cache, target.lm_head.weight.detach(), distill_batches.distill_options.options
    )
    return Trainer(student, schedule, loss, partial(distill_batches.draw, rows=schedule.rows), folder)
