"""Keywords of vLLM's ``LLM`` without a function in cospec: harmless values are accepted, other values raise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cospec.errors import InvalidInput
from cospec.sampling_params import MAX_LOGPROBS


@dataclass(frozen=True, slots=True)
class _Accepted:
    """Which values of a keyword change nothing, and the allowed values in words."""

    harmless: Callable[[Any], bool]
    allowed: str


def _only(*values: Any) -> Callable[[Any], bool]:
    return lambda given: any(type(given) is type(value) and given == value for value in values)


def _number(least: float, most: float = float("inf")) -> Callable[[Any], bool]:
    return lambda given: type(given) in (int, float) and least <= given <= most


_switch = _Accepted(_only(True, False), "True or False; both have the same effect")
_one_device = _Accepted(_only(1), "1: an engine runs on one device; start one server for each device")
_none = "None: a model is a folder, or the newest version of a hub name"

ACCEPTED: Mapping[str, _Accepted] = {
    "data_parallel_size": _one_device,
    "distributed_executor_backend": _Accepted(_only(None, "uni"), "None: an engine runs on one device"),
    "trust_remote_code": _Accepted(_only(False), "False: no code from a model folder is run"),
    "seed": _Accepted(_only(None, 0), "None or 0; SamplingParams(seed=...) makes an output repeatable"),
    "enforce_eager": _switch,
    "disable_log_stats": _switch,
    "disable_custom_all_reduce": _switch,
    "enable_chunked_prefill": _Accepted(_only(True, None), "True; max_num_batched_tokens sets the size of a chunk"),
    "max_logprobs": _Accepted(
        lambda given: type(given) is int and 0 <= given <= MAX_LOGPROBS, f"a whole number from 0 to {MAX_LOGPROBS}"
    ),
    "max_seq_len_to_capture": _Accepted(_number(0), "a number from 0 up, which has no effect"),
    "swap_space": _Accepted(_number(0), "a number from 0 up, which has no effect"),
    "cpu_offload_gb": _Accepted(_number(0, 0), "0: weights and cache stay on one device"),
    "load_format": _Accepted(_only("auto", "safetensors"), "'auto' or 'safetensors'"),
    "tokenizer_mode": _Accepted(_only("auto"), "'auto'"),
    "skip_tokenizer_init": _Accepted(_only(False), "False; prompts may be token ids in any case"),
    "revision": _Accepted(_only(None), _none),
    "tokenizer_revision": _Accepted(_only(None), _none),
    "download_dir": _Accepted(_only(None), "None; the environment variable HF_HOME names the folder"),
    "enable_lora": _Accepted(_only(False), "False; a folder with a LoRA adapter is a model, see model"),
    "task": _Accepted(_only("auto", "generate"), "'auto' or 'generate'"),
    "runner": _Accepted(_only("auto", "generate"), "'auto' or 'generate'"),
}


def without_vllm_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``LLM`` without the keywords that only vLLM has.

    Raises:
        InvalidInput: such a keyword has a value that would change vLLM's behaviour.
    """
    for name in given.keys() & ACCEPTED.keys():
        if not ACCEPTED[name].harmless(given[name]):
            raise InvalidInput(name, given[name], ACCEPTED[name].allowed)
    return {name: value for name, value in given.items() if name not in ACCEPTED}
