"""``--help``: whole names in narrow terminals, and the default of every option as its class has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from typer.testing import Result

import cospec.config
from cospec.cli.main import app
from cospec.config import EngineConfig
from cospec.registry import quantizations
from cospec.sampling_params import SamplingParams
from cospec.server.settings import ServerSettings

Command = Callable[..., Result]


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def entries(text: str) -> dict[str, str]:
    """What is said of each option, by the first of its names."""
    found: dict[str, str] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("  --"):
            name = line.split()[0].rstrip(",")
            found[name] = ""
        if name:
            found[name] += " " + line.strip()
        if not line.strip():
            name = ""
    return found


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_every_option_has_its_whole_name_and_its_default(cospec_command: Command, path: tuple[str, ...]) -> None:
    output = cospec_command(*path, "--help").output
    assert max(map(len, output.splitlines())) <= 80
    assert "\u2026" not in output
    assert "<" not in output.replace("<=", "")
    said = entries(output)
    for param in COMMANDS[path].params:
        if param.param_type_name != "option" or param.name == "help":
            continue
        assert all(name in output for name in (*param.opts, *param.secondary_opts))
        text = said[param.opts[0]]
        if not param.is_flag or param.secondary_opts:
            assert "default: " in text or "required]" in text, text


@pytest.mark.parametrize(
    ("command", "source", "names"),
    [
        ("serve", EngineConfig(), ["max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "device"]),
        ("serve", ServerSettings(), ["host", "port", "drain_timeout", "log_level"]),
        ("generate", SamplingParams(), ["temperature", "top_p", "top_k"]),
        ("chat", EngineConfig(), ["device", "dtype"]),
    ],
)
def test_defaults_are_those_of_the_classes(
    cospec_command: Command, command: str, source: object, names: list[str]
) -> None:
    said = entries(cospec_command(command, "--help").output)
    for name in names:
        assert f"[default: {getattr(source, name)}]" in said["--" + name.replace("_", "-")]


def test_a_default_that_changes_changes_the_help(cospec_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(EngineConfig):
        max_num_seqs: int = 7
        enable_prefix_caching: bool = False

    monkeypatch.setattr(cospec.config, "EngineConfig", Other)
    said = entries(cospec_command("serve", "--help").output)
    assert "[default: 7]" in said["--max-num-seqs"]
    assert "[default: no-enable-prefix-caching]" in said["--enable-prefix-caching"]


@pytest.mark.parametrize("group", [(), ("bench",), ("cluster",), ("node",), ("stage",), ("train",)], ids=" ".join)
def test_summaries_are_whole_sentences(cospec_command: Command, group: tuple[str, ...]) -> None:
    output = cospec_command(*group, "--help").output
    _, _, summaries = output.partition("Commands:\n")
    names = [path[len(group)] for path in COMMANDS if path[: len(group)] == group]
    assert {line.split()[0] for line in summaries.splitlines()} == set(names)
    assert all(line.endswith(".") and not line.endswith("...") for line in summaries.splitlines()), summaries


def test_options_stand_in_groups(cospec_command: Command) -> None:
    lines = cospec_command("generate", "--help").output.splitlines()
    places = [lines.index(title) for title in ("Options:", "Engine:", "Sampling:")]
    assert places == sorted(places)
    assert places[1] < next(n for n, line in enumerate(lines) if "--max-num-seqs" in line) < places[2]


def test_models_and_weight_formats_are_listed(cospec_command: Command) -> None:
    said = entries(cospec_command("generate", "--help").output)
    assert set(quantizations()) <= set(said["--quantization"].replace(",", " ").replace(".", " ").split())
    assert "a GGUF file" in " ".join(said["--model"].split())
