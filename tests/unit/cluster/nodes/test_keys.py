"""Keys of verifier and nodes, and addresses that need keys."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from cospec.cluster.nodes.hub import NodeHub
from cospec.cluster.nodes.hub_options import NodesOptions, check_address, zeromq
from cospec.cluster.nodes.keys import make_keys, secure_node
from cospec.errors import CospecError, InvalidInput

pytest.importorskip("zmq")


def test_make_keys_writes_each_key_once(tmp_path: Path) -> None:
    made = make_keys(tmp_path, ["small-1", "small-2"])
    assert [path.name for path in made] == ["verifier.key_secret", "small-1.key_secret", "small-2.key_secret"]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in made)
    assert sorted(path.name for path in (tmp_path / "nodes").iterdir()) == ["small-1.key", "small-2.key"]
    verifier = made[0].read_bytes()
    assert [path.name for path in make_keys(tmp_path, ["small-3"])] == ["small-3.key_secret"]
    assert made[0].read_bytes() == verifier
    with pytest.raises(InvalidInput, match="a name without a key"):
        make_keys(tmp_path, ["small-1"])
    with pytest.raises(InvalidInput, match="letters, digits"):
        make_keys(tmp_path, ["../other"])


def test_a_node_needs_one_secret_key(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="0 secret keys"):
        secure_node(None, tmp_path)
    make_keys(tmp_path, ["a", "b"])
    with pytest.raises(InvalidInput, match="2 secret keys"):
        secure_node(None, tmp_path)


@pytest.mark.parametrize("address", ["tcp://0.0.0.0:5710", "tcp://10.0.0.2:5710", "tcp://*:5710"])
def test_other_machines_need_keys(address: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="without keys"):
        check_address("address", address, None)
    check_address("address", address, tmp_path)
    with pytest.raises(InvalidInput, match=r"speculative_config.drafter_nodes.bind is .* without keys"):
        NodeHub(NodesOptions(bind=address), 6).add("a", "ngram", False)


def test_a_wrong_address_is_one_sentence() -> None:
    with pytest.raises(InvalidInput, match=r"which cannot be bound .* allowed is a free address"):
        NodeHub(NodesOptions(bind="tcp://127.0.0.1:nothing"), 6).add("a", "ngram", False)


def test_without_zeromq_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    with pytest.raises(CospecError, match=r"pip install cospec\[cluster\]"):
        zeromq()
