"""Plain ``--help``: whole names at any width, options in groups, and the default of every option."""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand

ENGINE = "cospec.config:EngineConfig"
SERVER = "cospec.server.settings:ServerSettings"
SAMPLING = "cospec.sampling_params:SamplingParams"
SENTENCE = re.compile(r"default: \((.*?)\)(?=[;\]])")  # typer puts brackets around a default in words


class Command(TyperCommand):
    """A command that takes missing defaults of options from ``sources``."""

    sources: ClassVar[tuple[str, ...]] = ()  # ``module:class`` of options or of a dataclass

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options by group; long names have lines of their own."""
        known: dict[str, Any] = {}
        for source in reversed(self.sources):  # the first source wins
            known |= _defaults(source)
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                panel = vars(param).get("rich_help_panel") or usual
                text = SENTENCE.sub(r"default: \1", record[1]) + _addition(param, known)
                groups.setdefault(panel, []).append((record[0], text))
        for panel, rows in groups.items():
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows)


def command_class(*sources: str) -> type[Command]:
    """Return a command class with these ``sources`` of defaults."""
    return type("Command", (Command,), {"sources": sources})


def use_plain_help(app: typer.Typer, *sources: str) -> typer.Typer:
    """Give the commands of ``app`` without a class the plain help; return ``app``."""
    app.rich_markup_mode = None
    for command in app.registered_commands:
        if not (command.cls and issubclass(command.cls, Command)):
            command.cls = command_class(*sources)
    return app


def _addition(param: Any, known: dict[str, Any]) -> str:
    """Return the text that a help record lacks: the default of an option that is None on the command line."""
    if param.param_type_name != "option" or param.required or param.default not in (None, [], ()):
        return ""
    if isinstance(param.show_default, str):  # typer writes such a sentence
        return ""
    value = known.get(param.name)
    if param.is_flag and not param.secondary_opts:
        return ""
    if param.is_flag and isinstance(value, bool):
        value = (param.opts if value else param.secondary_opts)[0].removeprefix("--")
    return f"  [default: {_shown(value)}]"


def _shown(value: Any) -> str:
    from cospec.plugin_options import Options

    if value is None or value in ((), [], {}):
        return "none"
    if isinstance(value, Options):
        return json.dumps(value.model_dump())
    return ", ".join(map(str, value)) if isinstance(value, tuple | list) else str(value)


def _defaults(source: str) -> dict[str, Any]:
    """Return the default of each field of an options class or a dataclass."""
    module, _, name = source.partition(":")
    cls = getattr(import_module(module), name)
    if is_dataclass(cls):
        return {field.name: None if field.default is MISSING else field.default for field in fields(cls)}
    return {name: field.get_default(call_default_factory=True) for name, field in cls.model_fields.items()}
