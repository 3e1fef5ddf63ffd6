"""Stages on stage hosts write the tokens of one process; hosts let in who knows the token, and leave nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from cospec.cli.main import app
from cospec.core.model_io import SequenceSlice, TokenBatch
from cospec.core.types import FinishReason
from cospec.distributed.links import Address, greet
from cospec.distributed.stage_host import ADMITTED
from cospec.drafters.model import ModelDrafter
from cospec.errors import InvalidInput, ModelError
from cospec.models.loading import LoadOptions
from harness.llamas import PAGE, llama_engine, load
from harness.sharded_targets import PARAMS, Folders, disturbed, outputs, running, sharded
from harness.shards import ShardsHere
from harness.stage_hosts import HostProcess
from harness.toys import tokens_of
from harness.waiting import until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders.write(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "stage.token"
    assert CliRunner().invoke(app, ["stage", "token", str(file)]).exit_code == 0
    return file


@pytest.fixture(scope="module")
def hosts(token: Path) -> Iterator[list[HostProcess]]:
    with HostProcess(token) as first, HostProcess(token) as second:
        yield [first, second]


@pytest.fixture(scope="module")
def machines(hosts: list[HostProcess]) -> tuple[str, ...]:
    return tuple(host.address for host in hosts)


def test_tokens_are_those_of_one_process(
    folders: Folders, hosts: list[HostProcess], machines: tuple[str, ...], token: Path
) -> None:
    """Also when a stage freezes, which its host then ends by force."""
    drafter, wanted = ModelDrafter(load(folders.drafter)), dict[str, dict[str, tuple[int, ...]]]()
    with sharded(folders, 2, stage_machines=machines, stage_token_file=token, stage_timeout=5.0) as target:
        assert [len(host.stages) for host in hosts] == [1, 1]
        for name, params in PARAMS.items():
            wanted[name] = outputs(load(folders.target), None, params)
            assert outputs(target, drafter, params, k=3) == wanted[name]
        (frozen,) = hosts[0].stages
        found = disturbed(llama_engine(target, drafter, k=3), partial(os.kill, frozen, signal.SIGSTOP))
        assert tokens_of(found) == wanted["seeded"]
        until(lambda: not running(frozen))
    until(lambda: not any(host.stages for host in hosts))


def test_shards_sum_as_in_one_process(
    folders: Folders, hosts: list[HostProcess], machines: tuple[str, ...], token: Path
) -> None:
    """PP 2 x TP 2: the shards of a stage share a machine, and logits have the bits of shards in one process."""
    here = ShardsHere(folders.target, 2, 2, LoadOptions(page_size=PAGE))
    with sharded(folders, 2, 2, stage_machines=machines, stage_token_file=token) as target:
        assert [len(host.stages) for host in hosts] == [2, 2]
        batch, found = TokenBatch((SequenceSlice("a", 0, tuple(range(20)), (-1, 0, -1), 3),)), []
        for each in (here, target):
            each.pages.allocate("a", 48)
            found.append(each.forward(batch))
        assert torch.equal(*found)
        target.free(["a"])
        for name in ("greedy", "seeded"):
            drafted = outputs(target, ModelDrafter(load(folders.drafter)), PARAMS[name], k=3)
            assert drafted == outputs(target, None, PARAMS[name])
    until(lambda: not any(host.stages for host in hosts))


def test_who_does_not_know_the_token_gets_no_process(
    folders: Folders, hosts: list[HostProcess], machines: tuple[str, ...], tmp_path: Path, token: Path
) -> None:
    other = tmp_path / "other.token"
    other.write_text("x" * 64)
    with (
        pytest.raises(ModelError, match=f"No stage host starts stage 0: {machines[0]} refuses the token"),
        sharded(folders, 2, stage_machines=machines[:1], stage_token_file=other),
    ):
        pass
    host, _, port = machines[0].rpartition(":")
    for sent in (b"", b"GET / HTTP/1.1\r\nHost: stage\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5) as stranger:
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):  # the host has not read everything
                assert stranger.recv(1) == b""
    assert not hosts[0].stages
    with greet(Address(host, int(port)), token.read_text().strip()) as known:
        assert known.recv(1) == ADMITTED
        until(lambda: len(hosts[0].stages) == 1)
    until(lambda: not hosts[0].stages)


def test_a_lost_host_costs_no_token(folders: Folders, token: Path) -> None:
    """Without the second host both stages run on the first; without both, each request ends with one sentence."""
    drafter = ModelDrafter(load(folders.drafter))
    wanted = outputs(load(folders.target), None, PARAMS["seeded"])
    with HostProcess(token) as first, HostProcess(token) as second:
        machines = first.address, second.address
        with sharded(folders, 2, stage_machines=machines, stage_token_file=token, stage_timeout=5.0) as target:
            engine, old = llama_engine(target, drafter, k=3), [*first.stages, *second.stages]
            assert tokens_of(disturbed(engine, second.process.kill)) == wanted
            assert engine.metrics().verifier_losses == 1 and target.pipeline.starts == 2
            until(lambda: not any(map(running, old)))
            last = first.stages
            assert len(last) == 2
            ends = [own[-1] for own in disturbed(llama_engine(target, None), first.process.kill).values()]
            sentence = f"{first.address} does not answer, {second.address} does not answer"
            assert all(end.finish is FinishReason.ERROR and sentence in (end.error or "") for end in ends)
            until(lambda: not any(map(running, last)))


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"stage_machines": ("10.0.0.2",)}, "stage_machines"),
        ({"stage_machines": ("10.0.0.2:1",), "stage_token_file": None}, "stage_token_file"),
        ({"stage_machines": ("10.0.0.2:1",), "stage_hosts": ("10.0.0.2",)}, "stage_hosts"),
    ],
)
def test_wrong_options_name_their_field(folders: Folders, token: Path, given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInput) as error, sharded(folders, 2, **{"stage_token_file": token, **given}):
        pass
    assert error.value.field == field


def test_a_short_token_and_a_second_token_are_refused(tmp_path: Path, token: Path) -> None:
    short = tmp_path / "short.token"
    short.write_text("secret")
    for command, part in (
        (["host", "--address", "127.0.0.1:0", "--token-file", str(short)], "with 6 characters"),
        (["host", "--address", "127.0.0.1", "--token-file", str(token)], "allowed is HOST:PORT"),
        (["token", str(token)], "allowed is a new file"),
    ):
        result = CliRunner().invoke(app, ["stage", *command])
        assert result.exit_code == 1 and part in result.stdout + result.stderr
