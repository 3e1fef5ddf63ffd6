"""Logging while weights load: transformers is silent, and cospec reports the progress."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from logging import INFO
from typing import Any, TypeVar

_LOADING = threading.RLock()  # transformers' settings, and how it ties weights, are the process's


@contextmanager
def hf_logging_off() -> Iterator[None]:
    """Turn off transformers' bars and all warnings in the block; show the progress of weights, see ``_wanted``.

    One thread at a time runs such a block, because models that load together lose tied weights.
    """
    with _LOADING, _quiet():
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hooks = _wanted() and "set_tqdm_hook" in vars(logging)  # early versions 5 have no hook
    previous = logging.set_tqdm_hook(_follow) if hooks else None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if hooks:
            logging.set_tqdm_hook(previous)
        if bars:
            logging.enable_progress_bar()


Item = TypeVar("Item")
LINE_SECONDS = 5.0  # between two log lines

_log = logging.getLogger(__name__)


@contextmanager
def weights_progress(name: str, size: int) -> Iterator[None]:
    """Report the loading of the weights of ``name`` in the block, if the log shows INFO.

    Args:
        size: bytes of the weight files.
    """
    if not _log.isEnabledFor(INFO):
        yield
        return
    _log.info("loading weights of %s, %s", name, gigabytes(size))
    began = time.monotonic()
    yield
    _log.info("loaded weights of %s in %.1f s", name, time.monotonic() - began)


def gigabytes(size: int) -> str:
    """Return a number of bytes in words."""
    return f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"


def _follow(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Replace the bar of transformers."""
    items = args[0] if args else kwargs.get("iterable")
    if not isinstance(items, Iterable) or not isinstance(items, Sized):
        return factory(*args, **kwargs)
    return _shown(items, "loading weights", "tensors")


def packing_progress(layers: Sequence[Item]) -> Iterator[Item]:
    """Yield the layers, and show the progress, see ``_wanted``."""
    return _shown(layers, "packing weights", "layers") if _wanted() else iter(layers)


def _wanted() -> bool:
    """Whether progress is shown: as a bar in a terminal, else as lines if the log shows INFO."""
    return sys.stderr.isatty() or _log.isEnabledFor(INFO)


def _shown(items: Any, what: str, unit: str) -> Iterator[Any]:
    return _bar(items, what) if sys.stderr.isatty() else _lines(items, what, unit)


def _bar(items: Any, what: str) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import track

    return iter(track(items, what, console=Console(stderr=True), transient=True))


def _lines(items: Any, what: str, unit: str) -> Iterator[Any]:
    total, last = len(items), time.monotonic()
    for count, item in enumerate(items):
        if time.monotonic() - last >= LINE_SECONDS:
            last = time.monotonic()
            _log.info("%s: %d of %d %s, %.0f%%", what, count, total, unit, 100 * count / total)
        yield item
