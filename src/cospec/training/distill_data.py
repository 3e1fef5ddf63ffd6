"""What is taught from a target: windows of the corpus and text that the target wrote, about one subject.

A subject is a mixture of domains. A generic drafter's holds all of them, a specialist's one; heads on the target learn
from the same lessons.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from cospec.training.corpus import Corpus, end_token
from cospec.training.export import save_model
from cospec.training.generate import PromptSampler, Writer, WritingPlan, engine_writer, write_stream
from cospec.training.recipe import Distillation
from cospec.training.teacher_cache import TeacherCache, fingerprint, read


@dataclass(frozen=True)
class DistillOptions:
    """What lessons are about.

    Attributes:
        mixture: weight of each domain, of the corpus' windows and of the prompts.
        options: how much is read and written.
        sequence: tokens of a window.
    """

    mixture: Mapping[str, float]
    options: Distillation
    sequence: int
    seed: int


@dataclass(frozen=True)
class DistillBatches:
    """Lessons about one subject, the corpus' rows first; ``pools`` counts those and the ones that the target wrote."""

    lessons: TeacherCache
    pools: tuple[int, int]
    subject: DistillOptions

    def draw(self, step: int, rows: int) -> np.ndarray:
        """``[rows]`` lesson numbers of one training step."""
        return draw_batches(step, rows, self.subject.options.written_share, self.pools, self.subject.seed)


@dataclass(frozen=True)
class DistillData:
    """What lessons are made with: text, the folder for what the target writes and thinks, who writes."""

    tokenizer: Tokenizer
    corpus: Corpus
    folder: Path
    writer: Writer

    @classmethod
    def open(cls, target: LlamaForCausalLM, tokenizer: Tokenizer, corpus: Corpus, out: Path) -> DistillData:
        """Lessons in ``out`` that the engine writes with ``target``."""
        folder = out / "lessons" / "target"
        save_model(copy.deepcopy(target), folder, out / "tokenizer", end_token(tokenizer))
        return cls(tokenizer, corpus, out / "lessons", engine_writer(folder))

    def make(self, target: LlamaForCausalLM, subject: DistillOptions, name: str = "") -> DistillBatches:
        """Have ``target`` write, then read, or go on where an earlier call stopped; ``name`` is the lessons' folder."""
        options, length, folder = subject.options, subject.sequence, self.folder / name
        mixture = dict(subject.mixture)
        count = -(-options.corpus_tokens // length)
        windows = self.corpus.windows(mixture, count, length, (subject.seed, 1))
        mark = fingerprint(target)
        if options.written_tokens:
            prompts = PromptSampler.build(self.corpus.train, mixture, self.tokenizer)
            plan = WritingPlan(options.written_tokens, options.temperatures, subject.seed)
            stream = write_stream(self.writer, prompts, folder / f"written-{mark}", plan)
            windows = np.concatenate([windows, _slices(stream, length)])
        lessons = read(target, windows, folder / f"read-{mark}")
        return DistillBatches(lessons, (count, len(windows) - count), subject)


def draw_batches(step: int, rows: int, share: float, pools: tuple[int, int], seed: int) -> np.ndarray:
    """``[rows]`` lesson numbers: ``share`` of them from the second pool, each pool in a new order in every epoch."""
    written = round(rows * share) if pools[1] else 0
    parts = []
    for pool, (take, first) in enumerate(((rows - written, 0), (written, pools[0]))):
        places = np.arange(step * take, (step + 1) * take)
        for epoch in np.unique(places // max(1, pools[pool])):
            order = np.random.default_rng((seed, 2, pool, int(epoch))).permutation(pools[pool])
            parts.append(first + order[places[places // pools[pool] == epoch] % pools[pool]])
    return np.concatenate(parts).astype(np.int64)


def _slices(stream: np.ndarray, length: int) -> np.ndarray:
    """``[N, length + 1]`` windows that follow one another."""
    count = (len(stream) - 1) // length
    return np.stack([stream[i * length : (i + 1) * length + 1] for i in range(count)]).astype(np.int64)
