"""Shows a GGUF file as a model's folder in transformers' layout.

The rest of cospec reads ``config.json`` and ``tokenizer.json``. Both are made once from the metadata of the file, and
kept in the user's cache directory together with a link to the file.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from cospec.errors import ModelError
from cospec.machine import cache_directory

VERSION = 1  # increases when the description changes, so that old folders are made again
NO_TOKENIZER = "none"  # llama.cpp's name
LINK = "gguf"  # without a suffix, so that no model file has the name
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def gguf_folder(file: Path) -> Path:
    """Return the folder that describes ``file``, made if necessary.

    Raises:
        ModelError: the file is unreadable, or its architecture or tokenizer is unknown.
    """
    try:
        facts = file.stat()
    except OSError as error:
        raise ModelError(f"The file {file} cannot be read: {error}.") from None
    return _described(file.absolute(), facts.st_size, facts.st_mtime_ns)


def linked_file(folder: Path) -> Path:
    """Return the GGUF file that ``folder`` describes, with the name that the user gave."""
    return Path(os.readlink(folder / LINK))


def is_gguf(folder: Path) -> bool:
    """Whether ``folder`` describes a GGUF file."""
    return (folder / LINK).is_symlink()


def one_gguf(folder: Path, choice: str = "") -> Path | None:
    """Return the GGUF file in ``folder``, the first part of a split one; None without such files.

    Args:
        choice: a part of the name, such as ``Q4_K_M``, which chooses between several files.

    Raises:
        ModelError: the folder has several files, or none with the choice in the name.
    """
    files = [file for file in sorted(folder.glob("*.gguf")) if "-of-" not in file.name or "-00001-of-" in file.name]
    if not files:
        return None
    names = ", ".join(file.name for file in files)
    chosen = [file for file in files if choice.lower() in file.name.lower()]
    if len(chosen) != 1:
        asked = f"{len(chosen)} files with {choice!r} in the name" if choice else f"{len(files)} GGUF models"
        raise ModelError(f"The folder {folder} has {asked}; name one of the files as the model: {names}.")
    return chosen[0]


def parts(path: Path) -> list[Path]:
    """Return the files of a model; ``path`` is the only file or the first part.

    Raises:
        ModelError: a part is missing.
    """
    match = _SPLIT.search(path.name)
    if match is None:
        return [path]
    stem, count = path.name[: match.start()], int(match[2])
    found = [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in found if not part.exists()]
    if missing:
        raise ModelError(f"The model {path} is split into {count} files, of which {missing[0]} is missing.")
    return found


@lru_cache(maxsize=64)
def _described(file: Path, size: int, changed: int) -> Path:
    key = hashlib.sha256(f"{VERSION}\n{file}\n{size}\n{changed}".encode()).hexdigest()[:24]
    target = _writable(cache_directory() / "gguf") / f"{file.stem}-{key}"
    if is_gguf(target) and linked_file(target) == file:
        os.utime(target)  # the time of the last use
        return target
    partial = Path(tempfile.mkdtemp(prefix=".", dir=target.parent))
    try:
        _describe(file, partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except OSError:
        if not is_gguf(target):  # another process may have been faster
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _writable(folder: Path) -> Path:
    """Return ``folder`` if it can be written, and else a folder for temporary files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _temporary()


@lru_cache(maxsize=1)
def _temporary() -> Path:
    """Return a folder that is removed when the process ends."""
    folder = tempfile.mkdtemp(prefix="cospec-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _describe(file: Path, folder: Path) -> None:
    # Imported here, because most models are no GGUF files.
    from cospec.models.files.gguf_config import read_config
    from cospec.models.files.gguf_file import GgufFile
    from cospec.models.files.gguf_tokenizer import read_tokenizer

    opened = GgufFile.open(file)
    _write(folder / "config.json", read_config(opened))
    if opened.metadata.get("tokenizer.ggml.model", NO_TOKENIZER) != NO_TOKENIZER:
        found = read_tokenizer(opened)
        found.tokenizer.save(str(folder / "tokenizer.json"))
        _write(folder / "tokenizer_config.json", found.config)
        _write(folder / "generation_config.json", {"eos_token_id": list(found.eos_ids)})
        if found.chat_template is not None:
            (folder / "chat_template.jinja").write_text(found.chat_template, encoding="utf-8")
    (folder / LINK).symlink_to(file)


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
