"""Errors that a user can act on: one sentence that names the given and the allowed value."""

from __future__ import annotations

import re
import reprlib

# A value of a user may be large; a sentence shows its beginning and its end.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxtuple, _SHORT.maxdict = 4, 20, 20, 20
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 1000
_SHORT.fillvalue = " ... "


class CospecError(Exception):
    """Base of every error that users see without a traceback.

    Attributes:
        field: the user's name of the wrong value; None if no single value is wrong.
    """

    field: str | None = None


class InvalidInput(CospecError, ValueError):
    """A value outside of the allowed values.

    Args:
        field: the user's name of the value, such as ``temperature`` or ``speculative_config.acceptance_method``.
        given: the value, or a description of the value.
        allowed: the accepted values, in words.
    """

    def __init__(self, field: str, given: object, allowed: str) -> None:
        shown = given if isinstance(given, _Raw) else _SHORT.repr(given)
        super().__init__(f"{field} is {shown}; allowed is {allowed}.")
        self.field = field

    def within(self, where: str) -> InvalidInput:
        """Return the same error with ``where`` in front; a common prefix of both stands once."""
        whole, _, _ = where.partition(".")
        text = f"{where}: {str(self).removeprefix(f'{whole}.')}"
        located = InvalidInput.__new__(InvalidInput, text)
        located.args, located.field = (text,), self.field
        return located


class _Raw(str):
    """Text that errors show without quotes."""


def words(text: str) -> str:
    """Mark ``text`` as a description of the given value rather than the value."""
    return _Raw(text)


def failure(error: Exception) -> str:
    """Return the sentence for a request that ended because ``error`` was raised in its part of a step."""
    return f"The request failed in the engine: {type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}."


def reason(error: Exception) -> str:
    """Return the reason of ``error`` for a sentence, without the number and the file of an ``OSError``."""
    own = error.strerror if isinstance(error, OSError) else None
    return own or re.sub(r"\[Errno -?\d+\] ", "", str(error))


def is_text(text: str) -> bool:
    """Whether ``text`` has whole Unicode characters only; JSON may hold lone surrogates without a UTF-8 form."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class ModelError(CospecError):
    """A model cannot be loaded or served; the sentence names the model and the reason."""


class EngineStopped(CospecError):
    """The engine drains or has ended, and takes no more requests."""


class EngineEnded(EngineStopped):
    """There is no engine any more. The request is not the cause, and can go on elsewhere."""


class DrafterLost(CospecError):
    """A remote drafter died or is unreachable; its pending drafts will not arrive."""


class VerifierLost(CospecError):
    """A remote verifier died or is unreachable; the outputs of its submissions will not arrive."""


class VerifierEnded(VerifierLost):
    """A remote verifier is lost and cannot be started again; the engine cannot compute any more."""


class RequestsFailed(CospecError):
    """An error of some requests: the engine ends these requests and continues with the others.

    Args:
        ids: ids of the failed requests.
    """

    def __init__(self, message: str, ids: tuple[str, ...]) -> None:
        super().__init__(message)
        self.ids = ids
