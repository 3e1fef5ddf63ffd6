"""The systems of ``benchmarks.gpu``, their work, and their times with a synchronized device."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from cospec import LLM, SamplingParams
from cospec.models.hf_logging import hf_logging_off

PAGE = 256  # tokens of a page of continuous batching


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """Prompts, and the number of tokens that each gets."""

    prompts: list[list[int]]
    tokens: int


Call = Callable[[Work], list[int]]
"""Generates, and returns the number of tokens that each prompt got."""


class Clock:
    """The time left for the whole run, and the seconds that each part has needed."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self._needed: dict[str, float] = {}

    @property
    def left(self) -> float:
        """Seconds until the end of the run."""
        return self._end - time.monotonic()

    def needed(self, part: str, seconds: float, size: float = 1.0) -> None:
        """Remember the seconds of a part, in place of those before."""
        self._needed[part] = seconds / size

    def allows(self, part: str, size: float = 1.0) -> bool:
        """Whether the time left suffices for a part, whose seconds are proportional to its size."""
        return self.left > self._needed.get(part, 0.0) * size


class Timed:
    """A system whose calls are timed with a synchronized device; after an error it does nothing.

    ``seconds`` has an entry per call.
    """

    def __init__(self, call: Call, clock: Clock) -> None:
        self._call, self._clock = call, clock
        self.seconds: list[float] = []
        self.error: str | None = None

    def __call__(self, work: Work) -> None:
        """Run, and store the seconds or the error."""
        if self.error is not None:
            return
        try:
            if self._clock.left <= 0:
                raise TimeoutError("no time was left for all turns")
            synchronize()
            started = time.perf_counter()
            lengths = self._call(work)
            synchronize()
            taken = time.perf_counter() - started
            if lengths != [work.tokens] * len(work.prompts):
                raise RuntimeError(f"generated {lengths} tokens; each prompt needs {work.tokens}")
            self.seconds.append(taken)
        except Exception as error:
            self.error = one_line(error)


def one_line(error: Exception) -> str:
    """Return kind and message of an error without line breaks, at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def cospec_call(llm: LLM, temperature: float, stats: list[Any] | None = None) -> Call:
    """Return cospec as a system; ``stats`` gets the counters of each request."""

    def call(work: Work) -> list[int]:
        params = SamplingParams(max_tokens=work.tokens, temperature=temperature, ignore_eos=True)
        answers = llm.generate(work.prompts, params)
        if stats is not None:
            stats.extend(answer.stats for answer in answers)
        return [len(answer.outputs[0].token_ids) for answer in answers]

    return call


def generate_call(model: Any, settings: Mapping[str, Any], **extra: Any) -> Call:
    """Return ``generate`` of transformers as a system."""

    def call(work: Work) -> list[int]:
        ids = torch.tensor(work.prompts, device=model.device)
        config = GenerationConfig(max_new_tokens=work.tokens, pad_token_id=0, **settings)
        with torch.no_grad(), hf_logging_off():
            found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config, **extra)
        return [int(found.shape[1] - ids.shape[1])] * len(work.prompts)

    return call


def continuous_call(model: Any, batch: int, prompt: int, output: int) -> Call:
    """Return continuous batching of transformers as a system; its manager is kept between calls."""
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    model.destroy_cached_continuous_batching_manager()
    wanted = {
        "page_size": PAGE,
        "num_blocks": batch * (-(-(prompt + output) // PAGE) + 1),
        "max_batch_tokens": batch * prompt,
        # Only an installed package is used, because a switch may otherwise download kernels.
        "auto_switch_to_flash": importlib.util.find_spec("flash_attn") is not None,
    }
    if model.device.type == "cpu":
        wanted |= {"use_cuda_graph": False, "use_async_batching": False}
    known = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
    cache = ContinuousBatchingConfig(**{key: value for key, value in wanted.items() if key in known})
    options = {"continuous_batching_config": cache, "persistent_manager": True}
    taken = inspect.signature(model.generate_batch).parameters
    options = {key: value for key, value in options.items() if key in taken}

    def call(work: Work) -> list[int]:
        config = GenerationConfig(max_new_tokens=work.tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        with hf_logging_off():
            found = model.generate_batch(
                work.prompts, generation_config=config, max_new_tokens=work.tokens, **options
            ).values()
        if wrong := [one.error for one in found if one.error is not None]:
            raise RuntimeError(wrong[0])
        return [len(one.generated_tokens) for one in found]

    return call
