"""docs/reference names every endpoint, field, option and metric, and the commands of the pages run."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from fastapi.routing import APIRoute
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel

from cospec.config import CollaborationConfig, EngineConfig, SpeculativeConfig
from cospec.metrics.engine_counters import EngineMetrics
from cospec.registry import DRAFTERS, POLICIES, PluginTable
from cospec.runtime.engine_client import EngineStatus
from cospec.server import responses
from cospec.server.app import create_app
from cospec.server.metrics import POLICY, ServerMetrics
from cospec.server.schemas import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    SpeculationChoice,
    TokenizeBody,
)
from cospec.server.service import Service
from cospec.server.settings import ServerSettings
from cospec.server.unknown_fields import BOOKKEEPING, REFUSED
from cospec.text.tokenizer import TextTokenizer
from server.served import Served
from server.test_real_engine import needs_zoo

if TYPE_CHECKING:
    from server.conftest import Running

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "reference"
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md")) if page.stem != "modules")
COMMANDS = re.findall(r"```console\n\$ (.*?)```(?:\n\n```json\n(.*?)```)?", PAGE, flags=re.S)


def said(names: Iterable[str]) -> bool:
    """Whether the page has every name in code quotes; the page calls an option by the dashes of the command line."""
    quoted = set(re.findall(r"`(?:--)?([^` ]+)`", PAGE))
    missing = {name for name in names if name not in quoted and name.replace("_", "-") not in quoted}
    assert not missing
    return True


def test_endpoints(server: Running) -> None:
    app = create_app(Service(server.client, TextTokenizer(None, 256, 300), ServerMetrics("fake")))
    routes = [route for route in app.routes if isinstance(route, APIRoute)]
    assert said(route.path.replace(":path", "") for route in routes)


@pytest.mark.parametrize("body", [CompletionBody, ChatBody, TokenizeBody, DetokenizeBody, SpeculationChoice])
def test_fields_of_bodies(body: type[BaseModel]) -> None:
    assert said(body.model_fields)


def test_keys_of_other_servers() -> None:
    assert said([*BOOKKEEPING, *REFUSED])


def test_statistics_of_usage() -> None:
    assert said(responses.speculation([]))


@pytest.mark.parametrize("options", [ServerSettings, EngineConfig, CollaborationConfig, SpeculativeConfig])
def test_options(options: type[BaseModel]) -> None:
    assert said(set(options.model_fields) - {"options"})


@pytest.mark.parametrize("table", [DRAFTERS, POLICIES])
def test_options_of_plug_ins(table: PluginTable[Any]) -> None:
    assert said(table)
    assert said(name for plug_in in table for name in table.load(plug_in).Options.model_fields)


def test_metrics() -> None:
    engine = dataclasses.asdict(EngineMetrics(policy=dict.fromkeys(POLICY, 1.0), requests_finished={"stop": 1}))
    text = ServerMetrics("m").render(engine, EngineStatus(True, 0, 0, 0)).decode()
    assert said(
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text)
        if not family.name.endswith("_created")
    )


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
def test_commands_are_answered_as_shown() -> None:
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
                assert '"error":' not in done.stdout.partition("\n")[0]  # a sampled text may have the word
                assert '"prompt_token_ids"' in done.stdout or "[DONE]" in done.stdout or "cospec:" in done.stdout
    finally:
        assert server.stop() == 0
