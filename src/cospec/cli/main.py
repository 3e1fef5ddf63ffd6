"""The command ``cospec`` and its subcommands.

Another command, or group of commands, is one entry near the end of this file; its module must be cheap to import.
"""

from __future__ import annotations

import sys
from typing import Any

import typer
from typer.core import TyperGroup

from cospec.cli import bench, chat, doctor, generate, models, profile, serve, simulate, train, verify
from cospec.errors import CospecError
from cospec.leaving import leaving_at_once


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
)


def _version(wanted: bool) -> None:
    if wanted:
        import cospec

        print(cospec.__version__)
        raise typer.Exit


@app.callback()
def _main(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show it.")) -> None:
    """Options before a command."""


for _command in (serve.serve, generate.generate, chat.chat, models.models, profile.profile, simulate.simulate):
    app.command()(_command)
app.command()(verify.verify)
app.command()(doctor.doctor)
for _name, _group in (("bench", bench.app), ("train", train.app)):
    app.add_typer(_group, name=_name)


def main() -> None:
    """Run the command, as the whole of a process."""
    with leaving_at_once():
        app()
