"""The compiled library: loads the library, gives the reason if none is loaded, and calls its kernels over logits.

The installation builds the library if a C++ compiler exists. Without the library everything runs on torch and numpy.
Kernels for whole models are in ``cospec.native.operators``.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import sys
from array import array
from collections.abc import Sequence
from ctypes import POINTER, c_double, c_float, c_int, c_int64, c_long, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cospec.errors import InvalidInput, ModelError
from cospec.machine import usable_processors
from cospec.native import structs

if TYPE_CHECKING:  # decisions that draw random numbers need no torch
    from torch import Tensor

ISAS = ("base", "neon_dot", "neon_i8mm", "avx2", "avx_vnni", "avx512", "avx512_vnni", "avx512_bf16", "amx_bf16")
"""From the lowest to the highest."""
EXPERIMENTAL = ("neon_dot", "neon_i8mm")
"""Sets that were not measured on a processor that has them: never the default."""
MAX_THREADS = 64
SWITCH = "COSPEC_NATIVE"  # environment variable; ``off`` loads no library, in this process and those that it starts

_POPULATE_WRITE = 23  # of madvise, Linux 5.14; the module mmap lacks the name

# Arguments and result of each function of the library; structs go by address.
SIGNATURES: dict[str, tuple[list[Any], Any]] = {
    "cospec_struct_size": ([ctypes.c_char_p], c_long),
    "cospec_field_offset": ([ctypes.c_char_p, ctypes.c_char_p], c_long),
    "cospec_isa": ([], ctypes.c_char_p),
    "cospec_has_isa": ([ctypes.c_char_p], c_int),
    "cospec_set_isa": ([ctypes.c_char_p], c_int),
    "cospec_set_threads": ([c_int], None),
    "cospec_threads": ([], c_int),
    "cospec_cache_format": ([ctypes.c_char_p], c_int),
    "cospec_weight_format": ([ctypes.c_char_p], c_int),
    "cospec_read_memory": ([c_void_p, c_long], c_uint64),
    "cospec_packed_bytes": ([c_int, c_long, c_long], c_long),
    "cospec_pack": ([c_int, c_void_p, c_long, c_long, c_void_p], None),
    "cospec_checksum": ([c_void_p, c_long], c_uint64),
    "cospec_linear_new": ([c_int, c_void_p, c_void_p, c_void_p, c_void_p, c_long, c_long], c_void_p),
    "cospec_linear_free": ([c_void_p], None),
    "cospec_linear": ([c_void_p, c_void_p, c_long, c_void_p], None),
    "cospec_attention": ([c_void_p], None),
    "cospec_rms_norm": ([c_void_p, c_void_p, c_float, c_long, c_long, c_void_p], None),
    "cospec_argmax": ([c_void_p, c_long, c_long, POINTER(c_int64)], None),
    "cospec_softmax": ([c_void_p, c_long, c_long, c_void_p, c_void_p], None),
    "cospec_softmax64": ([c_void_p, c_long, c_long, c_void_p, c_void_p], None),
    "cospec_blend": ([c_void_p, c_long, c_void_p], None),
    "cospec_exponential_sample": ([c_void_p, c_long, c_long, c_void_p, c_void_p], None),
    "cospec_top_candidates": ([c_void_p, c_long, c_long, c_void_p, c_void_p, c_double, c_void_p, c_void_p], None),
    "cospec_pool_lockstep": ([c_void_p, c_void_p, c_long, c_void_p, c_void_p, c_void_p], c_int),
    "cospec_token_probs": ([c_void_p, c_long, c_long, c_void_p, c_void_p], None),
    "cospec_verify": ([c_void_p, c_void_p, c_long, c_void_p, c_void_p], None),
    "cospec_llama_new": ([c_void_p], c_void_p),
    "cospec_llama_free": ([c_void_p], None),
    "cospec_llama_forward": ([c_void_p, c_void_p, c_void_p], None),
    "cospec_llama_hidden_states": ([c_void_p, c_void_p, c_void_p, c_void_p], None),
    "cospec_llama_score": ([c_void_p, c_void_p, c_void_p, c_void_p], c_int),
    "cospec_llama_stage": ([c_void_p, c_void_p, c_void_p, c_void_p], c_int),
    "cospec_llama_rollout": ([c_void_p, c_void_p, c_void_p, c_void_p], c_int),
    "cospec_ngram_new": ([c_long, c_long], c_void_p),
    "cospec_suffix_new": ([c_void_p, c_long], c_void_p),
    "cospec_lookup_free": ([c_void_p], None),
    "cospec_lookup_size": ([c_void_p], c_long),
    "cospec_lookup_extend": ([c_void_p, c_void_p, c_long], None),
    "cospec_lookup_propose": ([c_void_p, c_void_p, c_long, c_void_p, c_void_p, c_void_p, c_void_p], c_long),
    "cospec_responses_new": ([c_long], c_void_p),
    "cospec_responses_free": ([c_void_p], None),
    "cospec_responses_size": ([c_void_p], c_long),
    "cospec_responses_add": ([c_void_p, c_void_p, c_long, c_long], None),
    "cospec_multi_step": ([c_void_p], c_long),
}


_SOURCE = structs.packer(structs.LogitsSource)
FORMS = {"single": 0, "mixture": 1, "linear": 2, "adaptive": 3}


@dataclass(frozen=True, slots=True)
class NativeBlend:
    """How the library joins rows of several models' logits.

    Attributes:
        form: ``mixture`` is ``log sum_m weights[m] softmax(logits[m])``, ``linear`` is
            ``log softmax(sum_m weights[m] logits[m])``, ``single`` are the first model's unchanged logits, and
            ``adaptive`` is ``csrc/ops/adaptive_kernel.h``.
        weights: one per model; for ``adaptive`` the fields of ``AdaptiveParams``.
        plausibility_cutoff: ``linear`` excludes tokens whose first-model logit is lower than the largest plus this.
    """

    form: str = "single"
    weights: tuple[float, ...] = (1.0,)
    plausibility_cutoff: float = -math.inf


PLAIN = NativeBlend()


class Source:
    """Rows of logits that target distributions are computed from: ``LogitsSource`` in ``csrc/spec/blend.h``.

    Attributes:
        shape: ``(R, V)``.
        packed: the struct. The pointers in the struct are valid while the object lives.
        divergences: ``[R]``, of rows that the library computed; None except for the form ``adaptive``.

    Args:
        logits: ``[R, V]`` of each model that the blend reads, float32 on the CPU.
    """

    def __init__(self, logits: Sequence[Tensor], recipe: NativeBlend = PLAIN) -> None:
        self._logits = [rows.contiguous() for rows in logits]
        self.shape = (len(self._logits[0]), self._logits[0].shape[1])
        self._pointers = array("Q", [rows.data_ptr() for rows in self._logits])
        self._weights = array("d", recipe.weights)
        self.divergences = array("d", bytes(8 * self.shape[0])) if recipe.form == "adaptive" else None
        self.packed = _SOURCE.pack(
            start(self._pointers), start(self._weights), len(logits), self.shape[1], FORMS[recipe.form],
            recipe.plausibility_cutoff, 0 if self.divergences is None else start(self.divergences),
        )  # fmt: skip

    def turn_to(self, logits: Tensor) -> None:
        """Read other rows of the same width, where there is one model."""
        rows = logits.contiguous()
        self._logits, self._pointers[0] = [rows], rows.data_ptr()


@dataclass(frozen=True, slots=True)
class Loaded:
    """The library, or None and why the library cannot be used."""

    cdll: ctypes.CDLL | None
    reason: str


@cache
def _load() -> Loaded:
    if os.environ.get(SWITCH) == "off":
        return Loaded(None, f"{SWITCH} is off")
    return load(Path(__file__).parents[1] / "_native.so")


def load(path: Path) -> Loaded:
    """Load the library at ``path`` and declare its functions."""
    if not path.exists():
        return Loaded(None, "the native kernels were not built with this installation; that takes g++ or clang++")
    try:
        found = ctypes.CDLL(str(path))
        for name, (arguments, result) in SIGNATURES.items():
            function = getattr(found, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as error:
        return Loaded(None, f"the native kernels cannot be loaded ({error})")
    difference = structs.mismatch(found)
    if difference:
        return Loaded(None, f"the native kernels were built from other sources ({difference}); build them again")
    found.cospec_set_threads(_default_threads())
    return Loaded(found, "")


def _default_threads() -> int:
    """``OMP_NUM_THREADS`` where it is set, as for torch; otherwise every processor that this process may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked.isdecimal() and int(asked) > 0:
        return min(int(asked), MAX_THREADS)
    return min(usable_processors(), MAX_THREADS)


def available() -> bool:
    """Return whether the kernels can be used."""
    return _load().cdll is not None


def why_not() -> str:
    """Return why the kernels cannot be used, as a clause without a full stop; empty when they can."""
    return _load().reason


@cache
def build() -> str:
    """Return a hash of the library file, which distinguishes builds in measurements; empty without a library."""
    path = Path(__file__).parents[1] / "_native.so"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else ""


def cdll() -> ctypes.CDLL:
    """The loaded library.

    Raises:
        ModelError: no library is loaded.
    """
    loaded = _load()
    if loaded.cdll is None:
        raise ModelError(f"The native back end cannot be used because {loaded.reason}.")
    return loaded.cdll


def release_memory() -> None:
    """Return freed memory of the C library to the system; glibc keeps much of the memory of large arrays."""
    process = ctypes.CDLL(None)
    if hasattr(process, "malloc_trim"):  # of glibc only
        process.malloc_trim(0)


def populate(address: int, size: int) -> bool:
    """Have the system give the memory at ``address`` now, contents kept; False if impossible (before Linux 5.14)."""
    if not sys.platform.startswith("linux"):
        return False
    process = ctypes.CDLL(None)
    offset = address % mmap.PAGESIZE
    return bool(
        process.madvise(ctypes.c_void_p(address - offset), ctypes.c_size_t(size + offset), _POPULATE_WRITE) == 0
    )


def set_threads(count: int) -> None:
    """Set the number of threads that the kernels use, 1 to ``MAX_THREADS``."""
    if not 1 <= count <= MAX_THREADS:
        raise InvalidInput("threads", count, f"1 to {MAX_THREADS}")
    cdll().cospec_set_threads(count)


def threads() -> int:
    """Return the number of threads that the kernels use."""
    return int(cdll().cospec_threads())


def isa() -> str:
    """Return the instruction set in use, one of ``ISAS``."""
    return str(cdll().cospec_isa().decode())


def set_isa(name: str) -> None:
    """Use another instruction set than the best one; for tests and comparisons. Only bf16 on AMX has other results.

    Raises:
        InvalidInput: the processor or the build does not have it.
    """
    if not cdll().cospec_set_isa(name.encode()):
        raise InvalidInput("instruction_set", name, "auto or one of " + ", ".join(offered()))


def use_instruction_set(name: str) -> None:
    """Use the instruction set that a configuration names; ``auto`` changes nothing.

    Raises:
        InvalidInput: the processor or the build does not have it, or there are no kernels.
    """
    if name == "auto":
        return
    if not available():
        raise InvalidInput("instruction_set", name, f"'auto', as {why_not()}")
    set_isa(name)


def offered() -> tuple[str, ...]:
    """Return the instruction sets that this processor and this build have, from the lowest to the highest."""
    return tuple(name for name in ISAS if cdll().cospec_has_isa(name.encode()))


def reads(logits: Tensor) -> bool:
    """Return whether the library is loaded and can read these rows in place: float32 on the CPU."""
    return logits.itemsize == 4 and logits.is_floating_point() and logits.is_cpu and available()


def address(numbers: NDArray[Any]) -> int:
    """Return the address of an array. The array's ``ctypes`` attribute would build an object."""
    return int(numbers.__array_interface__["data"][0])


def start(numbers: array[Any]) -> int:
    """Return the address of an array's first number."""
    return numbers.buffer_info()[0]


def checksum(data: NDArray[np.uint8]) -> int:
    """Return a hash of bytes that finds damage; the number of threads does not change the hash."""
    return int(cdll().cospec_checksum(address(data), data.nbytes))


def read_memory(data: NDArray[np.uint64]) -> int:
    """Read an array with all threads, and return the sum of its numbers modulo 2^64."""
    return int(cdll().cospec_read_memory(address(data), data.size))


def argmax_rows(logits: Tensor) -> list[int]:
    """The index of the largest of each row, float32 ``[R, V]`` on the CPU: the lowest one on ties.

    -1 for a row that holds NaN, or whose largest value is infinite.
    """
    logits = logits.contiguous()
    rows, width = logits.shape
    result = (c_int64 * rows)()
    cdll().cospec_argmax(logits.data_ptr(), rows, width, result)
    return list(result)


def softmax_rows(logits: Tensor, temperatures: NDArray[np.float64]) -> NDArray[np.float64]:
    """The softmax of each row at its own temperature ``[R]``, in double precision.

    Args:
        logits: ``[R, V]`` on the CPU, of single or double precision.
    """
    logits = logits.contiguous()
    rows, width = logits.shape
    result = np.empty((rows, width))
    softmax = cdll().cospec_softmax if logits.itemsize == 4 else cdll().cospec_softmax64
    softmax(logits.data_ptr(), rows, width, address(temperatures), address(result))
    return result


def blend_rows(source: Source) -> NDArray[np.float64]:
    """Return the combined rows ``[R, V]``. A row is NaN if any model's row holds NaN."""
    result = np.empty(source.shape)
    cdll().cospec_blend(source.packed, len(result), address(result))
    return result


def sample_rows(weights: NDArray[np.float64], streams: Sequence[Sequence[int]]) -> list[int]:
    """Return the winner of each row's exponential race, of ``weights [R, V]``; -1 where no weight is positive.

    Args:
        streams: ``[R, 6]``, the generator's key (two words) and counter (four), as numpy's Philox takes them.
    """
    weights = np.ascontiguousarray(weights)
    rows, width = weights.shape
    keyed = np.array(streams, dtype=np.uint64)
    winners = np.empty(rows, dtype=np.int64)
    cdll().cospec_exponential_sample(address(weights), rows, width, address(keyed), address(winners))
    found: list[int] = winners.tolist()
    return found


def candidate_rows(
    logits: Tensor, temperatures: Sequence[float], streams: Sequence[Sequence[int]], least: float
) -> tuple[list[list[int]], list[list[float]]]:
    """Two tokens for each row of float32 ``[R, V]`` on the CPU and their probabilities, both ``[R][2]``.

    At temperature 0 the two most probable tokens, with their probabilities at temperature 1. Otherwise the winner of
    the row's exponential race, and the winner among the other tokens with a probability worth drawing. -1 for none.
    """
    logits = logits.contiguous()
    rows, width = logits.shape
    scale, keyed = np.array(temperatures, dtype=np.float64), np.array(streams, dtype=np.uint64)
    tokens, probs = np.empty((rows, 2), dtype=np.int64), np.empty((rows, 2))
    cdll().cospec_top_candidates(
        logits.data_ptr(), rows, width, address(scale), address(keyed), least, address(tokens), address(probs)
    )
    return tokens.tolist(), probs.tolist()


def probability_rows(logits: Tensor, tokens: Sequence[int]) -> NDArray[np.float64]:
    """Return each token's probability at temperature 1, of ``tokens [R]`` by rows of float32 ``[R, V]`` on the CPU."""
    logits = logits.contiguous()
    rows, width = logits.shape
    ids, probs = np.array(tokens, dtype=np.int64), np.empty(rows)
    cdll().cospec_token_probs(logits.data_ptr(), rows, width, address(ids), address(probs))
    return probs
