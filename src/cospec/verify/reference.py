"""The same weights by transformers' own code: what the engine's tokens and laws are held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cospec.bench.hf_reference import load_plain
from cospec.core.rng import RandomStreams, StreamKind, exponentials
from cospec.llm import LLM
from cospec.models.loading import weights_dtype
from cospec.sampling_params import SamplingParams
from cospec.verify.joint import JointDistribution, Truncation, joint_distribution

ROWS = 64  # prefixes in one forward


class Reference:
    """A plain Hugging Face model with the engine's weights, held and run in the engine's arithmetic.

    Attributes:
        dtype: of the weights; of the arithmetic too, but that on a CPU sums are float32.
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
        """``count`` greedy tokens by ``transformers.generate``."""
        ids = torch.tensor([list(prompt)], device=self._device)
        found = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return tuple(found[0, len(prompt) :].tolist())

    def shortfalls(
        self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, seed: int
    ) -> list[float]:
        """How far each token of ``output`` is behind the one that stands first at its place, 0 where it is that one.

        The score of a greedy token is its logit. That of a seeded one is logit / temperature plus the Gumbel noise of
        its place, whose largest is the token that ``match`` draws. Parameters beside the temperature are not applied.
        """
        scores = self._logits(prompt, output).double()
        if not params.greedy:
            scores = scores / params.temperature + self._noise(len(prompt), scores.shape, seed)
        own = scores.gather(-1, torch.tensor(list(output))[:, None])[:, 0]
        return (scores.amax(-1) - own).tolist()

    def joint(self, prompt: Sequence[int], truncation: Truncation) -> JointDistribution:
        """The distribution of the first tokens behind ``prompt`` at temperature 1."""
        return joint_distribution(self._last_logits, prompt, truncation)

    @torch.inference_mode()
    def _logits(self, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
        """``[len(output), V]``: the rows that the tokens of ``output`` were chosen from."""
        ids = torch.tensor([[*prompt, *output[:-1]]], device=self._device)
        rows: Tensor = self._model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        return rows.cpu()

    @torch.inference_mode()
    def _last_logits(self, texts: list[list[int]]) -> Tensor:
        """``[len(texts), V]`` behind texts of one length."""
        parts = torch.tensor(texts, device=self._device).split(ROWS)
        return torch.cat([self._model(input_ids=part, use_cache=False).logits[:, -1].cpu() for part in parts])

    @staticmethod
    def _noise(first: int, shape: Sequence[int], seed: int) -> Tensor:
        """Gumbel noise of the target's own draws at the places from ``first`` on."""
        count, vocab = shape
        streams = [RandomStreams(seed, place).stream(place, StreamKind.TARGET) for place in range(first, first + count)]
        times = torch.stack([torch.from_numpy(exponentials(stream, vocab)) for stream in streams])
        return -times.log()


def tolerance_of(dtype: torch.dtype) -> float:
    """What two runs of the same forward may differ by in a logit, when sums are taken in other orders."""
    return 1e-3 if math.isclose(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) else 0.25
