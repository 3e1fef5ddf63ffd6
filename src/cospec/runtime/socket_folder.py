"""Where the socket between server and engine lies."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import zmq

SOCKET = "engine-{}"  # with the number of the process
MOST = 10**9  # processes that a server starts
SHORT = "/tmp"  # on all systems that cospec runs on


def socket_folder() -> Path:
    """A new folder that only this user can enter, short enough for the address of a socket inside.

    Operating systems bound such addresses (104 bytes on macOS, 108 on Linux), while ``TMPDIR`` may be longer.
    """
    folder = tempfile.mkdtemp(prefix="cospec-")
    if len(os.fsencode(os.path.join(folder, SOCKET.format(MOST)))) > zmq.IPC_PATH_MAX_LEN:
        shutil.rmtree(folder)
        folder = tempfile.mkdtemp(prefix="cospec-", dir=SHORT)
    return Path(folder)
