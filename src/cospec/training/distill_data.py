"""The data of a distillation: corpus windows and text that the target generated, for a mixture of domains.

A generic drafter's mixture has all domains, a specialist's one. Heads on the target use the same data.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from zlib import crc32

import numpy as np
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from cospec.training.corpus import Corpus, end_token
from cospec.training.correct_answers import AnswerWriter, read_questions
from cospec.training.export import save_model
from cospec.training.generate import PromptSampler, Writer, WritingPlan, engine_writer, write_stream
from cospec.training.recipe import Distillation
from cospec.training.teacher_cache import TeacherCache, fingerprint, read


@dataclass(frozen=True)
class DistillOptions:
    """The contents of the training windows.

    Attributes:
        mixture: weight of each domain, for corpus windows and for prompts.
        options: amounts of corpus text and generated text.
        sequence: tokens of a window.
    """

    mixture: Mapping[str, float]
    options: Distillation
    sequence: int
    seed: int


@dataclass(frozen=True)
class DistillBatches:
    """Training windows of one mixture, the corpus' windows first. ``pools`` counts corpus and generated windows."""

    teacher_cache: TeacherCache
    pools: tuple[int, int]
    distill_options: DistillOptions

    def draw(self, step: int, rows: int) -> np.ndarray:
        """Return ``[rows]`` window numbers of one training step."""
        return draw_batches(
            step, rows, self.distill_options.options.written_share, self.pools, self.distill_options.seed
        )


@dataclass(frozen=True)
class DistillData:
    """The sources of training windows: tokenizer, corpus, cache folder, and the writer of the target's text."""

    tokenizer: Tokenizer
    corpus: Corpus
    folder: Path
    writer: Writer

    @classmethod
    def open(cls, target: LlamaForCausalLM, tokenizer: Tokenizer, corpus: Corpus, out: Path) -> DistillData:
        """Build the data in ``out``, with an engine that generates from ``target``."""
        folder = out / "lessons" / "target"
        save_model(copy.deepcopy(target), folder, out / "tokenizer", end_token(tokenizer))
        return cls(tokenizer, corpus, out / "lessons", engine_writer(folder))

    def make(self, target: LlamaForCausalLM, distill_options: DistillOptions, name: str = "") -> DistillBatches:
        """Generate with ``target`` and compute its states, or resume; ``name`` is the folder of the cache."""
        options, length, folder = distill_options.options, distill_options.sequence, self.folder / name
        mixture = dict(distill_options.mixture)
        count = -(-options.corpus_tokens // length)
        windows = self.corpus.windows(mixture, count, length, (distill_options.seed, 1))
        mark = fingerprint(target)
        if options.written_tokens:
            written = _slices(self._written(distill_options, folder, mark), length)
            windows = np.concatenate([windows, written])
        teacher_cache = read(target, windows, folder / f"read-{mark}")
        return DistillBatches(teacher_cache, (count, len(windows) - count), distill_options)

    def _written(self, distill_options: DistillOptions, folder: Path, mark: str) -> np.ndarray:
        """Return the target's text; the share of a domain with an answer rule has right answers only."""
        options, seed, mixture = distill_options.options, distill_options.seed, dict(distill_options.mixture)
        rule, streams = options.answers, list[np.ndarray]()
        left = options.written_tokens
        if rule is not None:  # text of another rule is not read again
            mark += f"-{crc32(rule.model_dump_json().encode()):08x}"
        if rule is not None and mixture.get(rule.domain, 0) > 0:
            share = mixture.pop(rule.domain) / sum(distill_options.mixture.values())
            plan = WritingPlan(round(left * share), options.temperatures, seed)
            questions = read_questions(self.corpus.train[rule.domain], self.tokenizer, rule)
            answers = AnswerWriter(self.writer, self.tokenizer, rule, folder / f"answers-{mark}")
            streams.append(answers.write(questions, plan))
            left -= plan.tokens
        if any(mixture.values()):
            prompts = PromptSampler.build(self.corpus.train, mixture, self.tokenizer)
            plan = WritingPlan(left, options.temperatures, seed)
            streams.append(write_stream(self.writer, prompts, folder / f"written-{mark}", plan))
        return np.concatenate(streams)


def draw_batches(step: int, rows: int, share: float, pools: tuple[int, int], seed: int) -> np.ndarray:
    """Draw ``[rows]`` window numbers, ``share`` of them from the second pool; each epoch has a new order."""
    written = round(rows * share) if pools[1] else 0
    parts = []
    for pool, (take, first) in enumerate(((rows - written, 0), (written, pools[0]))):
        places = np.arange(step * take, (step + 1) * take)
        for epoch in np.unique(places // max(1, pools[pool])):
            order = np.random.default_rng((seed, 2, pool, int(epoch))).permutation(pools[pool])
            parts.append(first + order[places[places // pools[pool] == epoch] % pools[pool]])
    return np.concatenate(parts).astype(np.int64)


def _slices(stream: np.ndarray, length: int) -> np.ndarray:
    """Split a stream into consecutive windows ``[N, length + 1]``; none of a shorter stream."""
    count = max(0, (len(stream) - 1) // length)
    if not count:
        return np.zeros((0, length + 1), np.int64)
    return np.stack([stream[i * length : (i + 1) * length + 1] for i in range(count)]).astype(np.int64)
