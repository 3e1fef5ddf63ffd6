"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cospec.errors import CospecError, EngineStopped, InvalidInput
from cospec.runtime.engine_client import RequestRefused

MAX_MESSAGE = 2000
CLIENT_GONE = 499  # nginx's status for a client that closed the connection


class UnknownModel(CospecError):
    """The request names a model that this server does not serve."""

    def __init__(self, given: str, allowed: str) -> None:
        super().__init__(f"model is {given!r}; allowed is {allowed!r}, the served model.")


class Overloaded(CospecError):
    """The server does not take the request now.

    Args:
        retry_after: seconds until the client may retry.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class BodyTooLarge(CospecError):
    """The body exceeds the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"body is too large; allowed is at most {limit} bytes.")


class RequestTimeout(CospecError):
    """The answer was not complete in time; the engine has aborted the request."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request took longer than {seconds:g} seconds, the limit of this server.")


class EngineFailure(CospecError):
    """A request failed in the engine, without an error of its sender."""


def body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Return the JSON of an error."""
    kind = "invalid_request_error" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "server_error"
    if status == HTTPStatus.UNAUTHORIZED:
        kind, code = "authentication_error", "invalid_api_key"
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        kind = "service_unavailable"
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        kind, code = "rate_limit_error", "rate_limit_exceeded"
    if status == HTTPStatus.GATEWAY_TIMEOUT:
        kind, code = "timeout_error", "request_timeout"
    return {"error": {"message": _printable(message), "type": kind, "param": param and _printable(param), "code": code}}


def _printable(text: str) -> str:
    """Return ``text`` without lone surrogates; a long text loses its middle."""
    if len(text) > MAX_MESSAGE:
        text = text[: MAX_MESSAGE // 2] + " ... " + text[-MAX_MESSAGE // 2 :]
    return text.encode(errors="replace").decode()


def response(message: str, status: int, param: str | None = None, code: str | None = None) -> JSONResponse:
    """Return an error as a response."""
    headers = {"WWW-Authenticate": "Bearer"} if status == HTTPStatus.UNAUTHORIZED else None
    if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
        headers = {"Retry-After": "1"}
    return JSONResponse(body(message, status, param, code), status, headers=headers)


def describe(error: CospecError) -> tuple[int, str | None, str | None]:
    """Return HTTP status, parameter and code of an error."""
    match error:
        case InvalidInput() | RequestRefused():
            return HTTPStatus.BAD_REQUEST, error.field, None
        case UnknownModel():
            return HTTPStatus.NOT_FOUND, "model", "model_not_found"
        case BodyTooLarge():
            return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body", None
        case RequestTimeout():
            return HTTPStatus.GATEWAY_TIMEOUT, None, None
        case Overloaded():
            return HTTPStatus.TOO_MANY_REQUESTS, None, None
        case EngineStopped():
            return HTTPStatus.SERVICE_UNAVAILABLE, None, None
        case _:
            return HTTPStatus.INTERNAL_SERVER_ERROR, None, None


def of(error: CospecError) -> dict[str, Any]:
    """Return the JSON of ``error`` for a stream that has begun."""
    status, param, code = describe(error)
    return body(str(error), status, param, code)


def install(app: FastAPI) -> None:
    """Give every error of ``app`` OpenAI's form."""

    @app.exception_handler(CospecError)
    async def _cospec(http: HttpRequest, error: CospecError) -> JSONResponse:
        status, param, code = describe(error)
        answer = response(str(error), status, param, code)
        match error:
            case Overloaded(retry_after=seconds):
                answer.headers["Retry-After"] = str(seconds)
        return answer

    @app.exception_handler(HTTPException)
    async def _http(http: HttpRequest, error: HTTPException) -> JSONResponse:
        path, method = http.url.path, http.method
        if error.status_code == HTTPStatus.NOT_FOUND:
            answer = response(f"path is {path!r}; allowed is one of the paths listed at /docs.", error.status_code)
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = (error.headers or {}).get("Allow", "another method")
            answer = response(f"method is {method!r}; allowed for {path} is {allowed}.", error.status_code)
        else:
            answer = response(str(error.detail), error.status_code)
        answer.headers.update(error.headers or {})
        return answer

    @app.exception_handler(ClientDisconnect)
    async def _gone(http: HttpRequest, error: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_GONE)  # the client left while sending, so no client reads this

    @app.exception_handler(Exception)
    async def _bug(http: HttpRequest, error: Exception) -> JSONResponse:
        return response("The server failed to answer the request; its log says why.", 500)
