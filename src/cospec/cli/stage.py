"""``cospec stage``: this machine runs stages of targets for engines on other machines."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Run pipeline stages on this machine for an engine.")


@app.command()
def host(
    address: Annotated[str, typer.Option(metavar="HOST:PORT", help="The address of this machine to listen on.")],
    token_file: Annotated[Path, typer.Option(help="The secret that the engines have too.")],
) -> None:
    """Start stages whenever an engine asks, until SIGTERM or SIGINT."""
    from cospec.distributed.stage_host import StageHost, parse_address, read_token

    running = StageHost(parse_address("address", address), read_token(token_file))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
    print(f"cospec stage host listens at {running.address}", file=sys.stderr, flush=True)
    try:
        running.serve()
    finally:
        running.close()


@app.command()
def token(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to write; an existing file stays.")],
) -> None:
    """Write a new secret, readable by its owner only."""
    from cospec.errors import InvalidInput

    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except OSError as error:
        raise InvalidInput("file", str(file), f"a new file ({error.strerror})") from None
    with open(descriptor, "w") as stream:
        stream.write(f"{secrets.token_hex(32)}\n")
    print(f"{file}: give this file to every stage host and engine, and keep it secret.")
