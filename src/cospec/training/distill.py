"""Teaching a small drafter to say what its target would say.

The drafter minimises the divergence KL(target || drafter) on text of the corpus and on text that the target wrote, so
that its acceptance, the overlap of the two distributions, is high where it will be used. Its embedding starts as the
best low-rank copy of the target's, which saves it from learning 4,096 words anew.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from cospec.training.corpus import Corpus, end_token
from cospec.training.export import save_model
from cospec.training.family import load_trained, new_model, prepare
from cospec.training.generate import Prompts, Writer, WritingPlan, engine_writer, write_stream
from cospec.training.lessons import Lessons, fingerprint, read
from cospec.training.recipe import Distillation, Recipe
from cospec.training.trainer import Trainer


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean over rows of KL(teacher || student), in nats, of logits ``[R, V]`` each."""
    log_p = nn.functional.log_softmax(teacher.float(), dim=-1)
    log_q = nn.functional.log_softmax(student.float(), dim=-1)
    return nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum() / len(log_p)


@dataclass(frozen=True)
class DistillationLoss:
    """The loss of the rows of ``lessons`` with the given numbers; ``head [V, H]`` is the target's output embedding."""

    lessons: Lessons
    head: Tensor
    options: Distillation

    def __call__(self, model: nn.Module, numbers: Tensor) -> Tensor:
        """Nats per token, for ``numbers [B]``."""
        tokens, states = self.lessons.take(numbers, self.head.device)
        student = model(input_ids=tokens[:, :-1]).logits.flatten(0, 1)
        with torch.no_grad():
            teacher = self.options.sharpness * (states.flatten(0, 1) @ self.head.T)
        loss = divergence(student, teacher)
        if self.options.truth:
            truth = nn.functional.cross_entropy(student.float(), tokens[:, 1:].flatten())
            loss = (1 - self.options.truth) * loss + self.options.truth * truth
        return loss


def low_rank_embedding(head: Tensor, states: Tensor, size: int) -> Tensor:
    """The ``[V, size]`` matrix ``E`` for which ``E @ x`` comes closest to the logits of ``states [R, H]``.

    The logits' best approximation of rank ``size``: the leading singular vectors of ``head @ moment^(1/2)``, where
    ``moment`` is the states' second moment. The ``x`` that go with it have unit variance, as a normalised hidden
    state has, so that the logits' scale is right from the first step.
    """
    rows = states.double()
    values, vectors = torch.linalg.eigh(rows.T @ rows / len(rows))
    root = vectors @ torch.diag(values.clamp_min(0).sqrt()) @ vectors.T
    left, weights, _ = torch.linalg.svd(head.double() @ root, full_matrices=False)
    return torch.as_tensor(left[:, :size] * weights[:size], dtype=torch.float32)


def initialise(student: LlamaForCausalLM, head: Tensor, states: Tensor) -> None:
    """Give ``student`` a low-rank copy of the target's embedding ``head [V, H]``; ``states [R, H]`` are a sample."""
    copy = low_rank_embedding(head.cpu(), states, student.config.hidden_size)
    with torch.no_grad():
        student.model.embed_tokens.weight.copy_(copy)


def make_lessons(target: LlamaForCausalLM, recipe: Recipe, course: Course) -> tuple[Lessons, int]:
    """Have the target write, then read. Returns the lessons, the corpus' rows first, and how many those are."""
    options, length = recipe.distillation, recipe.drafter_schedule.sequence
    count = -(-options.corpus_tokens // length)
    windows = course.corpus.windows(recipe.mixture, count, length, (recipe.seed, 1))
    mark = fingerprint(target)
    if options.written_tokens:
        prompts = Prompts.build(course.corpus.train, recipe.mixture, course.tokenizer)
        plan = WritingPlan(options.written_tokens, options.temperatures, recipe.seed)
        stream = write_stream(course.writer, prompts, course.folder / f"written-{mark}", plan)
        windows = np.concatenate([windows, _slices(stream, length)])
    return read(target, windows, course.folder / f"read-{mark}"), count


@dataclass(frozen=True)
class Course:
    """What a distillation works with: text, the folder for what the target writes and thinks, who writes."""

    tokenizer: Tokenizer
    corpus: Corpus
    folder: Path
    writer: Writer


def _slices(stream: np.ndarray, length: int) -> np.ndarray:
    """``[N, length + 1]`` windows that follow one another."""
    count = (len(stream) - 1) // length
    return np.stack([stream[i * length : (i + 1) * length + 1] for i in range(count)]).astype(np.int64)


def draw_lessons(step: int, rows: int, share: float, pools: tuple[int, int], seed: int) -> np.ndarray:
    """``[rows]`` lesson numbers: ``share`` of them from the second pool, each pool in a new order in every epoch."""
    written = round(rows * share) if pools[1] else 0
    parts = []
    for pool, (take, first) in enumerate(((rows - written, 0), (written, pools[0]))):
        places = np.arange(step * take, (step + 1) * take)
        for epoch in np.unique(places // max(1, pools[pool])):
            order = np.random.default_rng((seed, 2, pool, int(epoch))).permutation(pools[pool])
            parts.append(first + order[places[places // pools[pool] == epoch] % pools[pool]])
    return np.concatenate(parts).astype(np.int64)


def train_drafter(
    recipe: Recipe, data: Path, out: Path, compiled: bool = False, writer: Writer | None = None
) -> Trainer:
    """Distil the target in ``out`` into the recipe's drafter. Resumes from what ``out`` holds."""
    tokenizer, corpus = prepare(recipe, data, out)
    target = load_trained(recipe, "target", tokenizer, out)
    if writer is None:
        folder = out / "lessons" / "target"
        save_model(copy.deepcopy(target), folder, out / "tokenizer", end_token(tokenizer))
        writer = engine_writer(folder)
    lessons, count = make_lessons(target, recipe, Course(tokenizer, corpus, out / "lessons", writer))
    head = target.lm_head.weight.detach()
    student = new_model(recipe.drafter, recipe, tokenizer, recipe.seed)
    initialise(student, head, torch.from_numpy(np.array(lessons.states[::8, ::16])).flatten(0, 1).float())
    schedule, options = recipe.drafter_schedule, recipe.distillation
    batches = partial(
        draw_lessons,
        rows=schedule.rows,
        share=options.written_share,
        pools=(count, len(lessons.tokens) - count),
        seed=recipe.seed,
    )
    trainer = Trainer(student, schedule, DistillationLoss(lessons, head, options), batches, out / "drafter")
    trainer.run(compiled=compiled)
    return trainer
