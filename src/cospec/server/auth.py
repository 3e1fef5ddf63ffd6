"""Access control: API keys, host names and origins."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from cospec.errors import InvalidInput, reason, words
from cospec.server import errors
from cospec.server.settings import ServerSettings

# Paths without a key; every other path needs one.
OPEN = ("/health", "/ready", "/metrics", "/version", "/docs", "/docs/oauth2-redirect", "/openapi.json")
OPEN_FOLDER = "/static-offline-docs/"  # scripts of /docs


def read_keys(settings: ServerSettings) -> ServerSettings:
    """Return the settings with the keys of ``api_key_file`` added to ``api_key``.

    Raises:
        InvalidInput: the file is unreadable or has no key, or a key is blank.
    """
    keys = list(settings.api_key)
    if settings.api_key_file is not None:
        keys += _keys_of(settings.api_key_file)
    for key in keys:
        if not key.strip():
            raise InvalidInput("api_key", words("empty"), "a key of one printable character or more")
    return settings.model_copy(update={"api_key": tuple(dict.fromkeys(keys)), "api_key_file": None})


def _keys_of(file: Path) -> list[str]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        given = words(f"{file} ({reason(error)})")
        raise InvalidInput("api_key_file", given, "a text file with one key per line") from None
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise InvalidInput("api_key_file", words(f"{file}, which has no key"), "a text file with one key per line")
    return keys


class KeyCheck:
    """ASGI middleware: answers 401 without a valid key, before the body is read. The paths of ``OPEN`` need no key.

    ``scope["state"]["key"]`` becomes the index of the given key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._expected = [f"Bearer {key}".encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse the request."""
        if scope["type"] == "http" and not _is_open(scope["path"]):
            scheme, space, key = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            given = scheme.capitalize() + space + key  # RFC 9110: the scheme has no case
            # The check compares every key, so that the time reveals nothing about the order of keys.
            matches = [number for number, one in enumerate(self._expected) if secrets.compare_digest(given, one)]
            if not matches:
                message = "Authorization is missing or wrong; allowed is 'Bearer' and a key of this server."
                await errors.response(message, HTTPStatus.UNAUTHORIZED)(scope, receive, send)
                return
            scope.setdefault("state", {})["key"] = matches[0]
        await self._app(scope, receive, send)


def _is_open(path: str) -> bool:
    return path in OPEN or path.startswith(OPEN_FOLDER)


class HostCheck:
    """ASGI middleware: answers 400 if the header ``Host`` has none of the allowed names."""

    def __init__(self, app: ASGIApp, allowed: Sequence[str]) -> None:
        self._app = app
        self._allowed = [name.lower() for name in allowed]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse the request."""
        if scope["type"] == "http" and not self._allows(Headers(scope=scope).get("host", "")):
            message = "Host is a name of another server; allowed are the names of --allowed-hosts."
            await errors.response(message, HTTPStatus.BAD_REQUEST)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allows(self, host: str) -> bool:
        name = host.lower()
        if not name.endswith("]"):  # an IPv6 address without a port
            name = name.rpartition(":")[0] or name
        return any(
            allowed in ("*", name) or (allowed.startswith("*.") and name.endswith(allowed[1:]))
            for allowed in self._allowed
        )
