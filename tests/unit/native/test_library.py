"""The compiled kernels over rows of logits, held against numpy and torch, on every instruction set there is."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cospec.core.types import DraftContext
from cospec.drafters import known_token_scores
from cospec.drafters.known_token_scores import token_probabilities
from cospec.drafters.pool import candidates
from cospec.drafters.pool.candidates import top_candidates
from cospec.errors import InvalidInput
from cospec.native import library, structs
from cospec.rng.random_streams import RandomStreams, StreamKind
from cospec.sampling_params import SamplingParams

built = pytest.mark.skipif(not library.available(), reason=library.why_not() or "native kernels")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    """Tests may change the threads and the instruction set."""
    if library.available():
        isa, threads = library.isa(), library.threads()
        yield
        library.set_isa(isa)
        library.set_threads(threads)
    else:
        yield


@built
@pytest.mark.parametrize("isa", library.ISAS)
def test_argmax_takes_the_first_of_equals(isa: str) -> None:
    try:
        library.set_isa(isa)
    except InvalidInput:
        pytest.skip(f"this processor has no {isa}")
    logits = torch.randn(5, 1000)
    logits[1, [999, 17, 400]] = 50.0
    logits[2] = -3.0
    logits[3, 999] = 50.0
    assert library.argmax_rows(logits) == logits.argmax(1).tolist()
    assert library.argmax_rows(torch.tensor([[1.0, 3.0, 3.0]])) == [1]


@built
@pytest.mark.parametrize("place", [0, 70, 999])
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_argmax_refuses_what_is_no_number(place: int, odd: float) -> None:
    logits = torch.randn(3, 1000)
    logits[1, place] = odd
    expected = logits.argmax(1).tolist()
    assert library.argmax_rows(logits) == [expected[0], -1, expected[2]]


@built
@pytest.mark.parametrize("vocab", [1, 7, 8, 255, 4096, 4099])
@pytest.mark.parametrize("threads", [1, 2])
def test_softmax_is_torch_s_in_double_precision(vocab: int, threads: int) -> None:
    library.set_threads(threads)
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab)) * 20
    logits[2, 0] = -torch.inf if vocab > 1 else 0.0
    temperatures = np.array([0.01, 0.5, 1.0, 1.3, 50.0])
    expected = torch.softmax(logits.double() / torch.from_numpy(temperatures)[:, None], -1).numpy()
    found = library.softmax_rows(logits, temperatures)
    np.testing.assert_allclose(found, expected, rtol=4e-14, atol=1e-300)
    np.testing.assert_allclose(found.sum(1), 1.0, rtol=0, atol=1e-14)
    alone = library.softmax_rows(logits[3:4], temperatures[3:4])
    assert (alone[0] == found[3]).all()  # a row's bits do not depend on its neighbours


@built
@pytest.mark.parametrize("vocab", [3, 256, 257, 4096])
def test_a_race_has_the_winner_that_numpy_s_generator_gives(vocab: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.random.default_rng(vocab).exponential(size=(200, vocab))
    weights[::3, : vocab // 2] = 0.0

    def winners() -> list[int]:
        rows = enumerate(weights)
        return [RandomStreams(2**64 - 1 - i, 3).token(row, 2**40 + i, StreamKind(i % 4)) for i, row in rows]

    compiled = winners()
    monkeypatch.setattr(library, "available", lambda: False)
    assert compiled == winners()


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=built), False])
def test_a_race_without_runners_is_an_error(compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "available", lambda: compiled)
    with pytest.raises(ValueError, match="no token"):
        RandomStreams(0, 0).token(np.zeros(300), 1, StreamKind.TARGET)


def test_a_missing_library_is_explained(tmp_path: Path) -> None:
    missing = library.load(tmp_path / "_native.so")
    assert missing.cdll is None and missing.reason
    (tmp_path / "_native.so").write_bytes(b"no library")
    broken = library.load(tmp_path / "_native.so")
    assert broken.cdll is None and str(tmp_path) in broken.reason


def test_an_existing_library_has_the_structs_python_declares() -> None:
    if not (Path(library.__file__).parents[1] / "_native.so").exists():
        pytest.skip("the native kernels were not built")
    assert library.why_not() == ""


@built
@pytest.mark.parametrize(
    ("name", "change", "sentence"),
    [
        ("VerifyResult", lambda fields: fields[:-1], "struct VerifyResult has 32 bytes in the library and 24"),
        ("KVCacheView", lambda fields: fields[::-1], "field KVCacheView.max_len is at byte 40 in the library and at 0"),
        ("BatchView", lambda fields: [("q", fields[0][1]), *fields[1:]], "field BatchView.q is at byte -1"),
        ("NoSuch", lambda fields: fields, "struct NoSuch has -1 bytes in the library"),
    ],
)
def test_a_struct_that_differs_from_the_library_is_an_error(
    name: str, change: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = np.dtype(change(structs.STRUCTS.get(name, structs.BatchView).descr))
    monkeypatch.setattr(structs, "STRUCTS", {"InputBatch": structs.InputBatch, name: other})
    loaded = library.load(Path(library.__file__).parents[1] / "_native.so")
    assert loaded.cdll is None
    assert sentence in loaded.reason and loaded.reason.endswith("build them again")


@pytest.mark.parametrize("name", list(structs.STRUCTS))
def test_packed_structs_have_the_bytes_of_their_dtypes(name: str) -> None:
    layout = structs.STRUCTS[name]
    packed = structs.packer(layout, 2)
    count = len(packed.unpack(bytes(packed.size)))
    records = np.frombuffer(packed.pack(*range(count)), layout)
    flat = np.asarray(records.tolist(), dtype=object).ravel() if not _nested(layout) else None
    assert records.shape == (2,) and (flat is None or [int(number) for number in flat] == list(range(count)))


def _nested(layout: structs.Layout) -> bool:
    return any(layout[field].names for field in layout.names or ())


def test_a_field_at_the_end_may_be_left_out() -> None:
    whole, part = structs.packer(structs.RequestSlot), structs.packer(structs.RequestSlot, without="params")
    assert part.size == whole.size - structs.AcceptanceParams.itemsize


@built
def test_guesses_are_what_numpy_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """First and next best tokens and their probabilities, greedy rows and drawn ones, in one call."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 700, generator=generator) * 3
    params = [SamplingParams(temperature=0.0 if row % 3 else 0.8) for row in range(12)]
    contexts = [DraftContext(str(row), [1, 2, 3], 1, each, row, StreamKind.TARGET) for row, each in enumerate(params)]
    paths = [[5] * (row % 4) for row in range(12)]
    compiled = top_candidates(logits, contexts, paths)
    monkeypatch.setattr(candidates, "reads_natively", lambda _: False)
    for ours, reference in zip(compiled, top_candidates(logits, contexts, paths), strict=True):
        assert ours is not None and reference is not None and ours.second is not None and reference.second is not None
        assert (ours.token, ours.second[0]) == (reference.token, reference.second[0])
        assert ours.confidence == pytest.approx(reference.confidence, abs=1e-12)
        assert ours.second[1] == pytest.approx(reference.second[1], abs=1e-12)
    assert compiled[1] != compiled[2]
    logits[0, 3] = torch.nan
    assert library.candidate_rows(logits[:1], [0.0], [(1, 0, 0, 0, 3, 3)], 0.0)[0][0][0] == -1


@built
def test_chances_are_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(1)) * 2
    tokens = [row * 31 for row in range(9)]
    wanted = torch.softmax(logits.double(), -1)[range(9), tokens].numpy()
    assert token_probabilities(logits, tokens) == pytest.approx(wanted, abs=1e-12)
    monkeypatch.setattr(known_token_scores, "reads_natively", lambda _: False)
    assert token_probabilities(logits, tokens) == pytest.approx(wanted, abs=1e-12)


@built
def test_a_configuration_forces_an_instruction_set() -> None:
    best, every = library.isa(), library.offered()
    assert set(every) <= set(library.ISAS)
    assert [name for name in every if name not in library.EXPERIMENTAL][-1] == best
    for name in every:
        library.use_instruction_set(name)
        assert library.isa() == name
        library.use_instruction_set("auto")
        assert library.isa() == name  # the choice of the process stands
    with pytest.raises(InvalidInput, match=f"instruction_set is 'sse9'.*{best}"):
        library.use_instruction_set("sse9")


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library is not glibc")
@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="a sanitizer has an allocator of its own")
def test_freed_memory_returns_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    parts = [b"x" * 100_000 for _ in range(500)]
    kept = parts[::50]  # glibc frees the end of its memory without a call, so parts in between stay
    del parts
    before = resident()
    library.release_memory()
    assert before - resident() > 25_000_000
    assert len(kept) == 10


RACE = """
import threading, time
import numpy as np
from cospec.native import library
data, counts, stop = np.zeros(16 << 20, np.uint8), [0, 0], threading.Event()
def compute(number):
    while not stop.is_set():
        library.checksum(data)
        counts[number] += 1
threads = [threading.Thread(target=compute, args=(number,), daemon=True) for number in range(2)]
for thread in threads:
    thread.start()
for turn in range(150):
    library.set_threads(2 + turn % 2)
    time.sleep(0.004)
seen, end = list(counts), time.monotonic() + 20
while time.monotonic() < end and not all(now > before for now, before in zip(counts, seen)):
    time.sleep(0.01)
stop.set()
print([now > before for now, before in zip(counts, seen)], flush=True)
import os; os._exit(0)
"""


@built
def test_threads_change_while_two_callers_compute() -> None:
    """A caller that waits for the old pool's lock computes with the new pool, and does not wait for ended workers."""
    done = subprocess.run([sys.executable, "-c", RACE], capture_output=True, text=True, timeout=55, check=True)
    assert done.stdout.strip() == "[True, True]"
