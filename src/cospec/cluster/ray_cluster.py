"""Start Ray on this machine, or join a Ray cluster that runs; watch its head.

A Ray cluster of our own listens on this machine only, as far as Ray allows, and needs a token. The cluster has no
dashboard, shows no metrics, sends no usage statistics, and ends with this process. Where Ray keeps its state in Redis,
a head that ends is started again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cospec.cluster import state_file
from cospec.cluster.config import Machine
from cospec.errors import CospecError, InvalidInput, words

LOOK_SECONDS = 1.0
LEAVE_SECONDS = 5.0  # for Ray to end in order
HEAD = "gcs_server"  # the program of Ray's head
REDIS = "RAY_REDIS_ADDRESS"  # environment variable of Ray
RESTART_SECONDS = 0.5  # between the end of a head and its restart
SHORT_SECONDS, MOST_SHORT = 10.0, 3  # heads in a row that end so soon, after which no head is started
WITH_PARENT = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
os.execv(sys.argv[1], sys.argv[1:])
"""  # becomes a program that is killed when its parent dies, and that Ctrl-C does not end
# No usage statistics, all log lines, and no connection that nothing asked for. Ray's processes have the usual priority:
# at Ray's default, a niceness of 15, engines get almost no time on a processor that another process keeps busy.
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ENABLE_AUTO_CONNECT": "0",
    "RAY_worker_niceness": "0",
}
NO_METRICS = {  # no port with metrics, which Ray opens on all interfaces and without a token
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "65536",  # no port has this number, so Ray starts no server
    "DASHBOARD_METRIC_PORT": "65536",
}


_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RayHead:
    """The head of the Ray cluster that this process is connected to.

    Attributes:
        address: ``host:port``.
        restarts: how often this process has started the head again.
    """

    address: str
    restarts: int = 0


class RayHeadLost(CospecError):
    """Ray's head has ended and did not come back."""


def import_ray() -> Any:
    """Import ray.

    Raises:
        InvalidInput: ray is not installed.
    """
    os.environ.update({key: os.environ.get(key, value) for key, value in ENVIRONMENT.items()})
    try:
        import ray
    except ImportError:
        raise InvalidInput("ray", words("not installed"), "an installation by pip install 'cospec[cluster]'") from None
    return ray


@contextlib.contextmanager
def start(name: str, machine: Machine) -> Iterator[RayHead]:
    """Start Ray on this machine for the time of the block, and yield the head.

    Raises:
        InvalidInput: ray is not installed.
    """
    token = state_file.make_token(name)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), **NO_METRICS}
    ray = import_ray()
    context = ray.init(
        address="local",
        num_cpus=machine.num_cpus,
        num_gpus=machine.num_gpus,
        resources=dict(machine.resources),
        labels=dict(machine.labels),
        object_store_memory=machine.object_store_memory,
        include_dashboard=False,
        namespace=name,
        logging_level=logging.ERROR,
    )
    import psutil

    this = psutil.Process()
    below = this.children(recursive=True)  # now, because a process whose parent dies is no longer found
    head, restarts, patience = RayHead(context.address_info["gcs_address"]), None, LEAVE_SECONDS
    try:
        if os.environ.get(REDIS):
            restarts = HeadRestarts(head, next(each for each in below if each.is_running() and each.name() == HEAD))
        yield head
    except RayHeadLost:
        patience = 0.0  # Ray does not end in order without its head
        raise
    finally:
        if restarts is not None:
            restarts.stop()
        below += this.children(recursive=True)
        _leave(ray, patience)
        if restarts is not None:
            restarts.kill()
        _end(below, patience)
        state_file.remove(name)


@contextlib.contextmanager
def join(name: str, address: str, token_path: str = "") -> Iterator[RayHead]:
    """Connect to a Ray cluster for the time of the block, and yield the head.

    Raises:
        InvalidInput: no Ray cluster answers at ``address``, or ray is not installed.
    """
    if token_path:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": token_path}
    ray = import_ray()
    try:
        context = ray.init(address=address, namespace=name, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InvalidInput("address", words(f"{address} ({reason})"), "the address of a running Ray cluster") from None
    try:
        yield RayHead(context.address_info["gcs_address"])
    finally:
        _leave(ray, LEAVE_SECONDS)


def _leave(ray: Any, patience: float) -> None:
    """Disconnect; a head that is gone does not answer, so there is a time limit."""
    leaving = threading.Thread(target=ray.shutdown, daemon=True)
    leaving.start()
    leaving.join(patience)


def _end(processes: Sequence[Any], patience: float) -> None:
    """End processes of Ray that do not end by themselves, such as agents whose head was killed."""
    import psutil

    _, running = psutil.wait_procs(processes, patience)
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


class HeadRestarts:
    """Starts Ray's head again when its process ends; the new process reads the state of the old one from Redis.

    Args:
        head: counts the restarts. The first process chose the port; all processes of Ray know it.
        process: the ``psutil.Process`` of the head.
    """

    def __init__(self, head: RayHead, process: Any) -> None:
        self._head, port = head, head.address.rpartition(":")[2]
        flags = [*process.cmdline()[1:], f"--gcs_server_port={port}"]  # the last of two flags counts
        self._command, self._environment = [process.exe(), *flags], process.environ()
        self._starting, self._closing = threading.Lock(), threading.Event()
        self._started: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._run, args=(process,), name="cospec-head", daemon=True).start()

    def stop(self) -> None:
        """Start no further head. The present one goes on, because Ray ends in order only with a head."""
        self._closing.set()

    def kill(self) -> None:
        """End the head that was started."""
        with self._starting:
            if self._started is not None:
                self._started.kill()

    def _run(self, process: Any) -> None:
        """Wait and start again, until closed. The end of this thread ends the head, so the thread waits for it."""
        short, since = 0, time.monotonic()
        while True:
            process.wait()
            short = short + 1 if time.monotonic() - since < SHORT_SECONDS else 0
            if short == MOST_SHORT:
                _log.error("Ray's head ended %d times in a row after less than %g s", MOST_SHORT, SHORT_SECONDS)
                return
            if self._closing.wait(RESTART_SECONDS):
                return
            with self._starting:
                if self._closing.is_set():
                    return
                process = self._started = subprocess.Popen(
                    [sys.executable, "-c", WITH_PARENT, *self._command],
                    env=self._environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                )  # fmt: skip
            since = time.monotonic()
            self._head.restarts += 1
            _log.warning("Ray's head ended, and was started again as process %d; its state is in Redis", process.pid)


class RayHeadWatch:
    """Checks whether Ray's head accepts connections.

    Args:
        address: of the head, ``host:port``.
        patience: seconds without the head, after which the cluster counts as lost.
    """

    def __init__(self, address: str, patience: float) -> None:
        host, _, port = address.rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._patience = patience
        self._missing = 0.0

    def check(self, elapsed: float) -> None:
        """Take a look, ``elapsed`` seconds after the look before.

        Raises:
            RayHeadLost: the head has been away for longer than ``patience``.
        """
        try:
            socket.create_connection(self._address, timeout=LOOK_SECONDS).close()
        except OSError:
            self._missing += elapsed
        else:
            self._missing = 0.0
        if self._missing >= self._patience:
            host, port = self._address
            raise RayHeadLost(
                f"The head of the Ray cluster at {host}:{port} has been away for {self._patience:g} seconds, so the "
                "cluster stops; unfinished requests can be submitted again."
            )
