"""Errors that a user can act on: one sentence that names what was given and what is allowed."""

from __future__ import annotations

import reprlib

# What a user gave may be large; a sentence shows its beginning and its end.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 4, 20, 20, 20
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 1000
_SHORT.fillvalue = " ... "


class CospecError(Exception):
    """Base of every error that is shown to a user without a traceback.

    Attributes:
        field: the name of the value that is wrong, as the user knows the value; None where no single value is.
    """

    field: str | None = None


class InvalidInput(CospecError, ValueError):
    """A value outside what is allowed.

    Args:
        field: the name the user knows it by, such as ``temperature`` or ``speculative_config.acceptance_method``.
        given: the value, or what was found.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, given: object, allowed: str) -> None:
        shown = given if isinstance(given, _Raw) else _SHORT.repr(given)
        super().__init__(f"{field} is {shown}; allowed is {allowed}.")
        self.field = field

    def within(self, where: str) -> InvalidInput:
        """The same sentence behind the name of the part that it is about; what both begin with is said once."""
        whole, _, _ = where.partition(".")
        text = f"{where}: {str(self).removeprefix(f'{whole}.')}"
        located = InvalidInput.__new__(InvalidInput, text)
        located.args, located.field = (text,), self.field
        return located


class _Raw(str):
    """Text shown without quotes."""


def words(text: str) -> str:
    """Mark ``text`` as a description of what was given rather than the value itself."""
    return _Raw(text)


def failure(error: Exception) -> str:
    """The sentence for a request that ends because ``error`` was raised in its own part of the work."""
    return f"The request failed in the engine: {type(error).__name__}: {' '.join(str(error).split())}."


def is_text(text: str) -> bool:
    """Whether ``text`` is whole Unicode characters; JSON may hold halves of one, which nothing can write or read."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class ModelError(CospecError):
    """A model that cannot be loaded or served; the sentence says which and why."""


class EngineStopped(CospecError):
    """The engine is draining or has ended and takes no more requests."""


class DrafterLost(CospecError):
    """A drafter that works elsewhere died or cannot be reached; what it was asked for will not come."""


class RequestsFailed(CospecError):
    """An error of some requests: the engine ends these, and goes on with the others.

    Args:
        ids: of the requests.
    """

    def __init__(self, message: str, ids: tuple[str, ...]) -> None:
        super().__init__(message)
        self.ids = ids
