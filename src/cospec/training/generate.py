"""Text that a model generates, for the training and the measurement of a drafter.

A drafter sees its target's text instead of human text. The two differ most at temperature 0, where the target repeats
itself. Prompts are beginnings of documents and of lines in the corpus, in the recipe's mixture of domains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cospec.rng.random_streams import derive_seed
from cospec.sampling_params import SamplingParams
from cospec.training.corpus import end_token, save_array
from cospec.training.trainer import bars

# (prompts of one length, tokens to generate, temperature, seed) -> the continuation of each prompt.
Writer = Callable[[list[list[int]], int, float, int], list[list[int]]]

SHORTEST, LONGEST = 32, 128  # tokens of a prompt


def engine_writer(folder: Path) -> Writer:
    """Generate with cospec's engine from a model folder, without drafts."""
    from cospec.llm import LLM

    llm = LLM(str(folder), {"method": "off"})

    def write(prompts: list[list[int]], length: int, temperature: float, seed: int) -> list[list[int]]:
        params = [
            SamplingParams(temperature=temperature, max_tokens=length, seed=derive_seed(seed, index))
            for index in range(len(prompts))
        ]
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    return write


@dataclass(frozen=True)
class PromptSampler:
    """Samples beginnings of documents and lines in token streams.

    Attributes:
        streams: ``uint16 [tokens]`` per domain.
        starts: per domain, the positions of document starts and of line starts.
        weights: sampling weight of each domain.
        end: the token between documents.
    """

    streams: dict[str, np.ndarray]
    starts: dict[str, tuple[np.ndarray, np.ndarray]]
    weights: dict[str, float]
    end: int

    @classmethod
    def build(cls, streams: dict[str, np.ndarray], weights: dict[str, float], tokenizer: Tokenizer) -> PromptSampler:
        """Find the starts; a line begins after every token that ends in a line feed."""
        end = end_token(tokenizer)
        feeds = [id for id in range(tokenizer.get_vocab_size()) if tokenizer.decode([id]).endswith("\n")]
        room = {name: stream[: max(1, len(stream) - LONGEST)] for name, stream in streams.items()}
        starts = {
            name: (
                np.append(0, np.flatnonzero(part == end) + 1),
                np.append(0, np.flatnonzero(np.isin(part, feeds)) + 1),
            )
            for name, part in room.items()
        }
        return cls(streams, starts, weights, end)

    def draw(self, rows: int, seed: Sequence[int]) -> list[list[int]]:
        """Draw ``rows`` prompts of one length, half from document starts and half from line starts."""
        generator = np.random.default_rng(seed)
        length = int(generator.integers(SHORTEST, LONGEST))
        names = [name for name in self.streams if self.weights.get(name, 0) > 0]
        share = np.array([self.weights[name] for name in names])
        drawn: list[list[int]] = []
        for domain in generator.choice(len(names), size=rows, p=share / share.sum()):
            name = names[domain]
            start = int(generator.choice(self.starts[name][int(generator.integers(2))]))
            drawn.append([int(token) for token in self.streams[name][start : start + length]])
        return drawn


def write_stream(writer: Writer, prompts: PromptSampler, folder: Path, plan: WritingPlan) -> np.ndarray:
    """Generate ``plan.tokens`` tokens; return the tokens, prompts included, as one ``uint16`` stream.

    Every batch is a file in ``folder``, so that an interrupted run resumes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    pieces: list[np.ndarray] = []
    with bars() as progress:
        bar = progress.add_task("target writes", total=plan.tokens)
        while sum(len(piece) for piece in pieces) < plan.tokens:
            number = len(pieces)
            path = folder / f"{number:05d}.npy"
            if not path.exists():
                save_array(path, _write_batch(writer, prompts, plan, number))
            pieces.append(np.load(path))
            progress.update(bar, completed=min(plan.tokens, sum(len(piece) for piece in pieces)))
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint16)


@dataclass(frozen=True)
class WritingPlan:
    """The plan of generated text: ``tokens`` in total, prompts included, in turn at the ``temperatures``."""

    tokens: int
    temperatures: tuple[float, ...]
    seed: int
    rows: int = 48
    length: int = 192


def _write_batch(writer: Writer, prompts: PromptSampler, plan: WritingPlan, number: int) -> np.ndarray:
    drawn_prompts = prompts.draw(plan.rows, (plan.seed, 3, number))
    temperature = plan.temperatures[number % len(plan.temperatures)]
    answers = writer(drawn_prompts, plan.length, temperature, plan.seed * 100_003 + number)
    closed = [answer if answer[-1:] == [prompts.end] else [*answer, prompts.end] for answer in answers]
    documents = (prompt + answer for prompt, answer in zip(drawn_prompts, closed, strict=True))
    return np.concatenate([np.asarray(document, dtype=np.uint16) for document in documents])
