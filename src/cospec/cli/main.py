"""The command ``cospec`` and its subcommands.

Another command, or group of commands, is one entry near the end of this file; its module must be cheap to import.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from cospec.cli import (
    bench,
    chat,
    doctor,
    generate,
    help,
    models,
    profile,
    serve,
    simulate,
    train,
    verify,
)
from cospec.errors import CospecError
from cospec.process_utils import fast_exit


class _Sentences(TyperGroup):
    """Shows errors that a user can act on as their one sentence."""

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand; exit status 1 for errors in what it was given, 2 for wrong usage."""
        try:
            return super().invoke(ctx)
        except CospecError as error:
            print(f"cospec: {error}", file=sys.stderr)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="cospec",
    cls=_Sentences,
    help="Speculative decoding that is exact to the last bit of probability.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables cut names in narrow terminals
)


def _version(wanted: bool) -> None:
    if wanted:
        import cospec

        print(cospec.__version__)
        raise typer.Exit


@app.callback()
def _main(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show it.")) -> None:
    """Options before a command."""


# Each command, and the classes that its options take their defaults from.
_COMMANDS: tuple[tuple[Callable[..., None], tuple[str, ...]], ...] = (
    (serve.serve, (help.ENGINE, help.SERVER)),
    (generate.generate, (help.ENGINE, help.SAMPLING)),
    (chat.chat, (help.ENGINE, help.SAMPLING)),
    (models.models, ()),
    (doctor.doctor, (help.ENGINE,)),
    (verify.verify, (help.ENGINE,)),
    (profile.profile, (help.ENGINE,)),
    (simulate.simulate, ()),
)
for _command, _sources in _COMMANDS:
    app.command(cls=help.showing(*_sources))(_command)
app.add_typer(help.show_plainly(bench.app, help.ENGINE), name="bench")
app.add_typer(help.show_plainly(train.app), name="train")


def main() -> None:
    """Run the command, as the whole of a process."""
    with fast_exit():
        app()
