"""The routes: OpenAI's, vLLM's additions, and the operator's."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response
from fastapi_offline import FastAPIOffline
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import cospec
from cospec.errors import EngineStopped, InvalidInput, words
from cospec.server import bodies, errors, metrics, node_metrics, schemas, template_variables, unknown_fields
from cospec.server.admission import Tickets, ticket
from cospec.server.auth import HostCheck, KeyCheck
from cospec.server.responses import ChatShape, CompletionShape
from cospec.server.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    Sampled,
    Schema,
    Templated,
    TokenizeBody,
)
from cospec.server.service import Call, Prompt, Service
from cospec.server.streaming import respond

REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
MAX_DETOKENIZED = 65_536  # token ids, or the context's length if longer
MAX_ECHOED_TOKENS = 16_384  # with log-probabilities, where a call has several choices
TOKENIZERS = 2  # threads for /tokenize and /detokenize, of those that calls with outputs use as well
BodyT = TypeVar("BodyT", bound=Sampled)
ResultT = TypeVar("ResultT")


def create_app(service: Service) -> FastAPI:
    """Build the HTTP application of a running engine."""
    settings = service.settings
    # A redirect that adds or removes a slash would use the host name that the sender claims. The API page loads its
    # scripts from this server. Its validator is on the internet, so the validator is off.
    app = FastAPIOffline(
        redoc_url=None,
        redirect_slashes=False,
        title="cospec",
        version=cospec.__version__,
        swagger_ui_parameters={"validatorUrl": None},
    )
    errors.install(app)
    _add_generation(app, service)
    _add_tokens(app, service)
    _add_models(app, service)
    _add_operations(app, service)
    # Middleware from the inside out: the last added layer sees a request first.
    app.add_middleware(Tickets, admission=service.admission)
    if settings.api_key:
        app.add_middleware(KeyCheck, keys=settings.api_key)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "Retry-After"],
        )
    if settings.allowed_hosts:
        app.add_middleware(HostCheck, allowed=settings.allowed_hosts)
    app.add_middleware(RequestIds)
    return app


def _add_generation(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", openapi_extra=_takes(CompletionBody))
    async def completions(http: HttpRequest) -> Response:
        body, ignored = await _admit(http, service, CompletionBody)
        call = await asyncio.to_thread(completion_call, service, body)
        answer = await respond(http, service, call, CompletionShape(body, service.tokens))
        unknown_fields.name_ignored(answer, ignored)
        return answer

    @app.post("/v1/chat/completions", openapi_extra=_takes(ChatBody))
    async def chat_completions(http: HttpRequest) -> Response:
        body, ignored = await _admit(http, service, ChatBody)
        ignored += template_variables.unread(body, body.messages, service.tokens.template_names)
        call = await asyncio.to_thread(chat_call, service, body)
        answer = await respond(http, service, call, ChatShape(body, service.tokens))
        unknown_fields.name_ignored(answer, ignored)
        return answer


async def _admit(http: HttpRequest, service: Service, schema: type[BodyT]) -> tuple[BodyT, list[str]]:
    """Read the body of a call and reserve places for its outputs; return the body and the ignored keys.

    Raises:
        CospecError: the body is wrong, or the server does not take the call now.
    """
    service.client.check()
    held = ticket(http)
    held.arrive()
    body = await schemas.receive(schema, http, service.settings)
    ignored = unknown_fields.check(body, service.settings.strict)
    bodies.check_choices(body.bounded, service.settings)
    held.take(bodies.outputs(body.prompt_count, body.n, service.settings))
    return body, ignored


def completion_call(service: Service, body: CompletionBody) -> Call:
    """Check a completion's body and build its requests.

    Raises:
        CospecError: the body is wrong.
    """
    body.check()
    service.check_model(body.model)
    muted = body.max_tokens == 0
    if muted and not body.echo:
        raise InvalidInput("max_tokens", 0, "a whole number from 1 up, or 0 with echo")
    changes: dict[str, Any] = {"max_tokens": 1} if muted else {}
    if body.echo and body.logprobs is not None:
        changes["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    params = body.sampling(**changes)
    call = service.call("cmpl", body, _prompts(service, body), params)
    requests = call.requests
    if params.n > 1 and "prompt_logprobs" in changes:  # each choice repeats the prompt and its log-probabilities
        echoed = sum(len(each.prompt) for each in requests)
        if echoed > MAX_ECHOED_TOKENS:
            allowed = f"1 with echo and logprobs, or at most {MAX_ECHOED_TOKENS} tokens in the prompts of all choices"
            raise InvalidInput("n", words(f"giving {echoed} tokens"), allowed)
        requests = tuple(dataclasses.replace(each, sampling=params) for each in requests)
    return dataclasses.replace(call, requests=requests, muted=muted)


def _prompts(service: Service, body: CompletionBody) -> list[Prompt]:
    """Return each prompt as text and token ids."""
    given = body.prompt
    several: Sequence[str | int | list[int]] = [given] if isinstance(given, str) else given
    if not several:
        raise InvalidInput("prompt", words("empty"), "at least one prompt")
    if isinstance(several[0], int):
        several = [[token for token in several if isinstance(token, int)]]
    found: list[Prompt] = []
    for prompt in several:
        if isinstance(prompt, str):
            ids = service.tokens.check(service.tokens.encode(prompt, body.add_special_tokens))
            found.append((prompt, ids))
        elif isinstance(prompt, list):
            ids = service.tokens.check(prompt)
            found.append((service.tokens.decode(ids) if body.echo else "", ids))
    return found


def chat_call(service: Service, body: ChatBody) -> Call:
    """Check a chat completion's body and build its requests.

    Raises:
        CospecError: the body is wrong.
    """
    body.check()
    service.check_model(body.model)
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    top = (body.top_logprobs or 0) if body.logprobs else None
    # Without a limit an answer may fill the context, as in OpenAI's API.
    params = body.sampling(max_tokens=limit, logprobs=top)
    ids = _chat_ids(service, body, body.messages)
    return service.call("chatcmpl", body, [("", service.tokens.check(ids, "messages"))], params)


def _chat_ids(service: Service, body: Templated, messages: Sequence[schemas.Message]) -> tuple[int, ...]:
    """Return the token ids of a conversation, rendered with the template options of the body."""
    plain = [message.plain() for message in messages]
    return service.tokens.chat(
        plain, body.opens_answer, body.continue_final_message, template_variables.variables(body)
    )


def _add_tokens(app: FastAPI, service: Service) -> None:
    tokens = service.tokens
    free = asyncio.Semaphore(TOKENIZERS)

    async def in_thread(http: HttpRequest, work: Callable[[], ResultT]) -> ResultT:
        async with free:
            if await http.is_disconnected():
                raise ClientDisconnect
            return await asyncio.to_thread(work)

    @app.post("/tokenize", openapi_extra=_takes(TokenizeBody))
    async def tokenize(http: HttpRequest) -> Response:
        body = await schemas.receive(TokenizeBody, http, service.settings)
        ignored = unknown_fields.check(body, service.settings.strict)
        service.check_model(body.model)
        if body.messages is not None:
            ignored += template_variables.unread(body, body.messages, tokens.template_names)
        answer = Response(await in_thread(http, lambda: tokenized(body)), media_type="application/json")
        unknown_fields.name_ignored(answer, ignored)
        return answer

    def tokenized(body: TokenizeBody) -> bytes:
        if (body.prompt is None) == (body.messages is None):
            shown = words("missing" if body.prompt is None else "given with messages")
            raise InvalidInput("prompt", shown, "a string, or messages instead")
        if body.messages is not None:
            ids = _chat_ids(service, body, body.messages)
        else:
            ids = tokens.encode(body.prompt or "", body.add_special_tokens)
        answer = {
            "count": len(ids),
            "max_model_len": service.info.max_model_len,
            "tokens": ids,
            "token_strs": [tokens.piece(id) for id in ids] if body.return_token_strs else None,
        }
        return msgspec.json.encode(answer)

    @app.post("/detokenize", openapi_extra=_takes(DetokenizeBody))
    async def detokenize(http: HttpRequest, answer: Response) -> dict[str, str]:
        body = await schemas.receive(DetokenizeBody, http, service.settings)
        unknown_fields.name_ignored(answer, unknown_fields.check(body, service.settings.strict))
        service.check_model(body.model)
        most = max(service.info.max_model_len, MAX_DETOKENIZED)
        if len(body.tokens) > most:
            raise InvalidInput("tokens", words(f"a list of {len(body.tokens)}"), f"at most {most} token ids")
        return {"prompt": await in_thread(http, lambda: tokens.decode(tokens.known(body.tokens, "tokens")))}


def _add_models(app: FastAPI, service: Service) -> None:
    card = {
        "id": service.info.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "cospec",
        "root": service.info.model_name,
        "parent": None,
        "max_model_len": service.info.max_model_len,
    }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return card


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Return 200 while the engine's process lives and makes progress."""
        service.client.check_alive()
        return Response()

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready")
    async def ready() -> Response:
        """Return 200 while the server takes new requests."""
        service.client.check()
        return Response()

    @app.get("/metrics")
    async def prometheus() -> Response:
        try:
            engine = await service.client.metrics()
        except EngineStopped:  # the server's figures exist without the engine
            engine = None
        text = service.metrics.render(engine, service.client.status)
        return Response(text, media_type=metrics.CONTENT_TYPE)

    @app.get("/cluster")
    async def cluster() -> dict[str, Any]:
        """Return the drafter nodes: state, load, weight, acceptance, latency, cost, lost and late drafts."""
        return node_metrics.cluster_status(await service.client.metrics())

    @app.get("/version")
    async def version() -> dict[str, str]:
        return {"version": cospec.__version__}


def _takes(schema: type[Schema]) -> dict[str, Any]:
    """Describe the body of a route for /docs. ``schemas.read`` parses bodies, because its errors are clearer."""
    found = schema.model_json_schema()
    parts = found.pop("$defs", {})

    def inline(value: Any) -> Any:
        if isinstance(value, dict):
            if "$ref" in value:
                return inline(parts[value["$ref"].rsplit("/", 1)[-1]])
            return {key: inline(item) for key, item in value.items()}
        return [inline(item) for item in value] if isinstance(value, list) else value

    return {"requestBody": {"required": True, "content": {"application/json": {"schema": inline(found)}}}}


class RequestIds:
    """ASGI middleware: every answer has ``X-Request-Id``: the sender's id, the answer's id, or a new id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and its answer back with the header."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if REQUEST_ID.fullmatch(given):
                    headers["x-request-id"] = given
                headers.setdefault("x-request-id", uuid.uuid4().hex)
            await send(message)

        await self._app(scope, receive, marked)
