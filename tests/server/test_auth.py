"""Keys from options, environment and file; hosts, origins and redirects."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from cospec.errors import InvalidInput
from cospec.server.auth import KeyCheck, read_keys
from cospec.server.settings import ServerSettings
from server.test_errors import error_of

if TYPE_CHECKING:
    from server.conftest import Running


def test_keys_of_options_and_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n  two \none\n")
    assert read_keys(ServerSettings.model_validate({"api_key": "zero", "api_key_file": file})).api_key == (
        "zero",
        "one",
        "two",
    )
    assert read_keys(ServerSettings()).api_key == ()


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_a_file_without_keys_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "keys"
    file.write_text(content)
    with pytest.raises(InvalidInput, match="has no key"):
        read_keys(ServerSettings(api_key_file=file))
    with pytest.raises(InvalidInput, match="api_key_file"):
        read_keys(ServerSettings(api_key_file=tmp_path / "absent"))


def test_every_key_opens(server_of: Callable[..., Running]) -> None:
    server = server_of(api_key=["one", "two"])
    for key, status in (("one", 200), ("two", 200), ("three", 401)):
        found = httpx.get(f"{server.url}/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert found.status_code == status


def test_every_path_needs_a_key_but_a_short_list(server_of: Callable[..., Running]) -> None:
    server = server_of(api_key="secret")
    routes = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    found = {
        path: {
            httpx.request(method, server.url + path.replace("{name}", "fake"), content="{}").status_code == 401
            for method in methods
        }
        for path, methods in routes.items()
    }
    assert {path for path, guarded in found.items() if guarded != {True}} == {
        "/health", "/ready", "/metrics", "/version",
    }  # fmt: skip
    for path in ("/nothing", "/v1", "/docs/nothing", "/healthy", "//health", "/static-offline-docs"):
        assert httpx.get(server.url + path).status_code == 401
    page = httpx.get(f"{server.url}/docs").text
    scripts = re.findall(r'(?:src|href)="(/[^"]+)"', page)
    assert scripts and all(httpx.get(server.url + path).status_code == 200 for path in scripts)


def test_a_key_may_have_any_characters() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append((scope["path"], scope["state"]["key"]))

    async def ask(key: bytes) -> list[MutableMapping[str, Any]]:
        sent: list[MutableMapping[str, Any]] = []

        async def send(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        scope = {"type": "http", "path": "/v1/models", "headers": [(b"authorization", b"Bearer " + key)]}
        await KeyCheck(app, ["a", "schl\u00fcssel"])(scope, cast(Receive, None), send)
        return sent

    reached: list[tuple[str, int]] = []
    assert asyncio.run(ask("schl\u00fcssel".encode())) == []
    assert reached == [("/v1/models", 1)]
    assert asyncio.run(ask(b"schl"))[0]["status"] == 401


def test_no_redirect_follows_the_host_of_the_sender(server: Running) -> None:
    for path in ("/health/", "/version/", "/v1/completions/"):
        found = server.http.get(path, headers={"Host": "elsewhere.example"})
        assert found.status_code in (404, 405)
        assert "location" not in found.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [("a.example", 200), ("A.example:80", 200), ("x.b.example", 200), ("b.example", 400), ("[::1]:8000", 200),
     ("elsewhere", 400)],
)  # fmt: skip
def test_hosts_may_be_listed(server_of: Callable[..., Running], host: str, status: int) -> None:
    server = server_of(allowed_hosts=["a.example", "*.b.example", "[::1]"])
    found = server.http.get("/version", headers={"Host": host})
    assert found.status_code == status
    if status == 400:
        assert "--allowed-hosts" in error_of(found, 400)["message"]


def test_any_host_is_answered_by_default(server: Running) -> None:
    assert server.http.get("/version", headers={"Host": "elsewhere"}).status_code == 200


def preflight(server: Running, origin: str) -> httpx.Response:
    headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    return httpx.options(f"{server.url}/v1/completions", headers=headers)


def test_origins_may_be_listed(server_of: Callable[..., Running], server: Running) -> None:
    own = server_of(allowed_origins=["https://a.example"], api_key="secret")
    allowed = preflight(own, "https://a.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = httpx.get(f"{own.url}/v1/models", headers={"Origin": "https://a.example"})
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (401, True)
    for found in (preflight(own, "https://b.example"), preflight(server, "https://a.example")):
        assert "access-control-allow-origin" not in found.headers
