"""``cospec cluster``: target replicas and drafter nodes on one or many machines, placed and watched by Ray."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Run replicas and drafter nodes as one server.", no_args_is_help=True)
Name = Annotated[str, typer.Option(help="The cluster's name.")]


@app.command()
def up(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="YAML or JSON file that declares the cluster.", show_default="one replica"),
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="A Ray cluster that runs.", show_default="start Ray on this machine")
    ] = None,
) -> None:
    """Start the cluster. SIGTERM, SIGINT and cospec cluster down stop the cluster."""
    from cospec.cluster.config import ClusterConfig
    from cospec.cluster.up import up

    def say(sentence: str) -> None:
        print(sentence, file=sys.stderr, flush=True)

    up(ClusterConfig.read(file), address, say)


@app.command()
def status(name: Name = "cospec") -> None:
    """Print deployments and machines as JSON."""
    from cospec.cluster.up import status

    with contextlib.redirect_stdout(sys.stderr):  # Ray prints its own messages, such as the loss of a machine
        found = status(name)
    print(json.dumps(found, indent=2))


@app.command()
def down(name: Name = "cospec") -> None:
    """Stop a cluster of this machine, and wait for its end."""
    from cospec.cluster.up import down

    down(name)
