"""llama.cpp in this process, through the package ``llama_cpp``, as a comparable system on GGUF files.

One prompt runs at a time, so several prompts run in sequence.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from cospec.bench.counters import SpeculationCounters
from cospec.bench.request_record import Params, Prompt, Timing
from cospec.bench.transformers_systems import Written, chunks_of
from cospec.errors import InvalidInput, ModelError, words
from cospec.models.files.gguf_as_folder import is_gguf, linked_file
from cospec.models.loading import load_tokenizer
from cospec.models.model_folder import resolve
from cospec.plugin_options import Options, parse


class LlamaCppOptions(Options):
    """Options in llama.cpp's names; ``model`` is a GGUF file."""

    model: str
    n_ctx: int = Field(default=2048, ge=8)
    n_threads: int | None = Field(default=None, ge=1, le=256)


class LlamaCppSystem:
    """A GGUF file in llama.cpp."""

    def __init__(self, name: str, options: LlamaCppOptions) -> None:
        self.name = name
        self._options = options
        self._loaded: tuple[Any, Any] | None = None

    @classmethod
    def build(cls, name: str, options: Mapping[str, Any]) -> LlamaCppSystem:
        """See ``systems.Buildable``."""
        return cls(name, parse(LlamaCppOptions, options, f"system {name}."))

    def start(self) -> None:
        """See ``systems.System``.

        Raises:
            ModelError: the package ``llama_cpp`` is missing.
            InvalidInput: the model is no GGUF file.
        """
        folder = resolve(self._options.model)
        if not is_gguf(folder):
            raise InvalidInput(f"system {self.name}.model", words(self._options.model), "a GGUF file")
        self._loaded = load(linked_file(folder), self._options.n_ctx, self._options.n_threads), load_tokenizer(folder)

    def run(self, prompts: Sequence[Prompt], params: Params) -> list[Timing]:
        """See ``systems.System``."""
        assert self._loaded is not None, "start comes before run"
        llama, tokenizer = self._loaded
        ids = [list(tokenizer.encode(prompt.text)) for prompt in prompts]
        started = time.monotonic()
        outputs = [self._write(llama, own, params) for own in ids]
        return [
            Timing(
                id=prompt.id,
                arrival=0.0,
                sent=0.0,
                end=max((at - started for at in output.times), default=0.0),
                chunks=chunks_of(tokenizer, output, started),
                category=prompt.category,
                prompt_tokens=len(own),
                reported_tokens=len(output.tokens),
                finish_reason="stop" if len(output.tokens) < params.max_tokens else "length",
            )
            for prompt, own, output in zip(prompts, ids, outputs, strict=True)
        ]

    def _write(self, llama: Any, ids: list[int], params: Params) -> Written:
        sampling = {"temp": params.temperature, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
        if params.seed is not None:
            llama.set_seed(params.seed)
        tokens: list[int] = []
        times: list[float] = []
        for token in llama.generate(ids, **sampling):
            tokens.append(int(token))
            times.append(time.monotonic())
            ended = token == llama.token_eos() and not params.ignore_eos
            if ended or len(tokens) == params.max_tokens:
                break
        return Written(tokens, times)

    def counters(self) -> SpeculationCounters | None:
        """See ``systems.System``."""
        return None

    def cost_per_hour(self) -> float:
        """See ``systems.System``."""
        return 0.0

    def stop(self) -> None:
        """See ``systems.System``."""
        self._loaded = None
        gc.collect()


def load(file: Path, n_ctx: int, n_threads: int | None = None, logits_all: bool = False) -> Any:
    """Load a GGUF file in llama.cpp.

    Args:
        logits_all: keep the logits of all tokens of a prompt in ``scores``.

    Raises:
        ModelError: the package ``llama_cpp`` is missing.
    """
    try:
        from llama_cpp import Llama
    except ImportError:
        raise ModelError("The system llama-cpp needs the Python package llama-cpp-python, which is missing.") from None
    return Llama(
        str(file), n_ctx=n_ctx, n_threads=n_threads, n_threads_batch=n_threads, logits_all=logits_all, verbose=False
    )
