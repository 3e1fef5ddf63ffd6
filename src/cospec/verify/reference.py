"""The same weights in transformers' code: the reference of the engine's tokens and distributions.

Several models are blended row by row, by the blend of the engine, which may be the user's own function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cospec.bench.transformers_systems import load_plain
from cospec.core.interfaces import Blend
from cospec.core.sampling import History, edit
from cospec.llm import LLM
from cospec.models.loading import weights_dtype
from cospec.rng.random_streams import RandomStreams, StreamKind, exponentials
from cospec.sampling_params import SamplingParams
from cospec.verify.joint_distribution import JointDistribution, Truncation, joint_distribution

ROWS = 64  # prefixes per forward


class Reference:
    """Plain Hugging Face models with the engine's weights and the engine's arithmetic.

    Attributes:
        dtype: of weights and arithmetic; on a CPU sums are float32.
    """

    def __init__(self, llm: LLM, blend: Blend) -> None:
        engine = llm.engine
        paths = llm.model_paths
        assert paths, "a loaded model has a folder"
        cuda = engine.config.device != "cpu" and torch.cuda.is_available()
        dtype = engine.parts.model.dtype if cuda else torch.float32
        self._device = torch.device("cuda" if cuda else "cpu")
        self.dtype = weights_dtype(paths[0], engine.config.dtype)
        rounded = self.dtype is torch.bfloat16 and not cuda
        self._models: list[Any] = [load_plain(path, dtype, rounded, self._device.type) for path in paths]
        self._blend = blend

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], count: int) -> tuple[int, ...]:
        """Return ``count`` greedy tokens of ``transformers.generate``; several models take a forward for each token."""
        if len(self._models) > 1:
            text = list(prompt)
            for _ in range(count):
                text.append(int(self._last_logits([text]).argmax()))
            return tuple(text[len(prompt) :])
        ids = torch.tensor([list(prompt)], device=self._device)
        found = self._models[0].generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
        )
        return tuple(found[0, len(prompt) :].tolist())

    def shortfalls(
        self, prompt: Sequence[int], output: Sequence[int], params: SamplingParams, seed: int
    ) -> list[float]:
        """Return the score distance of each token of ``output`` to the best token; 0 for the best.

        The score of a greedy token is its logit. The score of a seeded token is logit / temperature plus the Gumbel
        noise of its position; ``match`` draws the largest score. Of the other parameters only ``logits_processors``
        are applied, by new processors at each token.
        """
        logits = self._logits(prompt, output)
        if params.logits_processors:
            texts = [[*prompt, *output[:place]] for place in range(len(output))]
            rows = [
                edit(row[None], params, History(text, len(prompt), [()]))
                for row, text in zip(logits, texts, strict=True)
            ]
            logits = torch.cat(rows)
        scores = logits.double()
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
        return self._blended(ids)[0, len(prompt) - 1 :]

    @torch.inference_mode()
    def _last_logits(self, texts: list[list[int]]) -> Tensor:
        """Return ``[len(texts), V]``: the last logits of texts of one length."""
        parts = torch.tensor(texts, device=self._device).split(ROWS)
        return torch.cat([self._blended(part)[:, -1] for part in parts])

    def _blended(self, ids: Tensor) -> Tensor:
        """Return the logits ``[texts, tokens, V]`` of the members' blend."""
        members = [self._models[member] for member in self._blend.members]
        logits = [model(input_ids=ids, use_cache=False).logits.cpu() for model in members]
        rows = self._blend.combine([each.flatten(0, 1) for each in logits])
        return rows.view(logits[0].shape)

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
