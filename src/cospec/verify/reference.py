"""The same weights in transformers' code: the reference of the engine's tokens and distributions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cospec.bench.transformers_systems import load_plain
from cospec.core.rng import RandomStreams, StreamKind, exponentials
from cospec.llm import LLM
from cospec.models.loading import weights_dtype
from cospec.sampling_params import SamplingParams
from cospec.verify.joint_distribution import JointDistribution, Truncation, joint_distribution

ROWS = 64  # prefixes per forward


class Reference:
    """A plain Hugging Face model with the engine's weights and the engine's arithmetic.

    Attributes:
        dtype: of weights and arithmetic; on a CPU sums are float32.
    """

    def __init__(self, llm: LLM) -> None:
        engine = llm.engine
        assert llm.model_path is not None, "a loaded model has a folder"
        cuda = engine.config.device != "cpu" and torch.cuda.is_available()
        dtype = engine.parts.model.dtype if cuda else torch.float32
        self._device = torch.device("cuda" if cuda else "cpu")
        self.dtype = weights_dtype(llm.model_path, engine.config.dtype)
        rounded = self.dtype is torch.bfloat16 and not cuda
        self._model: Any = load_plain(llm.model_path, dtype, rounded, self._device.type)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """Return ``count`` greedy tokens of ``transformers.generate``."""
        ids = torch.tensor([list(prompt)], device=self._device)
        found = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return tuple(found[0, len(prompt) :].tolist())

    def shortfalls(
        self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, seed: int
    ) -> list[float]:
        """Return the score distance of each token of ``output`` to the best token; 0 for the best.

        The score of a greedy token is its logit. The score of a seeded token is logit / temperature plus the Gumbel
        noise of its position; ``match`` draws the largest score. Parameters other than the temperature are not applied.
        """
        scores = self._logits(prompt, output).double()
        if not params.greedy:
            scores = scores / params.temperature + self._gumbel_noise(len(prompt), scores.shape, seed)
        own = scores.gather(-1, torch.tensor(list(output))[:, None])[:, 0]
        return (scores.amax(-1) - own).tolist()

    def joint(self, prompt: Sequence[int], truncation: Truncation) -> JointDistribution:
        """Return the distribution of the first tokens after ``prompt`` at temperature 1."""
        return joint_distribution(self._last_logits, prompt, truncation)

    @torch.inference_mode()
    def _logits(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """Return ``[len(output), V]``: the rows that chose the tokens of ``output``."""
        ids = torch.tensor([[*prompt, *output[:-1]]], device=self._device)
        rows: Tensor = self._model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        return rows.cpu()

    @torch.inference_mode()
    def _last_logits(self, texts: list[list[int]]) -> Tensor:
        """Return ``[len(texts), V]``: the last logits of texts of one length."""
        parts = torch.tensor(texts, device=self._device).split(ROWS)
        return torch.cat([self._model(input_ids=part, use_cache=False).logits[:, -1].cpu() for part in parts])

    @staticmethod
    def _gumbel_noise(first: int, shape: Sequence[int], seed: int) -> Tensor:
        """Return the Gumbel noise of the target's draws at the positions from ``first`` on."""
        count, vocab = shape
        streams = [RandomStreams(seed, place).stream(place, StreamKind.TARGET) for place in range(first, first + count)]
        times = torch.stack([torch.from_numpy(exponentials(stream, vocab)) for stream in streams])
        return -times.log()


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the possible difference of a logit between two runs of the same forward with other orders of sums."""
    return 1e-3 if math.isclose(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) else 0.25
