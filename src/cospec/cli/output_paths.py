"""Checks of output paths, made before the work whose result would be lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cospec.errors import InvalidInput


def check_file(path: Path | None, field: str, ending: str = "") -> None:
    """Raise ``InvalidInput`` unless the file is writable; None passes.

    Args:
        ending: required end of the file's name.
    """
    if path is None:
        return
    if not path.name.endswith(ending):
        raise InvalidInput(field, str(path), f"a file whose name ends in {ending}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidInput(field, str(path), "a writable file")


@contextmanager
def writing(path: Path, field: str) -> Iterator[None]:
    """Turn an error of the writing in the block into ``InvalidInput``.

    Raises:
        InvalidInput: the writing failed.
    """
    try:
        yield
    except OSError as error:
        raise InvalidInput(field, str(path), f"a writable file ({error.strerror})") from None


def make_folder(path: Path, field: str) -> Path:
    """Return the folder; make a missing folder.

    Raises:
        InvalidInput: the folder cannot be made, or is not writable.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(field, str(path), f"a writable folder ({error.strerror})") from None
    if not os.access(path, os.W_OK):
        raise InvalidInput(field, str(path), "a writable folder")
    return path
