"""Configurations of models as plain values, in the user's cache directory.

transformers completes ``config.json`` by a class of each architecture. The import of such a class imports most of torch
and takes longer than loading packed weights. So a later start reads the values that the first start stored.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cospec.system import cache_directory


class PlainConfig(SimpleNamespace):
    """The values of a configuration, with the names and aliases that transformers gives."""

    def get_text_config(self) -> PlainConfig:
        """Return this configuration; configurations with parts are not stored."""
        return self


@cache
def transformers_version() -> str:
    """Return the version of transformers without an import."""
    return version("transformers")


def stored_config(folder: Path) -> PlainConfig | None:
    """Return the stored configuration of a model's folder; None if none is stored for the present ``config.json``."""
    try:
        return PlainConfig(**json.loads(_file(folder).read_text("utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def store_config(folder: Path, config: Any) -> None:
    """Store transformers' configuration of a model's folder, if the text model has no configuration of its own."""
    if config.get_text_config() is not config:
        return
    values = json.loads(config.to_json_string(use_diff=False))
    aliases = {alias: getattr(config, name) for alias, name in config.attribute_map.items() if hasattr(config, name)}
    try:
        file = _file(folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(aliases | values, stream)
        Path(partial).replace(file)
    except OSError:  # a cache directory that cannot be written; the next start imports transformers again
        return


def _file(folder: Path) -> Path:
    key = hashlib.sha256(transformers_version().encode() + (folder / "config.json").read_bytes()).hexdigest()
    return cache_directory() / "configs" / f"{key[:32]}.json"
