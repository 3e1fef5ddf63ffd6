"""Models in the cache of the hub: complete ones need no network, interrupted downloads are resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from cospec.errors import ModelError
from cospec.models.model_folder import resolve, weight_files

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def shard(folder: Path, number: int) -> None:
    save_file({f"weight.{number}": torch.zeros(2)}, folder / SHARDS[number])


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    """A snapshot with the first of two shards."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    index = {"weight_map": {f"weight.{number}": name for number, name in enumerate(SHARDS)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    shard(folder, 0)
    return folder


@pytest.fixture
def downloads(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call to the hub's library stays offline; a call with network completes the snapshot."""
    calls: list[bool] = []

    def download(repository: str, *, local_files_only: bool, **options: Any) -> str:
        calls.append(local_files_only)
        if not local_files_only and repository == "me/big":
            shard(snapshot, 1)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    return calls


def test_interrupted_download_is_resumed(snapshot: Path, downloads: list[bool]) -> None:
    assert resolve("me/big") == snapshot
    assert downloads == [True, False]
    assert [file.name for file in weight_files(snapshot)] == list(SHARDS)


def test_complete_snapshot_needs_no_network(snapshot: Path, downloads: list[bool]) -> None:
    shard(snapshot, 1)
    assert resolve("me/big") == snapshot
    assert downloads == [True]


@pytest.mark.parametrize("indexed", [True, False])
def test_incomplete_snapshot_without_a_network_is_named(snapshot: Path, downloads: list[bool], indexed: bool) -> None:
    """The hub's library returns the cached snapshot when no network exists."""
    missing = SHARDS[1] if indexed else "model.safetensors.index.json"
    if not indexed:
        (snapshot / missing).unlink()
    with pytest.raises(ModelError) as caught:
        resolve("me/interrupted")
    assert f"is not complete: {missing} is missing; a start with a network resumes the download." in str(caught.value)
    assert downloads == [True, False]
