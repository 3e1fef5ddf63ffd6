"""Keys of verifier and nodes: CurveZMQ encrypts all messages, and both ends prove that they know their secret keys.

``make_keys`` writes a folder::

    verifier.key          public key of the verifier: for every node
    verifier.key_secret   stays at the verifier
    nodes/NAME.key        public keys that the verifier admits
    NAME.key_secret       secret key of one node: goes to this node alone
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cospec.cluster.nodes.hub_options import zeromq
from cospec.errors import CospecError, InvalidInput, words

VERIFIER, NODES = "verifier", "nodes"


def make_keys(folder: Path, names: Sequence[str]) -> list[Path]:
    """Write keys of the verifier, unless present, and of nodes; returns the new files with secret keys.

    Raises:
        InvalidInput: a name is no file name, or has a key.
    """
    _require_curve()
    from zmq.auth import create_certificates

    for name in names:
        if not name.isidentifier() and not name.replace("-", "_").isidentifier():
            raise InvalidInput("node name", name, "letters, digits, - and _")
        if name == VERIFIER or (folder / f"{name}.key_secret").exists():
            raise InvalidInput("node name", name, f"a name without a key in {folder}")
    public = folder / NODES
    public.mkdir(parents=True, exist_ok=True, mode=0o700)
    made = []
    for name in names if (folder / f"{VERIFIER}.key_secret").exists() else [VERIFIER, *names]:
        _, secret = create_certificates(folder, name)
        Path(secret).chmod(0o600)
        made.append(Path(secret))
        if name != VERIFIER:
            (folder / f"{name}.key").rename(public / f"{name}.key")
    return made


class AdmittedNodes:
    """Has a socket admit the nodes of a folder only; keys may come and go while the verifier runs.

    Raises:
        InvalidInput: a key file is missing.
    """

    def __init__(self, socket: Any, context: Any, folder: Path) -> None:
        _require_curve()
        from zmq.auth.thread import ThreadAuthenticator

        socket.curve_publickey, socket.curve_secretkey = _load(folder / f"{VERIFIER}.key_secret")
        socket.curve_server = True
        self._folder = folder / NODES
        self._files: list[tuple[str, int]] = []  # names and times of the files with ``_keys``
        self._keys: frozenset[bytes] = frozenset()
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)
        self._authenticator.start()

    def admits(self, user: str) -> bool:
        """Whether the folder has the public key of a user."""
        return self.callback("*", user.encode())

    def callback(self, domain: str, key: bytes) -> bool:
        """The same for a new connection; the authenticator's thread calls this method."""
        from zmq.auth import load_certificates

        with suppress(OSError, ValueError):  # a file is written or removed at this moment
            files = sorted([(path.name, path.stat().st_mtime_ns) for path in self._folder.glob("*.key")])
            if files != self._files:
                self._keys, self._files = frozenset(load_certificates(self._folder)), files
        return key in self._keys

    def stop(self) -> None:
        """End the authenticator's thread."""
        self._authenticator.stop()


def secure_node(socket: Any, folder: Path) -> None:
    """Have ``socket`` connect with the keys of a node's folder: ``verifier.key`` and one ``NAME.key_secret``.

    Raises:
        InvalidInput: a key file is missing, or the folder has several secret keys of nodes.
    """
    _require_curve()
    secrets = sorted(path for path in folder.glob("*.key_secret") if path.stem != VERIFIER)
    if len(secrets) != 1:
        found = words(f"{folder}, which has {len(secrets)} secret keys of nodes")
        raise InvalidInput("keys", found, "a folder with verifier.key and one NAME.key_secret")
    socket.curve_publickey, socket.curve_secretkey = _load(secrets[0])
    socket.curve_serverkey, _ = _load(folder / f"{VERIFIER}.key", secret=False)


def _load(path: Path, secret: bool = True) -> tuple[bytes, bytes | None]:
    from zmq.auth import load_certificate

    try:
        public, own = load_certificate(path)
    except (OSError, ValueError):
        raise InvalidInput("keys", words(f"{path}, which is no readable key"), "a folder of cospec node keys") from None
    if secret and own is None:
        raise InvalidInput("keys", words(f"{path}, which has no secret key"), "a folder of cospec node keys")
    return public, own


def _require_curve() -> None:
    if not zeromq().has("curve"):
        raise CospecError("This build of ZeroMQ cannot encrypt; install pyzmq with libsodium.")
