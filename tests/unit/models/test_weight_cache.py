"""Packed weights on disk: the same model cold, warm and off, and no file that is damaged or of other weights."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import time
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from cospec.assembly.build import load_options
from cospec.config import EngineConfig
from cospec.core.interfaces import Model
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.errors import InvalidInput
from cospec.models import weight_cache
from cospec.models.files import array_file
from cospec.models.files.array_file import ArrayMemory, PackedModel, read_arrays
from cospec.models.loading import LoadOptions, load_model
from cospec.models.weight_cache import VARIABLE, WeightCache, identity
from cospec.native import library, llama_weight_packing
from cospec.native.library import address, checksum
from harness.gguf_files import write_model
from harness.shards import ShardsHere

pytestmark = pytest.mark.skipif(not library.available(), reason=library.why_not())

PROMPT = (5, 9, 2, 40, 7, 3, 11, 33)
OFF = LoadOptions(device="cpu", num_pages=4)
CACHED = replace(OFF, weight_cache=WeightCache(1 << 30))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tiny(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, attention_bias=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(name: Path, options: LoadOptions = CACHED) -> torch.Tensor:
    return logits_of(load_model(str(name), options))


def logits_of(model: Model) -> torch.Tensor:
    assert model.pages.allocate("a", len(PROMPT))
    return model.forward(TokenBatch((SequenceSlice("a", 0, PROMPT),)))


def entries() -> list[Path]:
    return sorted(weight_cache.folder().glob("*"))


def unpacked(*_: Any) -> Any:
    raise AssertionError("the weights are packed again")


@pytest.mark.parametrize("quantization", [None, "int8", "q4_k"])
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_cold_warm_and_off_give_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, quantization: str | None
) -> None:
    path = tmp_path / "model.gguf"
    if kind == "gguf":
        write_model(path, tiny(), "Q4_0", kinds={"attn_v": "Q8_0"})
    else:
        path = tmp_path / "model"
        tiny().bfloat16().save_pretrained(path)
    options = replace(CACHED, quantization=quantization)
    off, cold = run(path, replace(options, weight_cache=OFF.weight_cache)), run(path, options)
    monkeypatch.setattr(llama_weight_packing, "pack", unpacked)
    assert torch.equal(cold, off)
    assert torch.equal(run(path, options), off)
    with pytest.raises(AssertionError, match="packed again"):  # another option has a file of its own
        run(path, replace(options, quantization="q8_0"))


def test_models_of_one_process_share_weights_as_long_as_one_exists(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []

    def read(path: Path, key: Any) -> PackedModel:
        reads.append(path)
        return read_arrays(path, key)

    monkeypatch.setattr(weight_cache, "read_arrays", read)
    first, second = load_model(str(saved), CACHED), load_model(str(saved), CACHED)
    assert len(reads) == 1  # before the file existed
    expected = logits_of(first)
    del first
    gc.collect()
    assert torch.equal(logits_of(second), expected)
    entries()[0].unlink()
    third = load_model(str(saved), CACHED)
    assert len(reads) == 1
    assert torch.equal(logits_of(third), expected)
    del second, third
    gc.collect()
    assert torch.equal(run(saved), expected)
    assert len(reads) == 2 and len(entries()) == 1  # the removed file is written again


@pytest.mark.parametrize(("stages", "ranks"), [(2, 1), (1, 2)])
def test_parts_of_a_model_have_files_of_their_own(
    saved: Path, monkeypatch: pytest.MonkeyPatch, stages: int, ranks: int
) -> None:
    def logits(options: LoadOptions) -> torch.Tensor:
        model = ShardsHere(saved, stages, ranks, options)
        assert model.pages.allocate("a", len(PROMPT))
        return model.forward(TokenBatch((SequenceSlice("a", 0, PROMPT),)))

    run(saved)
    off, cold = logits(OFF), logits(CACHED)
    assert len(entries()) == 1 + stages * ranks
    monkeypatch.setattr(llama_weight_packing, "pack", unpacked)
    assert torch.equal(cold, off)
    assert torch.equal(logits(CACHED), off)


def test_the_frequencies_of_a_long_rope_model_belong_to_its_length(tmp_path: Path) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 2.0,
        "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
    }  # fmt: skip
    config = tiny().config
    config.rope_parameters = rope
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    for length in (32, 64):
        off = replace(OFF, max_model_len=length)
        expected = run(tmp_path / "model", off)
        assert torch.equal(run(tmp_path / "model", replace(off, weight_cache=CACHED.weight_cache)), expected)


def test_arrays_lie_at_multiples_of_64_bytes(saved: Path) -> None:
    run(saved)
    model = read_arrays(entries()[0], _key_of(entries()[0]))
    assert len(model.arrays) == 20
    assert all(address(data) % 64 == 0 for data in model.arrays.values())
    assert {name for name in model.kept if not model.arrays[name].flags.writeable} == model.kept > {"embedding"}


def _key_of(path: Path) -> Any:
    """Return the key that stands in a file."""
    text = path.read_bytes()[:-48]
    return json.loads(text[text.rindex(b'{"key"') :])["key"]


def test_a_changed_file_of_the_same_size_and_time_is_another_model(saved: Path) -> None:
    run(saved)
    file = saved / "model.safetensors"
    times, changed = file.stat().st_mtime_ns, bytearray(file.read_bytes())
    changed[-1] ^= 0x80
    file.write_bytes(changed)
    os.utime(file, ns=(times, times))
    assert torch.equal(run(saved), run(saved, OFF))
    assert len(entries()) == 2


def test_a_large_file_counts_by_its_times_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, beginning = tmp_path / "large", os.urandom(1 << 20)
    file.write_bytes(beginning + bytes(16 << 20))
    assert identity(file, small=0) is None  # too new: a change may have the same time
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + 10**10)
    before, facts = identity(file, small=0), file.stat()
    with file.open("r+b") as stream:
        stream.seek((1 << 20) + 12345)  # between two samples
        stream.write(b"x")
    os.utime(file, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    after = identity(file, small=0)
    assert before is not None and after is not None and before != after
    assert before[-1] == after[-1] and before[:4] == after[:4]  # the time of the change alone differs


def flip(place: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)

    return damage


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


DAMAGES = {
    "array": flip(1000),
    "description": flip(-200),
    "hash": flip(-40),
    "magic": flip(-1),
    "truncated": truncate,
    "empty": lambda path: os.truncate(path, 0),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_file_is_written_again(
    saved: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    expected = run(saved)
    damage(entries()[0])
    assert torch.equal(run(saved), expected)
    monkeypatch.setattr(llama_weight_packing, "pack", unpacked)
    assert torch.equal(run(saved), expected)


def test_a_file_of_other_weights_is_not_taken(saved: Path, tmp_path: Path) -> None:
    tiny(1).save_pretrained(tmp_path / "other" / "model")
    other, expected = tmp_path / "other" / "model", run(saved)
    assert not torch.equal(run(other), expected)
    first, second = sorted(entries(), key=lambda path: _is_of(path, saved))
    shutil.copy(first, second)
    assert torch.equal(run(saved), expected)


def _is_of(path: Path, folder: Path) -> bool:
    return bool(_key_of(path)["files"][0] == identity(folder / "model.safetensors"))


def test_no_room_on_the_disk(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(saved, OFF)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 0))
    assert torch.equal(run(saved), expected)
    assert entries() == []


def test_a_write_that_fails_in_the_middle(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, seen = run(saved, OFF), []

    def full(data: Any) -> int:
        seen.append(len(entries()))
        if len(seen) == 15:
            raise OSError(errno.ENOSPC, "no space left on the device")
        return checksum(data)

    monkeypatch.setattr(array_file, "checksum", full)
    assert torch.equal(run(saved), expected)
    assert seen == [1] * 15 and entries() == []


@pytest.mark.parametrize("error", [OSError(errno.EIO, "unreadable"), KeyboardInterrupt()])
def test_a_packing_that_fails_leaves_no_file_and_is_not_repeated(tmp_path: Path, error: BaseException) -> None:
    file, calls = tmp_path / "model", []
    file.write_bytes(b"weights")

    def pack(to: ArrayMemory) -> dict[str, Any]:
        to.keep("a", np.ones(1000, np.uint8))
        calls.append(len(entries()))
        raise error

    with pytest.raises(type(error)):
        CACHED.weight_cache.packed("model", [file], {}, 1000, pack)
    assert calls == [1] and entries() == []


def test_the_least_recently_used_file_goes_first(tmp_path: Path) -> None:
    folders = [tmp_path / str(seed) for seed in range(3)]
    for seed, folder in enumerate(folders):
        tiny(seed).save_pretrained(folder)
    run(folders[0])
    (first,) = entries()
    size = first.stat().st_size
    limited = replace(CACHED, weight_cache=WeightCache(int(2.5 * size)))
    run(folders[1], limited)
    (second,) = set(entries()) - {first}
    os.utime(second, (1e9, 1e9))
    os.utime(first, (2e9, 2e9))
    run(folders[2], limited)
    assert first in entries() and second not in entries() and len(entries()) == 2
    os.utime(first, (1e9, 1e9))
    run(folders[0], limited)  # a use, which makes the file recent
    assert first.stat().st_mtime > 1e9
    too_small = replace(CACHED, weight_cache=WeightCache(size // 2))
    assert torch.equal(run(folders[1], too_small), run(folders[1], OFF))
    assert all(path.stat().st_size <= size * 1.1 for path in entries())


def test_unfinished_files_of_ended_processes_are_removed(saved: Path) -> None:
    weight_cache.folder().mkdir(parents=True)
    old, new = (weight_cache.folder() / name for name in (".old.weights", ".new.weights"))
    old.touch()
    new.touch()
    os.utime(old, (1e9, 1e9))
    run(saved)
    assert not old.exists() and new.exists()


def test_writers_at_the_same_time(tmp_path: Path) -> None:
    """Four writers of one file, all of which have begun before the first ends."""
    file, begun = tmp_path / "model", Barrier(4)
    file.write_bytes(b"weights")
    data = np.frombuffer(os.urandom(1000), np.uint8)

    def pack(to: ArrayMemory) -> dict[str, Any]:
        begun.wait(30)
        to.keep("a", data)
        return {"layers": 1}

    def packed(_: int) -> PackedModel:
        return CACHED.weight_cache.packed("model", [file], {}, 1000, pack)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(packed, range(4)))
    assert all(model.facts == {"layers": 1} and np.array_equal(model.arrays["a"], data) for model in found)
    assert len(entries()) == 1
    assert np.array_equal(CACHED.weight_cache.packed("model", [file], {}, 1000, unpacked).arrays["a"], data)


def test_limits_by_option_and_environment(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(saved, OFF)
    assert entries() == []
    assert WeightCache.of(7).max_bytes == 7
    monkeypatch.setenv(VARIABLE, "5")
    assert (WeightCache.of(None).max_bytes, WeightCache.of(0).max_bytes) == (5, 0)
    assert load_options(EngineConfig(weight_cache_bytes=9)).weight_cache == WeightCache(9)
    monkeypatch.setenv(VARIABLE, "5 GB")
    with pytest.raises(InvalidInput, match=VARIABLE):
        WeightCache.of(None)


def test_checksums_find_each_changed_byte_on_any_number_of_threads() -> None:
    data, before = np.frombuffer(os.urandom((3 << 20) + 13), np.uint8).copy(), library.threads()
    try:
        library.set_threads(1)
        alone = checksum(data)
        library.set_threads(3)
        assert checksum(data) == alone
    finally:
        library.set_threads(before)
    for place in (0, 31, 1 << 20, len(data) - 1):
        data[place] ^= 1
        assert checksum(data) != alone
        data[place] ^= 1
    swapped = np.concatenate([data[1 << 20 : 2 << 20], data[: 1 << 20], data[2 << 20 :]])
    assert checksum(data) == alone != checksum(swapped)
