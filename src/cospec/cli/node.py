"""``cospec node``: this machine drafts for a server, and shows the status of drafter nodes."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from cospec.cli import options
from cospec.cli.options import present

app = typer.Typer(no_args_is_help=True, help="Draft on this machine for a server.")
COLUMNS = (
    "node",
    "drafter",
    "state",
    "weight",
    "acceptance",
    "latency ms",
    "load ms",
    "drafts",
    "late",
    "lost",
    "cost/h",
)


@app.command()
def join(
    address: Annotated[
        str, typer.Argument(metavar="ADDRESS", help="The server's drafter_nodes.bind, such as tcp://HOST:5710.")
    ],
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METHOD|JSON",
            help="""A drafter to offer: a method, or an object such as '{"name": "math", "method": "draft_model",
            "model": "zoo:math"}'. Repeat for several drafters. The server's configuration has the same names.""",
            show_default="draft_model",
        ),
    ] = None,
    model: Annotated[str, typer.Option(help="The server's target; the node reads its tokenizer.")] = "zoo",
    name: Annotated[str | None, typer.Option(help="The node's own name.", show_default="the host's name")] = None,
    keys: Annotated[
        Path | None, typer.Option(help="A folder with verifier.key and the node's NAME.key_secret.")
    ] = None,
    cost_per_hour: Annotated[float, typer.Option(help="What the node costs, for the status.")] = 0.0,
    threads: options.Threads = None,
    dtype: options.Dtype = None,
    quantization: options.Quantization = None,
    kv_cache_dtype: options.KvCacheDtype = None,
) -> None:
    """Load drafters and draft for a server. The node may join and leave while the server runs."""
    from cospec.assembly.drafters_of_node import build_offers
    from cospec.cluster.nodes.hub_options import check_address, zeromq
    from cospec.cluster.nodes.worker import NodeOptions, run_node
    from cospec.config import EngineConfig

    zeromq()
    check_address("address", address, keys)
    given = present(threads=threads, dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    config = EngineConfig.build({"model": model, **given})
    offers = build_offers(config, [_drafter(text) for text in drafter or ["draft_model"]])
    run_node(NodeOptions(address, name or socket.gethostname(), keys, cost_per_hour), offers, _note)


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the keys are written.")],
    name: Annotated[
        list[str] | None, typer.Option(help="A node's name; repeat for several.", show_default="node")
    ] = None,
) -> None:
    """Make the keys of a server and of nodes."""
    from cospec.cluster.nodes.keys import make_keys

    for path in make_keys(folder, name or ["node"]):
        print(f"{path}: keep secret")
    print(f"Give each node {folder / 'verifier.key'} and its own NAME.key_secret. The server keeps the rest.")


@app.command()
def status(
    url: Annotated[str, typer.Argument(metavar="URL", help="The server's address.")] = "http://127.0.0.1:8000",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="COSPEC_API_KEY", help="The server's API key.")] = None,
) -> None:
    """Show the drafter nodes of a running server."""
    import httpx

    from cospec.errors import InvalidInput, reason, words

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/cluster", headers=headers, timeout=10.0)
        answer.raise_for_status()
        found = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise InvalidInput("url", words(f"{url} ({reason(error)})"), "the address of a running cospec server") from None
    if as_json:
        print(json.dumps(found, indent=1))
        return
    rows = [COLUMNS, *(_row(node) for node in found["nodes"])]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    if not found["nodes"]:
        print("No drafter node is connected.")


def _row(node: Mapping[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    return (
        node["node"],
        node["drafter"],
        node["state"],
        "" if node["weight"] is None else f"{node['weight']:.2f}",
        "" if node["draft_acceptance_rate"] is None else f"{node['draft_acceptance_rate']:.2f}",
        f"{1000 * node['latency_seconds']:.1f}",
        f"{1000 * node['load_seconds']:.1f}",
        str(node["drafts"]),
        str(node["late"]),
        str(node["lost"]),
        f"{node['cost_per_hour']:g}",
    )


def _drafter(text: str) -> dict[str, Any]:
    """A drafter of the command line: the name of a method, or a JSON object."""
    from cospec.config import read_json

    return read_json(text, "drafter") if text.lstrip().startswith("{") else {"method": text}


def _note(sentence: str) -> None:
    print(sentence, flush=True)
