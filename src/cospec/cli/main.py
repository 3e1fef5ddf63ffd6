"""The command ``cospec`` and its subcommands.

A new command or group is one entry near the end of this file. Its module must import quickly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import typer

from cospec.cli import (
    bench,
    calibrate,
    chat,
    cluster,
    doctor,
    generate,
    help,
    models,
    node,
    profile,
    quantize,
    serve,
    simulate,
    stage,
    train,
    verify,
)
from cospec.errors import CospecError
from cospec.process_utils import fast_exit


class _Sentences(help.Group):
    """Shows errors that a user can act on as one sentence."""

    def invoke(self, ctx: Any) -> Any:
        """Run a subcommand. Exit status 1 is an error in the input, 2 is wrong usage."""
        try:
            return super().invoke(ctx)
        except CospecError as error:
            print(f"cospec: {error}", file=sys.stderr)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="cospec",
    cls=_Sentences,
    help="Speculative decoding with one or several drafters, exact by default.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's tables truncate names in narrow terminals
)


def _version(wanted: bool) -> None:
    if wanted:
        import cospec

        print(cospec.__version__)
        raise typer.Exit


@app.callback()
def _main(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """Parse the options before a command."""


# Each command with the sources of its options' defaults.
_COMMANDS: tuple[tuple[Callable[..., None], tuple[str, ...]], ...] = (
    (serve.serve, (help.ENGINE, help.SERVER)),
    (generate.generate, (help.ENGINE, help.SAMPLING)),
    (chat.chat, (help.ENGINE, help.SAMPLING)),
    (models.models, ()),
    (doctor.doctor, (help.ENGINE,)),
    (verify.verify, (help.ENGINE,)),
    (calibrate.calibrate, (help.ENGINE,)),
    (profile.profile, (help.ENGINE,)),
    (quantize.quantize, (help.ENGINE,)),
    (simulate.simulate, ()),
)
for _command, _sources in _COMMANDS:
    app.command(cls=help.command_class(*_sources))(_command)
app.add_typer(help.use_plain_help(bench.app, help.ENGINE), name="bench")
app.add_typer(help.use_plain_help(train.app), name="train")
app.add_typer(help.use_plain_help(cluster.app), name="cluster")
app.add_typer(help.use_plain_help(node.app), name="node")
app.add_typer(help.use_plain_help(stage.app), name="stage")


def main() -> None:
    """Run the command as a whole process."""
    with fast_exit():
        app()
