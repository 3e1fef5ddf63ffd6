"""Fits on disk in the user's cache directory (XDG): one file per model, device, dtype and number of threads."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from cospec.machine import cache_directory, processor
from cospec.models.files.gguf_as_folder import is_gguf, linked_file
from cospec.native import library
from cospec.policies.latency.forward import ForwardLatency

FORMAT = 5  # increases when the measurement changes, so that old files are ignored

_log = logging.getLogger(__name__)


def directory() -> Path:
    """Return the directory of the fits."""
    return cache_directory() / "profiles"


def machine(device: str) -> dict[str, Any]:
    """Return what a fit depends on besides the model: processor or accelerator, threads, kernels."""
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        return {"device": torch.cuda.get_device_name()}
    return {
        "device": processor(),
        "threads": torch.get_num_threads(),
        "kernels": library.build(),
        "instruction_set": library.isa() if library.available() else "",
    }


def weights(folder: Path) -> dict[str, Any]:
    """Return the key of a model: its path, and name, size and beginning of each weight file."""
    files = []
    for file in sorted(folder.glob("*.safetensors")) + ([linked_file(folder)] if is_gguf(folder) else []):
        with file.open("rb") as stream:
            files.append([file.name, file.stat().st_size, hashlib.sha256(stream.read(1 << 20)).hexdigest()])
    return {"model": folder.name, "weights": files}


def load(key: Mapping[str, Any]) -> ForwardLatency | None:
    """Load the fit of ``key``; None if missing or unreadable."""
    path = _path(key)
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        return ForwardLatency.from_json(stored["fit"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.warning("the time model in %s is unreadable (%s) and is measured again", path, error)
        return None


def save(key: Mapping[str, Any], fitted: ForwardLatency) -> None:
    """Store a fit; an unwritable directory is only logged."""
    path = _path(key)
    text = json.dumps({"key": dict(key), "fit": fitted.to_json()}, indent=1)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(text + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        _log.warning("the time model is not stored: %s", error)


def _path(key: Mapping[str, Any]) -> Path:
    text = json.dumps({"format": FORMAT, **key}, sort_keys=True)
    return directory() / (hashlib.sha256(text.encode()).hexdigest()[:24] + ".json")
