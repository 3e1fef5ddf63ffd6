"""Where commands write: looked at before the work whose result would else be lost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cospec.errors import InvalidInput


def check_file(path: Path | None, field: str, ending: str = "") -> None:
    """Raise ``InvalidInput`` unless a file of that name can be written; None is one that nobody asked for.

    Args:
        ending: what its name has to end in.
    """
    if path is None:
        return
    if not path.name.endswith(ending):
        raise InvalidInput(field, str(path), f"a file whose name ends in {ending}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise InvalidInput(field, str(path), "a file that can be written")


@contextmanager
def writing(path: Path, field: str) -> Iterator[None]:
    """Around the writing itself, which may fail all the same.

    Raises:
        InvalidInput: it did.
    """
    try:
        yield
    except OSError as error:
        raise InvalidInput(field, str(path), f"a file that can be written ({error.strerror})") from None


def make_folder(path: Path, field: str) -> Path:
    """The folder, made where it is missing.

    Raises:
        InvalidInput: it cannot be made, or nothing can be written into it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInput(field, str(path), f"a folder that can be written ({error.strerror})") from None
    if not os.access(path, os.W_OK):
        raise InvalidInput(field, str(path), "a folder that can be written")
    return path
