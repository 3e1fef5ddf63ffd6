"""/docs needs no other server: the page and all that it loads come from here."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.conftest import Running


def test_the_page_loads_from_this_server_alone(server: Running) -> None:
    page = server.http.get("/docs")
    assert page.status_code == 200
    links = re.findall(r"""(?:src|href)\s*=\s*["']([^"']+)""", page.text)
    assert {link.rpartition(".")[2] for link in links} >= {"js", "css"}
    assert not re.search(r"https?:|[\"']//", page.text)
    for link in links:
        found = server.http.get(link)
        assert found.status_code == 200 and found.content, link
        if link.endswith(".css"):
            assert "@import" not in found.text
            assert all(link.startswith("data:") for link in re.findall(r"url\(\s*[\"']?([^\s)]{5})", found.text))


def test_no_validator_elsewhere_is_asked(server: Running) -> None:
    """Swagger UI sends the API's address to a validator on the internet unless a setting turns the validator off."""
    assert re.search(r'"validatorUrl":\s*null', server.http.get("/docs").text)


def test_the_description_names_the_fields(server: Running) -> None:
    paths = server.http.get("/openapi.json").json()["paths"]
    schema = paths["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"messages", "chat_template_kwargs", "continue_final_message"} <= set(schema["properties"])
