"""docs/server.md says what the server does: its endpoints, fields, options and metrics, and its commands run."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families
from served import Served
from test_real_engine import needs_zoo

from cospec.engine.metrics import EngineMetrics
from cospec.engine.serving import EngineStatus
from cospec.engine.tokens import Tokens
from cospec.server import answers
from cospec.server.app import create_app
from cospec.server.fields import BOOKKEEPING, REFUSED
from cospec.server.metrics import POLICY, ServerMetrics
from cospec.server.schemas import ChatBody, CompletionBody, DetokenizeBody, SpeculationChoice, TokenizeBody
from cospec.server.service import Service
from cospec.server.settings import ServerSettings

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text(encoding="utf-8")
SECTIONS = {title: text for title, _, text in (part.partition("\n") for part in re.split(r"^##+ ", PAGE, flags=re.M))}
COMMANDS = re.findall(r"```console\n\$ (.*?)```(?:\n\n```json\n(.*?)```)?", PAGE, flags=re.S)
BUILT_IN = {("GET", path) for path in ("/docs", "/docs/oauth2-redirect", "/openapi.json")}  # FastAPI's own


def cells(section: str, column: int, table: int = 0) -> list[str]:
    """A column of one of a section's tables, without its head."""
    tables = re.findall(r"(?:^\|.*\n)+", SECTIONS[section] + "\n", flags=re.M)
    return [line.split("|")[column].strip() for line in tables[table].splitlines()[2:]]


def names(cells: list[str]) -> list[str]:
    return [name for cell in cells for name in re.findall(r"`([^`]+)`", cell)]


def test_endpoints(server):
    service = Service(server.client, Tokens(None, 256, 300), ServerMetrics("fake"))
    app = create_app(service)
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    offered = {(method, route.path.replace(":path", "")) for route in routes for method in route.methods}
    rows = zip(cells("Endpoints", 1), cells("Endpoints", 2), strict=True)
    told = {(method, path) for methods, paths in rows for method in names([methods]) for path in names([paths])}
    assert told == offered | BUILT_IN


def test_fields_of_bodies():
    own, completion, chat = (names(cells(section, 1)) for section in ("cospec's own", "Completions", "Chat"))
    assert set(completion) == set(CompletionBody.model_fields)
    assert set(own) <= set(completion)
    left_out = {"prompt", "echo", "best_of", "add_special_tokens"}
    assert set(completion) - left_out | set(chat) == set(ChatBody.model_fields)
    for field in SpeculationChoice.model_fields:
        assert f"`{field}`" in SECTIONS["cospec's own"]
    for field in (*TokenizeBody.model_fields, *DetokenizeBody.model_fields):
        assert f"`{field}`" in SECTIONS["Tokens"]


def test_keys_of_other_servers():
    told = names(cells("Keys of other servers", 1))
    assert sorted(told) == sorted([*BOOKKEEPING, *REFUSED])
    meanings = cells("Keys of other servers", 2)
    for keys, meaning in zip(cells("Keys of other servers", 1), meanings, strict=True):
        for name in set(names([keys])) & set(REFUSED):
            assert meaning == f"refused; allowed: {REFUSED[name].allowed}"


def test_statistics_of_usage():
    assert set(names(cells("cospec's own", 1, table=1))) == set(answers.speculation([]))


def test_options():
    told = [name.removeprefix("--").replace("-", "_") for name in names(cells("Options of the server", 1))]
    assert set(told) == set(ServerSettings.model_fields)


def test_metrics():
    engine = dataclasses.asdict(EngineMetrics(policy=dict.fromkeys(POLICY, 1.0), requests_finished={"stop": 1}))
    text = ServerMetrics("m").render(engine, EngineStatus(True, 0, 0, 0)).decode()
    kinds = {
        family.name + ("_total" if family.type == "counter" else ""): family.type
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    }
    told = zip(names(cells("Metrics", 1)), cells("Metrics", 2), strict=True)
    assert {name: kind.partition(",")[0] for name, kind in told} == kinds


def kept(shown: object, given: object) -> bool:
    """Whether everything that is shown by name is there."""
    if isinstance(shown, dict):
        return isinstance(given, dict) and all(
            key in given and kept(value, given[key])
            for key, value in shown.items()
            if key not in ("draft_model", " the")
        )
    if isinstance(shown, list):
        return isinstance(given, list) and bool(given) and kept(shown[0], given[0])
    return given is None if shown is None else isinstance(given, int | float | str)


@needs_zoo
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_commands_are_answered_as_shown():
    assert len(COMMANDS) >= 7
    server = Served("zoo", "--max-num-seqs", "4", "--kv-cache-memory-bytes", str(1 << 23))
    try:
        for command, shown in COMMANDS:
            run = command.replace("http://127.0.0.1:8000", server.url).replace(
                "curl ", "curl --silent --max-time 60 ", 1
            )
            done = subprocess.run(["bash", "-c", run], capture_output=True, text=True, check=True)
            if shown:
                assert kept(json.loads(shown), json.loads(done.stdout)), done.stdout
            else:
                assert "error" not in done.stdout.partition("\n")[0]
                assert '"prompt_token_ids"' in done.stdout or "[DONE]" in done.stdout or "cospec:" in done.stdout
    finally:
        assert server.stop() == 0
