"""Text that a model writes itself, for a drafter to learn from and to be measured on.

A drafter meets what its target writes, not what people wrote: the two differ most where the target repeats itself, at
temperature 0. Prompts are openings of documents and of lines in the corpus, in the recipe's mixture of domains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from cospec.core.rng import derive_seed
from cospec.sampling_params import SamplingParams
from cospec.training.corpus import end_token, save_array
from cospec.training.progress import bars

# (prompts of one length, tokens to write, temperature, seed) -> what was written behind each prompt.
Writer = Callable[[list[list[int]], int, float, int], list[list[int]]]

SHORTEST, LONGEST = 32, 128  # tokens of a prompt


def engine_writer(folder: Path) -> Writer:
    """Write by this package's own engine from a model folder, without drafts."""
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
    """Openings in token streams.

    Attributes:
        streams: ``uint16 [tokens]`` per domain.
        starts: per domain, where documents begin and where lines begin.
        weights: how often each domain is drawn.
        end: the token between documents.
    """

    streams: dict[str, np.ndarray]
    starts: dict[str, tuple[np.ndarray, np.ndarray]]
    weights: dict[str, float]
    end: int

    @classmethod
    def build(cls, streams: dict[str, np.ndarray], weights: dict[str, float], tokenizer: Tokenizer) -> PromptSampler:
        """Find the openings; a line begins behind every token that ends in a line feed."""
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
        """``rows`` prompts of one length, half from the starts of documents and half from the starts of lines."""
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
    """Have ``plan.tokens`` tokens written and return them, prompts included, as one ``uint16`` stream.

    Every batch is a file in ``folder``, so that an interrupted run goes on where it stopped.
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
    """How much is written, and how: ``tokens`` in all, prompts included, cycling through ``temperatures``."""

    tokens: int
    temperatures: tuple[float, ...]
    seed: int
    rows: int = 48
    length: int = 192


def _write_batch(writer: Writer, prompts: PromptSampler, plan: WritingPlan, number: int) -> np.ndarray:
    asked = prompts.draw(plan.rows, (plan.seed, 3, number))
    temperature = plan.temperatures[number % len(plan.temperatures)]
    answers = writer(asked, plan.length, temperature, plan.seed * 100_003 + number)
    closed = [answer if answer[-1:] == [prompts.end] else [*answer, prompts.end] for answer in answers]
    documents = (prompt + answer for prompt, answer in zip(asked, closed, strict=True))
    return np.concatenate([np.asarray(document, dtype=np.uint16) for document in documents])
