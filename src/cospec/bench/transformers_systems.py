"""transformers' decoding methods, in this process and on the same weights, as comparable systems.

``transformers`` is ``generate``. ``transformers-assisted`` adds a drafter, and ``transformers-lookup`` prompt lookup.
Both take one prompt at a time, so several prompts run in sequence. ``transformers-continuous`` is continuous batching.
All systems run on the CPU in float32, like the engine.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import Field

from cospec.bench.counters import SpeculationCounters
from cospec.bench.request_record import Chunk, Params, Prompt, Timing
from cospec.models.hf_loading import hf_config, hf_model
from cospec.models.hf_logging import hf_logging_off
from cospec.models.linear import weight_of
from cospec.models.loading import load_tokenizer, resolve, weights_dtype
from cospec.plugin_options import Options, parse

Ids = list[list[int]]


class TransformersOptions(Options):
    """``dtype`` is of weights and arithmetic; ``auto`` keeps the file's."""

    model: str
    dtype: str = "auto"
    threads: int | None = Field(default=None, ge=1, le=64)


class AssistedOptions(TransformersOptions):
    """``assistant`` drafts; by default transformers chooses the number of tokens."""

    assistant: str = "zoo:drafter"
    num_assistant_tokens: int | None = Field(default=None, ge=1)


class LookupOptions(TransformersOptions):
    """Options of prompt lookup in transformers' names."""

    prompt_lookup_num_tokens: int = Field(default=10, ge=1)
    max_matching_ngram_size: int = Field(default=2, ge=1)


class ContinuousOptions(TransformersOptions):
    """Options of the paged cache in transformers' names."""

    num_blocks: int = Field(default=64, ge=1)
    page_size: int = Field(default=256, ge=1)
    max_batch_tokens: int = Field(default=1024, ge=1)


@dataclass(frozen=True, slots=True)
class Written:
    """One output: its tokens, and the time of each on the machine's monotonic clock."""

    tokens: list[int]
    times: list[float]
    error: str | None = None


Decode = Callable[[Any, Ids, dict[str, Any]], list[Written]]
"""(model, prompts, generation settings) -> one output per prompt."""


@dataclass(frozen=True, slots=True)
class DecodingMethod:
    """A decoding method as an entry of ``SYSTEMS``.

    Attributes:
        prepare: turns options into a decoding function and its loaded objects.
    """

    options: type[TransformersOptions]
    prepare: Callable[[Any], Decode]

    def build(self, name: str, options: Mapping[str, Any]) -> TransformersSystem:
        """See ``systems.Buildable``."""
        return TransformersSystem(name, parse(self.options, options, f"system {name}."), self.prepare)


class TransformersSystem:
    """A transformers model with one decoding method."""

    def __init__(self, name: str, options: TransformersOptions, prepare: Callable[[Any], Decode]) -> None:
        self.name = name
        self._options, self._prepare = options, prepare
        self._loaded: tuple[Any, Any, Decode, Any] | None = None

    def start(self) -> None:
        """See ``systems.System``."""
        from transformers import GenerationConfig

        if self._options.threads is not None:
            torch.set_num_threads(self._options.threads)
        folder = resolve(self._options.model)
        model = _load(self._options.model, self._options.dtype)
        eos = None
        if (folder / "generation_config.json").exists():
            eos = GenerationConfig.from_pretrained(folder).eos_token_id
        tokenizer = load_tokenizer(folder)
        self._loaded = model, tokenizer, self._prepare(self._options), eos or tokenizer.eos_token_id

    def run(self, prompts: Sequence[Prompt], params: Params) -> list[Timing]:
        """See ``systems.System``."""
        assert self._loaded is not None, "start comes before run"
        model, tokenizer, decode, eos = self._loaded
        ids = [list(tokenizer.encode(prompt.text)) for prompt in prompts]
        settings: dict[str, Any] = {"max_new_tokens": params.max_tokens, "do_sample": params.temperature > 0}
        if params.temperature > 0:
            settings |= {"temperature": params.temperature, "top_k": 0}
        settings["eos_token_id"] = None if params.ignore_eos else eos
        if params.seed is not None:
            torch.manual_seed(params.seed)
        started = time.monotonic()
        with torch.no_grad(), hf_logging_off():
            outputs = decode(model, ids, settings)
        end = time.monotonic() - started
        return [
            Timing(
                id=prompt.id,
                arrival=0.0,
                sent=0.0,
                end=max((at - started for at in output.times), default=end),
                chunks=chunks_of(tokenizer, output, started),
                category=prompt.category,
                prompt_tokens=len(own),
                reported_tokens=len(output.tokens),
                finish_reason="stop" if len(output.tokens) < params.max_tokens else "length",
                error=output.error,
                error_kind=None if output.error is None else "engine",
            )
            for prompt, own, output in zip(prompts, ids, outputs, strict=True)
        ]

    def counters(self) -> SpeculationCounters | None:
        """transformers has no counters."""
        return None

    def cost_per_hour(self) -> float:
        """See ``systems.System``."""
        return 0.0

    def stop(self) -> None:
        """See ``systems.System``."""
        if self._loaded is not None:
            self._loaded[0].destroy_cached_continuous_batching_manager()
        self._loaded = None
        gc.collect()


class _Stamps:
    """A streamer for ``generate`` that records token times. The first call has the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        """Add tokens of one step: ``[batch]`` from plain decoding, ``[n]`` of one prompt from assisted decoding."""
        if self._begun:
            self.times.extend([time.monotonic()] * value.shape[-1])
        self._begun = True

    def end(self) -> None:
        """End of the output."""


def _plain(options: TransformersOptions) -> Decode:
    """Decode one padded batch."""

    def decode(model: Any, ids: Ids, settings: dict[str, Any]) -> list[Written]:
        longest = max(map(len, ids))
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
        rows = torch.tensor([[0] * (longest - len(row)) + row for row in ids])
        stamps = _Stamps()
        found = model.generate(rows, attention_mask=mask, streamer=stamps, generation_config=_config(settings))
        steps = found.shape[1] - longest
        times = stamps.times[:: len(ids)]
        return [
            cut_at_eos(row, times, settings["eos_token_id"]) for row in found[:, longest : longest + steps].tolist()
        ]

    return decode


def _one_by_one(extra: Mapping[str, Any]) -> Decode:
    """Decode each prompt alone, with extra arguments of ``generate``."""

    def decode(model: Any, ids: Ids, settings: dict[str, Any]) -> list[Written]:
        written = []
        for row in ids:
            stamps = _Stamps()
            own = torch.tensor([row])
            found = model.generate(
                own,
                attention_mask=torch.ones_like(own),
                streamer=stamps,
                generation_config=_config(settings),
                **extra,
            )
            written.append(cut_at_eos(found[0, len(row) :].tolist(), stamps.times, settings["eos_token_id"]))
        return written

    return decode


def _assisted(options: AssistedOptions) -> Decode:
    assistant = _load(options.assistant, options.dtype)
    if options.num_assistant_tokens is not None:
        assistant.generation_config.num_assistant_tokens = options.num_assistant_tokens
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return _one_by_one({"assistant_model": assistant})


def _lookup(options: LookupOptions) -> Decode:
    keys = ("prompt_lookup_num_tokens", "max_matching_ngram_size")
    return _one_by_one({key: getattr(options, key) for key in keys})


def _continuous(options: ContinuousOptions) -> Decode:
    """Decode all prompts with transformers' scheduler and paged cache."""
    from transformers import ContinuousBatchingConfig

    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # results report the failures
    keys = ("num_blocks", "page_size", "max_batch_tokens")
    cache = ContinuousBatchingConfig(
        **{key: getattr(options, key) for key in keys}, use_cuda_graph=False, use_async_batching=False
    )

    before: dict[str, Any] = {}  # the settings of its manager, which is reused between batches

    def decode(model: Any, ids: Ids, settings: dict[str, Any]) -> list[Written]:
        if settings != before:
            model.destroy_cached_continuous_batching_manager()
            before.clear()
            before.update(settings)
        eos = -1 if settings["eos_token_id"] is None else settings["eos_token_id"]
        config = _config({**settings, "eos_token_id": eos})
        found = model.generate_batch(
            ids,
            generation_config=config,
            continuous_batching_config=cache,
            record_timestamps=True,
            persistent_manager=True,
        )
        if len(found) < len(ids):
            return [Written([], [], "continuous batching lost requests of this batch")] * len(ids)
        shift = time.monotonic() - time.perf_counter()  # converts its clock to the monotonic clock
        return [
            Written(list(one.generated_tokens), [at + shift for at in one.timestamps or ()], one.error)
            for one in found.values()
        ]

    return decode


def _config(settings: Mapping[str, Any]) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(**{**settings, "pad_token_id": 0})


def _load(name: str, dtype: str) -> Any:
    folder = resolve(name)
    return load_plain(folder, weights_dtype(folder, dtype))


def cut_at_eos(tokens: list[int], times: list[float], eos: int | list[int] | None) -> Written:
    """Return the tokens up to the first end token, inclusive."""
    ends = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    count = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return Written(tokens[:count], times[:count])


def chunks_of(tokenizer: Any, output: Written, started: float) -> tuple[Chunk, ...]:
    """Return readable text with its times; a character of several tokens waits for the last token."""
    chunks, shown = [], ""
    for place, at in enumerate(output.times, start=1):
        last = place == len(output.times)
        if not last and output.times[place] == at:
            continue  # these tokens arrived together
        text = tokenizer.decode(output.tokens[: len(output.tokens) if last else place], skip_special_tokens=True)
        if (last or not text.endswith("\ufffd")) and len(text) > len(shown):
            chunks.append(Chunk(at - started, text[len(shown) :]))
            shown = text
    return tuple(chunks)


GENERATE = DecodingMethod(TransformersOptions, _plain)
ASSISTED = DecodingMethod(AssistedOptions, _assisted)
LOOKUP = DecodingMethod(LookupOptions, _lookup)
CONTINUOUS = DecodingMethod(ContinuousOptions, _continuous)


def load_plain(folder: Path, dtype: torch.dtype, rounded: bool = False, device: str = "cpu") -> Any:
    """Load a Hugging Face causal LM in evaluation mode, with default generation settings: greedy, no end token.

    Args:
        dtype: of the arithmetic.
        rounded: round weights and inputs of linear layers to bfloat16, as the engine does on a CPU.
    """
    from transformers import GenerationConfig

    with hf_logging_off():
        model: Any = hf_model(folder, hf_config(folder.name, folder), dtype)[0]
    if rounded:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().to(dtype)
        for module in model.modules():
            if weight_of(module) is not None:
                module.register_forward_pre_hook(lambda _, inputs: (inputs[0].bfloat16().to(dtype),))
    model.generation_config = GenerationConfig()
    return model.to(device).eval().requires_grad_(False)
