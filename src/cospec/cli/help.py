"""Plain ``--help``: whole names at any width, options in groups, and the default of every option.

Errors about unknown commands and options say what is allowed.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields, is_dataclass
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup

ENGINE = "cospec.config:EngineConfig"
SERVER = "cospec.server.settings:ServerSettings"
SAMPLING = "cospec.sampling_params:SamplingParams"
PLACES = {
    ENGINE: "LLM(...) and of `cospec serve --config FILE`",
    SERVER: "`cospec serve --config FILE`",
    SAMPLING: "--sampling-params",
}
TYPE = re.compile(r"<(?:list\[)?(str|int|float|path|Path)(?: range)?\]?>")
TYPES = {"str": "TEXT", "int": "INTEGER", "float": "NUMBER", "path": "PATH"}
SENTENCE = re.compile(r"default: \((.*?)\)(?=[;\]])")  # typer puts brackets around a default in words


class Command(TyperCommand):
    """A command that takes missing defaults of options from ``sources``."""

    sources: ClassVar[tuple[str, ...]] = ()  # ``module:class`` of options or of a dataclass

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; an option that is only a key of a configuration gets an error with the right place."""
        own = {name for param in self.get_params(ctx) for name in (*param.opts, *param.secondary_opts)}
        for option in (arg.partition("=")[0] for arg in args if arg.startswith("--")):
            key = option.removeprefix("--").replace("-", "_")
            for place in (PLACES[source] for source in self.sources if option not in own and key in _defaults(source)):
                ctx.fail(f"{option} is no option of this command; {key} is a key of {place}.")
        parsed: list[str] = super().parse_args(ctx, args)
        return parsed

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the arguments of the usage line, without braces around required ones."""
        return [re.sub(r"\{(.*)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

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
                groups.setdefault(panel, []).append((_name(param, record[0]), text))
        for panel, rows in groups.items():
            if rows:
                with formatter.section(panel):
                    formatter.write_dl(rows)


class Group(TyperGroup):
    """A group of commands that names all of them where a command is unknown."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command of the first argument."""
        if not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"{args[0]!r} is no command; allowed is one of {', '.join(self.list_commands(ctx))}.")
        return super().resolve_command(ctx, args)


def command_class(*sources: str) -> type[Command]:
    """Return a command class with these ``sources`` of defaults."""
    return type("Command", (Command,), {"sources": sources})


def use_plain_help(app: typer.Typer, *sources: str) -> typer.Typer:
    """Give ``app``, and its commands without a class, the plain help; return ``app``."""
    app.rich_markup_mode, app.info.cls = None, Group
    for command in app.registered_commands:
        if not (command.cls and issubclass(command.cls, Command)):
            command.cls = command_class(*sources)
    return app


def _name(param: Any, record: str) -> str:
    """Return the left side of a help record, with plain words for types; an argument is its name alone."""
    if param.param_type_name == "argument":
        return str(record.partition(" <")[0])
    return TYPE.sub(lambda found: TYPES[found[1].lower()], record)


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
